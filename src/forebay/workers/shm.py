# SPDX-License-Identifier: Apache-2.0
"""Large bodies ride in shared memory: one arena a slot and direction, reused for every batch.

A slot runs one batch at a time, so an arena needs no bookkeeping: the writer starts at offset 0 for each batch
and the reader is done with it when it answers. The arena is a file in memory (`/dev/shm` where there is one) that
grows with the largest batch; reusing it costs one copy, a new one each time would cost the page faults as well.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from forebay.errors import InvalidRequest
from forebay.workers.frames import shared

THRESHOLD_BYTES = 64 * 1024
"""Bodies of this size and more go through the arena; a smaller one is cheaper inside the frame."""

MAX_ARENA_BYTES = 1 << 30
"""An arena never grows beyond this; what does not fit goes inside the frame."""

_STEP_BYTES = 1 << 20


_PREFIX = "forebay-"


def private_folder() -> tuple[Path, int, bool]:
    """Make a folder for a pool's socket and arenas that only this user can enter, in memory if there is a place for it.

    Returns:
        The folder, the descriptor that holds its lock, and whether files in it lie in memory.
    """
    memory = Path("/dev/shm")  # noqa: S108 - the folder below it is private
    in_memory = memory.is_dir() and os.access(memory, os.W_OK)
    return (*locked_folder(memory if in_memory else Path(tempfile.gettempdir())), in_memory)


def locked_folder(parent: Path) -> tuple[Path, int]:
    """Make a folder that only this user can enter.

    Folders of servers that were killed are removed: each holds a lock in its own, and a lock ends with the process.

    Returns:
        The folder and the descriptor that holds its lock.
    """
    for other in parent.glob(_PREFIX + "*"):
        _remove_if_dead(other)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    return folder, _lock(folder, os.O_CREAT)


def _lock(folder: Path, flags: int) -> int:
    descriptor = os.open(folder / "lock", os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_dead(folder: Path) -> None:
    try:
        descriptor = _lock(folder, 0)
    except OSError:  # somebody else's, in use, or not one of ours
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)


class ArenaFolder:
    """Names for arenas in a private folder, which is made when the first one is asked for."""

    def __init__(self) -> None:
        self._made: tuple[Path, int, bool] | None = None
        self._names = itertools.count()

    def path(self) -> str | None:
        """Return a new name for the two arenas of a slot, or None where files do not lie in memory."""
        self._made = self._made or private_folder()
        folder, _, in_memory = self._made
        return f"{folder}/{next(self._names)}" if in_memory else None

    def close(self) -> None:
        """Remove the folder; arenas that are open stay usable."""
        if self._made is not None:
            folder, lock, _ = self._made
            self._made = None
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


class ArenaWriter:
    """Puts bytes where the other process can see them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0
        self._used = 0
        self._map: mmap.mmap | None = None

    def place(self, bodies: list[Any]) -> list[Any]:
        """Return the bodies with each large one replaced by its place in the arena.

        Bodies may be lists of buffers, one a sample, and these lists of buffers again, the parts of one.
        """
        self._used = 0
        if list not in set(map(type, bodies)):
            try:
                if max(map(len, bodies)) < THRESHOLD_BYTES:
                    return bodies
            except TypeError:
                pass  # not all are buffers: looked at one by one
        return self._placed(bodies, _DEPTH)

    def _placed(self, bodies: list[Any], depth: int) -> list[Any]:
        """Place what is large, also in lists up to `depth` levels below."""
        kinds = set(map(type, bodies))
        if kinds.isdisjoint(_BUFFERS) and (list not in kinds or not depth):
            return bodies
        placed: list[Any] = []
        for body in bodies:
            kind = body.__class__
            if kind is list and depth:
                placed.append(self._placed(body, depth - 1))
            elif kind in _BUFFERS and len(body) >= THRESHOLD_BYTES and self._reserve(self._used + len(body)):
                assert self._map is not None
                start, self._used = self._used, self._used + len(body)
                self._map[start : self._used] = body
                placed.append(shared(start, len(body)))
            else:
                placed.append(body)
        return placed

    def close(self) -> None:
        """Give the memory back."""
        self._map = None
        os.close(self._fd)
        self.path.unlink(missing_ok=True)

    def _reserve(self, size: int) -> bool:
        if size <= self._size:
            return True
        if size > MAX_ARENA_BYTES:
            return False
        wanted = min(-(-size * 2 // _STEP_BYTES) * _STEP_BYTES, MAX_ARENA_BYTES)
        try:
            os.posix_fallocate(self._fd, 0, wanted)  # a full /dev/shm must fail here, not as SIGBUS on the first write
        except OSError:
            return False
        self._size = wanted
        self._map = mmap.mmap(self._fd, wanted)
        return True


_BUFFERS = frozenset({bytes, bytearray, memoryview})


_DEPTH = 2
"""Levels of lists below the bodies: the samples of a body, and the parts of a sample."""


def copied_out(bodies: Any, depth: int = _DEPTH) -> Any:
    """Return the bodies with what lies in an arena copied out of it."""
    kinds = set(map(type, bodies))
    if memoryview not in kinds and (list not in kinds or not depth):
        return bodies
    copied: list[Any] = []
    for body in bodies:
        kind = body.__class__
        if kind is memoryview:
            copied.append(bytes(body))
        else:
            copied.append(copied_out(body, depth - 1) if kind is list and depth else body)
    return copied


class ArenaReader:
    """Sees what the other process placed."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY)
        self._map: mmap.mmap | None = None

    def view(self, offset: int, length: int) -> memoryview:
        """Return a view that is valid until the batch is answered.

        Raises:
            InvalidRequest: If the arena does not reach that far.
        """
        end = offset + length
        if self._map is None or end > len(self._map):
            size = os.fstat(self._fd).st_size
            if end > size:
                msg = f"bytes {offset} to {end} were announced, the shared arena has {size}"
                raise InvalidRequest(msg)
            self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
        return memoryview(self._map)[offset:end]

    def close(self) -> None:
        """Give the memory back once no view is used any more."""
        self._map = None
        os.close(self._fd)
