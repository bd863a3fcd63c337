# SPDX-License-Identifier: Apache-2.0
"""Room of a file that is taken before anything is written: a full disk, or memory that is used up, fails here."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable


def take_room(descriptor: int, offset: int, size: int) -> None:
    """Take room for a part of a file.

    Raises:
        OSError: There is none; `EOPNOTSUPP` if the file system, or this system, cannot promise any.
    """
    allocate: Callable[[int, int, int], None] | None = getattr(os, "posix_fallocate", None)
    if allocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    allocate(descriptor, offset, size)
