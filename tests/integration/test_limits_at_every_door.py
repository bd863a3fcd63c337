# SPDX-License-Identifier: Apache-2.0
"""The limits of a tenant hold at every door, and each refuses in the words of its protocol."""

import json
import re
import subprocess
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tests.compat.ovms.conftest import config as ovms_config
from tests.compat.ovms.conftest import one_node, write
from tests.conftest import Server
from tests.forked import COMMAND, Forked
from tests.integration.kserve.served import M, request
from tests.integration.tfserving.conftest import M as TFS
from tests.waiting import PATIENCE_S, eventually

from forebay.arrays.numpy_tensors import from_array
from forebay.protocols.kserve.messages import SERVICE
from forebay.surfaces.pipeline.protocol.messages import PATH, Request
from forebay.types.tensor_proto import put

ONE = {"requests_per_s": {"rate": 0.01, "burst": 1}}
"""Nothing of it comes back while a test runs."""

MODELS = """
    from collections.abc import Iterator
    from typing import Literal, TypedDict
    import numpy as np
    import forebay
    from forebay.openai import ChatRequest, Embedding, EmbeddingRequest, RerankRequest
    from forebay.openai import SpeechRequest, TranscriptionRequest

    class Row(TypedDict):
        x: np.ndarray[tuple[Literal[2]], np.dtype[np.float32]]

    class Echo(forebay.Model):
        def predict(self, batch: list[float]) -> list[float]:
            return batch

    class Table(forebay.Model):
        def predict(self, batch: list[Row]) -> list[Row]:
            return batch

    class Parts(forebay.Model):
        def predict(self, batch: list[int]) -> Iterator[list[int]]:
            yield batch

    class Say(forebay.Model):
        max_batch_size = 1
        def predict(self, batch: list[ChatRequest]) -> Iterator[list[str]]:
            yield ["so"]

    class Embed(forebay.Model):
        def predict(self, batch: list[EmbeddingRequest]) -> list[Embedding]:
            return [Embedding([1.0], 1) for _ in batch]

    class Rank(forebay.Model):
        def predict(self, batch: list[RerankRequest]) -> list[float]:
            return [1.0] * len(batch)

    class Voice(forebay.Model):
        def predict(self, batch: list[SpeechRequest]) -> list[bytes]:
            return [b"a"] * len(batch)

    class Ear(forebay.Model):
        def predict(self, batch: list[TranscriptionRequest]) -> list[str]:
            return ["a"] * len(batch)
    """
GRAPH = """
    import forebay

    @forebay.node(worker_kind="thread")
    def same(x: float) -> float:
        return x

    @forebay.compose
    def twice(x: float) -> float:
        return same(same(x))
    """
LENT = """
    from pathlib import Path
    import forebay

    class Lent(forebay.Model):
        repository = "all"

        def load(self, path: Path):
            self.factor = float((path / "factor").read_text())

        def predict(self, batch: list[float]) -> list[float]:
            return [self.factor * one for one in batch]
    """
PIPELINE = """
    from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

    class Same(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            (inputs,) = input_dicts.values()
            return inputs, False, None, ""

    server = PipelineServer("svc")
    server.set_response_op(ResponseOp(input_ops=[Same(name="same", input_ops=[RequestOp()])]))
    server.prepare_server(yml_dict={"http_port": 18081, "worker_num": 4})
    server.run_server()
    """
NUCLEUS_YAML = "type: python\npath: handler.py\n"
RPC_YAML = NUCLEUS_YAML + "protobuf_path: asked.proto\n"
NUCLEUS = """
    class Handler:
        def __init__(self, config=None, proto_module_pb2=None): pass
        def handle_post(self, payload): return payload
    """
RPC = """
    class Handler:
        def __init__(self, proto_module_pb2): pass
        def Ask(self, payload): return payload
        def Again(self, payload): yield payload
    """
PROTO = """
    syntax = "proto3";
    package asked;
    message Number { int64 number = 1; }
    service Numbers {
      rpc Ask (Number) returns (Number);
      rpc Again (Number) returns (stream Number);
    }
    """
