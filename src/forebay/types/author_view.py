# SPDX-License-Identifier: Apache-2.0
"""A failure of a model as its author wants to see it: what was raised, and the frames of the author's own files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from forebay.errors import InternalError, UserCodeError

_FRAME: Final = re.compile(r'^  File "([^"\n]+)", line (\d+), in (.+)$', re.MULTILINE)
_OURS: Final = str(Path(__file__).parents[1])
_FOREIGN: Final = ("/site-packages/", "/dist-packages/", "/lib/python3")
_MOST: Final = 8
"""Frames that are shown: the innermost."""


def own_frames(trace: str) -> list[str]:
    """Return the places of a traceback in the author's files, the outermost first: `model.py:7 in predict`."""
    found = [
        f"{file}:{line} in {function}"
        for file, line, function in _FRAME.findall(trace)
        if not file.startswith((_OURS, "<")) and not any(part in file for part in _FOREIGN)
    ]
    return found[-_MOST:]


def for_author(error: UserCodeError) -> InternalError:
    """Return the error that tells a client what the author's code raised, and where."""
    frames = own_frames(error.trace)  # of an error that another server tells there are none
    return InternalError(f"the model failed: {error.message}", detail={"frames": frames} if frames else None)
