# SPDX-License-Identifier: Apache-2.0
"""Keeps a process running: starts it, replaces it when it ends, and says so when that does not work.

Theory of operation. Each process has a thread here that starts it, waits for its end and starts the next one. It waits
for the *process*: a socket says less, for a child that a model forked may hold it open. And since it is the same thread
that starts a process and sees its end, the kernel may tie the one to the other: where the thread is gone, the server
is (`parent_death.py`). An attempt ends in one of three ways:

    started --ready--> of use --ends--> the next one, at once if it was of use for a second, else after a pause
    started --says why it cannot, or ends--> failed, a pause
    cannot be started (no descriptors, no memory, no interpreter) --> failed, a pause

Pauses double. A start that fails says so after `MAX_FAILURES` attempts, or at once if the process itself told the
reason. One that ran before is tried again for ever, and meanwhile `problem` tells why it is not there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ForebayError, ModelError
from forebay.workers.processes import working_folder
from forebay.workers.user_calls import captured_output

if TYPE_CHECKING:
    from forebay.observe.logs.model_log import Voice

MAX_FAILURES: Final = 3
"""Attempts in a row that may fail before those who wait are told."""
LIVED_S: Final = 1.0
"""A process that was of use for this long is replaced at once when it ends."""
FIRST_PAUSE_S: Final = 0.1
MAX_PAUSE_S: Final = 10.0
"""Longest pause before a process is started again."""
END_S: Final = 0.5
"""How long a process that lost its connection, or was told to end, is waited for before it is killed."""
LAST_S: Final = 5.0
"""How long the end of a killed process is waited for; the kernel may hold on to one that waits for a broken disk."""


class Restarts:
    """When to try again, and when to say that it does not work; no clock, no process.

    Attributes:
        failures: Attempts that failed since one was of use.
        has_given_up: Whether those who wait are to be told.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.has_given_up = False
        self._was_ready = False
        self._pause_s = FIRST_PAUSE_S

    def ready(self) -> None:
        """The attempt is of use."""
        self.failures = 0
        self.has_given_up = False
        self._was_ready = True

    def failed(self, *, said_why: bool) -> float:
        """The attempt failed; returns how long to pause before the next one.

        Args:
            said_why: Whether the process itself told the reason: a first start is then not tried again in vain.
        """
        self.failures += 1
        self.has_given_up = self.failures >= MAX_FAILURES or (said_why and not self._was_ready)
        return self._pause()

    def ended(self, useful_s: float) -> float:
        """A process that was of use has ended; returns how long to pause before the next one."""
        if useful_s < LIVED_S:
            return self._pause()
        self._pause_s = FIRST_PAUSE_S
        return 0.0

    def _pause(self) -> float:
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, MAX_PAUSE_S)
        return pause_s


class End(msgspec.Struct, frozen=True):
    """An attempt that is over.

    Attributes:
        life: Its number.
        pid: The process; None if it could not be started.
        status: How that ended.
    """

    life: int
    pid: int | None = None
    status: int | None = None

    @property
    def words(self) -> str:
        """How that was, as the end of a sentence."""
        status = self.status
        if status is None:
            return "could not be started"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"


