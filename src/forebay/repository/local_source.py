# SPDX-License-Identifier: Apache-2.0
"""A folder of this machine as a source; symbolic links are followed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final

from forebay.repository.listing import StoredFile
from forebay.repository.source import SourceChanged, SourceFailed
from forebay.runtimes.onnx_file import files_beside
from forebay.runtimes.saved_model import folder_of

MAX_DEPTH: Final = 32
"""Folders in folders that are looked into."""
MAX_FILES: Final = 1_000_000


class LocalFolder:
    """A folder; see `forebay.repository.source.ModelSource`."""

    def __init__(self, path: Path, max_files: int = MAX_FILES) -> None:
        """Name it; it may come into being later."""
        self.place = str(path)
        self.problems: Sequence[str] = ()
        self._path = path.absolute()
        self._max_files = max_files
        self._was: tuple[int, int] | None = None
        self._listed: Sequence[StoredFile] = ()

    def list(self) -> list[StoredFile]:
        """Return all files, but for hidden folders and files; of what cannot be looked at, those that were there last.

        Raises:
            SourceFailed: If it cannot be read, or was there and is gone, as when a disk is unmounted.
        """
        found: list[StoredFile] = []
        closed: dict[str, str] = {}
        try:
            inode = _inode(self._path.stat())
            self._walk(str(self._path), "", found, closed, MAX_DEPTH, {inode})
        except FileNotFoundError as error:
            if self._was or os.path.lexists(self._path):
                raise SourceFailed(f"{error.filename} cannot be looked at: {error.strerror}") from error
            return []
        except OSError as error:
            raise SourceFailed(f"{error.filename} cannot be looked at: {error.strerror}") from error
        if (
            self._listed and not found and not closed and inode != self._was
        ):  # where a disk was mounted lies an empty folder
            raise SourceFailed(f"{self._path} is empty, and another folder than the one that had models")
        self._was = inode
        below = tuple(f"{path}/" for path in closed)
        files = {file.path: file for file in self._listed if f"{file.path}/".startswith(below)}
        files.update((file.path, file) for file in found)
        self._listed = listed = [*files.values()]
        self.problems = [f"{path} cannot be looked at: {reason}" for path, reason in closed.items()]
        return listed

    def has(self, path: str) -> bool:
        """Return False: what the system has not listed is not there."""
        return False

    def read(self, path: str, file: StoredFile, start: int, end: int) -> bytes:
        """Return a part of a file.

        Raises:
            SourceChanged: If the file is another one by now.
            SourceFailed: If it cannot be read.
        """
        try:
            with (self._path / path).open("rb", buffering=0) as opened:
                data = os.pread(opened.fileno(), end - start, start)
                about = os.fstat(opened.fileno())
        except FileNotFoundError as error:
            raise SourceChanged(f"{self._path / path} is gone") from error
        except OSError as error:
            raise SourceFailed(f"{self._path / path} cannot be read: {error.strerror}") from error
        if len(data) != end - start or (about.st_size, _tag(about)) != (file.size, file.tag):
            raise SourceChanged(f"{self._path / path} has changed while it was read")
        return data

    def folder(self) -> Path:
        """Return the folder."""
        return self._path

    def files_of(self, place: str, depth: int = MAX_DEPTH) -> list[StoredFile] | None:
        """Return what of a part of the folder can be looked at now; None if it cannot be itself."""
        found: list[StoredFile] = []
        try:
            folder = self._path / place
            self._walk(str(folder), "", found, {}, depth, {_inode(folder.stat())})
        except OSError:
            return None
        return sorted(found)

    def _walk(
        self,
        folder: str,
        below: str,
        found: list[StoredFile],
        closed: dict[str, str],
        depth: int,
        above: set[tuple[int, int]],
    ) -> None:
        """Add the files of a folder, and what in it cannot be looked at, with the reason.

        A folder that it lies in, itself included, is not entered again: two links that lead back would have no end.
        """
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if len(found) >= self._max_files:
                    msg = (
                        f"expected at most {self._max_files} files (--repository-max-files), and {self._path} has more"
                    )
                    raise SourceFailed(msg)
                path = below + entry.name
                try:
                    about = entry.stat()
                    if entry.is_file():
                        found.append(StoredFile(path, about.st_size, _tag(about), about.st_mtime))
                    elif entry.is_dir() and depth and (inode := _inode(about)) not in above:
                        self._walk(entry.path, f"{path}/", found, closed, depth - 1, {*above, inode})
                except FileNotFoundError:
                    continue  # it has gone meanwhile, or is a link that leads nowhere
                except OSError as error:
                    closed[path] = error.strerror or str(error)


def _inode(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def files_of_model(path: Path, beside: Collection[str] = ()) -> tuple[StoredFile, ...]:
    """Return what is seen of the folder of a model, or of its file and those that belong to it; nothing if it is gone.

    Args:
        path: The folder or file.
        beside: Other files that belong to any model in their folder.
    """
    path = folder_of(path) or path
    if not path.is_file():
        return tuple(LocalFolder(path).files_of("") or ())
    files = LocalFolder(path.parent).files_of("", depth=0) or ()
    found = {file.path: file for file in files if file.path in beside or _belongs(file.path, path)}
    for name in files_beside(path) if path.suffix == ".onnx" else ():
        with contextlib.suppress(OSError, ValueError):  # it is not there, or that is not a name
            about = (path.parent / name).stat()
            found[name] = StoredFile(name, about.st_size, _tag(about), about.st_mtime)
    return tuple(found.values())


def _belongs(name: str, model: Path) -> bool:
    """Tell whether a file beside a model belongs to it by its name: Paddle's parameters may have any."""
    if model.name == "__model__":
        return True
    return name.startswith(model.stem) or (name.endswith(".pdiparams") and model.suffix in {".pdmodel", ".json"})


def written_at(files: Iterable[StoredFile]) -> str:
    """Return when a file was last changed, for a person."""
    newest_s = max((file.modified_s for file in files), default=None)
    return "unknown time" if newest_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest_s))


def _tag(about: os.stat_result) -> str:
    # Programs may set the time of change back (`cp -p`, `touch -r`), but not that of the last change to the inode.
    return f"{about.st_mtime_ns}-{about.st_ctime_ns}-{about.st_ino}"
