# SPDX-License-Identifier: Apache-2.0
"""Values on the streams of a graph, and what each side makes of them.

A packet holds what its writer had: a tensor of a request, a handler's `pyovms.Tensor`, a model's NumPy array. Whoever
reads it makes what it needs of it, so that nothing is converted for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forebay.arrays.numpy_tensors import as_json, as_raw, from_array, to_array
from forebay.errors import InvalidRequest, RequestError
from forebay.surfaces.ovms.pyovms_tensor import PyTensor, check_writable, read, renamed, written
from forebay.types.datatypes import DATATYPES
from forebay.types.tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt


class ExecutionFailed(InvalidRequest):
    """A node failed at what it was given; the original blames the request and tells the client why, and so do we."""


def as_python(value: Any, name: str, *, is_renamed: bool = False) -> PyTensor:
    """Return a value for a handler.

    Args:
        name: What a tensor without a name of its own is called.
        is_renamed: Whether one that has a name is called so as well.
    """
    if isinstance(value, PyTensor):
        return renamed(value, name) if is_renamed else value
    if isinstance(value, Tensor):
        return read(as_raw(value), name)
    return PyTensor(name, value)


def as_array(value: Any, name: str) -> npt.NDArray[Any]:
    """Return a value for a model.

    Raises:
        ExecutionFailed: If it is of a type that no model takes, or its length is not what type and shape say.
    """
    if not isinstance(value, (PyTensor, Tensor)):
        return value
    if value.datatype not in DATATYPES or not DATATYPES[value.datatype].size:
        raise ExecutionFailed(
            f"'{name}' is of the type '{value.datatype[:80]}'; nodes that infer take numbers and BOOL"
        )
    try:
        if isinstance(value, PyTensor):
            check_writable(value)
            value = written(value, name)
        return to_array(as_raw(value))
    except RequestError as error:
        raise ExecutionFailed(error.message) from None


def as_wire(value: Any, name: str) -> Tensor:
    """Return a value as an answer has it."""
    if isinstance(value, PyTensor):
        return written(value, name)
    if isinstance(value, Tensor):
        return Tensor(name, value.datatype, value.shape, value.data, value.is_json)
    return from_array(name, value)


def as_wanted(tensor: Tensor, params: Mapping[str, Any]) -> Tensor:
    """Return a tensor of an answer in the form that its client wants.

    Raises:
        InvalidRequest: If that is JSON, which cannot say it.
    """
    wants_json = wants_in_json(tensor.name, params)
    if wants_json and not tensor.is_json:
        return as_json(tensor)
    return tensor if wants_json else as_raw(tensor)


def wants_in_json(name: str, params: Mapping[str, Any]) -> bool:
    """Tell whether a client wants a tensor of an answer, and wants it in JSON."""
    wanted = params.get("wanted")
    return dict(wanted).get(name, False) if wanted else params.get("is_json", False)
