# SPDX-License-Identifier: Apache-2.0
"""Calls that unpickle: what the pickle needs is in no import of the code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

LIBRARIES: Final = frozenset({"scikit-learn", "torch", "xgboost", "lightgbm"})
"""Distributions whose models are usually kept as pickles."""
_LOADERS: Final = frozenset({"joblib.load", "pickle.load", "pickle.loads", "torch.load"})


def unpickling_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of a module that unpickle something."""
    nodes = list(ast.walk(tree))
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {one.asname: one.name for one in node.names if one.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in nodes:
        if isinstance(node, ast.Call):
            called = node.func
            name = ""
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                name = f"{names.get(called.value.id, called.value.id)}.{called.attr}"
            elif isinstance(called, ast.Name):
                name = names.get(called.id, "")
            if name in _LOADERS:
                yield node.lineno
