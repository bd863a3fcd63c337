# SPDX-License-Identifier: Apache-2.0
"""Whoever speaks the protocol of fronts by itself, and breaks it: others are served as if it was not there."""

import contextlib
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError
from forebay.owners.detached_bodies import LinkReader
from forebay.owners.model_description import read_description
from forebay.workers.wire import frames

JSON = {"in": "json", "out": "json"}


class Caller:
    """A front of these tests, which says whatever it is told to."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(path)
        self.reader = LinkReader(Any, lambda message: message[-1] if message[0] in {"answers", "models"} else None)
        self.said = []
        self.send(["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16}])
        self.described = self.hear("models")[1]
        self.numbers = {one[1]["model"]["config"]["name"]: one[0] for one in self.described}

    def send(self, message):
        self.socket.sendall(frames.encode(message))

    def ask(self, model, *seats, leaves=(), allows=()):
        """Hand on seats: number, body, params, samples, seconds."""
        told = [[seat, frames.encode_part(params), size, left_s, "hostile"] for seat, _, params, size, left_s in seats]
        self.send(["requests", [[self.numbers[model], told, leaves, allows]], 0, [seat[1] for seat in seats]])

    def hear(self, kind):
        """Return the next message of a kind; those before it are dropped."""
        while True:
            while self.said:
                message = self.said.pop(0)
                if message[0] == kind:
                    return message
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self.said.extend(self.reader.feed(data))

    def is_hung_up_on(self):
        """Wait until the owner has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        return True


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return f"{tmp_path_factory.mktemp('owner')}/s"


@pytest.fixture(scope="module")
def owner(launch, path):
    return launch("owned.py", "--attach", f"unix:{path}")


@pytest.fixture
def caller(owner, path):
    made = Caller(path)
    with made.socket:
        yield made


@pytest.mark.parametrize("params", [{}, {"in": "json"}, {**JSON, "out": "?"}, {**JSON, "in": 7}, {**JSON, "call": []}])
def test_params_that_no_worker_can_read_hurt_nobody_in_the_batch(caller, owner, params):
    require_answered_beside(caller, owner, b"1.5", params, 1)


@pytest.mark.parametrize("context", [5, [], [{}, 1, None, 2.0], [{"a": 1}, "", None, 2.0]])
def test_a_context_that_is_none_hurts_nobody_in_the_batch(caller, owner, context):
    require_answered_beside(caller, owner, b"1.5", {**JSON, "context": context}, 1)


@pytest.mark.parametrize("body", [5, None, "text", {}, [b"1"]])
def test_a_body_of_another_type_hurts_nobody_in_the_batch(caller, owner, body):
    require_answered_beside(caller, owner, body, JSON, 1)


TENSORS = {"in": "tensors", "out": "tensors", "given": [["x", "FP64", [1], False]], "wanted": [], "is_json": False}


@pytest.mark.parametrize("given", [5, [5], [["x", "FP64", -1, False]], [["x", "FP64", [1]]]])
def test_tensors_that_are_not_described_hurt_nobody_in_the_batch(caller, owner, given):
    require_answered_beside(caller, owner, [bytes(8)] * 5, {**TENSORS, "given": given}, 1)


