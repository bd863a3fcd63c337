# SPDX-License-Identifier: Apache-2.0
"""The names projects import from the original: offered by an import hook, in processes forebay starts.

    ventu            Ventu
    ventu.ventu      Ventu
    ventu.config     Config
    ventu.protocol   BatchProtocol

A script of one's own asks for them with

    from forebay.surfaces.ventu import shim
    shim.install()

before it imports them. The original is then not used, whether it is installed or not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_NAMES: Mapping[str, tuple[str, str]] = {
    "ventu": ("forebay.surfaces.ventu", "Ventu"),
    "ventu.ventu": ("forebay.surfaces.ventu", "Ventu"),
    "ventu.config": ("forebay.surfaces.ventu.config", "Config"),
    "ventu.protocol": ("forebay.surfaces.ventu.batch_protocol", "BatchProtocol"),
}


def install() -> None:
    """Offer the names in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds and fills the modules."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _NAMES:
            return None
        return ModuleSpec(fullname, self, origin="forebay", is_package=fullname == "ventu")

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        home, name = _NAMES[module.__name__]
        module.__doc__ = "Names of the original, offered by forebay."
        vars(module)[name] = getattr(importlib.import_module(home), name)
