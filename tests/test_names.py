# SPDX-License-Identifier: Apache-2.0
"""Promises about the tree: one name for each thing, and modules that can be imported in any order."""

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"


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


class Module(NamedTuple):
    """What a module has: public classes, and the names that it imports when it is imported itself."""

    classes: list[str]
    imports: list[tuple[str, list[str]]]


def read(path: Path) -> Module:
    """Read a module; its syntax tree, which is large, is gone afterwards."""
    body, imports = ast.parse(path.read_bytes()).body, []
    for statement in run_at_import(body):
        if isinstance(statement, ast.Import):
            imports += [(each.name, []) for each in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            imports.append((statement.module, [each.name for each in statement.names]))
    classes = [one.name for one in body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    return Module(classes, imports)


@pytest.fixture(scope="module")
def modules():
    """The whole source."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): read(path)
        for path in SOURCE.rglob("*.py")
    }


def test_a_public_class_has_a_name_of_its_own(modules):
    homes = defaultdict(list)
    for name, module in modules.items():
        for public in module.classes:
            homes[public].append(name)
    assert {public: where for public, where in homes.items() if len(where) > 1} == {}


def test_no_modules_import_each_other_in_a_circle(modules):
    graph = {}
    for name, module in modules.items():
        found = graph[name] = set()
        for imported, names in module.imports:
            found.update({f"{imported}.{each}" for each in names} & modules.keys() or {imported} & modules.keys())
        found.discard(name)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_few_names_of_modules_stand_in_two_rooms(modules):
    homes = defaultdict(list)
    for name in modules:
        room, _, own = name.rpartition(".")
        homes[own].append(room)
    packages = {name.rpartition(".")[0] for name in modules}
    twice = {own for own, rooms in homes.items() if len([one for one in rooms if f"{one}.{own}" not in packages]) > 1}
    # What several doors or surfaces have alike is called alike: each has its `config`, its `runner`, its `shim`.
    assert len(twice) <= 25, sorted(twice)


def test_code_stands_in_modules_that_are_named_for_it():
    doors = {"forebay", "forebay.cluster", "forebay.openai", "forebay_target"}  # what users import, with its pages
    lines = {
        ".".join(path.parent.relative_to(SOURCE).parts): path.read_bytes().count(b"\n")
        for path in SOURCE.rglob("__init__.py")
    }
    assert {package: count for package, count in lines.items() if count > 40 and package not in doors} == {}
