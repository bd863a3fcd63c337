# SPDX-License-Identifier: Apache-2.0
"""`graph.pbtxt`: read into plain data, with the line of whatever a message may have to point at.

The text is read twice. protobuf says whether it is well-formed and what it means, but forgets where things stood; a
scan of its words says where each field stands.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec

from forebay.errors import ConfigError
from forebay.types.did_you_mean import nearest

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 64

_WORD: Final = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')|(?P<name>[A-Za-z_][\w./-]*)|(?P<mark>[{}<>\[\]:,;])""",
    re.ASCII,
)
_NO_FIELD: Final = re.compile(r'Message type "mediapipe\.(?P<type>\w+)" has no field named "(?P<field>[^"]*)"')
_NO_EXTENSION: Final = re.compile(r'Extension "(?P<name>[^"]*)" not registered')
_NO_QUOTE: Final = re.compile(r"String missing ending quote: '(?P<text>.*)'")
_NO_TYPE: Final = re.compile(r"Type (?P<name>\S+) not found")
_PORT: Final = re.compile(
    r"(?:(?P<tag>[A-Z_][A-Z0-9_]*):(?:(?P<index>\d{1,4}):)?)?(?P<name>[a-z_][a-z0-9_]*)", re.IGNORECASE
)
_QUEUE: Final = re.compile(r"^\s*#\s*OVMS_GRAPH_QUEUE_MAX_SIZE:(?P<size>.*)$", re.MULTILINE)


class StreamPort(msgspec.Struct, frozen=True):
    """`TAG:index:name` of a stream or a side packet.

    Attributes:
        tag: Its tag; empty without one.
        index: Its number among those with the same tag.
    """

    tag: str
    index: int
    name: str
    line: int

    @property
    def key(self) -> str:
        """Tag and index, as `tag_index` names them."""
        return f"{self.tag}:{self.index}"

    def __str__(self) -> str:
        """Write it as it was written."""
        return f"{self.tag}:{self.name}" if self.tag else self.name


class BackEdge(msgspec.Struct, frozen=True):
    """`input_stream_info`."""

    tag_index: str
    back_edge: bool
    line: int


class Handler(msgspec.Struct, frozen=True):
    """`input_stream_handler`: what it is called, and the sync sets it names."""

    name: str = "DefaultInputStreamHandler"
    sync_sets: tuple[tuple[str, ...], ...] = ()
    line: int = 1


class CalculatorNode(msgspec.Struct, frozen=True, kw_only=True):
    """A `node` of the file.

    Attributes:
        executor: Which of the graph's executors it runs on; empty for the usual one.
        options: Of its calculator, as `options` or `node_options` has them; None if it has none.
        lines: Where its fields stand, by their names, and entries of maps in its options, as `FIELD.KEY`.
    """

    name: str
    calculator: str
    inputs: tuple[StreamPort, ...]
    outputs: tuple[StreamPort, ...]
    side_inputs: tuple[StreamPort, ...]
    side_outputs: tuple[StreamPort, ...]
    handler: Handler
    infos: tuple[BackEdge, ...]
    executor: str
    options: Mapping[str, Any] | None
    max_in_flight: int
    line: int
    lines: Mapping[str, int]

    @property
    def shown(self) -> str:
        """What messages call it."""
        return f"node '{self.name}'" if self.name else f"the {self.calculator} without a name"


class GraphFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file, read; nothing is linked yet.

    Attributes:
        executors: Name, type and line of each.
    """

    path: Path
    inputs: tuple[StreamPort, ...]
    outputs: tuple[StreamPort, ...]
    side_inputs: tuple[StreamPort, ...]
    nodes: tuple[CalculatorNode, ...]
    handler: Handler | None
    executors: tuple[tuple[str, str, int], ...]
    queue_size: int
    lines: Mapping[str, int]

    def fail(self, line: int, message: str) -> NoReturn:
        """Refuse the file with a ConfigError that has the place."""
        raise ConfigError(f"{self.path}:{line}: {message}")


class FieldLines:
    """Where the fields of a text stand, by their paths: ("node", 2, "input_stream", 0)."""

    def __init__(self, text: str) -> None:
        """Scan a text; one that is not well-formed gives whatever comes of it, one that is too deep only its begin."""
        self.lines: dict[tuple[str | int, ...], int] = {}
        self.entries: dict[tuple[str | int, ...], str] = {}
        """The key of each entry of a map, as `FIELD.KEY`."""
        self.calculators: list[tuple[str, int]] = []
        self.depth = 0
        self.unclosed: list[int] = []
        """Lines of braces that nothing closes."""
        self._scan(text)

    def line(self, *path: str | int) -> int:
        """Return the line of a path, or of the nearest thing around it that stands in the text."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def _scan(self, text: str) -> None:
        path: tuple[str | int, ...] = ()
        counts: list[defaultdict[str, int]] = [defaultdict(int)]
        stack: list[tuple[str | int, ...]] = []
        field, in_list, line, end = "", False, 1, 0
        for found in _WORD.finditer(text):
            line += text.count("\n", end, found.start())
            end = found.start()
            word, kind = found.group(), found.lastgroup
            if kind == "name" and not in_list:
                field = word
                if word not in counts[-1]:
                    self.lines.setdefault((*path, word), line)
            elif kind == "text" and field:
                if field == "calculator":
                    self.calculators.append((word[1:-1], line))
                self.lines[*path, field, counts[-1][field]] = line
                if field == "key" and len(path) > 1:
                    self.entries[path] = f"{path[-2]}.{word[1:-1]}"
                counts[-1][field] += 1
            elif word in "{<" and kind == "mark":
                if self.depth > MAX_DEPTH:
                    return  # each path holds all that is around it
                stack.append(path)
                self.unclosed.append(line)
                path = (*path, field, counts[-1][field])
                self.lines[path] = line
                counts[-1][field] += 1
                counts.append(defaultdict(int))
                self.depth = max(self.depth, len(stack))
            elif word in "}>" and kind == "mark" and stack:
                path = stack.pop()
                self.unclosed.pop()
                counts.pop()
            elif word in "[]" and kind == "mark":
                in_list = word == "[" and _before(text, found.start()) == ":"


