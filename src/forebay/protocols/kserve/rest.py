# SPDX-License-Identifier: Apache-2.0
"""Calls to and from the bodies of the HTTP face: JSON, with tensors as lists in it or as raw bytes behind it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, Parameter
from forebay.protocols.kserve.places import Place, place_of, place_wanted
from forebay.types import element_limits
from forebay.types.call import EMPTY
from forebay.types.datatypes import datatype_of
from forebay.types.element_limits import ElementLimits, Steps, at_once, too_many
from forebay.types.first_use import known
from forebay.types.json_elements import JsonElements, json_elements, outside_texts, upper_bound
from forebay.types.json_segments import LONG_BYTES, StepPace, members
from forebay.types.json_segments import elements as rows_of
from forebay.types.tensor import Data, Tensor, check_size, elements, join_elements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.serving.tensor_face import TensorFace

LENGTH_HEADER: Final = "Inference-Header-Content-Length"
"""How many bytes of a body are JSON; raw tensors follow."""
MAX_TENSORS: Final = 4096
"""Inputs and outputs of a request, of either as many."""
MAX_PARAMETERS: Final = 20_000
"""Parameters of a request, with those of its inputs and outputs."""


_Scalar = bool | int | float | str | None
_Said = _Scalar | msgspec.UnsetType


class _Placed(msgspec.Struct, omit_defaults=True):
    """Parameters of inputs and outputs that mean something here; nothing is made of others, which may be anything."""

    shared_memory_region: _Said = msgspec.UNSET
    shared_memory_offset: _Said = msgspec.UNSET
    shared_memory_byte_size: _Said = msgspec.UNSET

    @property
    def said(self) -> dict[str, Any]:
        """The parameters that were given, by name."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value is not msgspec.UNSET}


class _InputParameters(_Placed):
    binary_data_size: _Said = msgspec.UNSET


class _OutputParameters(_Placed):
    binary_data: _Said = msgspec.UNSET
    classification: _Said = msgspec.UNSET


