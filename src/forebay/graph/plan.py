# SPDX-License-Identifier: Apache-2.0
"""A graph made ready to run: which nodes read which stream is worked out once, when it is built."""

from __future__ import annotations

import msgspec

from forebay.graph.spec import GraphSpec, NodeSpec, check


class PlannedStream(msgspec.Struct, eq=False):
    """A stream and who reads it.

    Attributes:
        readers: Nodes and the port on which each reads it.
        results: Names of the graph's results that it is.
    """

    name: str
    readers: list[tuple[PlannedNode, str]] = []
    results: list[str] = []


class PlannedNode(msgspec.Struct, eq=False):
    """A node and where its results go.

    Attributes:
        spec: What it is.
        ports: The stream that each input port reads.
        outputs: The stream that each output port writes.
        port: Its output port, if it has just one.
        sets: Ports that are synchronised with each other.
        required: Ports without which it does not run.
        turns: Ports that read what the node itself writes: a packet comes one moment later, and none is waited for.
        is_simple: Whether every packet that arrives fires it, and nothing else does.
    """

    spec: NodeSpec
    ports: dict[str, PlannedStream]
    outputs: dict[str, PlannedStream]
    port: str | None
    sets: tuple[frozenset[str], ...]
    required: frozenset[str]
    turns: frozenset[str]
    is_simple: bool


class Plan:
    """A checked graph with its streams and nodes linked."""

    def __init__(self, graph: GraphSpec) -> None:
        """Check the graph and link it; raises a `ConfigError` if it is not well-formed."""
        self.warnings = check(graph)
        self.graph = graph
        written = [*graph.inputs, *(stream for node in graph.nodes for stream in node.outputs.values())]
        self.streams = {name: PlannedStream(name, [], []) for name in written}
        self.inputs = {name: self.streams[name] for name in graph.inputs}
        self.nodes = [self._planned(node) for node in graph.nodes]
        for node in self.nodes:
            for port, stream in node.ports.items():
                stream.readers.append((node, port))
        for name, stream in graph.outputs.items():
            self.streams[stream].results.append(name)
        self.has_one_moment = all(_fires_once(node) for node in graph.nodes)
        """Whether a request needs one timestamp only: no node can fire twice for it."""
        self.ends_early = any(node.policy == "first" for node in graph.nodes)
        """Whether all results may be there while a node still runs: one that came second, and that nobody waits for."""

    def _planned(self, spec: NodeSpec) -> PlannedNode:
        return PlannedNode(
            spec=spec,
            ports={port: self.streams[stream] for port, stream in spec.inputs.items()},
            outputs={port: self.streams[stream] for port, stream in spec.outputs.items()},
            port=next(iter(spec.outputs)) if len(spec.outputs) == 1 else None,
            sets=spec.sets or (frozenset(spec.inputs),),
            required=frozenset(spec.inputs) - spec.optional if spec.policy == "sync" else frozenset(),
            turns=frozenset(port for port in spec.back_edges if spec.inputs[port] in spec.outputs.values()),
            is_simple=len(spec.inputs) == 1 and not spec.back_edges,
        )


def _fires_once(node: NodeSpec) -> bool:
    if node.back_edges or len(node.sets) > 1:
        return False
    return node.policy != "immediate" or len(node.inputs) == 1
