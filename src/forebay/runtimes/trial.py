# SPDX-License-Identifier: Apache-2.0
"""A model file is loaded and tried in a process of its own first, which has so much memory and time and can be killed.

Theory of operation. A file may say in a hundred bytes that it takes gigabytes, or never ends. So a server does not load
one that was not loaded here, and has it run on made-up values (`sharing.py`) nowhere else. The process says two things,
a line each: what the file takes and gives, and how its samples may share a run. If it ends before the first, or takes
too long, the file is refused. If it ends before the second, the file is served one request at a time. Its memory is
bounded by the kernel: what asks for more gets none, as where a machine has none left.

A process that found nothing wrong is kept for a while: some libraries take many seconds to be imported, and a server
that starts has other files to try. It ends with the server, or once nothing was asked of it for so long.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import re
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, Final, Protocol

import msgspec

from forebay.errors import ConfigError, ForebayError, Unavailable, revive
from forebay.runtimes.library import RunOptions
from forebay.runtimes.model_file import ModelFile, load_with, reason_of
from forebay.runtimes.onnx_file import files_beside
from forebay.runtimes.sharing import Sharing, SignaturePlan, sharing_of, untried
from forebay.types.devices import Device
from forebay.types.failures import failure_of, text_of
from forebay.types.first_use import known
from forebay.workers.processes.parent_death import end_with, end_with_reader
from forebay.workers.user_calls.user_code import caught

LOAD_S: Final = 300.0
"""How long the process may take to load a file."""
IDLE_S: Final = 20.0
"""How long a process is kept that has nothing to do."""
_LEAST_BYTES: Final = 2 << 30
_FOR_A_BYTE: Final = 5
"""Bytes of memory for each byte of the file and of those in its folder: it is read, turned about and tried."""
_NO_MEMORY: Final = re.compile(r"bad_?alloc|allocat|MemoryError", re.IGNORECASE)
"""What libraries say where there is no memory left."""
_MAX_THREADS: Final = 4
_MAX_ANSWER: Final = 1 << 26
_LAST_S: Final = 5.0


class TrialLimits(msgspec.Struct, frozen=True):
    """What a trial may take.

    Attributes:
        max_s: Time that it may be tried for once it is loaded.
        max_bytes: Memory of the process; None goes by the size of the files.
    """

    max_s: float
    max_bytes: int | None


class Trial(msgspec.Struct, frozen=True, tag="tried"):
    """What a file is.

    Attributes:
        library: What runs it here.
        missing: Those of the devices it is to run on that this does not know.
        main: What is asked where no signature is named.
        name: What the file calls that; empty if there is no other.
        others: Its other signatures by name.
        ends_process: Whether the process ended by itself while it ran the file, as a worker may.
    """

    library: str
    missing: tuple[str, ...]
    main: SignaturePlan
    name: str = ""
    others: dict[str, SignaturePlan] = {}
    ends_process: bool = False


class SharedFile(Protocol):
    """A model file that others in this process use as well, and that is tried and loaded once for all of them."""

    def trial(self, devices: Sequence[Device]) -> Trial:
        """Return what the file is; see `tried`."""
        ...

    def load(self) -> ModelFile:
        """Return the model."""
        ...


class _Order(msgspec.Struct, frozen=True):
    """What the process is told.

    Attributes:
        server: Id of the process that it ends with.
    """

    path: str
    options: RunOptions
    devices: tuple[Device, ...]
    max_bytes: int
    server: int


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why the file cannot be loaded, in the process's own words."""

    kind: str
    message: str


def tried(path: Path, options: RunOptions, devices: Sequence[Device], limits: TrialLimits) -> Trial:
    """Load a file and try it in a process of its own.

    Args:
        path: The file, or the folder of a SavedModel.
        devices: What it is to run on later.

    Raises:
        ConfigError: If it cannot be loaded, or not within the limits.
        Unavailable: If there can be no further process.
    """
    path = path.absolute()
    max_bytes = limits.max_bytes or _LEAST_BYTES + _FOR_A_BYTE * _size(path)
    options = msgspec.structs.replace(options, threads=min(options.threads or _MAX_THREADS, _MAX_THREADS))
    order = msgspec.json.encode(_Order(str(path), options, tuple(devices), max_bytes, os.getpid()))
    kept = _idle.take()
    found = None if kept is None else _asked(kept, path, order, limits, max_bytes, is_kept=True)
    # What a library has kept of another file may end a process, or it was gone before it was asked.
    found = _asked(_Process(), path, order, limits, max_bytes) if found is None else found
    assert found is not None
    return found


