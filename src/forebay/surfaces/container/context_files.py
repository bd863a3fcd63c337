# SPDX-License-Identifier: Apache-2.0
"""Files of a project that an image gets: a walk with bounds, and the lines of a `.dockerignore`."""

from __future__ import annotations

import itertools
import os
import re
from collections import deque
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

MAX_FILES: Final = 10_000
"""Files and folders of a project that are looked at."""
MAX_FILE_BYTES: Final = 1 << 20
"""Files that are larger are data, and are not read."""
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


class ContextFiles(NamedTuple):
    """Files of a project.

    Attributes:
        names: Relative to the folder, with slashes.
        environments: Virtual environments in the folder, which no image should have.
        is_whole: Whether these are all files.
    """

    names: list[str]
    environments: list[str]
    is_whole: bool


def context_files(folder: Path, output: Path) -> ContextFiles:
    """Return the files of a project, upper folders first; hidden folders, links to folders and `output` are skipped."""
    names: list[str] = []
    environments: list[str] = []
    folders = deque([""])
    count = 0
    while folders:
        below = folders.popleft()
        try:
            with os.scandir(folder / below) as scan:
                entries = sorted(itertools.islice(scan, MAX_FILES + 1), key=lambda entry: entry.name)
        except OSError:
            continue
        for entry in entries:
            count += 1
            if count > MAX_FILES:
                return ContextFiles(names, environments, is_whole=False)
            name = f"{below}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                if os.path.isfile(f"{entry.path}/pyvenv.cfg"):  # noqa: PTH113 - `Path.is_file` raises in a folder of others
                    environments.append(name)
                elif entry.name not in _SKIPPED and entry.name[0] != "." and Path(entry.path) != output:
                    folders.append(f"{name}/")
            elif os.path.isfile(entry.path):  # noqa: PTH113 - as above
                names.append(name)
    return ContextFiles(names, environments, is_whole=True)


def read_small(path: Path) -> bytes | None:
    """Return what is in a file; None if it is not a file, cannot be read or is too large."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError:
        return None
    return content if len(content) <= MAX_FILE_BYTES else None


def ignoring(name: str) -> str:
    """Return the line of a `.dockerignore` that omits a file or folder; `?` stands for what no line can hold."""
    pattern = re.sub(r"^[#!]|[][*?\\]", r"\\\g<0>", name)
    pattern = re.sub("^ +| +$", lambda spaces: "?" * len(spaces[0]), pattern)
    return "".join(char if char.isprintable() else "?" for char in pattern)


def is_ignored(name: str, lines: Iterable[str]) -> bool:
    """Tell whether a `.dockerignore` omits a file: the last line that matches it, or a folder above it, decides."""
    above = [str(one) for one in (PurePosixPath(name), *PurePosixPath(name).parents)][:-1]
    ignored = False
    for line in lines:
        pattern = line.strip().removeprefix("!").strip("/")
        if pattern and not line.startswith("#") and any(map(_matching(pattern).fullmatch, above)):
            ignored = not line.startswith("!")
    return ignored


def _matching(pattern: str) -> re.Pattern[str]:
    wild = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\\.)", pattern)
    return re.compile("".join(wild.get(part, re.escape(part.removeprefix("\\"))) for part in parts))
