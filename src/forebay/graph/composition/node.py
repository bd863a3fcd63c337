# SPDX-License-Identifier: Apache-2.0
"""What the nodes of a composition are: functions and models, with the settings they run with.

A node is called. In a composed function, while its graph is drawn, the call makes an edge; anywhere else it runs the
node on the values it is given, here and now, for one request.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Final, Literal, Union, cast, overload

import msgspec

from forebay.errors import ConfigError
from forebay.graph.composition.node_signature import NodeInput, NodeSignature, signature_of_function, signature_of_model
from forebay.graph.composition.runner import FirstRunner, NodeRunner, Results, StreamedNodeRunner, model_of
from forebay.graph.composition.symbols import Drawing, Edge, Symbol, drawing, edge_of, place
from forebay.graph.composition.types_fit import element_of, fits, spell
from forebay.graph.spec import OUT
from forebay.graph.values import SKIP
from forebay.serving.models.function_kinds import may_await
from forebay.serving.models.model import Model, settings_of
from forebay.types.call import Failure
from forebay.types.did_you_mean import meant
from forebay.types.settings import Checked, Workers, checked, keywords_of, only_keywords_of
from forebay.workers.runner import Runner, WorkerContext
from forebay.workers.user_calls.coroutines import is_on_loop
from forebay.workers.user_calls.joint_streams import Even, JointStreams

Count = Annotated[int, msgspec.Meta(ge=1)]
Kind = Literal["inline", "thread", "process"]


def _callable(value: Any) -> Any:
    if value is None or callable(value):
        return value
    raise ValueError("expected a function of the inputs or None")


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says about itself; see `node`."""

    name: str | None = None
    workers: Workers | None = None
    threads: Workers | None = None
    worker_kind: Kind | None = None
    max_batch_size: Count | None = None
    max_wait_ms: Annotated[float, msgspec.Meta(ge=0)] | None = None
    max_queue: Count | None = None
    timeout_ms: Annotated[float, msgspec.Meta(gt=0)] | None = None
    attempts: Count = 1
    batch_key: Annotated[Callable[..., Hashable] | None, Checked(_callable)] = None
    devices: Sequence[str] = ()
    outputs: Sequence[str] = ()
    batched: bool = False
    check_outputs: bool | None = None


