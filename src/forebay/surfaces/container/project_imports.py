# SPDX-License-Identifier: Apache-2.0
"""Imports of the Python files that a project serves: they are read, and so are the project's files that they import."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple
from warnings import catch_warnings

from forebay.surfaces.container.context_files import MAX_FILE_BYTES, read_small
from forebay.surfaces.container.requirements import installed_packages
from forebay.surfaces.container.unpickling import unpickling_lines
from forebay.surfaces.imported_names import UNREADABLE, ImportedName, imports_of

_CONFIGURATIONS: Final = frozenset({"forebay.yaml", "nucleus.yaml", "config.json"})
_FILE: Final = re.compile(r"""[^"'\n:,\[\]{}]{1,500}?\.py\b""")
"""A Python file that a configuration names."""


class _Modules(NamedTuple):
    """Python files of a project, the folders that have some, and the files by the name that an import begins with."""

    files: set[str]
    folders: set[str]
    by_top: dict[str, list[str]]

    @classmethod
    def of(cls, names: Sequence[str]) -> _Modules:
        """Return the modules among files."""
        paths = [PurePosixPath(name) for name in names if name.endswith(".py")]
        by_top: dict[str, list[str]] = {}
        for path in paths:
            by_top.setdefault(path.parent.name if path.name == "__init__.py" else path.stem, []).append(str(path))
        return cls({*map(str, paths)}, {str(above) for path in paths for above in path.parents}, by_top)


class ProjectImport(NamedTuple):
    """An import of something that is not a file of the project.

    Attributes:
        place: File and line.
        name: With the dots of its packages.
        is_optional: Whether the project catches that it is missing.
    """

    place: str
    name: str
    is_optional: bool

    @property
    def top(self) -> str:
        """The name of the outermost package."""
        return self.name.partition(".")[0]


class ReadProject(NamedTuple):
    """What the files of a project show.

    Attributes:
        imports: Of something outside of its files.
        unpickling: Files and lines that unpickle.
        warnings: Of files that cannot be read.
    """

    imports: list[ProjectImport]
    unpickling: list[str]
    warnings: list[str]


def read_project(folder: Path, names: Sequence[str], served: Sequence[str]) -> ReadProject:
    """Read the Python files that a project serves, and those of its files that they import.

    Args:
        folder: The project's.
        names: Its files.
        served: The words after `forebay serve`.
    """
    modules = _Modules.of(names)
    files = list(_served_files(folder, names, served, modules.files))
    seen = set(files)
    imports: list[ProjectImport] = []
    unpickling: list[str] = []
    warnings: list[str] = []
    while files:
        file = files.pop(0)
        content = read_small(folder / file)
        if content is None:
            warnings.append(f"{file}: unreadable, or larger than {MAX_FILE_BYTES:,} bytes: its imports are not checked")
            continue
        try:
            with catch_warnings(action="ignore"):  # of escapes in its strings
                tree = ast.parse(content)
        except UNREADABLE as error:
            line = getattr(error, "lineno", None) or 1
            warnings.append(f"{file}:{line}: not valid Python, so its imports are not checked: {_reason(error)}")
            continue
        unpickling += [f"{file}:{line}" for line in unpickling_lines(tree)]
        for one in imports_of(tree):
            own = _own_files(one, file, modules)
            files += [each for each in own or () if each not in seen]
            seen.update(own or ())
            if own is None:
                imports.append(ProjectImport(f"{file}:{one.line}", one.name, one.is_optional))
    return ReadProject(_longest(imports), unpickling, warnings)


def _reason(error: BaseException) -> str:
    return str(next(iter(error.args), type(error).__name__))


def _served_files(folder: Path, names: Sequence[str], served: Sequence[str], known: Collection[str]) -> Iterator[str]:
    """Yield the Python files that are served: those of the command, and those that configurations name."""
    texts = [(word.partition(":")[0], "") for word in served]
    for name in names:
        path = PurePosixPath(name)
        if path.name in _CONFIGURATIONS or path.suffix == ".pbtxt" or name in served:
            text = (read_small(folder / name) or b"").decode(errors="replace")
            texts += [(found.strip(" -"), str(path.parent)) for found in _FILE.findall(text)]
    for file, below in texts:
        one = Path(os.path.relpath(folder / below / file, folder)).as_posix()
        if one in known:
            yield one


def _own_files(imported: ImportedName, file: str, modules: _Modules) -> list[str] | None:
    """Return the project's files that an import runs, as seen from the file and from each folder above it.

    None means that it is not an import of the project's.
    """
    start = PurePosixPath(file).parent
    bases = [start, *start.parents]
    if imported.level:
        bases = bases[imported.level - 1 : imported.level]
    parts = imported.name.split(".")
    for base in bases:
        inner = [str(base.joinpath(*parts[:count])) for count in range(1, len(parts) + 1)]
        found = [one for name in inner for one in (f"{name}.py", f"{name}/__init__.py") if one in modules.files]
        if found or inner[0] in modules.folders:
            return found
    if imported.level:
        return []
    # A setting can put other folders of the project on the path.
    elsewhere = None if parts[0] in sys.stdlib_module_names else modules.by_top.get(parts[0])
    return None if elsewhere is None or parts[0] in installed_packages() else elsewhere


def _longest(imports: Sequence[ProjectImport]) -> list[ProjectImport]:
    """Drop imports that another one of the same place is more exact than: `a` and `a.b` beside `a.b.c`."""
    exact = {(one.place, above) for one in imports for above in _packages(one.name)}
    return [one for one in imports if (one.place, one.name) not in exact]


def _packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
