# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""Workers that dial in: they hang, leave, talk nonsense or say nothing, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from types import SimpleNamespace

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pools.guests import AttachedByThreads
from tests.pools.test_pool_contract import HERE, PATIENCE_S, Rig, Sink, call_off, codes, eventually, run

from forebay.errors import Code, ConfigError, InvalidRequest
from forebay.observe.logs import model_log
from forebay.observe.metrics.author_metrics import MetricStore
from forebay.types.batch import EntryBatch
from forebay.types.call import Request
from forebay.types.server_state import here
from forebay.workers.pools import attached_pool
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.slot_pool import running
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire import frames, shared_secret, worker_connection
from forebay.workers.wire.address import TcpAddress, UnixAddress, bind_unix, parse_address
from forebay.workers.wire.worker_connection import WorkerConnection, WorkerRefused
from forebay.workers.wire.worker_listener import Visitor, VisitorLimits, WorkerListener

ECHO = RunnerSpec(f"{HERE}:Told")
LIMIT_S = 15.0
"""What is late here is late because a test puts the clock forward, and nothing else is late on a busy machine."""
TOKEN = {"worker": "somebody", "shares": True}


class Peer:
    """A worker played by the test, message by message."""

    def __init__(self, door, reader, writer):
        self.door, self.reader, self.writer = door, reader, writer
        self.inbox = frames.FrameReader()

    def say(self, *messages):
        for message in messages:
            self.writer.write(message if isinstance(message, bytes) else frames.encode(message))

    async def hear(self):
        header = await asyncio.wait_for(self.reader.readexactly(4), PATIENCE_S)
        payload = await asyncio.wait_for(self.reader.readexactly(int.from_bytes(header, "big")), PATIENCE_S)
        (message,) = self.inbox.feed(header + payload)
        return message

    async def is_hung_up_on(self, within_s=PATIENCE_S):
        try:
            async with asyncio.timeout(within_s):
                while await self.reader.read(65536):
                    pass
        except ConnectionError:
            pass
        return True


class Scene:
    """A pool behind a door, its honest workers, and peers."""

    def __init__(
        self,
        tmp_path,
        *,
        workers=0,
        secret=None,
        limits=VisitorLimits(),  # noqa: B008
        address=None,
        check=None,
        **options,
    ):
        self.pool = AttachedByThreads(ECHO, workers=workers, **options)
        self.pool.door = WorkerListener(
            address or UnixAddress(str(tmp_path / "s")),
            native=lambda about: WorkerSlot(self.pool, limits.frame_bytes, check),
            secret=secret,
            limits=limits,
        )
        self.pool.shared = self.pool.door.shared
        self.rig = Rig(self.pool)
        self.peers = []

    async def __aenter__(self):
        await self.rig.__aenter__()
        return self

    async def __aexit__(self, *error):
        for peer in self.peers:
            peer.writer.close()
        await asyncio.sleep(0.01)
        self.rig.grace_s = 0.05
        await self.rig.__aexit__(*error)

    async def dial(self):
        address = self.pool.door.address
        if isinstance(address, TcpAddress):
            ends = await asyncio.open_connection(address.host, address.port)
        else:
            ends = await asyncio.open_unix_connection(address.path)
        self.peers.append(Peer(self.pool.door, *ends))
        return self.peers[-1]

    async def join(self, worker="somebody"):
        """A peer that is idle."""
        peer = await self.dial()
        before = self.pool.statistics().slots
        peer.say(["hello", frames.VERSION, {**TOKEN, "worker": worker}])
        assert (await peer.hear())[0] == "open"
        peer.say(["ready", False])
        await eventually(lambda: self.pool.statistics().slots == before + 1)
        return peer

    async def busy(self, body="x", **fields):
        """A batch and the peer that was given it."""
        peer = await self.join()
        batch = self.rig.submit(body, **fields)
        return batch, peer, (await peer.hear())[1]


async def turns(count=20):
    """Lets the loop turn, so that whatever is due happens."""
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.INFO, "forebay.workers")
    return lambda: " | ".join(record.getMessage() for record in caplog.records)


# Who speaks nonsense


@pytest.mark.parametrize(
    "words, reason",
    [
        ([b"GET / HTTP/1.1\r\n\r\n"], "bytes was announced"),
        ([b"\xff\xff\xff\xff"], "bytes was announced"),
        ([b"\0\0\0\0"], "batching protocol, which is not spoken here"),
        ([b"\0\0\0\x05\xdd\xff\xff\xff\xff"], "not msgpack"),
        ([b"\0\0\0\x02\x92\xc1"], "not msgpack"),
        ([b"\0\0\x27\x10" + b"\x91" * 10_000], "not msgpack"),
        ([["hello", 99, {}]], "speaks version 99"),
        ([["hello", frames.VERSION, {}]], "does not speak"),
        ([["hello", frames.VERSION, 7]], "says nothing about it"),
        ([["hello"]], "does not speak"),
        ([["ready"]], "is not what a worker says here"),
        ([7], "expected an array"),
        ([{"__reduce__": 1}], "expected an array"),
    ],
)
def test_who_does_not_say_hello_is_hung_up_on(tmp_path, said, words, reason):
    """G9."""

    async def main():
        async with Scene(tmp_path, workers=1) as scene:
            stranger = await scene.dial()
            stranger.say(*words)
            assert await stranger.is_hung_up_on()
            assert await scene.rig.run("next") == ["next"]

    run(main())
    assert reason in said()


