# SPDX-License-Identifier: Apache-2.0
"""The module handlers import from the original, `pyovms`: offered by an import hook, in processes forebay starts.

Nothing of this lies on the disk under that name. A test of one's own asks for it with

    from forebay.surfaces.ovms import shim
    shim.install()

before it imports a handler.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def install() -> None:
    """Offer the name in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    """Finds and fills the module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, origin="forebay") if fullname == "pyovms" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        from forebay.surfaces.ovms.tensor import PyTensor

        module.__doc__ = "What handlers of OpenVINO Model Server import, offered by forebay."
        vars(module)["Tensor"] = PyTensor
