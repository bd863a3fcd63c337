# SPDX-License-Identifier: Apache-2.0
"""The border of a composition: makes its inputs from the bytes of a request, and bytes of an answer from its results.

Both happen once a request, so they belong to the graph and to none of its nodes. What is small is done on the loop,
where a hop to a thread would cost more than the work; what is large goes to a thread, as it would hold up everybody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import BadOutcome, Cancelled, ConfigError, ForebayError, Unavailable, ValidationError
from forebay.graph.values import loaded
from forebay.serving.models.annotations import untold_by_openai
from forebay.serving.models.answer_writing import write_result
from forebay.serving.models.outputs import Held
from forebay.serving.models.sample_errors import refusal
from forebay.serving.models.schema import WRITTEN, WireType
from forebay.serving.models.tensor_codec import codec_of
from forebay.serving.tensor_face import TENSORS
from forebay.types.call import ROWS, Failure, Item, Media, Outcome, Request, written_in
from forebay.types.failures import trace_of, words_of
from forebay.types.first_use import known
from forebay.workers.pool import Pool, PoolStatistics
from forebay.workers.user_calls.user_code import attempt, caught
from forebay.workers.wire.objects import Packed

if TYPE_CHECKING:
    from forebay.graph.composition.compose import Composition
    from forebay.graph.composition.node_signature import NodeInput
    from forebay.graph.pool import GraphPool
    from forebay.types.batch import Done, Entry, EntryBatch, Inside

LARGE_BYTES: Final = 64 * 1024
"""From here on a body or a result is decoded or encoded in a thread."""

_THREADS: Final = 2
_FIELD_BYTES: Final = 16
"""What a plain value counts for where sizes are estimated."""


class Wire:
    """Decodes the requests of a composition and encodes its answers.

    A composition of one parameter takes it as the whole body; one of several takes an object with these fields.
    Parameters that are keyword-only stand in the query instead.

    Attributes:
        given: Type of the body.
        answer: Type of the answer, where it does not bring a media type of its own.
        query: Types of the parameters in the query, by name.
        tensors: What tensors it takes and gives.
        streams: Whether answers come in parts.
    """

    def __init__(self, composition: Composition) -> None:
        """Read the types of the composition; raises a `ConfigError` if they cannot travel."""
        graph = self._graph = composition.graph
        self.streams = graph.streams
        self._name = composition.name
        self._in_query = {name: port for name, port in graph.inputs.items() if port.in_query}
        self.query = {name: WireType(port.annotation) for name, port in self._in_query.items()}
        self._in_body = {name: port for name, port in graph.inputs.items() if not port.in_query}
        _check_query(composition, self._in_query, self._in_body)
        self._only = next(iter(self._in_body)) if len(self._in_body) == 1 else None
        annotation = self._in_body[self._only].annotation if self._only is not None else _object(composition)
        try:
            self.given = WireType(annotation)
            self.answer = WireType(graph.result, "output")
            if why := untold_by_openai(self.given, self.answer, streams=graph.streams):
                raise ConfigError(why)
        except ConfigError as error:
            msg = f"{composition.place}: the composition '{composition.name}' cannot be served: {error.message}"
            raise ConfigError(msg) from error
        self._tensors = codec_of(self.given, self.answer)
        self.tensors = self._tensors.face
        self._held = Held(graph.declared if composition.settings.check_outputs else Any)
        self._decode = {name: self.given.decoder(name) for name in ("json", "msgpack")}
        self._encode = {name: self.answer.encoder(name) for name in WRITTEN}

    def read(self, item: Item) -> dict[str, Any]:
        """Return the value of each input.

        Raises:
            InvalidRequest: If the body cannot be read; ValidationError if it has the wrong type.
        """
        if item.params["in"] == TENSORS:
            (body,) = self._tensors.decode(item.body, item.params, 1)
        else:
            held = item.body[0] if ROWS in item.params else item.body
            body, error = caught(self._decode[item.params["in"]], held)
            if error is not None:
                try:
                    raise refusal(error, held, given=self.given) from None
                finally:
                    del error  # its frames hold this one, and with it the body: a circle
        values = {name: _in_query(name, port, item.params) for name, port in self._in_query.items()}
        if self._only is not None:
            return {self._only: body, **values}
        return {**{name: getattr(body, name) for name in self._in_body}, **values}

    def write(self, item: Item, results: Mapping[str, Any]) -> Outcome:
        """Return the bytes of the answer, the answer that knows its media type, or tensors.

        Raises:
            BadOutcome: If the results cannot be sent.
        """
        value = self._graph.value_of(loaded(results))
        # What a branch that was not taken leaves out is no fault of its type.
        wrong = self._held.misfit(value) if results.keys() >= self._graph.spec.outputs.keys() else None
        if wrong is not None:
            raise BadOutcome(f"a result of '{self._name}' is not what it declares: {wrong}")
        write, raw = partial(self._body, item), self.answer.raw
        written, error = caught(lambda: write_result(value, written_in(item.params), write, is_alone=True, is_raw=raw))
        if error is None:
            return [written] if ROWS in item.params else written
        if isinstance(error, ForebayError):
            raise error
        try:
            raise BadOutcome(f"a result of '{self._name}' cannot be encoded: {words_of(error)}", trace=trace_of(error))
        finally:
            del error  # see `read`

    def _body(self, item: Item, value: Any, format: str) -> Any:
        if format == TENSORS:
            return self._tensors.encode([value], item.params)
        return value if type(value) is Media else self._encode[format](value)


class WirePool(Pool):
    """A graph whose requests and answers are bytes: a `Pool` around its `GraphPool`.

    Lives on one event loop; nothing here is thread-safe but what it hands to its threads.
    """

    def __init__(self, wire: Wire, graph: GraphPool, *, slots: int) -> None:
        """Put a border around a graph; `slots` requests may be in progress, from decoding to encoding."""
        super().__init__()
        self.graph = graph
        self.places = graph.places
        self._wire = wire
        self._slots = slots
        self._inside: dict[EntryBatch, Done] = {}
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="forebay-wire")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    async def start(self) -> None:
        """Bring up the workers of every node; raises a `ModelError` if one could not be loaded."""
        await self.graph.start()
        self.idle = self._slots
        self._on_idle()

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Let a request, the only entry of its batch, in."""
        self.idle -= 1
        self._inside[batch] = done
        request: Request = batch.entries[0]
        body: Any = request.body
        size = sum(map(len, cast("list[Any]", body))) if type(body) is list else len(body)
        if self._wire.given.raw or size < LARGE_BYTES:
            read = attempt(self._wire.read, request)
            if type(read) is Failure:
                # `done` would come back here with the next request before this one has returned.
                asyncio.get_running_loop().call_soon(self._end, batch, read)
                return
            request.body = read
            self.graph.submit(batch, self._left)
        else:
            self._spawn(self._enter(batch, request))

    def inside(self) -> Inside | None:
        """Return what predicts how long entries take, as the graph does."""
        return self.graph.inside()

    def whereabouts(self, entry: Entry) -> str:
        """Tell where a request is and at what, as the graph does; empty while it is decoded or encoded."""
        return self.graph.whereabouts(entry)

    async def stop(self, grace_s: float) -> None:
        """Let requests end within `grace_s`, then end the workers of all nodes."""
        self._is_stopping = True
        self.idle = 0
        started = time.monotonic()
        await self._settle(grace_s)
        await self.graph.stop(max(grace_s - (time.monotonic() - started), 0.0))
        await self._settle(max(grace_s - (time.monotonic() - started), 0.0))
        self._threads.shutdown(wait=False, cancel_futures=True)
        for task in self._tasks:
            task.cancel()
        for batch in list(self._inside):
            self._end(batch, Failure(Unavailable("the server stopped before the graph answered")))

    def statistics(self) -> PoolStatistics:
        """Return a snapshot, of the graph's workers."""
        return self.graph.statistics()

    async def _settle(self, grace_s: float) -> None:
        """Let what is being decoded or encoded in threads come to its end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=grace_s)

    async def _enter(self, batch: EntryBatch, request: Request) -> None:
        """Decode a large body, then let its request into the graph."""
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._threads, attempt, self._wire.read, request)
        if type(body) is Failure:
            self._end(batch, body)
            return
        request.body = body
        if batch.cancelled:
            self._end(batch, Failure(Cancelled("the client went away")))
        elif batch in self._inside:
            self.graph.submit(batch, self._left)

    def _left(self, batch: EntryBatch, outcomes: Any) -> None:
        """Take what came out of the graph."""
        outcome = outcomes[0]
        if type(outcome) is Failure or self._wire.streams:  # parts were written by the node that made them
            self._end(batch, outcome)
            return
        is_small = self._wire.answer.raw or attempt(_is_small, outcome)  # it asks objects of the user's
        if type(is_small) is Failure:
            self._end(batch, is_small)
        elif is_small:
            self._end(batch, self._written(batch, outcome))
        else:
            self._spawn(self._leave(batch, outcome))

    async def _leave(self, batch: EntryBatch, results: Mapping[str, Any]) -> None:
        """Encode a large result."""
        loop = asyncio.get_running_loop()
        self._end(batch, await loop.run_in_executor(self._threads, self._written, batch, results))

    def _written(self, batch: EntryBatch, results: Mapping[str, Any]) -> Outcome:
        return attempt(self._wire.write, batch.entries[0], results)

    def _end(self, batch: EntryBatch, outcome: Outcome) -> None:
        done = self._inside.pop(batch, None)
        if done is None:
            return
        self.idle += not self._is_stopping
        done(batch, [outcome])

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_query(composition: Composition, in_query: Mapping[str, NodeInput], in_body: Mapping[str, NodeInput]) -> None:
    where = f"{composition.place}: the composition '{composition.name}'"
    if not in_body:
        msg = f"{where} has only keyword-only parameters, which come from the query; add one for the body"
        raise ConfigError(msg)
    for name, port in in_query.items():
        if not port.is_optional:
            raise ConfigError(
                f"{where}: '{name}' is keyword-only and stands in the query, which may leave it out; give it a default"
            )


def _in_query(name: str, port: NodeInput, params: Mapping[str, Any]) -> Any:
    """Return what the query says, or the default; raises a `ValidationError` if it has the wrong type."""
    if name not in params:
        return port.default
    try:
        return msgspec.convert(params[name], known(port.annotation), strict=False)
    except msgspec.ValidationError as error:
        raise ValidationError(f"?{name}= is {params[name]!r:.100}: {error}", detail={"path": f"?{name}"}) from None


def _object(composition: Composition) -> type:
    """Return a class with a field for each parameter in the body, for msgspec and pydantic alike."""
    fields: list[Any] = []
    in_body = {name: port for name, port in composition.graph.inputs.items() if not port.in_query}
    for name, port in sorted(in_body.items(), key=lambda item: item[1].is_optional):
        default = dataclasses.field(default_factory=lambda port=port: port.default)
        fields.append((name, port.annotation, default) if port.is_optional else (name, port.annotation))
    title = "".join(word.capitalize() for word in composition.name.replace("_", "-").split("-"))
    return dataclasses.make_dataclass(f"{title}Request", fields)


def _is_small(value: Any) -> bool:
    """Estimate whether a value takes less than `LARGE_BYTES` as bytes, without looking at more than that much of it."""
    left = LARGE_BYTES
    todo: list[Any] = [value]
    while todo and left > 0:
        value = todo.pop()
        left -= _FIELD_BYTES
        if isinstance(value, str | bytes | bytearray):
            left -= len(value)
        elif isinstance(value, list | tuple | set | frozenset):
            members = cast("list[Any]", value)
            left -= len(members)
            todo += members if left > 0 else ()
        elif isinstance(value, dict):
            members = cast("dict[Any, Any]", value)
            left -= len(members)
            todo += members.values() if left > 0 else ()
        elif isinstance(value, Packed):
            left -= sum(memoryview(part).nbytes for part in value.parts)
        elif (size := getattr(value, "nbytes", None)) is not None:
            left -= size
        else:
            todo += _members(value)
    return left > 0


def _members(value: Any) -> list[Any]:
    names = getattr(value, "__struct_fields__", None)
    if names is not None:
        return [getattr(value, name, None) for name in names]
    return list(getattr(value, "__dict__", {}).values())
