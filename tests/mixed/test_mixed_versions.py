# SPDX-License-Identifier: Apache-2.0
"""Programs of the version before work with those of this one, as recorded in previous.json; versions.py has both live.

The test takes the part of the version before: what that had said is said again, and what it heard is compared.
"""

import base64
import json
import socket
import subprocess
import threading
from collections import deque
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.forked import COMMAND, Forked
from tests.mixed.versions import CALLS, FILE, ROOT, Version, answers, used_cache, workers_come
from tests.waiting import PATIENCE_S

from forebay.workers.wire import frames

RECORDED = json.loads(Path(__file__).with_name("previous.json").read_text())
ANSWERS = [call[2:] for call in RECORDED["calls"]]
ASIDE = {"log", "metrics", "beat"}
"""Messages that may come at any time, and change nothing."""


class Line:
    """One end of a connection: says and hears messages."""

    def __init__(self, connection):
        connection.settimeout(PATIENCE_S)
        self._socket = connection
        self._reader = frames.FrameReader()
        self._heard = deque()

    def say(self, message):
        self._socket.sendall(frames.encode(message))

    def hear(self, *kinds):
        """The next message of these kinds; others are passed over."""
        while True:
            while self._heard:
                message = self._heard.popleft()
                if message[0] in kinds:
                    return message
            data = self._socket.recv(1 << 20)
            if not data:
                raise EOFError(kinds)
            self._heard.extend(self._reader.feed(data))


def conversation(kind, model=None):
    """What was said, as pairs of speaker and message; of the worker of a model."""
    for told in RECORDED[kind]:
        pairs = [(who, msgspec.msgpack.decode(base64.b64decode(text))) for who, text in told]
        if model is None or pairs[0][1][2]["model"]["name"] == model:
            return [(who, message) for who, message in pairs if message[0] not in ASIDE]
    raise AssertionError(model)


def first(said, kind):
    return next(message for _, message in said if message[0] == kind)


def exchanges(said, asks):
    """What follows each question, up to the next one."""
    found = []
    for who, message in said:
        if asks(message):
            found.append((message, []))
        elif found:
            found[-1][1].append((who, message))
    return found


@contextmanager
def dialled(path):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        connection.connect(str(path))
        yield Line(connection)


@contextmanager
def answering(path, play):
    """Takes one connection in a thread, which ends without an error."""
    raised = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.settimeout(PATIENCE_S)

        def run():
            try:
                connection, _ = listener.accept()
                with connection:
                    play(Line(connection))
            except Exception as error:
                raised.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        yield
        thread.join(PATIENCE_S)
        assert raised == []


# ---------------------------------------------------------------------------------------------------------------------
# Workers. A model that streams has seats: its batches come with `go`, and what they make leaves with `round`.


def asks_worker(message):
    return message[0] == "batch" or (message[0] == "go" and message[2])


def play_worker(line, said):
    """Takes the part of a worker until it has answered all that was asked."""
    line.say(first(said, "hello"))
    assert line.hear("open", "refused")[0] == "open"
    line.say(first(said, "ready" if any(message[0] == "ready" for _, message in said) else "sit"))
    for asked, follows in exchanges(said, asks_worker):
        if asked[0] == "batch":
            answer_batch(line, asked, follows)
        else:
            answer_stream(line, asked, follows)
    line.hear("stop")


def answer_batch(line, asked, follows):
    _, name, bodies, params, *_ = line.hear("batch")
    assert bodies == asked[2]
    assert params.items() >= asked[3].items()
    for who, message in follows:
        if message[0] == "result":
            line.say(["result", name, *message[2:]])
        elif who == "worker" and message[0] == "ready":
            line.hear("written")
            line.say(message)


def answer_stream(line, asked, follows):
    ((_, joining),) = asked[2]
    while not (joins := line.hear("go")[2]):
        pass
    ((name, joined),) = joins
    assert joined[0] == joining[0]
    for _, message in follows:
        if message[0] == "round":
            _, number, parts, ended = message
            line.say(["round", number, [[name, *one[1:]] for one in parts], [[name, *one[1:]] for one in ended]])
            while line.hear("go")[1] < number:
                pass


def test_previous_workers_serve_this_server(serve, tmp_path):
    server = serve(None, "--attach", f"unix:{tmp_path}/door")
    raised = []

    def work(model):
        try:
            with dialled(tmp_path / "door") as line:
                play_worker(line, conversation("workers", model))
        except Exception as error:
            raised.append(error)

    models = ("doubler", "counter")
    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    workers_come(server, models)
    assert answers(server, CALLS) == ANSWERS
    server.stop()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert raised == []


def without_trace(failures):
    return failures and {position: failure[:3] for position, failure in failures.items()}


def ask_worker(line, said, heard):
    """Takes the part of a server, asks what was asked and notes which answers there were and are."""
    hello, recorded = line.hear("hello"), first(said, "hello")
    assert hello[1] == recorded[1]
    assert hello[2].keys() >= recorded[2].keys()
    assert hello[2]["model"].keys() >= recorded[2]["model"].keys()
    opening = first(said, "open")
    line.say([opening[0], {**opening[1], "arena": None}])  # the files are gone
    line.hear("ready", "sit")
    for asked, follows in exchanges(said, asks_worker):
        line.say(asked)
        told = [message for who, message in follows if who == "worker"]
        if asked[0] == "batch":
            now, before = line.hear("result"), next(message for message in told if message[0] == "result")
            heard.append((now[2], without_trace(now[3]), before[2], without_trace(before[3])))
            if not now[5]:
                line.say(["written"])
                line.hear("ready")
        else:
            before = [message for message in told if message[0] == "round"]
            heard.append((*heard_stream(line), [one[1] for message in before for one in message[2]], last(before)))
    line.say(["stop"])


