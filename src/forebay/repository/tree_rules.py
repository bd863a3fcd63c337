# SPDX-License-Identifier: Apache-2.0
"""How models lie in a folder or a bucket: from a list of files to models and versions. Nothing is read here.

    NAME/VERSION/files     a model whose versions are folders called by whole numbers; the highest is the latest
    NAME/files             a model without versions: it has version 1

So do the repositories of Triton and OVMS; what they hold beside that (`config.pbtxt`, `config.json`) is not read, and
named as such. A place whose own folders are numbers is one model, unless another folder beside them has versions; and
so is one that has files and no folders.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, Literal

import msgspec

from forebay.repository.listing import Catalog, Revision, StoredFile

Holds = Callable[[Collection[str]], str]
"""Returns why files with these paths are not a version of a model; empty if they are."""

NOT_READ: Final = frozenset({"config.pbtxt", "config.json", "graph.pbtxt"})
"""Files in repositories of other servers that tell these servers what to do."""
WHOLE: Final = frozenset({"saved_model.pb", "tokenizer.json"})
"""Files that make one model of the folder they lie in, with all that is below it."""


def any_files(_paths: Collection[str]) -> str:
    """Take any files for a version of a model."""
    return ""


class TreeRules(msgspec.Struct, frozen=True, kw_only=True):
    """How a place is read.

    Attributes:
        kind: Whether the place is one model, holds models, or is whatever it looks like.
        name: What the model is called if it is one.
        is_strict: Whether a model has versions only if nothing else lies beside their folders. Otherwise it is enough
            that there is one such folder, and what else lies there is named as ignored.
        holds: Whether files are a version of a model.
        may_be_called: Why a name is not a name of a model; empty if it is.
    """

    kind: Literal["model", "models", "any"] = "any"
    name: str = "model"
    is_strict: bool = False
    holds: Holds = any_files
    may_be_called: Callable[[str], str] = lambda _name: ""

    def read(self, files: Iterable[StoredFile], kind: Literal["model", "models"] | None = None) -> Catalog:
        """Return the models that these files are.

        Args:
            kind: What the place was taken for before, if something of it is served: a folder more or less must not
                turn several models into versions of one.
        """
        problems: list[str] = []
        files = [file for file in files if file.path]
        if any(not file.size for file in files):  # some programs make an empty object where a folder is
            within = {file.path[:at] for file in files for at, letter in enumerate(file.path) if letter == "/"}
            files = [file for file in files if file.size or file.path not in within]
        loose, folders = _by_folder(files, problems)
        taken_for = kind or self.kind
        is_one = taken_for == "model"
        if taken_for == "any":
            is_whole = any(file.path in WHOLE for file in loose)
            is_one = is_whole or self._has_only_versions(folders) or (bool(loose) and not folders)
        models: dict[str, dict[int, Revision]] = {}
        if is_one:
            self._add(models, problems, self.name, "", loose, folders)
        else:
            problems += [_ignored(file.path) for file in loose]
            for name, below in folders.items():
                inner, inner_folders = _by_folder(below, problems, name)
                if wrong := self.may_be_called(name):
                    problems.append(f"{name}/ cannot be the name of a model: {wrong}")
                else:
                    self._add(models, problems, name, name, inner, inner_folders)
        return Catalog(models, problems, ("model" if is_one else "models") if models else None)

    def _has_only_versions(self, folders: Mapping[str, Sequence[StoredFile]]) -> bool:
        """Tell whether there are versions and no folder beside them that has versions of its own."""
        others = [name for name in folders if not _is_number(name)]
        return len(others) < len(folders) and not any(
            self._is_version(inside) for other in others for inside in _by_folder(folders[other], [])[1].items()
        )

    def _is_version(self, folder: tuple[str, Sequence[StoredFile]]) -> bool:
        name, files = folder
        return _is_number(name) and not self.holds([file.path for file in files])

    def _add(
        self,
        models: dict[str, dict[int, Revision]],
        problems: list[str],
        name: str,
        place: str,
        loose: Sequence[StoredFile],
        folders: dict[str, list[StoredFile]],
    ) -> None:
        """Add a model, if there is one, and say what of it is none."""
        numbers = sorted(filter(_is_number, folders), key=lambda one: (int(one), len(one)))
        others = [folder for folder in folders if not _is_number(folder)]
        if not numbers or (self.is_strict and (loose or others)):
            below = [
                file._replace(path=f"{folder}/{file.path}") for folder, inside in folders.items() for file in inside
            ]
            everything = sorted([*loose, *below])
            if everything:
                self._add_revision(models, problems, Revision(name, "1", place, tuple(everything)))
            return
        problems += [_ignored(posixpath.join(place, file.path)) for file in loose]
        problems += [
            f"{posixpath.join(place, other[:100])}/ is ignored: versions are called by whole numbers"
            + (f" of up to {MAX_DIGITS} digits" if other.isdigit() else "")
            for other in others
        ]
        for version in numbers:
            at = posixpath.join(place, version)
            before = models.get(name, {}).get(int(version))
            if before is not None:
                problems.append(f"{at}/ is ignored: {before.place}/ is the same version")
            else:
                self._add_revision(models, problems, Revision(name, version, at, tuple(sorted(folders[version]))))

    def _add_revision(self, models: dict[str, dict[int, Revision]], problems: list[str], revision: Revision) -> None:
        if wrong := misplaced(revision) or self.holds([file.path for file in revision.files]):
            problems.append(f"{revision.place or '.'}/ is not a version of a model: {wrong}")
        else:
            models.setdefault(revision.model, {})[revision.number] = revision


def number_of(version: str) -> int | None:
    """Return the number that a text means as a version; None if it is none."""
    is_number = version.isascii() and version.isdigit() and len(version) <= MAX_DIGITS
    return int(version) if is_number else None


MAX_DIGITS: Final = 64
"""Digits of a version: Python reads no more than 4,300, and takes its time for as many."""


def _is_number(name: str) -> bool:
    return number_of(name) is not None


def _by_folder(
    files: Iterable[StoredFile], problems: list[str], below: str = ""
) -> tuple[list[StoredFile], dict[str, list[StoredFile]]]:
    """Divide files into those at the top and those in each folder; hidden ones are none."""
    loose: dict[str, StoredFile] = {}
    folders: dict[str, list[StoredFile]] = {}
    for file in files:
        first, slash, rest = file.path.partition("/")
        if first.startswith("."):
            continue
        if not first.isprintable() or (slash and not rest):
            problems.append(f"{posixpath.join(below, file.path)!r} is ignored: expected a printable name of a file")
        elif slash:
            folders.setdefault(first, []).append(file._replace(path=rest))
        else:
            loose[first] = file
    return list(loose.values()), folders


def misplaced(revision: Revision) -> str:
    """Return what keeps the files from lying in a folder of model and version; empty if nothing does."""
    folders = {posixpath.dirname(file.path) for file in revision.files}
    if not _is_number(revision.version):
        return f"expected a whole number as the version, got {revision.version!r}"
    if not revision.model.isprintable() or revision.model[:1] in {"", "."} or "/" in revision.model:
        return f"expected the name of a folder, got {revision.model!r}"
    for file in revision.files:
        if not file.path.isprintable() or any(part in {"", ".", ".."} for part in file.path.split("/")):
            return f"expected the path of a file below it, got {file.path!r}"
        if file.path in folders:
            return f"{file.path!r} is a file, and others lie in it as in a folder"
    return ""


def _ignored(path: str) -> str:
    if posixpath.basename(path) in NOT_READ:
        return f"{path} is not read: it is the configuration of another server"
    return f"{path} is ignored: no model is a file beside folders"
