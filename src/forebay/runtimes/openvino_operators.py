# SPDX-License-Identifier: Apache-2.0
"""The operators of a model that OpenVINO has read, by the names and attributes that ONNX has for them."""

from __future__ import annotations

from typing import Any, Final

from forebay.runtimes.onnx_operators import Operator, OperatorGraph, Program

_NAMES: Final = {"ShapeOf": "Shape", "MVN": "MeanVarianceNormalization", "NormalizeL2": "LpNormalization"}
_AXES: Final = {
    "Gather": (2, "axis"),
    "LpNormalization": (1, "axis"),
    "MeanVarianceNormalization": (1, "axes"),
    "Split": (1, "axis"),
    "Transpose": (1, "perm"),
    "Unique": (1, "axis"),
    "VariadicSplit": (1, "axis"),
}
"""Which input holds what ONNX has as an attribute."""
_SHORT: Final = 512


def program_of(model: Any) -> tuple[Program, list[str]]:
    """Return what an `openvino.Model` computes, and the names of what it is fed."""
    graph = OperatorGraph()
    feeds: list[str] = []
    for node in model.get_ordered_ops():
        kind: str = node.get_type_name()
        name: str = node.get_friendly_name()
        outputs = [f"{name}:{at}" for at in range(node.get_output_size())]
        for output, port in zip(node.outputs(), outputs, strict=True):
            rank = output.get_partial_shape().rank
            if not rank.is_dynamic:
                graph.ranks[port] = rank.get_length()
        if kind == "Parameter":
            feeds += outputs
        elif kind == "Constant":
            graph.constants[outputs[0]] = _numbers(node)
        else:
            graph.operators.append(_operator(node, kind, name, outputs, graph))
    return Program(graph, opset=18), feeds


def _operator(node: Any, kind: str, name: str, outputs: list[str], graph: OperatorGraph) -> Operator:
    sources = [port.get_source_output() for port in node.inputs()]
    inputs = [f"{one.get_node().get_friendly_name()}:{one.get_index()}" for one in sources]
    operator = Operator(_NAMES.get(kind, kind), "", name, inputs, outputs)
    attributes = node.get_attributes()
    if type(axis := attributes.get("axis")) is int:
        operator.ints["axis"] = [axis]
    if kind == "ReverseSequence":
        operator.ints["time_axis"] = [attributes.get("seq_axis", 1)]
    if kind.startswith("Reduce"):
        operator.ints["keepdims"] = [int(attributes.get("keep_dims", False))]
        if graph.ranks.get(outputs[0]) == 0:  # all axes, which a part of the graph may count
            operator.ints["axes"] = [*range(graph.ranks.get(inputs[0], 1))]
    place, attribute = _AXES.get(operator.op, (0, ""))
    if attribute and len(inputs) > place and (axes := graph.constants.get(inputs[place])) is not None:
        operator.ints[attribute] = axes
    return operator


def _numbers(node: Any) -> list[int] | None:
    data = node.get_data()
    return [int(one) for one in data.ravel()] if data.dtype.kind in "iu" and data.size <= _SHORT else None
