# SPDX-License-Identifier: Apache-2.0
"""What a file or a caller tells as plain data, and where each piece of it stands; `yaml.py` reads files."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

from forebay.errors import ConfigError

Path = tuple[Hashable, ...]


class Mark(NamedTuple):
    """A place in a file, both counted from 1."""

    line: int
    column: int


class Document:
    """What a file holds.

    Attributes:
        name: The file, as messages name it.
        data: Its data: dicts, lists and scalars; None for an empty file.
    """

    def __init__(
        self, name: str, data: Any, marks: Mapping[Path, Mark] | None = None, texts: Mapping[Path, str] | None = None
    ) -> None:
        """Keep data and places; without `marks` it is not a file that has lines."""
        self.name = name
        self.data = data
        self._has_lines = marks is not None
        self._marks = {(): Mark(1, 1), **(marks or {})}
        self._texts = texts or {}

    def mark(self, path: Path) -> Mark:
        """Return where the value at `path` is given: at its key, or at its place in a list.

        For what is not in the file it is the place of the nearest thing around it that is.
        """
        while path not in self._marks:
            path = path[:-1]
        return self._marks[path]

    def text(self, path: Path) -> str | None:
        """Return a scalar as it is written in the file, without its quotes; None if there is no scalar at `path`."""
        return self._texts.get(path)

    def error(self, path: Path, message: str) -> ConfigError:
        """Make an error that begins with the place of `path`."""
        return ConfigError(f"{self.where(path)}: {message}")

    def where(self, path: Path) -> str:
        """Return `FILE:LINE` of `path`."""
        return f"{self.name}:{self.mark(path).line}" if self._has_lines else self.name
