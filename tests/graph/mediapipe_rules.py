# SPDX-License-Identifier: Apache-2.0
"""The rules by which MediaPipe runs a graph, naive and slow: what our engine is compared with.

Nothing is shared with `src`. The rules are those of google-ai-edge/mediapipe, commit 85c0cdc7, mediapipe/framework:

    input_stream_manager.cc            each input of a node has a queue and a bound; a packet below it is an error
    input_stream_handler.cc            `ScheduleInvocations`, `SyncSet::GetReadiness`, `SyncSet::FillInputSet`
    stream_handler/default_...         one set of all inputs
    stream_handler/sync_set_...        the set with the earliest packet goes first; of several the first one
    stream_handler/immediate_...       the earliest packet goes first, with all others of its timestamp that wait
    stream_handler/barrier_...         a packet of each input, whatever its timestamp; one closed input closes the node
    calculator_node.cc                 `SchedulingLoop`, `EndScheduling`: at most `max_in_flight` at a time
    output_stream_manager.cc           a packet goes to one reader after the other
    stream_handler/in_order_output_... results leave in the order of their timestamps

`LOOPBACK` is that of openvinotoolkit/model_server, commit 7e4df0c7, src/python/python_executor_calculator.cc: what a
node writes there comes one timestamp later (`pushOutputs`). Other data is an error while a generator runs (`Process`).

Deliberately different, as the README of our surface says:

    bounds     MediaPipe leaves it to a calculator to say what it will not write. Python nodes say nothing until they
               are closed. Here a node says all that is certain: nothing below the lowest timestamp at which it runs
               or may run. `is_eager=False` is the original's way.
    immediate  The original calls `Process` once without any packet when one input is closed and others are not.
"""

from __future__ import annotations

import dataclasses
from typing import Any

UNSEEN = -(10**30)
DONE = 10**30


class Refused(Exception):
    """The graph has an error."""


class Aborted(Exception):
    """The original ends its process here."""


@dataclasses.dataclass
class Calculator:
    """A node.

    Attributes:
        inputs: The stream of each input.
        outputs: The stream of each output.
        handler: default, sync_set, immediate or barrier.
        sync_sets: Those that are declared; all other inputs are one more.
        loop: The input that reads what the node writes itself.
    """

    name: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    handler: str = "default"
    sync_sets: list[list[str]] = dataclasses.field(default_factory=list)
    max_in_flight: int = 1
    loop: str = ""


class Node:
    """A node of a graph that runs."""

    def __init__(self, calculator: Calculator) -> None:
        self.it = calculator
        self.queues: dict[str, list[tuple[int, Any]]] = {name: [] for name in calculator.inputs}
        self.bounds: dict[str, int] = dict.fromkeys(calculator.inputs, UNSEEN)
        self.contexts: dict[int, Any] = {}  # by timestamp; what an invocation has written, None while it runs
        self.in_flight = 0
        self.is_generating = False
        handler = calculator.handler
        if handler == "sync_set":
            declared = [list(one) for one in calculator.sync_sets]
            rest = [name for name in calculator.inputs if not any(name in one for one in declared)]
            self.sets = [*declared, *([rest] if rest else [])]
        elif handler == "immediate":
            self.sets = [[name] for name in calculator.inputs]
        else:
            self.sets = [list(calculator.inputs)]

    def earliest_or_bound(self, name: str) -> int:
        queue = self.queues[name]
        return queue[0][0] if queue else self.bounds[name]

    def ready_at(self, names: list[str]) -> int | None:
        """When a set is ready for `Process`; None if it is not."""
        packets = [self.queues[name][0][0] for name in names if self.queues[name]]
        bounds = [self.bounds[name] for name in names if not self.queues[name] and name != self.it.loop]
        if not packets:
            return None
        return min(packets) if min(bounds, default=DONE) > min(packets) else None

    @property
    def is_closed(self) -> bool:
        done = [not self.queues[name] and self.bounds[name] == DONE for name in self.queues if name != self.it.loop]
        return any(done) if self.it.handler == "barrier" else all(done)

    def next_inputs(self) -> tuple[int, dict[str, Any]] | None:
        """Take the packets of the next invocation, if there is one."""
        if self.it.handler == "barrier":
            if self.is_closed:  # `InputStreamManager::AddPackets` drops what comes for a closed node
                self.queues = {name: [] for name in self.queues}
            if not all(self.queues.values()):
                return None
            timestamp = min(queue[0][0] for queue in self.queues.values())
            return timestamp, {name: queue.pop(0)[1] for name, queue in self.queues.items()}
        ready = [(at, number) for number, names in enumerate(self.sets) if (at := self.ready_at(names)) is not None]
        if not ready:
            return None
        timestamp, first = min(ready)
        taken: dict[str, Any] = {}
        for number, names in enumerate(self.sets):
            together = self.it.handler == "immediate" and (timestamp, number) in ready
            for name in names if number == first or together else ():
                if self.queues[name] and self.queues[name][0][0] == timestamp:
                    taken[name] = self.queues[name].pop(0)[1]
        return timestamp, taken

    def certain(self) -> int:
        """The timestamp below which it will write nothing, as far as can be known."""
        lowest = min(self.contexts, default=DONE)
        if self.it.handler == "barrier" and self.is_closed:
            return lowest
        inputs = [name for name in self.queues if self.queues[name] or name != self.it.loop]
        return min([lowest, *map(self.earliest_or_bound, inputs)])


