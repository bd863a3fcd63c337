# SPDX-License-Identifier: Apache-2.0
"""A graph as an SVG picture, from left to right, that reads well on light and on dark pages."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from forebay.graph.drawing.layout import Arrow, Layout, Vertex, layout_of, positions
from forebay.graph.spec import GraphSpec

_TITLE_PX: Final = 8.0
"""Width of a letter of a name; generous, as the font is the reader's."""
_LINE_PX: Final = 6.6
_ROW_PX: Final = 16.0
_PAD_PX: Final = 12.0
_GAP_PX: Final = 22.0
_ENDS_PX: Final = 13.0
"""Room between two arrows on one side of a box."""
_LAYER_PX: Final = 64.0
_MARGIN_PX: Final = 16.0

_STYLE: Final = """\
svg { color: #1f2430; --box: #f4f6fa; --edge: #6b7485; --quiet: #5a6375; --end: #e3f0e6; }
@media (prefers-color-scheme: dark) {
  svg { color: #e6e9f0; --box: #262c38; --edge: #8b94a7; --quiet: #a5aec0; --end: #22382a; }
}
text { font: 13px ui-sans-serif, system-ui, sans-serif; fill: currentColor; text-anchor: middle; }
text.name { font-weight: 600; }
text.line, text.port { font-size: 11px; fill: var(--quiet); }
text.port { text-anchor: start; }
rect { fill: var(--box); stroke: var(--edge); }
rect.end { fill: var(--end); }
path { fill: none; stroke: var(--edge); stroke-width: 1.4; }
path.optional { stroke-dasharray: 5 4; }
path.back { stroke-dasharray: 2 4; }
marker path { fill: var(--edge); stroke: none; }"""

_HEAD: Final = """\
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0,0 L8,4 L0,8 z"/></marker></defs>"""


def svg(spec: GraphSpec, labels: Mapping[str, Sequence[str]], runs_in: Mapping[str, str] | None = None) -> str:
    """Draw a graph.

    Args:
        labels: Lines about each node, by its name.
        runs_in: The endpoint of each node, by its name; what has one is a group with it as `data-endpoint`.
    """
    return _Picture(layout_of(spec), labels, runs_in or {}).draw(spec.name)


