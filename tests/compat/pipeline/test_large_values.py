# SPDX-License-Identifier: Apache-2.0
"""Values of tens of megabytes from one process to the next."""

from tests.compat.pipeline.conftest import post

SCRIPT = """
import os
import numpy as np
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Make(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {"x": np.full(int(given["mb"]) << 18, 1.0, dtype="float32"), "pids": [os.getpid()]}, False, None, ""

class Add(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        given["x"] += 1.0
        return {"x": given["x"], "pids": [*given["pids"], os.getpid()]}, False, None, ""

class Tell(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        x, pids = given["x"], {*given["pids"], os.getpid()}
        told = {"bytes": x.nbytes, "lowest": x.min(), "highest": x.max(), "processes": len(pids)}
        return {name: str(value) for name, value in told.items()}, False, None, ""

make = Make(name="make", input_ops=[RequestOp()])
tell = Tell(name="tell", input_ops=[Add(name="add", input_ops=[make])])
server = PipelineServer("svc")
server.set_response_op(ResponseOp([tell]))
server.prepare_server(str(Path(__file__).with_name("config.yml")))
server.run_server()
"""


def test_64_megabytes_go_through_three_processes(pipeline):  # P145
    server = pipeline(SCRIPT, {"dag": {"is_thread_op": False}})
    for _ in range(2):
        found = post(server, mb="64")
        assert found["err_no"] == 0, found
        told = dict(zip(found["key"], found["value"], strict=True))
        assert told == {"bytes": str(64 << 20), "lowest": "2.0", "highest": "2.0", "processes": "3"}