class NodeDefinition:
    """A function or a model with the settings it runs with in graphs; what `node` makes.

    Attributes:
        target: The function or the class.
        settings: What was said.
        model: The class; of a function, one that calls it.
        model_settings: What the class says about itself.
        name: What graphs call it.
    """

    def __init__(self, target: Callable[..., Any], settings: NodeSettings) -> None:
        """Read the target.

        Raises:
            ConfigError: If it is neither a function nor a model that can be a node, or the settings do not go with it.
        """
        self.target = target
        self.settings = settings
        self.is_function = not _is_model(target)
        self.model = model_of(target, batched=settings.batched) if self.is_function else cast("type[Model]", target)
        self.__doc__ = target.__doc__
        self._signature: NodeSignature | None = None
        self._opened: Runner | None = None
        named = {"name": settings.name} if settings.name is not None else {}
        self.model_settings = settings_of(type(self.model.__name__, (self.model,), named), one_input=False)
        self.name = self.model_settings.name
        if "/" in self.name:
            msg = f"node '{self.name}' has a '/' in its name, which ends the name of its graph"
            raise ConfigError(f"{msg}; give it another one: node(..., name='{self.name.rpartition('/')[2]}')")
        self._check()

    def __repr__(self) -> str:
        return f"<node '{self.name}'>"

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Use the node: in a composed function for an edge, elsewhere to run it on these values.

        Returns:
            The result; of a node with several outputs, a tuple of them. `SKIP` stands for a result that there is not.

        Raises:
            ConfigError: If it is not given what it takes, or has coroutines and a loop runs here; with the place.
        """
        bound = self._bind(arguments, named)
        current = drawing.get()
        if current is not None:
            return self._record(current, bound, None)
        return self._run(bound)

    def map(self, *arguments: Any, **named: Any) -> Any:
        """Use the node for each element of a list, its first argument; what follows is given to every one of them.

        The elements are samples of their own: they share batches with each other and with those of other requests.

        Returns:
            The list of the results, in order.

        Raises:
            ConfigError: If it is not given what it takes; with the place.
        """
        bound = self._bind(arguments, named)
        spread = next(iter(bound), "")
        if self.settings.outputs or not bound:
            msg = f"{place()}: '{self.name}' cannot be mapped: it has several outputs, or was given no list"
            raise ConfigError(msg)
        if self.model_settings.streams:
            msg = f"{place()}: '{self.name}' streams, and cannot be mapped: a graph has one stream for each request"
            raise ConfigError(msg)
        current = drawing.get()
        if current is not None:
            return self._record(current, bound, spread)
        if self._lacks(bound) or bound[spread] is SKIP:
            return SKIP
        return [self._run({**bound, spread: element}) for element in bound[spread]]

    @property
    def signature(self) -> NodeSignature:
        """What it takes and returns; raises a `ConfigError` if that cannot be told."""
        if self._signature is None:
            self._signature = (
                signature_of_function(self.target, batched=self.settings.batched)
                if self.is_function and not self.model_settings.streams
                else signature_of_model(self.model)
            )
        return self._signature

    @property
    def runs_batches(self) -> bool:
        """Whether its code is given a batch at a time, and not one sample."""
        return self.settings.batched or not self.is_function

    @property
    def is_async(self) -> bool:
        """Whether it is made of coroutines, and may share a loop with others."""
        hooks = (getattr(self.model, hook, None) for hook in ("preprocess", "postprocess"))
        return self.model_settings.is_async or any(map(may_await, hooks))

    @property
    def key_of(self) -> Callable[..., Hashable] | None:
        """Gives the batch key of a sample from its inputs, in the order of the parameters."""
        return self.settings.batch_key or self.model_settings.batch_key

    def is_same(self, other: NodeDefinition) -> bool:
        """Tell whether two nodes may share their workers."""
        return self.target is other.target and self.settings == other.settings

    def runner(self, *, isolate_errors: bool = False) -> Runner:
        """Return what runs it in a worker.

        Args:
            isolate_errors: Halve batches of a model that fail as a whole, also if it does not ask for it.
        """
        if self.model_settings.streams:
            return StreamedNodeRunner(self.model, next(iter(self.signature.ports)))
        return self._value_runner(isolate_errors=isolate_errors)

    def _value_runner(self, *, isolate_errors: bool = False) -> NodeRunner:
        """Return what gives its results, or parts, as values."""
        ports = list(self.signature.ports) if self.runs_batches else None
        return NodeRunner(self.model, ports, self._results, isolate_errors=isolate_errors)

    @cached_property
    def _results(self) -> Results:
        outputs, checks = self.settings.outputs, self.settings.check_outputs
        types: dict[str, Any] = {}
        if self.model.check_outputs if checks is None else checks:
            types = {name: self.signature.result_of(name) for name in outputs} or {OUT: self.signature.result}
        return Results(f"node '{self.name}'", outputs, types)

    def _check(self) -> None:
        settings, where = self.settings, f"node '{self.name}'"
        if settings.batched and not self.is_function:
            msg = f"{where}: batched is for functions; {self.model.__qualname__} is a model, and is given lists anyway"
            raise ConfigError(msg)
        if self.model_settings.streams and (settings.outputs or settings.attempts > 1):
            said = "several outputs" if settings.outputs else "several attempts"
            msg = f"{where}: {self.model.__qualname__} streams, and its parts have left: it cannot have {said}"
            raise ConfigError(msg)
        if settings.batch_key is not None and not self.runs_batches:
            msg = f"{where}: batch_key needs a node that runs for batches: a model, or a function with batched=True"
            raise ConfigError(msg)
        if len(set(settings.outputs)) < len(settings.outputs):
            raise ConfigError(f"{where}: outputs are {settings.outputs}; each needs a name of its own")

    def _bind(self, arguments: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by port, in the order of the call."""
        ports = self.signature.ports
        bound = dict(zip(ports, arguments, strict=False))
        problem = ""
        if len(arguments) > len(ports):
            problem = f"it is given {len(arguments)}"
        for name, value in named.items():
            if name not in ports:
                problem = f"it has no '{name}'" + meant(name, ports)
            elif name in bound:
                problem = f"it is given '{name}' twice"
            bound[name] = value
        missing = [name for name, port in ports.items() if name not in bound and not port.is_optional]
        if problem or missing:
            takes = ", ".join(f"[{name}]" if port.is_optional else name for name, port in ports.items())
            msg = f"{place()}: '{self.name}' takes ({takes}), and {problem or f'it is not given {missing[0]!r}'}"
            raise ConfigError(msg)
        return bound

    def _record(self, current: Drawing, bound: Mapping[str, Any], spread: str | None) -> Any:
        """Draw a use of the node."""
        signature = self.signature
        inputs: dict[str, Edge] = {}
        for port, value in bound.items():
            inputs[port] = _edge(value, self.name, port)
            self._check_type(inputs[port], port, signature.ports[port], is_spread=port == spread)
        optional = frozenset(port for port in bound if signature.ports[port].is_optional and port != spread)
        outputs = self.settings.outputs
        if outputs:
            return tuple(current.add(self, inputs, optional, {port: signature.result_of(port) for port in outputs}))
        result = signature.result if spread is None else list[signature.result]
        return current.add(self, inputs, optional, {OUT: result}, spread)[0]

    def _check_type(self, edge: Edge, name: str, port: NodeInput, *, is_spread: bool) -> None:
        given = edge.annotation
        if is_spread:
            is_list, given = element_of(given)
            if not is_list:
                found = spell(edge.annotation)
                msg = f"{place()}: '{self.name}' is mapped over {edge.source}: expected a list, got {found}"
                raise ConfigError(msg)
        if not fits(given, port.annotation):
            each = "elements are" if is_spread else "type is"
            raise ConfigError(
                f"{place()}: {edge.source} does not fit '{self.name}': its {each} {spell(given)}, and "
                f"'{name}' takes {spell(port.annotation)}"
            )

    def _run(self, bound: Mapping[str, Any]) -> Any:
        """Run the node on values, in this thread."""
        inputs = {port: value for port, value in bound.items() if value is not SKIP}
        result: Any = SKIP if self._lacks(bound) else self._outcome(inputs)
        if not self.settings.outputs:
            return result
        values = result.by_port
        return tuple(values.get(output, SKIP) for output in self.settings.outputs)

    def _lacks(self, bound: Mapping[str, Any]) -> bool:
        """Tell whether an input that it needs has no value this time, or all that it is given have none."""
        skipped = [port for port, value in bound.items() if value is SKIP]
        ports = self.signature.ports
        return any(not ports[port].is_optional for port in skipped) or 0 < len(skipped) == len(bound)

    def _outcome(self, inputs: Mapping[str, Any]) -> Any:
        if (self.is_async or may_await(getattr(self.model, "load", None))) and is_on_loop():
            raise ConfigError(
                f"{place()}: '{self.name}' has coroutines, and is called where an event loop runs, which cannot wait "
                "for them; call it, or the composition, in a thread: `await asyncio.to_thread(function, ...)`"
            )
        if not self.runs_batches:  # not in a runner: who tests a function wants to see what it raises
            result = self.target(**inputs)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            return self._results.outcome(result)
        if self._opened is None:
            self._opened = self._value_runner()
            self._opened.open(WorkerContext())
        items = [_Item(inputs)]
        if self.model_settings.streams:
            return _parts_of(self._opened.run(items))
        outcomes: Any = self._opened.run(items)
        (outcome,) = outcomes
        if type(outcome) is Failure:
            raise outcome.error
        return outcome