@pytest.mark.parametrize(
    "words, reason",
    [
        ([["ready"]], "while it is idle"),
        ([["hello", frames.VERSION, TOKEN]], "while it is idle"),
        ([["result", 1, ["x"], None, 0.0, True]], "while it is idle"),
        ([["round", 1, [[1, ["x"], None]], []]], "while it is idle"),
        ([["failed", "ModelError", "late", None, ""]], "not a message"),
        ([["nonsense"]], "not a message"),
        ([[]], "does not speak"),
        ([b"\x7f\xff\xff\xff"], "was announced"),
    ],
)
def test_an_idle_worker_that_speaks_out_of_turn_is_hung_up_on(tmp_path, said, words, reason):
    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.join()
            peer.say(*words)
            assert await peer.is_hung_up_on()
            await eventually(lambda: scene.pool.idle == 0)
            assert scene.pool.statistics().left == 1

    run(main())
    assert reason in said()


@pytest.mark.parametrize(
    "answer",
    [
        lambda number: ["result", number, [], None, 0.0, True],
        lambda number: ["result", number, "x", None, 0.0, True],
        lambda number: ["result", number, ["x"], None, "long", True],
        lambda number: ["result", number, ["x"], None, float("nan"), True],
        lambda number: ["result", number, ["x"], {5: ["ModelError", "m", None, ""]}, 0.0, True],
        lambda number: ["result", number, ["x"], {"0": ["ModelError", "m", None, ""]}, 0.0, True],
        lambda number: ["result", number, ["x"], {0: ["ModelError"]}, 0.0, True],
        lambda number: ["result", number, ["x"], {0: [["k"], "m", None, ""]}, 0.0, True],
        lambda number: ["result", number, ["x"], [1], 0.0, True],
        lambda number: ["result", number, [frames.shared(0, 100)], None, 0.0, True],
        lambda number: ["result", number, ["refuse me"], None, 0.0, True],
        lambda number: ["result", number + 1, ["x"], None, 0.0, True],
        lambda number: ["result", number],
        lambda number: ["round", 1, [[number, ["x"], None]], []],
        lambda number: ["ready"],
        lambda number: ["nonsense"],
    ],
)
def test_the_batch_of_a_worker_that_answers_nonsense_is_handed_on_once(tmp_path, answer):
    """G2: its jobs are handed on once and then answered 503; nobody else notices."""

    def check(batch, outcomes):
        if "refuse me" in outcomes:
            raise InvalidRequest("not of the right type")

    async def main():
        async with Scene(tmp_path, check=check) as scene:
            batch, rogue, number = await scene.busy("theirs")
            rogue.say(answer(number))
            assert await rogue.is_hung_up_on()
            second = await scene.join("another rogue")
            number = (await second.hear())[1]  # handed on
            second.say(answer(number))
            assert codes(await scene.rig.outcomes(batch)) == [Code.UNAVAILABLE]
            assert batch.attempts == 2

    run(main())


def test_what_lost_its_worker_is_known_to_wait_until_another_one_takes_it(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            batch, peer, _ = await scene.busy()
            (entry,) = batch.entries
            assert scene.pool.whereabouts(entry) == ""
            peer.writer.close()
            told = await eventually(lambda: scene.pool.whereabouts(entry))
            assert told == "before another worker took it; the one that held it was gone"
            second = await scene.join("another")
            assert (await second.hear())[0] == "batch"
            assert scene.pool.whereabouts(entry) == ""

    run(main())


def test_a_flood_is_cut_off_and_its_batch_handed_on(tmp_path, said):
    async def main():
        async with Scene(tmp_path, limits=VisitorLimits(frame_bytes=100_000)) as scene:
            batch, rogue, _ = await scene.busy("theirs")
            rogue.say((100_001).to_bytes(4, "big"), bytes(50_000))
            assert await rogue.is_hung_up_on()
            honest = await scene.join()
            number = (await honest.hear())[1]
            honest.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]

    run(main())
    assert "100001 bytes was announced, at most 100000" in said()


def test_bytes_without_end_where_a_hello_belongs_are_cut_off(tmp_path, said, clock):
    async def main():
        async with Scene(tmp_path, limits=VisitorLimits(hello_s=LIMIT_S)) as scene:
            stranger = await scene.dial()
            stranger.say((1 << 20).to_bytes(4, "big"))
            with contextlib.suppress(ConnectionError):
                for _ in range(20):
                    stranger.say(bytes(1000))
                    await turns()
                    clock.forward(LIMIT_S / 10)
            assert await stranger.is_hung_up_on()

    run(main())
    assert "did not say what it is within 15 s" in said()


@pytest.mark.parametrize("words", [[], [b"\0"], [frames.encode(["hello", frames.VERSION, TOKEN])[:-1]]])
def test_silence_is_cut_off(tmp_path, said, clock, words):
    async def main():
        async with Scene(tmp_path, limits=VisitorLimits(hello_s=LIMIT_S)) as scene:
            silent = await scene.dial()
            silent.say(*words)
            await eventually(lambda: scene.pool.door._visitors)
            clock.forward(LIMIT_S)
            assert await silent.is_hung_up_on()
            peer = await scene.join()  # one that has said hello may take its time
            clock.forward(2 * LIMIT_S)
            await turns()
            assert scene.pool.idle == 1
            assert not peer.reader.at_eof()

    run(main())
    assert "did not say what it is" in said()