VENTU = """
    from pydantic import BaseModel
    from ventu import Ventu

    class Text(BaseModel):
        text: str

    class Same(Ventu):
        def batch_inference(self, batch): return batch

    def create_model(): return Same(Text, Text, use_msgpack=False)

    if __name__ == "__main__":
        create_model().run_http("127.0.0.1", 0)
    """
OVMS = """
    from pyovms import Tensor
    class OvmsPythonModel:
        def execute(self, inputs):
            return [Tensor("output", bytes(inputs[0]), shape=inputs[0].shape, datatype=inputs[0].datatype)]
    """


class Told(NamedTuple):
    """What a client was told."""

    status: Any
    fields: dict[str, str]
    text: str


def post(path, body, **more):
    """A door of HTTP."""

    def ask(server, key):
        answer = server.client.post(path, json=body, headers={"x-api-key": key, **more})
        return Told(answer.status_code, dict(answer.headers), answer.text)

    return ask


def post_form(path, fields, file):
    """A door of HTTP that takes forms."""

    def ask(server, key):
        answer = server.client.post(path, data=fields, files={"file": ("a", file)}, headers={"x-api-key": key})
        return Told(answer.status_code, dict(answer.headers), answer.text)

    return ask


def call(path, message, *, kind="unary_unary"):
    """A door of gRPC; answers of a stream are read to the end."""

    def ask(server, key):
        (port,) = re.findall(r"(?:gRPC at|grpc://)\D*[\d.]+:(\d+)", server.log)[-1:]
        data = message if isinstance(message, bytes) else message.SerializeToString()
        asked = iter([data]) if kind.startswith("stream") else data
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            rpc = getattr(channel, kind)(path)
            options = {"metadata": (("x-api-key", key),), "timeout": PATIENCE_S}
            text, code, trailers = "", grpc.StatusCode.OK, ()
            try:
                if kind == "unary_unary":
                    _, done = rpc.with_call(asked, **options)
                else:
                    done = rpc(asked, **options)
                    (text,) = map(repr, done)
                trailers = done.trailing_metadata()
            except grpc.RpcError as error:
                refused: Any = error
                text, code, trailers = refused.details(), refused.code(), refused.trailing_metadata()
        fields = [(one.key, str(one.value)) for one in trailers]
        assert len(dict(fields)) == len(fields), fields
        return Told(code, dict(fields), text)

    return ask


def predict_request():
    asked = TFS.PredictRequest()
    asked.model_spec.name = "table"
    put(asked.inputs["x"], from_array("x", np.ones((1, 2), np.float32)))
    return asked


def text_request():
    asked = request("told", np.array([b"x"]), datatype="BYTES")
    asked.raw_input_contents[0] = b"\1\0\0\0x"
    return asked


TENSOR = {"name": "input", "shape": [1], "datatype": "FP64", "data": [1.0]}
CHAT = {"model": "say", "messages": [{"role": "user", "content": "x"}]}
PAIRS = {"key": ["x"], "value": ["1"]}
NUMBER = b"\x08\x07"
OVER = grpc.StatusCode.RESOURCE_EXHAUSTED
INFER = f"/{SERVICE}/ModelInfer"
STREAM = f"/{SERVICE}/ModelStreamInfer"


def native(text):
    error = json.loads(text)["error"]
    assert (error["code"], error["detail"]) == ("resource_exhausted", {"limit": "requests"})
    return error["message"]


def kserve(text):
    return json.loads(text)["error"]


