# SPDX-License-Identifier: Apache-2.0
"""Files in memory that have no name: one process makes them, others open them as files of that process.

They are sealed: whoever has mapped a part of one may read it whatever the other side does. As they have no name,
nothing is left of them, however either side ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys


def make_file(name: str) -> int:
    """Make a file in memory that nobody can cut; its name is only shown by tools.

    Raises:
        OSError: If there are too many open files, or this system has no such memory.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    return descriptor


def open_file(told: tuple[str, int], flags: int) -> int:
    """Open what another process has open; in another container the same path may be anything, or closed by now.

    Raises:
        OSError: If that is so.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    path, inode = told
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        if not sealed or os.fstat(descriptor).st_ino != inode:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
