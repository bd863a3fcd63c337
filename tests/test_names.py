# SPDX-License-Identifier: Apache-2.0
"""Promises about the tree: one name for each thing, and modules that can be imported in any order."""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


@pytest.fixture(scope="module")
def modules():
    """The syntax trees of the whole source, which are large, for as long as they are looked at."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_bytes())
        for path in SOURCE.rglob("*.py")
    }


def run_at_import(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement that runs when its module is imported."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "TYPE_CHECKING":
            yield from run_at_import(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.ClassDef):
            for field in ("body", "orelse", "finalbody"):
                yield from run_at_import(getattr(statement, field, []))
            for handler in getattr(statement, "handlers", []):
                yield from run_at_import(handler.body)


def test_a_public_class_has_a_name_of_its_own(modules):
    homes = defaultdict(list)
    for module, tree in modules.items():
        for statement in tree.body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                homes[statement.name].append(module)
    assert {name: where for name, where in homes.items() if len(where) > 1} == {}


def test_no_modules_import_each_other_in_a_circle(modules):
    imports = {}
    for module, tree in modules.items():
        found = imports[module] = set()
        for statement in run_at_import(tree.body):
            if isinstance(statement, ast.Import):
                found.update(each.name for each in statement.names)
            elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
                inner = {f"{statement.module}.{each.name}" for each in statement.names} & modules.keys()
                found.update(inner or {statement.module})
    graph = {module: found & modules.keys() - {module} for module, found in imports.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle
