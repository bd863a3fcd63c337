# SPDX-License-Identifier: Apache-2.0
"""Who says that it is an owner, and does not keep to the protocol: its front takes no harm, and serves the rest."""

import contextlib
import copy
import socket
import threading
from typing import Any

import pytest
from tests.integration.test_hostile_callers import Caller
from tests.waiting import PATIENCE_S, eventually

from forebay.owners.detached_bodies import LinkReader, follow, set_apart
from forebay.workers.wire import frames


@pytest.fixture(scope="module")
def descriptions(launch, tmp_path_factory):
    """What a real owner says of its models, by their names."""
    path = f"{tmp_path_factory.mktemp('owner')}/s"
    launch("owned.py", "--attach", f"unix:{path}")
    caller = Caller(path)
    caller.socket.close()
    return {one[1]["model"]["config"]["name"]: one[1] for one in caller.described}


class Impostor:
    """An owner of these tests, which lets fronts in and then says whatever it is told to."""

    def __init__(self, path, models):
        self.path, self.models = path, models
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self.accepted = 0
        self.asked = threading.Event()
        self.link: Any = None
        self.seats: list[int] = []
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                link, _ = self.listener.accept()
                self.accepted += 1
                self.link = link
                with contextlib.suppress(OSError), link:
                    self.greet(link)

    def greet(self, link):
        reader = LinkReader(Any, lambda message: message[-1] if message[0] == "requests" else None)
        link.sendall(frames.encode(["open", {"max_body": 1 << 26, "shares": None}]))
        link.sendall(b"".join(self.models))
        while data := link.recv(1 << 16):
            for message in reader.feed(data):
                if message[0] == "requests":
                    self.seats += [seat[0] for bundle in message[1] for seat in bundle[1]]
                    if self.seats:
                        self.asked.set()

    def close(self):
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        if self.link is not None:
            with contextlib.suppress(OSError):
                self.link.shutdown(socket.SHUT_RDWR)
        self.thread.join(PATIENCE_S)


@pytest.fixture
def impostor(tmp_path):
    made = []

    def start(models):
        made.append(Impostor(f"{tmp_path}/s", models))
        return made[0]

    yield start
    for one in made:
        one.close()


def described(*models):
    """Return a message that describes models, as pieces."""
    told = [follow(frames.encode_part(model)) for model in models]
    announced = [[number, one] for number, (one, _) in enumerate(told, 1)]
    return [frames.encode(["models", announced]), *(piece for _, pieces in told for piece in pieces)]


def test_parts_of_a_stream_that_there_is_no_room_for_end_the_link(serve, impostor, descriptions):
    """However slowly the client reads; the front kept all of them."""
    owner = impostor(described(descriptions["slow"]))
    front = serve(None, "--owner", f"unix:{owner.path}", "--owner-grace-s", "1")
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        body = b'["/nowhere", 3]'
        client.sendall(
            b"POST /models/slow HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert owner.asked.wait(PATIENCE_S)
        seat = owner.seats[0]
        told, pieces = set_apart(b"p" * 3_000_000)
        with contextlib.suppress(OSError):
            for _ in range(300):
                owner.link.sendall(
                    b"".join([frames.encode(["answers", [[1, 1, 9, [[seat, 1]], [], []]], [told]]), *pieces])
                )
        eventually(lambda: "for which there was no room" in front.log)
    assert "Traceback" not in front.log


@pytest.mark.parametrize("what", ["many", "large", "long"])
def test_what_an_owner_says_of_its_models_is_bounded(serve, impostor, descriptions, what):
    model = copy.deepcopy(descriptions["clip"])
    if what == "many":
        models = [frames.encode(["models", [[number, None] for number in range(5000)]])]
        said = "5000 models, at most"
    elif what == "large":
        told, _ = follow(bytes(1 << 20))
        told = type(told)(told.code, (1 << 29).to_bytes(8, "big"))
        models = [frames.encode(["models", [[1, told]]])]
        said = "has 536870912 bytes, at most"
    else:
        model["model"]["predict"]["description"] = "x" * (5 << 20)
        models = [frames.encode(["models", [[1, model]]])]
        said = "was announced, at most"
    owner = impostor(models)
    front = serve("owned.py", "--owner", f"unix:{owner.path}")
    assert front.call("clip", 1.5).status_code == 200
    eventually(lambda: said in front.log)
    assert "Traceback" not in front.log


def test_a_thousand_models_are_read_while_others_are_answered(serve, impostor, descriptions):
    """One after the other, and clients of other models have their turns in between."""
    models = []
    for number in range(300):
        models.append(model := copy.deepcopy(descriptions["clip"]))
        model["model"]["config"]["name"] = f"clip{number}"
    owner = impostor(described(*models))
    front = serve("owned.py", "--owner", f"unix:{owner.path}")
    assert front.call("clip", 1.5).status_code == 200
    eventually(lambda: front.client.get("/models/clip299").status_code == 200)
