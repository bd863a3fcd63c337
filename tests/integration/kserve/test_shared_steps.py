# SPDX-License-Identifier: Apache-2.0
"""Streams that share their steps, asked for by gRPC's own client: of a model, and of a graph that ends in one."""

import queue
import random
import threading
from pathlib import Path

import pytest
from tests.conftest import MODELS
from tests.integration.kserve.served import KServed, M, number, stream
from tests.waiting import PATIENCE_S, eventually

from forebay.server.config import Overrides
from forebay.serving.models.model import load_module

served = load_module(MODELS / "streamed_graphs.py")  # as the server imports it
FOREVER, WRONG, State = served.FOREVER, served.WRONG, served.State


@pytest.fixture(scope="module", params=["Numbers thread", "Numbers inline", "numbers thread"])
def port(request):
    name, kind = request.param.split()
    with KServed(f"streamed_graphs.py:{name}", Overrides(worker_kind=kind, timeout_ms=120_000)) as found:
        yield found


@pytest.fixture
def channel(port):
    return port.connect()


def numbers(channel, length, **more):
    """The parts of one stream, as they come."""
    for answer in stream(channel, [number("numbers", length, **more)], timeout=PATIENCE_S):
        found = M.ModelStreamInferResponse.FromString(answer)
        assert not found.error_message, found.error_message
        yield int.from_bytes(found.infer_response.raw_output_contents[0], "little")


def test_who_comes_later_does_not_wait_for_the_first_stream(channel):
    first = numbers(channel, FOREVER)
    assert next(first) == 1
    assert list(numbers(channel, 5)) == [1, 2, 3, 4, 5]
    assert next(first) == 2
    first.close()


def test_streams_of_one_call_share_the_steps(channel):
    """Requests of one call of ModelStreamInfer are streams of their own."""
    asked = [number("numbers", length, id=str(length)) for length in (4, 2, 6)]
    found = {"4": [], "2": [], "6": []}
    for answer in stream(channel, asked, timeout=PATIENCE_S):
        told = M.ModelStreamInferResponse.FromString(answer).infer_response
        found[told.id].append(int.from_bytes(told.raw_output_contents[0], "little"))
    assert found == {"4": [1, 2, 3, 4], "2": [1, 2], "6": [1, 2, 3, 4, 5, 6]}


def test_an_error_on_the_third_part_is_told_at_once_and_others_go_on(channel):
    """It reaches the client before that sends another request."""
    asked = queue.Queue()
    call = stream(channel, iter(asked.get, None), timeout=PATIENCE_S)
    asked.put(number("numbers", WRONG, id="wrong"))
    told = [M.ModelStreamInferResponse.FromString(next(call)) for _ in range(4)]
    assert [bool(one.error_message) for one in told] == [False, False, False, True]
    assert "three are enough" in told[-1].error_message
    asked.put(number("numbers", -1, id="none"))
    assert "no numbers below 0" in M.ModelStreamInferResponse.FromString(next(call)).error_message
    asked.put(number("numbers", 1, id="good"))
    assert M.ModelStreamInferResponse.FromString(next(call)).infer_response.id == "good"
    asked.put(None)
    assert list(call) == []


def test_a_client_that_never_reads_costs_the_others_nothing(port, channel):
    slow = stream(channel, [number("numbers", FOREVER)])
    eventually(lambda: port.endpoint_of("numbers").metrics.parts > 0)
    others = [numbers(port.connect(), 200) for _ in range(3)]
    assert [len(list(one)) for one in others] == [200] * 3
    slow.cancel()
    eventually(lambda: not port.endpoint_of("numbers").in_flight)


def test_a_thousand_streams_that_are_dropped_leave_nothing(port, channel):
    """Neither calls, tasks, bytes, seats, states, threads nor descriptors."""
    dice = random.Random(11)
    shared = port.listener._port
    endpoint = port.endpoint_of("numbers")
    list(numbers(channel, 3))

    def left():
        pool = endpoint.pool if not hasattr(endpoint.pool, "graph") else endpoint.pool.graph.endpoints[0].pool
        taken = pool.statistics().slots - pool.statistics().idle
        return endpoint.in_flight, taken, shared.calls, len(shared.tasks), shared.byte_budget.held_bytes

    eventually(lambda: left() == (0, 0, 0, 0, 0))
    threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        calls = [stream(channel, [number("numbers", dice.choice((2, WRONG, FOREVER)))]) for _ in range(20)]
        for call in calls:
            for _ in range(dice.choice((0, 0, 0, 1, 4))):
                if next(call, None) is None:
                    break
            call.cancel()
    eventually(lambda: left() == (0, 0, 0, 0, 0))
    assert State.alive == 0
    assert threading.active_count() <= threads + 8
    assert len(list(Path("/proc/self/fd").iterdir())) <= files + 2
    assert list(numbers(channel, 2)) == [1, 2]
    assert not port.surprises