@pytest.mark.parametrize("size", [65, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_size_that_no_queue_takes_hurts_nobody(caller, owner, path, size):
    """The queue counted it once, and other fronts were told nothing from then on."""
    with contextlib.suppress(EOFError, ConnectionError):
        caller.ask("clip", (1, [bytes(8)], TENSORS, size, 5.0))
        assert caller.hear("answers")[1][0][4][0][2][0] == "TooLarge"
    other = Caller(path)
    with other.socket:
        other.ask("clip", (1, b"1.5", JSON, 1, PATIENCE_S))
        assert other.hear("answers")[2][0].startswith(b"[1.5,")


def require_answered_beside(caller, owner, body, params, size):
    """Send a request with others to the same batch, which are answered, and so is the next one."""
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(owner.call, "clip", 2.5) for _ in range(8)]
        caller.ask("clip", (1, body, params, size, 5.0))
        assert {one.result().status_code for one in answers} == {200}
    assert caller.is_hung_up_on()
    assert "Traceback" not in owner.log
    assert owner.call("clip", 1.5).status_code == 200


@pytest.mark.parametrize("tokens", [[["t", -1, 0]], [["t", 1]], [["t" * 200, 1, 1]], [["", 1, 1]] * 2000, {"t": 1}])
def test_tokens_that_nobody_can_have_end_the_connection(caller, owner, tokens):
    caller.send(["requests", [[caller.numbers["clip"], [], [], [], tokens]], 0, []])
    assert caller.is_hung_up_on()
    assert "Traceback" not in owner.log
    assert owner.call("clip", 1.5).status_code == 200


def test_a_form_names_no_file_of_the_owner(launch, tmp_path):
    """Only the server that has put a file of a form on its disk may say where it lies."""
    (tmp_path / "secret").write_text("nobody's business")
    owner = launch("requests.py:Pictures", "--attach", f"unix:{tmp_path}/s")
    caller = Caller(f"{tmp_path}/s")
    with caller.socket:
        (name,) = caller.numbers
        parts = [["image", str(tmp_path / "secret").encode(), "a", "", 17], ["label", b"x"]]
        caller.ask(name, (1, frames.encode_part(parts), {"in": "form", "out": "json"}, 1, PATIENCE_S))
        assert caller.is_hung_up_on()
    eventually(lambda: "a form names a file" in owner.log)


def send_on(caller, model, body, sent):
    """Send requests until the owner does not read any more: once answers wait, which takes a busy machine a while."""
    for seat in range(1, 3000):
        caller.ask(model, (seat, body, JSON, 1, PATIENCE_S))
        sent.append(seat)


def test_who_does_not_read_is_read_no_more(owner, path):
    """What it was answered would pile up in the owner."""
    caller = Caller(path)
    body = b'"%s"' % (b"x" * 1_000_000)
    with caller.socket:
        caller.socket.settimeout(2.0)
        sent = []
        with pytest.raises(TimeoutError):
            send_on(caller, "fails", body, sent)
        assert owner.call("fails", "a").status_code == 200
        caller.socket.settimeout(PATIENCE_S)
        heard = 0
        while heard < len(sent):  # once it reads, it is answered
            heard += sum(len(one[4]) for one in caller.hear("answers")[1])


FLOOD = """
from collections.abc import Iterator
from pathlib import Path

import forebay


class Flood(forebay.Model):
    def predict(self, batch: list[str]) -> Iterator[list[str]]:
        for number in range(1 << 40):
            Path(batch[0]).write_text(str(number))
            yield ["x" * 100_000 for _ in batch]


class Echo(forebay.Model):
    def predict(self, batch: list[int]) -> list[int]:
        return batch
"""


def test_a_stream_waits_for_who_does_not_read(launch, tmp_path):
    """However much room the caller says it has."""
    (tmp_path / "flood.py").write_text(FLOOD)
    owner = launch(tmp_path / "flood.py", "--attach", f"unix:{tmp_path}/s")
    caller, made = Caller(f"{tmp_path}/s"), tmp_path / "made"
    with caller.socket:
        caller.ask("flood", (1, json.dumps(str(made)).encode(), JSON, 1, PATIENCE_S))
        caller.hear("answers")
        caller.ask("flood", allows=[(1, (1 << 64) - 1)] * 2)
        eventually(lambda: made.read_text() > "15")
        for number in range(300):
            assert owner.call("echo", number).json() == number
        assert int(made.read_text() or 0) < 400  # the model may be about to write it


@pytest.mark.parametrize(
    "place, value",
    [
        ("config.name", "a/../b"),
        ("config.name", ""),
        ("config.version", "\n"),
        ("config.timeout_s", -1.0),
        ("max_size", 0),
        ("capacity", -1),
    ],
)
def test_a_description_that_cannot_be_served_is_refused(owner, path, place, value):
    caller = Caller(path)
    caller.socket.close()
    told = caller.described[0][1]
    read_description(told)
    *way, last = place.split(".")
    found = told["model"]
    for key in way:
        found = found[key]
    found[last] = value
    with pytest.raises(ConfigError):
        read_description(told)
