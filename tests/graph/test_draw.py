# SPDX-License-Identifier: Apache-2.0
"""Drawings of graphs: everything is in them, nothing lies on anything else, and names are only text."""

import itertools
import re
from xml.etree import ElementTree as ET

import hypothesis
import pytest
from hypothesis import strategies as st

from forebay.graph.drawing.draw import Drawable, draw
from forebay.graph.drawing.layout import layout_of, positions
from forebay.graph.spec import GraphSpec, NodeSpec, check

SVG = "{http://www.w3.org/2000/svg}"


def step(name, *inputs, outputs=(), **more):
    """A node that reads streams on ports named like them, and writes one named like itself, or several."""
    ports = {port: f"{name}.{port}" for port in outputs} or {"out": name}
    return NodeSpec(name=name, inputs={f"from-{stream}": stream for stream in inputs}, outputs=ports, **more)


def graph(inputs, outputs, *nodes):
    spec = GraphSpec(name="g", inputs=tuple(inputs), outputs=dict(outputs), nodes=nodes)
    check(spec)
    return spec


OCR = graph(
    ["image"],
    {"out": "layout"},
    step("decode", "image"),
    step("detect", "decode"),
    step("crop", "decode", "detect"),
    step("layout", "detect", "crop"),
)
LOOP = graph(
    ["x"],
    {"y": "body"},
    step("body", "x", "again", optional=frozenset({"from-x"}), back_edges=frozenset({"from-again"})),
    step("again", "body"),
)
BRANCHES = graph(
    ["x"],
    {"a": "left", "b": "route.odd"},
    step("route", "x", outputs=["even", "odd"]),
    step("left", "route.even"),
)


PICTURE = """\
          (image)
             │
             ▼
         ┌────────┐
         │ decode │
         └────────┘
              │
              ├────┐
              ▼    │
┌──────────────┐   │
│ detect       │   │
│ 2 processes  │   │
│ batches of 8 │   │
└──────────────┘   │
        │          │
        ├────┐    ┌┘
        │    ▼    ▼
        │   ┌──────┐
        │   │ crop │
        │   └──────┘
        │       │
        │      ┌┘
        ▼      ▼
       ┌────────┐
       │ layout │
       └────────┘
            │
            ▼
        (result)
"""


def test_text_is_read_from_top_to_bottom():
    assert draw(Drawable(OCR, {"detect": ["2 processes", "batches of 8"]}), "text") == PICTURE


def test_text_tells_which_of_several_results_an_arrow_carries():
    assert "▼ even" in draw(Drawable(BRANCHES), "text")
    assert "▼ odd" in draw(Drawable(BRANCHES), "text")


def test_text_tells_optional_inputs_and_back_edges():
    text = draw(Drawable(LOOP), "text")
    assert "▽" in text
    assert "▽ may be absent" in text
    assert text.endswith("back: again → body\n")
    assert "▽" not in draw(Drawable(OCR), "text")


def test_mermaid_names_each_box_once_and_each_arrow():
    assert draw(Drawable(BRANCHES, {"left": ["1 thread"]}), "mermaid").splitlines() == [
        "flowchart LR",
        '    i0(["x"])',
        '    n1["route"]',
        '    n2["left<br/>1 thread"]',
        '    o3(["b"])',
        '    o4(["a"])',
        "    i0 --> n1",
        '    n1 -->|"even"| n2',
        "    n2 --> o4",
        '    n1 -->|"odd"| o3',
    ]


def test_mermaid_marks_optional_inputs_and_back_edges():
    lines = draw(Drawable(LOOP), "mermaid").splitlines()
    assert '    n2 -.->|"back"| n1' in lines
    assert "    i0 -.-> n1" in lines


def test_the_only_result_is_called_that():
    assert "(result)" in draw(Drawable(OCR), "text")


WILD = '</text><script>alert("1")</script> & "]; #quot; \\'


