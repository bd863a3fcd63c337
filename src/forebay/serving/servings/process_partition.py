# SPDX-License-Identifier: Apache-2.0
"""Partitions in operating system processes of their own, each driven by blocking calls of one thread here.

Theory of operation. The process is an ordinary worker (`workers/child.py`) and speaks the worker protocol. The thread
of the partition is the only one that talks to it, so there is no loop in between: a batch costs one frame in each
direction, with the rows in shared memory if they are large. A process that dies fails the batch it was running. Its
supervisor (`workers/supervisor.py`) replaces it at once, whether or not there is work, and initialises its module
again; meanwhile other partitions take the calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import socket
import sys
import threading
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.errors import ConfigError, InvalidRequest, ModelError, RunnerFailed, revive
from forebay.serving.servings.execution import Executed
from forebay.serving.servings.packing import pack, unpack
from forebay.serving.servings.serving_runner import place_of
from forebay.workers import frames, shm
from forebay.workers.supervisor import END_S, Supervisor, start_worker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

    from forebay.arrays.batch import Batch
    from forebay.errors import ForebayError
    from forebay.serving.servings.execution import Sink
    from forebay.serving.servings.serving import Serving
    from forebay.serving.servings.settings import ProcessOptions
    from forebay.workers.supervisor import End

log = logging.getLogger("forebay.workers")

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
        self._index = index
        self._keys = {key: number for number, key in enumerate(batch_keys)}
        self._open_with = open_with
        self._on_change: Callable[[], None] = lambda: None
        self._closing = threading.Lock()
        self._in_use = threading.Lock()
        self._listener: socket.socket | None = None
        self._connection: _Connection | None = None
        self._supervisor = Supervisor(
            f"the process of partition {index}",
            self._start,
            load=self._load,
            on_ready=self._tell,
            on_end=self._ended,
        )
        self._supervisor.begin()

    @property
    def pid(self) -> int | None:
        """Id of the process that runs now, or ran last."""
        return self._supervisor.pid

    @property
    def is_ready(self) -> bool:
        """Whether a batch could be run now."""
        connection = self._connection
        return self._supervisor.is_ready and connection is not None and connection.is_open()

    @property
    def problem(self) -> ForebayError | None:
        """Why there is no process, once it could not be replaced several times."""
        supervisor = self._supervisor
        return supervisor.problem if supervisor.has_given_up else None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this, from another thread, whenever `is_ready` or `problem` may have changed."""
        self._on_change = on_change

    def greet(self) -> None:
        """Wait until the module is initialised.

        Raises:
            ModelError: It could not be; or the process ended before that, or cannot be started.
        """
        self._supervisor.wait_ready()

    def ready(self) -> bool:
        """Wait until a process is there; False if the partition was closed."""
        connection = self._connection
        if connection is not None and not connection.is_open():
            self._supervisor.how_it_ended(connection.life)
        return self._supervisor.wait_ready(patient=True)

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch in the process.

        Raises:
            RunnerFailed: What the function raised there; or the process ended.
            BadOutcome: It returned something other than it should.
        """
        rows, padding = batch.size, batch.padding
        packed = pack(batch.pad(0).realize(), [self._keys[batch.batch_key], rows, padding])
        with self._in_use:
            connection = self._connection
            if connection is None:
                msg = f"the process of partition {self._index} has just ended"
                raise RunnerFailed(msg)
            try:
                output, metadata = connection.execute(packed, sink)
            except (EOFError, ConnectionError):
                how = self._supervisor.how_it_ended(connection.life)
                msg = f"the process of partition {self._index} {how}"
                raise RunnerFailed(msg) from None
        return Executed(output, metadata, rows)

    def close(self) -> None:
        """End the process."""
        with self._closing:
            if self._folder.has_left(self):
                return
            self._supervisor.stop()
            connection = self._connection
            if connection is not None:
                connection.say_stop()
            self._supervisor.join(0.0 if connection is None else END_S)
            self._folder.leave(self)

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._folder.path / f"socket-{self._index}-{self._supervisor.lives}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            listener.listen(1)
            process = start_worker(f"unix:{path}", self._index)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        return process

    def _load(self, process: subprocess.Popen[bytes]) -> None:
        """Let the process in and wait until the module is initialised."""
        assert self._listener is not None
        with contextlib.closing(self._listener) as listener:
            ended = os.pidfd_open(process.pid)
            try:
                select.select([listener, ended], [], [])
                listener.setblocking(False)
                accepted, _ = listener.accept()
            except BlockingIOError:
                raise EOFError from None
            finally:
                os.close(ended)
                Path(listener.getsockname()).unlink(missing_ok=True)
        accepted.setblocking(True)
        life = self._supervisor.lives
        connection = _Connection(accepted, self._folder.path / f"{self._index}-{life}", life)
        self._connection = connection
        connection.open(self._open_with)

    def _ended(self, _end: End) -> None:
        """The process has ended, though a child that it forked may hold its socket open."""
        if self._listener is not None:
            self._listener.close()
        if self._connection is not None:
            self._connection.hang_up()
            with self._in_use:
                connection, self._connection = self._connection, None
                connection.close()
        self._tell()

    def _tell(self) -> None:
        self._on_change()


class _Connection:
    """The socket and the shared memory of one process."""

    def __init__(self, accepted: socket.socket, arena: Path, life: int) -> None:
        self.life = life
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

    def hang_up(self) -> None:
        """Let whoever waits for a message wait no longer; from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket and the memory back."""
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
        self._partitions = partitions
        self._left: set[ProcessPartition] = set()

    def has_left(self, partition: ProcessPartition) -> bool:
        """Return whether a partition was closed."""
        return partition in self._left

    def leave(self, partition: ProcessPartition) -> None:
        """One partition was closed."""
        self._left.add(partition)
        if len(self._left) == self._partitions:
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
