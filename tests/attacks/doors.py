# SPDX-License-Identifier: Apache-2.0
"""The doors that attacks are sent to: servers in processes of their own, their seeds, and how they are asked."""

from __future__ import annotations

import contextlib
import http.client
import socket
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import grpc
import msgspec
from tests.attacks import crowds
from tests.attacks.crowds import Attack
from tests.fuzz.serving import Running
from tests.waiting import PATIENCE_S

from forebay.protocols.kserve import messages as kserve
from forebay.protocols.tfserving import messages as tfserving
from forebay.surfaces.pipeline.protocol import messages as pipeline

ROOT = Path(__file__).parents[2]
PIPELINE = """
    from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

    class Echo(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            return {"said": "so"}, False, None, ""

    server = PipelineServer("svc")
    server.set_response_op(ResponseOp(input_ops=[Echo(name="echo", input_ops=[RequestOp()])]))
    server.prepare_server(yml_dict={"rpc_port": 18080, "http_port": 18081, "dag": {"is_thread_op": True}})
    server.run_server()
"""
NUCLEUS = """
    class Handler:
        def handle_post(self, payload):
            return {"got": type(payload).__name__}
"""


class Door(NamedTuple):
    """One way into a server.

    Attributes:
        server: Which of the servers it belongs to.
        way: `http`, `grpc`, or `worker` for the socket that workers dial.
        target: The path of a request, or of a method.
        attacks: Makes the bodies of its attacks.
        media: The media type of its bodies; of forms each attack has its own.
        in_thread: Whether a thread of a model decodes what it takes, in one call that other clients wait for.
    """

    server: str
    way: Literal["http", "grpc", "worker"]
    target: str
    attacks: Sequence[Callable[[], Attack]]
    media: str = "application/json"
    in_thread: bool = False

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.server} {self.target}"


def _json(seed: Any) -> list[Callable[[], Attack]]:
    spots = [(), *crowds.json_spots(seed)]
    return [partial(crowds.json_attack, seed, path, kind) for path in spots for kind in crowds.JSON_CROWDS]


def _proto(message: Any, **fields: Any) -> list[Callable[[], Attack]]:
    prefix = message(**fields).SerializeToString()
    return [
        partial(crowds.proto_attack, prefix, spot, kind)
        for spot in crowds.proto_spots(message.DESCRIPTOR)
        for kind in crowds.PROTO_CROWDS[spot.kind]
    ]


def _form(kind: str) -> Attack:
    body = crowds.FORM_CROWDS[kind][1]()
    return Attack(kind, body, len(body))


def _hello(name: str, kind: str) -> Attack:
    """The first frame of a worker."""
    about = msgspec.msgpack.encode({"pid": 1, "worker": 0, name: None})[:-1] + crowds.MSGPACK_CROWDS[kind]()
    body = b"\x93\xa5hello\x01" + about
    return Attack(f"hello.{name}: {kind}", len(body).to_bytes(4) + body, len(body))


# ---------------------------------------------------------------------------------------------------------------------
# seeds: a valid body of each protocol with all of its fields

