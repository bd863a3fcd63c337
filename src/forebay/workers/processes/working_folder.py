# SPDX-License-Identifier: Apache-2.0
"""The folder this process works in, by its name: who deploys anew may put another folder in its place.

A process stays in the folder it began in, also where that was renamed or removed, and finds nothing new in it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_noted: tuple[Path, os.stat_result] | None = None


def successor() -> Path | None:
    """Return the path of the folder that has the working folder's name by now, if it is another one.

    The name is the one that it had at the first call.
    """
    global _noted  # noqa: PLW0603 - a process works in one folder
    here = os.stat(".")  # noqa: PTH116 - it has no path where it was removed
    if _noted is not None and os.path.samestat(_noted[1], here):
        path = _noted[0]
        with contextlib.suppress(OSError):
            return None if os.path.samestat(path.stat(), here) else path
        return None
    with contextlib.suppress(FileNotFoundError):
        _noted = Path.cwd(), here
    return None
