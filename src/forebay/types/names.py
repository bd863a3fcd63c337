# SPDX-License-Identifier: Apache-2.0
"""What endpoints and their versions may be called: both stand in paths, and in files and metrics of other programs."""

from __future__ import annotations

import re
from typing import Final

_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NAME: Final = rf"{_PART}(?:/{_PART})?"
VERSION: Final = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}"
_EXPECTED: Final = "expected letters, digits, '.', '_' and '-', starting with a letter or digit, at most 128 in all"


def endpoint_name(text: str) -> str:
    """Return the name of an endpoint; raises a `ValueError` with what is allowed if it is none."""
    if re.fullmatch(NAME, text) is None:
        raise ValueError(f"{_EXPECTED}, or two such names joined by '/'")
    return text


def undivided_name(text: str) -> str:
    """Return a name that a folder or a node may have; raises a `ValueError` with what is allowed if it is none."""
    if re.fullmatch(_PART, text) is None:
        raise ValueError(_EXPECTED)
    return text


def version_name(text: str) -> str:
    """Return what a version is called; raises a `ValueError` with what is allowed if none may be."""
    if re.fullmatch(VERSION, text) is None:
        raise ValueError(_EXPECTED.replace("'_' and '-'", "'_', '-' and '+'"))
    return text
