# SPDX-License-Identifier: Apache-2.0
"""The file of a target `file.py:Name`, imported; whatever is wrong with it is told with its place."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Final

from forebay.errors import ConfigError, ForebayError
from forebay.serving.models.class_places import shown_path
from forebay.serving.models.model import load_module
from forebay.types.failures import text_of
from forebay.types.served_file import TARGET_PREFIX
from forebay.workers.user_calls.user_code import caught

_INSTALLED: Final = frozenset({"site-packages", "dist-packages", "forebay"})
"""Folders of whose files nobody is told who wrote a model."""


def split_target(target: str) -> tuple[Path, str | None]:
    """Split `file.py:Name` into the file and the name; raises ConfigError if one of them is empty."""
    if not target:
        raise ConfigError("TARGET: expected a Python file, got ''")
    file, colon, name = target.rpartition(":")
    if colon and file.endswith(".py"):
        if not name:
            raise ConfigError(f"no name follows the colon of '{target}'; {file} alone means all that is in it")
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
    place = _place(error, path)
    if isinstance(error, ForebayError):
        raise ConfigError(f"{place}: {error.message}") if place != str(path) else error from None
    if isinstance(error, SyntaxError):
        msg = f"{_shown(Path(error.filename or path), path)}:{error.lineno or 1}: {error.msg}{_marked(error)}"
    elif isinstance(error, ImportError) and f"{error.name}.".startswith(f"{TARGET_PREFIX}."):
        msg = (
            f"{place} imports by a name that begins with a dot, and its folder is not a package; remove the dot, or "
            "put an __init__.py into the folder"
        )
    elif isinstance(error, ModuleNotFoundError):
        msg = f"{place} imports '{error.name}', which is not installed here"
    else:
        msg = f"{place} cannot be imported: {text_of(error)}"
    raise ConfigError(msg) from error


def root_of(module_name: str) -> list[str]:
    """Return the folder from which a program has imported a module: for `app.models` the one that has `app` in it.

    A worker imports the file by its path, which leads no further up than packages do. There is none for a module that
    is not called as its file is: a script, and what was imported by its path.
    """
    module = sys.modules.get(module_name)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    if not file:
        return []
    name = spec.name if spec is not None else module_name  # that of `python -m app.main` is not __main__
    folders = Path(file).absolute()
    if folders.name == "__init__.py":
        folders = folders.parent
    for part in reversed(name.split(".")):
        if folders.stem != part:
            return []
        folders = folders.parent
    return [str(folders)]


def package_in(module_name: str) -> str:
    """Return the package that a program has imported a module from, which needs no `__init__.py` for that.

    There is none where `root_of` has no folder: the files beside it say whether a file lies in one.
    """
    spec = getattr(sys.modules.get(module_name), "__spec__", None)
    return spec.parent or "" if spec is not None and root_of(module_name) else ""


def _place(error: BaseException, path: Path) -> str:
    """Return the last line that the error came through of the file, or of others of its project, as 'iris.py:12'."""
    folder = path.resolve().parent
    place = str(path)
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        if file.is_relative_to(folder) and not _INSTALLED & {*file.relative_to(folder).parts}:
            place = f"{_shown(file, path)}:{frame.lineno}"
    return place


def _shown(file: Path, path: Path) -> str:
    """Return a file's path, the target's as the person wrote it."""
    return str(path) if file.resolve() == path.resolve() else shown_path(file)


def _marked(error: SyntaxError) -> str:
    """Return the line that cannot be read, with a caret below it, as further lines."""
    if not error.text or not error.offset:
        return ""
    line = error.text.rstrip("\n")
    shown = line.lstrip()
    return f"\n    {shown}\n    {' ' * max(error.offset - 1 - len(line) + len(shown), 0)}^"
