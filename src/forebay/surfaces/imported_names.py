# SPDX-License-Identifier: Apache-2.0
"""Names that a Python file imports, read from its syntax tree: nothing of the file is run."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

UNREADABLE: Final = (OSError, ValueError, SyntaxError, RecursionError, MemoryError)
"""Errors of a file that is not Python, or cannot be read."""
_CAUGHT: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


class ImportedName(NamedTuple):
    """A name that a file imports.

    Attributes:
        name: With the dots of its packages; `from a.b import c` is both `a.b` and `a.b.c`.
        line: Where it stands.
        level: How many dots precede it; 0 for an absolute import.
        is_optional: Whether the file catches that it is missing.
    """

    name: str
    line: int
    level: int
    is_optional: bool


def imported_in(path: Path) -> Iterator[str]:
    """Yield the absolute names that a file imports; none if it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except UNREADABLE:
        return
    for one in imports_of(tree):
        if one.level == 0:
            yield one.name


def imports_of(tree: ast.AST) -> Iterator[ImportedName]:
    """Yield what a module imports when it runs, inside functions as well; not what only a type checker imports."""
    nodes = deque([(tree, False)])
    while nodes:
        node, is_optional = nodes.popleft()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield ImportedName(alias.name, node.lineno, 0, is_optional)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for name in [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]:
                if name:
                    yield ImportedName(name, node.lineno, node.level, is_optional)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in {getattr(node.test, name, "") for name in ("id", "attr")}:
            nodes += [(child, is_optional) for child in node.orelse]
        else:
            is_caught = is_optional or (isinstance(node, ast.Try) and any(map(_catches, node.handlers)))
            nodes += [(child, is_caught) for child in ast.iter_child_nodes(node)]


def _catches(handler: ast.ExceptHandler) -> bool:
    """Tell whether a handler catches a failed import."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(one is None or (isinstance(one, ast.Name) and one.id in _CAUGHT) for one in caught)
