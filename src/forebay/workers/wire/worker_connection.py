# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to its server: the hello, what is asked and told, shared memory, what is called off."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from forebay.errors import BadOutcome, ConfigError, InvalidRequest
from forebay.observe.logs.model_log import DROPPING, LineBudget, line_of, told_dropped
from forebay.workers.memory.landing import LandedFiles
from forebay.workers.memory.shm import ArenaReader, ArenaWriter, open_arenas
from forebay.workers.wire import frames, shared_secret
from forebay.workers.wire.address import Address, AddressFile, UnixAddress, dial, stranger_at
from forebay.workers.wire.tls_files import TlsFiles, why_no_tls

if TYPE_CHECKING:
    from forebay.workers.wire.objects import Buffer


log = logging.getLogger(DROPPING)
HANDSHAKE_S = 60.0
"""Time in which a server must have answered a hello."""
REMOTE_HANDSHAKE_S = 10.0
"""The same where a relay may be between, which takes what is sent and forwards nothing."""
LAST_WORDS_S = 5.0
"""How long hanging up waits until what was said last is sent."""
MAX_COLLECTED: Final = 4
"""How often the collector looks for what a model no longer needs of a batch; if that is not enough, it gets copies."""
_RECEIVE_BYTES = 1 << 18


class WorkerRefused(ConfigError):
    """The server does not let this worker in, or does not prove who it is."""