def _asked(
    process: _Process, path: Path, order: bytes, limits: TrialLimits, max_bytes: int, *, is_kept: bool = False
) -> Trial | None:
    """Have a process try a file; None if it was kept and has ended. Raises as `tried` does."""
    is_good = False
    try:
        process.order(order)
        first = process.line(LOAD_S)
        if first is None:
            if is_kept and process.has_ended:
                return None
            how = process.how_it_ended(LOAD_S, max_bytes)
            raise ConfigError(f"the model is '{path}', and it cannot be loaded: the process that tried to {how}")
        told = msgspec.json.decode(first, type=known(Trial | _Refused))
        if isinstance(told, _Refused):
            raise revive(told.kind, told.message)
        second = process.line(limits.max_s)
        if second is None:
            if is_kept and process.has_ended:
                return None
            hint = "" if process.has_ended else " (--trial-s)"
            why = f"the process that tried it {process.how_it_ended(limits.max_s, max_bytes)}{hint}"
            return msgspec.structs.replace(_alone(told, why), ends_process=process.has_ended)
        found = msgspec.json.decode(second, type=known(Trial))
        is_good = not any(one.sharing.why_not for one in (found.main, *found.others.values()))
        return found
    finally:
        if is_good:
            _idle.keep(process)
        else:
            process.end()


def _alone(told: Trial, why: str) -> Trial:
    """Return a trial by which no signature's samples share a run."""

    def alone(one: SignaturePlan) -> SignaturePlan:
        return SignaturePlan(one.signature, untried(one.signature, why))

    others = {name: alone(one) for name, one in told.others.items()}
    return msgspec.structs.replace(told, main=alone(told.main), others=others)


def _memory(max_bytes: int) -> str:
    return f"it may have {max_bytes:,} bytes of memory (--max-trial-bytes)"


def _size(path: Path) -> int:
    """Return the size of a file, of all beside it and of its weights further below, or of all in a folder."""
    files: set[Path] = set()
    with contextlib.suppress(OSError):
        if path.is_dir():
            files = {Path(at) / file for at, _, found in os.walk(path) for file in found}
        else:  # what lies below may be all that somebody has
            with os.scandir(path.parent) as beside:
                files = {Path(entry.path) for entry in beside if entry.is_file()}
            files.update(path.parent / name for name in (files_beside(path) if path.suffix == ".onnx" else ()))
    size = 0
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            size += file.stat().st_size
    return size


class _Process:
    """A process that tries files.

    Attributes:
        has_ended: Whether it says nothing more.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._held = b""
        started: SimpleQueue[tuple[subprocess.Popen[bytes], BinaryIO] | BaseException] = SimpleQueue()
        threading.Thread(target=_live, args=(started,), daemon=True, name="forebay-trial").start()
        found = started.get()
        if isinstance(found, BaseException):
            raise Unavailable(f"the process that tries model files cannot be started: {text_of(found)}") from found
        self._process, self._answers = found

    def order(self, order: bytes) -> None:
        """Tell it what to try."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order + b"\n")
            self._process.stdin.flush()

    def line(self, timeout_s: float) -> bytes | None:
        """Return the next thing that it says; None if that does not come in time, or at all."""
        until = time.monotonic() + timeout_s
        heard = select.poll()  # `select` knows no descriptors from 1,024 on
        heard.register(self._answers, select.POLLIN)
        while b"\n" not in self._held:
            left_s = until - time.monotonic()
            if left_s <= 0 or len(self._held) > _MAX_ANSWER:
                return None
            if heard.poll(min(left_s, 3600.0) * 1000):
                found = os.read(self._answers.fileno(), 1 << 16)
                if not found:
                    self.has_ended = True
                    return None
                self._held += found
        line, _, self._held = self._held.partition(b"\n")
        return line

    def how_it_ended(self, max_s: float, max_bytes: int) -> str:
        """Return what became of it, where it did not say what it was to say."""
        if not self.has_ended:
            return f"took more than {max_s:g} s, and was killed"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)
        status = self._process.returncode
        how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        return f"ended {'by' if how.startswith('signal') else 'with'} {how}; {_memory(max_bytes)}"

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        for pipe in (self._process.stdin, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess] - it was asked for
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)