def heard_stream(line):
    parts = []
    while True:
        message = line.hear("round")
        parts += [one[1] for one in message[2]]
        line.say(["go", message[1], [], [], []])
        if message[3]:
            return parts, last([message])


def last(rounds):
    """The outcomes and failures that a stream has ended with."""
    return next((one[1], without_trace(one[2])) for message in rounds for one in message[3])


@pytest.mark.parametrize("model", ["doubler", "counter"])
def test_workers_of_this_version_serve_the_previous_server(tmp_path, model):
    heard = []
    said = conversation("workers", model)
    with answering(tmp_path / "s", lambda line: ask_worker(line, said, heard)):
        command = [*COMMAND, "worker", f"{FILE}:{model.title()}", "--connect", f"unix:{tmp_path}/s", "--once"]
        with Forked(command, stderr=subprocess.PIPE, text=True) as worker:
            _, log = worker.communicate(timeout=PATIENCE_S)
    assert len(heard) == len([name for name, _ in CALLS if name == model]), log
    for told in heard:
        assert told[: len(told) // 2] == told[len(told) // 2 :]


# ---------------------------------------------------------------------------------------------------------------------
# Fronts and owners


def asks_owner(message):
    return message[0] == "requests" and message[3]


def collected(messages):
    """What became of the only request under way: its parts and its end."""
    told = []
    for message in messages:
        for model in message[1]:
            results = iter(message[2])
            told += [next(results) for _, count in model[3] for _ in range(count)]
            for seat in model[4]:
                told.append((seat[1:3] if isinstance(seat, list) else None, next(results)))
                return told
    return None


def numbered(models):
    return {one[1]["model"]["config"]["name"]: one[0] for one in models[1]}


def test_a_previous_front_is_answered_by_this_owner(serve, tmp_path):
    serve(FILE, "--attach", f"unix:{tmp_path}/s", "--worker-kind", "thread")
    said = conversation("fronts")
    before = numbered(first(said, "models"))
    with dialled(tmp_path / "s") as line:
        line.say(first(said, "hello"))
        assert line.hear("open", "refused")[0] == "open"
        there = numbered(line.hear("models"))
        now = {number: there[name] for name, number in before.items()}
        for asked, follows in exchanges(said, asks_owner):
            _, bundles, taken, bodies = asked
            line.say(["requests", [[now[one[0]], *one[1:]] for one in bundles], taken, bodies])
            heard = []
            while (told := collected(heard)) is None:
                heard.append(line.hear("answers"))
            assert told == collected([message for _, message in follows if message[0] == "answers"])


def test_a_front_of_this_version_asks_the_previous_owner(serve, tmp_path):
    said = conversation("fronts")

    def own(line):
        assert line.hear("hello")[1] == first(said, "hello")[1]
        line.say(first(said, "open"))
        line.say(first(said, "models"))
        for asked, follows in exchanges(said, asks_owner):
            while not (message := line.hear("requests"))[3]:
                pass
            assert (message[1][0][0], message[3]) == (asked[1][0][0], asked[3])
            names = {asked[1][0][1][0][0]: message[1][0][1][0][0]}
            for _, answer in follows:
                if answer[0] == "answers":
                    line.say(renamed(answer, names))

    with answering(tmp_path / "s", own):
        front = serve(None, "--owner", f"unix:{tmp_path}/s")
        assert answers(front, CALLS) == ANSWERS


def renamed(answer, names):
    """An answer with other seats."""
    models = []
    for number, heard, room, parts, ended, *more in answer[1]:
        streams = [[names[seat], count] for seat, count in parts]
        seats = [[names[one[0]], *one[1:]] if isinstance(one, list) else names[one] for one in ended]
        models.append([number, heard, room, streams, seats, *more])
    return ["answers", models, answer[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Files


def test_copies_of_models_of_the_previous_version_are_used(tmp_path):
    cache = tmp_path / "cache"
    for name, text in RECORDED["cache"].items():
        path = cache / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    with ExitStack() as stack:
        assert used_cache(Version(ROOT / "src", stack), tmp_path, cache) == ("Dear Ada", True)


# ---------------------------------------------------------------------------------------------------------------------
# Another version of the protocol


@pytest.mark.parametrize("version", [1, 3, "two"])
@pytest.mark.parametrize("about", [{"worker": "w" * 16}, {"role": "caller", "worker": "w" * 16}])
def test_another_version_of_the_protocol_is_refused_in_a_sentence(launch, tmp_path_factory, version, about):
    path = tmp_path_factory.getbasetemp() / "refuses"
    launch(FILE, "--attach", f"unix:{path}", "--worker-kind", "thread")
    with dialled(path) as line:
        line.say(["hello", version, about])
        sentence = f"it speaks version {version} of the worker protocol, this server version {frames.VERSION}"
        _, reason = line.hear("refused")
        assert reason == f"{sentence}; run the same version of forebay on both sides"
