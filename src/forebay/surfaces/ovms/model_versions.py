# SPDX-License-Identifier: Apache-2.0
"""Versions of models that a configuration names: which files they are, in a folder here or in a bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from forebay.errors import ForebayError
from forebay.repository.bucket_listing import ListingLimits
from forebay.repository.cache import Lease
from forebay.repository.disk import disk_for
from forebay.repository.listing import Revision, StoredFile
from forebay.repository.local_source import LocalFolder, files_of_model
from forebay.repository.repository import FIRST_S, Repository
from forebay.repository.repository_address import source_of
from forebay.repository.tree_rules import TreeRules, number_of
from forebay.runtimes.library import OpenVinoOptions
from forebay.runtimes.saved_model import FILE as SAVED_MODEL
from forebay.server.config import RepositoryConfig

MODEL_FILES: Final = (".xml", ".onnx", ".pdmodel", ".pb", ".tflite")
"""What OpenVINO reads itself; of several in one folder the first of these kinds."""
_SHOWN: Final = 3
"""What of a bucket is told that is not a version."""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model that is to be served.

    Attributes:
        path: Its file, or the folder of a SavedModel; below the folder of the version if that is in a bucket.
        device: What it runs on, as forebay writes it; empty for the processor.
        options: What OpenVINO is told of it.
        address: The bucket that it is in.
        revision: Its files there.
    """

    name: str
    version: str
    path: Path
    device: str = ""
    options: OpenVinoOptions = OpenVinoOptions()
    address: str = ""
    revision: Revision | None = None

    @property
    def folder(self) -> Path:
        """Where the files of its model lie."""
        return self.path.parent if _is_model(self.path.name) else self.path

    def holds(self, file: Path) -> bool:
        """Tell whether a file is, or was, one of its model: weights in the folder of a version may have any name."""
        if self._is_alone:
            by_name = file.parent == self.folder and file.name.startswith(self.path.stem)
            return by_name or file in {self.folder / one.path for one in self.look()}
        return file.is_relative_to(self.folder)

    def look(self) -> tuple[StoredFile, ...]:
        """Return what is seen of its model on this machine."""
        if self.revision is not None:
            return ()
        return files_of_model(self.path) if self._is_alone else tuple(LocalFolder(self.folder).files_of("") or ())

    @property
    def _is_alone(self) -> bool:
        """Whether it is a file that was named, among others that are none of it."""
        name = self.folder.name
        return self.folder != self.path and not (name.isdecimal() and int(name) == int(self.version))

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        if self.revision is None:
            return str(self.path)
        return "/".join(part for part in (self.address, self.revision.place, self.path.as_posix()) if part != ".")


def versions_in(base: Path) -> dict[str, Path]:
    """Return the model of each version, in rising order; a path of one file is its version 1.

    Of two folders that are the same number, as `1` and `01`, it is in the one with the shorter name.
    """
    if base.is_file():
        return {"1": base.parent / model_among([base.name])} if base.suffix in MODEL_FILES else {}
    try:
        folders = [one for one in base.iterdir() if number_of(one.name)]
    except OSError:
        return {}
    found: dict[str, Path] = {}
    for folder in sorted(folders, key=lambda one: (int(one.name), len(one.name))):
        files: list[str] = []
        with contextlib.suppress(OSError):  # it may be gone by now
            files = [one.name for one in folder.iterdir()] if folder.is_dir() else []
        if any(map(_is_model, files)):
            found.setdefault(str(int(folder.name)), folder / model_among(files))
    return found


def model_among(files: Iterable[str]) -> Path:
    """Return what OpenVINO is to read of a folder with these files: one, or the folder, as TensorFlow's models are."""
    first = min(filter(_is_model, files), key=lambda one: (MODEL_FILES.index(Path(one).suffix), one))
    return Path() if first == SAVED_MODEL else Path(first)