class _Input(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()
    parameters: _InputParameters | None = None


class _Wanted(msgspec.Struct):
    name: str
    parameters: _OutputParameters | None = None


class Envelope(msgspec.Struct):
    """A request whose data nobody has read."""

    inputs: list[_Input]
    outputs: list[_Wanted] | None = None
    id: str | None = None
    parameters: dict[str, _Scalar] | None = None


class _UnreadSide(msgspec.Struct):
    """An input or an output: its data, and what it has beside that, by name."""

    data: msgspec.Raw
    beside: dict[str, msgspec.Raw]


_NULL: Final = memoryview(b"null")
_NOTHING: Final = memoryview(b"")
_BESIDE: Final = ("name", "datatype", "shape", "parameters")
_OTHERS: Final = ("id", "parameters")


def decode_request(
    body: bytes | memoryview,
    length: str | None = None,
    read: Callable[[Place], Data] | None = None,
    *,
    is_counted: bool = False,
    envelope: Envelope | None = None,
) -> InferRequest:
    """Read a request; its data stays where it is, as a view of the body.

    Args:
        length: What `LENGTH_HEADER` said; None if it was not there, and everything is JSON.
        read: Reads what lies in shared memory; without it nothing may.
        is_counted: Whether `counting` has looked at it.
        envelope: What `counting` has read of it.

    Raises:
        InvalidRequest: If it is none, or its parts do not agree.
        TooLarge: If there is too much in it beside data.
        ForebayError: What `read` raises.
    """
    at = head_size(length, len(body))
    if at > _SHORT_BYTES and not is_counted:
        envelope = at_once(counting(body, length))
    found = _envelope(body[:at]) if envelope is None else envelope
    behind = memoryview(body)
    tensors: list[Tensor] = []
    for one in found.inputs:
        said = one.parameters.said if one.parameters else EMPTY
        size, shape = said.get("binary_data_size"), tuple(one.shape)
        has_list = bytes(memoryview(one.data)[:5]) not in {b"", b"null"}  # what is null was not said
        place = place_of(f"input '{one.name}'", said)
        if place is not None:
            if has_list or size is not None:
                raise InvalidRequest(f"input '{one.name}' has data beside shared memory; send it in one way")
            if read is None:
                msg = f"input '{one.name}' lies in shared memory, which a server reads with --shared-memory only"
                raise InvalidRequest(msg)
            check_size(one.name, one.datatype, shape, place.size)
            tensors.append(Tensor(one.name, one.datatype, shape, read(place)))
            continue
        if has_list and size is None:
            tensors.append(Tensor(one.name, one.datatype, shape, memoryview(one.data), is_json=True))
            continue
        if has_list or length is None:
            found_data = "both data and a binary_data_size" if has_list else "neither"
            msg = f"input '{one.name}': expected a list as data, or bytes after the JSON with {LENGTH_HEADER}, "
            msg += f"got {found_data}"
            raise InvalidRequest(msg)
        size = _implied_size(one, shape, len(body) - at) if size is None else size
        if type(size) is not int or not 0 <= size <= len(body) - at:
            msg = f"input '{one.name}' announces {size!r:.40} bytes of data, and {len(body) - at} are left"
            raise InvalidRequest(msg)
        tensors.append(Tensor(one.name, one.datatype, shape, behind[at : at + size]))
        at += size
    if at != len(body):
        msg = f"{len(body) - at} bytes follow the data of all inputs; binary_data_size is the length of each"
        raise InvalidRequest(msg)
    parameters = found.parameters or {}
    outputs = found.outputs or ()
    wanted = {one.name: one.parameters.said for one in outputs if one.parameters}
    places = {name: place_wanted(name, said) for name, said in wanted.items()}
    placed = {name: place for name, place in places.items() if place is not None}
    forms = {name: said.get("binary_data") for name, said in wanted.items()}
    binary = {name: form is True for name, form in forms.items() if form is not None}
    return InferRequest(
        model="",
        id=found.id or "",
        inputs=tensors,
        outputs=[one.name for one in outputs],
        parameters={name: value for name, value in parameters.items() if value is not None},
        is_binary=parameters.get("binary_data_output") is True,
        binary={**binary, **dict.fromkeys(placed, True)} if placed else binary,
        places=placed,
    )


def decode_raw(body: bytes | memoryview, face: TensorFace) -> InferRequest:
    """Read a body that is all of the only input, one sample of it, which `LENGTH_HEADER` says by 0.

    Its shape is that of the model, whose only axis of any length is as long as the data makes it.

    Raises:
        InvalidRequest: If the model has several inputs, or its shape does not follow.
    """
    if face.is_open or len(face.inputs) != 1:
        names = ", ".join(repr(one.name) for one in face.inputs) or "inputs of any name"
        raise InvalidRequest(f"{LENGTH_HEADER}: 0 sends the body as the only input, but the model takes {names}")
    port = face.inputs[0]
    rows, axes = ((1,), port.shape[1:]) if face.has_rows else ((), port.shape)
    shape = [*rows, *((-1,) if port.name in face.unranked else axes)]
    data: Data = memoryview(body)
    if port.datatype == "BYTES":
        if math.prod(shape) != 1:
            msg = f"input '{port.name}' is of BYTES{[*axes]}, which one element does not fill; send the inputs in JSON"
            raise InvalidRequest(msg)
        data = join_elements(port.name, [data])
    elif shape.count(-1) > 1:
        msg = f"input '{port.name}' of {[*axes]} has several axes of any length, which a raw body does not say"
        raise InvalidRequest(msg)
    elif -1 in shape:
        each = -math.prod(shape) * datatype_of(port.datatype).size
        shape[shape.index(-1)] = len(body) // each if each else 0
    return InferRequest(model="", inputs=[Tensor(port.name, port.datatype, tuple(shape), data)])


def head_size(length: str | None, body_bytes: int) -> int:
    """Return how many bytes of a body are JSON; raises InvalidRequest if the header does not say it."""
    if length is None:
        return body_bytes
    if not (length.isascii() and length.isdecimal() and len(length) < _MAX_DIGITS and int(length) <= body_bytes):
        msg = f"{LENGTH_HEADER}: expected the length of the JSON, at most {body_bytes} bytes, got {length[:20]!r}"
        raise InvalidRequest(msg)
    return int(length)


def encode_response(
    response: InferResponse, places: Mapping[str, Mapping[str, Parameter]] = EMPTY
) -> tuple[list[Data], int | None]:
    """Return the pieces of a response, and how many bytes of it are JSON; None if all of them.

    Args:
        places: What is said of outputs that lie elsewhere, by name.
    """
    outputs: list[dict[str, Any]] = []
    behind: list[Data] = []
    for tensor in response.outputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if tensor.name in places:
            # Triton's C++ client takes no parameters of an output without this one.
            entry["parameters"] = {**places[tensor.name], "binary_data_size": 0}
        elif tensor.is_json:
            entry["data"] = msgspec.Raw(tensor.data)
        else:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            behind.append(tensor.data)
        outputs.append(entry)
    message: dict[str, Any] = {"model_name": response.model, "model_version": response.version}
    if response.id:
        message["id"] = response.id
    if response.parameters:
        message["parameters"] = response.parameters
    head = msgspec.json.encode({**message, "outputs": outputs})
    return [head, *behind], len(head) if behind else None


_request: Final = msgspec.json.Decoder(known(Envelope))
_MAX_DIGITS: Final = 16
MAX_ITEMS: Final = 100_000
"""Elements of a request beside its data: of shapes and parameters. The loop makes objects of them."""
MAX_HEAD_BYTES: Final = 2 * 1024 * 1024
"""What a long request has beside its data, which is decoded in one call."""
_SHORT_BYTES: Final = 64 * 1024
"""JSON that cannot hold more than is possible anyway."""


def counting(
    body: bytes | memoryview, length: str | None = None, limits: ElementLimits = element_limits.DEFAULT
) -> Steps[Envelope | None]:
    """Count what would be made of a request, before anything is, and read its envelope if it is long.

    Raises:
        InvalidRequest: If the length is none, or a long body is not a request.
        TooLarge: If there is too much.
    """
    at = head_size(length, len(body))
    if at <= min(_SHORT_BYTES, limits.elsewhere):
        return None
    text = memoryview(body)[:at]
    yield from json_elements(text, limits.tensors + limits.elsewhere, limits.elsewhere)
    if at <= min(_SHORT_BYTES, limits.tensors):
        return None
    if at <= LONG_BYTES:
        whole = yield from upper_bound(text)
        if whole.items <= min(MAX_ITEMS, limits.tensors) and whole.members - whole.objects <= MAX_PARAMETERS:
            return None  # names of fields have a colon each, and texts among the data may
    try:
        return (yield from _envelope_in_steps(text, limits))
    except msgspec.DecodeError as error:
        raise _no_request(error) from None


def _envelope_in_steps(text: memoryview, limits: ElementLimits) -> Steps[Envelope]:
    """Read a request without its data, which is put back unread.

    Raises:
        msgspec.DecodeError: If it is malformed.
        InvalidRequest: If it is not a request.
        TooLarge: If there is too much in it.
    """
    said = yield from members(text, MAX_PARAMETERS)
    if said is None:
        raise too_many_parameters()
    inputs = yield from _sides(said.get("inputs", _NOTHING))
    outputs = yield from _sides(said.get("outputs", _NOTHING))
    tensors = [*inputs, *outputs]
    rest = {name: msgspec.Raw(said[name]) for name in _OTHERS if name in said}
    beside = [*rest.values(), *(value for one in tensors for value in one.beside.values())]
    if sum(map(len, beside)) > MAX_HEAD_BYTES:
        msg = f"the request has more than {MAX_HEAD_BYTES} bytes beside its data, in names, shapes and parameters"
        raise TooLarge(msg)
    yield
    yield from _require_few(text, [one.data for one in tensors], len(beside), limits)
    head: dict[str, Any] = {"outputs": [one.beside for one in outputs], **rest}
    if "inputs" in said:
        head["inputs"] = [one.beside for one in inputs]
    yield
    envelope = _envelope(msgspec.json.encode(head))
    yield
    for one, unread in zip(envelope.inputs, inputs, strict=True):
        one.data = unread.data
    return envelope


def _sides(listed: memoryview) -> Steps[list[_UnreadSide]]:
    """Return inputs or outputs unread.

    Raises:
        msgspec.DecodeError: If they are none.
        TooLarge: If there are too many, or one has too many parameters.
    """
    if listed in (_NOTHING, _NULL):
        return []
    rows = yield from rows_of(listed, MAX_TENSORS)
    if rows is None:
        raise TooLarge(f"the request has more than {MAX_TENSORS} inputs or outputs; send fewer at a time")
    found: list[_UnreadSide] = []
    pace = StepPace()
    for row in rows:
        said = yield from members(row, MAX_PARAMETERS)
        if said is None:
            raise too_many_parameters()
        beside = {name: msgspec.Raw(said[name]) for name in _BESIDE if name in said}
        found.append(_UnreadSide(msgspec.Raw(said.get("data", b"")), beside))
        if pace.is_over(len(row)):
            yield
    return found


def _require_few(text: Data, data: Sequence[msgspec.Raw], names: int, limits: ElementLimits) -> Steps[None]:
    """Hold what a request has to the limits, also what is said again and then counts for nothing.

    Args:
        data: Of inputs and outputs.
        names: The number of other fields that are known.

    Raises:
        TooLarge: If there is too much.
    """
    names += sum(len(one) > 0 for one in data)
    inside = beside = JsonElements()
    for count in (upper_bound, outside_texts):
        inside = yield from _counted(count, data)
        beside = (yield from count(text)) - inside
        is_few = beside.items <= MAX_ITEMS and beside.members - beside.objects - names <= MAX_PARAMETERS
        if is_few and inside.items <= limits.tensors:
            return
    if inside.items > limits.tensors:
        raise too_many("the data of the inputs", "elements", limits.tensors)
    if beside.items > MAX_ITEMS:
        raise too_many("the request", "elements beside its data, in shapes and parameters", MAX_ITEMS)
    raise too_many_parameters()


def _envelope(text: bytes | memoryview) -> Envelope:
    """Read a request, or what one has beside its data; raises InvalidRequest if it is none."""
    try:
        return _request.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise _no_request(error) from None


def _no_request(error: Exception) -> InvalidRequest:
    return InvalidRequest(f"expected an inference request: {error}")


def too_many_parameters() -> TooLarge:
    """Return the error of a request that says too much beside its data."""
    return TooLarge(f"the request has more than {MAX_PARAMETERS} parameters, or says its fields again and again")


def _counted(count: Callable[[Data], Steps[JsonElements]], pieces: Sequence[msgspec.Raw]) -> Steps[JsonElements]:
    found, pace = JsonElements(), StepPace()
    for one in pieces:
        piece = memoryview(one)
        found += at_once(count(piece)) if len(piece) <= _SHORT_BYTES else (yield from count(piece))
        if pace.is_over(len(piece)):
            yield
    return found


def _implied_size(one: _Input, shape: tuple[int, ...], left: int) -> int:
    """Return how long the data of an input is that does not say it.

    Raises:
        InvalidRequest: If its shape does not say it either.
    """
    size = datatype_of(one.datatype, one.name).size
    if size:
        return elements(one.name, shape, size) * size
    if shape != (1,):
        msg = f"input '{one.name}' is of BYTES and has no binary_data_size, which says where its data ends"
        raise InvalidRequest(msg)
    return left
