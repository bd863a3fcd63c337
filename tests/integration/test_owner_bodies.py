# SPDX-License-Identifier: Apache-2.0
"""Long bodies between a front and an owner: shared memory on one machine, and what an attacker may say of it."""

import contextlib
import os
import random
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay.owners.detached_bodies import Apart, LinkReader, set_apart
from forebay.workers.memory.landing import Places, landed_in, placed
from forebay.workers.memory.memory_file import make_file, open_file
from forebay.workers.wire import frames

JSON = {"in": "json", "out": "json"}
LONG = 300_000


def text(length, fill="x"):
    return f'"{fill * length}"'.encode()


class Neighbour:
    """A front of these tests on the owner's machine, which shares its memory with it."""

    def __init__(self, path, *, sees=True):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(path)
        self.probe = make_file("test")
        self.places = Places()
        self.read = self.lying = 0
        self.reader = LinkReader(Any, lambda message: message[-1] if message[0] in {"answers", "models"} else None)
        self.said: list[Any] = []
        shown = f"/proc/{os.getpid()}/fd/{self.probe}", os.fstat(self.probe).st_ino
        self.send(["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16, "shares": shown}])
        self.opened = self.hear("open")[1]
        self.numbers = {one[1]["model"]["config"]["name"]: one[0] for one in self.hear("models")[1]}
        if sees:
            self.send(["sees"])

    def send(self, message, *following):
        self.socket.sendall(b"".join([frames.encode(message), *following]))

    def ask(self, model, *bodies, first=1, taken=0, following=()):
        seats = [[first + at, frames.encode_part(JSON), 1, PATIENCE_S, "id"] for at in range(len(bodies))]
        self.send(["requests", [[self.numbers[model], seats, [], []]], taken, list(bodies)], *following)

    def lay(self, data):
        """Put bytes into memory; returns what stands for them."""
        self.laid = placed(data, self.places)
        found = landed_in(self.laid)
        assert found is not None
        return frames.landed(*found)

    def hear(self, kind):
        while True:
            while self.said:
                message = self.said.pop(0)
                if message[0] == kind:
                    return message
            data = self.socket.recv(1 << 20)
            if not data:
                raise EOFError
            self.read += len(data)
            self.said.extend(self.reader.feed(data))

    def answer(self):
        """Return what came of the next request that has ended: its result, or its failure."""
        while True:
            _, models, results = self.hear("answers")
            for model in models:
                for ended in model[4]:
                    failure = ended[2] if isinstance(ended, list) else None
                    self.lying = int(isinstance(results[-1], Apart))
                    return failure or seen(results[-1])

    def is_hung_up_on(self):
        with contextlib.suppress(ConnectionError):
            while self.socket.recv(1 << 20):
                pass
        return True


def seen(result):
    """Return a result, out of the memory of the owner if it lies there."""
    if not isinstance(result, Apart):
        return result
    assert result.place is not None
    path, inode, offset, length = result.place
    descriptor = open_file((path, inode), os.O_RDONLY)
    try:
        return os.pread(descriptor, length, offset)
    finally:
        os.close(descriptor)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return f"{tmp_path_factory.mktemp('owner')}/s"


@pytest.fixture(scope="module")
def owner(launch, path):
    return launch("owned.py", "--attach", f"unix:{path}")


@pytest.fixture(scope="module")
def front(launch, owner, path):
    return launch(None, "--owner", f"unix:{path}")


@pytest.fixture
def neighbour(owner, path):
    made = Neighbour(path)
    with made.socket:
        yield made


def test_long_bodies_and_answers_lie_in_memory(neighbour):
    body = text(LONG)
    neighbour.ask("fails", neighbour.lay(body))
    before = neighbour.read
    assert neighbour.answer() == body
    assert neighbour.read - before < 1000


def test_who_sees_no_memory_gets_the_same_through_the_socket(owner, path):
    other = Neighbour(path, sees=False)
    with other.socket:
        told, pieces = set_apart(text(LONG))
        other.ask("fails", told, following=pieces)
        before = other.read
        assert other.answer() == text(LONG)
        assert other.read - before > LONG


def test_memory_is_used_again_once_the_front_has_read_it(neighbour):
    """Beyond what may lie there at a time, answers go through the socket."""
    body = text(2_000_000)
    for number in range(40):
        neighbour.ask("fails", neighbour.lay(body), first=number + 1)
        before = neighbour.read
        assert neighbour.answer() == body
        is_lying = neighbour.read - before < 1000
        assert is_lying == (number < 33), number
    neighbour.ask("fails", neighbour.lay(body), first=50, taken=33)
    before = neighbour.read
    assert neighbour.answer() == body
    assert neighbour.read - before < 1000
    neighbour.ask("fails", b'"x"', first=51, taken=2)
    assert neighbour.is_hung_up_on()


@pytest.mark.parametrize("seed", range(6))
def test_clients_of_a_front_get_their_own_answers(front, owner, seed):
    chance = random.Random(seed)
    lengths = [chance.choice([5, 60_000, 70_000, 400_000, 1_100_000]) for _ in range(6)]

    def ask(number, length):
        sample = str(number) * length
        return front.call("fails", sample).json() == sample == owner.call("fails", sample).json()

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(ask, range(6), lengths))


class Strange:
    """Files that nobody should read, by what is wrong with them."""

    def __init__(self, folder, owner):
        (folder / "file").write_bytes(bytes(LONG))
        self.file = os.open(folder / "file", os.O_RDONLY)
        self.unsealed = os.memfd_create("test")
        os.ftruncate(self.unsealed, LONG)
        self.short = make_file("test")
        os.ftruncate(self.short, 1000)
        self.owner = owner.process.pid

    def told(self, what, length=LONG):
        inode = os.fstat(getattr(self, what)).st_ino
        return frames.landed(f"/proc/{os.getpid()}/fd/{getattr(self, what)}", inode, 0, length)


@pytest.fixture
def strange(tmp_path, owner):
    made = Strange(tmp_path, owner)
    yield made
    for one in (made.file, made.unsealed, made.short):
        os.close(one)


@pytest.mark.parametrize("what", ["the owner's", "a path", "short", "huge", "twice"])
def test_memory_that_is_no_front_s_own_ends_its_link_and_nothing_else(neighbour, owner, strange, what):
    told = {
        "the owner's": frames.landed(f"/proc/{strange.owner}/fd/5", 7, 0, LONG),
        "a path": frames.landed("/etc/passwd", Path("/etc/passwd").stat().st_ino, 0, LONG),
        "short": strange.told("short"),
        "huge": strange.told("short", 1 << 62),
        "twice": [strange.told("short", 1)] * 10 + [[[strange.told("short", 1)]]],
    }[what]
    neighbour.ask("fails", told)
    assert neighbour.is_hung_up_on()
    assert owner.call("fails", "a").json() == "a"
    assert "Traceback" not in owner.log


@pytest.mark.parametrize("what", ["file", "unsealed"])
def test_memory_that_may_become_shorter_is_not_read(neighbour, owner, strange, what):
    neighbour.ask("fails", strange.told(what))
    assert neighbour.answer()[0] == "Unavailable"
    neighbour.ask("fails", neighbour.lay(text(LONG)), first=2)
    assert neighbour.answer() == text(LONG)


def test_what_changes_while_it_is_read_is_one_body_and_hurts_nobody(neighbour, owner):
    """The owner works on a copy: what its model is given does not change under it."""
    one, other = text(1_000_000, "a"), text(1_000_000, "b")
    told = neighbour.lay(one)
    view = memoryview(neighbour.laid.obj).cast("B")
    for number in range(1, 30):
        neighbour.ask("fails", told, first=number, taken=int(number > 1))
        for _ in range(8):
            view[1 : len(other) - 1] = (other if number % 2 else one)[1:-1]
        answer = neighbour.answer()
        assert len(answer) == len(one)
        assert set(answer[1:-1]) <= set(b"ab")
    assert owner.call("fails", "a").json() == "a"


def test_kill_9_of_either_side_fails_nothing(serve, tmp_path):
    address = f"unix:{tmp_path}/s"
    owner = serve("owned.py", "--attach", address)
    front = serve(None, "--owner", address, "--owner-grace-s", "20")
    sample = "y" * 600_000

    def ask(_):
        return front.call("fails", sample).json() == sample

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(16)))
        asked = [pool.submit(ask, at) for at in range(16)]
        owner.process.send_signal(signal.SIGKILL)
        owner.process.wait()
        successor = serve("owned.py", "--attach", address)
        assert all(one.result() for one in asked)
        assert all(pool.map(ask, range(16)))
    front.process.send_signal(signal.SIGKILL)
    front.process.wait()
    assert successor.call("fails", sample).json() == sample