def openai(text):
    error = json.loads(text)["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    return error["message"]


def anthropic(text):
    error = json.loads(text)["error"]
    assert error["type"] == "rate_limit_error"
    return error["message"]


def pipeline(text):
    error = json.loads(text)
    assert error["code"] == OVER.value[0]
    return error["message"]


def streamed(text):
    return M.ModelStreamInferResponse.FromString(eval(text)).error_message


DOORS = {
    "http": ("native", post("/models/echo", 1.0), native),
    "http stream": ("native", post("/models/parts", 1), native),
    "http behind the fast lane": ("native", post("/models/echo", 1.0, origin="http://a.page"), native),
    "graph": ("native", post("/models/twice", 1.0), native),
    "kserve http": ("native", post("/v2/models/echo/infer", {"inputs": [TENSOR]}), kserve),
    "tfserving http": ("native", post("/v1/models/table:predict", {"instances": [{"x": [1, 2]}]}), kserve),
    "openai": ("native", post("/v1/chat/completions", CHAT), openai),
    "openai stream": ("native", post("/v1/chat/completions", CHAT | {"stream": True}), openai),
    "openai inputs": ("native", post("/v1/embeddings", {"model": "embed", "input": ["a", "b", "c"]}), openai),
    "responses": ("native", post("/v1/responses", {"model": "say", "input": "a"}), openai),
    "messages": ("native", post("/v1/messages", CHAT | {"max_tokens": 3}), anthropic),
    "ranks": ("native", post("/rerank", {"model": "rank", "query": "a", "documents": ["a", "b", "c"]}), openai),
    "speech": ("native", post("/v1/audio/speech", {"model": "voice", "input": "a", "voice": "a"}), openai),
    "transcripts": ("native", post_form("/v1/audio/transcriptions", {"model": "ear"}, b"a"), openai),
    "kserve grpc": ("native", call(INFER, request("echo", np.array([1.0]))), str),
    "kserve grpc, a long answer": ("native", call(INFER, request("echo", np.ones(100_000))), str),
    "kserve grpc stream": ("native", call(STREAM, request("echo", np.array([1.0])), kind="stream_stream"), streamed),
    "tfserving grpc": ("native", call("/tensorflow.serving.PredictionService/Predict", predict_request()), str),
    "handed on": ("fronts", post("/models/echo", 1.0), native),
    "handed on grpc": ("fronts", call(INFER, request("echo", np.array([1.0]))), str),
    "an attached worker": ("attached", post("/models/echo", 1.0), native),
    "pipeline http": ("pipeline", post("/svc/prediction", PAIRS), pipeline),
    "pipeline grpc": ("pipeline", call(PATH, Request(key=["x"], value=["1"])), str),
    "nucleus": ("nucleus", post("/", {"x": 1}), str),
    "nucleus rpc": ("rpc", call("/asked.Numbers/Ask", NUMBER), str),
    "nucleus rpc stream": ("rpc", call("/asked.Numbers/Again", NUMBER, kind="unary_stream"), str),
    "ventu": ("ventu", post("/inference", {"text": "x"}), str),
    "ovms": ("ovms", post("/v2/models/told/infer", {"inputs": [TENSOR]}), kserve),
    "ovms grpc": ("ovms", call(INFER, text_request()), str),
}


@pytest.fixture(scope="module")
def server_of(tmp_path_factory):
    """Starts a server of each kind once, with limits for everybody."""
    running: dict[str, Server] = {}
    workers: list[Any] = []

    def start(kind):
        folder = tmp_path_factory.mktemp(kind)
        told: dict[str, Any] = {"tenants": {"*": {"limits": ONE}}}
        told["http"] = {"api_keys": {tenant(name): f"key {name}" for name in DOORS}, "cors_origins": ["http://a.page"]}
        options = ["--config", str(folder / "limits.yaml")]
        target, files = {
            "lending": (None, {"served.py": LENT, "all/double/1/factor": "2"}),
            "pipeline": (folder / "server.py", {"server.py": PIPELINE}),
            "nucleus": (folder, {"handler.py": NUCLEUS, "nucleus.yaml": NUCLEUS_YAML}),
            "rpc": (folder, {"handler.py": RPC, "nucleus.yaml": RPC_YAML, "asked.proto": PROTO}),
            "ventu": (folder / "same.py", {"same.py": VENTU}),
            "ovms": (
                folder,
                {"config.json": ovms_config(told={}), "told/graph.pbtxt": one_node(), "told/model.py": OVMS},
            ),
        }.get(kind, (None, {"served.py": MODELS, "graph.py": GRAPH}))
        write(folder, files)
        if kind in {"native", "fronts", "lending"}:
            told["models"] = [{"target": "served.py", "worker_kind": "thread"}]
        if kind in {"native", "fronts"}:
            told["models"] += [{"target": "graph.py"}]
        if kind in {"native", "fronts", "lending", "pipeline", "ovms"}:
            options += ["--grpc-port", "0"]
        options += {
            "fronts": ["--fronts", "1"],
            "lending": ["--fronts", "1", "--max-models", "1"],
            "attached": ["--attach", f"unix:{folder}/s"],
            "nucleus": ["--state-dir", f"{folder}/state"],
            "rpc": ["--state-dir", f"{folder}/state"],
        }.get(kind, [])
        (folder / "limits.yaml").write_text(json.dumps(told))
        server = Server(target, *options, env={"XDG_STATE_HOME": f"{folder}/state"})
        if kind == "attached":
            worker = [*COMMAND, "worker", f"{folder}/served.py:Echo", "--connect", f"unix:{folder}/s"]
            workers.append(Forked(worker, stderr=subprocess.DEVNULL))
        return server

    def get(kind):
        if kind not in running:
            running[kind] = start(kind)
            if kind == "rpc":
                eventually(lambda: "ready at grpc://" in running[kind].log, "it is ready")
            else:
                running[kind].wait_ready()
            if kind == "attached":
                asked = post("/models/echo", 1.0)
                eventually(lambda: asked(running[kind], "key http").status == 200, "its worker is there")
        return running[kind]

    yield get
    for worker in workers:
        worker.terminate()
        worker.wait(PATIENCE_S)
    for server in running.values():
        server.stop()


def tenant(name):
    return re.sub("[^a-z]+", "-", name)


# F45
@pytest.mark.parametrize("name", DOORS)
def test_what_is_beyond_a_limit_is_refused(server_of, name):
    kind, ask, message_in = DOORS[name]
    server, key = server_of(kind), f"key {name}"
    first, refused = ask(server, key), ask(server, key)
    assert first.status in {200, grpc.StatusCode.OK}, first
    for told in (first, refused):
        assert told.fields["ratelimit-policy"] == '"requests";q=1;w=100'
        assert re.fullmatch(r'"requests";r=0;t=(9\d|100)', told.fields["ratelimit"])
    assert message_in(refused.text) == f"the tenant '{tenant(name)}' has used up its requests; try again later"
    if message_in is streamed:  # the call goes on, and its errors are messages
        return
    assert refused.status in {429, OVER}
    over_grpc = refused.status is OVER
    after_ms = int(refused.fields["grpc-retry-pushback-ms" if over_grpc else "retry-after-ms"])
    assert 60_000 <= after_ms <= 100_000
    if over_grpc:
        assert refused.fields["x-request-id"]
        assert "x-request-id" not in first.fields
    else:
        assert int(refused.fields["retry-after"]) == -(-after_ms // 1000)
    if "access-control-allow-origin" in first.fields and name.startswith("http"):
        assert "ratelimit" in first.fields["access-control-expose-headers"]


def test_a_front_that_passes_on_what_its_owner_says_tells_limits_once(server_of):
    server, ask = server_of("lending"), call(INFER, request("double", np.array([1.0])))
    first, refused = ask(server, "key http"), ask(server, "key http")
    assert (first.status, refused.status) == (grpc.StatusCode.OK, OVER)
    assert int(refused.fields["grpc-retry-pushback-ms"]) > 60_000
    assert {"x-request-id", "ratelimit", "ratelimit-policy"} <= set(refused.fields)
    with server.connect("x-api-key: key http") as wire:
        assert wire.ask("GET", "/models").headers["ratelimit"]  # it fails where a header is there twice
