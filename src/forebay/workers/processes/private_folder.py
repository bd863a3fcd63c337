# SPDX-License-Identifier: Apache-2.0
"""Private folders of a server that are gone when the server is, however it ends.

Theory of operation. The server holds a lock in its folder, and the kernel gives the lock up with the process. So a
folder without a lock is a dead server's, and the next server removes it. Between making a folder and locking it a
server may be taken for dead; it notices and makes another one. If a folder lives as long as the server, a shell beside
it waits for the server's end and removes the folder at once (`guard`).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

PREFIX: Final = "forebay-"
"""What their names begin with; the id of the process follows."""

_OURS: Final = re.compile(re.escape(PREFIX) + r"\d+-[a-z0-9_]{8}")
_LOCK: Final = "lock"
_GUARD: Final = """
trap '' HUP INT TERM
read -r _
tries=0
until rm -rf -- "$0"; do  # what ends with the server may still be writing
    tries=$((tries + 1))
    [ $tries -lt 50 ] || exit
    sleep 0.1
done
"""
_LAST_S: Final = 5.0


class PrivateFolder:
    """A folder that only this user can enter.

    Attributes:
        path: The folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        """Make it; folders of servers that were killed are removed.

        Args:
            parent: Where; None takes memory if there is a place for it.

        Raises:
            OSError: It cannot be made.
        """
        parent = parent or _memory()
        for other in parent.glob(PREFIX + "*"):
            if _OURS.fullmatch(other.name):
                _remove_if_dead(other)
        self.path, self._lock = _made(parent)
        self._guard: subprocess.Popen[bytes] | None = None

    def guard(self) -> None:
        """Have it removed when this process is killed; where that is not possible, the next server does it."""
        with contextlib.suppress(OSError):
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _GUARD, self.path.absolute()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,  # what kills the whole group of the server spares it
            )

    def remove(self) -> None:
        """Leave nothing behind; the second time nothing happens."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_LAST_S)


def _memory() -> Path:
    memory = Path("/dev/shm")  # noqa: S108 - the folder below it is private
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


def _made(parent: Path) -> tuple[Path, int | None]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
        try:
            return folder, _lock(folder, os.O_CREAT)
        except (BlockingIOError, FileNotFoundError):
            pass  # another server took it for one of the dead, in the moment before it had its lock
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise


def _lock(folder: Path, flags: int) -> int:
    """Take the lock of a folder.

    Raises:
        BlockingIOError: Somebody has it.
        OSError: There is none.
    """
    descriptor = os.open(folder / _LOCK, os.O_RDWR | flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / _LOCK).stat()  # who had it before may have removed the folder
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_if_dead(folder: Path) -> None:
    try:
        if folder.lstat().st_uid != os.geteuid():  # root may enter it
            return
        descriptor = _lock(folder, 0)
    except FileNotFoundError:  # its server ended before it had the lock
        with contextlib.suppress(OSError):
            folder.rmdir()  # nothing but an empty one
        return
    except OSError:  # in use, or not a folder
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
