# SPDX-License-Identifier: Apache-2.0
"""Draw a graph: as text for a terminal, as Mermaid for Markdown, as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

import msgspec

from forebay.graph.drawing.layout import Vertex, layout_of
from forebay.graph.drawing.svg import svg
from forebay.graph.drawing.text import text
from forebay.graph.spec import GraphSpec

Form = Literal["text", "mermaid", "svg"]


class Drawable(msgspec.Struct, frozen=True, eq=False):
    """A graph, and the text in its boxes.

    Attributes:
        labels: Lines about each node, by its name, under the name.
        runs_in: Where each node runs, by its name: several calls may be of one endpoint.
    """

    spec: GraphSpec
    labels: Mapping[str, Sequence[str]] = {}
    runs_in: Mapping[str, str] = {}


def draw(graph: Drawable, form: Form) -> str:
    """Draw a graph.

    Inputs may be absent where an arrow is dashed (in text: has a hollow head), and back edges are marked as such.
    """
    if form == "mermaid":
        return mermaid(graph.spec, graph.labels)
    return svg(graph.spec, graph.labels, graph.runs_in) if form == "svg" else text(graph.spec, graph.labels)


def mermaid(spec: GraphSpec, labels: Mapping[str, Sequence[str]]) -> str:
    """Draw a graph, with lines about its nodes by name, as a flow chart of Mermaid, which many editors show."""
    layout = layout_of(spec)
    vertices = [vertex for layer in layout.layers for vertex in layer if vertex.kind != "via"]
    ids = {vertex: f"{vertex.kind[0]}{number}" for number, vertex in enumerate(vertices)}
    lines = ["flowchart LR"]
    lines += [f"    {ids[vertex]}{_shape(vertex, labels)}" for vertex in vertices]
    for arrow in layout.arrows:
        line = "-.->" if arrow.is_optional or arrow.is_back else "-->"
        label = "back" if arrow.is_back else arrow.label
        told = f'|"{_quoted(label)}"|' if label else ""
        lines.append(f"    {ids[arrow.path[0]]} {line}{told} {ids[arrow.path[-1]]}")
    return "\n".join(lines) + "\n"


def _shape(vertex: Vertex, labels: Mapping[str, Sequence[str]]) -> str:
    if vertex.kind != "node":
        return f'(["{_quoted(vertex.name)}"])'
    return f'["{"<br/>".join(map(_quoted, [vertex.name, *labels.get(vertex.name, ())]))}"]'


_ENTITIES: Final = {ord(char): f"#{ord(char)};" for char in '"#&;<>`\\'}


def _quoted(name: str) -> str:
    """Write a name so that Mermaid reads nothing into it."""
    return name.translate(_ENTITIES)
