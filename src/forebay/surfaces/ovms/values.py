# SPDX-License-Identifier: Apache-2.0
"""Values on the streams of a graph, and what each side makes of them.

A packet holds what its writer had: a tensor of a request, a handler's `pyovms.Tensor`, a model's NumPy array. Whoever
reads it makes what it needs of it, so that nothing is converted for nobody.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay.arrays.tensors import from_array, to_array
from forebay.errors import InvalidRequest, RequestError
from forebay.surfaces.ovms.tensor import PyTensor, read, renamed, written
from forebay.types.datatypes import DATATYPES
from forebay.types.tensor import Tensor, check_size

if TYPE_CHECKING:
    import numpy.typing as npt


class ExecutionFailed(InvalidRequest):
    """A node failed at what it was given; the original blames the request and tells the client why, and so do we."""


def as_python(value: Any, name: str, *, is_renamed: bool = False) -> PyTensor:
    """Return a value for a handler.

    Args:
        value: A packet's.
        name: What a tensor without a name of its own is called.
        is_renamed: Whether one that has a name is called so as well.
    """
    if isinstance(value, PyTensor):
        return renamed(value, name) if is_renamed else value
    if isinstance(value, Tensor):
        return read(value, name)
    return PyTensor(name, value)


def as_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Return a value for a model.

    Raises:
        ExecutionFailed: If it is of a type that no model takes, or its length is not what type and shape say.
    """
    if isinstance(value, PyTensor):
        value = written(value, name)
    if not isinstance(value, Tensor):
        return value
    if value.datatype not in DATATYPES or not DATATYPES[value.datatype].size:
        msg = f"'{name}' is of the type '{value.datatype[:80]}', which no model takes"
        raise ExecutionFailed(msg)
    try:
        check_size(name, value.datatype, value.shape, len(value.data))
        return to_array(value)
    except RequestError as error:
        raise ExecutionFailed(error.message) from None


def as_wire(value: Any, name: str) -> Tensor:
    """Return a value as an answer has it."""
    if isinstance(value, PyTensor):
        return written(value, name)
    if isinstance(value, Tensor):
        return Tensor(name, value.datatype, value.shape, value.data)
    return from_array(name, value)