def _parts_of(found: Any) -> list[Any]:
    """Return all parts of what a runner made of the one sample of a stream; raises what ends it."""
    steps = _followed(found) if isinstance(found, JointStreams) else found
    parts = [part for (part,) in steps if part is not None]
    failed = next((part for part in parts if type(part) is Failure), None)
    if failed is not None:
        raise failed.error
    return parts


def _followed(stream: JointStreams) -> Iterator[Sequence[Any]]:
    """Yield the steps of a stream that no worker has a seat for, and then its outcomes."""
    step = stream.together([stream])
    while True:
        made = step()
        if type(made) is Even:
            yield made.parts
            if made.over:
                return
            continue
        (stepped,) = made
        if stepped.parts is not None:
            yield stepped.parts
        if stepped.outcomes is not None:
            yield stepped.outcomes
            return


class _Either(NodeDefinition):
    """Takes whichever of its inputs came."""

    @property
    def signature(self) -> NodeSignature:
        """The signature: any number of inputs, of any type."""
        return NodeSignature({}, Any, [])

    def runner(self, *, isolate_errors: bool = False) -> Runner:
        """Return what runs it."""
        return FirstRunner()


class _Item(msgspec.Struct):
    """One request for a node that is run on the spot."""

    body: Any
    params: Mapping[str, Any] = {}
    size: int = 1


