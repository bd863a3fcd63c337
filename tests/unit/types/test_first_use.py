# SPDX-License-Identifier: Apache-2.0
"""Types that several threads hand to msgspec at once, for the first time."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.types.first_use import known

SOURCE = Path(forebay.__file__).parent

# Without `known` this ends with a segmentation fault after some rounds.
THREADS = """
import sys, threading, typing
import msgspec
from forebay.types.first_use import known

sys.setswitchinterval(1e-6)
Inner = msgspec.defstruct("Inner", [("a", int), ("b", typing.Optional[typing.Literal["x", "y"]], None)])
FIELDS = [
    ("a", int), ("b", typing.Annotated[int, msgspec.Meta(ge=0)]), ("c", dict[str, typing.Union[int, str]]),
    ("d", list[Inner]), ("e", typing.Union[int, float, None]), ("f", tuple[int, ...]),
]
VALUE = {"a": 1, "b": 2, "c": {"k": 1}, "d": [{"a": 2}], "e": 1, "f": [1]}
right = 0

right = []

def read(kind, together):
    together.wait()
    right.append(msgspec.convert(VALUE, known(kind)).d == [Inner(2)])

for _ in range(100):
    kind, together = msgspec.defstruct("Outer", FIELDS), threading.Barrier(4)
    threads = [threading.Thread(target=read, args=(kind, together)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
sys.exit(right != [True] * 400)
"""


def test_threads_may_meet_a_type_at_once():
    assert subprocess.run([sys.executable, "-c", THREADS], check=False).returncode == 0


def test_what_msgspec_cannot_read_is_told_as_it_tells_it():
    with pytest.raises(TypeError, match="may not contain more than one"):
        known(list[int] | set[int] | tuple[int, str])
    with pytest.raises(NameError):
        known(Unresolved)
    assert known(dict[bytes, int]) == dict[bytes, int]


class Unresolved:
    """Of a type that nobody has defined."""

    __annotations__ = {"a": "Nowhere"}
    __dataclass_fields__ = {}  # noqa: RUF012


PLAIN = {"int", "float", "str", "bytes", "bool", "Any", "Raw"}
PREPARED = {"_LINE", "column", "self._type", "form"}
"""What a `known` made, under the names that stand for it; and its own."""
PLAIN |= {"listed", "nested", "kind"}
"""Lists of numbers, texts or bytes, however deep."""


def _types_given():
    """Every type that is handed to msgspec, with its place."""
    for path in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            text = ast.unparse(call)
            if not text.startswith(("msgspec.", "partial(msgspec.convert")):
                continue
            name = ast.unparse(call.func).rpartition(".")[2]
            typed = [keyword.value for keyword in call.keywords if keyword.arg == "type"]
            if not typed and name == "convert":
                typed = call.args[1:2]
            if not typed and name == "Decoder":
                typed = call.args[:1]
            yield from ((f"{path.relative_to(SOURCE)}:{call.lineno}", one) for one in typed)


def _is_plain(kind):
    """Whether no class of anybody's stands in it."""
    if isinstance(kind, ast.Name) and kind.id == "kind":
        return False
    names = {node.id for node in ast.walk(kind) if isinstance(node, ast.Name)} - {"msgspec", "dict", "list", "tuple"}
    return names <= PLAIN


def test_every_type_that_is_handed_to_msgspec_was_made_known():
    given = list(_types_given())
    wrong = [
        f"{place} {ast.unparse(kind)}"
        for place, kind in given
        if not ast.unparse(kind).startswith("known(") and ast.unparse(kind) not in PREPARED and not _is_plain(kind)
    ]
    assert len(given) > 40
    assert not wrong
