# SPDX-License-Identifier: Apache-2.0
"""The modules of files that are served by their path: `iris.py` is imported as `forebay_target.iris_be97c555`.

Processes that a model starts without a fork (`multiprocessing` by spawn, joblib) look up functions and classes by the
names of their modules, and have nothing of ours but `sys.path`: so it must be this import that finds the file.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path


class TargetSpec(ModuleSpec):
    """How a file is imported that is given by its path. If it lies in a package, its imports by dots begin there."""

    def __init__(self, path: Path, package: str = "") -> None:
        """Describe the module of a file; its path is absolute and leads over no links.

        Args:
            path: The file.
            package: Where it lies if a program has imported it from there; it need have no `__init__.py`.
        """
        name = target_name(path)
        loads = SourcelessFileLoader if path.suffix == ".pyc" else SourceFileLoader
        super().__init__(name, loads(name, str(path)), origin=str(path))
        self.has_location = True
        self._package = package or ".".join(package_of(path)[1:]) or __name__

    @property
    def parent(self) -> str:
        """The package in which the import looks for names that begin with a dot."""
        return self._package


def target_name(path: Path) -> str:
    """Return the name under which a file is imported: the same in every process, so that each finds what is in it."""
    path = path.resolve()
    stem = re.sub(r"\W", "_", path.stem)  # a dot would lead into a package
    return f"{__name__}.{stem}_{zlib.crc32(str(path).encode()):08x}"


def package_of(path: Path) -> list[str]:
    """Return the folder from which the package of a file is imported, and the names that lead to it."""
    folder, names = path.parent, list[str]()
    while folder.name and (folder / "__init__.py").is_file():
        folder, names = folder.parent, [folder.name, *names]
    return [str(folder), *names]


class _ServedFiles:
    @staticmethod
    def find_spec(name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Find the file of a module in the folders that files are imported from."""
        if not name.startswith(f"{__name__}."):
            return None
        for folder in reversed(sys.path):  # that of a served file is put at the end
            for file in Path(folder).glob("*.py"):
                if target_name(file) == name:
                    return TargetSpec(file.resolve())
        return None


sys.meta_path.append(_ServedFiles)