class StoredModels:
    """The places that a configuration names; buckets are looked at from time to time, with copies of what is used."""

    def __init__(self, config: RepositoryConfig | None = None) -> None:
        """Say how often they are looked at, and where copies are kept and how many."""
        self._config = config or RepositoryConfig()
        self._repositories: dict[tuple[str, str], Repository] = {}
        self._here: dict[Path, Mapping[str, Path]] = {}
        self._in_use: dict[tuple[str, str], list[Revision]] = {}
        self._on_change: Callable[[], None] | None = None

    def versions(self, name: str, address: str) -> tuple[Mapping[int, Revision], str]:
        """Return which versions of a model are in a bucket, and what is wrong there; looks only the first time.

        Raises:
            ConfigError: If it is not an address, what reads such is not installed, or nothing can be kept here.
        """
        repository = self._repositories.get((name, address))
        if repository is None:
            repository = self._repositories[name, address] = self._opened(name, address)
        catalog = repository.catalog
        found = {number: one for number, one in catalog.models.get(name, {}).items() if number}
        if repository.problem or found:
            return found, repository.problem
        more = "".join(f"; {problem}" for problem in catalog.problems[:_SHOWN])
        return found, f"{address} has no folder with a number and a model in it{more}"

    def versions_here(self, base: Path) -> tuple[Mapping[str, Path], str]:
        """Return which versions are in a folder on this machine, and what is wrong there.

        Where the folder is gone or closed, as when a disk is not mounted, its versions are those that it had.
        """
        before = self._here.get(base)
        try:
            if before and not base.is_file():
                os.scandir(base).close()
        except OSError as error:
            return before or {}, f"{base} cannot be looked at: {error.strerror}; its versions stay"
        found = self._here[base] = versions_in(base)
        return found, "" if found else f"{base} has no folder with a number and a model in it"

    def has(self, entry: ModelEntry) -> bool:
        """Tell whether the files of a version are on this machine."""
        repository = self._repositories.get((entry.name, entry.address))
        return entry.revision is None or repository is None or repository.is_here(entry.revision)

    def fetch(self, entry: ModelEntry, wanted: Iterable[ModelEntry] = ()) -> Lease[ModelEntry]:
        """Return a version whose files are on this machine, and stay there until it is given back; may block.

        Args:
            wanted: All versions that the configuration names; those in use that it does not name take no room.

        Raises:
            ForebayError: If it cannot be copied, or there is no room for it.
        """
        revision = entry.revision
        if revision is None:
            return Lease(entry, lambda: None)
        named = [one.revision.id for one in wanted if one.revision is not None]
        in_use = self._in_use.setdefault((entry.name, entry.address), [])
        leaving = [one for one in in_use if named and one.id not in named]
        folder = self._repositories[entry.name, entry.address].fetch(revision, leaving)
        in_use.append(revision)

        def release() -> None:
            in_use.remove(revision)
            folder.release()

        return Lease(msgspec.structs.replace(entry, path=folder.value / entry.path, address="", revision=None), release)

    def look(self) -> None:
        """Look at all of them now; blocks."""
        for repository in list(self._repositories.values()):
            with contextlib.suppress(ForebayError):  # it is told as the problem of its models
                repository.open()

    def watch(self, on_change: Callable[[], None]) -> None:
        """Begin to look from time to time, and call this in some thread when something has changed."""
        self._on_change = on_change
        for repository in self._repositories.values():
            self._begin(repository, on_change)

    def keep_only(self, entries: Collection[tuple[str, str]]) -> None:
        """Look no more at what is not named so: a model and its address."""
        for key in self._repositories.keys() - set(entries):
            self._repositories.pop(key).stop()

    def stop(self) -> None:
        """Look no more, and end what is being copied."""
        for repository in self._repositories.values():
            repository.stop()

    def _opened(self, name: str, address: str) -> Repository:
        config = self._config
        source = source_of(address, Path(), ListingLimits(config.timeout_s, config.max_files))
        rules = TreeRules(kind="model", name=name, holds=_why_no_model)
        disk = disk_for(source, config.folder, config.max_disk_models, config.max_disk_bytes)
        repository = Repository(
            source, rules, poll_s=config.poll_s, timeout_s=config.timeout_s, max_pause_s=config.max_pause_s, disk=disk
        )
        with contextlib.suppress(ForebayError):
            repository.open(FIRST_S)
        if self._on_change is not None:
            self._begin(repository, self._on_change)
        return repository

    @staticmethod
    def _begin(repository: Repository, on_change: Callable[[], None]) -> None:
        repository.watch(on_change)
        repository.start()


def _is_model(file: str) -> bool:
    return Path(file).suffix in MODEL_FILES


def _why_no_model(paths: Collection[str]) -> str:
    """Return why a folder of a bucket with these files is not a version of a model; empty if it is."""
    if any("/" not in path and _is_model(path) for path in paths):
        return ""
    return f"there is no {', '.join(MODEL_FILES)} in it"
