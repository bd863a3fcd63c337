# SPDX-License-Identifier: Apache-2.0
"""Puts the file and the line before what is wrong in a class, where its text can be had."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from forebay.types.user_exceptions import caught


def with_place(cls: type[Any], message: str) -> str:
    """Return a message that begins with a class, or one of its attributes, after the place where that is written."""
    found = re.match(rf"{re.escape(cls.__qualname__)}\.(\w+)", message)
    place, _ = caught(_place, cls, found[1] if found else None)  # made at run time, or its file is gone
    return f"{place}: {message}" if place else message


def shown_path(path: Path) -> str:
    """Return a path as a person in the working folder writes it."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it was removed
        return str(path)
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _place(cls: type[Any], name: str | None) -> str:
    # What the class leaves to us is none of our file's fault.
    owners = [one for one in cls.__mro__ if one.__module__.partition(".")[0] != "forebay"]
    owner = next((one for one in owners if name in vars(one)), cls)
    lines, first = inspect.getsourcelines(owner)
    statement = ast.parse(textwrap.dedent("".join(lines))).body[0]
    line = statement.lineno
    for one in getattr(statement, "body", []):
        targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
        if name is not None and (
            getattr(one, "name", None) == name or name in {getattr(t, "id", None) for t in targets}
        ):
            line = one.lineno
    return f"{shown_path(Path(inspect.getfile(owner)))}:{first + line - 1}"
