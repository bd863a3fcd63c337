# SPDX-License-Identifier: Apache-2.0
"""YAML files that people write: plain data, and for everything in it the line it stands in.

A file is composed into nodes and the nodes are walked here, because the usual loaders lose three things a good message
needs: where a value stands, that a key was given twice, and how a number was written (`3.10` is a version, not 3.1).
Size, depth and the growth through aliases are limited before anything is built.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from pathlib import Path as FilePath
from typing import Any, cast

import yaml
from yaml.constructor import ConstructorError, SafeConstructor
from yaml.events import CollectionEndEvent, CollectionStartEvent, Event
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from forebay.errors import ConfigError
from forebay.server.config_document import Document, Mark, Path
from forebay.types.did_you_mean import meant

MAX_BYTES = 1 << 20
MAX_DEPTH = 64
MAX_NODES = 100_000

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
_CONTAINERS = {_TAG + "map", _TAG + "seq"}
# What the constructor raises for a scalar whose tag does not fit its text, such as `!!float x` or 2021-02-31.
_UNFIT = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def read(path: FilePath) -> bytes:
    """Return what is in a file that a person named; raises a `ConfigError` if it cannot be read or is too long."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        reason, hint = "it is a folder" if isinstance(error, IsADirectoryError) else error.strerror, ""
        if isinstance(error, FileNotFoundError):  # where a path is wrong otherwise, nobody can look beside it
            hint = meant(
                path.name, [one.name for end in ("yaml", "yml", "json") for one in path.parent.glob(f"*.{end}")]
            )
        raise ConfigError(f"{path} cannot be read: {reason}{hint}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{path}: expected at most {MAX_BYTES} bytes, got more")
    return content