def _before(text: str, at: int) -> str:
    """Return what stands before a place, but for blanks."""
    while at and text[at - 1].isspace():
        at -= 1
    return text[at - 1 : at]


def read_graph(path: Path, calculators: Mapping[str, str | None]) -> GraphFile:
    """Read a file.

    Args:
        calculators: Those there are, and the message of the options of each.

    Raises:
        ConfigError: If it is not there, or not well-formed, with the line.
    """
    text = _text(path)
    places = FieldLines(text)
    if places.depth > MAX_DEPTH:
        raise ConfigError(f"{path}: it is more than {MAX_DEPTH} levels deep")
    for name, line in places.calculators:
        if name not in calculators:
            raise ConfigError(f"{path}:{line}: unknown calculator '{name}'{meant(name, calculators, 'Calculator')}")
    return _Reader(path, text, places, calculators).read()


class _Reader:
    def __init__(self, path: Path, text: str, places: FieldLines, calculators: Mapping[str, str | None]) -> None:
        self._path = path
        self._text = text
        self._places = places
        self._calculators = calculators

    def read(self) -> GraphFile:
        graph = self._parsed()
        top = self._places
        nodes = tuple(self._node(index, node) for index, node in enumerate(graph.node))
        handler = self._handler(graph.input_stream_handler, "input_stream_handler", 0)
        return GraphFile(
            path=self._path,
            inputs=self._ports(graph.input_stream, "input_stream"),
            outputs=self._ports(graph.output_stream, "output_stream"),
            side_inputs=self._ports(graph.input_side_packet, "input_side_packet"),
            nodes=nodes,
            handler=handler if graph.HasField("input_stream_handler") else None,
            executors=tuple(
                (one.name, one.type, top.line("executor", number)) for number, one in enumerate(graph.executor)
            ),
            queue_size=self._queue_size(),
            lines={field: top.line(field) for field in ("input_stream", "output_stream")},
        )

    def _parsed(self) -> Any:
        from google.protobuf import text_format
        from google.protobuf.message import Error

        from forebay.surfaces.ovms.descriptors import message, pool

        graph = message("CalculatorGraphConfig")()
        try:
            text_format.Parse(self._text, graph, descriptor_pool=pool())  # pyright: ignore[reportUnknownMemberType]
        except text_format.ParseError as error:
            self._misread(error)
        except (Error, ValueError, RecursionError) as error:
            raise ConfigError(f"{self._path}: it cannot be read: {error}") from None
        return graph

    def _misread(self, error: Any) -> NoReturn:
        from forebay.surfaces.ovms.descriptors import OPTIONS, message

        said, line = re.sub(r"^\d+:\d+ : ", "", str(error)), error.GetLine()
        if found := _NO_FIELD.search(said):
            fields = message(found["type"]).DESCRIPTOR.fields_by_name
            said = f"unknown field '{found['field']}' in {found['type']}{meant(found['field'], fields)}"
        elif (found := _NO_EXTENSION.search(said)) or (found := _NO_TYPE.search(said)):
            name = found["name"].removeprefix("mediapipe.").removesuffix(".ext")
            line = line or self._line_of(name)
            known = (*OPTIONS, "SyncSetInputStreamHandlerOptions", "ThreadPoolExecutorOptions")
            said = f"there are no options '{name}' here{meant(name, known)}"
        elif found := _NO_QUOTE.search(said):
            said = f"the text '{found['text'][:100]}' has no closing quote on its line"
        elif self._places.unclosed and 'Expected "' in said:
            said = f"the '{{' of line {self._places.unclosed[0]} is not closed: {said}"
        raise ConfigError(f"{self._path}:{line or 1}: {said}") from None

    def _line_of(self, word: str) -> int:
        before, found, _ = self._text.partition(word)
        return before.count("\n") + 1 if found else 1

    def _node(self, index: int, node: Any) -> CalculatorNode:
        place = ("node", index)
        line = self._places.line(*place)
        if not node.calculator:
            raise ConfigError(f"{self._path}:{line}: the node has no calculator")
        fields = ("calculator", "name", "input_stream", "output_stream", "options", "node_options", "executor")
        return CalculatorNode(
            name=node.name,
            calculator=node.calculator,
            inputs=self._ports(node.input_stream, *place, "input_stream"),
            outputs=self._ports(node.output_stream, *place, "output_stream"),
            side_inputs=self._ports(node.input_side_packet, *place, "input_side_packet"),
            side_outputs=self._ports(node.output_side_packet, *place, "output_side_packet"),
            handler=self._handler(node.input_stream_handler, *place, "input_stream_handler", 0),
            infos=tuple(
                BackEdge(info.tag_index, info.back_edge, self._places.line(*place, "input_stream_info", number))
                for number, info in enumerate(node.input_stream_info)
            ),
            executor=node.executor,
            options=self._options(node, place),
            max_in_flight=node.max_in_flight,
            line=line,
            lines={field: self._places.line(*place, field) for field in fields}
            | {entry: self._places.line(*at) for at, entry in self._places.entries.items() if at[:2] == place},
        )

    def _options(self, node: Any, place: tuple[str | int, ...]) -> Mapping[str, Any] | None:
        """Return the options of a node as plain data, in whichever of its two places they stand."""
        from google.protobuf.json_format import MessageToDict

        from forebay.surfaces.ovms.descriptors import extension, message

        if node.calculator not in self._calculators:
            return None  # whoever lays out the graph says so, with the nearest name
        wanted = self._calculators[node.calculator]
        found: Any = None
        for number, packed in enumerate(node.node_options):
            name = packed.type_url.rpartition("/")[2].removeprefix("mediapipe.")
            if name != wanted:
                line = self._places.line(*place, "node_options", number)
                what = f"{node.calculator} takes {wanted}" if wanted else f"{node.calculator} has no options"
                raise ConfigError(f"{self._path}:{line}: the options are {name}; {what}")
            found = message(name).FromString(packed.value)
        if wanted is not None and found is None and node.options.HasExtension(extension(wanted)):
            found = node.options.Extensions[extension(wanted)]
        return None if found is None else MessageToDict(found, preserving_proto_field_name=True)

    def _handler(self, config: Any, *place: str | int) -> Handler:
        from forebay.surfaces.ovms.descriptors import extension

        options = config.options.Extensions[extension("SyncSetInputStreamHandlerOptions")]
        sets = tuple(tuple(one.tag_index) for one in options.sync_set)
        return Handler(config.input_stream_handler or Handler().name, sets, self._places.line(*place))

    def _ports(self, written: Any, *place: str | int) -> tuple[StreamPort, ...]:
        return tuple(self._numbered(cast("list[str]", list(written)), place))

    def _numbered(self, written: list[str], place: tuple[str | int, ...]) -> Iterator[StreamPort]:
        what = str(place[-1])
        seen: set[tuple[str, int]] = set()
        untagged = itertools.count()  # these are numbered among themselves, wherever they stand between others
        for number, one in enumerate(written):
            line = self._places.line(*place, number)
            found = _PORT.fullmatch(one)
            if found is None:
                raise ConfigError(
                    f"{self._path}:{line}: {what}: expected 'name', 'TAG:name' or 'TAG:index:name', got {one[:100]!r}"
                )
            tag = found["tag"] or ""
            index = int(found["index"] or 0) if tag else next(untagged)
            if (tag, index) in seen:
                msg = f"{what} has the tag '{tag}' twice; give each an index: '{tag}:0:name', '{tag}:1:name'"
                raise ConfigError(f"{self._path}:{line}: {msg}")
            seen.add((tag, index))
            yield StreamPort(tag, index, found["name"], line)

    def _queue_size(self) -> int:
        """Return how many graphs the original would keep ready, as a comment says; -1 for as many as it likes."""
        found = _QUEUE.search(self._text)
        if found is None:
            return 0
        size = found["size"].strip()
        if size == "AUTO" or (size.isascii() and size.isdigit()):
            return -1 if size == "AUTO" else int(size[:9])
        line = self._text.count("\n", 0, found.start()) + 1
        msg = f"OVMS_GRAPH_QUEUE_MAX_SIZE: expected AUTO or a whole number >= 0, got '{size[:40]}'"
        raise ConfigError(f"{self._path}:{line}: {msg}")


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be read: {error.strerror}") from error
    except ValueError:
        raise ConfigError(f"{path}: not valid UTF-8") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_BYTES} bytes, got {len(raw)}")
    if not text.strip():
        raise ConfigError(f"{path}:1: expected a graph with input_stream, output_stream and a node, got an empty file")
    return text


def meant(word: str, known: Iterable[str], end: str = "") -> str:
    """Return the end of a sentence about a word that nobody knows: the nearest known one, else all of them.

    Args:
        end: How all of them end, which makes none of them alike.
    """
    by_lower = {name.removesuffix(end).lower(): name for name in known}
    hint = nearest(word.removesuffix(end).lower() if end else word, by_lower)
    there = ", ".join(sorted(by_lower.values())) or "none"
    return f"; did you mean '{by_lower[hint]}'?" if hint else f"; there is {there}"
