# SPDX-License-Identifier: Apache-2.0
"""Handlers as modules: each graph imports its own, and what lies beside them, whatever other graphs have imported.

Theory of operation. A folder with handlers is a package with a made-up name, of which each file in it is a part. Code
from it has an `__import__` of its own: where it asks for a name that lies in the folder and nowhere else, it gets the
part of its package. So two folders may both have a `config.py`, and a graph that is read anew gets new code.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import itertools
import linecache
import re
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final

_PREFIX: Final = "forebay_ovms_"
_numbers: Final = itertools.count(1)
_open: Final[dict[str, HandlerFolder]] = {}
_lock: Final = threading.Lock()
_on_path: Final[set[str]] = set()
"""Folders that are on `sys.path` because of their handlers."""


class HandlerFolder:
    """The modules of one folder, as one graph sees them."""

    def __init__(self, folder: Path) -> None:
        """Make its package; nothing is imported yet."""
        self.name = f"{_PREFIX}{next(_numbers)}"
        self.folder = str(folder)
        self._is_own: dict[str, bool] = {}
        self.builtins: dict[str, Any] = {**vars(builtins), "__import__": self._import}
        package = ModuleType(self.name, "Modules of a folder with handlers.")
        package.__path__ = [self.folder]
        sys.modules[self.name] = package
        _open[self.name] = self
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
        with _lock:
            if self.folder not in sys.path:
                sys.path.append(self.folder)  # for `importlib.import_module` in a handler, as in the original
                _on_path.add(self.folder)

    def load(self, path: Path) -> ModuleType:
        """Import a handler's file, of any name."""
        name = f"{self.name}.{re.sub(r'[^0-9A-Za-z_]', '_', path.stem)}"
        if name in sys.modules and sys.modules[name].__file__ == str(path):
            return sys.modules[name]
        linecache.checkcache(str(path))
        spec = importlib.util.spec_from_file_location(name, path, loader=_Loader(name, str(path)))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            sys.modules.pop(name, None)
            raise
        return module

    def close(self) -> None:
        """Forget the modules."""
        _open.pop(self.name, None)
        for name in list(sys.modules):  # in one go: other threads may import
            if name == self.name or name.startswith(f"{self.name}."):
                sys.modules.pop(name, None)
        with _lock:
            if self.folder in _on_path and self.folder not in {one.folder for one in list(_open.values())}:
                _on_path.discard(self.folder)
                with contextlib.suppress(ValueError):  # a handler may have taken it away
                    sys.path.remove(self.folder)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        top = name.partition(".")[0]
        if level or not self._owns(top):
            return builtins.__import__(name, globals, locals, fromlist or (), level)
        found = builtins.__import__(f"{self.name}.{name}", globals, locals, fromlist or ("",), 0)
        return found if fromlist else sys.modules[f"{self.name}.{top}"]

    def _owns(self, top: str) -> bool:
        """Tell whether a name lies in the folder and nowhere else: what is installed goes first, as in the original."""
        found = self._is_own.get(top)
        if found is None:
            found = False
            if top not in sys.stdlib_module_names and PathFinder.find_spec(top, [self.folder]) is not None:
                others = {one.folder for one in _open.values()}
                elsewhere = [path for path in sys.path if path not in others]
                found = PathFinder.find_spec(top, elsewhere) is None
            self._is_own[top] = found
        return found


class _Loader(SourceFileLoader):
    """Runs a file with the builtins of its folder, always from its source."""

    def path_stats(self, path: str) -> Any:
        raise OSError  # no bytecode: an edit within a second that keeps its length would look like none

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = _open[module.__name__.partition(".")[0]].builtins
        super().exec_module(module)


class _Finder:
    """Finds the parts of the packages of folders."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in _open or path is None:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
            spec.cached = None
        return spec