def test_a_hello_may_come_byte_by_byte(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.dial()
            for byte in frames.encode(["hello", frames.VERSION, TOKEN]) + frames.encode(["ready", False]):
                peer.say(bytes([byte]))
                await asyncio.sleep(0)
            assert (await peer.hear())[0] == "open"
            await eventually(lambda: scene.pool.idle == 1)

    run(main())


def test_connections_are_limited_and_room_is_made_by_who_leaves(tmp_path, said):
    async def main():
        async with Scene(tmp_path, limits=VisitorLimits(connections=1)) as scene:
            first = await scene.join()
            second = await scene.dial()
            second.say(["hello", frames.VERSION, TOKEN])
            assert await second.is_hung_up_on()
            first.writer.close()
            await eventually(lambda: scene.pool.idle == 0)
            await scene.join()

    run(main())
    assert "all 1 connections for workers are taken" in said()


# Who hangs


def test_a_worker_that_hangs_is_dropped_and_its_batch_handed_on(tmp_path, said, clock):
    """G2, G5."""

    async def main():
        async with Scene(tmp_path, hang_s=LIMIT_S) as scene:
            batch, hanging, _ = await scene.busy("theirs")
            clock.forward(LIMIT_S)
            assert await hanging.is_hung_up_on()
            honest = await scene.join("another")
            number = (await honest.hear())[1]
            honest.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]
            clock.forward(2 * LIMIT_S)
            await turns()
            assert scene.pool.idle == 1  # who has nothing to do does not hang

    run(main())
    assert "it owes an answer for 15 s" in said()


def test_the_idle_slots_of_a_worker_that_hangs_are_given_nothing_more(tmp_path, clock):
    async def main():
        async with Scene(tmp_path, hang_s=LIMIT_S) as scene:
            idle = await scene.join("two slots")
            busy = await scene.join("two slots")
            other = await scene.join("another")
            batch = scene.rig.submit("x")
            number = (await idle.hear())[1]
            clock.forward(LIMIT_S)
            assert await idle.is_hung_up_on()
            assert await busy.is_hung_up_on()
            number = (await other.hear())[1]
            other.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]
            assert (scene.pool.statistics().alive, scene.pool.statistics().left) == (1, 1)

    run(main())


@pytest.mark.parametrize("more_s", [0.0, 2 * LIMIT_S])
def test_a_stream_that_comes_slowly_does_not_hang_and_one_that_ends_coming_does(tmp_path, clock, more_s):
    async def main():
        sink = Sink(is_open=True)
        async with Scene(tmp_path, hang_s=LIMIT_S) as scene:
            scene.pool.more_s = more_s
            batch, peer, number = await scene.busy("x", on_parts=sink)
            for come in range(1, 6):
                clock.forward(LIMIT_S / 2)
                await turns()
                peer.say(["round", come, [[number, [b"p"], None]], []])
                await eventually(lambda come=come: len(sink.parts) == come)
            clock.forward(more_s)
            await turns()
            assert scene.pool.statistics().alive == 1
            clock.forward(LIMIT_S)
            assert codes(await scene.rig.outcomes(batch)) == [Code.UNAVAILABLE]  # begun streams are not begun again

    run(main())


