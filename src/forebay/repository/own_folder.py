# SPDX-License-Identifier: Apache-2.0
"""Folders that only this user can write to: what lies in them was not put there by anybody else."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from pathlib import Path
from typing import Final

log = logging.getLogger("forebay.repository")

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


def make(folder: Path) -> None:
    """Make a folder, and those above it that are not there, so that only this user can write to them.

    Raises:
        OSError: If that cannot be done.
    """
    with contextlib.suppress(FileExistsError):
        if not folder.parent.exists():
            make(folder.parent)
        folder.mkdir(mode=0o700)


def close_to_others(folder: Path) -> bool:
    """Have nobody else write to a folder; returns whether others could so far.

    Raises:
        OSError: If it is not a folder, belongs to another user, or cannot be closed.
    """
    about = folder.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise OSError(errno.ENOTDIR, "expected a folder, got a link or a file", str(folder))
    if about.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user ({about.st_uid})", str(folder))
    if not about.st_mode & _OTHERS:
        return False
    folder.chmod(stat.S_IMODE(about.st_mode) & ~_OTHERS)
    if (mode := folder.lstat().st_mode) & _OTHERS:
        raise OSError(errno.EPERM, f"others can write to it ({stat.S_IMODE(mode):04o})", str(folder))
    return True


def warn_of_others(folder: Path) -> None:
    """Warn if others may put another folder in the place of one that lies in this one.

    Raises:
        OSError: If it is not there.
    """
    about = folder.stat()
    is_foreign = about.st_uid not in {0, os.geteuid()}
    if is_foreign or (about.st_mode & stat.S_IWOTH and not about.st_mode & stat.S_ISVTX):
        log.warning(
            "other users of this machine can replace the files in %s, models included; "
            "keep models in a folder that belongs to the server",
            folder,
        )
