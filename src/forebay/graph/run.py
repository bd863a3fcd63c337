# SPDX-License-Identifier: Apache-2.0
"""One run of a graph: which node fires next, and where its results go.

Theory of operation. Streams carry packets with rising timestamps; each stream has a *bound*, below which nothing more
will come. A port is settled at a timestamp when its next packet is not earlier or its bound is higher. A node with the
policy `sync` fires at the lowest timestamp of its waiting packets once all of its ports (or all of one sync set) are
settled there; if one of its required ports carries nothing, it is passed over and its outputs are settled instead. So a
branch that was not taken is known to be empty, and nobody waits for it.

A run for a request sees one timestamp. A run for a stream of packets (`streams=True`) sees many: a node may work on
several at a time, if it may, and its results are released in the order of their firings. A loop needs such a run too:
a packet that comes over a back edge is one moment later than it was written.

Sans-I/O: no clock, no loop, no payload. `pool.py` drives it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import BadOutcome, InvalidRequest

if TYPE_CHECKING:
    from forebay.graph.plan import Plan, PlannedNode, PlannedStream

DONE: Final = 1 << 63
"""Bound of a stream on which nothing will come any more."""

UNSEEN: Final = -(1 << 63)
"""Bound of a stream on which anything may come."""


class Firing(msgspec.Struct, eq=False):
    """One execution of a node that is due.

    Attributes:
        node: Which node.
        timestamp: When, in the order of its streams.
        inputs: The packets, by port; optional ports that are empty are absent.
    """

    node: PlannedNode
    timestamp: int
    inputs: dict[str, Any]


class Emission(msgspec.Struct, eq=False):
    """A packet that left the graph."""

    output: str
    timestamp: int
    value: Any

    @property
    def nbytes(self) -> int:
        """How large its value is, if that says so."""
        return getattr(self.value, "nbytes", 0)


class _NodeState:
    """What a node has received and what it has not finished yet."""

    __slots__ = ("due", "fired", "flights", "held", "released", "running", "waiting")

    def __init__(self, node: PlannedNode) -> None:
        self.waiting: dict[str, deque[tuple[int, Any]]] = {port: deque() for port in node.ports}
        self.fired = UNSEEN
        self.flights: deque[Firing] = deque()
        self.due: deque[Firing] = deque()
        self.running = 0
        self.released: Firing | None = None
        self.held: dict[Firing, list[_Result]] = {}


class _Result(msgspec.Struct, eq=False):
    """Results of a firing that wait for those of an earlier one."""

    outputs: Mapping[str, Any]
    at: int
    more: bool


class GraphRun:
    """The state of one run.

    Example:
        >>> from forebay.graph.plan import Plan
        >>> from forebay.graph.spec import GraphSpec, NodeSpec
        >>> double = NodeSpec(name="double", inputs={"x": "x"}, outputs={"out": "twice"})
        >>> run = GraphRun(Plan(GraphSpec(name="g", inputs=("x",), outputs={"y": "twice"}, nodes=(double,))))
        >>> run.feed("x", 0, 21)
        []
        >>> [firing] = run.ready()
        >>> [emission.value for emission in run.complete(firing, {"out": firing.inputs["x"] * 2})]
        [42]
    """

    __slots__ = ("_bounds", "_emitted", "_ready", "_settling", "_states", "_streams", "error", "open", "plan")

    def __init__(self, plan: Plan, *, streams: bool = False) -> None:
        """Begin a run.

        Args:
            streams: Whether its inputs carry more than one timestamp.
        """
        self.plan = plan
        self.open = 0
        """Firings that were handed out, or are about to be, and have not completed."""
        self.error: Exception | None = None
        self._streams = streams
        self._states: dict[PlannedNode, _NodeState] = {}
        self._bounds: dict[str, int] = {}
        self._ready: list[Firing] = []
        self._emitted: list[Emission] = []
        self._settling: deque[tuple[PlannedStream, int]] | None = None

    def feed(self, stream: str, timestamp: int, value: Any) -> list[Emission]:
        """Put a packet on an input of the graph; returns what left the graph as a result.

        Raises:
            InvalidRequest: If the graph has no such input or the timestamp is below the stream's bound.
        """
        planned = self._input(stream)
        bound = self._bounds.get(stream, UNSEEN)
        if timestamp < bound:
            where = "is closed" if bound == DONE else f"is at timestamp {bound - 1}; {timestamp} is too late"
            raise InvalidRequest(f"the input '{stream}' {where}")
        if not self._streams:
            self._bounds[stream] = DONE
        self._deliver(planned, timestamp, value)
        return self._take_emitted()

    def skip(self, stream: str, timestamp: int) -> None:
        """Note that an input carries nothing up to and including this timestamp."""
        self._settle(self._input(stream), timestamp + 1)

    def close_input(self, stream: str) -> None:
        """Note that nothing more comes on an input."""
        self._settle(self._input(stream), DONE)

    def ready(self) -> list[Firing]:
        """Return the firings that became due since the last call."""
        ready = self._ready
        if ready:
            self._ready = []
        return ready

    def complete(
        self, firing: Firing, outputs: Mapping[str, Any], *, more: bool = False, at: int | None = None
    ) -> list[Emission]:
        """Take the results of a firing; returns what left the graph as a result.

        Args:
            firing: What `ready` returned.
            outputs: Values by output port; a port that is absent carries nothing.
            more: Whether further results of the same firing follow.
            at: Their timestamp, if it is not the firing's.

        Raises:
            BadOutcome: If the node has no such port.
            InvalidRequest: If the timestamp is below the stream's bound: what was fed did not leave it room.
        """
        timestamp = firing.timestamp if at is None else at
        node = firing.node
        if not more:
            self.open -= 1
        if self.error is not None:
            return []
        if len(outputs) > len(node.outputs) or not outputs.keys() <= node.outputs.keys():
            wrong = next(port for port in outputs if port not in node.outputs)
            raise BadOutcome(f"node '{node.spec.name}' has no output '{str(wrong)[:100]}'; it has {list(node.outputs)}")
        if self._streams:
            self._release(firing, _Result(outputs, timestamp, more))
        else:
            for port, value in outputs.items():
                self._deliver(node.outputs[port], timestamp, value)
            if not more and len(outputs) < len(node.outputs):
                for port, stream in node.outputs.items():
                    if port not in outputs:
                        self._settle(stream, timestamp + 1)
        return self._take_emitted() if self._emitted else []

    def abort(self, error: Exception) -> None:
        """End the run: nothing fires any more, and what is still running leads to nothing."""
        self.error = self.error or error
        self.open -= len(self._ready)
        self._ready.clear()
        self.open -= sum(len(state.due) for state in self._states.values())
        self._states.clear()

    @property
    def is_finished(self) -> bool:
        """Whether nothing runs and nothing is due; more may come only by `feed`."""
        return self.open == 0

    @property
    def lowest(self) -> int | None:
        """The lowest timestamp that anything runs or waits at; None if nothing does."""
        return min(
            (
                timestamp
                for state in self._states.values()
                for timestamp in (
                    *(flight.timestamp for flight in state.flights),
                    *(packets[0][0] for packets in state.waiting.values() if packets),
                )
            ),
            default=None,
        )

    @property
    def lacking(self) -> Sequence[str]:
        """The streams that bring nothing for packets which wait in front of nodes; none while anything runs.

        Only what is fed can set these packets free.
        """
        if self.open:
            return ()
        return [
            stream.name
            for node, state in self._states.items()
            if any(state.waiting.values())
            for port, stream in node.ports.items()
            if not state.waiting[port] and port not in node.spec.back_edges
        ]

    def _input(self, stream: str) -> PlannedStream:
        try:
            return self.plan.inputs[stream]
        except KeyError:
            msg = f"the graph has no input '{stream[:100]}'; it has {', '.join(self.plan.inputs)}"
            raise InvalidRequest(msg) from None

    def _take_emitted(self) -> list[Emission]:
        emitted = self._emitted
        self._emitted = []
        return emitted

    def _deliver(self, stream: PlannedStream, timestamp: int, value: Any) -> None:
        """Put a packet on a stream."""
        streams = self._streams
        for output in stream.results:
            self._emitted.append(Emission(output, timestamp, value))
        waits: list[tuple[PlannedNode, _NodeState]] = []
        for node, port in stream.readers:
            if node.is_simple and not streams:
                self.open += 1
                self._ready.append(Firing(node, timestamp, {port: value}))
                continue
            state = self._state(node)
            at = timestamp + 1 if port in node.spec.back_edges else timestamp  # each turn of a loop is a moment later
            if at == DONE:
                raise InvalidRequest(
                    f"no timestamp is left for '{node.spec.name}' after {timestamp}; open a new stream"
                )
            if node.spec.policy in {"sync", "barrier"}:
                state.waiting[port].append((at, value))
                waits.append((node, state))
            elif node.spec.policy == "immediate" or at > state.fired:
                self._fire(node, state, at, {port: value})
        if streams:
            self._bounds[stream.name] = timestamp + 1
        for node, state in waits:  # only now: what one of them leads to may ask another what it has received
            self._advance(node, state)

    def _settle(self, stream: PlannedStream, bound: int) -> None:
        """Raise the bound of a stream and of those that depend on it; no recursion, as chains may be long."""
        if self._settling is not None:  # called by `_advance` below
            self._settling.append((stream, bound))
            return
        settling = self._settling = deque([(stream, bound)])
        while settling:
            stream, bound = settling[0]
            if bound > self._bounds.get(stream.name, UNSEEN):
                self._bounds[stream.name] = bound
                for node, _ in stream.readers:
                    self._advance(node, self._state(node))
            settling.popleft()
        self._settling = None

    def _state(self, node: PlannedNode) -> _NodeState:
        state = self._states.get(node)
        if state is None:
            state = self._states[node] = _NodeState(node)
        return state

    def _fire(self, node: PlannedNode, state: _NodeState, timestamp: int, inputs: dict[str, Any]) -> None:
        firing = Firing(node, timestamp, inputs)
        state.fired = max(state.fired, timestamp)
        self.open += 1
        if not self._streams:
            self._ready.append(firing)
            return
        state.flights.append(firing)
        if state.running == node.spec.max_in_flight:
            state.due.append(firing)
        else:
            state.running += 1
            self._ready.append(firing)
        if node.spec.closed_loop and _is_turn(firing):
            self._require_alone(node, state)

    @staticmethod
    def _require_alone(node: PlannedNode, state: _NodeState) -> None:
        """Refuse a further turn of a loop for which something else waits.

        Until there is one, the turn that runs may have been the last: whoever has seen the last result of a loop may go
        on at once.
        """
        if any(not _is_turn(one) for one in state.flights if one is not state.released):
            msg = f"node '{node.spec.name}' is already processing data: its loop still turns; open a new stream"
            raise InvalidRequest(msg)

    def _advance(self, node: PlannedNode, state: _NodeState) -> None:
        """Fire a node as often as its ports allow, and tell its readers what will not come."""
        if node.spec.policy == "sync":
            for ports in node.sets:
                while self._step(node, state, ports):
                    pass
        elif node.spec.policy == "barrier":
            self._pass(node, state)
        bound = self._bound(node, state)
        if bound > UNSEEN:
            for stream in node.outputs.values():
                self._settle(stream, bound)

    def _step(self, node: PlannedNode, state: _NodeState, ports: frozenset[str]) -> bool:
        """Fire a node once if these ports are settled at the timestamp of their earliest packet."""
        waiting = state.waiting
        timestamp = min((waiting[port][0][0] for port in ports if waiting[port]), default=None)
        if timestamp is None:
            return False
        bounds, back_edges = self._bounds, node.spec.back_edges
        for port in ports:
            if not waiting[port] and port not in back_edges and bounds.get(node.ports[port].name, UNSEEN) <= timestamp:
                return False
        inputs = {
            port: waiting[port].popleft()[1]
            for port in node.ports
            if port in ports and _is_at(waiting[port], timestamp)
        }
        if all(port in inputs for port in node.required & ports):
            self._fire(node, state, timestamp, inputs)
        else:
            state.fired = max(state.fired, timestamp)
            if not self._streams:
                for stream in node.outputs.values():
                    self._settle(stream, timestamp + 1)
        return True

    def _pass(self, node: PlannedNode, state: _NodeState) -> None:
        """Fire a node as often as each of its ports has a packet; drop what will never have company."""
        waiting = state.waiting
        while all(waiting.values()):
            timestamp = min(packets[0][0] for packets in waiting.values())
            self._fire(node, state, timestamp, {port: packets.popleft()[1] for port, packets in waiting.items()})
        over = DONE if self._streams else 1
        if any(not waiting[port] and self._bounds.get(one.name, UNSEEN) >= over for port, one in node.ports.items()):
            for packets in waiting.values():
                packets.clear()

    def _bound(self, node: PlannedNode, state: _NodeState) -> int:
        """Return the timestamp below which the node will write nothing more."""
        if not self._streams:
            # There is one timestamp: a node that has fired says itself what it has.
            if state.fired != UNSEEN or any(state.waiting.values()):
                return UNSEEN
            return min(self._bounds.get(stream.name, UNSEEN) for stream in node.ports.values())
        if state.flights:
            return min(flight.timestamp for flight in state.flights)
        bound = DONE
        for port, stream in node.ports.items():
            packets = state.waiting[port]
            if packets:
                bound = min(bound, packets[0][0])
            elif port not in node.spec.back_edges:
                bound = min(bound, self._bounds.get(stream.name, UNSEEN))
        return max(bound, state.fired + 1) if node.spec.policy == "first" else bound

    def _release(self, firing: Firing, result: _Result) -> None:
        """Put the results of a node's firings on its streams in the order in which it fired."""
        node = firing.node
        state = self._states[node]
        if not result.more:
            state.running -= 1
            if state.due:
                state.running += 1
                self._ready.append(state.due.popleft())
        state.held.setdefault(firing, []).append(result)
        while state.flights:
            first = state.flights[0]
            results = state.held.pop(first, None)
            if results is None:
                break
            state.released = None if results[-1].more else first
            for one in results:
                for port, value in one.outputs.items():
                    self._write(node, port, one.at, value)  # a loop fires the node again before the next one is written
            if results[-1].more:
                break
            state.flights.popleft()
        self._advance(node, state)

    def _write(self, node: PlannedNode, port: str, timestamp: int, value: Any) -> None:
        stream = node.outputs[port]
        if timestamp < self._bounds.get(stream.name, UNSEEN):
            raise InvalidRequest(
                f"node '{node.spec.name}' wrote to '{stream.name}' at timestamp {timestamp}, which is already at "
                f"{self._bounds[stream.name] - 1}; send what it reads on a stream, at timestamps further apart"
            )
        self._deliver(stream, timestamp, value)


def _is_turn(firing: Firing) -> bool:
    """Tell whether a loop fired its node."""
    return not firing.node.spec.back_edges.isdisjoint(firing.inputs)


def _is_at(packets: deque[tuple[int, Any]], timestamp: int) -> bool:
    return bool(packets) and packets[0][0] == timestamp