def load(text: str | bytes, name: str) -> Document:
    """Read the one document of a YAML text.

    Args:
        text: The text; bytes are UTF-8.
        name: How messages call the file.

    Raises:
        ConfigError: One line with the place, for whatever is wrong.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = text.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{name}:{line}: byte {error.start} is not UTF-8") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{name}:1: expected at most {MAX_BYTES} characters, got {len(text)}")
    try:
        _check_depth(text, name)
        root = cast("Node | None", yaml.compose(text, Loader=yaml.CSafeLoader))  # pyright: ignore[reportUnknownMemberType]
    except yaml.YAMLError as error:
        raise _syntax_error(error, name) from error
    walk = _Walk(name)
    data = None if root is None else walk.value(root, ())
    return Document(name, data, walk.marks, walk.texts)


class _Walk:
    """Turns nodes into data and notes their places."""

    def __init__(self, name: str) -> None:
        self.marks: dict[Path, Mark] = {}
        self.texts: dict[Path, str] = {}
        self._name = name
        self._scalars = SafeConstructor()
        self._nodes = 0
        self._open: set[int] = set()

    def value(self, node: Node, path: Path) -> Any:
        self._count(node, len(path))
        if isinstance(node, ScalarNode):
            self.texts[path] = node.value
            return self._scalar(node)
        if not isinstance(node, MappingNode | SequenceNode) or node.tag not in _CONTAINERS:
            raise self._error(node, f"the tag {_short(node.tag)} is not supported; use plain mappings and lists")
        if id(node) in self._open:
            raise self._error(node, "an alias contains itself")
        self._open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, MappingNode) else self._list(node, path)
        self._open.discard(id(node))
        return value

    def _list(self, node: SequenceNode, path: Path) -> list[Any]:
        values: list[Any] = []
        for index, item in enumerate(node.value):
            self._put_mark((*path, index), item)
            values.append(self.value(item, (*path, index)))
        return values

    def _mapping(self, node: MappingNode, path: Path) -> dict[Hashable, Any]:
        values: dict[Hashable, Any] = {}
        for key_node, value_node in self._pairs(node):
            key = self._scalar(key_node)
            self._put_mark((*path, key), key_node)
            values[key] = self.value(value_node, (*path, key))
        return values

    def _pairs(self, node: MappingNode) -> Iterator[tuple[ScalarNode, Node]]:
        """Yield the keys of a mapping and of what it merges; its own keys win, then those of the first merged."""
        own: dict[Hashable, tuple[ScalarNode, Node]] = {}
        merged: list[Node] = []
        pairs: list[tuple[Node, Node]] = node.value
        for key_node, value_node in pairs:
            if not isinstance(key_node, ScalarNode):
                raise self._error(key_node, "a list or mapping cannot be a key")
            if key_node.tag == _MERGE:
                if merged:
                    raise self._error(key_node, "'<<' is given twice; merge a list: <<: [*a, *b]")
                merged = list(value_node.value) if isinstance(value_node, SequenceNode) else [value_node]
                continue
            key = self._scalar(key_node)
            if key in own:
                first = own[key][0].start_mark.line + 1
                raise self._error(key_node, f"{key_node.value}: the key is given twice, first in line {first}")
            own[key] = (key_node, value_node)
        yield from own.values()
        yield from self._merged(merged, set(own))

    def _merged(self, nodes: list[Node], seen: set[Hashable]) -> Iterator[tuple[ScalarNode, Node]]:
        for node in nodes:
            if not isinstance(node, MappingNode):
                raise self._error(node, "'<<' takes a mapping or a list of mappings")
            if id(node) in self._open:
                raise self._error(node, "an alias contains itself")
            self._open.add(id(node))
            for key_node, value_node in self._pairs(node):
                key = self._scalar(key_node)
                self._count(key_node, len(self._open))
                if key not in seen:
                    seen.add(key)
                    yield key_node, value_node
            self._open.discard(id(node))

    def _scalar(self, node: ScalarNode) -> Any:
        if node.tag in {_MERGE, _TAG + "value"}:  # a lone `<<` or `=` is just text
            return node.value
        if "\0" in node.value:
            raise self._error(node, f"{node.value[:40]!r} has a zero byte, which no name, path or address may have")
        try:
            return cast("Any", self._scalars.construct_object(node))  # pyright: ignore[reportUnknownMemberType]
        except ConstructorError as error:
            raise self._error(node, f"the tag {_short(node.tag)} is not supported") from error
        except _UNFIT as error:
            shown = node.value if len(node.value) <= 40 else node.value[:40] + "..."
            raise self._error(node, f"expected {_short(node.tag).lstrip('!')}, got {shown!r}") from error

    def _count(self, node: Node, depth: int) -> None:
        self._nodes += 1
        if self._nodes > MAX_NODES or depth > MAX_DEPTH:
            raise self._error(node, f"aliases unfold to more than {MAX_NODES} values or {MAX_DEPTH} levels")

    def _put_mark(self, path: Path, node: Node) -> None:
        self.marks[path] = Mark(node.start_mark.line + 1, node.start_mark.column + 1)

    def _error(self, node: Node, message: str) -> ConfigError:
        return ConfigError(f"{self._name}:{node.start_mark.line + 1}: {message}")


def _check_depth(text: str, name: str) -> None:
    """Refuse deep nesting before the composer, which recurses without a limit, sees it."""
    depth = 0
    events = yaml.parse(text, Loader=yaml.CSafeLoader)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    for event in cast("Iterator[Event]", events):
        if isinstance(event, CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise ConfigError(f"{name}:{event.start_mark.line + 1}: nested deeper than {MAX_DEPTH} levels")
        elif isinstance(event, CollectionEndEvent):
            depth -= 1


def _syntax_error(error: yaml.YAMLError, name: str) -> ConfigError:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = 1 if mark is None else mark.line + 1
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or "cannot be read"
    context = getattr(error, "context", None)
    return ConfigError(f"{name}:{line}: not valid YAML: " + (f"{context}, {problem}" if context else problem))


def _short(tag: str) -> str:
    return "!!" + tag.removeprefix(_TAG) if tag.startswith(_TAG) else tag
