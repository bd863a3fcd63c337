# SPDX-License-Identifier: Apache-2.0
"""Operators that compute over all samples of a run, known by name: with them an answer depends on other samples.

Theory of operation. The operators of a file are gone through once, in order, and nothing is computed. Of each value
that depends on the samples it is noted which of its axes counts them (`UNKNOWN` where that cannot be told); of others,
as shapes and what is made of them, nothing is noted. An operator is named if it takes all of such a value together, as
the scale of a dynamic quantisation does, or computes along the axis that counts samples. Where the axis is not known
nothing is said: running the model with samples that differ tells the rest (`sharing.py`).

Names and attributes are those of ONNX; whoever reads another format translates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

UNKNOWN: Final = -1
"""An axis counts samples, and it is not known which."""

_WHOLE: Final = {
    "DynamicQuantizeLinear": "the largest and smallest number of all samples are its scale",
    "DynamicQuantizeMatMul": "the largest and smallest number of all samples are its scale",
    "DynamicQuantizeLSTM": "the largest and smallest number of all samples are its scale",
    "NonZero": "it counts across all samples",
    "NonMaxSuppression": "it counts across all samples",
}
_ALONG: Final = {  # with the axis that holds where none is told
    **dict.fromkeys(("LogSoftmax", "Hardmax", "Softmax"), -1),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "LpNormalization", "TopK"), -1),
    **dict.fromkeys(("ArgMax", "ArgMin", "CumSum", "CumProd"), 0),
}
_LOSSES: Final = frozenset({"SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"})
_RECURRENT: Final = frozenset({"LSTM", "GRU", "RNN"})
_SHAPES: Final = frozenset({"Shape", "Size", "SequenceLength"})
_LONG: Final = 1 << 30
MAX_CALLS: Final = 10_000
"""Operators of functions and inner graphs that are gone through, again for each call."""
MAX_DEPTH: Final = 32
"""Functions and inner graphs within each other that are gone through."""


class Operator(msgspec.Struct):
    """An operator.

    Attributes:
        op: What it computes.
        domain: Whose operator it is; empty for ONNX's own.
        name: Its own name.
        inputs: Names of what it takes; empty for one that is left out.
        outputs: Names of what it gives.
        ints: Its attributes that are whole numbers, or lists of them.
        texts: Its attributes that are texts.
        graphs: Its attributes that are graphs.
    """

    op: str = ""
    domain: str = ""
    name: str = ""
    inputs: list[str] = []
    outputs: list[str] = []
    ints: dict[str, list[int]] = {}
    texts: dict[str, str] = {}
    graphs: dict[str, OperatorGraph] = {}


class OperatorGraph(msgspec.Struct):
    """A graph.

    Attributes:
        operators: Each after those it takes something from.
        inputs: Names of what it takes; in old files its constants as well.
        outputs: Names of what it gives.
        constants: Short lists of whole numbers that are in the file; other constants are None.
        ranks: Number of axes of those values of which the file tells it.
    """

    operators: list[Operator] = []
    inputs: list[str] = []
    outputs: list[str] = []
    constants: dict[str, list[int] | None] = {}
    ranks: dict[str, int] = {}


class Program(msgspec.Struct):
    """What a file computes.

    Attributes:
        graph: Its operators.
        functions: Operators that it defines itself, by domain and name.
        opset: Version of ONNX's own operators.
    """

    graph: OperatorGraph = msgspec.field(default_factory=OperatorGraph)
    functions: dict[tuple[str, str], OperatorGraph] = {}
    opset: int = 0


def over_samples(program: Program, feeds: Sequence[str]) -> str:
    """Name an operator that computes over all samples of a run, and say how; empty if there is none that is known.

    Args:
        feeds: Names of what is fed; the first axis of each counts samples.
    """
    try:
        _Walk(program).go(program.graph, dict.fromkeys(feeds, 0), program.graph.constants)
    except _Found as found:
        return str(found)
    return ""


class _Found(Exception):
    """There is such an operator."""


class _Walk:
    """One way through a program."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._calls = MAX_CALLS
        self._depth = 0

    def go(
        self, graph: OperatorGraph, axes: dict[str, int], constants: Mapping[str, list[int] | None]
    ) -> list[int | None]:
        """Go through a graph; returns which axis of each of its outputs counts samples, None for none.

        Raises:
            _Found: At an operator that computes over all samples.
        """
        for operator in graph.operators:
            given = [axes.get(name) for name in operator.inputs]
            if all(axis is None for axis in given) and not operator.graphs:
                continue
            known = [constants.get(name) for name in operator.inputs]
            rank = graph.ranks.get(operator.inputs[0]) if operator.inputs else None
            body = self._program.functions.get((operator.domain, operator.op))
            if operator.graphs or body is not None:
                self._depth += 1
                found = self._inner(operator, given, axes, constants, body)
                self._depth -= 1
            else:
                if why := self._why(operator, given, known, rank):
                    name = f" '{operator.name}'" if operator.name else ""
                    raise _Found(f"its operator {operator.op}{name} computes over all samples of a run: {why}")
                found = [_axis_after(operator, given, known, rank)] * len(operator.outputs)
            axes.update((name, axis) for name, axis in zip(operator.outputs, found, strict=False) if axis is not None)
        return [axes.get(name) for name in graph.outputs]

    def _inner(
        self,
        operator: Operator,
        given: Sequence[int | None],
        axes: Mapping[str, int],
        constants: Mapping[str, list[int] | None],
        body: OperatorGraph | None,
    ) -> list[int | None]:
        """Go through the graphs of an operator, or of a function that it calls."""
        self._calls -= sum(len(graph.operators) for graph in operator.graphs.values()) + 1
        if self._calls < 0 or self._depth > MAX_DEPTH:
            return [UNKNOWN] * len(operator.outputs)
        if body is not None:
            fed = {name: axis for name, axis in zip(body.inputs, given, strict=False) if axis is not None}
            self._calls -= len(body.operators)
            return self.go(body, fed, body.constants)
        named = f" '{operator.name}'" if operator.name else ""
        depends = f"its operator {operator.op}{named} computes over all samples of a run: "
        if operator.op in {"If", "Loop"} and any(axis is not None for axis in given[: 1 if operator.op == "If" else 2]):
            raise _Found(f"{depends}one condition holds for all of them")
        scans = operator.ints.get("num_scan_inputs", [0])[0] if operator.op == "Scan" else 0
        places = operator.ints.get("scan_input_axes", [0] * scans)
        given = list(given)
        for at, place in zip(range(len(given) - scans, len(given)), places, strict=False):
            axis = given[at]
            if axis is not None and axis == place:
                raise _Found(f"{depends}it goes from one to the next")
            given[at] = None if axis is None else UNKNOWN if axis == UNKNOWN or place < 0 else axis - (place < axis)
        results: list[int | None] = []
        for graph in operator.graphs.values():
            fed = list(given)
            if operator.op == "Loop":  # a number of the turn comes first, which the loop is told how many there are of
                fed = [None, None, *given[2:]]
            for _ in range(1 if operator.op == "If" else 2):  # what a turn makes is what the next one takes
                inner = {**axes, **{name: a for name, a in zip(graph.inputs, fed, strict=False) if a is not None}}
                results = self.go(graph, inner, {**constants, **graph.constants})
                if operator.op == "Loop":
                    if results[:1] not in ([], [None]):
                        raise _Found(f"{depends}one condition holds for all of them")
                    results = results[1:]
                carried = len(given) - (2 if operator.op == "Loop" else scans)
                start = len(fed) - len(given) + (2 if operator.op == "Loop" else 0)
                for at, axis in enumerate(results[:carried]):
                    fed[start + at] = fed[start + at] if axis is None else axis
        stacked = range(len(given) - (2 if operator.op == "Loop" else scans), len(results))
        return [
            UNKNOWN if operator.op != "If" and at in stacked and axis is not None else axis
            for at, axis in enumerate(results)
        ]

    def _why(
        self, operator: Operator, given: Sequence[int | None], known: Sequence[list[int] | None], rank: int | None
    ) -> str:
        """Return how an operator computes over all samples; empty if it is not known to do so."""
        op, ints = operator.op, operator.ints
        axis = given[0]
        if op in _WHOLE:
            return _WHOLE[op]
        if op in {"Unique", "Compress"} and "axis" not in ints and axis is not None:
            return "it takes all of them as one list"
        if op in _LOSSES and operator.texts.get("reduction", "mean") != "none":
            return "it sums them up"
        if op == "BatchNormalization" and self._is_trained(operator):
            return "their mean and variance are what it divides by"
        if axis is None:
            return ""
        if op.startswith("Reduce") or op == "MeanVarianceNormalization":
            axes = ints.get("axes", [0, 2, 3] if op.startswith("Mean") else None)
            if axes is None and len(known) > 1 and operator.inputs[1]:
                axes = known[1]
                if axes is None:
                    return ""
            is_all = not axes and not ints.get("noop_with_empty_axes", [0])[0]
            return "it sums them up" if is_all or (axes and _is_among(axis, axes, rank)) else ""
        if op in _RECURRENT and axis == ints.get("layout", [0])[0]:
            return "it goes from one to the next"
        if op == "ReverseSequence" and axis == ints.get("time_axis", [0])[0]:
            return "it changes their order"
        along: list[int] | None = None
        if op in {"Unique", "Compress"}:
            along = ints["axis"]
        elif op in {"CumSum", "CumProd"} and len(known) > 1:
            along = known[1]
        elif op in _ALONG:
            is_old = op in {"Softmax", "LogSoftmax", "Hardmax"} and self._program.opset < 13
            along = ints.get("axis", [1 if is_old else _ALONG[op]])
        return "it computes along the axis that counts them" if along and _is_among(axis, along, rank) else ""

    def _is_trained(self, operator: Operator) -> bool:
        """Tell whether a batch normalisation is one for training, by the rule of its version."""
        if self._program.opset >= 14:
            return operator.ints.get("training_mode", [0])[0] != 0
        if self._program.opset < 7:
            return operator.ints.get("is_test", [0])[0] == 0
        return len([name for name in operator.outputs if name]) > 1