def test_a_worker_that_waits_for_slow_clients_does_not_hang(tmp_path, clock):
    async def main():
        sink = Sink()
        async with Scene(tmp_path, hang_s=LIMIT_S) as scene:
            batch, peer, number = await scene.busy("x", on_parts=sink)
            peer.say(*(["round", come, [[number, [b"p"], None]], []] for come in range(1, 17)))
            await eventually(lambda: len(sink.held) == 16)
            for _ in range(3):
                clock.forward(LIMIT_S)
                await turns()
            sink.let_go()
            assert await peer.hear() == ["go", 16, [], [], [[number, 8], [number, 8]]]
            peer.say(["result", number, [None], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == [None]

    run(main())


@pytest.mark.parametrize("goes_on", [True, False])
def test_a_batch_and_its_answer_that_move_slowly_do_not_hang_and_those_that_stop_do(tmp_path, clock, goes_on):
    """A line of 10 Mbit/s needs longer for a batch of images than a worker may be silent."""

    async def main():
        async with Scene(tmp_path, hang_s=LIMIT_S) as scene:
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, {"worker": "far away"}])
            await peer.hear()
            peer.say(["ready", False])
            await eventually(lambda: scene.pool.statistics().slots == 1)
            body = bytes(1 << 23)
            batch = scene.rig.submit(body)
            begun = await peer.reader.readexactly(1 << 20)
            size = int.from_bytes(begun[:4], "big") + 4
            while len(begun) < size:
                clock.forward(LIMIT_S / 2)
                await turns()
                begun += await asyncio.wait_for(peer.reader.readexactly(min(1 << 20, size - len(begun))), PATIENCE_S)
            (message,) = frames.FrameReader().feed(begun)
            answer = frames.encode(["result", message[1], [bytes(1 << 20)], None, 0.0, True])
            for at in range(0, len(answer) if goes_on else len(answer) // 2, 1 << 17):
                clock.forward(LIMIT_S / 2)
                await turns()
                peer.say(answer[at : at + (1 << 17)])
                await peer.writer.drain()
                await turns()
            if goes_on:
                assert await scene.rig.outcomes(batch) == [bytes(1 << 20)]
            else:
                clock.forward(LIMIT_S)
                assert await peer.is_hung_up_on()

    run(main())


# Who leaves, and when nobody is left


def test_who_says_that_it_leaves_is_given_nothing_more_and_finishes_what_it_has(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            idle = await scene.join("first")
            idle.say(["leaving"])
            assert await idle.hear() == ["stop"]
            assert scene.pool.idle == 0
            batch, busy, number = await scene.busy("x")
            busy.say(["leaving"])
            await asyncio.sleep(0.01)
            busy.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]
            assert await busy.hear() == ["stop"]
            assert scene.pool.idle == 0

    run(main())


def test_a_batch_that_crosses_with_a_farewell_is_run(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.join()
            peer.say(["leaving"])
            batch = scene.rig.submit("x")  # in the same turn: the farewell was not read yet
            number = (await peer.hear())[1]
            peer.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]
            assert await peer.hear() == ["stop"]

    run(main())


def test_after_the_grace_period_the_pool_says_that_nobody_is_there(tmp_path, said, clock):
    async def main():
        async with Scene(tmp_path, grace_s=LIMIT_S) as scene:
            woken = []
            scene.pool.watch(lambda: woken.append(scene.pool.idle))
            batch, peer, _ = await scene.busy("x")
            peer.writer.close()
            await eventually(lambda: scene.pool.statistics().left == 1)
            clock.forward(LIMIT_S)
            assert codes(await scene.rig.outcomes(batch)) == [Code.UNAVAILABLE]
            await eventually(lambda: woken)
            assert scene.pool.statistics().alive == 0
            later = scene.rig.submit("y")
            (failure,) = await scene.rig.outcomes(later)
            assert "no worker of 'told' is attached" in failure.error.message
            again = await scene.join()
            assert scene.pool.idle == 1
            batch = scene.rig.submit("z")
            number = (await again.hear())[1]
            again.say(["result", number, ["done"], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == ["done"]

    run(main())
    assert "no worker attached for 'told' within 15 s" in said()


def test_joining_and_leaving_is_counted(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            first, second = await scene.join("a"), await scene.join("a")
            third = await scene.join("b")
            found = scene.pool.statistics()
            assert (found.alive, found.slots, found.joined, found.left) == (2, 3, 2, 0)
            first.writer.close()
            await eventually(lambda: scene.pool.statistics().slots == 2)
            assert scene.pool.statistics().left == 0
            second.writer.close()
            third.writer.close()
            await eventually(lambda: scene.pool.statistics().left == 2)
            assert scene.pool.statistics().alive == 0

    run(main())


def test_a_worker_that_comes_and_goes_is_told_once_a_second(tmp_path, caplog, clock, monkeypatch):
    """One that ended as soon as it had begun wrote 190 lines in a minute."""
    monkeypatch.setattr(attached_pool, "QUIET_S", LIMIT_S)
    caplog.set_level(logging.INFO, "forebay.workers")

    def told():
        return [line for record in caplog.records if "'told'" in (line := record.getMessage())]

    async def main():
        async with Scene(tmp_path) as scene:
            for _ in range(20):
                flapping = await scene.join()
                flapping.writer.close()
                await eventually(lambda: scene.pool.statistics().alive == 0)
            await scene.join("stays")
            assert told() == ["a worker has joined 'told'; 1 are here"]
            clock.forward(LIMIT_S)
            await eventually(lambda: len(told()) == 2)
            clock.forward(LIMIT_S)
            await turns()
            await scene.join("late")
            assert len(told()) == 3

    run(main())
    assert told()[1:] == [
        "workers of 'told' come and go: 20 more have joined and 20 have left; 1 are here",
        "a worker has joined 'told'; 2 are here",
    ]


class Written(logging.Handler):
    """Keeps what is written of what workers say."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


@pytest.mark.parametrize("where", ["text", "trace", "fields", "many fields"])
def test_long_lines_of_a_worker_are_cut_and_only_so_much_of_them_is_written_in_a_second(tmp_path, monkeypatch, where):
    """One worker wrote half a gigabyte of the server's log in six seconds."""
    long = "x" * 100_000
    line = {
        "text": ["model", logging.INFO, 1.0, long],
        "trace": ["model", logging.INFO, 1.0, "short", long],
        "fields": ["model", logging.INFO, 1.0, "short", "", {"a": long, "b": [long], long: 1}],
        "many fields": [
            "model",
            logging.INFO,
            1.0,
            "short",
            "",
            {f"name{number}": "x" * 5000 for number in range(180)},
        ],
    }[where]
    written = Written()
    monkeypatch.setattr(model_log, "level", logging.INFO)
    monkeypatch.setattr(model_log, "writers", [written])

    def told():
        return [one for one in written.records if "lines of a worker were dropped" in one.msg]

    def lines():
        return [str(vars(one)) for one in written.records if one not in told()]

    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.join()
            peer.say(*[["log", 0, line]] * 200)
            await eventually(lambda: len(lines()) + sum(int(one.msg.split()[0]) for one in told()) == 200)
            assert (await scene.join("another")) is not None

    began = time.monotonic()
    run(main())
    seconds = int(time.monotonic() - began) + 2  # in some of which a busy machine may drop nothing
    assert where == "many fields" or "characters more" in lines()[0]
    assert max(map(len, lines())) < 300_000
    assert sum(map(len, lines())) < seconds * (model_log.CHARACTERS + 400_000)


def test_what_is_said_while_another_thread_sends_is_sent_before_the_worker_hangs_up(tmp_path, monkeypatch):
    """The last metrics of a worker that was told to end were lost where its "leaving" was not quite sent yet."""
    told = []
    monkeypatch.setattr(here(MetricStore), "told", lambda process, names, data: told.append(data))

    async def main():
        async with Scene(tmp_path) as scene:
            worker = await asyncio.to_thread(scene.pool.dial)
            worker.send(["ready", False])
            with worker._sending:
                worker.send_aside(["metrics", b"the last"])
                closing = asyncio.ensure_future(asyncio.to_thread(worker.close))
                await asyncio.wait([closing], timeout=0.05)
            await closing
            await eventually(lambda: told == [b"the last"])

    run(main())


def test_a_worker_hangs_up_although_the_server_takes_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_connection, "LAST_WORDS_S", 0.05)

    async def main():
        async with Scene(tmp_path) as scene:
            stuck, full = [await asyncio.to_thread(scene.pool.dial) for _ in range(2)]
            with stuck._sending:
                await asyncio.to_thread(stuck.close)
            full._aside.append(bytes(1 << 24))  # nobody reads meanwhile: the server is on this loop
            full.close()
            assert stuck._socket.fileno() == full._socket.fileno() == -1

    run(main())


# Secrets

SECRET = b"a secret of the tests"


def greet(door, secret):
    """Dials as a worker does, in a thread."""
    return asyncio.to_thread(lambda: WorkerConnection(door.address, TOKEN, secret).close())


def test_who_knows_the_secret_is_let_in_and_who_does_not_is_told_why(tmp_path, said):
    async def main():
        async with Scene(tmp_path, secret=SECRET, address=TcpAddress("127.0.0.1", 0)) as scene:
            await greet(scene.pool.door, SECRET)
            with pytest.raises(WorkerRefused, match="its secret is not this server's"):
                await greet(scene.pool.door, b"another secret of theirs")
            with pytest.raises(WorkerRefused, match="this server asks for a secret"):
                await greet(scene.pool.door, None)
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, {**TOKEN, "nonce": shared_secret.nonce()}])
            assert (await peer.hear())[0] == "challenge"
            peer.say(["ready"])  # goes on as if it had been let in
            assert (await peer.hear())[0] == "refused"
            assert scene.pool.statistics().joined == 0

    run(main())
    assert "refused: its secret is not this server's" in said()


@pytest.mark.parametrize("more", [[{}] * 60_000, b"no plain data"])
def test_of_a_hello_little_is_read_before_it_is_proven(tmp_path, more):
    """A megabyte of empty maps held the loop for 0.1 s, whoever sent it."""

    async def main():
        async with Scene(tmp_path, secret=SECRET) as scene:
            answers = []
            for secret in (b"another secret of theirs", SECRET):
                peer = await scene.dial()
                mine = shared_secret.nonce()
                peer.say(["hello", frames.VERSION, {**TOKEN, "more": more, "nonce": mine}])
                kind, theirs = await peer.hear()
                assert kind == "challenge"
                peer.say(["proof", shared_secret.proof(secret, "worker", theirs, mine)])
                answers.append(await peer.hear())
            assert answers[0] == ["refused", "its secret is not this server's"]
            assert answers[1][0] == "welcome"
            kind, reason = await peer.hear()
            assert kind == "refused"
            assert reason in {"it has more than 50000 values", "expected plain data, got bytes"}

    run(main())


PROVEN_BY_NOTHING = [
    ["proof"],
    ["proof", [{}] * 60_000],
    ["proof", "text"],
    [],
    {},
    [b"proof", b""],
    b"\0\0\0\2\x92\xc1",
]


@pytest.mark.parametrize("said_then", PROVEN_BY_NOTHING)
def test_what_is_no_proof_is_refused(tmp_path, said_then):
    async def main():
        async with Scene(tmp_path, secret=SECRET) as scene:
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, {**TOKEN, "nonce": shared_secret.nonce()}])
            assert (await peer.hear())[0] == "challenge"
            peer.say(said_then)
            assert (await peer.hear())[0] == "refused"
            assert await peer.is_hung_up_on()

    run(main())


