# SPDX-License-Identifier: Apache-2.0
"""Files of numbers that processes share: their room on the disk is taken before they are mapped.

prometheus-client makes these files with holes and maps them. A process that writes to a hole for which a full disk has
no room is ended by the kernel (SIGBUS), in the middle of whatever it answers. Here the room is taken first. Where there
is none the numbers stay in the memory of the process, and the log says so.
"""

from __future__ import annotations

import errno
import functools
import logging
import mmap
import os
import tempfile
from typing import Any, Final

import prometheus_client.values
from prometheus_client.mmap_dict import MmapedDict

from forebay.workers.memory.file_room import take_room
from forebay.workers.memory.memory_file import make_file
from forebay.workers.processes.process_life import OPEN_FILES

log = logging.getLogger("forebay")

FIRST_BYTES: Final = 1 << 16
"""Size of a new file."""
_VALUE_BYTES: Final = 32
"""What a number needs beside its name."""
_MEMORY: Final = f"{OPEN_FILES}/"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class RoomyDict(MmapedDict):
    """The numbers of one process."""

    _f: Any
    _fname: str
    _used: int
    _capacity: int

    def __init__(self, filename: str, read_mode: bool = False) -> None:
        super().__init__(filename if read_mode else _reserved(filename), read_mode)

    def _init_value(self, key: str) -> None:
        needed = self._used + len(key.encode()) + _VALUE_BYTES
        if needed > self._capacity and not self._fname.startswith(_MEMORY):
            self._grow(needed)
        super()._init_value(key)  # pyright: ignore[reportUnknownMemberType]

    def _grow(self, needed: int) -> None:
        while self._capacity < needed:
            self._capacity *= 2
        try:
            _allocate(self._f.fileno(), self._capacity)
        except OSError as error:
            _tell_full(os.path.dirname(self._fname), error.strerror)  # noqa: PTH120
            kept, self._f = self._f, os.fdopen(_nameless(), "r+b")
            os.truncate(self._f.fileno(), self._capacity)
            os.pwrite(self._f.fileno(), self._m[:], 0)
            self._fname = _MEMORY
            kept.close()
        self._m = mmap.mmap(self._f.fileno(), self._capacity)


def reserve_room() -> None:
    """Keep the numbers of this process in such files."""
    setattr(prometheus_client.values, "MmapedDict", RoomyDict)  # noqa: B010 - not a name for others, says its author


def _reserved(filename: str) -> str:
    """Make a file with room in it; returns its name, or that of memory if the disk is full."""
    try:
        with open(filename, "ab") as file:  # noqa: PTH123
            try:
                _allocate(file.fileno(), max(os.fstat(file.fileno()).st_size, FIRST_BYTES))
            except OSError:
                os.unlink(filename)  # noqa: PTH108 - who reads the folder takes an empty file for a broken one
                raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _tell_full(os.path.dirname(filename), error.strerror)  # noqa: PTH120
        return f"{_MEMORY}{_nameless()}"
    return filename


def _nameless() -> int:
    """Return the descriptor of a file that only this process has: in memory, or elsewhere on the disk."""
    try:
        return make_file("forebay-metrics")
    except OSError:
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def _allocate(descriptor: int, size: int) -> None:
    try:
        take_room(descriptor, 0, size)
    except OSError as error:
        if error.errno in _FULL:
            raise
        os.truncate(descriptor, size)  # a file system that cannot promise room


@functools.cache
def _tell_full(folder: str, why: str) -> None:
    """Say that the disk is full, once for each folder."""
    log.warning("the metrics folder %s is full: %s; process %d keeps its own counts", folder, why, os.getpid())
