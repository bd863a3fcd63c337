# SPDX-License-Identifier: Apache-2.0
"""One run of a graph: which node fires next, and where its results go.

Theory of operation. Streams carry packets with rising timestamps. Each port has a queue and a *bound*, below which
nothing more will come. A port is settled at a timestamp when its next packet is not earlier or its bound is higher. A
node with the policy `sync` is due at the lowest timestamp of its waiting packets once all of its ports (or all of one
sync set) are settled there. If a required port carries nothing, the node is passed over and its outputs are settled
instead. So a branch that was not taken is known to be empty, and nobody waits for it.

A run for a request sees one timestamp. A run for a stream of packets (`streams=True`) sees many. There packets wait in
their queues until their node may run once more; of several sets that are due the one with the lowest timestamp goes
first. Results are released in the order of their timestamps. A node settles its outputs below the lowest timestamp at
which it runs or may still run. A loop needs such a run, too: what a node writes to itself comes one moment later.

The rules for ports, sets and policies are those of MediaPipe; `tests/graph/mediapipe_rules.py` is a second, naive
implementation of them.

Sans-I/O: no clock, no loop, no payload. `pool.py` drives it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import BadOutcome, InvalidRequest

if TYPE_CHECKING:
    from forebay.graph.plan import Plan, PlannedNode, PlannedStream

DONE: Final = 1 << 63
"""Bound of a stream on which nothing will come any more."""

UNSEEN: Final = -(1 << 63)
"""Bound of a stream on which anything may come."""

_timestamp: Final = attrgetter("timestamp")


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
    """What a node has received and what it has not finished yet.

    Attributes:
        waiting: The packets of each port that have not been used.
        bounds: The bound of each port.
        fired: The highest timestamp at which it fired or was passed over.
        flights: Firings whose results have not been released, by timestamp.
        running: Firings that have not completed.
        held: Results that wait for those of an earlier firing.
    """

    __slots__ = ("bounds", "fired", "flights", "held", "running", "waiting")

    def __init__(self, node: PlannedNode) -> None:
        self.waiting: dict[str, deque[tuple[int, Any]]] = {port: deque() for port in node.ports}
        self.bounds = dict.fromkeys(node.ports, UNSEEN)
        self.fired = UNSEEN
        self.flights: list[Firing] = []
        self.running = 0
        self.held: dict[Firing, Mapping[str, Any]] = {}


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
        """Begin a run; `streams` tells whether its inputs carry more than one timestamp."""
        self.plan = plan
        self.open = 0
        """Firings that are due or running."""
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

    def complete(self, firing: Firing, outputs: Mapping[str, Any]) -> list[Emission]:
        """Take the results of a firing; returns what left the graph as a result.

        Args:
            firing: What `ready` returned.
            outputs: Values by output port; a port that is absent carries nothing.

        Raises:
            BadOutcome: If the node has no such port.
            InvalidRequest: If the timestamp is below the stream's bound: what was fed did not leave it room.
        """
        node = firing.node
        self.open -= 1  # of an aborted run as well: it is finished once nothing of it runs
        if self.error is not None:
            return []
        if len(outputs) > len(node.outputs) or not outputs.keys() <= node.outputs.keys():
            wrong = next(port for port in outputs if port not in node.outputs)
            raise BadOutcome(f"node '{node.spec.name}' has no output '{str(wrong)[:100]}'; it has {list(node.outputs)}")
        if self._streams:
            self._release(firing, outputs)
        else:
            for port, value in outputs.items():
                self._deliver(node.outputs[port], firing.timestamp, value)
            if len(outputs) < len(node.outputs):
                for port, stream in node.outputs.items():
                    if port not in outputs:
                        self._settle(stream, firing.timestamp + 1)
        return self._take_emitted() if self._emitted else []

    def abort(self, error: Exception) -> None:
        """End the run: nothing fires any more, and what is still running leads to nothing."""
        self.error = self.error or error
        self.open -= len(self._ready)
        self._ready.clear()
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
            if not state.waiting[port] and port not in node.turns
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
        for output in stream.results:
            self._emitted.append(Emission(output, timestamp, value))
        if self._streams:
            self._bounds[stream.name] = timestamp + 1
        for node, port in stream.readers:
            if node.is_simple and not self._streams:
                self.open += 1
                self._ready.append(Firing(node, timestamp, {port: value}))
                continue
            at = timestamp + 1 if port in node.turns else timestamp
            if at == DONE:
                raise InvalidRequest(
                    f"no timestamp is left for '{node.spec.name}' after {timestamp}; open a new stream"
                )
            state = self._state(node)
            state.waiting[port].append((at, value))
            state.bounds[port] = at + 1  # before `_advance` takes the packet, and only this is left of it
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
                for node, port in stream.readers:
                    state = self._state(node)
                    state.bounds[port] = bound
                    self._advance(node, state)
            settling.popleft()
        self._settling = None

    def _state(self, node: PlannedNode) -> _NodeState:
        state = self._states.get(node)
        if state is None:
            state = self._states[node] = _NodeState(node)
        return state

    def _advance(self, node: PlannedNode, state: _NodeState) -> None:
        """Fire a node as often as its ports and `max_in_flight` allow, and tell its readers what will not come."""
        while state.running != node.spec.max_in_flight and (ports := self._due(node, state)):
            self._fire(node, state, ports)
        bound = self._bound(node, state)
        if bound > UNSEEN:
            for stream in node.outputs.values():
                self._settle(stream, bound)

    def _due(self, node: PlannedNode, state: _NodeState) -> Sequence[str]:
        """Return the ports whose first packets a node runs with next; none if it waits for more."""
        waiting, policy = state.waiting, node.spec.policy
        if policy == "barrier":
            if self._is_closed(state):
                for packets in waiting.values():
                    packets.clear()
            return tuple(waiting) if all(waiting.values()) else ()
        if policy == "first":
            for packets in waiting.values():
                while packets and packets[0][0] <= state.fired:
                    packets.popleft()
        if policy != "sync":
            timestamp = min((packets[0][0] for packets in waiting.values() if packets), default=DONE)
            ports = [port for port, packets in waiting.items() if _is_at(packets, timestamp)]
            return ports[:1] if policy == "first" else ports
        earliest = DONE
        due: frozenset[str] = frozenset()
        for group in node.sets:
            timestamp = DONE
            for port in group:
                if waiting[port] and waiting[port][0][0] < timestamp:
                    timestamp = waiting[port][0][0]
            if timestamp >= earliest:
                continue
            for port in group:
                if not waiting[port] and port not in node.turns and state.bounds[port] <= timestamp:
                    break
            else:
                earliest, due = timestamp, group
        return [port for port in waiting if port in due and _is_at(waiting[port], earliest)] if due else ()

    def _fire(self, node: PlannedNode, state: _NodeState, ports: Sequence[str]) -> None:
        """Run a node with the first packets of these ports, or pass it over if it needs more than these."""
        inputs: dict[str, Any] = {}
        timestamp = DONE
        for port in ports:
            at, inputs[port] = state.waiting[port].popleft()
            timestamp = min(timestamp, at)
        state.fired = max(state.fired, timestamp)
        if len(ports) < len(node.ports) and _lacks(node, ports):
            # In a run of many timestamps an earlier firing may still write: there `_bound` says how far it is settled.
            if not self._streams:
                for stream in node.outputs.values():
                    self._settle(stream, timestamp + 1)
            return
        if node.spec.closed_loop and not node.turns.issuperset(ports):
            for port in node.turns:
                if port in inputs or state.waiting[port] or any(port in flight.inputs for flight in state.flights):
                    msg = f"node '{node.spec.name}' is already processing data: its loop still turns; open a new stream"
                    raise InvalidRequest(msg)
        firing = Firing(node, timestamp, inputs)
        self.open += 1
        self._ready.append(firing)
        if self._streams:
            state.running += 1
            insort(state.flights, firing, key=_timestamp)

    def _is_closed(self, state: _NodeState) -> bool:
        """Tell whether a barrier lacks packets for ever."""
        over = DONE if self._streams else 1
        return any(not packets and state.bounds[port] >= over for port, packets in state.waiting.items())

    def _bound(self, node: PlannedNode, state: _NodeState) -> int:
        """Return the timestamp below which the node will write nothing more."""
        if not self._streams:
            # There is one timestamp: a node that has fired says itself what it has.
            if state.fired != UNSEEN or any(state.waiting.values()):
                return UNSEEN
            return min(state.bounds.values())
        bound = state.flights[0].timestamp if state.flights else DONE
        if node.spec.policy == "barrier" and self._is_closed(state):
            return bound
        for port, packets in state.waiting.items():
            if packets:
                bound = min(bound, packets[0][0])
            elif port not in node.turns:
                bound = min(bound, state.bounds[port])
        return max(bound, state.fired + 1) if node.spec.policy == "first" else bound

    def _release(self, firing: Firing, outputs: Mapping[str, Any]) -> None:
        """Put the results of a node's firings on its streams in the order of their timestamps."""
        node = firing.node
        state = self._states[node]
        state.held[firing] = outputs
        while state.flights and (results := state.held.pop(state.flights[0], None)) is not None:
            for port, value in results.items():
                self._write(node, port, state.flights[0].timestamp, value)
            del state.flights[0]  # after its results: until then it holds the bound of what the node writes down
        state.running -= 1
        self._advance(node, state)

    def _write(self, node: PlannedNode, port: str, timestamp: int, value: Any) -> None:
        stream = node.outputs[port]
        if timestamp < self._bounds.get(stream.name, UNSEEN) and (stream.readers or stream.results):
            raise InvalidRequest(
                f"node '{node.spec.name}' wrote to '{stream.name}' at timestamp {timestamp}, which is already at "
                f"{self._bounds[stream.name] - 1}; send what it reads on a stream, at timestamps further apart"
            )
        self._deliver(stream, timestamp, value)


def _lacks(node: PlannedNode, ports: Sequence[str]) -> bool:
    """Tell whether a required port is in one set with these and not among them."""
    return any(not group.isdisjoint(ports) and node.required & group.difference(ports) for group in node.sets)


def _is_at(packets: deque[tuple[int, Any]], timestamp: int) -> bool:
    return bool(packets) and packets[0][0] == timestamp
