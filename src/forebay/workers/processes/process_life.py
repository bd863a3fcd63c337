# SPDX-License-Identifier: Apache-2.0
"""When another process began, and a descriptor that tells when it ends; on systems without Linux's means as well.

There a thread waits for the end, or looks for it five times a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

OPEN_FILES: Final = "/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd"
"""The folder of the open files of a process, as it sees them itself."""
_LOOK_S: Final = 0.2
"""Pause between two looks for a process that is not a child of this one."""
_PS: Final = ("/bin/ps", "-o", "stat=,lstart=", "-p")
_ZONE: Final = {"LC_ALL": "C", "TZ": "UTC"}


def open_end(pid: int, wait: Callable[[], object] | None = None) -> int:
    """Return a descriptor that polls as ready once a process has ended; the caller closes it.

    Args:
        pid: The process.
        wait: Returns at its end, for a child of this process; None is for any other one.

    Raises:
        ProcessLookupError: There is no such process.
        OSError: There are too many open files.
    """
    pidfd_open: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    if pidfd_open is not None:
        return pidfd_open(pid)
    if wait is None:
        _require(pid)
    reader, writer = os.pipe()
    threading.Thread(target=_close_at_end, args=(pid, wait, writer), name="forebay-end", daemon=True).start()
    return reader


def _close_at_end(pid: int, wait: Callable[[], object] | None, writer: int) -> None:
    try:
        if wait is not None:
            wait()
            return
        parent = os.getppid()
        while os.getppid() == parent:  # one that has ended keeps its id until its own parent knows
            _require(pid)
            time.sleep(_LOOK_S)
    except ProcessLookupError:
        pass
    finally:
        os.close(writer)


def _require(pid: int) -> None:
    """Check that there is a process; raises a ProcessLookupError if not."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        pass  # another user's


def send_signal(end: int, pid: int, number: int) -> None:
    """Signal a process of which `open_end` gave a descriptor; raises a ProcessLookupError if it has ended."""
    send: Callable[[int, int], None] | None = getattr(signal, "pidfd_send_signal", None)
    if send is not None:
        send(end, number)
    else:
        os.kill(pid, number)


def birth_of(pid: int) -> int | None:
    """Return when a process began, to compare with the same of another time; None if it has ended.

    That is in the kernel's ticks since the boot, or in seconds since 1970 where there is no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None if Path("/proc/self").exists() else _told_birth(pid)
    fields = stat.rpartition(")")[2].split()  # the name before it may hold blanks and brackets
    return None if fields[0] in {"Z", "X"} else int(fields[19])


def _told_birth(pid: int) -> int | None:
    import calendar
    import subprocess

    try:
        told = subprocess.run([*_PS, str(pid)], capture_output=True, text=True, env=_ZONE, check=False).stdout
        state, began = told.split(maxsplit=1)
        return None if state.startswith("Z") else calendar.timegm(time.strptime(began.strip(), "%a %b %d %H:%M:%S %Y"))
    except (OSError, ValueError):
        return None
