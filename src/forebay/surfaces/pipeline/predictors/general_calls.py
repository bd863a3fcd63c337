# SPDX-License-Identifier: Apache-2.0
"""What the original's model servers are asked and answer, and its form in JSON, which they speak over HTTP.

POST /GeneralModelService/inference with
    {"tensor": [{"float_data": [...], "elem_type": 1, "shape": [1, 13], "name": "x", "alias_name": "x"}],
     "fetch_var_names": ["price"], "log_id": 0}
gives
    {"outputs": [{"tensor": [{...}], "engine_name": "..."}], "err_no": 0, "err_msg": ""}

`rpc_tensors` has the same in protobuf, for gRPC.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import RunnerFailed, ValidationError
from forebay.runtimes.signature import LOD, Value, Var
from forebay.surfaces.pipeline.predictors.descriptions import TYPES
from forebay.surfaces.pipeline.protocol import tensors
from forebay.types.datatypes import BY_PADDLE

if TYPE_CHECKING:
    from forebay.runtimes.signature import Array

PATH: Final = "/GeneralModelService/inference"

FIELDS: Final[Mapping[int, str]] = {20: "data"} | {number: field for number, (_, field) in tensors.FIELDS.items()}
"""Where the elements of each type are, if they are numbers and texts one by one."""
CONTENT: Final[Mapping[int, str]] = {4: "<i2", 5: "<f2", 6: "<u2", 7: "u1", 8: "i1"}
"""Types whose elements are sent as bytes, in `tensor_content`; these servers look for narrow ones nowhere else."""

_DESCRIBED: Final = {row.name: number for number, row in BY_PADDLE.items()}
_NUMBERS: Final = {name: number for number, name in TYPES.items() if number != 6}
_USUAL: Final = 1


class GeneralTensor(msgspec.Struct, omit_defaults=True):
    """One array. Whole numbers of 64 bits may come as texts, as protobuf's JSON has them."""

    elem_type: int | None = None
    shape: list[int] | None = None
    lod: list[int] | None = None
    name: str = ""
    alias_name: str = ""
    int64_data: list[int | str] | None = None
    float_data: list[float | str] | None = None
    int_data: list[int] | None = None
    float64_data: list[float | str] | None = None
    uint32_data: list[int] | None = None
    bool_data: list[bool] | None = None
    data: list[str] | None = None
    tensor_content: bytes | None = None


class GeneralRequest(msgspec.Struct, omit_defaults=True):
    """What a model is asked."""

    tensor: list[GeneralTensor]
    fetch_var_names: list[str] = []
    log_id: int | str = 0


class Output(msgspec.Struct, omit_defaults=True):
    """What one engine of a server gave."""

    tensor: list[GeneralTensor] = []
    engine_name: str = ""


class GeneralResponse(msgspec.Struct):
    """What a server answers."""

    outputs: list[Output] = []
    err_no: int = 0
    err_msg: str = ""


def described(var: Var) -> int:
    """Return the number of the described type, or of the type that most models take and give."""
    return _USUAL if var.datatype is None else _DESCRIBED[var.datatype]


def number_of(var: Var, array: Array) -> int:
    """Return the number of an array's type: what the description says, else what it is.

    Raises:
        ValidationError: If there is no number for it.
    """
    if var.datatype is not None:
        return described(var)
    number = _NUMBERS.get("str" if array.dtype.kind in "USO" else array.dtype.name)
    if number is None:
        text = f"'{var.alias}' is an array of {array.dtype}, which this protocol has no type for; cast it to another"
        raise ValidationError(text)
    return number


def pack(var: Var, value: Value, *, as_json: bool = True) -> GeneralTensor:
    """Make a tensor of an array.

    Args:
        as_json: Whether NaN and the infinities are spelt out.

    Raises:
        ValidationError: If there is no number for its type.
    """
    array = value.array
    number = number_of(var, array)
    made = GeneralTensor(number, list(array.shape), None, var.name, var.alias)
    if value.lod is not None:
        made.lod = value.lod.tolist()
    if number in CONTENT:
        made.tensor_content = array.astype(CONTENT[number], copy=False).tobytes()
        return made
    elements: list[Any] = array.ravel().tolist()
    if as_json and array.dtype.kind == "f":
        elements = _spelt(array, elements)
    setattr(made, FIELDS[number], list(map(str, elements)) if number == _NUMBERS["str"] else elements)
    return made


def unpack(tensor: GeneralTensor, usual: int = _USUAL) -> Value:
    """Make an array of a tensor.

    Args:
        usual: The number of its type if it does not say it.

    Raises:
        RunnerFailed: If its parts do not agree.
    """
    import numpy as np

    number = tensor.elem_type
    if number is None:  # protobuf leaves out a 0, in JSON too
        number = 0 if tensor.int64_data else usual
    dtype = TYPES.get(number)
    if dtype is None:
        raise _broken(tensor, f"its elem_type is {number}, and {', '.join(map(str, TYPES))} are known")
    elements: Any = getattr(tensor, FIELDS[number]) or []
    try:
        if tensor.tensor_content and number in CONTENT:
            elements = np.frombuffer(tensor.tensor_content, CONTENT[number])
        array = np.array(elements, dtype=None if dtype == "str" else dtype)
        array = array if tensor.shape is None else array.reshape(_lengths(tensor.shape))
    except (ValueError, TypeError, OverflowError):
        raise _broken(tensor, f"{len(elements)} elements of {dtype} were announced as {tensor.shape}") from None
    return Value(array, None if not tensor.lod else np.asarray(tensor.lod, np.int32))


def _spelt(array: Array, elements: list[Any]) -> list[Any]:
    """Return the elements with NaN and the infinities as protobuf's JSON spells them."""
    import numpy as np

    if np.isfinite(array).all():
        return elements
    return [one if np.isfinite(one) else _UNFINITE[str(one)] for one in elements]


_UNFINITE: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _lengths(shape: Sequence[int]) -> tuple[int, ...]:
    if any(axis < 0 for axis in shape):
        raise ValueError
    return tuple(shape)


def _broken(tensor: GeneralTensor, what: str) -> Exception:
    name = tensor.alias_name or tensor.name
    return RunnerFailed(f"tensor '{name}' cannot be read: {what}")


def pack_all(found: Mapping[str, Any]) -> list[GeneralTensor]:
    """Make tensors of a model's results, each with its own offsets where it has some.

    Raises:
        ValidationError: If one has a type this protocol has no number for.
    """
    import numpy as np

    names = [name for name in found if not (name.endswith(LOD) and name.removesuffix(LOD) in found)]
    return [pack(Var(name, name), Value(np.asarray(found[name]), found.get(name + LOD))) for name in names]
