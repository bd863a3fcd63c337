# SPDX-License-Identifier: Apache-2.0
"""Projects written for Pipeline Serving: ops with three hooks each, wired to a graph by `input_ops`, served unchanged.

    from forebay.surfaces.pipeline import Op, PipelineServer, RequestOp, ResponseOp, WebService

`forebay serve script.py` takes scripts that import these names from here or from where the original has them.
"""

from __future__ import annotations

import importlib
from typing import Any

from forebay.surfaces.pipeline.shim import NAMES

__all__ = [*NAMES]  # pyright: ignore[reportUnsupportedDunderAll] # noqa: PLE0604


def __getattr__(name: str) -> Any:
    # Not imported above: importing the package does nothing but this, and a client needs no server.
    home = NAMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
