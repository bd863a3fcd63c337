# SPDX-License-Identifier: Apache-2.0
"""Graphs behind the real command, asked by the client that the original's documentation uses; see `triton_client.py`.

One server has a graph for each thing that is to be seen, and one run of the client makes all checks.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from tests.compat.ovms.conftest import LOOPBACK, graph_text, python_node, write
from tests.compat.ovms.test_openvino import inference, save, session, to_openvino, to_python
from tests.waiting import PATIENCE_S, eventually

SERVING = health_pb2.HealthCheckResponse.SERVING
HERE = Path(__file__).parent
PYTHON = HERE.parents[2] / ".venv/environments/kserve-clients/bin/python"
CHECKS = re.findall(r"^def (\w+)\(\):  # O", (HERE / "triton_client.py").read_text(), re.MULTILINE)

HEAD = """
import json, threading, time
from pathlib import Path
import numpy as np
from pyovms import Tensor
class OvmsPythonModel:
    def initialize(self, kwargs):
        self.kwargs = kwargs
        self.name = kwargs["output_names"][0]
"""
EXECUTE = {
    "echo": """
        (one,) = inputs
        if bytes(one) == b"bad":
            raise ValueError("bad pixel")
        return [Tensor(self.name, one, shape=one.shape, datatype=one.datatype)]""",
    "plus": """
        array = np.array(inputs[0])
        return [Tensor(self.name, (array + np.ones((), array.dtype)).astype(array.dtype))]""",
    "ten": """
        array = np.array(inputs[0])
        return [Tensor(self.name, array + array.dtype.type(10))]""",
    "told": """
        print("said by a handler")
        told = [[t.name, t.datatype, t.shape, t.data.format, t.data.shape, t.size] for t in inputs]
        return [Tensor(self.name, json.dumps(told).encode())]""",
    "layouts": """
        six = np.arange(6)
        arrays = {
            "strided": np.arange(10)[::2], "reversed": np.arange(4)[::-1],
            "transposed": six.astype("f4").reshape(2, 3).T,
            "fortran": np.asfortranarray(six.astype("i2").reshape(2, 3)),
            "middle": np.arange(24, dtype="u1").reshape(2, 3, 4)[:, 1:, ::2],
            "broadcast": np.broadcast_to(np.float64(7), (2, 2)), "empty": "".encode(),
        }
        return [Tensor(name, array) for name, array in arrays.items()]""",
    "sorted": """
        told = {key: self.kwargs[key] for key in ("input_names", "output_names")}
        return [Tensor(self.name, json.dumps({"order": [one.name for one in inputs], **told}).encode())]""",
    "many": """
        said = bytes(inputs[0])
        return [Tensor(name, said) for name in ("c",) + (() if said == b"only c" else ("b", "a"))]""",
    "counts": """
        self.count = getattr(self, "count", 0) + 1
        return [Tensor(self.name, b"%d" % self.count)]""",
    "returns": """
        said = bytes(inputs[0]).decode()
        one = Tensor(self.name, b"good")
        values = {"good": [one], "none": None, "number": 3, "bare": one, "mixed": [one, 3], "twice": [one, one]}
        values |= {"unknown": [Tensor("nope", b"")], "generator": iter([[one]])}
        return values[said]""",
    "together": """
        said = bytes(inputs[0])
        if said == b"never":
            time.sleep(1)
            return [Tensor(self.name, said)]
        OvmsPythonModel.gate.wait(60)
        return [Tensor(self.name, said)]
    gate = threading.Barrier(4)""",
    "count": """
        count, _, then = bytes(inputs[0]).decode().partition(" ")
        for step in range(int(count)):
            yield [Tensor("output", b"%d" % step)]
        if then:
            raise RuntimeError("enough")""",
    "gaps": """
        for item in ([Tensor("output", b"0")], [], [], [Tensor("output", b"3")]):
            yield item""",
    "gate": """
        yield [Tensor("output", b"0")]
        while not Path(__file__).with_name("open").exists():
            time.sleep(0.005)
        yield [Tensor("output", b"1")]""",
    "forever": """
        try:
            while True:
                yield [Tensor("output", b"x")]
        except GeneratorExit:
            if bytes(inputs[0]) == b"mark":
                Path(__file__).with_name("closed").touch()
            raise""",
    "reuse": """
        buffer = np.zeros(4, np.uint8)
        for step in range(int(bytes(inputs[0]))):
            buffer[:] = step
            yield [Tensor("output", buffer)]""",
    "signals": """
        for character in bytes(inputs[0]):
            yield [Tensor("output", bytes([character]))]
        yield [Tensor("end_signal", "".encode())]""",
    "names": """
        return [Tensor(self.name, " ".join(one.name for one in inputs).encode())]""",
    "labels": """
        for one in inputs:
            if one.name == "input":
                self.labels = bytes(one)
            else:
                return [Tensor(self.name, self.labels + b" " + bytes(one))]""",
    "each": """
        for one in inputs:
            yield [Tensor("output", one)]""",
    "ended": """
        return [Tensor(self.name, b"served")]
    def finalize(self):
        Path(__file__).with_name("ended").touch()""",
}

IMMEDIATE = 'input_stream_handler { input_stream_handler: "ImmediateInputStreamHandler" }'


def graph(inputs=("input",), outputs=("output",), *, more="", side=""):
    """One node that runs `model.py`; tags of its inputs are their names in capitals."""
    front = [f"OVMS_PY_TENSOR_{name.upper()}:{name}" for name in inputs]
    back = [f"OVMS_PY_TENSOR_{name.upper()}:{name}" for name in outputs]
    tags = [[f"{name.upper()}:{name}" for name in side] for side in (inputs, outputs)]
    return side + graph_text(front, back, python_node("n", *tags, more=more))


GRAPHS = {
    **{name: (graph(), name) for name in ("echo", "plus", "told", "counts", "returns", "together", "ended")},
    **{name: (graph(more=LOOPBACK), name) for name in ("count", "gaps", "gate", "forever", "reuse")},
    "signals": (graph(outputs=("output", "end_signal"), more=LOOPBACK), "signals"),
    "loop_returns": (graph(more=LOOPBACK), "echo"),
    "broken": ("node {", "echo"),
    "typed": (graph(), "echo"),
    "layouts": (
        graph(outputs=("strided", "reversed", "transposed", "fortran", "middle", "broadcast", "empty")),
        "layouts",
    ),
    "sorted": (graph(inputs=("in10", "in2", "in1")), "sorted"),
    "many": (graph(outputs=("c", "a", "b")), "many"),
    "side": (graph(side='input_side_packet: "VAL:val"\n'), "echo"),
    "default": (graph(inputs=("input", "other")), "names"),
    "barrier": (graph(inputs=("input", "other"), more=IMMEDIATE.replace("Immediate", "Barrier")), "names"),
    "immediate": (graph(inputs=("input", "other"), more=IMMEDIATE), "labels"),
    "sets": (graph(inputs=("input", "other"), more=LOOPBACK), "each"),
    "image": (
        graph_text(
            ["IMAGE:input"],
            ["IMAGE:output", "OVMS_PY_TENSOR:plus"],
            'node { calculator: "PassThroughCalculator" input_stream: "IMAGE:input" output_stream: "IMAGE:output" }',
            python_node("n", ["IMAGE:input"], ["OUT:plus"]),
        ),
        "plus",
    ),
    "chain": (
        graph_text(
            ["OVMS_PY_TENSOR:input"],
            ["OVMS_PY_TENSOR:output"],
            *(
                python_node(f"n{at}", [f"A:{one}"], [f"B:{two}"])
                for at, (one, two) in enumerate([("input", "x"), ("x", "y"), ("y", "output")])
            ),
        ),
        "echo",
    ),
    "mixed": (
        graph_text(
            ["OVMS_PY_TENSOR:input"],
            ["OVMS_PY_TENSOR:output"],
            python_node("before", ["A:input"], ["B:one"]),
            session("add"),
            to_openvino("one", "two"),
            inference(["OVTENSOR:two"], ["OVTENSOR:three"]),
            to_python("three", "four", "called"),
            python_node("after", ["A:four"], ["B:output"]),
        ),
        "ten",
    ),
    "sessionless": (
        graph_text(
            ["OVTENSOR:input"], ["OVTENSOR:output"], session("nope"), inference(["OVTENSOR:input"], ["OVTENSOR:output"])
        ),
        "echo",
    ),
    "converted": (
        graph_text(["OVTENSOR:input"], ["OVMS_PY_TENSOR:output"], to_python("input", "output", "zzz")),
        "echo",
    ),
}


def grpc_of(server):
    found = re.search(r"gRPC at ([\d.:]+)", server.log)
    assert found is not None
    return found[1]


@pytest.fixture(scope="module")
def checked(launch, tmp_path_factory):
    """What came of every check."""
    if not PYTHON.exists():
        pytest.skip("make environment NAME=kserve-clients makes what this needs")
    pytest.importorskip("openvino")
    folder = tmp_path_factory.mktemp("graphs")
    for version in (1, 2):
        save(folder / f"add/{version}/add.xml")
    graphs: list = [{"name": name} for name in GRAPHS]
    graphs[[*GRAPHS].index("typed")]["metadata"] = {"inputs": {"input": {"datatype": "FP32", "shape": [-1]}}}
    models = [{"config": {"name": "add", "base_path": "add"}}]
    write(folder, {"config.json": json.dumps({"model_config_list": models, "mediapipe_config_list": graphs})})
    for name, (text, handler) in GRAPHS.items():
        write(
            folder,
            {
                f"{name}/graph.pbtxt": text,
                f"{name}/model.py": f"{HEAD}    def execute(self, inputs):{EXECUTE[handler]}\n",
            },
        )
    server = launch(folder, "--grpc-port", "0", "--manage")
    command = [PYTHON, HERE / "triton_client.py", grpc_of(server), server.url.removeprefix("http://"), folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return dict(map(json.loads, ran.stdout.splitlines())), ran.stderr, server


@pytest.mark.parametrize("check", CHECKS)
def test_client(checked, check):
    results, said, _ = checked
    assert results.get(check, said[-3000:]) == ""


def test_health_knows_graphs_and_reflection_the_service(checked):  # O141
    _, _, server = checked
    with grpc.insecure_channel(grpc_of(server)) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        ask = stub.Check
        status = {name: ask(health_pb2.HealthCheckRequest(service=name), timeout=60).status for name in ("", "echo")}
        assert status == {"": SERVING, "echo": SERVING}
        with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
            ask(health_pb2.HealthCheckRequest(service="nobody"), timeout=60)
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {"inference.GRPCInferenceService", "grpc.health.v1.Health"} <= set(services)


def test_what_handlers_print_is_in_the_log(checked):  # T25
    _, _, server = checked
    eventually(lambda: "said by a handler" in server.log, "what a handler printed")


def test_nothing_is_left_of_all_that(checked):
    _, _, server = checked
    eventually(lambda: server.metric("forebay_in_flight") == 0, "the end of all requests and streams")