def test_names_are_nothing_but_text():
    spec = graph([WILD], {WILD: f"{WILD}2"}, step(f"{WILD}2", WILD))
    picture = ET.fromstring(draw(Drawable(spec, {f"{WILD}2": [WILD]}), "svg"))
    assert not list(picture.iter("script")) + list(picture.iter(f"{SVG}script"))
    assert {text.text for text in picture.iter(f"{SVG}text")} == {WILD, f"{WILD}2"}
    for line in draw(Drawable(spec), "mermaid").splitlines()[1:]:
        assert re.fullmatch(r'    \w+(\(\["[^"<>&\\`]*"\]\)|\["[^"<>&\\`]*"\]| --> \w+)', line), line


def boxes(picture):
    found = [[float(box.attrib[side]) for side in ("x", "y", "width", "height")] for box in picture.iter(f"{SVG}rect")]
    return [(x, y, x + width, y + height) for x, y, width, height in found]


@st.composite
def graphs(draw_from):
    """Graphs of nodes that read from what stands before them."""
    streams = [f"in{number}" for number in range(draw_from(st.integers(1, 3)))]
    inputs = list(streams)
    nodes = []
    for number in range(draw_from(st.integers(1, 14))):
        chosen = draw_from(st.lists(st.sampled_from(streams), min_size=1, max_size=4, unique=True))
        outputs = draw_from(st.sampled_from([(), (), ("a", "b")]))
        nodes.append(step(f"node {number}", *chosen, outputs=outputs))
        streams += nodes[-1].outputs.values()
    results = draw_from(st.lists(st.sampled_from(streams), min_size=1, max_size=3, unique=True))
    return graph(inputs, {f"result {number}": stream for number, stream in enumerate(results)}, *nodes)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(graphs(), st.integers(0, 3))
def test_every_graph_can_be_drawn_and_nothing_overlaps(spec, lines):
    labels = {node.name: ["12 threads"] * lines for node in spec.nodes}
    picture = ET.fromstring(draw(Drawable(spec, labels), "svg"))
    found = boxes(picture)
    assert len(found) == len(spec.inputs) + len(spec.nodes) + len(spec.outputs)
    for one, other in itertools.combinations(found, 2):
        (left, top, right, bottom), (other_left, other_top, other_right, other_bottom) = one, other
        assert right <= other_left or other_right <= left or bottom <= other_top or other_bottom <= top
    width, height = map(float, picture.attrib["viewBox"].split()[2:])
    assert all(min(left, top) >= 0 and right <= width and bottom <= height for left, top, right, bottom in found)
    text = draw(Drawable(spec, labels), "text")
    for node in spec.nodes:
        assert f"│ {node.name}" in text
    assert text.count("▼") == sum(len(node.inputs) for node in spec.nodes) + len(spec.outputs)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(graphs())
def test_arrows_lead_to_the_next_layer(spec):
    layout = layout_of(spec)
    depth = {vertex: number for number, layer in enumerate(layout.layers) for vertex in layer}
    assert all(depth[target] == depth[source] + 1 for source, target in layout.neighbours())
    centres = positions(layout, lambda _vertex: 10.0, 5.0)
    for layer in layout.layers:
        for one, other in itertools.pairwise(layer):
            assert centres[other] - centres[one] >= 14.999


def test_few_arrows_cross():
    """Two chains that are declared crosswise are drawn side by side."""
    spec = graph(
        ["x", "y"],
        {"r": "c", "s": "d"},
        step("b", "y"),
        step("a", "x"),
        step("d", "b"),
        step("c", "a"),
    )
    layout = layout_of(spec)
    places = {vertex.name: index for layer in layout.layers for index, vertex in enumerate(layer)}
    assert places["a"] == places["c"] == places["x"]
    assert places["b"] == places["d"] == places["y"]


@pytest.mark.parametrize("form", ["text", "mermaid", "svg"])
def test_a_long_chain_and_a_wide_layer_are_drawn(form):
    chain = graph(["x"], {"r": "n49"}, *(step(f"n{i}", "x" if i == 0 else f"n{i - 1}") for i in range(50)))
    wide = graph(["x"], {"r": "n9"}, *(step(f"n{i}", "x") for i in range(9)), step("n9", *(f"n{i}" for i in range(9))))
    for spec in (chain, wide):
        assert all(node.name in draw(Drawable(spec), form) for node in spec.nodes)