class WorkerConnection:
    """One slot's connection to the server, used by one thread; others may only `leave`, ask `is_cancelled`, and `say`.

    Attributes:
        address: Where the server listens.
        options: What the server answered to the hello.
        lends: Whether large bodies arrive as views of the shared memory, which end with their batch. Otherwise what has
            landed arrives as views that may be kept, which the server is told of, and other large bodies as copies.
    """

    def __init__(
        self, address: Address, about: Mapping[str, Any], secret: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Dial and say hello.

        Raises:
            OSError, EOFError: If nobody is there, or goes away.
            Refused: With the server's reason.
        """
        self.address = address
        try:
            answer_s = HANDSHAKE_S if isinstance(address, UnixAddress) else REMOTE_HANDSHAKE_S
            self._socket = dial(address, answer_s, tls)
        except ssl.SSLError as error:
            raise WorkerRefused(f"the server at {address} {why_no_tls(error)}") from error
        self._sending = threading.Lock()
        self._aside: deque[bytes] = deque()
        self._landed = LandedFiles()
        self._may_keep = False
        self._collected = 0
        self._reader = frames.FrameReader(self._view, view_landed=self._see_landed)
        self._inbox: deque[Any] = deque()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._receiving = threading.Lock()
        self._running: int | None = None
        self._tell: Callable[[], object] | None = None
        self._incoming: ArenaReader | None = None
        self._outgoing: ArenaWriter | None = None
        self._max_frame_bytes = frames.MAX_FRAME_BYTES
        self.lends = False
        try:
            self._socket.settimeout(answer_s)
            plain = self._socket if isinstance(self._socket, socket.socket) else None  # else it has proven who it is
            if secret is None and plain is not None and (stranger := stranger_at(plain)):
                raise WorkerRefused(
                    f"{address} belongs to {stranger}, and a worker without a secret cannot know it; "
                    "give both sides the same one: --secret @FILE here, --attach-secret @FILE there"
                )
            self.options = self._say_hello(about, secret)
            self._socket.settimeout(None)
            self._max_frame_bytes = self.options.get("max_frame", frames.MAX_FRAME_BYTES)
            self._may_keep = self.options.get("may_keep") is True
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor of the connection, for waiting until the server has said something."""
        return self._socket.fileno()

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
            line = line_of(record)
            _lines.spend(line)
            self.send_aside(["log", self._running or 0, line])

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
                self._write_aside()
            finally:
                self._sending.release()

    def _write_aside(self) -> None:
        try:
            while self._aside:
                self._socket.sendall(self._aside.popleft())
        except OSError:
            self._aside.clear()

    def framed(self, message: Sequence[Any]) -> bytes:
        """Return the frame of a message that holds results.

        Raises:
            BadOutcome: They are too large for one frame.
            Exception: They are not plain data.
        """
        frame = frames.encode(message)
        if len(frame) - frames.HEADER > self._max_frame_bytes:
            raise BadOutcome(
                f"{len(frame)} bytes are too many, at most {self._max_frame_bytes} are read there; return less, or let "
                "fewer requests share a batch"
            )
        return frame

    def ask(self) -> None:
        """Ask for the first batch, now that the model is loaded: it may have given up the right to see other files."""
        if self.options.get("seats"):
            self.send(["sit"])
        else:
            self.send(["ready"] if self._can_share() else ["ready", False])

    def leave(self) -> None:
        """Ask for no more; the server answers with a stop once it has the last result."""
        try:
            self.send(["leaving"])
        except OSError:
            pass  # the server is gone, and nothing more comes from it

    def receive(self) -> Any:
        """Wait for the next message; raises an `EOFError` if the server is gone."""
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
        loop, descriptor = asyncio.get_running_loop(), self.fileno()
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
            return size == 0 or any(calls_off(message, batch_id) for message in self._inbox)
        finally:
            self._receiving.release()

    def cut(self) -> None:
        """Have the thread that uses it find it closed; for any thread."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)

    def place(self, outcomes: Sequence[Any]) -> Sequence[Any]:
        """Move large results into the arena."""
        return outcomes if self._outgoing is None else self._outgoing.place(list(outcomes))

    def close(self) -> None:
        """Hang up, once all is sent that was said, or `LAST_WORDS_S` later: the server may have stopped to read."""
        # Whoever sends now was to take along what others said meanwhile.
        if self._sending.acquire(timeout=LAST_WORDS_S):
            try:
                if self._aside:
                    self._socket.settimeout(LAST_WORDS_S)
                    self._write_aside()
            finally:
                self._sending.release()
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
                    raise WorkerRefused(
                        f"the server at {self.address} does not prove that it knows the secret; start it with the "
                        "same one (--attach-secret), or give this worker none"
                    )
                kind, *rest = self._answer()
            if kind != "open":
                raise InvalidRequest(f"expected an answer to a hello, got {kind!r}")
            return rest[0]
        except ssl.SSLError as error:
            raise WorkerRefused(f"the server at {self.address} {why_no_tls(error)}") from error
        except (InvalidRequest, LookupError, TypeError, ValueError) as error:
            msg = f"what listens at {self.address} does not speak the worker protocol; is it where workers attach?"
            raise WorkerRefused(msg) from error

    def _answer(self) -> Any:
        message = self.receive()
        if message[0] == "refused":
            raise WorkerRefused(f"the server at {self.address} refuses this worker: {message[1]}")
        return message

    def _can_share(self) -> bool:
        """Open the arenas; tells whether the server's memory is within reach: else all goes through the socket."""
        handle = self.options.get("arena")
        opened = open_arenas(handle, self._max_frame_bytes) if handle else (None, None)
        if opened is None:
            return False
        self._incoming, self._outgoing = opened
        return True

    def _view(self, offset: int, length: int) -> Buffer:
        if self._incoming is None:
            raise InvalidRequest("the server placed bytes in shared memory that was never agreed on")
        view = self._incoming.view(offset, length)
        return view if self.lends else bytes(view)

    def _see_landed(self, path: str, inode: int, offset: int, length: int) -> Buffer:
        if self._incoming is None:
            raise InvalidRequest("the server names a file in memory, and none was agreed on")
        if self._may_keep and not self.lends:
            return self._landed.lend(path, inode, offset, length)
        view = self._landed.view(path, inode, offset, length)
        return view if self.lends else bytes(view)

    def is_lent_still(self) -> bool:
        """Look, after a batch, whether anything refers to what landed of it; if so, bodies are copied from then on."""
        landed = self._landed
        if not self._may_keep or not landed.is_lent:
            return False
        if self._collected < MAX_COLLECTED:
            self._collected += 1
            gc.collect()
            if not landed.is_lent:
                return False
        self._may_keep = False
        return True


class DialledServer(NamedTuple):
    """A server, as its workers dial it; see `WorkerConnection`."""

    address: Address | AddressFile
    secret: bytes | None = None
    tls: TlsFiles | None = None

    def dial(self, about: Mapping[str, Any]) -> WorkerConnection:
        """Connect and say hello; raises as `WorkerConnection`."""
        address = self.address.read() if isinstance(self.address, AddressFile) else self.address
        tls = None if self.tls is None else self.tls.context
        return WorkerConnection(address, about, self.secret, tls)


def calls_off(message: Any, batch_id: int) -> bool:
    """Tell whether the server says by this that nobody waits for a batch."""
    return message[0] == "go" and batch_id in message[3]


def _tell_dropped(dropped: int) -> None:
    line = told_dropped(dropped)
    log.warning("%s", line.text, extra=line.extra)


_lines = LineBudget(_tell_dropped)
