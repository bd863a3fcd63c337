# SPDX-License-Identifier: Apache-2.0
"""Child processes of a node process, each kept running: started, watched, started again when it ends.

Theory of operation. A child is a command that takes its lifeline (`lifeline.py`) when it starts: a pipe over which it
says that it is ready, and the promise to end with the node process. A first start that ends with a status of its own
has said why on stderr, so it is not tried again; one that a signal ended is. A child that was ready once is started
again for ever, with the pauses of `Supervisor`. Each child has a session of its own: a Ctrl-C in the terminal reaches
the node process alone, which decides who ends first.

What follows on the pipe are beats. A child that has begun to beat and has ceased to for `hang_s` is killed, and another
one is started. Missed beats are counted, not the time: a node process that could not run reads what came meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
from typing import Final

import msgspec

from forebay.errors import ModelError
from forebay.machine.lifeline import MAX_BYTES, VARIABLE
from forebay.workers.processes.supervisor import END_S, End, Supervisor
from forebay.workers.wire.heartbeat import BEAT_S

log = logging.getLogger("forebay")

LOOK_S: Final = 0.5
"""Pause between two looks whether a process has ended that is not ready yet."""
END_CHILD_S: Final = 30.0
"""How long a child may take to end after SIGTERM, if nobody says."""


class ChildFailed(ModelError):
    """A child could not be started; if it ended with a status of its own, it has said why.

    Attributes:
        status: That status; None if a signal ended it or it could not be started at all.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is to run; two that are equal are the same.

    Attributes:
        name: What it is called; no other child of a plan has the name.
        argv: Its command, which takes its lifeline.
        env: Variables of its environment beside those of the node process.
        cwd: Its working folder; None takes that of the node process.
        wave: It is started once the children of all lower waves are ready, and told to end once those of all higher
            ones have ended.
        end_s: How long it may take to end after SIGTERM before it is killed.
        hang_s: It is killed once it has missed its beats for this time; 0 never does that.
    """

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    cwd: str | None = None
    wave: int = 0
    end_s: float = END_CHILD_S
    hang_s: float = 0.0


class ChildState(msgspec.Struct, frozen=True):
    """How a child is at this moment.

    Attributes:
        name: What it is called.
        pid: The process that runs, or ran last.
        is_ready: Whether it is of use.
        starts: How often it was started.
        said: What it said when it was ready last.
        problem: Why it is not of use, if that is known.
    """

    name: str
    pid: int | None
    is_ready: bool
    starts: int
    said: str
    problem: str


class RunningChild:
    """A child, with the processes that run it one after the other.

    Attributes:
        child: What is run.
        status: With what the last process has ended, if it has; negative for a signal.
    """

    def __init__(self, child: Child) -> None:
        """Describe it; `begin` starts it."""
        self.child = child
        self.status: int | None = None
        self._said = ""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: int | None = None
        self._was_ready = False
        self._supervisor = Supervisor(child.name, self._start, load=self._load, on_end=self._ended)

    @property
    def state(self) -> ChildState:
        """How it is now."""
        supervisor = self._supervisor
        problem = "" if supervisor.problem is None else supervisor.problem.message
        return ChildState(self.child.name, supervisor.pid, supervisor.is_ready, supervisor.lives, self._said, problem)

    def begin(self) -> None:
        """Start it, and its successors until `stop`; raises a `RuntimeError` if there can be no further thread."""
        self._supervisor.begin()

    def wait_ready(self) -> bool:
        """Wait until it is of use; False if it was stopped meanwhile.

        Raises:
            ChildFailed: It cannot be started.
        """
        try:
            return self._supervisor.wait_ready()
        except ChildFailed:
            raise
        except ModelError as error:
            raise ChildFailed(error.message) from error

    def signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        with self._lock:
            if self._process is not None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(number)

    def stop(self, *, at_once: bool = False) -> None:
        """Tell the process to end, or kill it `at_once`, and start no other."""
        self._supervisor.stop()
        self.signal(signal.SIGKILL if at_once else signal.SIGTERM)

    def join(self) -> None:
        """Wait until it has ended after `stop`; it is killed when its time is over."""
        self._supervisor.join(self.child.end_s)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start a process; raises an `OSError` if it cannot be started."""
        child = self.child
        self._pipe, theirs = os.pipe()
        try:
            process = subprocess.Popen(
                child.argv,
                env={**os.environ, **child.env, VARIABLE: f"{os.getpid()}:{theirs}"},
                cwd=child.cwd,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            with self._lock:
                self.status = None
        with self._lock:
            self._process = process
        return process

    def _load(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until the process says that it is ready.

        Raises:
            ChildFailed: It has ended with a status of its own before it was ever ready.
            EOFError: It has ended otherwise.
        """
        assert self._pipe is not None
        said = b""
        while b"\n" not in said and len(said) < MAX_BYTES:
            is_over = process.poll() is not None  # what it has forked may hold the pipe open
            if not is_over and not select.select([self._pipe], [], [], LOOK_S)[0]:
                continue
            some = b"" if is_over else os.read(self._pipe, MAX_BYTES)
            if not some:
                self._see_it_end(process)
                raise EOFError
            said += some
        line, _, beats = said.partition(b"\n")
        self._said = line.decode(errors="replace")
        self._was_ready = True
        pipe = os.dup(self._pipe)  # the other one is closed by another thread
        threading.Thread(
            target=self._see_it_beat, args=(process, pipe), kwargs={"has_begun": bool(beats)}, daemon=True
        ).start()

    def _see_it_beat(self, process: subprocess.Popen[bytes], pipe: int, *, has_begun: bool) -> None:
        """Kill a process that has ceased to beat."""
        hang_s, missed_s = self.child.hang_s, 0.0
        with os.fdopen(pipe, "rb", buffering=0) as beats:
            while process.returncode is None:
                if select.select([beats], [], [], BEAT_S)[0]:
                    missed_s, has_begun = 0.0, True
                    if not beats.read(MAX_BYTES):
                        return
                    continue
                missed_s += BEAT_S
                if has_begun and 0 < hang_s <= missed_s and not self._supervisor.is_stopping:
                    log.error(
                        "%s hangs: its process %d did not answer for %g s; killing it",
                        self.child.name,
                        process.pid,
                        missed_s,
                    )
                    process.kill()
                    return

    def _see_it_end(self, process: subprocess.Popen[bytes]) -> None:
        """Wait a moment for the end of a process that was not ready.

        Raises:
            ChildFailed: It has ended with a status of its own, and none before it was ready.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(END_S) > 0 and not self._was_ready:
                words = f"{self.child.name} ended with status {process.returncode} before it was ready"
                raise ChildFailed(words, process.returncode)

    def _ended(self, end: End) -> None:
        with self._lock:
            self.status, self._process = end.status, None
            pipe, self._pipe = self._pipe, None
        if self._was_ready and not self._supervisor.is_stopping:
            log.warning("%s %s; restarting it", self.child.name, end.words)
        if pipe is not None:
            os.close(pipe)
