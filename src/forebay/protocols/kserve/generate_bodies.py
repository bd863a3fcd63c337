# SPDX-License-Identifier: Apache-2.0
"""Triton's generate extension: a JSON object whose members are inputs, and one whose members are outputs.

A member, also of `parameters`, that an input is called by is its only element, or a list of all; the shape follows from
what the model takes. Other members are parameters of the call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from forebay.errors import InvalidRequest, ValidationError
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse
from forebay.protocols.kserve.rest import MAX_PARAMETERS, too_many_parameters
from forebay.types.element_limits import Data, ElementLimits, Steps
from forebay.types.json_elements import json_elements, outside_texts
from forebay.types.json_segments import STEP_BYTES, joined, members
from forebay.types.tensor import Tensor

if TYPE_CHECKING:
    from forebay.serving.tensor_face import TensorFace
    from forebay.types.tensor import TensorMetadata

_ONLY: Final = {"input": "text_input", "output": "text_output"}
"""What the extension calls an input and an output that have no names in the model."""
UNNAMED: Final = re.compile(rb"\b(input|tensor|takes) 'input'")  # what errors say where the model has no name for it
_SHORT_LIST: Final = 64
"""Bytes of a list that may hold nothing but blanks."""
_MEANT: Final = ("timeout", "priority")
"""Parameters that mean something here."""


class Field(NamedTuple):
    """A member of a request unread, and how many elements it is if it is a list."""

    value: memoryview
    elements: int | None


def fields_of(body: Data, limits: ElementLimits) -> Steps[dict[str, Field]]:
    """Read the members of a request, and those of its parameters.

    Raises:
        InvalidRequest: If it is none.
        TooLarge: If there is too much in it.
    """
    yield from json_elements(body, limits.tensors, limits.elsewhere)
    try:
        said = yield from members(body or b"{}", MAX_PARAMETERS)
        if said is None:
            raise too_many_parameters()
        inner = yield from members(said.pop("parameters", b"{}"), MAX_PARAMETERS)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"expected a generate request, which is an object: {error}") from None
    if inner is None:
        raise too_many_parameters()
    if twice := next((name for name in inner if name in said), None):
        raise InvalidRequest(f"'{twice[:80]}' is a member of the request and of its parameters; say it once")
    found: dict[str, Field] = {}
    for name, value in {**said, **inner}.items():
        if len(value) > STEP_BYTES and bytes(value[:1]) != b"[":  # copied here, as that takes steps
            found[name] = Field(memoryview((yield from joined([b"[", value, b"]"]))), 1)
            continue
        is_list = bytes(value[:1]) == b"["
        has_some = is_list and (len(value) > _SHORT_LIST or bytes(value[1:-1]).strip())
        count = (yield from outside_texts(value)).items if has_some else 0
        found[name] = Field(value, count if is_list else None)
    return found


def request_of(fields: Mapping[str, Field], face: TensorFace) -> InferRequest:
    """Return the call that a request is.

    Raises:
        InvalidRequest: If a member is not what it should be.
    """
    ports = {_ONLY.get(one.name, one.name) if len(face.inputs) == 1 else one.name: one for one in face.inputs}
    ports |= {one.name: one for one in face.inputs}
    inputs: list[Tensor] = []
    parameters: dict[str, Any] = {}
    name_of_call = ""
    for name, field in fields.items():
        if name in ports:
            inputs.append(_tensor(ports[name], field))
        elif name == "id":
            name_of_call = _read("id", field.value)
            if type(name_of_call) is not str:
                raise InvalidRequest(f"id: expected a text, got {name_of_call!r:.60}")
        elif bytes(field.value[:1]) in {b"[", b"{"}:
            raise InvalidRequest(
                f"'{name[:80]}' is not an input of the model; a parameter is a string, a number or a boolean"
            )
        elif name in _MEANT:
            parameters[name] = _read(name, field.value)
    return InferRequest(model="", inputs=inputs, id=name_of_call, parameters=parameters, is_binary=False)


def encode_answer(response: InferResponse) -> bytes:
    """Return a response, or a part of one, as an object; an output of one element is that element."""
    said: dict[str, Any] = {"id": response.id} if response.id else {}
    said |= {"model_name": response.model, "model_version": response.version, **response.parameters}
    for one in response.outputs:
        name = _ONLY.get(one.name, one.name) if len(response.outputs) == 1 else one.name
        data = bytes(one.data)
        said[name] = msgspec.Raw(data.strip(b"[]") if math.prod(one.shape) == 1 else data)
    return msgspec.json.encode(said)


def _tensor(port: TensorMetadata, field: Field) -> Tensor:
    if field.elements is None:
        return Tensor(port.name, port.datatype, _shape(port, 1), b"".join((b"[", field.value, b"]")), is_json=True)
    if bytes(field.value[1:_SHORT_LIST]).lstrip().startswith(b"["):
        raise ValidationError(f"input '{port.name}': expected one element or a flat list of all, got lists in a list")
    return Tensor(port.name, port.datatype, _shape(port, field.elements), field.value, is_json=True)


def _shape(port: TensorMetadata, count: int) -> tuple[int, ...]:
    """Return the shape of so many elements, as Triton finds it: the innermost axis of any length takes what is left.

    Raises:
        ValidationError: If they do not fill the axes that have a length.
    """
    fixed = math.prod(axis for axis in port.shape if axis != -1)
    left, rest = divmod(count, fixed or 1)
    shape: Sequence[int] = ()
    for axis in reversed(port.shape):
        shape = (left if axis == -1 else axis, *shape)
        left = 1 if axis == -1 else left
    if rest or left != 1:
        msg = f"input '{port.name}': expected the shape {list(port.shape)} (-1 is any length), got {count} elements"
        raise ValidationError(msg)
    return tuple(shape)


def _read(name: str, value: memoryview) -> Any:
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{name}: {error}") from None
