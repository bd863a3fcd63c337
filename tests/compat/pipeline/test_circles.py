# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""No request leaves anything in a circle, however it ends."""

import pytest
from tests.circles import left_in_circles
from tests.compat.pipeline.conftest import ask

from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp

CALLS = 20


class Raises(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        raise ValueError("no")


class Processes(Op):
    def init_op(self):
        self.client = object()  # or it has nothing to process with

    def process(self, feed_batch, typical_logid):
        return feed_batch[0]


class RaisesInProcess(Processes):
    def process(self, feed_batch, typical_logid):
        raise ValueError("no")


class RaisesAtTheEnd(ResponseOp):
    def pack_response_package(self, channeldata):
        raise ValueError("no")


@pytest.mark.parametrize("last, number", [
    (lambda: Raises(name="a", input_ops=[RequestOp()]), 10000),
    (lambda: Processes(name="a", input_ops=[RequestOp()], timeout=60_000), 0),
    (lambda: RaisesInProcess(name="a", input_ops=[RequestOp()], timeout=60_000), 10000),
    (lambda: RaisesAtTheEnd(input_ops=[Op(name="a", input_ops=[RequestOp()])]), 8000),
])  # fmt: skip
def test_a_request_leaves_nothing_in_a_circle(hosted, last, number):
    async def use(service):
        assert (await ask(service, q="1")).err_no == number
        with left_in_circles() as left:
            for _ in range(CALLS):
                await ask(service, q="1")
        return left

    left = hosted(last(), use)
    assert len(left) < CALLS, sorted(set(left))