TREE = {"name": "a", "leaves": [{"weight": 1.0, "tags": ["a"]}], "by_name": {"a": {}}, "numbers": [1.0], "more": 0}
PAGE = {"ratio": 0.5, "is_new": True, "tags": ["a"], "text": "a"}
OUTPUT = {"name": "output", "parameters": {"binary_data": False}}
KSERVE = {
    "id": "a",
    "parameters": {"priority": 0},
    "inputs": [
        {"name": "numbers", "datatype": "FP64", "shape": [1, 1], "data": [[1.0]], "parameters": {"a": 0}},
        {"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]},
    ],
    "outputs": [OUTPUT],
}
GENERATE = {"id": "a", "numbers": [1.0], "text": "a", "parameters": {"priority": 0}}
TEXTS = {
    "user": "a", "metadata": {"a": "b"}, "max_tokens": 5, "temperature": 1.0, "top_p": 1.0, "frequency_penalty": 0.0,
    "presence_penalty": 0.0, "logit_bias": {"5": 1.0}, "seed": 1, "stop": ["a"], "n": 1, "stream": False,
    "stream_options": {"include_usage": True}, "store": False, "service_tier": "auto", "safety_identifier": "a",
    "prompt_cache_key": "a",
}  # fmt: skip
CALLS = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "a", "tool_calls": CALLS}
CHAT = {**TEXTS, "model": "chat", "max_completion_tokens": 5, "messages": [{**MESSAGE, "tool_call_id": "a"}]}
COMPLETION = {**TEXTS, "model": "completion", "prompt": [1, 2]}
EMBEDDING = {"model": "vectors", "input": ["a"], "user": "a", "metadata": {}, "encoding_format": "float"}
OFFERED = {"name": "f", "description": "a", "parameters": {"type": "object"}, "strict": False}
RESPONSE = {
    "model": "agent", "instructions": "a", "max_output_tokens": 50, "metadata": {"a": "b"}, "temperature": 1.0,
    "top_p": 1.0, "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}, "verbosity": "low"},
    "reasoning": {"effort": "low"}, "stream": False, "store": False, "include": [], "truncation": "disabled",
    "tools": [{"type": "function", **OFFERED}], "tool_choice": {"type": "function", "name": "f"},
    "parallel_tool_calls": True, "user": "a", "service_tier": "auto", "background": False,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "a"}]},
    ],
}  # fmt: skip
HINTED = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]
MESSAGES = {
    "model": "agent", "max_tokens": 50, "system": HINTED, "stop_sequences": ["b"], "temperature": 1.0, "top_p": 1.0,
    "metadata": {"user_id": "a"}, "stream": False, "thinking": {"type": "disabled"}, "service_tier": "auto",
    "tools": [{"name": "f", "description": "a", "input_schema": {"type": "object"}}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": HINTED},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": HINTED}]},
    ],
}  # fmt: skip
RANKING = {
    "model": "ranks", "query": "a", "documents": ["a", "ab"], "top_n": 1, "return_documents": True, "user": "a",
    "metadata": {"a": "b"},
}  # fmt: skip
SCORES = {"model": "ranks", "text_1": ["a", "b"], "text_2": ["a", "ab"], "user": "a"}
PAIRS = {"model": "ranks", "queries": "a", "documents": ["a"]}
SPEECH = {
    "model": "says", "input": "a", "voice": "a", "response_format": "wav", "speed": 1.0, "instructions": "a",
    "stream_format": "audio", "user": "a", "metadata": {"a": "b"},
}  # fmt: skip
RECORDING = {
    "model": "hears", "file": "RIFF", "language": "en", "prompt": "a", "response_format": "json", "temperature": "0.5",
    "timestamp_granularities[]": "word", "stream": "false", "user": "a", "metadata": '{"a": "b"}',
}  # fmt: skip
"""The fields of a form."""
PREDICT = {"signature_name": "serving_default", "instances": [{"numbers": [1.0], "text": "a"}]}
COLUMNS = {"inputs": {"numbers": [[1.0]], "text": ["a"]}}
CLASSIFY = {"signature_name": "serving_default", "context": {"a": 1.0}, "examples": [{"numbers": [1.0], "text": "a"}]}
TENSOR = {
    "int64_data": [1], "float_data": [1.0], "int_data": [1], "float64_data": [1.0], "uint32_data": [1],
    "bool_data": [True], "complex64_data": [1.0], "complex128_data": [1.0], "str_data": ["a"], "byte_data": "YQ==",
    "elem_type": 0, "shape": [1], "lod": [1], "name": "a",
}  # fmt: skip
CALL = {
    "key": ["a"], "value": ["b"], "tensors": [TENSOR], "name": "svc", "method": "inference", "logid": 1,
    "clientip": "a",
}  # fmt: skip
LITERALS = {
    "numbers": lambda: "[" + "0," * crowds.CROWD + "]",
    "lists": lambda: "[" + "[]," * crowds.CROWD + "]",
    "tuples": lambda: "[" + "()," * crowds.CROWD + "]",
    "texts": lambda: "[" + "''," * crowds.CROWD + "]",
    "members": lambda: "{" + "".join(f"{number}:0," for number in range(crowds.CROWD)) + "}",
    "a set": lambda: "{" + "0," * crowds.CROWD + "}",
    "lists in lists": lambda: "[" * crowds.CROWD + "]" * crowds.CROWD,
    "an array": lambda: "array([" + "0," * crowds.CROWD + "])",
}


