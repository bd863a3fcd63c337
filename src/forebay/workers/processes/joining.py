# SPDX-License-Identifier: Apache-2.0
"""A worker started by hand: it joins a server, stays while there is one, and leaves without losing a batch.

The main thread dials first, so that a worker that is not let in says so before it loads anything, then opens the runner
and waits for signals. Each slot is a thread with a connection of its own that dials again when the server goes away.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn

from forebay.errors import ForebayError, InvalidRequest, ModelError
from forebay.observe.logs.log import TextFormatter
from forebay.observe.logs.model_log import capture, origin, speaking
from forebay.observe.metrics.author_metrics import MetricReporter
from forebay.workers.memory.freed_memory import keep_freed_memory
from forebay.workers.processes import sigterm
from forebay.workers.processes.child import serve, wire_error
from forebay.workers.processes.device_binding import device_in
from forebay.workers.processes.health_file import BEAT_S, HealthFile
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.user_code import close_runner, user_code
from forebay.workers.wire.address import AddressFile
from forebay.workers.wire.redialling import MAX_PAUSE_S, Pauses
from forebay.workers.wire.tls_files import why_closed
from forebay.workers.wire.worker_connection import DialledServer, WorkerConnection, WorkerRefused

if TYPE_CHECKING:
    from forebay.workers.wire.worker_pulse import WorkerPulse

log = logging.getLogger("forebay.workers")

MOVED_S: Final = 10.0
"""How long a server may go on to use a worker that belongs to another one by now: it may have requests left."""
_LOST = (EOFError, OSError, InvalidRequest)
_HUNG_UP = (EOFError, ConnectionResetError, BrokenPipeError, InvalidRequest)
"""Somebody was there: which of these a hangup becomes depends on what was still on its way."""


class StopSignal(SystemExit):
    """A signal came before there was anything to finish; unlike a `sys.exit` of the model's it is not a failure."""


