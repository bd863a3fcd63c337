# SPDX-License-Identifier: Apache-2.0
"""The files of a project, as they travel to the nodes of a cluster."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

import msgspec

from forebay.errors import ConfigError, InvalidRequest
from forebay.types.first_use import known

MAX_BYTES: Final = 256 * 1024 * 1024
MAX_FILES: Final = 10_000
_SKIPPED: Final = frozenset({"__pycache__", "node_modules"})


class ProjectFile(msgspec.Struct, frozen=True, array_like=True):
    """A file.

    Attributes:
        path: Where it is in the project.
        is_program: Whether it can be executed.
        data: What it holds.
    """

    path: str
    is_program: bool
    data: bytes


def pack(folder: Path | None) -> tuple[str, bytes]:
    """Return a digest of the files of a folder, if there is one, and the files; equal files have an equal digest.

    Hidden files, caches and virtual environments are left out.

    Raises:
        ConfigError: There are too many, or a file cannot be read.
    """
    files: list[ProjectFile] = []
    if folder is None:
        return _packed(files)
    size = 0
    for path in _paths(folder):
        try:
            size += path.stat().st_size
            if size > MAX_BYTES or len(files) == MAX_FILES:
                raise ConfigError(
                    f"{folder} has more than {MAX_FILES} files or {MAX_BYTES >> 20} MiB, and all of it is copied to "
                    "each node; put the project into a folder of its own, and models into a repository"
                )
            data = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
        files.append(ProjectFile(path.relative_to(folder).as_posix(), os.access(path, os.X_OK), data))
    return _packed(files)


def _packed(files: list[ProjectFile]) -> tuple[str, bytes]:
    packed = msgspec.msgpack.encode(files)
    return hashlib.sha256(packed).hexdigest()[:32], packed


def unpack(packed: bytes, digest: str, place: Path) -> None:
    """Write files to `place / digest`, all or none of them; nothing happens if they are there.

    Raises:
        InvalidRequest: They are not what the digest says.
        OSError: They cannot be written.
    """
    if (place / digest).is_dir():
        return
    if hashlib.sha256(packed).hexdigest()[:32] != digest:
        raise InvalidRequest("the files of the project are not those that the deployment names")
    files = msgspec.msgpack.decode(packed, type=known(list[ProjectFile]))
    before = place / f".{digest}-{secrets.token_hex(4)}"
    try:
        for file in files:
            relative = PurePosixPath(file.path)
            if relative.is_absolute() or ".." in relative.parts:
                raise InvalidRequest(f"the file {file.path!r} is outside of the project")
            path = before / relative
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.data)
            path.chmod(0o700 if file.is_program else 0o600)
        before.mkdir(exist_ok=True)
        before.rename(place / digest)
    finally:
        shutil.rmtree(before, ignore_errors=True)


def _paths(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder):
        folders[:] = sorted(
            one
            for one in folders
            if not one.startswith(".") and one not in _SKIPPED and not Path(here, one, "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            path = Path(here, name)
            if not name.startswith(".") and path.is_file():
                yield path
