# SPDX-License-Identifier: Apache-2.0
"""Colors for a person at a terminal: errors are red, hints dim and addresses underlined."""

from __future__ import annotations

import os
import re
from typing import Any, Final

_ADDRESS: Final = re.compile(r"https?://[^\s'\"<>]*[^\s'\"<>.,;:?!)]")
_HINT: Final = re.compile(r"; (?:did you mean|see) [^;\n]*\Z")


def has_colors(stream: Any) -> bool:
    """Return whether a stream shows colors: a terminal does, unless NO_COLOR or TERM=dumb forbids it."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    try:
        return os.environ.get("TERM") != "dumb" and stream.isatty()
    except (AttributeError, ValueError):  # somebody's stand-in, or closed
        return False


def red(text: str) -> str:
    """Return a text in red."""
    return f"\x1b[31m{text}\x1b[39m"


def colored(line: str, *, is_error: bool) -> str:
    """Return a message with its colors; a traceback below it has none."""
    first, end, rest = line.partition("\n")
    found = _HINT.search(first)
    hint = "" if found is None else f"\x1b[2m{found[0]}\x1b[22m"
    said = first if found is None else first[: found.start()]
    said = red(said) if is_error else said
    return _ADDRESS.sub("\x1b[4m\\g<0>\x1b[24m", said + hint) + end + rest