class JoiningWorker:
    """One runner and the threads that serve with it."""

    def __init__(  # noqa: PLR0913 - each is one plain fact about the worker
        self,
        server: DialledServer,
        model: Any,
        *,
        pulse: WorkerPulse | None = None,
        health: HealthFile | None = None,
        threads: int = 1,
        once: bool = False,
        orphan_grace_s: float | None = None,
        ready: Callable[[], object] = lambda: None,
        tell: Callable[[str], None] = lambda _line: None,
    ) -> None:
        """Describe the worker; `run` is its life.

        Args:
            server: Where workers attach.
            model: What it serves, described as plain data for the server.
            pulse: Beats for it, if there is a network between it and the server.
            health: Says to a supervisor how it is.
            once: End when the server goes away, or is not there, instead of dialling again.
            orphan_grace_s: End when there has been no server for this time.
            ready: Called once the model is loaded.
            tell: Takes sentences for whoever started it.
        """
        self._server = server
        self._address = server.address
        name = secrets.token_hex(16) if pulse is None else pulse.worker
        self._about = {"pid": os.getpid(), "worker": name, "model": model, "phases": True}
        self._pulse = pulse
        self._health = health
        self._threads = threads
        self._once = once
        self._orphan_grace_s = orphan_grace_s
        self._ready = ready
        self._tell = tell
        self._leaving = threading.Event()
        self._has_left = threading.Lock()
        self._metrics = MetricReporter(self._tell_metrics)
        self._connections: set[WorkerConnection] = set()
        self._refused: WorkerRefused | None = None
        self._says_waiting = True

    def run(self, spec_of: Callable[[Mapping[str, Any]], RunnerSpec]) -> int:
        """Join, serve and leave; returns the exit status. Signals end it: once gently, twice at once.

        Args:
            spec_of: Given what the server answers to the hello, says how the runner is built.

        Raises:
            Refused: If the server does not let it in.
            ModelError: If the runner cannot be opened, or with `once` if there is no server.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _exit)
        keep_freed_memory()
        connection = self._dial()
        assert connection is not None
        if self._pulse is not None and connection.options.get("beats"):
            self._pulse.begin(self._cut)
        runner = self._open(spec_of(connection.options), connection)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave)
        sigterm.keep_from_children(self._leave)
        with speaking(None):  # to whoever started it; the server logs by itself who has joined
            self._tell(f"ready; attached to {self._address}")
        self._ready()
        threads = [
            threading.Thread(target=self._work, args=(runner, first), daemon=True)
            for first in (connection, *[None] * (self._threads - 1))
        ]
        for thread in threads:
            thread.start()
        if isinstance(self._address, AddressFile):
            threading.Thread(target=self._follow, args=(self._address,), daemon=True).start()
        for thread in threads:
            while thread.is_alive():
                thread.join(self._say_how_it_is())
        close_runner(runner.close)
        if self._health is not None:
            self._health.close()
        if self._refused is not None:
            raise self._refused
        return 0

    def _open(self, spec: RunnerSpec, connection: WorkerConnection) -> Runner:
        if "log" in connection.options:
            here = logging.StreamHandler()
            here.setFormatter(TextFormatter())
            capture(connection.options["log"], here, also=True)
            origin.set(connection)
        try:
            with user_code(StopSignal):
                runner = spec.build()
                runner.open(WorkerContext(threads=self._threads, device=device_in(os.environ)))
        except ForebayError as failed:
            try:
                connection.send(["failed", *wire_error(failed)])
            except OSError:
                pass  # the server went away meanwhile; whoever started the worker is told all the same
            connection.close()
            raise ModelError(failed.message, trace=failed.trace) from failed
        gc.collect()
        gc.freeze()  # what is loaded now stays: the collector need not walk over it again and again
        return runner

    def _say_how_it_is(self) -> float | None:
        """Tell the supervisor; returns after how many seconds to do so again, None for never."""
        if self._health is None:
            return None
        self._health.tell(connection.fileno() for connection in list(self._connections))
        return BEAT_S

    def _work(self, runner: Runner, connection: WorkerConnection | None) -> None:
        pauses = Pauses()
        while not self._leaving.is_set():
            try:
                connection = connection or self._dial()
            except (WorkerRefused, ModelError) as error:
                self._give_up(error)
                return
            if connection is None:
                return
            joined = time.monotonic()
            self._connections.add(connection)
            try:
                if not self._leaving.is_set():
                    self._metrics.forget()
                    self._metrics.look()
                    serve(connection, runner, self._metrics)
                    self._metrics.report()
            except _LOST:
                pass  # the server hands on what this slot was running
            except Exception:
                log.exception("a connection to the server failed; closing it")  # a defect must not cost the slot
            finally:
                self._connections.discard(connection)
                connection.close()
                connection = None
            if self._once:
                return
            if time.monotonic() - joined > MAX_PAUSE_S:
                pauses.begin_again()
            self._leaving.wait(pauses.next_s())

    def _follow(self, file: AddressFile) -> None:
        """Leave a server that goes on although the worker belongs to another one by now."""
        moved_s: dict[WorkerConnection, float] = {}
        while not self._leaving.wait(MAX_PAUSE_S):
            try:
                address = file.read()
            except OSError:
                continue
            now = time.monotonic()
            former = [one for one in list(self._connections) if one.address != address]
            moved_s = {one: moved_s.get(one, now) for one in former}
            for connection, since_s in moved_s.items():
                if now - since_s > MOVED_S:
                    moved_s[connection] = math.inf  # once
                    connection.leave()

    def _cut(self) -> None:
        """Give up all connections: the server is not heard any more."""
        for connection in list(self._connections):
            connection.cut()

    def _tell_metrics(self, data: bytes) -> None:
        """Send metrics over one of the connections; raises an `OSError` if there is none."""
        connection = next(iter(self._connections), None)
        if connection is None:
            raise ConnectionError
        connection.send_aside(["metrics", data])

    def _dial(self) -> WorkerConnection | None:
        """Connect, however long it takes; None once the worker leaves.

        Raises:
            ModelError: There is no server, and the worker is not to wait for one, or not so long.
        """
        pauses, began = Pauses(), time.monotonic()
        while not self._leaving.is_set():
            try:
                connection = self._server.dial(self._about)
            except _LOST as error:
                has_hung_up = isinstance(error, _HUNG_UP)
                why = self._why_closed() if has_hung_up else getattr(error, "strerror", None) or str(error)
                if self._once:
                    msg = f"there is no server at {self._address}: {why}; start it with: forebay serve --attach ADDRESS"
                    raise ModelError(msg) from error
                grace_s = self._orphan_grace_s
                if grace_s is not None and time.monotonic() - began > grace_s:
                    raise ModelError(f"there has been no server at {self._address} for {grace_s:g} s: {why}") from error
                if self._says_waiting:
                    self._says_waiting = False
                    hint = f": {why}" if has_hung_up else ""
                    self._tell(f"waiting for a server at {self._address}{hint}")
                self._leaving.wait(pauses.next_s())
            else:
                self._says_waiting = True
                return connection
        return None

    def _why_closed(self) -> str:
        """Say why a server may hang up before it has answered a hello."""
        if self._server.tls is None:
            return "the connection was closed before it answered"
        return why_closed()

    def _give_up(self, error: WorkerRefused | ModelError) -> None:
        if isinstance(error, WorkerRefused):
            self._refused = error
        self._leave(0, None)

    def _leave(self, number: int, _frame: object) -> None:
        """End once what runs is answered; a second signal ends at once."""
        if number and self._leaving.is_set():
            os._exit(1)
        self._leaving.set()
        if self._has_left.acquire(blocking=False):  # several slots may be refused at the same time
            for connection in list(self._connections):
                connection.leave()


def _exit(_number: int, _frame: object) -> NoReturn:
    """Nothing is running yet that could be lost."""
    raise StopSignal