def _literal(kind: str) -> Attack:
    """A value of a pipeline, which is a text that Python would read."""
    body = msgspec.json.encode({"key": ["a"], "value": [LITERALS[kind]()]})
    return Attack(f"value: {kind}", body, len(body))


def doors() -> list[Door]:
    """All of them, with their attacks."""
    predict, models = f"/{tfserving.PREDICTION}", f"/{tfserving.MODELS}"
    spoken, service = tfserving.SERVING.classes(), kserve.messages()
    spec = spoken.ModelSpec(name="tensors", signature_name="serving_default")
    named = {"model_spec": spec}
    forms = [partial(_form, kind) for kind in crowds.FORM_CROWDS]
    found = [
        Door("models", "http", "/models/typed", _json(TREE), in_thread=True),
        Door("models", "http", "/models/plain", _json({"a": [0]}), in_thread=True),
        Door("models", "http", "/models/sampled", _json([1.0]), in_thread=True),
        Door("models", "http", "/models/filed", forms, "form", in_thread=True),
        Door("models", "http", "/v2/models/tensors/infer", _json(KSERVE)),
        Door("models", "http", "/v2/models/tensors/generate", _json(GENERATE)),
        Door("models", "http", "/v1/models/tensors:predict", _json(PREDICT)),
        Door("models", "http", "/v1/models/tensors:predict", _json(COLUMNS)),
        Door("models", "http", "/v1/models/tensors:classify", _json(CLASSIFY)),
        Door("models", "http", "/v1/models/tensors:regress", _json(CLASSIFY)),
        Door("models", "http", "/v1/chat/completions", _json(CHAT)),
        Door("models", "http", "/v1/completions", _json(COMPLETION)),
        Door("models", "http", "/v1/embeddings", _json(EMBEDDING)),
        Door("models", "http", "/v1/responses", _json(RESPONSE)),
        Door("models", "http", "/v1/messages", _json(MESSAGES)),
        Door("models", "http", "/v1/rerank", _json(RANKING)),
        Door("models", "http", "/v1/score", _json(SCORES)),
        Door("models", "http", "/score", _json(PAIRS)),
        Door("models", "http", "/v1/audio/speech", _json(SPEECH)),
        Door("models", "http", "/v1/audio/transcriptions", forms, "form", in_thread=True),
        Door("models", "http", "/models/asked?size=5", _json(PAGE), in_thread=True),
        Door("models", "grpc", f"{predict}/Predict", _proto(spoken.PredictRequest, **named)),
        Door("models", "grpc", f"{predict}/Classify", _proto(spoken.ClassificationRequest, **named)),
        Door("models", "grpc", f"{predict}/Regress", _proto(spoken.RegressionRequest, **named)),
        Door("models", "grpc", f"{predict}/MultiInference", _proto(spoken.MultiInferenceRequest)),
        Door("models", "grpc", f"{predict}/GetModelMetadata", _proto(spoken.GetModelMetadataRequest, **named)),
        Door("models", "grpc", f"{models}/GetModelStatus", _proto(spoken.GetModelStatusRequest, **named)),
        Door("models", "grpc", f"{models}/HandleReloadConfigRequest", _proto(spoken.ReloadConfigRequest)),
        Door("models", "worker", "hello", [partial(_hello, *each) for each in _hellos()]),
        Door("pipeline", "http", "/svc/inference", _json(CALL)),
        Door("pipeline", "http", "/svc/inference", [partial(_literal, kind) for kind in LITERALS]),
        Door("pipeline", "grpc", pipeline.PATH, _proto(pipeline.Request, key=["a"], value=["b"])),
        Door("nucleus", "http", "/", _json({"a": [0]}), in_thread=True),
        Door("nucleus", "http", "/", forms, "form", in_thread=True),
        Door("graph", "http", "/v2/models/python_graph/infer", _json(KSERVE)),
    ]
    infer = {"model_name": "tensors", "id": "a"}
    for method in kserve.METHODS:
        kind = f"{method.replace(kserve.STREAMED, 'ModelInfer')}Request"
        fields = infer if kind == "ModelInferRequest" else {}
        attacks = _proto(getattr(service, kind), **fields)
        found.append(Door("models", "grpc", f"/{kserve.SERVICE}/{method}", attacks))
        if kind == "ModelInferRequest":
            of_graph = _proto(getattr(service, kind), **{**fields, "model_name": "python_graph"})
            found.append(Door("graph", "grpc", f"/{kserve.SERVICE}/{method}", of_graph))
    return found


