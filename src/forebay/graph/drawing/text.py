# SPDX-License-Identifier: Apache-2.0
"""A graph as lines of text, from top to bottom, for terminals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from forebay.graph.drawing.layout import Arrow, Layout, Vertex, layout_of, positions
from forebay.graph.spec import GraphSpec

_UP, _DOWN, _LEFT, _RIGHT = 1, 2, 4, 8
# By the directions in which a cell has a line.
_LINES: Final = " │││─┘┐┤─└┌├─┴┬┼"
_GAP: Final = 3


def text(spec: GraphSpec, labels: Mapping[str, Sequence[str]]) -> str:
    """Draw a graph; `labels` are lines about each node, by its name."""
    layout = layout_of(spec)
    return _Page(layout, labels).draw()


class _Page:
    """The cells of a drawing."""

    def __init__(self, layout: Layout, labels: Mapping[str, Sequence[str]]) -> None:
        self._layout = layout
        self._boxes = {vertex: _box(vertex, labels) for layer in layout.layers for vertex in layer}
        centres = positions(layout, self._width, _GAP)
        self._left = {vertex: round(centre - self._width(vertex) / 2) for vertex, centre in centres.items()}
        self._rows: list[dict[int, str]] = []

    def draw(self) -> str:
        """Return the text."""
        layers = self._layout.layers
        for depth, layer in enumerate(layers):
            self._draw_boxes(layer)
            if depth + 1 < len(layers):
                self._draw_gap(layer, layers[depth + 1])
        lines = ["".join(row.get(x, " ") for x in range(max(row, default=-1) + 1)).rstrip() for row in self._rows]
        arrows = self._layout.arrows
        if any(arrow.is_optional and not arrow.is_back for arrow in arrows):
            lines += ["", "▽ may be absent"]
        back = [arrow for arrow in arrows if arrow.is_back]
        lines += [""] * bool(back) + [f"back: {arrow.path[0].name} → {arrow.path[1].name}" for arrow in back]
        return "\n".join(lines) + "\n"

    def _width(self, vertex: Vertex) -> int:
        return len(self._boxes[vertex][0])

    def _exit(self, vertex: Vertex) -> int:
        return self._left[vertex] + self._width(vertex) // 2

    def _draw_boxes(self, layer: Sequence[Vertex]) -> None:
        height = max(len(self._boxes[vertex]) for vertex in layer)
        rows: list[dict[int, str]] = [{} for _ in range(height)]
        for vertex in layer:
            box = self._boxes[vertex]
            # What is lower than its neighbours is led on to the end of the layer.
            below = ["│".rjust(self._exit(vertex) - self._left[vertex] + 1)] * (height - len(box))
            led_on = box + (below if self._leads_on(vertex) else [])
            for row, line in zip(rows, led_on, strict=False):
                row.update({self._left[vertex] + x: char for x, char in enumerate(line) if char != " "})
        self._rows += rows

    def _leads_on(self, vertex: Vertex) -> bool:
        return any(source is vertex for source, _ in self._layout.neighbours())

    def _draw_gap(self, above: Sequence[Vertex], below: Sequence[Vertex]) -> None:
        """Draw the lines from one layer to the next: down, along a track of each source, and down to the boxes."""
        ends = self._ends(above, below)
        bends = {source: found for source, found in ends.items() if any(x != self._exit(source) for x in found)}
        tracks = _tracks({source: (self._exit(source), found) for source, found in bends.items()})
        height = max(tracks.values(), default=-1) + 3
        cells: dict[tuple[int, int], int] = {}

        def line(x: int, first: int, last: int) -> None:
            for y in range(first, last + 1):
                cells[x, y] = cells.get((x, y), 0) | (_UP if y > first else 0) | (_DOWN if y < last else 0)

        for source, found in ends.items():
            start = self._exit(source)
            track = tracks.get(source, 0) + 1
            line(start, -1, track)
            for x in found:
                line(x, track, height)
            for x, following in itertools.pairwise(range(min(start, *found), max(start, *found) + 1)):
                cells[x, track] = cells.get((x, track), 0) | _RIGHT
                cells[following, track] = cells.get((following, track), 0) | _LEFT
        rows = [{x: _LINES[mask] for (x, y), mask in cells.items() if y == row} for row in range(height)]
        heads = [(arrow, x) for arrow, target, x in self._heads if target.kind != "via"]
        rows[-1].update({x: "▽" if arrow.is_optional else "▼" for arrow, x in heads})
        for arrow, x in heads:
            label = {x + 1 + place: char for place, char in enumerate(f" {arrow.label} ") if arrow.label}
            if not label.keys() & rows[-1].keys():
                rows[-1].update(label)
        self._rows += rows

    def _ends(self, above: Sequence[Vertex], below: Sequence[Vertex]) -> dict[Vertex, list[int]]:
        """Return where the lines of each source arrive: each at a column of its own, near to the one it comes from."""
        ends: dict[Vertex, list[int]] = {}
        self._heads: list[tuple[Arrow, Vertex, int]] = []
        exits = {self._exit(source): source for source in above if self._leads_on(source)}
        for target in below:
            arrivals: dict[tuple[Vertex, str], Arrow] = {}
            for arrow in self._layout.arrows:
                if not arrow.is_back and target in arrow.path[1:]:
                    arrivals.setdefault((arrow.path[arrow.path.index(target) - 1], arrow.label), arrow)
            taken: set[int] = set()
            for source, label in sorted(arrivals, key=lambda arrival: self._exit(arrival[0])):
                first, last = self._left[target], self._left[target] + self._width(target) - 1
                inside = range(first + 1, last) if last - first > 1 else [first]
                wanted = self._exit(source) if len(arrivals) > 1 or self._exit(source) in inside else self._exit(target)
                free = [x for x in inside if x not in taken and exits.get(x, source) is source]
                x = min(free or inside, key=lambda x: abs(x - wanted))
                taken.add(x)
                ends.setdefault(source, []).append(x)
                self._heads.append((arrivals[source, label], target, x))
        return ends


def _box(vertex: Vertex, labels: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of a box, all equally long."""
    if vertex.kind == "via":
        return ["│"]
    if vertex.kind != "node":
        return [f"({vertex.name})"]
    lines = [vertex.name, *labels.get(vertex.name, ())]
    width = max(map(len, lines))
    return [f"┌{'─' * (width + 2)}┐", *(f"│ {line.ljust(width)} │" for line in lines), f"└{'─' * (width + 2)}┘"]


def _tracks(lines: Mapping[Vertex, tuple[int, Sequence[int]]]) -> dict[Vertex, int]:
    """Give each source a row for its horizontal line, so that few lines cross; lines that do not meet may share a row.

    Args:
        lines: The column where each source leaves, and those where it arrives.
    """
    spans = {vertex: range(min(start, *ends), max(start, *ends) + 1) for vertex, (start, ends) in lines.items()}

    def crossings(upper: Vertex, lower: Vertex) -> int:
        return (lines[lower][0] in spans[upper]) + sum(end in spans[lower] for end in lines[upper][1])

    order: list[Vertex] = []
    for vertex in lines:
        costs = [
            sum(crossings(other, vertex) for other in order[:place])
            + sum(crossings(vertex, other) for other in order[place:])
            for place in range(len(order) + 1)
        ]
        order.insert(costs.index(min(costs)), vertex)
    rows: dict[Vertex, int] = {}
    for vertex in order:
        span = spans[vertex]
        met = [row for other, row in rows.items() if span[0] <= spans[other][-1] and spans[other][0] <= span[-1]]
        rows[vertex] = max(met, default=-1) + 1
    return rows
