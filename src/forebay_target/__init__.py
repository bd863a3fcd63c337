# SPDX-License-Identifier: Apache-2.0
"""The modules of files that are served by their path: `iris.py` is imported as `forebay_target.iris_be97c555`.

Processes that a model starts without a fork (`multiprocessing` by spawn, joblib) look up functions and classes by the
names of their modules, and have nothing of ours but `sys.path`: so it must be this import that finds the file.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path


class _ServedFiles:
    @staticmethod
    def find_spec(name: str, _path: Sequence[str] | None = None, _target: object = None) -> ModuleSpec | None:
        """Find the file of a module in the folders that files are imported from."""
        if not name.startswith(f"{__name__}."):
            return None
        from forebay.serving.models.model import target_name

        for folder in reversed(sys.path):  # that of a served file is put at the end
            for file in Path(folder).glob("*.py"):
                if target_name(file) == name:
                    return spec_from_file_location(name, file.resolve())
        return None


sys.meta_path.append(_ServedFiles)
