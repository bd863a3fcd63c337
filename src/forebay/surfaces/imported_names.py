# SPDX-License-Identifier: Apache-2.0
"""What a Python file imports: how surfaces tell a project of theirs, without running anything of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def imported_in(path: Path) -> Iterator[str]:
    """Yield what a file imports: of `from a.b import c` both `a.b` and `a.b.c`; nothing if it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