# ---------------------------------------------------------------------------------------------------------------------
# The budget of the server


@pytest.fixture(scope="module")
def small_path(tmp_path_factory):
    return f"{tmp_path_factory.mktemp('small')}/s"


@pytest.fixture(scope="module")
def small(launch, small_path):
    """An owner with room for one long body and a half."""
    return launch("owned.py", "--attach", f"unix:{small_path}", "--max-buffered-bytes", "8000000")


@pytest.mark.parametrize("way", ["lying", "following"])
def test_a_body_beyond_the_budget_is_refused_and_the_link_stays(small, small_path, way):
    """Its bytes count as those of clients do; they were not counted at all."""  # F72
    caller = Neighbour(small_path)
    with caller.socket:
        for number in range(1, 4):
            if way == "lying":
                caller.ask("fails", caller.lay(text(9_000_000)), first=number)
            else:
                told, pieces = set_apart(text(9_000_000))
                caller.ask("fails", told, first=number, following=pieces)
            answered: Any = caller.answer()
            kind, message, _ = answered
            assert kind == "Unavailable"
            assert "--max-buffered-bytes" in message
        for number in range(9, 13):  # each is counted until its end, and its answer until it was read
            caller.ask("fails", caller.lay(text(3_000_000)), first=number, taken=caller.lying)
            assert caller.answer() == text(3_000_000)
        caller.ask("fails", b'"x"', first=20, taken=caller.lying)
        eventually(lambda: is_empty(small))


