# SPDX-License-Identifier: Apache-2.0
"""Copies a revision to the disk: its files in parts, several at a time.

Theory of operation. A file is made in its full length and its parts are written where they belong, in any order. The
source gives a part only of the very file that was listed, so what is there in the end is what was listed, or nothing.
A file is open only while a part of it is written: a revision may have more files than a process may have open.
The first part that fails ends all of it, and what is there then is of no use.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ForebayError, Unavailable
from forebay.repository.source import ModelSource, SourceFailed
from forebay.types.failures import failure_of
from forebay.types.user_exceptions import caught
from forebay.workers.memory.file_room import take_room

if TYPE_CHECKING:
    from forebay.repository.listing import Revision, StoredFile

PART_BYTES: Final = 8 * 1024 * 1024
"""What is asked for at a time."""
THREADS: Final = 8
"""Parts that are on their way at a time, of one revision."""
_KEPT_BYTES: Final = 1 << 30
_KEPT_SHARE: Final = 20
"""What is left of a disk for others: a twentieth, and a gigabyte at most. A store may claim any size of its files."""
_making: Final = threading.Lock()


class Progress(msgspec.Struct):
    """How far a revision has come.

    Attributes:
        total: Bytes that it has.
        done: Bytes that are here.
        started_s: When it began, on the clock that only goes forward.
    """

    total: int
    done: int = 0
    started_s: float = msgspec.field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """Return it for a person."""
        rate = self.done / max(time.monotonic() - self.started_s, 1e-3)
        return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} MB are here, {rate / 1e6:.1f} MB a second"


class DiskFull(Unavailable):
    """There is no room on the disk."""


def fetch(source: ModelSource, revision: Revision, into: Path, progress: Progress, end: threading.Event) -> None:
    """Copy the files of a revision into a folder that is there and empty.

    Args:
        progress: Counts what has come.
        end: Nobody wants it any more once this is set.

    Raises:
        ForebayError: If a file could not be copied; what is in the folder is of no use.
    """
    free = _room(into)
    if revision.size > free:
        raise _full(into, revision, free)
    problem: list[BaseException] = []
    try:
        for file in revision.files:
            _make(into / file.path, file.size)
        parts = _parts(revision.files)
        turn = threading.Lock()

        def work() -> None:
            while not problem and not end.is_set():
                with turn:
                    part = next(parts, None)
                if part is None:
                    return
                file, start, stop = part
                data = source.read(f"{revision.place}/{file.path}" if revision.place else file.path, file, start, stop)
                _write(into / file.path, data, start)
                with turn:
                    progress.done += stop - start

        def worked() -> None:
            _, error = caught(work)
            if error is not None:
                problem.append(error)

        count = min(THREADS, sum(-(-file.size // PART_BYTES) for file in revision.files))
        threads = [threading.Thread(target=worked, name="forebay-fetch", daemon=True) for _ in range(count - 1)]
        for thread in threads:
            thread.start()
        worked()
        for thread in threads:
            thread.join()
        if end.is_set() and not problem:
            problem.append(Unavailable("the server is stopping"))
        if not problem:
            for file in revision.files:
                _sync(into / file.path)
    except OSError as error:
        problem.append(error)
    if problem:
        raise _told(problem[0], into, revision)


def _room(folder: Path) -> int:
    """Return what may be written on the disk of a folder, of which others need something as well."""
    usage = shutil.disk_usage(folder)
    return max(usage.free - min(_KEPT_BYTES, usage.total // _KEPT_SHARE), 0)


def _make(path: Path, size: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("xb", buffering=0) as opened, _making:  # several at a time would each find the same room
        if size > _room(path.parent):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        try:
            if size:
                take_room(opened.fileno(), 0, size)
        except OSError as error:
            if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
                raise


def _parts(files: Iterable[StoredFile]) -> Iterator[tuple[StoredFile, int, int]]:
    for file in files:
        for start in range(0, file.size, PART_BYTES):
            yield file, start, min(start + PART_BYTES, file.size)


def _write(path: Path, data: bytes | memoryview, start: int) -> None:
    view = memoryview(data)
    with path.open("r+b", buffering=0) as opened:
        while view:
            written = os.pwrite(opened.fileno(), view, start)
            view, start = view[written:], start + written


def _sync(path: Path) -> None:
    with path.open("rb") as opened:
        os.fsync(opened.fileno())


def _told(problem: BaseException, into: Path, revision: Revision) -> ForebayError:
    if isinstance(problem, OSError):
        if problem.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
            return _full(into, revision, _room(into))
        where = problem.filename or into
        return SourceFailed(
            f"version '{revision.version}' of '{revision.model}' cannot be written to {where}: {problem.strerror}"
        )
    return failure_of(problem).error


def _full(into: Path, revision: Revision, free: int) -> DiskFull:
    return DiskFull(
        f"version '{revision.version}' of '{revision.model}' has {revision.size} bytes, and {into} has room for "
        f"{free}; make room there, name another folder with --repository-folder, or keep less with --max-disk-bytes"
    )
