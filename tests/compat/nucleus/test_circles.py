# SPDX-License-Identifier: Apache-2.0
"""No request leaves anything in a circle, however its handler ends it: its body would wait for the collector."""

import sys

import pytest
from tests.circles import left_in_circles
from tests.compat.nucleus.conftest import write_project

from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.nucleus.logs import logger
from forebay.surfaces.nucleus.proto import compiled
from forebay.surfaces.nucleus.rpc_runner import RpcRunner
from forebay.workers.runner import WorkerContext

CALLS = 20

HANDLER = """
    from starlette.exceptions import HTTPException
    from starlette.responses import JSONResponse, StreamingResponse


    def parts(number):
        yield b"first"
        if number < 0:
            raise ValueError("no")


    async def waited(number):
        yield b"first"
        if number < 0:
            raise ValueError("no")


    class Handler:
        def handle_post(self, payload, query_params):
            how = query_params.get("how", "")
            if how == "raises":
                raise ValueError("no")
            if how == "refuses":
                raise HTTPException(418, "no")
            if how == "refuses-badly":
                raise HTTPException(418, "no", headers={"a": chr(1)})
            if how == "unwritable":
                return object()
            if how == "callback":
                return "well", lambda: 1 / 0
            if how == "response":
                return JSONResponse({"a": 1})
            if how == "stream":
                return StreamingResponse(parts(1))
            if how == "broken-stream":
                return StreamingResponse(parts(-1))
            if how == "waited-stream":
                return StreamingResponse(waited(1))
            if how == "broken-waited-stream":
                return StreamingResponse(waited(-1))
            return payload

        async def handle_put(self, payload):
            raise ValueError("no")
"""

BATCHED = """
    from starlette.exceptions import HTTPException
    from starlette.responses import StreamingResponse


    class Handler:
        def handle_post(self, payload):
            how = payload[0]
            if how == "raises":
                raise ValueError("no")
            if how == "refuses":
                raise HTTPException(418, "no")
            if how == "no-list":
                return "no"
            if how == "unwritable":
                return [object() for _ in payload]
            return payload
"""


SERVICE = """
    syntax = "proto3";
    package circles;
    message Ask { int32 number = 1; }
    message Answer { int32 number = 1; }
    service Circles {
      rpc Plain (Ask) returns (Answer);
      rpc Waited (Ask) returns (Answer);
      rpc Context (Ask) returns (Answer);
      rpc Count (Ask) returns (stream Answer);
      rpc CountWaited (Ask) returns (stream Answer);
      rpc Told (Ask) returns (stream Answer);
    }
"""
RPC_HANDLER = """
    class Handler:
        def __init__(self, proto_module_pb2):
            self.pb = proto_module_pb2

        def Plain(self, payload):
            if payload.number == 1:
                raise ValueError("no")
            return object() if payload.number == 2 else self.pb.Answer(number=payload.number)

        async def Waited(self, payload):
            return self.Plain(payload)

        def Context(self, payload, context):
            context.add_callback(lambda: 1 / payload.number)
            if payload.number == 3:
                context.abort(5, "no")
            return self.Plain(payload)

        def Count(self, payload):
            yield self.pb.Answer()
            yield self.Plain(payload)

        async def CountWaited(self, payload):
            yield self.pb.Answer()
            yield self.Plain(payload)

        def Told(self, payload, context):
            context.send_initial_metadata([("a", "b")])
            yield self.pb.Answer()
            if payload.number == 3:
                context.abort(5, "no")
            yield self.Plain(payload)
"""


# In Python 3.12 and 3.13 a frame of a coroutine that has ended still refers to those below it.
keeps_frames = pytest.mark.xfail(
    (3, 12) <= sys.version_info < (3, 14),
    reason="anyio leaves the end of a generator in a circle, and with it all frames below",
)


@pytest.fixture(autouse=True)
def unlogged(monkeypatch):
    """Says nothing: pytest would keep the errors that are logged, and what they hold."""
    monkeypatch.setattr(logger, "disabled", True)


def run(runner, item, *, leaves=False):
    outcomes = runner.run([item])
    if leaves:
        next(outcomes)
        outcomes.close()
        return
    for outcome in outcomes:
        for one in outcome if isinstance(outcome, list) else [outcome]:
            if hasattr(one, "work"):
                one.work()


@pytest.mark.parametrize("verb, how", [
    ("post", ""), ("post", "raises"), ("post", "refuses"), ("post", "refuses-badly"), ("post", "unwritable"),
    ("post", "callback"), ("post", "response"), pytest.param("post", "stream", marks=keeps_frames),
    ("post", "broken-stream"),
    ("post", "waited-stream"), ("post", "broken-waited-stream"), ("put", ""), ("patch", ""),
])  # fmt: skip
def test_a_request_leaves_nothing_in_a_circle(open_runner, items, verb, how):
    runner = open_runner(HANDLER)

    def ask(body=b'"text"'):
        run(runner, items(verb, body, query=f"how={how}".encode()))

    ask()
    with left_in_circles() as left:
        for _ in range(CALLS):
            ask()
            ask(b"{")
    assert len(left) < CALLS, sorted(set(left))


@pytest.mark.parametrize("how", ["stream", "waited-stream"])
def test_a_client_that_leaves_a_stream_leaves_nothing_in_a_circle(open_runner, items, how):
    runner = open_runner(HANDLER)
    item = items(body=b'"text"', query=f"how={how}".encode())
    run(runner, item, leaves=True)
    with left_in_circles() as left:
        for _ in range(CALLS):
            run(runner, item, leaves=True)
    assert len(left) < CALLS, sorted(set(left))


@pytest.mark.parametrize("how", ["well", "raises", "refuses", "no-list", "unwritable"])
def test_a_batch_leaves_nothing_in_a_circle(open_runner, items, how):
    runner = open_runner(BATCHED, batched=True)
    body = f'"{how}"'.encode()
    run(runner, items(body=body))
    with left_in_circles() as left:
        for _ in range(CALLS):
            run(runner, items(body=body))
    assert len(left) < CALLS, sorted(set(left))


@pytest.mark.parametrize("name", ["Plain", "Waited", "Context", "Count", "CountWaited", "Told"])
@pytest.mark.parametrize("body", [b"", b"\x08\x01", b"\x08\x02", b"\x08\x03", b"\xff"])
def test_a_call_over_grpc_leaves_nothing_in_a_circle(tmp_path, monkeypatch, items, name, body):
    files = {"circles.proto": SERVICE}
    folder = write_project(tmp_path / "project", RPC_HANDLER, {"protobuf_path": "circles.proto"}, **files)
    monkeypatch.chdir(folder)
    service = compiled(read_config(folder / "nucleus.yaml")[0])
    runner = RpcRunner(folder / "handler.py", config="{}", requirements="requirements.txt", service=service)
    runner.open(WorkerContext())

    def ask():
        item = items(body=body)
        item.params = {"rpc": name, "metadata": [], "deadline": None, "peer": "", "stream": None}
        return list(runner.run([item]))

    ask()
    with left_in_circles() as left:
        for _ in range(CALLS):
            ask()
    assert len(left) < CALLS, sorted(set(left))
