# SPDX-License-Identifier: Apache-2.0
"""Modules of files that are given by their path: whose code is it that asks just now?

A script pickles what it defines itself as `__main__.Scale`. That name leads nowhere where the script is not what runs,
as in servers and workers, and a pipeline with a step of one's own could not be loaded there. So their `__main__` has
what the file has that is asking.
"""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any, Final

TARGET_PREFIX: Final = "forebay_target"
"""The package of modules that are loaded by their path."""


def asking_file() -> ModuleType | None:
    """Return the module of the file whose code, or what it has called, runs in this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(f"{TARGET_PREFIX}."):
            return sys.modules.get(name)
        frame = frame.f_back
    return None


def stand_in_for_main() -> None:
    """Let the program of this process have what a file calls its own where it was a script."""
    vars(sys.modules["__main__"])["__getattr__"] = _of_the_file


def _of_the_file(name: str) -> Any:
    module = None if name.startswith("__") else asking_file()
    if module is None or name not in vars(module):
        raise AttributeError(f"module '__main__' has no attribute {name!r}")
    return vars(module)[name]
