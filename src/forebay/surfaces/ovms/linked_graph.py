# SPDX-License-Identifier: Apache-2.0
"""What a `graph.pbtxt` is once it is linked: who reads and writes which stream, and what each node runs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from forebay.graph.spec import GraphSpec

PY_TENSOR: Final = "OVMS_PY_TENSOR"
OV_TENSOR: Final = "OVTENSOR"
IMAGE: Final = "IMAGE"


class Read(msgspec.Struct, frozen=True):
    """What a node reads on a port.

    Attributes:
        name: What the tensor is called there.
        is_renamed: Whether it is called so even if it has a name of its own.
    """

    port: str
    name: str
    is_renamed: bool = False


class PythonNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that runs a handler; plain data.

    Attributes:
        input_names: Streams that it reads, in the order of the file.
        output_names: Streams that it writes, in the order of the file.
        reads: What `execute` is given, in this order.
        writes: Its ports by the name of the stream.
        leaving: Those of its streams that leave the graph, and what answers call them.
        converted: Those of its streams that a converter to OpenVINO tensors reads.
        loop: The port on which its loop comes back; empty without one.
        turn: The port by which it leaves.
    """

    name: str
    handler: str
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    reads: tuple[Read, ...]
    writes: dict[str, str]
    leaving: dict[str, tuple[str, ...]]
    converted: frozenset[str] = frozenset()
    loop: str = ""
    turn: str = ""


class TensorName(msgspec.Struct, frozen=True):
    """What a graph calls a tensor of a model."""

    name: str
    place: str


class InferenceNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node that runs a model of the server's.

    Attributes:
        servable: The model.
        version: Its version; empty for the default one.
        inputs: The model's inputs by port.
        outputs: The model's outputs by port.
        place: File and line of the node.
        line: Where the model is named.
    """

    name: str
    servable: str
    version: str
    inputs: dict[str, TensorName]
    outputs: dict[str, TensorName]
    place: str
    line: int


class GraphOutput(msgspec.Struct, frozen=True):
    """A stream that leaves the graph.

    Attributes:
        called: What its tensors are called.
    """

    name: str
    called: str


class GraphLayout(msgspec.Struct, frozen=True, kw_only=True):
    """A graph that can be built.

    Attributes:
        python: The nodes with handlers, by name.
        inference: The nodes with models, by name.
        passing: The nodes between an input and an output of the graph, and what answers call their tensor.
        inputs: Names of the streams that requests fill, in the order of the file.
        images: Those of them that are images.
        numbers: Those of them that become OpenVINO tensors.
        outputs: What answers are made of, in the order of the file.
        missing: Outputs that nothing writes: the graph is there, and each request fails.
        side_packets: Parameters that each request must have.
        takes_side_packets: Whether requests may have any.
        loops: Whether a node may generate.
    """

    path: Path
    spec: GraphSpec
    python: dict[str, PythonNode]
    inference: dict[str, InferenceNode]
    passing: dict[str, str]
    inputs: tuple[str, ...]
    images: frozenset[str]
    numbers: frozenset[str]
    outputs: tuple[GraphOutput, ...]
    missing: tuple[str, ...]
    side_packets: tuple[str, ...]
    takes_side_packets: bool
    loops: bool
    warnings: tuple[str, ...]