class _Picture:
    """Places in pixels: layers are columns, and a vertex stands along its column."""

    def __init__(self, layout: Layout, labels: Mapping[str, Sequence[str]], runs_in: Mapping[str, str]) -> None:
        self._layout = layout
        self._runs_in = runs_in
        self._lines = {
            vertex: tuple(labels.get(vertex.name, ())) if vertex.kind == "node" else ()
            for layer in layout.layers
            for vertex in layer
        }
        centres = positions(layout, self._height, _GAP_PX)
        self._y = {vertex: centre + _MARGIN_PX for vertex, centre in centres.items()}
        self._x: dict[Vertex, float] = {}
        self._column: dict[Vertex, tuple[float, float]] = {}
        x = _MARGIN_PX
        for layer in layout.layers:
            width = max(map(self._width, layer))
            self._x.update(dict.fromkeys(layer, x + width / 2))
            self._column.update(dict.fromkeys(layer, (x, x + width)))
            x += width + _LAYER_PX
        self._size = x - _LAYER_PX + _MARGIN_PX, max(map(self._bottom, self._y)) + _MARGIN_PX

    def draw(self, name: str) -> str:
        """Return the document."""
        back = [arrow for arrow in self._layout.arrows if arrow.is_back]
        width, height = self._size
        paths = [path for arrow in self._layout.arrows if not arrow.is_back for path in self._arrow(arrow)]
        for number, arrow in enumerate(back, 1):
            paths += self._back_arrow(arrow, height + number * _GAP_PX - _MARGIN_PX)
        height += len(back) * _GAP_PX
        boxes = [part for vertex in self._y if vertex.kind != "via" for part in self._box(vertex)]
        label = quoteattr(f"The graph {name}")
        root = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        root += f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label={label}>'
        return "\n".join([root, f"<style>\n{_STYLE}\n</style>", _HEAD, *paths, *boxes, "</svg>\n"])

    def _width(self, vertex: Vertex) -> float:
        if vertex.kind == "via":
            return 0.0
        longest = max([len(vertex.name) * _TITLE_PX, *(len(line) * _LINE_PX for line in self._lines[vertex])])
        return longest + 2 * _PAD_PX

    def _height(self, vertex: Vertex) -> float:
        if vertex.kind == "via":
            return 0.0
        arriving = sum(arrow.path[-1] is vertex and not arrow.is_back for arrow in self._layout.arrows)
        ends = max(len(self._labels(vertex)), arriving)
        return max((1 + len(self._lines[vertex])) * _ROW_PX + _PAD_PX, (ends + 1) * _ENDS_PX)

    def _bottom(self, vertex: Vertex) -> float:
        return self._y[vertex] + self._height(vertex) / 2

    def _box(self, vertex: Vertex) -> list[str]:
        width, height = self._width(vertex), self._height(vertex)
        x, top = self._x[vertex], self._y[vertex] - height / 2
        is_node = vertex.kind == "node"
        shape = 'rx="6"' if is_node else f'rx="{height / 2:.1f}" class="end"'
        parts = [f'<rect x="{x - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" {shape}/>']
        rows = [("name" if is_node else "end", vertex.name), *(("line", line) for line in self._lines[vertex])]
        y = self._y[vertex] + (0.75 - len(rows) / 2) * _ROW_PX
        for row, (kind, text) in enumerate(rows):
            parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y + row * _ROW_PX:.1f}">{escape(text)}</text>')
        endpoint = self._runs_in.get(vertex.name) if is_node else None
        return parts if endpoint is None else [f"<g data-endpoint={quoteattr(endpoint)}>", *parts, "</g>"]

    def _arrow(self, arrow: Arrow) -> list[str]:
        source, *places, target = arrow.path
        start, height = self._x[source] + self._width(source) / 2, self._departure(arrow)
        end, arrival = self._x[target] - self._width(target) / 2, self._arrival(arrow)
        x, y = self._column[source][1], height
        curve = f"M{start:.1f},{y:.1f} H{x:.1f}"
        # Curves stay between the columns, and lines are straight inside of them, or they would touch wider boxes.
        for place in (*places, target):
            left, right = self._column[place]
            to_y = arrival if place is target else self._y[place]
            middle = (x + left) / 2
            curve += f" C{middle:.1f},{y:.1f} {middle:.1f},{to_y:.1f} {left:.1f},{to_y:.1f}"
            curve += f" H{end if place is target else right:.1f}"
            x, y = right, to_y
        kind = ' class="optional"' if arrow.is_optional else ""
        found = [f'<path{kind} d="{curve}" marker-end="url(#head)"/>']
        if arrow.label and arrow is self._leaving(source, arrow.label)[0]:
            label = escape(arrow.label)
            found.append(f'<text class="port" x="{start + 5:.1f}" y="{height - 5:.1f}">{label}</text>')
        return found

    def _labels(self, source: Vertex) -> list[str]:
        arrows = self._layout.arrows
        return sorted({arrow.label for arrow in arrows if arrow.path[0] is source and not arrow.is_back})

    def _leaving(self, source: Vertex, label: str) -> list[Arrow]:
        arrows = self._layout.arrows
        return [arrow for arrow in arrows if not arrow.is_back and arrow.path[0] is source and arrow.label == label]

    def _departure(self, arrow: Arrow) -> float:
        """Return the height at which an arrow leaves the right side of a box; results are stacked in their order."""
        source = arrow.path[0]
        heights = {
            label: statistics.fmean(self._y[other.path[1]] for other in self._leaving(source, label))
            for label in self._labels(source)
        }
        step = self._height(source) / (len(heights) + 1)
        return (
            self._y[source]
            - self._height(source) / 2
            + step * (sorted(heights, key=heights.__getitem__).index(arrow.label) + 1)
        )

    def _arrival(self, arrow: Arrow) -> float:
        """Return the height at which an arrow meets the left side of a box; arrows are stacked in their order."""
        target = arrow.path[-1]
        arriving = [other for other in self._layout.arrows if not other.is_back and other.path[-1] is target]
        arriving.sort(key=lambda other: self._y[other.path[-2]])
        step = self._height(target) / (len(arriving) + 1)
        return self._y[target] - self._height(target) / 2 + step * (arriving.index(arrow) + 1)

    def _back_arrow(self, arrow: Arrow, depth: float) -> list[str]:
        source, target = arrow.path
        x, y = self._x[source], self._bottom(source)
        to_x, to_y = self._x[target], self._bottom(target)
        curve = f"M{x:.1f},{y:.1f} C{x:.1f},{depth:.1f} {to_x:.1f},{depth:.1f} {to_x:.1f},{to_y + 2:.1f}"
        return [f'<path class="back" d="{curve}" marker-end="url(#head)"/>']