@overload
@keywords_of(NodeSettings)
def node(target: Callable[..., Any], /, **settings: Any) -> NodeDefinition: ...
@overload
@only_keywords_of(NodeSettings)
def node(**settings: Any) -> Callable[[Callable[..., Any]], NodeDefinition]: ...
def node(
    target: Callable[..., Any] | None = None, /, **settings: Any
) -> NodeDefinition | Callable[[Callable[..., Any]], NodeDefinition]:
    """Make a node of a function or of a `forebay.Model`, to be called in composed functions.

        detect = node(Detect, workers=2, max_batch_size=8)

        @node
        def crop(image: Image, boxes: list[Box]) -> list[Image]: ...

    A function takes the values of one request and returns its result. A parameter with a default is an input that may
    be left out, or that a branch may leave empty. `SKIP` as the result means that there is none this time: nodes that
    need it do not run for this request.

    Args:
        target: The function or the class. Left out where the settings stand in a decorator: `@node(workers=2)`.
        **settings: As follows.
        name: What graphs and metrics call it; the name of the function or model if None.
        workers: Its workers. What is None here, the model's class or the command line says.
        threads: Threads of each worker that call it.
        worker_kind: Where it runs; functions run in threads unless they or the command line say otherwise.
        max_batch_size: Samples in a batch. A function that is not `batched` runs for one after the other.
        max_wait_ms: Wait this long for a batch to fill while a worker is free.
        max_queue: Samples that may wait; one more is refused with 429.
        timeout_ms: Time of one attempt, from the moment that its inputs are there.
        devices: What its workers run on, one after the other, as `devices` of a model says.
        attempts: How often it is tried when it is not done in that time or its worker is lost.
        batch_key: A function of its inputs; only samples with equal keys share a batch. It runs in the server.
        outputs: Names of its results if they are several: the call returns as many values, and the function a mapping
            with those of them that there are.
        batched: Whether the function takes a list for each input and returns a list with a result for each sample. A
            sample that lacks an input with a default has None in its place.
        check_outputs: Whether a result that is not of the declared type is an error; None: what a model's class says.

    Raises:
        ConfigError: If a setting is wrong or does not go with the target.
    """

    def define(target: Callable[..., Any]) -> NodeDefinition:
        return NodeDefinition(target, _checked(target, settings))

    return define if target is None else define(target)


def _is_model(target: object) -> bool:
    return isinstance(target, type) and issubclass(target, Model)


def _checked(target: Callable[..., Any], given: Mapping[str, Any]) -> NodeSettings:
    where = f"node({getattr(target, '__name__', repr(target))})"
    if not callable(target) or isinstance(target, NodeDefinition):
        raise ConfigError(f"{where}: expected a function or a forebay.Model, got {type(target).__name__}")
    try:
        if isinstance(given.get("outputs"), str):
            raise ConfigError(f"outputs: expected a list of strings, got {given['outputs']!r}")
        return NodeSettings(**checked(NodeSettings, given))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}") from error


def either(*candidates: Any) -> Any:
    """Take whichever of several values came, where branches of a graph meet again; the first of them if several did.

    Raises:
        ConfigError: If it is given less than two values.
    """
    if len(candidates) < 2:
        raise ConfigError(f"{place()}: either() takes the results of at least two branches")
    current = drawing.get()
    if current is None:
        return next((value for value in candidates if value is not SKIP), SKIP)
    inputs = {str(number): _edge(value, "either", str(number)) for number, value in enumerate(candidates)}
    annotation = Union[tuple(edge.annotation for edge in inputs.values())]  # noqa: UP007 - as many as there are
    return current.add(_EITHER, inputs, frozenset(inputs), {OUT: annotation})[0]


def _edge(value: Any, name: str, port: str) -> Edge:
    if isinstance(value, Symbol):
        return edge_of(value)
    raise ConfigError(
        f"{place()}: '{name}' is given {value!r:.60} as '{port}'; a graph connects results: pass the result of a node "
        "or an input, and give the parameter a default for what never changes"
    )


def _first_of(**_candidates: Any) -> None:
    """Stands for `either` where a node needs a function."""


_EITHER: Final = _Either(_first_of, NodeSettings(name="either", worker_kind="inline", max_batch_size=64))
