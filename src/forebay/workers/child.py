# SPDX-License-Identifier: Apache-2.0
"""A worker process: dials the server, says hello, opens its runner and asks for batches until it is told to stop.

Each thread has a connection of its own, and a connection is a slot: nothing is shared between them but the runner.
A thread blocks in `recv` while it is idle, so an idle worker costs nothing and a batch costs one wake-up.

Run as `python -P -m forebay.workers.child --connect unix:PATH --worker N`; the process pool does that.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.errors import BadOutcome, ConfigError, ForebayError, InvalidRequest
from forebay.observe.author_metrics import MetricReporter
from forebay.observe.model_log import DROPPING, LineBudget, capture, line_of, origin, told_dropped
from forebay.types.call import Failure, Media
from forebay.workers import frames, shared_secret
from forebay.workers.address import dial, parse_address
from forebay.workers.cancel import probe
from forebay.workers.devices import device_in, run_on
from forebay.workers.landing import LandedFiles
from forebay.workers.memory import keep_freed_memory
from forebay.workers.parent_death import end_with
from forebay.workers.phases import Laps, lap, phases_of
from forebay.workers.pool import CREDIT
from forebay.workers.runner import RunnerSpec, WorkerContext
from forebay.workers.seats import Seats, follow
from forebay.workers.shm import open_arenas
from forebay.workers.user_code import answered, caught, close_runner, do_after, settled, user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from forebay.workers.address import Address
    from forebay.workers.objects import Buffer
    from forebay.workers.runner import Runner
    from forebay.workers.seats import Round
    from forebay.workers.shm import ArenaReader, ArenaWriter

log = logging.getLogger(DROPPING)

HANDSHAKE_S = 60.0
"""Time in which a server must have answered a hello."""
_RECEIVE_BYTES = 1 << 18


class ReceivedItem(msgspec.Struct, gc=False):
    """What arrived of one request."""

    body: Any
    params: Mapping[str, Any]
    size: int


class WorkerRefused(ConfigError):
    """The server does not let this worker in, or does not prove who it is."""


class WorkerConnection:
    """One slot's connection to the server, used by one thread; others may only `leave`, ask `is_cancelled`, and `say`.

    Attributes:
        options: What the server answered to the hello.
        lends: Whether large bodies arrive as views of the shared memory, which end with their batch, and not as copies.
    """

    def __init__(self, address: Address, about: Mapping[str, Any], secret: bytes | None = None) -> None:
        """Dial and say hello.

        Args:
            address: Where the server listens.
            about: What the hello says.
            secret: What the server must know as well.

        Raises:
            OSError, EOFError: If nobody is there, or goes away.
            Refused: With the server's reason.
        """
        self._address = address
        self._socket = dial(address, HANDSHAKE_S)
        self._sending = threading.Lock()
        self._aside: deque[bytes] = deque()
        self._landed = LandedFiles()
        self._reader = frames.FrameReader(self._view, view_landed=self._see_landed)
        self._inbox: deque[Any] = deque()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._receiving = threading.Lock()
        self._running: int | None = None
        self._tell: Callable[[], object] | None = None
        self._incoming: ArenaReader | None = None
        self._outgoing: ArenaWriter | None = None
        self._shares = True
        self._max_frame_bytes = frames.MAX_FRAME_BYTES
        self.lends = False
        try:
            self._socket.settimeout(HANDSHAKE_S)
            self.options = self._say_hello(about, secret)
            self._socket.settimeout(None)
            self._max_frame_bytes = self.options.get("max_frame", frames.MAX_FRAME_BYTES)
            self._open_arenas(self.options.get("arena"))
        except BaseException:
            self.close()
            raise

    def send(self, message: Sequence[Any]) -> None:
        """Write one frame, however long that takes: the server always reads."""
        self.send_frame(frames.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Write a frame that is encoded already."""
        with self._sending:
            self._socket.sendall(frame)
        if self._aside:
            self._send_aside()

    def say(self, record: logging.LogRecord) -> None:
        """Send a line of the log, from any thread; where the connection is gone, nobody is left to read it."""
        is_count = record.name == DROPPING and "dropped" in vars(record)
        if is_count or _lines.take():
            self.send_aside(["log", self._running or 0, line_of(record)])

    def send_aside(self, message: Sequence[Any]) -> None:
        """Send what may come between other messages.

        Whichever thread is sending now takes it along. That may be this thread: freeing memory can run user code, which
        may log in the middle of a send.
        """
        self._aside.append(frames.encode(message))
        self._send_aside()

    def _send_aside(self) -> None:
        while self._aside and self._sending.acquire(blocking=False):
            try:
                while self._aside:
                    self._socket.sendall(self._aside.popleft())
            except OSError:
                self._aside.clear()
            finally:
                self._sending.release()

    def framed(self, message: Sequence[Any]) -> bytes:
        """Return the frame of a message that holds results.

        Raises:
            BadOutcome: They are too large for one frame.
            Exception: They are no plain data.
        """
        frame = frames.encode(message)
        if len(frame) - frames.HEADER > self._max_frame_bytes:
            msg = (
                f"{len(frame)} bytes are too many, at most {self._max_frame_bytes} are read there; return less, or let "
                "fewer requests share a batch"
            )
            raise BadOutcome(msg)
        return frame

    def ask(self) -> None:
        """Ask for the first batch."""
        if self.options.get("seats"):
            self.send(["sit"])
        else:
            self.send(["ready"] if self._shares else ["ready", False])

    def leave(self) -> None:
        """Ask for no more; the server answers with a stop once it has the last result."""
        try:
            self.send(["leaving"])
        except OSError:
            pass  # the server is gone, and nothing more comes from it

    def receive(self) -> Any:
        """Wait for the next message.

        Raises:
            EOFError: If the server is gone.
        """
        with self._receiving:
            while not self._inbox:
                size = self._socket.recv_into(self._buffer)
                if not size:
                    raise EOFError
                self._inbox.extend(self._reader.feed(self._buffer[:size]))
            return self._inbox.popleft()

    def receive_all(self, *, wait: bool) -> list[Any]:
        """Return all messages that are there; at least one, if told to wait.

        Raises:
            EOFError: If the server is gone.
        """
        with self._receiving:
            while not self._inbox:
                try:
                    size = self._socket.recv_into(self._buffer, 0, 0 if wait else socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return []
                if not size:
                    raise EOFError
                self._inbox.extend(self._reader.feed(self._buffer[:size]))
                if not wait and size < len(self._buffer):
                    break  # that was all
            found = list(self._inbox)
            self._inbox.clear()
            return found

    def watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        """Have this called on the running loop once the server has said something; see `Watch`."""
        loop, descriptor = asyncio.get_running_loop(), self._socket.fileno()
        loop.add_reader(descriptor, tell)
        # Whoever asks whether a batch is called off may read what was said before the loop sees it.
        self._tell = functools.partial(loop.call_soon_threadsafe, tell)
        if self._inbox:
            tell()

        def forget() -> None:
            self._tell = None
            loop.remove_reader(descriptor)

        return forget

    def begin(self, batch_id: int) -> Callable[[], bool]:
        """Note that a batch runs; returns what tells whether the server has called it off."""
        self._running = batch_id
        return functools.partial(self._is_cancelled, batch_id)

    def end(self) -> None:
        """Note that nothing runs: the server need not hear of questions about the batch any more."""
        self._running = None

    def is_cancelled(self) -> bool:
        """Look, without waiting, whether the server has called off the batch that runs."""
        return self._running is not None and self._is_cancelled(self._running)

    def _is_cancelled(self, batch_id: int) -> bool:
        """Any thread may ask at any time, also when the batch was answered long ago."""
        if batch_id != self._running or not self._receiving.acquire(blocking=False):
            return False  # it is over, or its own thread waits for the server's next word and will hear it
        try:
            try:
                size = self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                size = -1
            except OSError:
                return True  # hung up
            if size > 0:
                self._inbox.extend(self._reader.feed(self._buffer[:size]))
                tell = self._tell
                if tell is not None:
                    tell()
            return size == 0 or any(_calls_off(message, batch_id) for message in self._inbox)
        finally:
            self._receiving.release()

    def place(self, outcomes: Sequence[Any]) -> Sequence[Any]:
        """Move large results into the arena."""
        return outcomes if self._outgoing is None else self._outgoing.place(list(outcomes))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()
        for arena in (self._incoming, self._outgoing):
            if arena is not None:
                arena.close()
        self._incoming = self._outgoing = None

    def _say_hello(self, about: Mapping[str, Any], secret: bytes | None) -> Mapping[str, Any]:
        mine = shared_secret.nonce()
        about = {**about, "shares": True, "seats": True}
        self.send(["hello", frames.VERSION, about if secret is None else {**about, "nonce": mine}])
        try:
            kind, *rest = self._answer()
            if secret is not None:
                theirs: Any = rest[0] if kind == "challenge" else b""
                if theirs:
                    self.send(["proof", shared_secret.proof(secret, "worker", theirs, mine)])
                    kind, *rest = self._answer()
                if kind != "welcome" or not shared_secret.is_proof(rest[0], secret, "server", theirs, mine):
                    msg = (
                        f"the server at {self._address} does not prove that it knows the secret; start it with the "
                        "same one (--attach-secret), or give this worker none"
                    )
                    raise WorkerRefused(msg)
                kind, *rest = self._answer()
            if kind != "open":
                msg = f"{kind!r} is no answer to a hello"
                raise InvalidRequest(msg)
            return rest[0]
        except (InvalidRequest, LookupError, TypeError, ValueError) as error:
            msg = f"what listens at {self._address} does not speak the worker protocol; is it where workers attach?"
            raise WorkerRefused(msg) from error

    def _answer(self) -> Any:
        message = self.receive()
        if message[0] == "refused":
            msg = f"the server at {self._address} refuses this worker: {message[1]}"
            raise WorkerRefused(msg)
        return message

    def _open_arenas(self, handle: Any) -> None:
        if not handle:
            return
        opened = open_arenas(handle, self._max_frame_bytes)
        if opened is None:  # another container: what is large then goes through the socket
            self._shares = False
        else:
            self._incoming, self._outgoing = opened

    def _view(self, offset: int, length: int) -> Buffer:
        if self._incoming is None:
            msg = "the server placed bytes in shared memory that was never agreed on"
            raise InvalidRequest(msg)
        view = self._incoming.view(offset, length)
        return view if self.lends else bytes(view)

    def _see_landed(self, path: str, inode: int, offset: int, length: int) -> Buffer:
        if self._incoming is None:
            msg = "the server names a file in memory, and none was agreed on"
            raise InvalidRequest(msg)
        view = self._landed.view(path, inode, offset, length)
        return view if self.lends else bytes(view)


def serve(connection: WorkerConnection, runner: Runner, metrics: MetricReporter | None = None) -> None:
    """Ask for batches and run them until the server says stop or is gone; look whether the model has metrics."""
    if "log" in connection.options:
        origin.set(connection)
    connection.lends = getattr(runner, "borrows_input", False)
    connection.ask()
    if connection.options.get("seats"):
        try:
            follow(*_seated(connection, runner, metrics))
        except (EOFError, ConnectionError):
            pass  # the server is gone
        return
    while True:
        try:
            message = connection.receive()
        except (EOFError, ConnectionError):
            return
        if message[0] == "batch":
            _, batch_id, bodies, params, sizes, *rest = message
            _run(connection, runner, batch_id, _items(bodies, params, sizes), is_told=rest[:1] == [True])
            if metrics is not None:
                metrics.look()
        elif message[0] == "stop":
            return


def _seated(connection: WorkerConnection, runner: Runner, metrics: MetricReporter | None) -> tuple[Seats, _ServerLink]:
    link = _ServerLink(connection, metrics)
    options = connection.options
    seats, has_ahead = options["seats"], bool(options.get("ahead"))
    return Seats(runner.run, time.monotonic, link.enter, connection.watch, seats=seats, has_ahead=has_ahead), link


class _ServerLink:
    """The way of a worker with seats to its server; see `Link`."""

    def __init__(self, connection: WorkerConnection, metrics: MetricReporter | None) -> None:
        self._connection = connection
        self._metrics = metrics
        self._unsent: list[tuple[int, Failure]] = []

    def enter(self, name: Any) -> None:
        """User code runs for this batch, or for several."""
        probe.set(None if name is None else self._connection.begin(name))
        if name is None:
            self._connection.end()

    def receive(self, *, wait: bool) -> Iterator[Sequence[Any]]:
        """Return what the server has said."""
        while self._unsent:
            wait = False
            yield "leave", *self._unsent.pop()
        for message in self._connection.receive_all(wait=wait):
            if message[0] == "stop":
                yield ("stop",)
            elif message[0] == "go":
                _, number, joins, leaves, allows = message
                yield "heard", number
                for name, (bodies, params, sizes, key) in joins:
                    yield "join", name, _items(bodies, params, sizes), key
                for name in leaves:
                    yield "leave", name
                for name, steps in allows:
                    yield "allow", name, steps

    def tell(self, number: int, told: Round) -> None:
        """Send what a round has made; what cannot be sent fails its own batch."""
        connection = self._connection
        connection.end()
        parts = [
            [name, part, None] if len(part) == 1 and type(part[0]) is bytes else [name, *_wired(part)]
            for name, part in told.parts
        ]
        ended = [[name, *_wired(outcomes), seconds, _media(outcomes)] for name, outcomes, seconds in told.ended]
        frame, error = caught(connection.framed, ["round", number, parts, ended])
        if error is not None:  # the user's parts hold something that msgpack does not, or too much
            frame = connection.framed(["round", number, *self._sendable(parts, ended)])
        connection.send_frame(frame)
        if told.ended and self._metrics is not None:
            self._metrics.look()

    def _sendable(self, parts: list[Any], ended: list[Any]) -> tuple[list[Any], list[Any]]:
        """Return what of a round fits into a frame, with failures in place of the rest."""
        left = {name for name, *_ in ended}
        sent: list[Any] = []
        failures: dict[int, Failure] = {}
        for part in parts:
            error = caught(self._connection.framed, ["round", 0, [*sent, part], []])[1]
            if error is None:
                sent.append(part)
            else:
                failures[part[0]] = Failure(BadOutcome(f"a part cannot be sent to the server: {error}"))
        self._unsent = [(name, failure) for name, failure in failures.items() if name not in left]
        for place, (name, outcomes, _, seconds, _) in enumerate(ended):
            failure = failures.get(name)
            if failure is None:
                error = caught(self._connection.framed, ["round", 0, [], ended[place : place + 1]])[1]
                failure = Failure(BadOutcome(f"the results cannot be sent to the server: {error}")) if error else None
            if failure is not None:
                ended[place] = [name, *_wired([failure] * len(outcomes)), seconds, None]
        return sent, ended


def _wired(outcomes: Sequence[Any]) -> tuple[Sequence[Any], dict[int, list[Any]] | None]:
    """Return outcomes, or parts, without the failures among them, and those apart."""
    failures = {place: wire_error(one.error) for place, one in enumerate(outcomes) if type(one) is Failure}
    plain = [None if type(one) is Failure else one.body if type(one) is Media else one for one in outcomes]
    return plain, failures or None


def _media(outcomes: Sequence[Any]) -> dict[int, str] | None:
    return {place: one.type for place, one in enumerate(outcomes) if type(one) is Media} or None


def _calls_off(message: Any, batch_id: int) -> bool:
    """Tell whether the server says by this that nobody waits for a batch."""
    return message == ["cancel", batch_id] or (message[0] == "go" and batch_id in message[3])


def _items(bodies: list[Any], params: Any, sizes: list[int] | None) -> list[ReceivedItem]:
    differ = isinstance(params, list)
    if sizes is None and not differ:
        return [ReceivedItem(body, params, 1) for body in bodies]
    count = len(bodies)
    each = cast("list[Any]", params) if differ else [params] * count
    return [ReceivedItem(*fields) for fields in zip(bodies, each, sizes or [1] * count, strict=True)]


def _run(
    connection: WorkerConnection, runner: Runner, batch_id: int, items: list[ReceivedItem], *, is_told: bool
) -> None:
    probe.set(connection.begin(batch_id))
    started = time.monotonic()
    laps = Laps(started) if is_told else None
    lap.set(laps)
    outcomes, work = answered(runner.run, items, lambda steps: _stream(connection, batch_id, len(items), steps))
    seconds = time.monotonic() - started
    told = None if laps is None else [started, phases_of(runner, laps)]
    connection.end()
    try:
        frame = _result(connection, batch_id, outcomes, seconds, told, is_ready=not work)
    except Exception as error:  # noqa: BLE001 - the user's results hold something that msgpack does not, or too much
        failure = Failure(BadOutcome(f"the results cannot be sent to the server: {error}"))
        frame = _result(connection, batch_id, [failure] * len(items), seconds, told, is_ready=not work)
    connection.send_frame(frame)
    if work:
        while (message := connection.receive())[0] != "written":
            if message[0] == "stop":
                return
        do_after(work)
        connection.send(["ready"])


def _result(
    connection: WorkerConnection, batch_id: int, outcomes: Sequence[Any], seconds: float, told: Any, *, is_ready: bool
) -> bytes:
    failures = media = None
    kinds = set(map(type, outcomes))
    if Failure in kinds:
        failures = {i: wire_error(outcome.error) for i, outcome in enumerate(outcomes) if type(outcome) is Failure}
        outcomes = [None if type(outcome) is Failure else outcome for outcome in outcomes]
    if Media in kinds:
        media = {i: outcome.type for i, outcome in enumerate(outcomes) if type(outcome) is Media}
        outcomes = [outcome.body if type(outcome) is Media else outcome for outcome in outcomes]
    message: list[Any] = ["result", batch_id, connection.place(outcomes), failures, seconds, is_ready]
    if told is not None or media is not None:
        message.append(told)
    if media is not None:
        message.append(media)
    return connection.framed(message)


def _stream(connection: WorkerConnection, batch_id: int, count: int, steps: Iterator[Sequence[Any]]) -> None:
    credit = int(CREDIT)
    for step in steps:
        while credit == 0:
            message = connection.receive()
            if message[0] == "credit":
                credit += message[1]
            elif message[0] in {"cancel", "stop"}:
                return
        parts, _ = settled(step, count)
        failures = {i: wire_error(part.error) for i, part in enumerate(parts) if type(part) is Failure}
        plain = [None if type(part) is Failure else part for part in parts]
        connection.send_frame(connection.framed(["part", batch_id, plain, failures or None]))
        credit -= 1
        if connection.is_cancelled():
            break


class _BesideBatches(logging.Handler):
    """Sends what is logged by threads of the model's own."""

    def __init__(self, connection: WorkerConnection) -> None:
        super().__init__()
        self.emit = connection.say


def _tell_dropped(dropped: int) -> None:
    line = told_dropped(dropped)
    log.warning("%s", line.text, extra=line.extra)


_lines = LineBudget(_tell_dropped)


def wire_error(error: ForebayError) -> list[Any]:
    """Return an error in the form that frames carry."""
    return [error.kind, error.message, error.detail, getattr(error, "trace", "")]


def _open(connection: WorkerConnection) -> Runner | None:
    options = connection.options
    if "log" in options:
        origin.set(connection)
        capture(options["log"], _BesideBatches(connection))
    for path in options.get("path", ()):
        if path not in sys.path:
            sys.path.append(path)
    try:
        with user_code():
            runner = RunnerSpec(factory=options["factory"], kwargs=options["kwargs"]).build()
            runner.open(WorkerContext(options["index"], options["threads"], device_in(os.environ)))
    except ForebayError as error:
        connection.send(["failed", *wire_error(error)])
        return None
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk over it again and again
    return runner


def main(arguments: Sequence[str] | None = None) -> int:
    """Be a worker; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connect", required=True, help="where the server listens, unix:PATH")
    parser.add_argument("--worker", type=int, help="number of this worker in its pool")
    parser.add_argument("--server", type=int, help="the process to end with")
    parser.add_argument("--cores", default="", help="the processors it may use")
    options = parser.parse_args(arguments)
    run_on([int(core) for core in options.cores.split(",") if core])
    if options.server is not None:
        end_with(options.server)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They may reach the whole group; only the server decides what they mean. A handler instead of SIG_IGN, because
        # ignored signals stay ignored in programs that a model starts.
        signal.signal(number, _leave_it_to_the_server)
    keep_freed_memory()
    try:
        address = parse_address(options.connect)
        connection = WorkerConnection(address, _about(options.worker, first=True))
        runner = _open(connection)
        if runner is None:
            return 1
        threads = [
            threading.Thread(target=_join, args=(address, options.worker, runner), daemon=True)
            for _ in range(connection.options["threads"] - 1)
        ]
        for thread in threads:
            thread.start()
        metrics = MetricReporter(lambda data: connection.send_aside(["metrics", data]))
        metrics.look()
        serve(connection, runner, metrics)
        for thread in threads:
            thread.join()
        close_runner(runner)
        connection.close()
    except (EOFError, ConnectionError, FileNotFoundError):
        return 0  # the server is gone, and a worker without one has nothing to do
    return 0


def _leave_it_to_the_server(_number: int, _frame: object) -> None:
    """Go on: the worker ends when the server says so or is gone."""


def _about(worker: int | None, *, first: bool) -> dict[str, Any]:
    return {"pid": os.getpid(), "worker": worker, "first": first, "phases": True}


def _join(address: Address, worker: int | None, runner: Runner) -> None:
    try:
        connection = WorkerConnection(address, _about(worker, first=False))
        serve(connection, runner)
        connection.close()
    except (EOFError, ConnectionError):
        return


if __name__ == "__main__":
    # The package is imported under its real name so that classes exist once, not also under __main__.
    from forebay.workers.child import main as run

    sys.exit(run())
