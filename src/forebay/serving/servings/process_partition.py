# SPDX-License-Identifier: Apache-2.0
"""Partitions in operating system processes of their own, each driven by blocking calls of one thread here.

Theory of operation. The process is an ordinary worker (`workers/child.py`). The thread of the partition is the only one
that talks to it (`workers/blocking_slot.py`), so there is no loop in between: a batch costs one frame in each
direction, with the rows in shared memory if they are large. A process that dies fails the batch it was running. Its
supervisor (`workers/supervisor.py`) replaces it at once, whether or not there is work, and initialises its module
again; meanwhile other partitions take the calls.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from forebay.errors import ConfigError, RunnerFailed
from forebay.observe import author_metrics, model_log
from forebay.observe.model_log import Voice
from forebay.serving.servings.batch_executor import BatchExecutor
from forebay.serving.servings.execution import Executed
from forebay.serving.servings.packing import pack, unpack
from forebay.serving.servings.partition_worker import place_of
from forebay.workers.blocking_slot import BlockingSlot
from forebay.workers.os_threads import require_os_threads, require_os_waits
from forebay.workers.private_socket import PrivateSocket
from forebay.workers.supervisor import END_S, Supervisor, start_worker

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

    from forebay.arrays.batch import Batch
    from forebay.errors import ForebayError
    from forebay.serving.servings.definition import Serving
    from forebay.serving.servings.execution import Sink
    from forebay.serving.servings.settings import ProcessOptions
    from forebay.workers.supervisor import End


class ProcessPartition(BatchExecutor):
    """A partition that runs its batches in a process of its own."""

    def __init__(self, index: int, batch_keys: Sequence[Any], open_with: Mapping[str, Any]) -> None:
        """Start the process; `greet` waits for it.

        Args:
            index: Number of the partition.
            batch_keys: The serving's.
            open_with: What the worker is told to run.
        """
        self._index = index
        self._voice = None if model_log.level is None else Voice(model_log.model.get(), str(index))
        self._labels = author_metrics.whose.get()
        self._keys = {key: number for number, key in enumerate(batch_keys)}
        self._open_with = open_with
        self._on_change: Callable[[], None] = lambda: None
        self._closing = threading.Lock()
        self._in_use = threading.Lock()
        self._entrance: PrivateSocket | None = None
        self._connection: BlockingSlot | None = None
        self._life = 0
        self._condemned = 0
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
        if connection is None or self._condemned == self._life:
            return False
        return self._supervisor.is_ready and connection.is_open()

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
        if connection is not None and (self._condemned == self._life or not connection.is_open()):
            self._supervisor.how_it_ended(self._life)
        return self._supervisor.wait_ready(patient=True)

    def run(self, batch: Batch, sink: Sink | None) -> Executed:
        """Run a batch in the process.

        Raises:
            RunnerFailed: What the function raised there; or the process ended.
            BadOutcome: It returned something other than it should.
        """
        rows, padding = batch.size, batch.padding
        packed = pack(batch.pad(0).realize(), [self._keys[batch.batch_key], rows, padding])
        answers: list[tuple[Any, Any]] = []

        def take(found: Any) -> None:
            tree, (what, about) = unpack(found)
            if what == "batch":
                answers.append((tree, about))
            elif sink is not None:
                sink(about, tree)

        with self._in_use:
            connection = self._connection
            if connection is None:
                raise RunnerFailed(f"the process of partition {self._index} has just ended")
            life = self._life
            try:
                outcome = connection.run(packed, take)
            except (EOFError, OSError):
                how = self._supervisor.how_it_ended(life)
                raise RunnerFailed(f"the process of partition {self._index} {how}") from None
        if outcome is not None:
            take(outcome)
        ((output, metadata),) = answers
        return Executed(output, metadata, rows).own()  # the arrays lie in what came, and cannot be written to

    def end_run(self) -> bool:
        """Kill the process, so that what it runs fails; it is replaced."""
        self._condemned = self._life
        self._supervisor.kill(self._life)
        return True

    def close(self) -> None:
        """End the process."""
        with self._closing:
            if self._supervisor.is_stopping:
                return
            self._supervisor.stop()
            connection = self._connection
            if connection is not None:
                connection.stop()
            self._supervisor.join(0.0 if connection is None else END_S)

    def _start(self) -> subprocess.Popen[bytes]:
        entrance = PrivateSocket()
        try:
            process = start_worker(f"unix:{entrance.path}", self._index, voice=self._voice)
        except BaseException:
            entrance.close()
            raise
        self._entrance = entrance
        return process

    def _load(self, process: subprocess.Popen[bytes]) -> None:
        """Let the process in and wait until the module is initialised."""
        assert self._entrance is not None
        with contextlib.closing(self._entrance) as entrance, entrance.take_listener() as listener:
            ended = os.pidfd_open(process.pid)
            try:
                heard = select.poll()  # `select` knows no descriptors from 1,024 on
                heard.register(listener, select.POLLIN)
                heard.register(ended, select.POLLIN)
                heard.poll()
                listener.setblocking(False)
                accepted, _ = listener.accept()
            except BlockingIOError:
                raise EOFError from None
            finally:
                os.close(ended)
        accepted.setblocking(True)
        self._life = self._supervisor.lives
        connection = self._connection = BlockingSlot(accepted, self._voice, self._labels)
        connection.open(self._open_with)

    def _ended(self, _end: End) -> None:
        """The process has ended, though a child that it forked may hold its socket open."""
        if self._entrance is not None:
            self._entrance.close()
        if self._connection is not None:
            self._connection.hang_up()
            with self._in_use:
                connection, self._connection = self._connection, None
                connection.close()
        self._tell()

    def _tell(self) -> None:
        self._on_change()


def process_partitions(serving: Serving[Any, Any], options: ProcessOptions, count: int) -> list[ProcessPartition]:
    """Start the processes of a serving and wait until its module is initialised in each.

    Raises:
        ConfigError: Another process cannot find the serving, an option cannot travel to it, or threads were replaced.
        ModelError: The module could not be initialised.
    """
    require_os_threads("a serving in processes")
    require_os_waits("a serving in processes")
    factory, kwargs = place_of(serving)
    given = _plain({name: value for name, value in msgspec.structs.asdict(options).items() if value is not None})
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
            partitions.append(ProcessPartition(index, options.batch_keys, open_with))
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
            raise ConfigError(f"{name} is {value!r}; with worker_kind='process' texts and numbers are possible there")
    return plain
