# SPDX-License-Identifier: Apache-2.0
"""Promises about the tree: one name for each thing, and modules that can be imported in any order."""

import ast
import graphlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from forebay.server.config import SECTIONS, WorkerConfig
from forebay.types.settings import declared

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
WORD = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


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


Imports = list[tuple[str, list[str]]]


class Module(NamedTuple):
    """What a module has.

    `classes` are the public ones, `imports` those that run when it is imported itself, `first_lines` of all docstrings,
    `sentences` the texts in its code: messages, help, log lines; `words` what the names are made of that it defines.
    """

    classes: list[str]
    imports: Imports
    all_imports: Imports
    first_lines: list[str]
    sentences: list[str]
    words: set[str]


def read(path: Path) -> Module:
    """Read a module; its syntax tree, which is large, is gone afterwards."""
    tree = ast.parse(path.read_bytes())
    classes = [one.name for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    first_lines = [
        text.partition("\n")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (text := ast.get_docstring(node))
    ]
    sentences = list(sentences_of(tree))
    names = [path.stem, *filter(None, map(defined, ast.walk(tree)))]
    words = {word.lower() for name in names for word in WORD.findall(name)}
    imports, all_imports = imports_of(run_at_import(tree.body)), imports_of(ast.walk(tree))
    return Module(classes, imports, all_imports, first_lines, sentences, words)


def sentences_of(tree: ast.Module) -> Iterator[str]:
    """Every text of several words that is no docstring, between the values of its placeholders."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else ""
        if isinstance(text, str) and " " in text.strip():
            yield text


def defined(node: ast.AST) -> str | None:
    """The name that a node defines."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.arg(arg=name):
            return name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case _:
            return None


def imports_of(nodes: Iterable[ast.AST]) -> Imports:
    """What these import: modules, and the names out of each."""
    imports: Imports = []
    for node in nodes:
        if isinstance(node, ast.Import):
            imports += [(each.name, []) for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports.append((node.module, [each.name for each in node.names]))
    return imports


def graph_of(modules: Mapping[str, Imports]) -> dict[str, set[str]]:
    """Which of the modules each of them imports."""
    graph = {}
    for name, imports in modules.items():
        found = graph[name] = set()
        for imported, names in imports:
            found.update({f"{imported}.{each}" for each in names} & modules.keys() or {imported} & modules.keys())
        found.discard(name)
    return graph


def knots_of(graph: Mapping[str, set[str]]) -> list[tuple[str, ...]]:
    """Groups of modules each of which leads to all others of its group."""
    reached = {}
    for name in graph:
        seen, left = set(), [name]
        while left:
            left += (new := graph[left.pop()] - seen)
            seen |= new
        reached[name] = seen
    knotted = {name for name in graph if name in reached[name]}
    return sorted({tuple(sorted(one for one in reached[name] if name in reached[one])) for name in knotted})


# What may still be knotted if imports for annotations and inside functions count: each is one machine in several files,
# whose parts hold each other. A knot that is undone leaves the list, and no new one comes.
KNOTS = [
    ("batching", 11),
    ("graph/composition", 2),
    ("owners", 2),
    ("server", 3),
    ("serving/nx_serving", 5),
    ("surfaces/pipeline/ops", 2),
    ("transports/grpc", 8),
    ("transports/http", 10),
]


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
    # `forebay.Answer` is what a model makes, `forebay.testing.Answer` what came of it at a client.
    assert {public for public, where in homes.items() if len(where) > 1} == {"Answer"}


def test_no_modules_import_each_other_in_a_circle(modules):
    graph = graph_of({name: module.imports for name, module in modules.items()})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def test_modules_that_need_each_other_for_annotations_or_later_become_no_more(modules):
    knots = knots_of(graph_of({name: module.all_imports for name, module in modules.items()}))
    rooms = [
        (os.path.commonpath([one.replace(".", "/") for one in knot]).removeprefix("forebay/"), len(knot))
        for knot in knots
    ]
    assert sorted(rooms) == KNOTS, [knot for knot, room in zip(knots, rooms, strict=True) if room not in KNOTS]


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


# CONTRIBUTING.md says what to write instead.
NO_NOUNS = {
    *("anew", "asked", "beside", "else", "found", "given", "left", "nobody", "one", "other", "others", "out", "seldom"),
    *("somebody", "them", "those", "together", "told", "unsaid", "untaken", "what", "who", "whoever", "written"),
}
NO_CLASSES = {"Nobody", "Seldom", "Somebody", "Together", "Unsaid", "Untaken", "Whoever"}
VAGUE = re.compile(
    r"^(?:Do the same|It|Nobody|See|Somebody|Take leave|Take note|That|The same|Those|Who|Whoever)\b"
    r"|\b(?:[Ss]omebody|[Ss]omeone|[Ww]hoever)\b"
)


# What an error says instead: `expected a whole number >= 1, got 'three'`.
BANNED = re.compile(
    r"\b(?:are|is) (?:not )?(?:possible|needed)\b|\b(?:leave|left) away\b|\b(?:[Nn]ob|[Ss]omeb)ody\b|\b[Ww]hoever\b"
    r"|\b[Ww]ho asks\b|\btold\b|\btakes no (?!further|arguments)|\bof so many\b|\bcalled off\b|\bleft behind\b"
    r"|\b(?:are|is|it) tried again\b|\bwhat is served\b|\bwere over\b|\banew\b|\bis (?:no device|no address)\b"
)


def test_sentences_that_users_see_have_none_of_the_banned_phrases(modules):
    texts = [(name, text) for name, module in modules.items() for text in module.sentences]
    texts += [(setting.name, setting.doc) for one in (*SECTIONS, WorkerConfig) for setting in declared(one).values()]
    assert len(texts) > 3000
    assert [f"{name}: {text}" for name, text in texts if BANNED.search(text)] == []


@pytest.mark.parametrize("text", ["'x' is not possible, a number is needed", "nobody waits for it", "it is told so"])
def test_a_banned_phrase_is_noticed(text):
    (found,) = sentences_of(ast.parse(f"def f():\n    'A docstring that is needed.'\n    raise ValueError({text!r})"))
    assert BANNED.search(found)


def test_names_of_modules_and_classes_are_nouns(modules):
    names = [name for name in modules if NO_NOUNS & {*name.rpartition(".")[2].split("_")}]
    classes = [one for module in modules.values() for one in module.classes]
    assert names + [one for one in classes if NO_CLASSES & {*re.findall("[A-Z][a-z]*", one)}] == []


# What "Words" in ARCHITECTURE.md calls otherwise.
SYNONYMS = {
    "client": {"consumer"},
    "controller": {"coordinator", "orchestrator"},
    "front": {"downstream", "forwarder", "frontend", "proxy"},
    "owner": {"broker", "leader", "master", "primary", "upstream"},
    "stock": {"inventory"},
    "tenant": {"customer"},
    "worker": {"replica"},
}


def test_the_words_of_the_glossary_are_used_and_no_others_for_the_same(modules):
    table = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Words\n")[2].partition("\n## ")[0]
    rows = [re.sub(r"\(of [^)]*\)", "", line.split("|")[1]) for line in table.splitlines() if line.startswith("| ")]
    glossary = {word for row in rows for word in WORD.findall(row)}
    used = set[str]().union(*(module.words for module in modules.values()))
    assert len(glossary) > 60
    assert glossary - used == set()
    assert {word: others & used for word, others in SYNONYMS.items() if others & used} == {}


def test_first_lines_name_the_actor_and_say_the_effect(modules):
    lines = [(name, line) for name, module in modules.items() for line in module.first_lines]
    assert len(lines) > 5000
    assert [f"{name}: {line}" for name, line in lines if VAGUE.search(line)] == []


@pytest.mark.parametrize("line", ["Do the same in steps.", "Who answers.", "Numbers, for whoever asks.", "See `run`."])
def test_a_vague_first_line_is_noticed(line):
    assert VAGUE.search(line)
