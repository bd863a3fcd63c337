# SPDX-License-Identifier: Apache-2.0
"""What an ONNX file says of itself, read without protobuf and without its weights: other files, operators, constants.

The file is walked field by field, and the data of tensors is skipped: what is read is as small as the graph. Depth and
number of the fields are bounded. Long lists are passed over many elements at a time: `onnx.proto` writes each of them
as a field of its own, and a forest of decision trees has millions. Only fields that somebody here asks for are known;
their numbers are those of `onnx.proto`.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import ConfigError
from forebay.runtimes.onnx_operators import Operator, OperatorGraph, Program

if TYPE_CHECKING:
    from io import BufferedReader

MAX_FIELDS: Final = 4_000_000
"""Fields of a file that are looked at; a graph of 20,000 operators has 500,000."""
MAX_DEPTH: Final = 32
"""Graphs within operators of graphs."""
_MAX_TEXT: Final = 4096
"""Bytes of a name, and of a constant of whole numbers."""
_CHUNK: Final = 1 << 16
_LONGEST: Final = 11
"""Bytes of a tag of one byte and its number."""
_SCALARS: Final = {0: rb"[\x80-\xff]{0,9}[\x00-\x7f]", 1: b".{8}", 5: b".{4}"}
"""Numbers of the wire types that have no length."""
_INT64: Final = 7
_EXTERNAL: Final = 1


class OnnxFile(Program):
    """A file.

    Attributes:
        files: Other files that its weights lie in, as it names them.
    """

    files: set[str] = msgspec.field(default_factory=set[str])


def read_onnx(path: Path) -> OnnxFile:
    """Read what a file says.

    Raises:
        ConfigError: If it is not an ONNX file, or is too large to be read.
        OSError: If it cannot be read.
    """
    with path.open("rb") as opened:
        size = opened.seek(0, 2)
        reader = _Reader(opened, path.name)
        return reader.model(0, size)


def files_beside(path: Path) -> tuple[str, ...]:
    """Return the files that the weights of an ONNX file lie in, as it names them; none if it cannot be read."""
    try:
        about = path.stat()
        return _named_files(path, about.st_ino, about.st_size, about.st_mtime_ns)
    except (ConfigError, OSError):
        return ()


@lru_cache(256)
def _named_files(path: Path, *_as_it_is: int) -> tuple[str, ...]:
    return tuple(sorted(read_onnx(path).files))


def weights_of(path: Path) -> dict[str, bytes]:
    """Read the files that the weights of an ONNX file lie in, by the names that it has for them.

    Raises:
        ConfigError: If one is not beside or below the file, or is not there.
        OSError: If one cannot be read.
    """
    found: dict[str, bytes] = {}
    for name in sorted(read_onnx(path).files):
        inner = PurePosixPath(name)
        if inner.is_absolute() or any(part.startswith(".") for part in inner.parts):
            raise ConfigError(
                f"its weights lie in '{name}'; only files in its own folder and below are read, and no hidden ones"
            )
        file = path.parent / inner
        try:
            is_file = stat.S_ISREG(file.stat().st_mode)
        except (OSError, ValueError) as error:
            raise ConfigError(f"its weights lie in '{name}', which cannot be read: {error}") from error
        if not is_file:
            raise ConfigError(f"its weights lie in '{name}', which is not a file")
        found[name] = file.read_bytes()
    return found


class _Reader:
    """Reads messages of a file by where they begin and end."""

    def __init__(self, opened: BufferedReader, name: str) -> None:
        self._file = opened
        self._name = name
        self._left = MAX_FIELDS
        self._files: set[str] = set()

    def model(self, at: int, end: int) -> OnnxFile:
        found = OnnxFile(files=self._files)
        for field, value in self._fields(at, end):
            if field == 7:
                self._graph(found.graph, value, 0)
            elif field == 8:
                told = dict(self._inside(value))
                domain = self._text(told.get(1))
                if domain in {"", "ai.onnx"}:
                    found.opset = _number(told.get(2, 0))
            elif field == 20:
                for part, graph in self._inside(value):
                    if part in {1, 2}:
                        self._graph(OperatorGraph(), graph, 0)
            elif field == 25:
                key, function = self._function(value)
                found.functions[key] = function
        return found

    def _graph(self, graph: OperatorGraph, where: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise self._wrong(f"it has graphs in graphs more than {MAX_DEPTH} deep")
        for field, value in self._inside(where):
            if field == 1:
                graph.operators.append(self._node(value, graph, depth))
            elif field == 5:
                name, numbers = self._tensor(value)
                graph.constants[name] = numbers
            elif field == 15:
                for part, inner in self._inside(value):
                    if part in {1, 2}:
                        name, _ = self._tensor(inner)
                        if part == 1:
                            graph.constants[name] = None
            elif field in {11, 12, 13}:
                name, rank = self._value(value)
                if rank is not None:
                    graph.ranks[name] = rank
                if field != 13:
                    (graph.inputs if field == 11 else graph.outputs).append(name)

    def _function(self, where: Any) -> tuple[tuple[str, str], OperatorGraph]:
        graph = OperatorGraph()
        name = domain = ""
        for field, value in self._inside(where):
            if field == 1:
                name = self._text(value)
            elif field == 10:
                domain = self._text(value)
            elif field in {4, 5}:
                (graph.inputs if field == 4 else graph.outputs).append(self._text(value))
            elif field == 7:
                graph.operators.append(self._node(value, graph, 0))
            elif field == 11:
                self._attribute(value, Operator(), 0)
        return (domain, name), graph

    def _node(self, where: Any, graph: OperatorGraph, depth: int) -> Operator:
        node = Operator()
        for field, value in self._inside(where):
            if field == 1:
                node.inputs.append(self._text(value))
            elif field == 2:
                node.outputs.append(self._text(value))
            elif field == 3:
                node.name = self._text(value)
            elif field == 4:
                node.op = self._text(value)
            elif field == 5:
                self._attribute(value, node, depth)
            elif field == 7:
                node.domain = self._text(value)
        if node.op == "Constant" and node.outputs:
            graph.constants[node.outputs[0]] = next(iter(node.ints.values()), None)
        return node

    def _attribute(self, where: Any, node: Operator, depth: int) -> None:
        name = ""
        numbers: list[int] | None = None
        graphs: list[OperatorGraph] = []
        text: Any = None
        for field, value in self._inside(where, texts=9):
            if field == 1:
                name = self._text(value)
            elif field == 3:
                numbers = [_number(value)]
            elif field == 4:
                text = value
            elif field == 5:
                _, numbers = self._tensor(value)
            elif field == 10:
                self._tensor(value)
            elif field in {6, 11}:
                graphs.append(OperatorGraph())
                self._graph(graphs[-1], value, depth + 1)
            elif field == 8:
                numbers = numbers or []
                numbers += self._numbers(value)
            elif field in {22, 23}:
                for part, inner in self._inside(value):
                    if part in {1, 2}:
                        self._tensor(inner)
        if numbers is not None:
            node.ints[name] = numbers
        if isinstance(text, tuple) and text[1] - text[0] <= _MAX_TEXT:
            node.texts[name] = self._text(text)
        for at, graph in enumerate(graphs):
            node.graphs[name if not at else f"{name}.{at}"] = graph

    def _tensor(self, where: Any) -> tuple[str, list[int] | None]:
        """Return the name of a tensor and, if it is a short list of whole numbers, these; note what file it is in."""
        name, kind, is_external = "", 0, False
        files: list[str] = []
        numbers: list[int] = []
        raw: Any = None
        for field, value in self._inside(where, texts=6):
            if field == 2:
                kind = _number(value)
            elif field == 7 and len(numbers) <= _MAX_TEXT:
                numbers += self._numbers(value)
            elif field == 8:
                name = self._text(value)
            elif field == 9:
                raw = value
            elif field == 13:
                told = dict(self._inside(value))
                if self._text(told.get(1)) == "location":
                    files.append(self._text(told.get(2)))
            elif field == 14:
                is_external = _number(value) == _EXTERNAL
        if is_external:
            self._files.update(files)
        if kind != _INT64 or is_external:
            return name, None
        if isinstance(raw, tuple):
            at, end = cast("tuple[int, int]", raw)
            if end - at > _MAX_TEXT:
                return name, None
            data = self._bytes((at, end))
            numbers = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(0, len(data), 8)]
        return name, numbers

    def _value(self, where: Any) -> tuple[str, int | None]:
        """Return the name of a value and how many axes it has, if that is told."""
        name = ""
        rank: int | None = None
        for field, value in self._inside(where):
            if field == 1:
                name = self._text(value)
            elif field == 2:
                for kind, inner in self._inside(value):
                    for part, shape in self._inside(inner) if kind == 1 else ():
                        if part == 2:
                            rank = sum(axis == 1 for axis, _ in self._inside(shape))
        return name, rank

    def _numbers(self, value: Any) -> list[int]:
        """Return the whole numbers of a repeated field, which come one by one or all together."""
        if isinstance(value, int):
            return [_number(value)]
        at, end = value
        if end - at > _MAX_TEXT:
            return []
        self._file.seek(at)
        found: list[int] = []
        while self._file.tell() < end:
            found.append(_number(self._varint()))
        return found

    def _text(self, where: Any) -> str:
        if where is None:
            return ""
        at, end = cast("tuple[int, int]", where) if isinstance(where, tuple) else (0, _MAX_TEXT + 1)
        if end - at > _MAX_TEXT:
            raise self._wrong(f"expected a text of at most {_MAX_TEXT} bytes as a name")
        return self._bytes((at, end)).decode(errors="surrogateescape")

    def _bytes(self, where: tuple[int, int]) -> bytes:
        self._file.seek(where[0])
        return self._file.read(where[1] - where[0])

    def _inside(self, where: Any, texts: int = 0) -> Iterator[tuple[int, Any]]:
        if not isinstance(where, tuple):
            raise self._wrong("it is not an ONNX file")
        return self._fields(*cast("tuple[int, int]", where), texts)

    def _fields(self, at: int, end: int, texts: int = 0) -> Iterator[tuple[int, Any]]:
        """Iterate over the fields of a message: their numbers, and a whole number each or where what is in it lies.

        Args:
            texts: Number of a repeated field whose texts nobody here asks for.
        """
        last = alike = 0
        while at < end:
            if not self._left:
                raise self._wrong(f"it has more than {MAX_FIELDS:,} fields")
            self._left -= 1
            self._file.seek(at)
            tag = self._varint()
            wire, field = tag & 7, tag >> 3
            if wire == 0:
                value: Any = self._varint()
                at = self._file.tell()
            elif wire == 2:
                size = self._varint()
                begin = self._file.tell()
                value, at = (begin, begin + size), begin + size
            elif wire in {1, 5}:
                begin = self._file.tell()
                at = begin + (8 if wire == 1 else 4)
                value = (begin, at)
            else:
                raise self._wrong("it is not an ONNX file")
            if at > end or not field:
                raise self._wrong("it is not an ONNX file, or incomplete")
            yield field, value
            alike = alike + 1 if tag == last else 0
            last = tag
            if field == texts and wire == 2:
                at = self._past_texts(at, end, tag)
            elif alike > _MAX_TEXT and wire != 2:
                at = self._past_numbers(at, end, tag)

    def _past_texts(self, at: int, end: int, tag: int) -> int:
        """Return where short texts with the same tag end, as the elements of a list have."""
        while at < end:
            chunk = self._bytes((at, min(at + _CHUNK, end)))
            place = 0
            while place + 1 < len(chunk) and chunk[place] == tag and chunk[place + 1] < 0x80:
                place += 2 + chunk[place + 1]
            at += place
            if not place or place + 1 < len(chunk):
                break
        if at > end:
            raise self._wrong("it is not an ONNX file, or incomplete")
        return at

    def _past_numbers(self, at: int, end: int, tag: int) -> int:
        """Return where numbers with the same tag end."""
        if tag >= 0x80:
            return at
        alike = re.compile(b"(?:" + re.escape(bytes([tag])) + _SCALARS[tag & 7] + b")*+", re.DOTALL)
        while at < end:
            chunk = self._bytes((at, min(at + _CHUNK, end)))
            found = alike.match(chunk)
            place = found.end() if found else 0
            at += place
            if not place or place < len(chunk) - _LONGEST:
                break
        return at

    def _varint(self) -> int:
        found = shift = 0
        while shift < 70:
            byte = self._file.read(1)
            if not byte:
                break
            found |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return found
            shift += 7
        raise self._wrong("it is not an ONNX file, or incomplete")

    def _wrong(self, why: str) -> ConfigError:
        return ConfigError(f"{self._name} cannot be loaded: {why}")


def _number(value: Any) -> int:
    """Return a whole number with its sign."""
    if not isinstance(value, int):
        return 0
    return value - (1 << 64) if value >= 1 << 63 else value