def test_no_byte_of_the_secret_travels_and_no_proof_is_good_twice(tmp_path):
    async def main():
        heard, answer = b"", []
        async with Scene(tmp_path, secret=SECRET) as scene:
            mine = shared_secret.nonce()
            given = None
            for _ in range(2):
                peer = await scene.dial()
                peer.say(["hello", frames.VERSION, {**TOKEN, "nonce": mine}])
                _, theirs = await peer.hear()
                given = given or shared_secret.proof(SECRET, "worker", theirs, mine)
                peer.say(["proof", given])
                answer = await peer.hear()
                heard += frames.encode(answer) + given
                if answer[0] == "welcome":
                    assert shared_secret.is_proof(answer[1], SECRET, "server", theirs, mine)
                    assert answer[1] != given
            assert answer[0] == "refused"
        assert SECRET not in heard

    run(main())


@pytest.mark.parametrize("knows", [False, True])
def test_a_worker_with_a_secret_serves_no_server_that_does_not_prove_it(tmp_path, knows):
    """What answers the challenge with rubbish, or does not ask at all, is given nothing."""

    async def main():
        async with Scene(tmp_path) as scene:
            with pytest.raises(WorkerRefused, match="does not prove that it knows the secret"):
                await greet(scene.pool.door, SECRET)
            assert scene.pool.statistics().joined == 0

    async def impostor():
        async def pretend(reader, writer):
            await reader.read(1000)
            writer.write(frames.encode(["challenge", b"n" * 32]))
            await reader.read(1000)
            writer.write(frames.encode(["welcome", b"p" * 32]) + frames.encode(["open", {}]))
            await reader.read(1000)
            writer.close()

        path = str(tmp_path / "impostor")
        server = await asyncio.start_unix_server(pretend, path)
        with pytest.raises(WorkerRefused, match="does not prove"):
            await asyncio.to_thread(WorkerConnection, UnixAddress(path), TOKEN, SECRET)
        server.close()

    run(impostor() if knows else main())


