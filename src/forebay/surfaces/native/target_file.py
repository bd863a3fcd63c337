# SPDX-License-Identifier: Apache-2.0
"""The file of a target `file.py:Name`, imported; whatever is wrong with it is told with its place."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import ModuleType

from forebay.errors import ConfigError, ForebayError
from forebay.serving.models.model import load_module
from forebay.types.failures import text_of
from forebay.workers.user_code import caught


def split_target(target: str) -> tuple[Path, str | None]:
    """Split `file.py:Name` into the file and the name."""
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        return Path(file), name
    return Path(target), None


def import_file(path: Path) -> ModuleType:
    """Import a file of the user's.

    Raises:
        ConfigError: With the place, whatever goes wrong.
    """
    module, error = caught(load_module, path)
    if error is None:
        return module
    if isinstance(error, ForebayError):
        line = _line(error, path)
        raise ConfigError(f"{path}{line}: {error.message}") if line else error from None
    if isinstance(error, SyntaxError):
        msg = f"{path}:{error.lineno}: {error.msg}{_marked(error)}"
    elif isinstance(error, ModuleNotFoundError):
        msg = f"{path}{_line(error, path)} imports '{error.name}', which is not installed here"
    else:
        msg = f"{path}{_line(error, path)} cannot be imported: {text_of(error)}"
    raise ConfigError(msg) from error


def _line(error: BaseException, path: Path) -> str:
    """Return the last line of the file the error came through, as ':12'."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename) == path.resolve()]
    return f":{lines[-1]}" if lines else ""


def _marked(error: SyntaxError) -> str:
    """Return the line that cannot be read, with a caret below it, as further lines."""
    if not error.text or not error.offset:
        return ""
    line = error.text.rstrip("\n")
    shown = line.lstrip()
    return f"\n    {shown}\n    {' ' * max(error.offset - 1 - len(line) + len(shown), 0)}^"
