# SPDX-License-Identifier: Apache-2.0
"""A function that reads like the picture of a graph: each node it calls is a box, each value an arrow.

    @compose
    def ocr(image: bytes) -> Page:
        picture = decode(image)
        boxes = detect(picture)
        return layout(boxes, read.map(crop(picture, boxes)))

To draw the graph the function runs once, with symbols instead of values. Called with values, it runs like any other
function. That needs no server, and the graph must give the same results.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, cast, overload

import msgspec

from forebay.errors import ConfigError, RunnerFailed
from forebay.graph.composition.node import NodeDefinition
from forebay.graph.composition.node_signature import NodeInput, signature_of_function
from forebay.graph.composition.symbols import Drawing, Edge, NodeCall, Symbol, drawing, edge_of
from forebay.graph.composition.types_fit import fits, spell
from forebay.graph.spec import OUT, GraphSpec, NodeSpec, check
from forebay.graph.values import SKIP
from forebay.serving.models.model import Model, kebab, load_module
from forebay.types.names import endpoint_name, version_name
from forebay.types.settings import Checked, DeadlineMilliseconds, checked
from forebay.workers.user_calls.user_code import user_code

if TYPE_CHECKING:
    from forebay.workers.runner import Runner

Count = Annotated[int, msgspec.Meta(ge=1)]

_STREAMS: Final = {Iterator, Iterable, Generator, AsyncIterator, AsyncIterable, AsyncGenerator}


class GraphSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a composition says about itself; see `compose`."""

    name: Annotated[str, Checked(endpoint_name)]
    version: Annotated[str, Checked(version_name)]
    timeout_ms: Count
    deadline_ms: DeadlineMilliseconds | None
    max_in_flight: Count
    max_queue: Count
    check_outputs: bool


class Graph(msgspec.Struct, frozen=True, eq=False):
    """A composition, drawn.

    Attributes:
        spec: Its nodes and streams.
        calls: What each node of it is, by name.
        inputs: What the caller gives, by name.
        result: Type of what is returned.
        declared: The same, as the function is annotated; Any if it is not.
        shape: Whether that is one value, an object of several or an array of several.
        warnings: What is odd about it.
        streams: Whether its last node streams; `result` and `declared` are then the types of a part.
    """

    spec: GraphSpec
    calls: Mapping[str, NodeCall]
    inputs: Mapping[str, NodeInput]
    result: Any
    declared: Any
    shape: Literal["one", "object", "array"]
    warnings: list[str]
    streams: bool = False

    def value_of(self, results: Mapping[str, Any]) -> Any:
        """Return what the composed function returns, given what left the graph by output.

        A branch that was not taken leaves out its field of an object; one value, or one of an array, is then None.
        """
        if self.shape == "one":
            return results.get(OUT)
        if self.shape == "object":
            return {name: results[name] for name in self.spec.outputs if name in results}
        return [results.get(name) for name in self.spec.outputs]


class Composition:
    """A composed function; what `compose` makes.

    Attributes:
        function: What was written.
        settings: What was said.
        name: What it is served as.
    """

    def __init__(self, function: FunctionType, settings: GraphSettings) -> None:
        self.function = function
        self.settings = settings
        self.name: str = settings.name
        self.__doc__ = function.__doc__
        self.__module__ = function.__module__
        self._graph: Graph | None = None

    def __repr__(self) -> str:
        return f"<composition '{self.name}'>"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the function: on values here and now, or as a part of another composed function that calls this one."""
        return self.function(*arguments, **named) if drawing.get() is not None else self.run(*arguments, **named)

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Run the graph on values, without a server: one node after the other, in this thread.

        Returns:
            What the function returns; a branch that was not taken leaves out its field of a dict, else it is None.
        """
        result = self.function(*arguments, **named)
        if isinstance(result, dict):
            return {name: value for name, value in cast("dict[str, Any]", result).items() if value is not SKIP}
        if isinstance(result, tuple):
            return [None if value is SKIP else value for value in cast("tuple[Any, ...]", result)]
        return None if result is SKIP else result

    @property
    def graph(self) -> Graph:
        """The graph, drawn when it is first asked for.

        Raises:
            ConfigError: If it cannot be, with the place in the user's file.
        """
        if self._graph is None:
            self._graph = _draw(self)
        return self._graph

    @property
    def place(self) -> str:
        """Where the function stands."""
        code = self.function.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