def _is_among(axis: int, wanted: Sequence[int], rank: int | None) -> bool:
    if axis == UNKNOWN:
        return False
    return axis in wanted or (rank is not None and axis - rank in wanted)


def _axis_after(
    operator: Operator, given: Sequence[int | None], known: Sequence[list[int] | None], rank: int | None
) -> int | None:
    """Return which axis of what an operator gives counts samples."""
    op, ints = operator.op, operator.ints
    axis = given[0]
    told = next((one for one in given if one is not None and one >= 0), UNKNOWN)
    if op in _SHAPES:
        return None
    if op == "Gather" and axis is None:
        return told + max(ints.get("axis", [0])[0], 0) if told >= 0 else UNKNOWN
    if axis is None or axis == UNKNOWN:
        return told
    if op == "Transpose":
        order = ints.get("perm")
        return order.index(axis) if order and axis in order else UNKNOWN
    if op == "Gemm" and ints.get("transA", [0])[0]:
        return 1 - axis
    if op == "Reshape":
        shape = known[1] if len(known) > 1 else None
        return axis if axis == 0 and (not shape or shape[0] < 1) else UNKNOWN
    if op == "Flatten":
        return axis if axis == 0 and ints.get("axis", [1])[0] != 0 else UNKNOWN
    if op in {"Gather", "Concat", "Split"}:
        along = ints.get("axis", [0])[0]
        along = along + (rank or _LONG) if along < 0 else along
        return axis if along > axis or (op != "Gather" and along < axis) else UNKNOWN
    reduces = op.startswith("Reduce") or op in {"ArgMax", "ArgMin"}
    if op in {"Squeeze", "Unsqueeze"} or (reduces and not ints.get("keepdims", [1])[0]):
        axes = ints.get("axes") or ints.get("axis") or (known[1] if len(known) > 1 else None)
        if not axes or min(axes) < 0:
            return axis if axis == 0 and axes and rank and 0 not in [one + rank for one in axes] else UNKNOWN
        if op == "Unsqueeze":
            for one in sorted(axes):
                axis += one <= axis
            return axis
        return axis - sum(one < axis for one in axes)
    if op in _RECURRENT or op.startswith(("Sequence", "SplitTo", "ConcatFrom")):
        return UNKNOWN
    return told
