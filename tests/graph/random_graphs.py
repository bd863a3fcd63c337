# SPDX-License-Identifier: Apache-2.0
"""Random graphs and sequences of events: our engine beside a naive implementation of MediaPipe's rules."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.graph.mediapipe_rules import Aborted, Calculator, Graph, Refused

from forebay.errors import InvalidRequest
from forebay.graph.plan import Plan
from forebay.graph.run import GraphRun
from forebay.graph.spec import GraphSpec, NodeSpec, Policy

POLICIES: dict[str, Policy] = {
    "default": "sync",
    "sync_set": "sync",
    "immediate": "immediate",
    "barrier": "barrier",
}


class Difference(AssertionError):
    """The two do not do the same."""


class Drawn:
    """A graph, and what its nodes do.

    Attributes:
        is_careful: Whether nodes write nothing at timestamps that their outputs have passed, as they have to.
    """

    def __init__(self, draw: random.Random, handlers: tuple[str, ...], *, has_loops: bool = True) -> None:
        self.draw = draw
        self.inputs = [f"x{number}" for number in range(draw.randint(1, 3))]
        self.nodes: list[Calculator] = []
        self.is_careful = draw.random() < 0.8
        self.gap = draw.choice([0.0, 0.2, 0.5])
        self.turns = draw.choice([1, 3, 10])
        streams = list(self.inputs)
        for number in range(draw.randint(1, 6)):
            name = f"n{number}"
            ports = {f"IN{at}": draw.choice(streams[-4:]) for at in range(draw.randint(1, 3))}
            outputs = {f"OUT{at}": f"{name}.{at}" for at in range(draw.randint(1, 2))}
            handler = draw.choice(handlers)
            loop = "LOOPBACK" if has_loops and handler != "barrier" and draw.random() < 0.25 else ""
            most = 1 if loop else draw.choice([1, 1, 1, 1, 2, 5])
            declared: list[list[str]] = []
            if loop:
                handler = draw.choice([one for one in handlers if one in {"sync_set", "immediate"}] or ["sync_set"])
                ports = {**ports, loop: f"{name}.loop"}
                ports = {port: ports[port] for port in draw.sample(list(ports), len(ports))}
                declared = [[loop]] if handler == "sync_set" else []
            if handler == "sync_set":
                rest = [port for port in ports if port != loop]
                draw.shuffle(rest)
                while rest and draw.random() < 0.6:
                    size = draw.randint(1, len(rest))
                    declared.append(rest[:size])
                    del rest[:size]
                draw.shuffle(declared)
            streams += outputs.values()
            if loop:
                outputs = {**outputs, loop: f"{name}.loop"}
            self.nodes.append(Calculator(name, ports, outputs, handler, declared, most, loop))
        written = [stream for stream in streams if stream not in self.inputs]
        self.outputs = sorted({written[-1], *draw.sample(written, draw.randint(0, len(written)))})

    def model(self, *, is_eager: bool = True) -> Graph:
        return Graph(self.inputs, self.outputs, self.nodes, is_eager=is_eager)

    def engine(self) -> GraphRun:
        specs = tuple(
            NodeSpec(
                name=one.name,
                inputs=one.inputs,
                outputs=one.outputs,
                policy=POLICIES[one.handler],
                sets=_sets(one) if one.handler == "sync_set" else (),
                optional=frozenset(one.inputs),
                back_edges=frozenset({one.loop} - {""}),
                max_in_flight=one.max_in_flight,
                closed_loop=bool(one.loop),
            )
            for one in self.nodes
        )
        outputs = {stream: stream for stream in self.outputs}
        return GraphRun(
            Plan(GraphSpec(name="g", inputs=tuple(self.inputs), outputs=outputs, nodes=specs)), streams=True
        )

    def results(self, model: Graph, name: str, timestamp: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """What a node writes: it depends on nothing but what it has read."""
        node = model.nodes[name].it
        told = repr((name, timestamp, sorted(inputs.items())))
        mood = random.Random(told)
        found: dict[str, Any] = {}
        for output, stream in node.outputs.items():
            if output == node.loop:
                if mood.randrange(self.turns):
                    found[output] = mood.random()
            elif mood.random() >= self.gap and not (self.is_careful and timestamp < model.bounds[stream]):
                found[output] = mood.random()
        return found


def _in_order(begun: Iterable[tuple[str, int, dict[str, Any]]]) -> list[Any]:
    """Invocations; in which order several of one moment begin does not matter."""
    return sorted((name, timestamp, sorted(inputs.items())) for name, timestamp, inputs in begun)


def _sets(one: Calculator) -> tuple[frozenset[str], ...]:
    rest = frozenset(one.inputs).difference(*one.sync_sets)
    return (*map(frozenset, one.sync_sets), *([rest] if rest else []))


def compare(seed: str) -> Counter[str]:
    """Let both go through the same events, and hold each step of one to that of the other.

    Returns:
        How much of what there was.

    Raises:
        Difference: With the graph and all events.
    """
    draw = random.Random(seed)
    drawn = Drawn(draw, draw.choice([("default",), ("sync_set",), ("immediate",), tuple(POLICIES), tuple(POLICIES)]))
    model, engine = drawn.model(), drawn.engine()
    at: dict[str, int | None] = {stream: draw.choice([0, 0, draw.randint(-5, 5)]) for stream in drawn.inputs}
    stride = draw.choice([1, 2, 10])
    running: list[Any] = []
    count = Counter(["graphs", *(f"{one.handler} nodes" for one in drawn.nodes)])
    count["loops"] = sum(bool(one.loop) for one in drawn.nodes)
    said: list[str] = []
    for _ in range(draw.randint(5, 60)):
        kind = draw.choice(["feed", "feed", "feed", "complete", "complete", "complete", "skip", "close"])
        model.begun, model.emitted = [], []
        refusals: list[str] = []
        if kind == "complete":
            if not running:
                continue
            firing = running.pop(draw.choice([0, draw.randrange(len(running))]))
            name, timestamp = firing.node.spec.name, firing.timestamp
            outputs = drawn.results(model, name, timestamp, firing.inputs)
            said.append(f"complete {name} at {timestamp} with {outputs}")
            acts: Any = [(model.complete, name, timestamp, outputs), (engine.complete, firing, outputs)]
        else:
            stream = draw.choice(drawn.inputs)
            earliest = at[stream]
            if earliest is None or (kind == "close" and draw.random() < 0.8):
                continue
            timestamp = earliest + draw.choice([0, 0, 1, draw.randint(0, stride), 10**9])
            at[stream] = None if kind == "close" else timestamp + 1
            said.append(f"{kind} {stream} at {timestamp}")
            if kind == "feed":
                value = draw.random()
                acts = [(model.add_packet, stream, timestamp, value), (engine.feed, stream, timestamp, value)]
            elif kind == "skip":
                acts = [(model.set_bound, stream, timestamp + 1), (engine.skip, stream, timestamp)]
            else:
                acts = [(model.close, stream), (engine.close_input, stream)]
        emitted: Any = []
        for (act, *given), error in zip(acts, (Refused, InvalidRequest), strict=True):
            try:
                emitted = act(*given)
            except Aborted:
                return count
            except error as raised:
                refusals.append(str(raised))
        count[kind] += 1
        if len(refusals) == 1:
            raise _difference(drawn, said, f"one of them refuses: {refusals}")
        if refusals:
            count["refusals"] += 1
            break
        begun = engine.ready()
        running += begun
        theirs = (_in_order(model.begun), model.emitted, model.is_finished, model.lowest)
        ours = (
            _in_order((one.node.spec.name, one.timestamp, one.inputs) for one in begun),
            [(one.output, one.timestamp, one.value) for one in emitted or []],
            engine.is_finished,
            engine.lowest,
        )
        if theirs != ours:
            raise _difference(drawn, said, f"MediaPipe: {theirs}\nforebay:   {ours}")
        count["invocations"] += len(begun)
    engine.abort(ValueError("a node has failed, or nobody waits any more"))
    found = [engine.complete(firing, {}) for firing in running]
    if any(found) or engine.ready() or not engine.is_finished:
        raise _difference(drawn, said, "something goes on after the end")
    return count


def to_the_end(draw: random.Random) -> list[dict[str, list[Any]]]:
    """Feed and close a graph of Default nodes; what each node has read, here and under the original's own bounds."""
    drawn = Drawn(draw, ("default",), has_loops=False)
    model, engine = drawn.model(is_eager=False), drawn.engine()
    drawn.is_careful = False
    left = {stream: sorted(draw.sample(range(20), 6)) for stream in drawn.inputs}
    read: list[dict[str, list[Any]]] = [{one.name: [] for one in drawn.nodes} for _ in range(2)]
    while streams := [stream for stream in drawn.inputs if left[stream]]:
        packet = (draw.choice(streams), draw.random())
        at = left[packet[0]].pop(0)
        model.add_packet(packet[0], at, packet[1])
        engine.feed(packet[0], at, packet[1])
    for stream in drawn.inputs:
        model.close(stream)
        engine.close_input(stream)
    running = engine.ready()
    while running:
        firing = running.pop(draw.randrange(len(running)))
        name, inputs = firing.node.spec.name, firing.inputs
        read[0][name].append((firing.timestamp, inputs))
        engine.complete(firing, drawn.results(model, name, firing.timestamp, inputs))
        running += engine.ready()
    while model.begun:
        name, at, inputs = model.begun.pop(draw.randrange(len(model.begun)))
        read[1][name].append((at, inputs))
        model.complete(name, at, drawn.results(model, name, at, inputs))
    for found in read:
        for invocations in found.values():
            invocations.sort(key=lambda one: one[0])
    return read


def _difference(drawn: Drawn, said: list[str], what: str) -> Difference:
    return Difference("\n".join([*map(str, drawn.nodes), f"outputs {drawn.outputs}", *said, what]))