def test_a_port_that_others_can_reach_needs_a_secret():
    with pytest.raises(ConfigError, match="so set a secret"):
        WorkerListener(TcpAddress("0.0.0.0", 0), native=lambda about: WorkerSlot(AttachedPool("x")))
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        WorkerListener(TcpAddress(host, 0), native=lambda about: WorkerSlot(AttachedPool("x")))


def test_secrets_are_read_from_values_files_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv(shared_secret.VARIABLE, raising=False)
    assert shared_secret.read_secret(None, "--secret") is None
    assert shared_secret.read_secret(SECRET.decode(), "--secret") == SECRET
    (tmp_path / "secret").write_bytes(SECRET + b"\n")
    assert shared_secret.read_secret(f"@{tmp_path}/secret", "--secret") == SECRET
    (tmp_path / "secret").write_text("\ufeff" + SECRET.decode(), encoding="utf-8")
    assert shared_secret.read_secret(f"@{tmp_path}/secret", "--secret") == SECRET
    monkeypatch.setenv(shared_secret.VARIABLE, f"@{tmp_path}/secret")
    assert shared_secret.read_secret(None, "--secret") == SECRET
    for wrong, message in [
        ("short", "--secret: expected a secret of at least 16 bytes, got 5;"),
        ("@/nowhere/secret", "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            shared_secret.read_secret(wrong, "--secret")


# Memory that is shared, or not


def test_large_bodies_go_through_the_socket_where_memory_is_not_shared():
    async def main():
        pool = AttachedByThreads(ECHO, workers=1)
        pool.door.address = TcpAddress("127.0.0.1", 0)
        async with Rig(pool) as rig:
            assert pool.shared() is None
            bodies = [bytes([number]) * (600 * 1024) for number in range(4)]
            assert await rig.run(*bodies, "small") == [*bodies, "small"]

    run(main())


@pytest.mark.linux
def test_a_worker_that_cannot_open_the_shared_memory_says_so_and_is_sent_bytes(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, TOKEN])
            kind, options = await peer.hear()
            assert (kind, bool(options["arena"])) == ("open", True)
            peer.say(["ready", False])
            await eventually(lambda: scene.pool.idle == 1)
            body = b"b" * 600_000
            batch = scene.rig.submit(body)
            _, number, bodies, _, _ = await peer.hear()
            assert bodies == [body]
            peer.say(["result", number, [body], None, 0.0, True])
            assert await scene.rig.outcomes(batch) == [body]

    run(main())


def test_a_worker_that_does_not_say_that_it_shares_is_offered_nothing(tmp_path):
    async def main():
        async with Scene(tmp_path) as scene:
            peer = await scene.dial()
            peer.say(["hello", frames.VERSION, {"worker": "of an older version"}])
            assert (await peer.hear())[1]["arena"] is None

    run(main())


# Addresses


@pytest.mark.parametrize(
    "text, found",
    [
        ("unix:a.socket", UnixAddress("a.socket")),
        ("unix:/run/a:b", UnixAddress("/run/a:b")),
        ("tcp:127.0.0.1:9000", TcpAddress("127.0.0.1", 9000)),
        ("tcp:[::1]:0", TcpAddress("::1", 0)),
    ],
)
def test_addresses_are_read_and_written(text, found):
    assert parse_address(text) == found
    assert str(found) == text


@pytest.mark.parametrize(
    "text, hint",
    [
        ("/run/a.socket", "did you mean unix:/run/a.socket"),
        ("localhost:9000", "did you mean tcp:localhost:9000"),
        ("http:localhost:9000", "unix:PATH or tcp:HOST:PORT"),
        ("unix:", "unix:PATH or tcp:HOST:PORT"),
        ("tcp:9000", "unix:PATH or tcp:HOST:PORT"),
        ("tcp:host:", "unix:PATH or tcp:HOST:PORT"),
        ("tcp:host:99999", "unix:PATH or tcp:HOST:PORT"),
        ("tcp:host:٣", "unix:PATH or tcp:HOST:PORT"),
        ("http://127.0.0.1:8080", "did you mean tcp:127.0.0.1:8080?"),  # F47
        ("http://127.0.0.1:8080/", "did you mean tcp:127.0.0.1:8080?"),  # F47
        ("tcp://127.0.0.1:8080", "did you mean tcp:127.0.0.1:8080?"),  # F47
        ("tcp:127.0.0..1:8080", "localhost, got '127.0.0..1'"),  # F47
        ("tcp:.:8080", "localhost, got '.'"),  # F47
        ("tcp:" + "x" * 64 + ":8080", "expected an address or a host name"),  # F47
        ("tcp:a b:8080", "localhost, got 'a b'"),  # F47
        ("unix:/" + "x" * 120, "121 bytes, the kernel takes at most 107"),
    ],
)
def test_what_is_no_address_is_explained(text, hint):
    with pytest.raises(ConfigError) as caught:
        parse_address(text)
    assert hint in caught.value.message


def test_a_socket_is_private_and_what_a_killed_server_left_is_replaced(tmp_path):
    address = UnixAddress(str(tmp_path / "s"))
    bind_unix(address).close()  # never listened on: nobody answers there
    with bind_unix(address) as again:
        assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600
        again.listen()
        with pytest.raises(ConfigError, match="another server listens on"):
            bind_unix(address)


def test_what_is_in_the_way_of_a_socket_is_left_alone(tmp_path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for name in ("file", "link"):
        with pytest.raises(ConfigError, match="is not a socket"):
            bind_unix(UnixAddress(str(tmp_path / name)))
    assert (tmp_path / "file").read_text() == "precious"
    with pytest.raises(ConfigError, match="there is no folder"):
        bind_unix(UnixAddress(str(tmp_path / "nowhere" / "s")))


def test_a_socket_of_another_user_is_left_alone(tmp_path, monkeypatch):
    with socket.socket(socket.AF_UNIX) as theirs:
        theirs.bind(str(tmp_path / "s"))
        monkeypatch.setattr("os.geteuid", lambda: 12345)
        with pytest.raises(ConfigError, match="belongs to another user"):
            bind_unix(UnixAddress(str(tmp_path / "s")))


def test_a_door_removes_its_own_socket_only(tmp_path):
    async def main():
        door = WorkerListener(UnixAddress(str(tmp_path / "s")), native=lambda about: WorkerSlot(AttachedPool("x")))
        await door.start()
        door.stop()
        assert not (tmp_path / "s").exists()
        await door.start()
        (tmp_path / "s").unlink()
        (tmp_path / "s").touch()
        door.stop()
        assert (tmp_path / "s").exists()

    run(main())


def test_visitors_that_are_refused_are_logged_once_a_second(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("forebay.workers.wire.worker_listener.time", SimpleNamespace(monotonic=lambda: 7.5))

    async def main():
        door = WorkerListener(UnixAddress(str(tmp_path / "s")), native=lambda about: WorkerSlot(AttachedPool("x")))
        await door.start()
        for _ in range(5):
            reader, writer = await asyncio.open_unix_connection(tmp_path / "s")
            writer.write(frames.encode(["nonsense"]))
            assert b"refused" in await reader.read()
            writer.close()
        lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert lines == ["a worker was refused: 'nonsense' is not what a worker says here"]
        door.stop()

    run(main())


@pytest.mark.parametrize(
    "words, reason",
    [
        (
            ["ready", False],
            "it does not speak the protocol: 'result' is not a message of the protocol while it is idle",
        ),
        (["failed", "RunnerFailed", "no such file", None, ""], "it could not load the model of 'told': no such file"),
    ],
)
def test_workers_that_are_hung_up_on_are_logged_once_a_second(tmp_path, caplog, monkeypatch, words, reason):
    """One that failed and dialled again wrote 500 lines a second."""
    monkeypatch.setattr("forebay.workers.pools.attached_pool.time", SimpleNamespace(monotonic=lambda: 7.5))
    monkeypatch.setattr(AttachedByThreads, "failed", AttachedPool.failed)

    async def main():
        address = TcpAddress("127.0.0.1", 0)
        async with Scene(tmp_path, address=address) as scene:
            for _ in range(5):
                peer = await scene.dial()
                peer.say(["hello", frames.VERSION, TOKEN], words, ["result", 7, [], None, 0.0, True])
                assert await peer.is_hung_up_on()
            lines = [text for record in caplog.records if "hung up" in (text := record.getMessage())]
            assert len(lines) == 1
            assert re.fullmatch(rf"worker 127\.0\.0\.1:\d+ was hung up on: {re.escape(reason)}", lines[0])

    run(main())
    assert caplog.messages[-1] == f"4 more were hung up on and not logged: {reason}"


# Whatever is said


class Line:
    """A transport that remembers."""

    def __init__(self):
        self.written, self.closed, self.protocol = b"", False, None

    def write(self, data):
        self.written += data

    def close(self):
        self.closed = True

    abort = close

    def is_closing(self):
        return self.closed

    def set_protocol(self, protocol):
        self.protocol = protocol

    def get_extra_info(self, name) -> object:
        return None


@pytest.mark.parametrize("when", ["as it ends", "when it has ended", "before a turn", "after a turn", "amid the batch"])
def test_a_batch_that_a_worker_never_read_was_not_tried_whenever_it_ended(monkeypatch, when):
    async def main():
        pool = AttachedPool("told", grace_s=None)
        monkeypatch.setattr(pool, "greeted", lambda slot, _about: (setattr(slot, "worker", id(slot)), slot.open({})))
        batch, answers = EntryBatch(entries=[Request(body=bytes(4_000_000), reply=print)], key=None, rows=1), []
        greeting = frames.encode(["hello", frames.VERSION, {"worker": "w" * 16}]) + frames.encode(["ready"])

        def submit():
            pool.submit(batch, lambda _batch, outcomes: answers.append(outcomes))

        here, there = socket.socketpair(socket.AF_UNIX)
        slot, loop = WorkerSlot(pool), asyncio.get_running_loop()
        await loop.create_connection(lambda: slot, sock=here)
        there.sendall(greeting)
        await eventually(lambda: pool.idle == 1)
        there.recv(10_000)
        if when == "as it ends":
            slot.eof_received = submit
        elif when == "when it has ended":
            slot.eof_received = lambda: loop.call_soon(submit) and None
        else:
            submit()
        if when == "amid the batch":
            while len(there.recv(10_000)) == 10_000:
                pass
        there.close()
        if when == "after a turn":
            await asyncio.sleep(0)
        if not when.startswith(("as", "when")):
            slot.hear_out()
        await eventually(lambda: slot._conversation.state == "gone" and not pool.idle)
        await eventually(lambda: len(pool._orphans) == 1)
        assert batch.attempts == 0
        line, other = Line(), WorkerSlot(pool)
        other.connection_made(line)
        other.data_received(greeting)
        assert batch.attempts == 1
        other.connection_lost(None)
        assert not answers, "it has killed one worker only"
        await pool.stop(0.0)

    uvloop.run(main())


class Falling(Line):
    """A line to a worker of this machine that hears the answer to its hello and dies of what it reads next."""

    def write(self, data):
        if not self.written:
            super().write(data)
        elif not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, ConnectionResetError())

    def get_extra_info(self, name):
        return SimpleNamespace(family=socket.AF_UNIX)


@pytest.mark.parametrize("samples", [1, 3])
def test_a_batch_that_ends_every_worker_that_begins_to_read_it_is_given_to_a_few(monkeypatch, samples):
    async def main():
        pool = AttachedPool("told", grace_s=None, isolates=True)
        monkeypatch.setattr(pool, "greeted", lambda slot, _about: slot.open({}))
        entries, answers = [Request(body=b"x", reply=print) for _ in range(samples)], []
        deaths = 0
        while not answers and deaths < 100:
            line, slot = Falling(), WorkerSlot(pool)
            line.set_protocol(slot)
            slot.connection_made(line)
            slot.data_received(
                frames.encode(["hello", frames.VERSION, {"worker": "w" * 16}]) + frames.encode(["ready"])
            )
            if not deaths:
                pool.submit(EntryBatch(entries, None, samples), lambda _batch, outcomes: answers.append(outcomes))
            deaths += 1
            await asyncio.sleep(0)
        (outcomes,) = answers
        assert deaths == (5 if samples == 1 else 4 + samples)
        assert {outcome.error.code for outcome in outcomes} == {Code.UNAVAILABLE}
        await pool.stop(0.0)

    asyncio.run(main())


def test_a_stream_that_lost_its_worker_waits_for_a_seat_of_another(monkeypatch):
    async def main():
        pool = AttachedPool("told", grace_s=None, seats=1)
        monkeypatch.setattr(pool, "greeted", lambda slot, _about: slot.open({}))
        first, second = WorkerSlot(pool), WorkerSlot(pool)
        for slot in (first, second):
            slot.connection_made(Line())
            hello = ["hello", frames.VERSION, {"worker": "w" * 16, "seats": True}]
            slot.data_received(frames.encode(hello) + frames.encode(["sit"]))
        lost, other = (EntryBatch([Request(body=b"x", reply=print)], "a", 1) for _ in range(2))
        pool.submit(lost, print)
        pool.submit(other, print)
        first.connection_lost(None)
        assert running(second) == [other]
        assert pool.whereabouts(lost.entries[0]).startswith("before another worker took it")
        (name,) = second.seating.open
        second.data_received(frames.encode(["round", 1, [], [[name, [b"r"], None, 0.1, None]]]))
        assert running(second) == [lost]
        await pool.stop(0.0)

    asyncio.run(main())


words = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(0, 3), inner, max_size=3)
    ),
    max_leaves=8,
)
kinds = st.sampled_from(["hello", "proof", "ready", "result", "round", "failed", "leaving", "batch", "stop", ""])
spoken = st.tuples(kinds, st.lists(words | st.integers(0, 3) | st.just("mine"), max_size=5)).map(
    lambda said: [said[0], *said[1]]
)
utterances = st.lists(spoken | words | st.binary(max_size=20), max_size=6)


