# SPDX-License-Identifier: Apache-2.0
"""Modules that projects import from the system they were written for: offered by an import hook, on no disk.

A surface says in its `shim` which modules there are, and where forebay has what they name.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from forebay.types.failures import text_of
from forebay.workers.user_calls.user_code import caught

log = logging.getLogger("forebay")

Modules = Mapping[str, Mapping[str, str]]
"""For each module its names, each with the module of forebay's that has it, and how it is called there if not so."""


def offer(modules: Modules, *, if_absent: bool = False, not_there: str = "") -> None:
    """Offer modules in this process, once.

    Args:
        if_absent: Whether what is installed comes first; a module of it that cannot be imported is replaced.
        not_there: What is told of names that such a module has not; it is given those it has, and the one asked for.
    """
    if not any(isinstance(finder, _Finder) and finder.modules is modules for finder in sys.meta_path):
        sys.meta_path.insert(0, (_FinderIfAbsent if if_absent else _Finder)(modules, not_there))


class _Finder(MetaPathFinder, Loader):
    """Finds the modules. Each looks a name up only when asked, so nothing is imported that nobody uses."""

    def __init__(self, modules: Modules, not_there: str) -> None:
        self.modules = modules
        self._not_there = not_there

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.modules:
            return None
        is_package = any(name.startswith(fullname + ".") for name in self.modules)
        return ModuleSpec(fullname, self, origin="forebay", is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = self.modules[module.__name__]

        def look_up(name: str) -> Any:
            if name not in names:
                if self._not_there and names and not name.startswith("__"):
                    raise ImportError(self._not_there.format(", ".join(names), name), name=module.__name__)
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            home, _, called = names[name].partition(":")
            found = getattr(importlib.import_module(home), called or name)
            setattr(module, name, found)
            return found

        module.__doc__ = "Names of the original, offered by forebay."
        vars(module).update(__getattr__=look_up, __all__=list(names))


class _FinderIfAbsent(_Finder):
    """Finds the modules that are not installed, or cannot be imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is None:
            return None
        for finder in sys.meta_path:
            installed = None if isinstance(finder, _Finder) else finder.find_spec(fullname, path, target)
            if installed is not None and installed.loader is not None:
                installed.loader = _OrOurs(installed.loader, self)
                return installed
        return spec


class _OrOurs(Loader):
    """Loads a module that is installed, and ours if that fails."""

    def __init__(self, installed: Loader, ours: _Finder) -> None:
        self._installed = installed
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._installed.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        _, raised = caught(self._installed.exec_module, module)
        if raised is not None:
            log.warning("%s is installed and cannot be imported: %s", module.__name__, text_of(raised))
            self._ours.exec_module(module)
