# SPDX-License-Identifier: Apache-2.0
"""Partitions in operating system processes of their own, each driven by blocking calls of one thread here.

Theory of operation. The process is an ordinary worker (`workers/child.py`) and speaks the worker protocol. The thread
of the partition is the only one that talks to it, so there is no loop in between: a batch costs one frame in each
direction, with the rows in shared memory if they are large. A process that dies fails the batch it was running; it is
replaced, and its module initialised again, before the partition takes the next one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.errors import ConfigError, ForebayError, InvalidRequest, ModelError, RunnerFailed, revive
from forebay.serving.servings.execution import Executed
from forebay.serving.servings.packing import pack, unpack
from forebay.serving.servings.serving_runner import place_of
from forebay.workers import frames, shm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from forebay.arrays.batch import Batch
    from forebay.serving.servings.execution import Sink
    from forebay.serving.servings.serving import Serving
    from forebay.serving.servings.settings import ProcessOptions

log = logging.getLogger("forebay.workers")

LIVED_S = 1.0
"""A process that lived this long is replaced at once when it dies."""

MAX_PAUSE_S = 10.0
"""Longest pause before a process that keeps dying is started again."""

END_S = 0.5
"""How long a process that was told to end is waited for before it is killed."""

_RECEIVE_BYTES = 1 << 18


class ProcessPartition:
    """A partition that runs its batches in a process of its own."""

    def __init__(self, folder: _Folder, index: int, batch_keys: Sequence[Any], open_with: Mapping[str, Any]) -> None:
        """Start the process; `greet` waits for it.

        Args:
            folder: Private; for the socket and the shared memory.
            index: Number of the partition.
            batch_keys: The serving's.
            open_with: What the worker is told to run.
        """
        self._folder = folder
        self._path = folder.path
        self._lock = threading.Lock()
        self._index = index
        self._keys = {key: number for number, key in enumerate(batch_keys)}
        self._open_with = open_with
        self._closed = threading.Event()
        self._connection: _Connection | None = None
        self._failures = 0
        self._spawned = 0
        self._spawn()

    @property
    def pid(self) -> int:
        """Id of the process that runs now, or ran last."""
        return self._process.pid

    def greet(self) -> None:
        """Wait until the module is initialised.

        Raises:
            ModelError: It could not be; or the process ended before that.
        """
        with contextlib.closing(self._listener):
            ended = os.pidfd_open(self._process.pid)
            try:
                select.select([self._listener, ended], [], [])
                self._listener.setblocking(False)
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                raise self._ended() from None
            finally:
                os.close(ended)
        accepted.setblocking(True)
        connection = self._connection = _Connection(accepted, self._path / f"{self._index}-{self._spawned}")
        try:
            connection.open(self._open_with)
        except (EOFError, ConnectionError):
            raise self._ended() from None

    def ready(self) -> bool:
        """Make sure that the process is there, starting it again if it is not; False if the partition was closed."""
        while not self._closed.is_set():
            if self._connection is not None and self._connection.is_open():
                return True
            lived_s = time.monotonic() - self._started
            if self._connection is not None:
                log.warning("partition %d: process %d has ended; it is replaced", self._index, self.pid)
                self._hang_up()
            self._failures = self._failures + 1 if lived_s < LIVED_S else 0
            if self._failures:
                self._closed.wait(min(0.05 * 2**self._failures, MAX_PAUSE_S))
            self._restart()
        self._hang_up()
        return False

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch in the process.

        Raises:
            RunnerFailed: What the function raised there; or the process ended.
            BadOutcome: It returned something other than it should.
        """
        connection = self._connection
        assert connection is not None
        rows, padding = batch.size, batch.padding
        packed = pack(batch.pad(0).realize(), [self._keys[batch.batch_key], rows, padding])
        try:
            output, metadata = connection.execute(packed, sink)
        except (EOFError, ConnectionError):
            raise RunnerFailed(self._ended().message) from None
        return Executed(output, metadata, rows)

    def close(self) -> None:
        """End the process."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
        connection = self._connection
        if connection is not None:
            connection.say_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
        self._hang_up()
        self._folder.leave()

    def _restart(self) -> None:
        try:
            with self._lock:
                if self._closed.is_set():
                    return
                self._spawn()
            self.greet()
        except (ForebayError, OSError) as error:
            if not self._closed.is_set():
                log.warning("partition %d could not be started again: %s", self._index, error)
            self._hang_up()

    def _spawn(self) -> None:
        self._spawned += 1
        self._started = time.monotonic()
        path = self._path / f"socket-{self._index}-{self._spawned}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(1)
        arguments = ["-P", "-m", "forebay.workers.child", "--connect", f"unix:{path}", "--worker", str(self._index)]
        self._process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.DEVNULL)

    def _ended(self) -> ModelError:
        """Return the error for a process that ended by itself."""
        try:
            status = self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return ModelError(f"the process of partition {self._index} ended {how}")

    def _hang_up(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.close()
        with self._lock:
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class _Connection:
    """The socket and the shared memory of one process."""

    def __init__(self, accepted: socket.socket, arena: Path) -> None:
        self._socket = accepted
        self._arena = arena
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._reader = frames.FrameReader(self._view)
        self._inbox: deque[Any] = deque()
        self._outgoing = shm.ArenaWriter(Path(f"{arena}.in"))
        self._incoming: shm.ArenaReader | None = None
        self._batch_id = 0

    def open(self, open_with: Mapping[str, Any]) -> None:
        """Tell the worker what to run and wait until it is ready.

        Raises:
            ModelError: It could not open that.
            EOFError: It is gone.
        """
        self.receive()  # hello
        self._send(["open", {**open_with, "arena": str(self._arena)}])
        message = self.receive()
        if message[0] == "failed":
            _, kind, text, detail, trace = message
            error = revive(kind, text, detail, trace)
            raise error if isinstance(error, ConfigError) else ModelError(text, detail=detail, trace=trace)
        self._incoming = shm.ArenaReader(f"{self._arena}.out")

    def is_open(self) -> bool:
        """Look, without waiting, whether the process is still there."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def execute(self, packed: bytearray, sink: Sink | None) -> tuple[Any, Any]:
        """Have a batch run, handing the values of its hooks to the sink; returns the output and the metadata.

        Raises:
            ForebayError: What it failed with.
            EOFError: The process is gone.
        """
        self._batch_id += 1
        self._send(["batch", self._batch_id, self._outgoing.place([packed]), {}, None])
        answer: Any = None
        problem: Exception | None = None
        while True:  # to the end, whatever happens: the next batch begins with the next message
            kind, _batch_id, outcomes, failures, *_ = self.receive()
            if outcomes[0] is not None:
                tree, (what, about) = unpack(bytes(outcomes[0]))  # copied: the worker writes its next answer there
                if what == "batch":
                    answer = tree, about
                elif sink is not None and problem is None:
                    try:
                        sink(about, tree)
                    except Exception as error:  # noqa: BLE001 - raised when the worker is done
                        problem = error
            if kind == "part":
                self._send(["credit", 1])
                continue
            if failures:
                raise revive(*failures[0])
            if problem is not None:
                raise problem
            return answer

    def say_stop(self) -> None:
        """Tell the worker to end once it has answered."""
        with contextlib.suppress(OSError):
            self._send(["stop"])

    def receive(self) -> Any:
        """Wait for the next message that is no mere sign of readiness.

        Raises:
            EOFError: The process is gone.
        """
        while not self._inbox:
            size = self._socket.recv_into(self._buffer)
            if not size:
                raise EOFError
            try:
                self._inbox.extend(self._reader.feed(self._buffer[:size]))
            except InvalidRequest as error:  # too long a frame for one: what follows it makes no sense any more
                log.warning("a partition's process is hung up on: %s", error)
                raise EOFError from error
        return self._inbox.popleft()

    def close(self) -> None:
        """Hang up and give the memory back."""
        self._socket.close()
        self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        for suffix in (".in", ".out"):
            Path(f"{self._arena}{suffix}").unlink(missing_ok=True)

    def _send(self, message: Sequence[Any]) -> None:
        self._socket.sendall(frames.encode(message))

    def _view(self, offset: int, length: int) -> memoryview:
        assert self._incoming is not None
        return self._incoming.view(offset, length)