class Supervisor:
    """One process and its successors.

    Attributes:
        lives: Attempts so far, which numbers the processes from 1.
        pid: Of the process that runs, or ran last.
        problem: Why there is none that is of use; None if there is, or if the first one has not failed yet.
    """

    def __init__(
        self,
        what: str,
        start: Callable[[], subprocess.Popen[bytes]],
        *,
        load: Callable[[subprocess.Popen[bytes]], None] | None = None,
        on_end: Callable[[End], None] = lambda _end: None,
        on_left: Callable[[], None] = lambda: None,
    ) -> None:
        """Describe the process; `begin` starts it.

        Args:
            what: What messages call it.
            start: Starts a process.
            load: Waits until a process is of use; raises a `ForebayError` with the reason if it cannot be, `EOFError`
                or `OSError` if it is gone. None where somebody else calls `ready` or `refused`.
            on_end: Called when a process has ended, or could not be started.
            on_left: Called when no process is left and none will be started. All are called in the thread.
        """
        self._what = what
        self._start = start
        self._load = load
        self._on_end = on_end
        self._on_left = on_left
        self.lives = 0
        self.pid: int | None = None
        self.problem: ForebayError | None = None
        self._restarts = Restarts()
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_at: float | None = None
        self._said: ForebayError | None = None
        self._ended = 0
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name=f"forebay-{what}", daemon=True)

    @property
    def is_stopping(self) -> bool:
        """Whether no further process will be started."""
        return self._stopping.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether a process is there and of use."""
        return self._ready_at is not None

    @property
    def has_given_up(self) -> bool:
        """Whether it failed so often that those who wait are to be told, with `problem`."""
        return self._restarts.has_given_up

    def begin(self) -> None:
        """Start the process, and its successors until `stop`; a `RuntimeError` tells that no thread can be had."""
        self._thread.start()

    def wait_ready(self) -> bool:
        """Wait until a process is of use; False if it was stopped meanwhile.

        Raises:
            ForebayError: Why that does not work.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.is_ready or self._stopping.is_set() or self.has_given_up)
            if not self.is_ready and not self._stopping.is_set() and self.problem is not None:
                raise self.problem
            return not self._stopping.is_set()

    def ready(self, life: int) -> None:
        """This process is of use."""
        with self._changed:
            if life != self.lives or self._ended == life or self._ready_at is not None:
                return
            self._ready_at = time.monotonic()
            self.problem = None
            self._restarts.ready()
            self._changed.notify_all()

    def refused(self, life: int, error: ForebayError) -> None:
        """This process told why it cannot be of use; it is about to end."""
        with self._changed:
            if life == self.lives and self._ready_at is None:
                self._said = error

    def kill(self, life: int) -> None:
        """End this process now, if it is still there."""
        with self._changed:
            if life == self.lives:
                self._kill()

    def stop(self) -> None:
        """Start no more; what runs is the owner's to end, by `kill` or kinder."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()

    def join(self, timeout_s: float) -> None:
        """Wait until the process has ended after `stop`, and kill it when the time is over."""
        if not self._thread.is_alive():
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self.kill(self.lives)
            self._thread.join(LAST_S)

    def _supervise(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            pause_s = self._live()
        self._on_left()

    def _live(self) -> float:
        """Have one process from its start to its end; returns how long to pause before the next one."""
        with self._changed:
            self.lives = life = self.lives + 1
            self._process = self._said = self._ready_at = None
        try:
            process = self._start()
        except Exception as error:  # noqa: BLE001 - whatever it is, the attempt has failed, and the thread goes on
            reason = getattr(error, "strerror", None) or getattr(error, "message", None) or repr(error)
            pause_s = self._failed(ModelError(f"{self._what} cannot be started: {reason}"), said_why=False)
            self._on_end(End(life))
            return pause_s
        with self._changed:
            self._process, self.pid = process, process.pid
            if self._stopping.is_set():
                self._kill()
        if self._load is not None:
            self._see_it_loaded(process, life, self._load)
        end = End(life, process.pid, process.wait())
        captured_output.join(process.pid, LAST_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with self._changed:
            self._ended = life
            ready_at, self._ready_at = self._ready_at, None
            self._changed.notify_all()
        if ready_at is not None:
            pause_s = self._restarts.ended(time.monotonic() - ready_at)
        else:
            error = self._said or ModelError(f"{self._what} {end.words} before it was ready")
            pause_s = self._failed(error, said_why=self._said is not None)
        self._on_end(end)
        return pause_s

    def _see_it_loaded(
        self, process: subprocess.Popen[bytes], life: int, load: Callable[[subprocess.Popen[bytes]], None]
    ) -> None:
        try:
            load(process)
        except ForebayError as error:
            self.refused(life, error)
        except (EOFError, ConnectionError):
            pass  # it has ended, or is about to
        except OSError as error:
            self.refused(life, ModelError(f"{self._what} cannot be reached: {error.strerror}"))
        else:
            self.ready(life)
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        self.kill(life)

    def _failed(self, error: ForebayError, *, said_why: bool) -> float:
        with self._changed:
            self.problem = error
            pause_s = self._restarts.failed(said_why=said_why)
            self._changed.notify_all()
        return pause_s

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()


def start_worker(  # noqa: PLR0913 - each is one plain fact about the process
    address: str,
    index: int,
    *,
    life: int = 1,
    python: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | None = None,
    voice: Voice | None = None,
    cores: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that speaks the worker protocol.

    Args:
        address: Where it dials.
        index: Of the worker, as it says in its hello.
        life: Of the process; the same.
        python: Its interpreter; None takes this process's own.
        env: Its environment, all of it; None hands on this process's own.
        cwd: Its working folder; None hands on this process's own, or what has taken its place.
        voice: Writes what it prints; None leaves that where this process's own goes.
        cores: The processors it may use; none hands on this process's own.

    Raises:
        OSError: It cannot be started.
    """
    arguments = ["--connect", address, "--worker", str(index), "--life", str(life), "--server", str(os.getpid())]
    if cores:
        arguments += ["--cores", ",".join(map(str, cores))]

    def start(streams: Mapping[str, int]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [python or sys.executable, "-P", "-m", "forebay.workers.processes.child", *arguments],
            env=env,
            cwd=cwd or working_folder.successor(),
            stdin=subprocess.DEVNULL,
            stdout=streams.get("stdout"),
            stderr=streams.get("stderr"),
        )

    return start({}) if voice is None else captured_output.started(start, voice)