class Graph:
    """A graph that runs; `invocations` were begun and not completed."""

    def __init__(
        self, inputs: list[str], outputs: list[str], nodes: list[Calculator], *, is_eager: bool = True
    ) -> None:
        self.nodes = {one.name: Node(one) for one in nodes}
        self.outputs = outputs
        self.is_eager = is_eager
        written = [*inputs, *(stream for one in nodes for stream in one.outputs.values())]
        self.bounds = dict.fromkeys(written, UNSEEN)
        self.readers: dict[str, list[tuple[Node, str]]] = {stream: [] for stream in written}
        for node in self.nodes.values():
            for name, stream in node.it.inputs.items():
                self.readers[stream].append((node, name))
        self.begun: list[tuple[str, int, dict[str, Any]]] = []
        self.emitted: list[tuple[str, int, Any]] = []

    def add_packet(self, stream: str, timestamp: int, value: Any) -> None:
        """Put a packet on a stream: on the queue of one reader after the other."""
        is_read = stream in self.outputs or self.readers[stream]
        if is_read and timestamp < self.bounds[stream]:
            raise Refused(f"{stream}: {timestamp} comes after {self.bounds[stream]}")
        self.bounds[stream] = timestamp + 1
        if stream in self.outputs:
            self.emitted.append((stream, timestamp, value))
        for node, name in self.readers[stream]:
            at = timestamp + 1 if name == node.it.loop else timestamp
            node.queues[name].append((at, value))
            node.bounds[name] = at + 1
            self.schedule(node)

    def set_bound(self, stream: str, bound: int) -> None:
        if bound <= self.bounds[stream]:
            return
        self.bounds[stream] = bound
        for node, name in self.readers[stream]:
            node.bounds[name] = max(node.bounds[name], bound)
            self.schedule(node)

    def close(self, stream: str) -> None:
        self.set_bound(stream, DONE)

    def schedule(self, node: Node) -> None:
        """Begin as many invocations as may be, then say what will not come."""
        while node.in_flight < node.it.max_in_flight and (found := node.next_inputs()) is not None:
            timestamp, inputs = found
            if timestamp in node.contexts:
                raise Aborted(f"{node.it.name} runs twice at {timestamp}")
            if node.it.loop and node.is_generating and set(inputs) != {node.it.loop}:
                raise Refused(f"{node.it.name} is already processing data")
            node.is_generating = False
            node.contexts[timestamp] = None
            node.in_flight += 1
            self.begun.append((node.it.name, timestamp, inputs))
        if self.is_eager:
            bound = node.certain()
        else:
            is_over = node.is_closed and not node.contexts and not node.it.loop
            bound = DONE if is_over else UNSEEN
        for stream in node.it.outputs.values():
            self.set_bound(stream, bound)

    def complete(self, name: str, timestamp: int, outputs: dict[str, Any]) -> None:
        """End an invocation."""
        node = self.nodes[name]
        node.contexts[timestamp] = outputs
        while node.contexts and node.contexts[first := min(node.contexts)] is not None:
            for output, value in node.contexts[first].items():
                if output == node.it.loop:
                    node.is_generating = True
                self.add_packet(node.it.outputs[output], first, value)
            del node.contexts[first]
        node.in_flight -= 1
        self.schedule(node)

    @property
    def is_finished(self) -> bool:
        return not any(node.in_flight for node in self.nodes.values())

    @property
    def lowest(self) -> int | None:
        """The lowest timestamp that anything runs or waits at."""
        return min(
            (
                timestamp
                for node in self.nodes.values()
                for timestamp in (*node.contexts, *(queue[0][0] for queue in node.queues.values() if queue))
            ),
            default=None,
        )
