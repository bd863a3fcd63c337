# SPDX-License-Identifier: Apache-2.0
"""Calls as values, the same for every encoding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from forebay.errors import ValidationError
from forebay.protocols.kserve.dtypes import dtype_of

Parameter = bool | int | float | str
Data = bytes | bytearray | memoryview


class Tensor(msgspec.Struct, frozen=True, eq=False):
    """An array on its way.

    Attributes:
        name: Which input or output it is.
        datatype: One of `dtypes.DTYPES`.
        shape: Its axes, the first one outermost.
        data: Its elements, row by row and little-endian. Each element of BYTES follows its length in 4 bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Data


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


def elements(name: str, shape: Sequence[int]) -> int:
    """Return how many elements a tensor has.

    Raises:
        ValidationError: If an axis is negative.
    """
    if any(axis < 0 for axis in shape):
        msg = f"tensor '{name}' has the shape {list(shape)}; every axis must be 0 or more"
        raise ValidationError(msg)
    return math.prod(shape)


def check_size(name: str, datatype: str, shape: Sequence[int], length_bytes: int) -> None:
    """Check that raw data is as long as its shape says; what BYTES holds is known only when it is read.

    Raises:
        ValidationError: With both lengths.
    """
    size = dtype_of(datatype).size
    expected = elements(name, shape) * size
    if size and length_bytes != expected:
        msg = (
            f"tensor '{name}' of {datatype}{list(shape)} needs {expected} bytes of data, and {length_bytes} came; "
            "shape and data must agree"
        )
        raise ValidationError(msg)