def _hellos() -> list[tuple[str, str]]:
    return [(name, kind) for name in ("schema", "name", "worker", "zz") for kind in crowds.MSGPACK_CROWDS]


# ---------------------------------------------------------------------------------------------------------------------
# servers

OPTIONS = "--worker-kind", "thread", "--grpc-port", "0"
PORTS = {"pipeline": ("--rpc-port", "0")}


@contextlib.contextmanager
def serving(name: str, folder: Path, *options: str) -> Iterator[Running]:
    """One of the servers, for as long as the block runs; `folder` is for the files that it needs."""
    project = folder / name
    project.mkdir()
    more = [*OPTIONS, *options]
    if name == "models":
        target = ROOT / "tests/models/crowded.py"
        more += ["--attach", f"unix:{folder / 'door'}"]
    elif name == "pipeline":
        target = project / "server.py"
        target.write_text(textwrap.dedent(PIPELINE))
    elif name == "nucleus":
        target = project
        (project / "handler.py").write_text(textwrap.dedent(NUCLEUS))
        (project / "nucleus.yaml").write_text("type: python\npath: handler.py\n")
    else:
        target = ROOT / "examples/ovms-incrementer"
    found = Running(str(target), options=tuple(more))
    try:
        yield found
    finally:
        found.stop()


class Attacker:
    """Sends attacks to a server that runs, and reads what it answers."""

    def __init__(self, server: Running, folder: Path) -> None:
        self._server, self._folder = server, folder
        limits = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        port = server.ports.get("grpc")
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", limits) if port else None

    def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            self._channel.close()

    def send(self, door: Door, attack: Attack) -> str:
        """Send an attack; returns the status of its answer."""
        return {"http": self._post, "grpc": self._call, "worker": self._dial}[door.way](door, attack)

    def _post(self, door: Door, attack: Attack) -> str:
        media = door.media if door.media != "form" else crowds.FORM_CROWDS[attack.spot.removesuffix(", gzip")][0]
        headers = {"content-type": media} | ({"content-encoding": "gzip"} if attack.is_packed else {})
        connection = http.client.HTTPConnection("127.0.0.1", self._server.ports["http"], timeout=PATIENCE_S)
        with contextlib.closing(connection):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer may come before all is sent
                connection.request("POST", door.target, attack.body, headers)
            answer = connection.getresponse()
            answer.read()
            return str(answer.status)

    def _call(self, door: Door, attack: Attack) -> str:
        assert self._channel is not None
        packed = grpc.Compression.Gzip if attack.is_packed else grpc.Compression.NoCompression
        try:
            if door.target.endswith(kserve.STREAMED):
                call = self._channel.stream_stream(door.target)
                for _ in call(iter([attack.body]), timeout=PATIENCE_S, compression=packed):
                    pass
            else:
                self._channel.unary_unary(door.target)(attack.body, timeout=PATIENCE_S, compression=packed)
        except grpc.RpcError as error:
            return error.code().name  # type: ignore[attr-defined]
        return "OK"

    def _dial(self, door: Door, attack: Attack) -> str:
        with socket.socket(socket.AF_UNIX) as worker:
            worker.settimeout(PATIENCE_S)
            worker.connect(str(self._folder / "door"))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.sendall(attack.body)
                worker.shutdown(socket.SHUT_WR)
                while worker.recv(65536):
                    pass
            return "closed"
