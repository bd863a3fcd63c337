# SPDX-License-Identifier: Apache-2.0
"""What clients send to the HTTP face of another server, and read of it; `rest.py` is the side of the server."""

from __future__ import annotations

from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from forebay.arrays.numpy_tensors import numbers_of, to_array
from forebay.errors import ValidationError
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, ModelMetadata, TensorMetadata
from forebay.protocols.kserve.places import Parameter
from forebay.protocols.kserve.rest import LENGTH_HEADER
from forebay.types.datatypes import datatype_of
from forebay.types.first_use import known
from forebay.types.tensor import Tensor, elements, join_elements, split_elements

_Kind = TypeVar("_Kind")


class _Output(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class _Response(msgspec.Struct):
    outputs: list[_Output]
    model_name: str | None = None
    model_version: str | None = None
    id: str | None = None
    parameters: dict[str, Any] | None = None


class _Side(msgspec.Struct):
    name: str
    datatype: str
    shape: list[int]


class _Metadata(msgspec.Struct):
    name: str
    inputs: list[_Side] | None = None
    outputs: list[_Side] | None = None


class _Error(msgspec.Struct):
    error: str


def model_path(model: str, version: str = "") -> str:
    """Return the path of a model; `/infer` behind it asks the model, nothing behind it asks about it."""
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def decode_metadata(body: bytes) -> ModelMetadata:
    """Read what a model takes and gives; raises ValidationError if the body does not say it."""
    found = _decoded(body, _Metadata)
    inputs, outputs = (
        [TensorMetadata(one.name, one.datatype, tuple(one.shape)) for one in side or ()]
        for side in (found.inputs, found.outputs)
    )
    return ModelMetadata(name=found.name, inputs=inputs, outputs=outputs)


def encode_request(request: InferRequest, *, binary: bool = True) -> tuple[bytes, dict[str, str]]:
    """Return the body of a request and the headers that belong to it.

    Args:
        request: What is asked; model and version stand in the path.
        binary: Send elements as they lie in memory and ask for the same; otherwise everything is JSON.

    Raises:
        ValidationError: If JSON cannot say an element: NaN, an infinity, bytes that are not text.
    """
    parameters: dict[str, Parameter] = dict(request.parameters)
    behind: list[bytes] = []
    inputs: list[dict[str, Any]] = []
    for tensor in request.inputs:
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if binary:
            entry["parameters"] = {"binary_data_size": len(tensor.data)}
            behind.append(bytes(tensor.data))
        else:
            entry["data"] = _listed(tensor)
        inputs.append(entry)
    message: dict[str, Any] = {"inputs": inputs}
    if request.id:
        message["id"] = request.id
    if request.outputs:
        message["outputs"] = [
            {"name": name, "parameters": {"binary_data": True}} if binary else {"name": name}
            for name in request.outputs
        ]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        message["parameters"] = parameters
    head = msgspec.json.encode(message)
    if not binary:
        return head, {"Content-Type": "application/json"}
    headers = {"Content-Type": "application/octet-stream", LENGTH_HEADER: str(len(head))}
    return b"".join((head, *behind)), headers


def decode_response(body: bytes, length: str | None = None) -> InferResponse:
    """Read a response.

    Args:
        length: What `LENGTH_HEADER` said; None if it was not there, and everything is JSON.

    Raises:
        ValidationError: If it is none, or its parts do not agree.
    """
    if length is not None and not (length.isdecimal() and int(length) <= len(body)):
        msg = f"{LENGTH_HEADER}: expected the length of the JSON, at most {len(body)} bytes, got {length[:20]!r}"
        raise ValidationError(msg)
    at = len(body) if length is None else int(length)
    found = _decoded(body[:at], _Response)
    rest = memoryview(body)
    outputs: list[Tensor] = []
    for one in found.outputs:
        size: Any = (one.parameters or {}).get("binary_data_size")
        if size is None:
            outputs.append(Tensor(one.name, one.datatype, tuple(one.shape), _raw(one)))
            continue
        if type(size) is not int or not 0 <= size <= len(body) - at:
            msg = f"output '{one.name}' announces {size!r} bytes of data, and {len(body) - at} are left"
            raise ValidationError(msg)
        outputs.append(Tensor(one.name, one.datatype, tuple(one.shape), rest[at : at + size]))
        at += size
    return InferResponse(
        model=found.model_name or "",
        version=found.model_version or "",
        id=found.id or "",
        outputs=outputs,
        parameters=found.parameters or {},
    )


def error_text(body: bytes) -> str:
    """Return what the body of an error says, or its beginning if it is not the protocol's."""
    try:
        return msgspec.json.decode(body, type=known(_Error)).error
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")


def _decoded(body: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.json.decode(body, type=known(kind))
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValidationError(f"expected an answer of the KServe v2 protocol: {error}") from None


def _listed(tensor: Tensor) -> list[Any]:
    import numpy as np

    datatype = datatype_of(tensor.datatype, tensor.name)
    if not datatype.size:
        count = elements(tensor.name, tensor.shape)
        try:
            return [element.decode() for element in split_elements(tensor.name, tensor.data, count)]
        except UnicodeDecodeError:
            msg = f"input '{tensor.name}' holds bytes that are not UTF-8, which JSON cannot hold; send it as binary"
            raise ValidationError(msg) from None
    array = numbers_of(to_array(tensor), datatype.name)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        msg = f"input '{tensor.name}' holds NaN or an infinity, which JSON cannot hold; send it as binary"
        raise ValidationError(msg)
    return array.ravel().tolist()


def _raw(output: _Output) -> bytes:
    import numpy as np

    datatype = datatype_of(output.datatype, output.name)
    if output.data is None:
        raise ValidationError(f"output '{output.name}' has neither data in a list nor a binary_data_size")
    try:
        if not datatype.size:
            return join_elements(output.name, np.array(output.data, object).ravel().tolist())
        if datatype.name == "BF16":
            return (np.array(output.data, "<f4").view(np.uint32) >> 16).astype(datatype.numpy).tobytes()
        return np.array(output.data, datatype.numpy).tobytes()
    except (ValueError, TypeError, OverflowError):
        raise ValidationError(f"the data of output '{output.name}' is not {datatype.name}{output.shape}") from None