@overload
def compose(function: Callable[..., Any], /) -> Composition: ...
@overload
def compose(
    *,
    name: str | None = None,
    version: str = "1",
    timeout_ms: int = 30_000,
    deadline_ms: float | None = None,
    max_in_flight: int = 64,
    max_queue: int = 1024,
    check_outputs: bool = True,
) -> Callable[[Callable[..., Any]], Composition]: ...
def compose(  # noqa: PLR0913 - its settings
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    version: str = "1",
    timeout_ms: int = 30_000,
    deadline_ms: float | None = None,
    max_in_flight: int = 64,
    max_queue: int = 1024,
    check_outputs: bool = True,
) -> Composition | Callable[[Callable[..., Any]], Composition]:
    """Make a graph of a function that calls nodes.

    Args:
        function: It passes its parameters and the results of nodes to nodes, and returns some of them: one, a dict or a
            tuple. Left out where settings stand in a decorator: `@compose(timeout_ms=500)`.
        name: What it is served as; the function's name in kebab-case if None.
        version: Version reported in metrics.
        timeout_ms: Time a request has if it names none itself.
        deadline_ms: How long a request may take that names no time; one that would take longer is refused at once.
        max_in_flight: Requests inside the graph at a time.
        max_queue: Requests that may wait for that; one more is refused with 429.
        check_outputs: Whether an answer that is not of the type the function declares is an error.

    Raises:
        ConfigError: If a setting is wrong. What is wrong with the graph is found when it is drawn.
    """

    def composition(function: Callable[..., Any]) -> Composition:
        awaits = inspect.iscoroutinefunction(function)
        if not isinstance(function, FunctionType) or awaits:
            found = _shown(function)
            msg = f"compose(): expected a plain function that calls nodes, got {found}; write def ocr(image): ..."
            msg += " without `async`: it draws the graph and awaits nothing" if awaits else ""
            raise ConfigError(msg)
        settings = GraphSettings(
            name=kebab(function.__name__) if name is None else name,
            version=str(version),
            timeout_ms=timeout_ms,
            deadline_ms=deadline_ms,
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            check_outputs=check_outputs,
        )
        _check_settings(function, settings)
        return Composition(function, settings)

    return composition if function is None else composition(function)


