# SPDX-License-Identifier: Apache-2.0
"""Calls as values, the same for every encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from forebay.types.tensor import Tensor

Parameter = bool | int | float | str


class InferRequest(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A question to a model.

    Attributes:
        model: Its name.
        version: Its version; empty lets the server choose.
        id: What the answer repeats.
        inputs: What it is given.
        outputs: Names of what it shall give; none asks for everything.
        parameters: What else the model takes.
    """

    model: str
    inputs: Sequence[Tensor]
    version: str = ""
    id: str = ""
    outputs: Sequence[str] = ()
    parameters: Mapping[str, Parameter] = {}


class InferResponse(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A model's answer.

    Attributes:
        outputs: What it gave.
        model: Its name.
        version: The version that answered.
        id: What the request said.
        parameters: What else the model says.
    """

    outputs: Sequence[Tensor]
    model: str = ""
    version: str = ""
    id: str = ""
    parameters: Mapping[str, Parameter] = {}


class TensorMetadata(msgspec.Struct, frozen=True):
    """What one input or output of a model looks like; an axis of -1 has any length."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class ModelMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """What a model takes and gives; servers may leave both empty."""

    name: str
    inputs: Sequence[TensorMetadata] = ()
    outputs: Sequence[TensorMetadata] = ()
