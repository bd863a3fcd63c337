# SPDX-License-Identifier: Apache-2.0
"""No call leaves anything in a circle, however it ends."""

import grpc
import pytest
from tests.circles import left_in_circles
from tests.integration.kserve.served import SERVICE, KServed, number
from tests.waiting import PATIENCE_S, eventually

CALLS = 20
STREAM = f"/{SERVICE}/ModelStreamInfer"


@pytest.fixture(scope="module")
def port():
    with KServed() as port:
        yield port


def leaves(channel):
    """Leaves after the first part."""
    parts = channel.stream_stream(STREAM)(iter([number("forever", 1).SerializeToString()]))
    next(parts)
    parts.cancel()


def says_nothing(channel):
    """Ends a stream before its first request."""
    call = channel.stream_stream(STREAM)(iter([]), timeout=PATIENCE_S)
    assert call.code() == grpc.StatusCode.INVALID_ARGUMENT


def watches(channel):
    """Looks at the health of the server for a while."""
    watching = channel.unary_stream("/grpc.health.v1.Health/Watch")(b"")
    next(watching)
    watching.cancel()


@pytest.mark.parametrize("call", [leaves, says_nothing, watches])
def test_a_stream_leaves_nothing_in_a_circle(port, call):
    channel = port.connect()
    call(channel)
    tasks = port.listener._port.tasks
    with left_in_circles() as left:
        for _ in range(CALLS):
            call(channel)
        eventually(lambda: not tasks)
    assert len(left) < CALLS, sorted(set(left))
