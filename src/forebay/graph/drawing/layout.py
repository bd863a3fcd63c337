# SPDX-License-Identifier: Apache-2.0
"""Where the boxes of a drawing stand: in layers, so that arrows lead forward, and ordered so that few of them cross.

The steps are those of Sugiyama: a node stands behind everything it reads from (longest path), a long arrow gets a place
in every layer it passes, the order in a layer follows the medians of the neighbours, and the places follow their means
as far as the boxes leave room.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from forebay.graph.spec import OUT, GraphSpec

_SWEEPS: Final = 8


class Vertex(msgspec.Struct, eq=False):
    """A box, or the place where a long arrow passes a layer.

    Attributes:
        kind: What it stands for.
        name: What is written in it.
    """

    kind: Literal["input", "node", "output", "via"]
    name: str = ""


class Arrow(msgspec.Struct, eq=False):
    """An edge of the drawing.

    Attributes:
        path: From a box to a box, with the places between them. Of a back edge the ends only.
        label: Which of several results it carries.
        is_optional: Whether the reader runs without it.
        is_back: Whether it leads back.
    """

    path: list[Vertex]
    label: str
    is_optional: bool
    is_back: bool


class Layout(msgspec.Struct, eq=False):
    """Boxes in layers, in their order, and what connects them."""

    layers: list[list[Vertex]]
    arrows: list[Arrow]

    def neighbours(self) -> Iterator[tuple[Vertex, Vertex]]:
        """Yield the ends of every piece of an arrow that leads from one layer to the next."""
        for arrow in self.arrows:
            if not arrow.is_back:
                yield from itertools.pairwise(arrow.path)


def layout_of(spec: GraphSpec) -> Layout:
    """Arrange a graph."""
    inputs = {stream: Vertex("input", stream) for stream in spec.inputs}
    nodes = {node.name: Vertex("node", node.name) for node in spec.nodes}
    writers: dict[str, tuple[Vertex, str]] = {stream: (vertex, "") for stream, vertex in inputs.items()}
    for node in spec.nodes:
        for port, stream in node.outputs.items():
            writers[stream] = (nodes[node.name], port if len(node.outputs) > 1 else "")
    arrows: list[Arrow] = []
    for node in spec.nodes:
        drawn: set[str] = set()
        for port, stream in node.inputs.items():
            if stream not in drawn:
                drawn.add(stream)
                source, label = writers[stream]
                path = [source, nodes[node.name]]
                arrows.append(Arrow(path, label, port in node.optional, port in node.back_edges))
    results = {name: Vertex("output", name) for name in spec.outputs}
    for name, stream in spec.outputs.items():
        source, label = writers[stream]
        # The box of the only result has nothing to tell but that it is one.
        results[name].name = "result" if name == OUT else name
        arrows.append(Arrow([source, results[name]], label, is_optional=False, is_back=False))
    depths = _depths([*inputs.values(), *nodes.values(), *results.values()], arrows)
    layers: list[list[Vertex]] = [[] for _ in range(max(depths.values()) + 1)]
    for vertex, depth in depths.items():
        layers[depth].append(vertex)
    layout = Layout(layers, arrows)
    _add_places(layout, depths)
    _order(layout)
    return layout


def positions(layout: Layout, size_of: Callable[[Vertex], float], gap: float) -> dict[Vertex, float]:
    """Return the centre of each vertex along its layer.

    Args:
        size_of: How much room a vertex takes along its layer.
        gap: Room between two.
    """
    before, after = _adjacent(layout)
    centres: dict[Vertex, float] = {}
    for layer in layout.layers:
        centres.update(zip(layer, _spread([0.0] * len(layer), layer, size_of, gap), strict=True))
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        sides = before if forward else after
        for layer in layout.layers if forward else reversed(layout.layers):
            wanted = [
                statistics.fmean(centres[other] for other in sides[vertex]) if sides[vertex] else centres[vertex]
                for vertex in layer
            ]
            centres.update(zip(layer, _spread(wanted, layer, size_of, gap), strict=True))
    first = min(centres[vertex] - size_of(vertex) / 2 for vertex in centres)
    return {vertex: centre - first for vertex, centre in centres.items()}


def _depths(vertices: Sequence[Vertex], arrows: Sequence[Arrow]) -> dict[Vertex, int]:
    """Return the layer of each vertex: behind the last one that it reads from."""
    sources: dict[Vertex, list[Vertex]] = {vertex: [] for vertex in vertices}
    for arrow in arrows:
        if not arrow.is_back:
            sources[arrow.path[1]].append(arrow.path[0])
    depths: dict[Vertex, int] = {}
    todo = list(reversed(vertices))
    while todo:
        vertex = todo[-1]
        missing = [source for source in sources[vertex] if source not in depths]
        if missing and vertex not in depths:
            todo += missing
            continue
        todo.pop()
        depths[vertex] = max((depths[source] + 1 for source in sources[vertex]), default=0)
    return {vertex: depths[vertex] for vertex in vertices}


def _add_places(layout: Layout, depths: Mapping[Vertex, int]) -> None:
    """Give every arrow that passes layers a place in each of them; arrows of one value share theirs."""
    shared: dict[tuple[Vertex, str, int], Vertex] = {}
    for arrow in layout.arrows:
        if arrow.is_back:
            continue
        source, target = arrow.path
        places: list[Vertex] = []
        for depth in range(depths[source] + 1, depths[target]):
            key = source, arrow.label, depth
            if key not in shared:
                shared[key] = Vertex("via")
                layout.layers[depth].append(shared[key])
            places.append(shared[key])
        arrow.path = [source, *places, target]


def _adjacent(layout: Layout) -> tuple[dict[Vertex, list[Vertex]], dict[Vertex, list[Vertex]]]:
    before: dict[Vertex, list[Vertex]] = {vertex: [] for layer in layout.layers for vertex in layer}
    after: dict[Vertex, list[Vertex]] = {vertex: [] for layer in layout.layers for vertex in layer}
    for source, target in set(layout.neighbours()):
        before[target].append(source)
        after[source].append(target)
    return before, after


def _order(layout: Layout) -> None:
    """Order each layer by the medians of its neighbours, forwards and backwards, and keep the best order found."""
    before, after = _adjacent(layout)
    best = [list(layer) for layer in layout.layers]
    fewest = _crossings(layout)
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        sides = before if forward else after
        layers = layout.layers if forward else layout.layers[::-1]
        for fixed, layer in itertools.pairwise(layers):
            place = {vertex: index for index, vertex in enumerate(fixed)}
            medians = {
                vertex: statistics.median(sorted(place[other] for other in sides[vertex])) if sides[vertex] else index
                for index, vertex in enumerate(layer)
            }
            layer.sort(key=medians.__getitem__)
        crossings = _crossings(layout)
        if crossings < fewest:
            fewest, best = crossings, [list(layer) for layer in layout.layers]
    layout.layers = best


def _crossings(layout: Layout) -> int:
    place = {vertex: (depth, index) for depth, layer in enumerate(layout.layers) for index, vertex in enumerate(layer)}
    pieces = sorted((*place[source], place[target][1]) for source, target in set(layout.neighbours()))
    return sum(
        one[0] == other[0] and one[1] < other[1] and one[2] > other[2]
        for one, other in itertools.combinations(pieces, 2)
    )


def _spread(
    wanted: Sequence[float], layer: Sequence[Vertex], size_of: Callable[[Vertex], float], gap: float
) -> list[float]:
    """Return the centres nearest to the wanted ones at which nothing overlaps.

    With the sizes taken off this is a regression on rising values: neighbours that would overlap form a block, which
    stands where it suits its members best on average.
    """
    offsets = [0.0]
    for one, other in itertools.pairwise(layer):
        offsets.append(offsets[-1] + (size_of(one) + size_of(other)) / 2 + gap)
    blocks: list[tuple[float, int]] = []
    for want, offset in zip(wanted, offsets, strict=False):
        mean, count = want - offset, 1
        while blocks and blocks[-1][0] > mean:
            other, members = blocks.pop()
            mean, count = (mean * count + other * members) / (count + members), count + members
        blocks.append((mean, count))
    means = [mean for mean, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets, strict=False)]