class _Folder:
    """The private folder of all partitions of one serving; the last one to be closed removes it."""

    def __init__(self, partitions: int) -> None:
        self.path, self._lock, _ = shm.private_folder()
        self._left = partitions

    def leave(self) -> None:
        """One partition was closed."""
        self._left -= 1
        if self._left == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)


def process_partitions(serving: Serving[Any, Any], options: ProcessOptions, count: int) -> list[ProcessPartition]:
    """Start the processes of a serving and wait until its module is initialised in each.

    Raises:
        ConfigError: Another process cannot find the serving, or an option cannot travel to it.
        ModelError: The module could not be initialised.
    """
    factory, kwargs = place_of(serving)
    given = _plain({name: value for name, value in msgspec.structs.asdict(options).items() if value is not None})
    folder = _Folder(count)
    partitions: list[ProcessPartition] = []
    try:
        for index in range(count):
            open_with = {
                "factory": factory,
                "kwargs": {**kwargs, "options": given, "index": index},
                "index": index,
                "threads": 1,
                "path": [str(Path(path).resolve()) for path in sys.path],
            }
            partitions.append(ProcessPartition(folder, index, options.batch_keys, open_with))
        for partition in partitions:
            partition.greet()
    except BaseException:
        for partition in partitions:
            partition.close()
        raise
    return partitions


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in options.items():
        try:
            arrived = msgspec.msgpack.decode(msgspec.msgpack.encode(value))
        except TypeError:
            arrived = None
        plain[name] = list(cast("tuple[Any, ...]", value)) if isinstance(value, tuple) else value
        if arrived != plain[name]:
            msg = f"{name} is {value!r}; with worker_kind='process' texts and numbers are possible there"
            raise ConfigError(msg)
    return plain