def _live(started: SimpleQueue[tuple[subprocess.Popen[bytes], BinaryIO] | BaseException]) -> None:
    """Start a process and wait for its end: the kernel ends it with the thread that started it."""
    found, problem = caught(_started)
    if problem is not None:
        started.put(problem)
        return
    started.put(found)
    found[0].wait()


def _started() -> tuple[subprocess.Popen[bytes], BinaryIO]:
    """Start a process; returns it and what it answers on: some print to the standard output before its first line."""
    reads, writes = os.pipe()
    process, problem = caught(
        lambda: subprocess.Popen(
            [sys.executable, "-P", "-c", f"from {__name__} import main; main({writes})"],
            stdin=subprocess.PIPE,
            stdout=2,
            pass_fds=(writes,),
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},  # each of its threads takes memory at once
            start_new_session=True,  # Ctrl+C at the terminal is the server's business
        )
    )
    os.close(writes)
    if problem is not None:
        os.close(reads)
        raise problem
    return process, os.fdopen(reads, "rb", buffering=0)


class _Idle:
    """The process that has nothing to do, if there is one."""

    def __init__(self) -> None:
        self._process: _Process | None = None
        self._lock = threading.Lock()
        atexit.register(self.end)

    def take(self) -> _Process | None:
        """Return it, for a file."""
        with self._lock:
            process, self._process = self._process, None
            return process

    def keep(self, process: _Process) -> None:
        """Keep a process for a while; of two one is enough."""
        timer = threading.Timer(IDLE_S, self.end, (process,))
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # there can be no further thread, which would end it
            process.end()
            return
        with self._lock:
            process, self._process = self._process or process, process
        if process is not self._process:
            process.end()

    def end(self, process: _Process | None = None) -> None:
        """End it, or this process if it still is the one."""
        with self._lock:
            if self._process is None or process not in {None, self._process}:
                return
            process, self._process = self._process, None
        process.end()


_idle: Final = _Idle()


def main(descriptor: int) -> None:
    """Try the files that the standard input names, and say what they are.

    Args:
        descriptor: Where it is said; what libraries print goes to the standard error output.
    """
    os.set_inheritable(descriptor, False)
    answer = os.fdopen(descriptor, "wb", buffering=0)
    is_watched = False
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=known(_Order))
        if not is_watched and not end_with(order.server):
            end_with_reader(answer.fileno())
        is_watched = True
        _bound(order.max_bytes)
        _try(order, answer)
        gc.collect()
    os._exit(0)  # libraries take their time to end, and nothing is left to be done


def _try(order: _Order, answer: BinaryIO) -> None:
    """Try a file and say what it is."""
    file, problem = caught(load_with, Path(order.path), order.options)
    if problem is not None:
        error = failure_of(problem).error if isinstance(problem, ForebayError) else ConfigError(reason_of(problem))
        text = _bounded(error.message, order.max_bytes)
        answer.write(msgspec.json.encode(_Refused(error.kind, text)) + b"\n")
        return
    name, others = file.signatures()
    missing = tuple(str(device) for device in order.devices if not file.runtime.can_run_on(device))
    told = Trial(
        type(file.runtime).__name__,
        missing,
        SignaturePlan(file.signature()),
        name,
        {one: SignaturePlan(other.signature()) for one, other in others.items()},
    )
    answer.write(msgspec.json.encode(told) + b"\n")
    found = {
        one: SignaturePlan(model.signature(), _sharing(model, order.max_bytes))
        for one, model in {**others, "": file}.items()
    }
    main = found.pop("")
    answer.write(msgspec.json.encode(msgspec.structs.replace(told, main=main, others=found)) + b"\n")


def _sharing(model: ModelFile, max_bytes: int) -> Sharing:
    sharing, problem = caught(sharing_of, model)
    if problem is not None:
        return untried(model.signature(), _bounded(f"it cannot be tried: {reason_of(problem)}", max_bytes))
    return msgspec.structs.replace(sharing, why_not=_bounded(sharing.why_not, max_bytes))


def _bounded(text: str, max_bytes: int) -> str:
    """Say with a problem how much memory there was, if it is about that."""
    return f"{text}; {_memory(max_bytes)}" if _NO_MEMORY.search(text) else text


def _bound(max_bytes: int) -> None:
    """Let this process have so much more memory, and let the kernel end it rather than another where there is none."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = 0
    with contextlib.suppress(OSError):
        if found := re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text()):
            used = int(found[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = used + max_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if hard < 0 else min(wanted, hard), hard))
