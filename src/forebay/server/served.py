# SPDX-License-Identifier: Apache-2.0
"""What a server answers with under a name: an endpoint, and what protocols must know of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from forebay.protocols.native import Contract

if TYPE_CHECKING:
    from forebay.graph.drawing.draw import Drawable
    from forebay.protocols.openapi import Described
    from forebay.serving.endpoint import Endpoint
    from forebay.serving.tensor_face import TensorFace


class ServedMethod(msgspec.Struct, frozen=True):
    """A method of a model beside `predict`, with what protocols must know of it."""

    contract: Contract
    described: Described


class Served(msgspec.Struct, eq=False):
    """An endpoint with what protocols must know of it.

    Attributes:
        endpoint: What answers.
        contract: How its bytes are moved.
        described: How it is documented; None where its requests are opaque.
        nodes: The endpoints of its nodes by name, if it is a graph. They start and stop with it.
        weight: Its part of what is asked for without a version; None leaves it to the first version of its name.
        drawing: How it is drawn, if it is a graph that can be.
        methods: What the same endpoint answers at further paths.
        tensors: What tensors it takes and gives; None if it takes none.
    """

    endpoint: Endpoint
    contract: Contract
    described: Described | None = None
    nodes: Mapping[str, Endpoint] = {}
    weight: int | None = None
    drawing: Drawable | None = None
    methods: Sequence[ServedMethod] = ()
    tensors: TensorFace | None = None

    @property
    def contracts(self) -> dict[str, Contract]:
        """How bytes are moved, by the path below the model."""
        return {"": self.contract, **{one.described.path: one.contract for one in self.methods}}
