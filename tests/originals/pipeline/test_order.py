# SPDX-License-Identifier: Apache-2.0
"""The order in which an op gets its inputs, beside that of the original's own channels."""

# pyright: reportIncompatibleMethodOverride=false

from typing import Any

import pytest
from tests.originals.replay import assert_as_recorded, exchanges

from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import REQUEST, Op, RequestOp, ResponseOp


class Join(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        return {}, False, None, ""


@pytest.mark.parametrize("exchange", exchanges("pipeline/order.json"))
def test_inputs_come_in_the_order_of_the_original(exchange):  # F106
    ops: dict[str, Any] = {"@": RequestOp()}
    for name, inputs in exchange.request["input_ops"].items():
        ops[name] = Join(name=name, input_ops=[ops[one] for one in inputs])
    settings, _ = read({"rpc_port": 18080})
    dag = wire("g", ResponseOp(input_ops=[ops["last"]]), settings)
    found = {node.name: [name.replace(REQUEST, "@") for name in node.inputs] for node in dag.spec.nodes}
    assert_as_recorded(exchange, {"order": found})