@settings(max_examples=150, deadline=None)
@given(has_greeted=st.booleans(), is_busy=st.booleans(), said=utterances, cut=st.integers(1, 40))
def test_nothing_that_is_said_raises_and_every_batch_is_answered_once(has_greeted, is_busy, said, cut):
    """G2, G8, G9."""

    async def main():
        pool = AttachedPool("told", grace_s=None)
        door = WorkerListener(UnixAddress("unused"), native=lambda about: WorkerSlot(pool))
        line, visitor, answers = Line(), Visitor(door), []
        visitor.connection_made(line)
        if has_greeted:
            visitor.data_received(frames.encode(["hello", frames.VERSION, TOKEN]))
            line.protocol.data_received(frames.encode(["ready"]))
        if has_greeted and is_busy:
            entries = [Request(body=b"x", reply=print), Request(body=b"y", reply=print)]
            pool.submit(
                EntryBatch(entries=entries, key=None, rows=2), lambda _batch, outcomes: answers.append(outcomes)
            )
        data = b""
        for message in said:
            if isinstance(message, list) and line.protocol is not None:
                data += frames.encode(
                    [next(iter(line.protocol.seating.open), 0) if word == "mine" else word for word in message]
                )
            else:
                data += message if isinstance(message, bytes) else frames.encode(message)
        for start in range(0, len(data), cut):
            if not line.closed:
                (line.protocol or visitor).data_received(data[start : start + cut])
        (line.protocol or visitor).connection_lost(None)
        await pool.stop(0.0)
        assert len(answers) == (has_greeted and is_busy)

    asyncio.run(main())


def test_stop_does_not_wait_for_what_nobody_waits_for(tmp_path):
    # F48
    async def main():
        started, end = tmp_path / "started", tmp_path / "end"
        async with Scene(tmp_path, workers=1) as scene:
            batch = scene.rig.submit(["until", str(started), str(end)])
            await eventually(started.exists)
            call_off(batch)
            stopping = asyncio.ensure_future(scene.pool.stop(60.0))
            await eventually(lambda: scene.rig.answers[batch], PATIENCE_S / 2)
            end.touch()  # or its thread would go on
            await stopping

    run(main())