def is_empty(server):
    """Tell whether a server has room for nearly all that it may hold."""
    return server.call("fails", "z" * 7_000_000).status_code == 200


def test_many_fronts_hold_no_more_than_the_budget_and_all_are_answered(small, small_path):
    """Each body is refused or answered, whoever holds what; and all is released once."""
    callers = [Neighbour(small_path) for _ in range(6)]
    asked = text(3_000_000)
    with contextlib.ExitStack() as stack:
        for one in callers:
            stack.enter_context(one.socket)
        for first in range(1, 4):
            for number, one in enumerate(callers):
                told, pieces = set_apart(asked)
                taken = 0 if first == 1 else one.lying
                if number % 2:
                    one.ask("fails", one.lay(asked), first=first, taken=taken)
                else:
                    one.ask("fails", told, first=first, taken=taken, following=pieces)
            answers = [one.answer() for one in callers]
            assert {answer if isinstance(answer, bytes) else answer[0] for answer in answers} <= {asked, "Unavailable"}
    eventually(lambda: is_empty(small))


def test_bytes_of_a_front_that_is_gone_are_released(small, small_path):
    for _ in range(6):
        one = Neighbour(small_path)
        told, pieces = set_apart(text(5_000_000))
        one.ask("fails", told, following=[piece[:4_000_000] for piece in pieces])
        one.socket.close()
    eventually(lambda: is_empty(small))


def test_a_front_tells_its_client_of_a_full_budget(launch, small, small_path):
    front = launch(None, "--owner", f"unix:{small_path}")
    answer = front.call("fails", "z" * 9_000_000)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert front.call("fails", "z" * 900_000).status_code == 200
