# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for values that do not exist yet: a composed function is called with them while its graph is drawn.

A symbol can only be passed to a node or returned. Any other use would need a value that does not exist yet, so it is an
error that names the place in the user's file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from forebay.errors import ConfigError
from forebay.graph.spec import OUT

if TYPE_CHECKING:
    from forebay.graph.composition.node import NodeDefinition

_PACKAGE: Final = str(Path(__file__).parents[1])


class Edge(msgspec.Struct, frozen=True, eq=False):
    """What is known of a value before there is one.

    Attributes:
        stream: The stream that carries it.
        annotation: Its type, as the function that returns it says.
        source: Where it comes from, in words.
    """

    stream: str
    annotation: Any
    source: str


class Symbol:
    """Stands for a value."""

    __slots__ = ("_edge",)

    def __init__(self, edge: Edge) -> None:
        self._edge = edge

    def __repr__(self) -> str:
        return f"<{self._edge.source}>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself and its tools look for those, and take no for an answer
        _refuse(self, f"the attribute `{name}` is read")

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as with every class that has its own `==`


def edge_of(symbol: Symbol) -> Edge:
    """Return what a symbol stands for."""
    return symbol._edge  # noqa: SLF001  # pyright: ignore[reportPrivateUsage] - any other attribute would be the user's


class NodeCall(msgspec.Struct, eq=False):
    """One use of a node.

    Attributes:
        name: What the graph calls it.
        inputs: What it is given, by port.
        optional: Ports that may carry nothing.
        outputs: The stream of each of its results, by port.
        spread: The port whose elements are samples of their own; None if it is not mapped.
        place: Where it stands.
    """

    name: str
    node: NodeDefinition
    inputs: Mapping[str, Edge]
    optional: frozenset[str]
    outputs: Mapping[str, str]
    spread: str | None
    place: str


class Drawing:
    """A graph while its function runs."""

    def __init__(self) -> None:
        self.calls: list[NodeCall] = []
        """The uses of nodes so far, in their order."""

    def add(
        self,
        node: NodeDefinition,
        inputs: Mapping[str, Edge],
        optional: frozenset[str],
        results: Mapping[str, Any],
        spread: str | None = None,
    ) -> list[Symbol]:
        """Draw a use of a node.

        Args:
            inputs: What it is given, by port.
            optional: Ports that may carry nothing.
            results: The types of its results, by port.
            spread: The port whose elements are samples of their own.

        Returns:
            A symbol for each result.

        Raises:
            ConfigError: If another node, or the same with other settings, has its name.
        """
        where = place()
        name = self._claim(node, where)
        call = NodeCall(name, node, inputs, optional, {port: f"{name}.{port}" for port in results}, spread, where)
        self.calls.append(call)
        return [
            Symbol(Edge(call.outputs[port], annotation, f"the result of '{name}'" + (f" ('{port}')" * (port != OUT))))
            for port, annotation in results.items()
        ]

    def _claim(self, node: NodeDefinition, where: str) -> str:
        """Return the name of the next use of a node: its own, and from the second on with a number."""
        others = [call for call in self.calls if call.node.name == node.name]
        if others and not others[0].node.is_same(node):
            raise ConfigError(
                f"{where}: there is another node '{node.name}', at {others[0].place}, of other code or with other "
                "settings; make one node and call it twice, or give one of them a name: node(..., name='...')"
            )
        taken = {call.name for call in self.calls}
        name, number = node.name, 2
        while name in taken:
            name, number = f"{node.name}-{number}", number + 1
        return name


drawing: Final[ContextVar[Drawing | None]] = ContextVar("drawing", default=None)
"""The graph that is being drawn, if one is."""


def place() -> str:
    """Return the line outside of forebay that led here, as `file.py:12`."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return "somewhere" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _refuse(symbol: Symbol, what: str) -> NoReturn:
    source = edge_of(symbol).source
    instead = f"; {_INSTEAD[what]}" if what in _INSTEAD else ""
    raise ConfigError(
        f"{place()}: {source} has no value yet, and here {what}; a composed function runs once, to draw the graph, and "
        f"may only pass such values to nodes and return them: do this in a node of its own, `@node def ...`{instead}"
    )


def _refusal(what: str) -> Callable[..., NoReturn]:
    def refuse(symbol: Symbol, *_arguments: Any) -> NoReturn:
        _refuse(symbol, what)

    return refuse


_USES: Final = {
    "it is asked whether it is true": "bool",
    "it is iterated over": "iter reversed contains",
    "it is indexed": "getitem setitem delitem",
    "it is measured": "len",
    "it is called": "call",
    "it is compared": "eq ne lt le gt ge",
    "it is entered": "enter aenter await",
    "it is converted": "int float complex index bytes format",
    "it is calculated with": "add sub mul matmul truediv floordiv mod pow and or xor lshift rshift neg pos abs invert "
    "round radd rsub rmul rmatmul rtruediv rfloordiv rmod rpow rand ror rxor rlshift rrshift",
}
_ONE_OF: Final = "a node with `outputs=` decides which nodes run"
_INSTEAD: Final = {
    "it is asked whether it is true": _ONE_OF,
    "it is compared": _ONE_OF,
    "it is iterated over": "`NODE.map(values)` runs a node for each element, `outputs=` gives one several results",
}
for _what, _names in _USES.items():
    for _name in _names.split():
        setattr(Symbol, f"__{_name}__", _refusal(_what))
