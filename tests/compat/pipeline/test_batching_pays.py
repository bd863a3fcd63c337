# SPDX-License-Identifier: Apache-2.0
"""What batches are for: a call's overhead is paid once for all samples in it."""

# pyright: reportIncompatibleMethodOverride=false

import asyncio
import time

import numpy as np
import pytest
from tests.compat.pipeline.conftest import ask, values_of

from forebay.surfaces.pipeline.ops.op import Op, RequestOp

SAMPLES = 64
OVERHEAD_S, ROW_S = 0.005, 0.001


class Overhead(Op):
    """Takes 5 ms for each call and 1 ms for each row in it."""

    def init_op(self):
        self.calls = []

    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {"x": np.array([[float(given["x"])]])}, False, None, ""

    def process(self, feed_batch, typical_logid):
        (feed,) = feed_batch
        rows = len(feed["x"])
        began = time.perf_counter()
        time.sleep(OVERHEAD_S + rows * ROW_S)
        self.calls.append((rows, time.perf_counter() - began))
        return {"x": feed["x"] * 2}, 0, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"x": str(fetch_data["x"][0, 0])}, None, ""


@pytest.fixture
def calls_of(hosted):
    """Answers 64 requests that come at once; the rows and seconds of each call, and the seconds of it all."""

    def run(**settings):
        op = Overhead(name="overhead", input_ops=[RequestOp()])

        async def use(service):
            began = time.perf_counter()
            found = await asyncio.gather(*(ask(service, x=str(number)) for number in range(SAMPLES)))
            taken_s = time.perf_counter() - began
            assert [float(values_of(one)["x"]) for one in found] == [2.0 * number for number in range(SAMPLES)]
            return op.calls, taken_s

        return hosted(op, use, {"op": {"overhead": {"run_process": True, **settings}}})

    return run


def test_trap_31_batches_pay_where_a_call_has_overhead(calls_of):
    # trap 31, P77, P143: what convolutions on a CPU do not show
    alone, alone_s = calls_of()
    together, together_s = calls_of(batch_size=16, auto_batching_timeout=60_000)
    assert [rows for rows, _ in alone] == [1] * SAMPLES
    assert sum(rows for rows, _ in together) == SAMPLES
    assert len(together) <= SAMPLES // 8
    costs = {  # the least, for a busy machine makes some of them longer
        rows: min(seconds for one, seconds in calls if one == rows) / rows
        for rows, calls in ((1, alone), (16, together))
    }
    # 6 ms for a request alone, 1.3 ms for one of 16: more than four times as many in the same time.
    assert costs[1] > 2 * costs[16]
    assert together_s < alone_s
