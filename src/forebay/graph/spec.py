# SPDX-License-Identifier: Apache-2.0
"""What a graph is: nodes whose input ports read streams and whose output ports write them.

A stream is a named edge. It has one writer, a node's output port or the caller, and any number of readers. The values
on it are packets with timestamps that rise. A request is the simple case: every stream carries one packet at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from typing import Final, Literal

import msgspec

from forebay.errors import ConfigError
from forebay.types.did_you_mean import listed, nearest

OUT: Final = "out"
"""The port of a node that has one result."""

Policy = Literal["sync", "first", "immediate", "barrier"]
"""When a node fires.

    sync       when all of its ports have said what they carry at a timestamp: packets of one moment belong together
    first      as sync, but the first packet of a timestamp is enough; what comes later for it is dropped
    immediate  for every packet; those of one timestamp that wait for the node to be free come together
    barrier    when each of its ports has a packet, whatever their timestamps: the earliest counts
"""


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        name: What messages, metrics and drawings call it.
        inputs: The stream that each input port reads.
        outputs: The stream that each output port writes.
        policy: When it fires.
        sets: Ports that are synchronised with each other but not with the rest; each port is in one set. Empty means
            that all are in one.
        optional: Input ports that may be empty when it fires. A node that lacks a packet on any other port does not
            run, and its output streams carry nothing at that timestamp.
        back_edges: Input ports that close a loop, which is not a cycle then.
        max_in_flight: How often it may run at a time for one run of the graph; what is due beyond that waits its turn.
            None sets no bound.
        closed_loop: Whether it is an error to run it with anything from its other ports while its loop still turns.
    """

    name: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    policy: Policy = "sync"
    sets: tuple[frozenset[str], ...] = ()
    optional: frozenset[str] = frozenset()
    back_edges: frozenset[str] = frozenset()
    max_in_flight: int | None = None
    closed_loop: bool = False


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A graph.

    Attributes:
        name: What it is called.
        inputs: Streams that the caller writes.
        outputs: The stream behind each of its results.
        nodes: In any order; which runs when follows from the streams.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: Mapping[str, str]
    nodes: tuple[NodeSpec, ...]


def check(graph: GraphSpec) -> list[str]:
    """Check a graph.

    Returns:
        Warnings: what is odd but can run, such as a node whose results nobody reads.

    Raises:
        ConfigError: Naming the nodes and streams concerned: a name used twice, a stream that nobody or more than one
            node writes, a cycle without a back edge, a port that is not the node's, no result.
    """
    where = f"graph '{graph.name}'"
    writers = _writers(graph, where)
    _check_ports(graph, where)
    for reader, stream in _reads(graph):
        if stream not in writers:
            hint = nearest(stream, writers)
            did_you_mean = f"; did you mean '{hint}'?" if hint else f"; there is {_listed(writers)}"
            raise ConfigError(f"{where}: {reader} reads '{stream}', which nothing writes{did_you_mean}")
    if not graph.outputs:
        raise ConfigError(f"{where} has no result; name at least one stream as its output")
    _check_cycles(graph, where)
    read = {stream for _, stream in _reads(graph)}
    useless = [node for node in graph.nodes if not read.intersection(node.outputs.values())]
    unused = [stream for stream in graph.inputs if stream not in read]
    return [f"{where}: nothing reads what '{node.name}' returns" for node in useless] + [
        f"{where}: nothing reads the input '{stream}'" for stream in unused
    ]


def _writers(graph: GraphSpec, where: str) -> dict[str, str]:
    """Return who writes each stream."""
    writers = dict.fromkeys(graph.inputs, "the caller")
    if len(writers) < len(graph.inputs):
        twice = next(stream for stream in graph.inputs if graph.inputs.count(stream) > 1)
        raise ConfigError(f"{where} has two inputs named '{twice}'; give one of them another name")
    names: set[str] = set()
    for node in graph.nodes:
        if node.name in names:
            raise ConfigError(f"{where} has two nodes named '{node.name}'; give one of them another name")
        names.add(node.name)
        for stream in node.outputs.values():
            if stream in writers:
                other = writers[stream]
                msg = f"{where}: expected one writer of '{stream}', got {other} and node '{node.name}'"
                raise ConfigError(msg)
            writers[stream] = f"node '{node.name}'"
    return writers


def _check_ports(graph: GraphSpec, where: str) -> None:
    for node in graph.nodes:
        if not node.inputs:
            raise ConfigError(f"{where}: node '{node.name}' reads no stream, so nothing would ever run it")
        named = [node.optional, node.back_edges, *node.sets]
        for port in (port for group in named for port in group):
            if port not in node.inputs:
                msg = f"{where}: node '{node.name}' has no input port '{port}'; it has {_listed(node.inputs)}"
                raise ConfigError(msg)
        if node.sets and sorted(port for group in node.sets for port in group) != sorted(node.inputs):
            raise ConfigError(
                f"{where}: the sync sets of node '{node.name}' must name each of its ports once: {_listed(node.inputs)}"
            )


def _reads(graph: GraphSpec) -> Iterator[tuple[str, str]]:
    for node in graph.nodes:
        for stream in node.inputs.values():
            yield f"node '{node.name}'", stream
    for name, stream in graph.outputs.items():
        yield f"the output '{name}'", stream


def _check_cycles(graph: GraphSpec, where: str) -> None:
    """Refuse cycles, naming the nodes along one."""
    writer_of = {stream: node.name for node in graph.nodes for stream in node.outputs.values()}
    before = {
        node.name: [
            writer_of[stream]
            for port, stream in node.inputs.items()
            if port not in node.back_edges and stream in writer_of
        ]
        for node in graph.nodes
    }
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        arrows = " -> ".join(f"'{name}'" for name in error.args[1])
        msg = f"{where} has a cycle: {arrows}; break it, or declare the port that closes it a back edge"
        raise ConfigError(msg) from None


def _listed(names: Mapping[str, object]) -> str:
    return listed(list(names)[:10]) or "none"