def compositions_in(module: ModuleType) -> dict[str, Composition]:
    """Return the compositions of a module by the names they have there."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Composition)}


def nodes_in(module: ModuleType) -> dict[str, NodeDefinition]:
    """Return the nodes that a module names."""
    return {name: value for name, value in vars(module).items() if isinstance(value, NodeDefinition)}


def _check_settings(function: Callable[..., Any], settings: GraphSettings) -> None:
    try:
        checked(GraphSettings, msgspec.structs.asdict(settings))
    except ConfigError as error:
        raise ConfigError(f"compose({getattr(function, '__name__', function)!s}): {error.message}") from error


def _draw(composition: Composition) -> Graph:
    """Run the function on symbols."""
    where = composition.place
    signature = signature_of_function(composition.function, batched=False)
    symbols = {name: Symbol(Edge(name, port.annotation, f"'{name}'")) for name, port in signature.ports.items()}
    if not symbols:
        _refuse(composition, "has no parameter; what a request brings is its input")
    current = Drawing()
    token = drawing.set(current)
    try:
        with user_code():
            returned = composition.function(**symbols)
    except RunnerFailed as error:
        hint = _hint(composition.function, error.__cause__)
        msg = f"{where}: the graph of '{composition.name}' cannot be drawn: {error.message}{hint}"
        raise ConfigError(msg) from error.__cause__
    finally:
        drawing.reset(token)
    shape, outputs = _outputs(composition, returned)
    spec = GraphSpec(
        name=composition.name,
        inputs=tuple(symbols),
        outputs={name: edge.stream for name, edge in outputs.items()},
        nodes=tuple(map(_node_spec, current.calls)),
    )
    calls = {call.name: call for call in current.calls}
    definitions = dict.fromkeys(call.node for call in current.calls)
    warnings = [*signature.warnings, *(line for node in definitions for line in node.signature.warnings)]
    streams = _streams(composition, current.calls, shape, outputs)
    declared = _part_of(composition, signature.result) if streams else signature.result
    result = _result(composition, declared, shape, outputs)
    return Graph(spec, calls, signature.ports, result, declared, shape, [*warnings, *check(spec)], streams)


def _hint(function: Callable[..., Any], error: BaseException | None) -> str:
    """Return what was probably meant by who called a model and not a node of it."""
    name, called, _ = str(error).partition("() takes no arguments") if isinstance(error, TypeError) else ("", "", "")
    named = inspect.getclosurevars(function)
    target = {**named.globals, **named.nonlocals}.get(name) if called else None
    if not isinstance(target, type) or not issubclass(target, Model):
        return ""
    return f"; {name} is a model, and node({name}) makes a node of it that can be called here"


def _streams(composition: Composition, calls: Sequence[NodeCall], shape: str, outputs: Mapping[str, Edge]) -> bool:
    """Tell whether a graph streams: what streams must be its end, for its parts leave as they are made."""
    streaming = [call for call in calls if call.node.model_settings.streams]
    if not streaming:
        return False
    call = streaming[0]
    returned = [edge.stream for edge in outputs.values()]
    read = {edge.stream for other in calls for edge in other.inputs.values()}
    if len(streaming) > 1 or shape != "one" or returned != list(call.outputs.values()) or read & set(returned):
        _refuse(
            composition,
            f"has the node '{call.name}', which streams: its parts can only be the answer, so return what it gives, "
            "and that alone",
        )
    return True


def _part_of(composition: Composition, declared: Any) -> Any:
    """Return the type of a part, of what a function that streams is annotated to return."""
    if declared is Any:
        return Any
    arguments = typing.get_args(declared)
    if typing.get_origin(declared) not in _STREAMS or not arguments:
        _refuse(composition, f"is annotated to return {spell(declared)}, and streams; annotate Iterator[...] of a part")
    return arguments[0]


def _node_spec(call: NodeCall) -> NodeSpec:
    return NodeSpec(
        name=call.name,
        inputs={port: edge.stream for port, edge in call.inputs.items()},
        outputs=call.outputs,
        optional=call.optional,
    )


def _outputs(composition: Composition, returned: Any) -> tuple[Literal["one", "object", "array"], dict[str, Edge]]:
    if isinstance(returned, Symbol):
        return "one", {OUT: edge_of(returned)}
    if isinstance(returned, dict):
        named = cast("dict[Any, Any]", returned)
        shape: Literal["object", "array"] = "object"
    elif isinstance(returned, tuple):
        named = {str(number): value for number, value in enumerate(cast("tuple[Any, ...]", returned))}
        shape = "array"
    else:
        _refuse(composition, f"returns {_shown(returned)}; return the result of a node, or a dict or tuple of results")
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, Symbol):
            _refuse(composition, f"returns {_shown(value)} as {name!r}; return results of nodes, each with a name")
    return shape, {name: edge_of(value) for name, value in named.items()}


def _result(
    composition: Composition, declared: Any, shape: Literal["one", "object", "array"], outputs: Mapping[str, Edge]
) -> Any:
    """Return the type of what is returned: as it is annotated, else as the node says."""
    if shape == "one":
        edge = outputs[OUT]
        if not fits(edge.annotation, declared):
            _refuse(
                composition, f"is annotated to return {spell(declared)}, and {edge.source} is {spell(edge.annotation)}"
            )
        return edge.annotation if declared is Any else declared
    kind: Any = typing.get_origin(declared) or declared
    if isinstance(kind, type) and issubclass(kind, str | bytes | int | float):
        _refuse(composition, f"is annotated to return {spell(declared)}, and returns several values")
    return declared


def _refuse(composition: Composition, what: str) -> NoReturn:
    raise ConfigError(f"{composition.place}: the composition '{composition.name}' {what}")


def _shown(value: Any) -> str:
    return "nothing" if value is None else f"{value!r:.60}"


def from_file(path: str, composition: str, node: str, *, isolate_errors: bool = False, package: str = "") -> Runner:
    """Build the runner of a node of a composition in a file; the reference that worker processes are given."""
    found = compositions_in(load_module(Path(path), package))
    return found[composition].graph.calls[node].node.runner(isolate_errors=isolate_errors)
