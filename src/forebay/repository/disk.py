# SPDX-License-Identifier: Apache-2.0
"""Revisions on the disk: whole or not there, whenever the server or the machine ends.

Theory of operation. A revision is copied into a folder beside the others and gets its name when all of it is there and
written to the disk, with a list of its files. What has no name when a server starts is removed, and so is what is not
as its list says. A revision that is replaced keeps its folder until nobody uses it: the folder of its successor is
another one. Each server has a place of its own below the folder, with a lock that ends with its process; the next one
takes the place over, with all that is there.

What is there is not believed: another user may have made the folder before. A place belongs to this user, and nobody
else can write to it; where others could, nothing that lies in it is taken over. What is taken over has the names that
the rules of trees allow and no other files, and before somebody uses it, its files have the hashes that were noted when
they came.

    FOLDER/0/lock, coming-*, leaving-*, ID-*/revision.json, ID-*/MODEL/VERSION/files
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError, Unavailable
from forebay.repository import own_folder
from forebay.repository.cache import Cache, Lease
from forebay.repository.fetching import Progress, fetch
from forebay.repository.listing import Revision
from forebay.repository.tree_rules import misplaced
from forebay.types.first_use import known
from forebay.types.user_exceptions import caught

if TYPE_CHECKING:
    from forebay.repository.shelf import ShelfStatistics
    from forebay.repository.source import ModelSource

_COMING: Final = "coming-"
_LEAVING: Final = "leaving-"
_LIST: Final = "revision.json"
_HASH: Final = "sha256"
MAX_SERVERS: Final = 64
"""Servers that may have their places in one folder."""


class _Kept(msgspec.Struct, frozen=True):
    """What the list of a revision says.

    Attributes:
        hashes: Of its files, in their order.
    """

    revision: Revision
    hashes: tuple[str, ...]


class DiskCache:
    """Keeps revisions of one source on the disk.

    Attributes:
        path: The place of this server.
        copied_bytes: Bytes of all revisions that were copied here.
    """

    def __init__(
        self,
        source: ModelSource,
        folder: Path,
        max_count: int | None = None,
        max_bytes: int | None = None,
        *,
        may_exceed: bool = False,
    ) -> None:
        """Take a place in a folder, and what is whole there.

        Args:
            folder: Where to; it is made if it is not there.
            max_bytes: How large they may be together.
            may_exceed: Whether a revision is copied although all that are kept are in use.

        Raises:
            ConfigError: If nothing can be written there.
        """
        self.copied_bytes = 0
        self._source = source
        self._end = threading.Event()
        self._coming: dict[str, Progress] = {}
        self._unread: dict[str, tuple[str, ...]] = {}
        """The hashes of revisions that were taken over, and that nobody has used yet."""
        try:
            self.path, self._lock, is_ours = _place(folder)
            self._seen = self.path.lstat().st_ino
        except OSError as error:
            msg = f"models cannot be kept in {folder}: {error.strerror}; name another folder with --repository-folder"
            raise ConfigError(msg) from error
        self._cache: Cache[Path] = Cache(
            f"the disk below {self.path}", self._remove, max_count=max_count, max_bytes=max_bytes, may_exceed=may_exceed
        )
        self._adopt(is_ours=is_ours)

    def take(self, revision: Revision, instead_of: Collection[Revision] = ()) -> Lease[Path]:
        """Return the folder of a revision, which is copied if it is not there; it stays until the lease is given back.

        Some clean folders of caches, so that what was copied is looked at, unless somebody uses it.

        Args:
            instead_of: Revisions in use that leave once this one is loaded; they do not take its room.

        Raises:
            ForebayError: If it cannot be copied, or there is no room.
        """
        self._require_place()
        hashes = self._unread.pop(revision.id, None)
        if hashes is not None:
            self._cache.check(revision.id, lambda folder: caught(_hashes, folder, revision)[0] == hashes)
        self._cache.check(revision.id, lambda folder: _has_all(folder, revision))
        beside = [one.id for one in instead_of]
        return self._cache.take(revision.id, revision.size, lambda: self._fetch(revision), beside=beside)

    def progress(self, revision: Revision) -> Progress | None:
        """Return how far a revision has come; None if it is not being copied."""
        return self._coming.get(revision.id)

    def has(self, revision: Revision) -> bool:
        """Tell whether a revision is here."""
        return revision.id in self._cache

    def keep_only(self, revisions: Collection[Revision]) -> None:
        """Let all others leave as soon as nobody uses them."""
        self._cache.keep_only({revision.id for revision in revisions})

    def statistics(self) -> ShelfStatistics:
        """Return a snapshot."""
        return self._cache.statistics()

    def close(self) -> None:
        """Copy nothing more, and let the next server have the place."""
        self._end.set()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _fetch(self, revision: Revision) -> Path:
        self._coming[revision.id] = progress = Progress(revision.size)
        try:
            self._make_place()
            with tempfile.TemporaryDirectory(prefix=_COMING, dir=self.path, ignore_cleanup_errors=True) as made:
                coming = Path(made)
                folder = coming / revision.model / revision.version
                folder.mkdir(parents=True)
                fetch(self._source, revision, folder, progress, self._end)
                (coming / _LIST).write_bytes(msgspec.json.encode(_Kept(revision, _hashes(folder, revision))))
                _sync(coming)
                named = self.path / f"{revision.id}-{coming.name.removeprefix(_COMING)}"
                coming.rename(named)
            _sync_one(self.path)
            self.copied_bytes += revision.size  # a figure: two that end at the same time may count as one
        except OSError as error:
            msg = f"version '{revision.version}' of '{revision.model}' cannot be written to {self.path}"
            raise Unavailable(f"{msg}: {error.strerror}") from error
        finally:
            del self._coming[revision.id]
        return named / revision.model / revision.version

    def _make_place(self) -> None:
        """Make the folder anew if it was removed."""
        if not self.path.exists():
            own_folder.make(self.path)
            own_folder.close_to_others(self.path)
            self._seen = self.path.lstat().st_ino

    def _require_place(self) -> None:
        """Refuse a folder that was put in the place of ours, by an `Unavailable`."""
        with contextlib.suppress(FileNotFoundError):
            about = self.path.lstat()
            if about.st_ino != self._seen or about.st_uid != os.geteuid():
                raise Unavailable(f"{self.path} is another folder than the one that this server keeps its models in")

    def _remove(self, folder: Path) -> None:
        """Remove what has left: first its name, so that half of it is never taken for the whole."""
        whole = folder.parent.parent
        leaving = whole.with_name(_LEAVING + whole.name)
        with contextlib.suppress(OSError):
            whole.rename(leaving)
        shutil.rmtree(leaving, ignore_errors=True)

    def _adopt(self, *, is_ours: bool) -> None:
        """Keep what is whole if nobody else can have put it there, as `is_ours` says, and remove the rest."""
        found: list[tuple[float, _Kept, Path]] = []
        for entry in list(self.path.iterdir()):
            if entry.is_symlink():
                entry.unlink(missing_ok=True)
                continue
            if not entry.is_dir():
                continue
            kept, problem = caught(_whole, entry) if is_ours else (None, None)
            if problem is not None or kept is None:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                found.append(((entry / _LIST).stat().st_mtime, kept, entry))
        for _, kept, entry in sorted(found, key=lambda one: one[0]):
            revision = kept.revision
            if revision.id in self._cache:
                shutil.rmtree(entry, ignore_errors=True)
            else:
                self._unread[revision.id] = kept.hashes
                self._cache.put(revision.id, revision.size, entry / revision.model / revision.version)
        self._cache.trim()


def disk_for(
    source: ModelSource, folder: Path | None, max_count: int | None = None, max_bytes: int | None = None
) -> DiskCache | None:
    """Return where revisions of a source are copied to; None where its files are used in their place.

    Args:
        folder: The folder of all sources, each of which has one below it; None is the usual one.
        max_count: Revisions that are kept of the source.
        max_bytes: How large they may be together.

    Raises:
        ConfigError: If nothing can be written there.
    """
    if source.folder() is not None:
        return None
    return DiskCache(source, (folder or _usual_folder()) / _called(source.place), max_count, max_bytes)


def _usual_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "forebay" / "models"


def _called(place: str) -> str:
    """Return the name of the folder of a source: another one for each."""
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', place)[-80:].strip('-')}-{zlib.crc32(place.encode()):08x}"


def _whole(folder: Path) -> _Kept | None:
    """Return the revision in a folder if all of it is there, and nothing else."""
    if folder.name.startswith((_COMING, _LEAVING)):
        return None
    kept = msgspec.json.decode((folder / _LIST).read_bytes(), type=known(_Kept))
    revision = kept.revision
    if misplaced(revision) or not folder.name.startswith(f"{revision.id}-") or len(kept.hashes) != len(revision.files):
        return None
    expected = {f"{revision.model}/{revision.version}/{file.path}" for file in revision.files}
    return (
        kept if set(_files_in(folder)) == {_LIST, *expected} and _has_all(_inner(folder, revision), revision) else None
    )


def _inner(folder: Path, revision: Revision) -> Path:
    return folder / revision.model / revision.version


def _files_in(folder: Path) -> Iterator[str]:
    """Iterate over the paths of all that lies in a folder and those below, but for folders."""
    for at, folders, files in os.walk(folder):
        for name in (*files, *(one for one in folders if (Path(at) / one).is_symlink())):
            yield (Path(at) / name).relative_to(folder).as_posix()


def _has_all(folder: Path, revision: Revision) -> bool:
    """Tell whether all files of a revision are in a folder, as large as they are, and are not links."""
    try:
        seen = [((folder / file.path).lstat(), file.size) for file in revision.files]
    except OSError:
        return False
    return all(stat.S_ISREG(about.st_mode) and about.st_size == size for about, size in seen)


def _hashes(folder: Path, revision: Revision) -> tuple[str, ...]:
    """Return the hashes of all files of a revision."""
    found: list[str] = []
    for file in revision.files:
        with (folder / file.path).open("rb") as opened:
            found.append(hashlib.file_digest(opened, _HASH).hexdigest())
    return tuple(found)


def _place(folder: Path) -> tuple[Path, int | None, bool]:
    """Take the first place that no other server has; returns it, its lock, and whether what it holds is ours.

    Raises:
        OSError: If nothing can be written there.
    """
    own_folder.make(folder)
    own_folder.warn_of_others(folder)
    problem: OSError | None = None
    for number in range(MAX_SERVERS):
        place = folder / str(number)
        try:
            own_folder.make(place)
            is_ours = not own_folder.close_to_others(place)
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.ENOTDIR}:
                raise
            problem = problem or error  # somebody else has made it, and perhaps not the next one
            continue
        descriptor = os.open(place / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        return place, descriptor, is_ours
    raise problem or OSError(0, f"{MAX_SERVERS} servers keep models there already")


def _sync(folder: Path) -> None:
    """Have a folder and all below it written: names, and the list."""
    with (folder / _LIST).open("rb") as opened:
        os.fsync(opened.fileno())
    for below, _, _ in os.walk(folder):
        _sync_one(Path(below))


def _sync_one(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
