# SPDX-License-Identifier: Apache-2.0
"""A graph as a pool: put behind an endpoint, it makes the graph answer requests like any model.

Each slot holds one request inside the graph. A request that finds no free slot waits in the endpoint's queue, so
admission, deadlines, cancellation, metrics and draining work as for every endpoint. Each node is an endpoint of its
own, with its queue and its workers, so that requests from all runs meet in its batches.

    Endpoint (one for the graph)  ->  GraphPool  ->  GraphRun, one a request
                                          |  a firing becomes a request to
                                          v
                                   Endpoint (one a node)  ->  thread, process or inline pool
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import BadOutcome, Cancelled, Code, ConfigError, ForebayError, TooLate
from forebay.graph.forecast import Forecast
from forebay.graph.plan import Plan, PlannedNode
from forebay.graph.run import Emission, Firing, GraphRun
from forebay.graph.values import Outputs, loaded
from forebay.types.call import Failure, Item, Outcome, Request
from forebay.types.failures import failure_of
from forebay.workers.pool import CREDIT, Pool, PoolStatistics
from forebay.workers.user_calls.user_code import attempt, user_code
from forebay.workers.wire.objects import Packed, open_outcome, pack

if TYPE_CHECKING:
    from forebay.graph.spec import GraphSpec
    from forebay.serving.endpoint import Endpoint
    from forebay.types.batch import Done, Entry, EntryBatch, Inside
    from forebay.workers.memory.landing import Places

log = logging.getLogger("forebay.graph")

_NEVER: Final = float("inf")

AGAIN: Final = frozenset({Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE})
"""Failures after which a node that has attempts left is tried again: a time-out, and a worker that was lost."""


class Node(msgspec.Struct, kw_only=True, eq=False):
    """How a node of a graph is run.

    Attributes:
        endpoint: Its queue and its workers; several nodes may share one.
        timeout_s: Time of one attempt, the queue included; None leaves it to the request's deadline.
        attempts: Tries in all; again only after a time-out or a lost worker.
        key_of: Gives the batch key from the inputs; runs on the loop.
        spread: Input port whose value is a list: each element is a sample of its own, and the result is the list of
            theirs.
        packs: Whether values travel to the workers in packed form, as they must where these are processes.
        streams: Whether it answers in parts; they are those of the graph's answer, as the workers have written them.
    """

    endpoint: Endpoint
    timeout_s: float | None = None
    attempts: int = 1
    key_of: Callable[[Mapping[str, Any]], Hashable] | None = None
    spread: str | None = None
    packs: bool = False
    streams: bool = False


class _Hop(Request, gc=False, eq=False):
    """The request to a node for one firing; `reply` leads back to the run."""

    run: _Run | None = None
    firing: Firing | None = None
    attempt: int = 1

    def root(self) -> Request:
        """Return the request that is inside the graph."""
        assert self.run is not None
        return self.run.entry.root()

    def may_wait(self) -> bool:
        """Tell whether it brings the elements of a list: the graph has let that in, however much of it there is."""
        return type(self.body) is list

    def place(self) -> str:
        """Return the node it is for, as the beginning of what is told of it there."""
        assert self.firing is not None
        return f"in '{self.firing.node.spec.name}' "


class PacketStream:
    """Packets that enter a graph while it runs: the body of a request whose answer comes in parts.

    Each packet that leaves the graph is a part, an `Emission`, as soon as it is there. The request is over once the
    stream was closed and nothing runs any more. Lives on the loop of the graph.

    Attributes:
        on_progress: Called whenever packets were worked off, with the lowest timestamp that anything still runs or
            waits at, and with `GraphRun.lacking`; what it raises ends the run.
        held: Parts that its client has not taken; while there are many, nothing further begins.
    """

    def __init__(
        self, on_progress: Callable[[int | None, Sequence[str]], object] = lambda _lowest, _lacking: None
    ) -> None:
        """Begin a stream; what is fed before the graph has room for it waits."""
        self.on_progress = on_progress
        self.waiting: deque[tuple[Mapping[str, Any], int]] = deque()
        self.is_closed = False
        self.held = 0
        self.on_fed: Callable[[], None] = lambda: None

    def feed(self, packets: Mapping[str, Any], timestamp: int) -> None:
        """Put a packet on each of these inputs."""
        self.waiting.append((packets, timestamp))
        self.on_fed()

    def close(self) -> None:
        """Say that nothing more comes."""
        self.is_closed = True
        self.on_fed()


class _Run(msgspec.Struct, eq=False):
    """A request inside the graph.

    Attributes:
        batch: What the endpoint's batcher handed over: the request alone.
        entry: The request.
        done: Called once with its outcome.
        state: Where it is.
        number: Rises with each request; nodes that go by rank serve the oldest first.
        results: What has left the graph, by output.
        hops: What nodes are working on.
        is_entering: Whether `submit` has not returned yet.
        stream: What feeds it, if its request is a stream.
        rows: How many rows each node has run for it; None while nobody states deadlines.
    """

    batch: EntryBatch
    entry: Any
    done: Done
    state: GraphRun
    number: int
    results: dict[str, Any]
    hops: set[_Hop]
    is_entering: bool = True
    stream: PacketStream | None = None
    rows: dict[PlannedNode, int] | None = None


def _whole_body(item: Item) -> Mapping[str, Any]:
    return item.body


def _results(_item: Item, results: Mapping[str, Any]) -> Outcome:
    return results


class GraphPool(Pool):
    """Runs requests through a graph. Lives on one event loop; nothing here is thread-safe."""

    def __init__(
        self,
        spec: GraphSpec,
        nodes: Mapping[str, Node],
        *,
        slots: int,
        decode: Callable[[Item], Mapping[str, Any]] = _whole_body,
        encode: Callable[[Item, Mapping[str, Any]], Outcome] = _results,
        hears_all: bool = False,
    ) -> None:
        """Describe the graph.

        Args:
            nodes: How each node is run, by name.
            slots: Requests that may be inside the graph at a time.
            decode: Turns a request into a value for each input of the graph, an absent one carries nothing; runs on the
                loop, and a `ForebayError` it raises is the answer.
            encode: Turns the results by output, those that came, into the outcome; as `decode`.
            hears_all: Whether a request goes on where a node has failed, so that its outcome does not depend on which
                node fails first: nodes behind the failure are passed over, and a join hands on that of its first port.

        Raises:
            ConfigError: If the graph is not well-formed or a node has no endpoint.
        """
        super().__init__()
        self.plan = Plan(spec)
        self.nodes = nodes
        missing = [node.spec.name for node in self.plan.nodes if node.spec.name not in nodes]
        if missing:
            raise ConfigError(f"graph '{spec.name}' does not say how node '{missing[0]}' is run")
        self._by_plan = {node: nodes[node.spec.name] for node in self.plan.nodes}
        self._streams = any(node.streams for node in nodes.values())
        self.places = self._places()
        self._slots = slots
        self._decode = decode
        self._encode = encode
        self._hears_all = hears_all
        self._runs: dict[Entry, _Run] = {}
        self._count = 0
        self._forecast: Forecast | None = None
        self._is_stopping = False
        self._empty: asyncio.Event | None = None

    @property
    def endpoints(self) -> list[Endpoint]:
        """The endpoints of the nodes, each once."""
        return list(dict.fromkeys(node.endpoint for node in self.nodes.values()))

    def _places(self) -> Places | None:
        """Return where requests land: where the only node that reads of them sees them; None if there are several."""
        readers = {node for stream in self.plan.inputs.values() for node, _ in stream.readers}
        return self._by_plan[readers.pop()].endpoint.places if len(readers) == 1 else None

    @property
    def in_flight(self) -> int:
        """Requests inside the graph."""
        return len(self._runs)

    async def start(self) -> None:
        """Bring up the workers of every node.

        Raises:
            ModelError: If one could not be loaded; those that came up are stopped again.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for endpoint in self.endpoints:
                    group.create_task(endpoint.start())
        except BaseExceptionGroup as errors:
            await self._drain_nodes(0.0)
            raise errors.exceptions[0] from None
        self.idle = self._slots
        self._on_idle()

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Let a request, the only entry of its batch, into the graph."""
        self.idle -= 1
        self._count += 1
        entry = batch.entries[0]
        stream = entry.body if type(entry.body) is PacketStream else None
        state = GraphRun(self.plan, streams=stream is not None or not self.plan.has_one_moment)
        run = _Run(batch, entry, done, state, self._count, {}, set(), stream=stream)
        if self._forecast is not None and stream is None:
            run.rows = {}
        self._runs[entry] = run  # before any node is asked: one that answers at once must find it
        batch.attempts += 1
        batch.on_cancel = lambda: self._abandon(run)
        if stream is not None:
            stream.on_fed = lambda: self._fed(run, stream)
            self._fed(run, stream)
            run.is_entering = False
            return
        try:
            with user_code():  # the decoder may be the user's
                given = self._decode(entry)
            if given.keys() != self.plan.inputs.keys():
                for stream in given.keys() - self.plan.inputs.keys():
                    state.feed(stream, 0, None)  # raises: there is no such input
            for stream in self.plan.inputs:
                if stream in given:
                    self._emit(run, state.feed(stream, 0, given[stream]))
                else:
                    state.skip(stream, 0)
            if not self.plan.has_one_moment:
                for stream in self.plan.inputs:
                    state.close_input(stream)
            self._launch(run)
        except Exception as error:  # noqa: BLE001 - a defect must not leave the request without an answer
            self._fail(run, failure_of(error).error)
        run.is_entering = False

    def inside(self) -> Inside | None:
        """Return what predicts how long requests take, by what waits at the nodes, whose queues keep deadlines then.

        None where a node may run several times for a request.
        """
        if self._forecast is None and self.plan.has_one_moment:
            deadlines = {node: one.endpoint.keep_deadlines() for node, one in self._by_plan.items()}
            self._forecast = Forecast(self.plan, deadlines)
        return self._forecast

    def whereabouts(self, entry: Entry) -> str:
        """Tell where a request is and at what, as `Endpoint.whereabouts`; empty if no node has it.

        Of several nodes it is the one that has had it for longest.
        """
        run = self._runs.get(entry)
        if run is None or not run.hops:
            return ""
        hop = min(run.hops, key=lambda hop: hop.arrived)
        assert hop.firing is not None
        return self._by_plan[hop.firing.node].endpoint.whereabouts(hop)

    async def stop(self, grace_s: float) -> None:
        """Let requests inside the graph end within `grace_s`, then end the workers of its nodes."""
        self._is_stopping = True
        started = time.monotonic()
        if self._runs and grace_s > 0:
            self._empty = asyncio.Event()
            try:
                await asyncio.wait_for(self._empty.wait(), grace_s)
            except TimeoutError:
                log.warning("the drain time is over; dropping %d requests inside the graph", len(self._runs))
        await self._drain_nodes(max(grace_s - (time.monotonic() - started), 0.0))
        self.idle = 0

    def statistics(self) -> PoolStatistics:
        """Return a snapshot: its slots, and the restarts and the liveness of all nodes' workers."""
        pools = [endpoint.pool.statistics() for endpoint in self.endpoints]
        is_alive = all(pool.can_answer for pool in pools)
        return PoolStatistics(
            slots=self._slots,
            idle=self.idle,
            restarts=sum(pool.restarts for pool in pools),
            alive=sum(pool.alive for pool in pools) if is_alive else 0,
        )

    async def _drain_nodes(self, grace_s: float) -> None:
        await asyncio.gather(*(endpoint.drain(grace_s) for endpoint in self.endpoints))

    def _fed(self, run: _Run, stream: PacketStream) -> None:
        """Put the packets of a stream into its run."""
        if run.entry not in self._runs:
            return
        try:
            while stream.waiting:
                packets, timestamp = stream.waiting.popleft()
                for name, value in packets.items():
                    self._emit(run, run.state.feed(name, timestamp, value))
            if stream.is_closed:
                for name in self.plan.inputs:
                    run.state.close_input(name)
            self._launch(run)
        except Exception as error:  # noqa: BLE001 - as in `submit`
            self._fail(run, failure_of(error).error)

    def _launch(self, run: _Run) -> None:
        """Hand everything that is due to its nodes; ends the run when nothing is."""
        state, stream = run.state, run.stream
        if stream is not None and stream.held > CREDIT:
            return  # `_released` goes on
        while firings := state.ready():
            for firing in firings:
                failure = _failure_in(firing.inputs) if self._hears_all else None
                if failure is None:
                    self._ask(run, firing, 1)
                else:
                    self._emit(run, state.complete(firing, dict.fromkeys(firing.node.outputs, failure)))
                if run.entry not in self._runs:
                    return  # it was refused at once, and has ended
        if stream is not None:
            stream.on_progress(state.lowest, state.lacking)
            if state.is_finished and stream.is_closed and run.entry in self._runs:
                self._end(run, None)
            return
        is_over = state.is_finished or (self.plan.ends_early and len(run.results) == len(self.plan.graph.outputs))
        if is_over and run.entry in self._runs:
            self._finish(run)

    def _ask(self, run: _Run, firing: Firing, attempt: int) -> None:
        node = self._by_plan[firing.node]
        entry = run.entry
        body: Any = firing.inputs
        size = 1
        if node.spread is not None:
            elements = _elements(firing, node.spread)
            if not elements:
                self._take(run, firing, [])
                return
            size = len(elements)
            body = [{**firing.inputs, node.spread: element} for element in elements]
        if node.packs:
            body = pack(body) if node.spread is None else [pack(sample) for sample in body]
        deadline = entry.deadline
        if node.timeout_s is not None:
            deadline = min(deadline, time.monotonic() + node.timeout_s)
        due = _NEVER
        if run.rows is not None and self._forecast is not None:
            run.rows[firing.node] = size
            due = entry.due - self._forecast.least_s(firing.node)
        hop = _Hop(
            body=body,
            reply=self._replied,
            params=entry.params,
            deadline=deadline,
            size=size,
            key=None if node.key_of is None else node.key_of(firing.inputs),
            rank=run.number,
            tenant=entry.tenant,
            due=due,
            run=run,
            firing=firing,
            attempt=attempt,
        )
        if node.streams:
            if node.timeout_s is None:
                hop.until = entry.until
            hop.on_part = lambda part, taken: self._hand(run, [part], taken)
            hop.on_bundle = lambda parts, taken: self._hand(run, parts, taken)
        run.hops.add(hop)
        node.endpoint.submit(hop)

    def _replied(self, hop: Request, outcome: Outcome) -> None:
        """Take what became of a firing."""
        assert isinstance(hop, _Hop)
        run, firing = hop.run, hop.firing
        assert run is not None
        assert firing is not None
        run.hops.discard(hop)
        if run.entry not in self._runs:
            return  # the run has ended; this was called off, or came too late to be
        try:
            if type(outcome) is Failure:
                self._try_again(run, firing, hop.attempt, outcome.error)
            else:
                self._take(run, firing, outcome)
                self._launch(run)
        except Exception as error:  # noqa: BLE001 - a defect must not leave the request without an answer
            self._fail(run, failure_of(error).error)

    def _try_again(self, run: _Run, firing: Firing, attempt: int, error: ForebayError) -> None:
        node = self._by_plan[firing.node]
        has_time = time.monotonic() < run.entry.deadline
        is_begun = run.batch.has_streamed  # the client has parts of this attempt, and would get them twice
        may_try = error.code in AGAIN and type(error) is not TooLate
        if attempt < node.attempts and may_try and has_time and not is_begun and not self._is_stopping:
            self._ask(run, firing, attempt + 1)
        elif self._hears_all:
            self._emit(run, run.state.complete(firing, dict.fromkeys(firing.node.outputs, Failure(error))))
            self._launch(run)
        else:
            self._fail(run, error)

    def _take(self, run: _Run, firing: Firing, outcome: Outcome) -> None:
        """Put a node's outcome on its streams."""
        node = firing.node
        if self._by_plan[node].streams:
            run.state.complete(firing, {})  # all that it had to say was said in parts
            return
        if self._by_plan[node].packs and type(outcome) is not Packed and outcome != []:
            outcome = open_outcome(outcome)
        if type(outcome) is Outputs:
            outputs = outcome.by_port
        elif node.port is not None:
            outputs = {node.port: outcome}
        else:
            ports = ", ".join(node.outputs) or "none"
            raise BadOutcome(
                f"node '{node.spec.name}' returned {type(outcome).__name__}; it must say which of its outputs: {ports}"
            )
        emissions = run.state.complete(firing, outputs)
        if emissions:
            self._emit(run, emissions)

    def _emit(self, run: _Run, emissions: list[Emission]) -> None:
        stream = run.stream
        if stream is None:
            for emission in emissions:
                run.results[emission.output] = emission.value
            return
        on_steps = run.batch.on_steps
        assert on_steps is not None
        for emission in emissions:
            stream.held += 1
            on_steps([[emission]], lambda: self._released(run, stream))

    def _hand(self, run: _Run, parts: Sequence[Any], taken: Callable[[], object]) -> None:
        """Hand parts of a node that streams to the client of the graph."""
        on_steps = run.batch.on_steps
        if on_steps is None:  # the run has ended
            taken()
            return
        run.batch.has_streamed = True
        on_steps([[part] for part in parts], taken)

    def _released(self, run: _Run, stream: PacketStream) -> None:
        """Go on once the client has room again."""
        stream.held -= 1
        # `_launch` stops above this, so it is asked once on the way down, not for each part.
        if stream.held == CREDIT and run.entry in self._runs:
            self._fed(run, stream)

    def _finish(self, run: _Run) -> None:
        if run.rows is not None and self._forecast is not None:
            self._forecast.ran(run.rows)
        failure = _failure_in(run.results) if self._hears_all else None
        if failure is not None:
            self._end(run, failure)
            return
        if self._streams:
            self._end(run, None)
            return
        self._end(run, attempt(lambda: self._encode(run.entry, loaded(run.results))))

    def _fail(self, run: _Run, error: ForebayError) -> None:
        run.state.abort(error)
        if run.entry in self._runs:
            self._end(run, Failure(error))

    def _abandon(self, run: _Run) -> None:
        """Call a run off: nobody waits for it any more."""
        self._fail(run, Cancelled("the client no longer waits for this request"))

    def _end(self, run: _Run, outcome: Outcome) -> None:
        """Free the slot, call off what still runs, answer."""
        del self._runs[run.entry]  # first: hops that are cancelled reply at once, and must find no run
        run.batch.on_cancel = None
        if run.stream is not None:
            run.stream.on_fed = lambda: None
        if run.hops:
            for hop in list(run.hops):  # a copy: each reply takes its hop out
                assert hop.firing is not None
                self._by_plan[hop.firing.node].endpoint.cancel(hop)
        if not self._is_stopping:
            self.idle += 1  # before the answer: what the client sends next finds room
        if self._empty is not None and not self._runs:
            self._empty.set()
        if run.is_entering:  # `done` would come back here with the next request before `submit` has returned
            asyncio.get_running_loop().call_soon(run.done, run.batch, [outcome])
        else:
            run.done(run.batch, [outcome])


def _failure_in(values: Mapping[str, Any]) -> Failure | None:
    return next((value for value in values.values() if type(value) is Failure), None)


def _elements(firing: Firing, port: str) -> Sequence[Any]:
    """Return the list that is spread over samples of its own."""
    value = firing.inputs[port]
    if isinstance(value, Packed):
        value = value.load()
    if not isinstance(value, list | tuple):
        name, found = firing.node.spec.name, type(value).__name__
        raise BadOutcome(f"node '{name}' runs for each element of '{port}': expected a list, got {found}")
    return cast("Sequence[Any]", value)
