# SPDX-License-Identifier: Apache-2.0
"""Bodies lie in memory that workers see: in that of their own model, and of no other."""  # F72

import contextlib
import http.client
import json
import secrets
from pathlib import Path

import grpc
import pytest
from tests.fuzz.serving import running
from tests.integration.kserve.served import M
from tests.models.spying import MARK

from forebay.protocols.kserve.messages import SERVICE
from forebay.server.app import App
from forebay.server.config import Overrides
from forebay.surfaces.native.target_models import serve_target
from forebay.transports.grpc.kserve import KServe
from forebay.workers.memory.landing import HERE

TARGET = Path(__file__).parents[1] / "models" / "spying.py"
LENGTH = 600_000
"""More than is read at once: what comes at once need not land."""


@pytest.fixture(scope="module")
def server():
    with running(str(TARGET), options=("--worker-kind", "process", "--grpc-port", "0")) as found:
        yield found


def by_http(server, model, text):
    data = json.dumps(text).encode()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=60)) as connection:
        connection.request("POST", f"/models/{model}", data, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())


def by_grpc(server, model, text):
    made = M.ModelInferRequest(model_name=model)
    made.inputs.add(name="input", datatype="BYTES", shape=[1])
    made.raw_input_contents.append(len(text).to_bytes(4, "little") + text.encode())
    with grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        (found,) = M.ModelInferResponse.FromString(infer(made.SerializeToString(), timeout=60)).raw_output_contents
    return int.from_bytes(found, "little")


@pytest.mark.parametrize("second", [by_http, by_grpc])
@pytest.mark.parametrize("first", [by_http, by_grpc])
def test_a_worker_finds_nothing_of_what_another_model_was_sent(server, first, second):
    mark = secrets.token_hex(MARK // 2)
    told_backwards = mark[::-1]
    assert first(server, "spy", told_backwards + "y" * LENGTH) == 0, "it is nowhere yet"
    assert second(server, "trusted", mark + "x" * LENGTH) == MARK + LENGTH
    assert second(server, "trusted", "z" + mark + "x" * LENGTH) == MARK + LENGTH + 1
    for ask in (by_http, by_grpc):
        assert ask(server, "spy", told_backwards) == 0, "small bodies use none of this"
        assert ask(server, "spy", told_backwards + "y" * LENGTH) == 0


def test_it_would_find_what_it_was_sent_itself(server):
    mark = secrets.token_hex(MARK // 2)
    for ask in (by_http, by_grpc):
        assert ask(server, "spy", mark + "y" * LENGTH) == 0
        assert ask(server, "spy", mark[::-1]) > 0
        mark = secrets.token_hex(MARK // 2)


def test_a_call_lands_at_the_model_that_it_names_first():
    kserve = KServe(App(serve_target(str(TARGET), Overrides(worker_kind="process")).served))
    (method,) = {*kserve.service().lands.values()}
    places = {name: one.endpoint.places for name, one in kserve._app.served.items()}
    assert places["spy"] is not places["trusted"] is not None
    for name in ("spy", "trusted", "nobody", "", "é" * 100):
        beginning = M.ModelInferRequest(model_name=name, id="x").SerializeToString()
        assert method(memoryview(beginning)) is places.get(name, HERE)
        assert method(memoryview(beginning)[:3]) is HERE
    for odd in (b"", b"\n", b"\n\xff", b"\n\x03\xff\xff\xff", M.ModelInferRequest(id="spy").SerializeToString()):
        assert method(memoryview(odd)) is HERE
