# SPDX-License-Identifier: Apache-2.0
"""Entries of the store as files in a private folder, one folder a run, in memory or on a disk.

A file has a header, the lengths of its parts, and the parts: a pickle and the large buffers that belong to it
(`workers/wire/objects.py`). Reading maps the file, so that a large array is not copied: its pages are those of the file
until somebody writes to them. Pickles are allowed here because nobody else can write into the folder.

An entry for several readers is one file with as many names; each reader removes one of them.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from forebay.errors import BadOutcome, ConfigError, Unavailable
from forebay.workers.memory import shm
from forebay.workers.processes.private_folder import PrivateFolder
from forebay.workers.wire import objects

log = logging.getLogger("forebay.pipeline")

ALIGNMENT: Final = 64
HEADER: Final = 8


def folder_for(parent: str | None, *, in_memory: bool) -> PrivateFolder:
    """Make the folder for all entries of a server; those of servers that were killed are removed.

    Raises:
        ConfigError: If it cannot be made.
    """
    try:
        if in_memory:
            folder = PrivateFolder()
        else:
            above = Path(parent or tempfile.gettempdir())
            above.mkdir(parents=True, exist_ok=True)
            folder = PrivateFolder(above)
    except OSError as error:
        where = "memory" if in_memory else f"'{parent}'"
        raise ConfigError(f"dag.external_store: no folder can be made in {where}: {error.strerror}") from error
    folder.guard()
    return folder


class FileBackend:
    """Entries in files."""

    def __init__(self, folder: str, ttl_s: float, max_bytes: int) -> None:
        self._folder = Path(folder)
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self._is_told = False

    def write(self, run: str, name: str, value: Any, readers: int) -> None:
        """Write a file, under as many names as it has readers.

        Raises:
            BadOutcome: If the value cannot be stored.
            Unavailable: If there is no room.
        """
        parts = objects.dump(value, "the value for the store")
        sizes = [memoryview(part).nbytes for part in parts]
        if sum(sizes) > self._max_bytes:
            msg = f"a value of {sum(sizes)} bytes is too large for the store, which takes {self._max_bytes} (max_mb)"
            raise BadOutcome(msg)
        folder = self._folder_of(run)
        first, *others = _names(name, readers)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with (folder / first).open("xb") as file:
                header = msgspec.msgpack.encode(sizes)
                file.write(len(header).to_bytes(HEADER, "big") + header)
                for part, place in zip(parts, _places(HEADER + len(header), sizes), strict=True):
                    file.seek(place)
                    file.write(part)
            for other in others:
                os.link(folder / first, folder / other)
        except OSError as error:
            self.release(run, name, readers)
            if not self._is_told:  # once, until it can be written again
                self._is_told = True
                log.warning(
                    "the store %s cannot be written: %s; requests that need it fail", self._folder, error.strerror
                )
            raise Unavailable(f"the store cannot be written: {error.strerror}") from error
        self._is_told = False

    def read(self, run: str, name: str, readers: int) -> Any:
        """Map a file; raises LookupError if there is none, or none any more."""
        folder = self._folder_of(run)
        for one in _names(name, readers):
            try:
                file = (folder / one).open("rb")
            except FileNotFoundError:
                continue
            with file:
                if readers:
                    try:
                        (folder / one).unlink()
                    except FileNotFoundError:  # another reader was quicker
                        continue
                return _loaded(file.fileno())
        raise LookupError(name)

    def release(self, run: str, name: str, readers: int) -> None:
        """Remove a file."""
        for one in _names(name, readers):
            (self._folder_of(run) / one).unlink(missing_ok=True)

    def forget(self, runs: Sequence[str]) -> None:
        """Remove the folders of these runs, if they have any: most put nothing away."""
        with contextlib.suppress(FileNotFoundError):
            known = set(self._folder.iterdir())
            for folder in map(self._folder_of, runs):
                if folder in known:
                    shutil.rmtree(folder, ignore_errors=True)

    def sweep(self) -> None:
        """Remove folders of runs in which nothing has changed for too long."""
        oldest = time.time() - self._ttl_s
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and entry.stat().st_mtime < oldest:
                    shutil.rmtree(entry.path, ignore_errors=True)

    def close(self) -> None:
        """Nothing is held."""

    def _folder_of(self, run: str) -> Path:
        return self._folder / f"run-{run}"


def _names(name: str, readers: int) -> Sequence[str]:
    return [f"{name}.{number}" for number in range(readers)] if readers else [name]


def _places(start: int, sizes: Sequence[int]) -> Iterator[int]:
    for size in sizes:
        start = -(-start // ALIGNMENT) * ALIGNMENT
        yield start
        start += size


def _loaded(descriptor: int) -> Any:
    size = os.fstat(descriptor).st_size
    if size < shm.THRESHOLD_BYTES:
        data = memoryview(bytearray(os.pread(descriptor, size, 0)))
    else:
        data = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY))
    end = HEADER + int.from_bytes(data[:HEADER], "big")
    sizes = msgspec.msgpack.decode(data[HEADER:end], type=list[int])
    parts = [data[place : place + size] for place, size in zip(_places(end, sizes), sizes, strict=True)]
    return objects.load(*parts)
