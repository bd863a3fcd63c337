# SPDX-License-Identifier: Apache-2.0
"""A script that the original serves as well as we do: what came in is told, measured beside that, and joined."""

# pyright: reportMissingImports=false

import threading
from pathlib import Path

import numpy as np
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp


def told(value):
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}{value.tolist()}"
    return f"{type(value).__name__} {value}"


refused = threading.Event()
ARRAYS = {
    "objects": np.array([1, "a", None], object),
    "complex": np.array([1 + 2j, 0.5]),
    "dates": np.array(["2020-01-01"], "datetime64[D]"),
    "bytes": np.array([b"ab"]),
    "texts": np.array(["a", "bc"]),
    "numbers": np.array([[1, 2], [3, 4]], np.int32),
}


class Read(RequestOp):
    def unpack_request_package(self, request):
        given, log_id, code, text = super().unpack_request_package(request)
        given["clientip"] = request.clientip
        return given, log_id, code, text


class Tell(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        if "late" in given:  # only when the other branch has failed
            assert refused.wait(60)
        if "fail" in given:
            return {}, False, 71, "refused"
        if "raise" in given:
            raise ValueError(given["raise"])
        if "echo" in given or "make" in given:
            return given, False, None, ""
        return {name: told(value) for name, value in given.items()} | {"log": str(log_id)}, False, None, ""


class Measure(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        if "second" in given:
            refused.set()
            return {}, False, 72, "refused as well"
        return {"size": str(sum(np.size(value) for value in given.values()))}, False, None, ""


class Join(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        found = dict(input_dicts["tell"])
        if "make" in found:
            return {"made": ARRAYS[found["make"]]}, False, None, ""
        if "echo" in found:
            arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
            return arrays or {"echo": [1]}, False, None, ""
        return found | input_dicts["measure"], False, None, ""


read = Read()
join = Join("join", input_ops=[Tell("tell", input_ops=[read]), Measure("measure", input_ops=[read])])
server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[join]))
server.prepare_server(str(Path(__file__).with_name("config.yml")))
server.run_server()
