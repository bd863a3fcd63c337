# SPDX-License-Identifier: Apache-2.0
"""Calls to and from the protobuf messages of the gRPC face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.errors import ValidationError
from forebay.protocols.kserve.calls import InferRequest, InferResponse, ModelMetadata, Parameter, TensorMetadata
from forebay.protocols.kserve.messages import SERVICE, messages
from forebay.types.datatypes import datatype_of
from forebay.types.tensor import Tensor, elements, join_elements, split_elements

INFER: Final = f"/{SERVICE}/ModelInfer"
METADATA: Final = f"/{SERVICE}/ModelMetadata"

_CONTENTS: Final = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
"""Fields of the typed contents; types without one exist as raw contents only."""


def encode_metadata_request(model: str, version: str = "") -> bytes:
    """Return the bytes that ask what a model takes and gives."""
    return messages().ModelMetadataRequest(name=model, version=version).SerializeToString()


def decode_metadata(data: bytes) -> ModelMetadata:
    """Read the answer to that.

    Raises:
        ValidationError: If it is none.
    """
    message = _parsed(messages().ModelMetadataResponse, data)
    inputs, outputs = (
        [TensorMetadata(one.name, one.datatype, tuple(one.shape)) for one in side]
        for side in (message.inputs, message.outputs)
    )
    return ModelMetadata(name=message.name, inputs=inputs, outputs=outputs)


def encode_request(request: InferRequest, *, raw: bool = True) -> bytes:
    """Return the bytes of a request.

    Args:
        request: What is asked.
        raw: Send elements as they lie in memory; otherwise one by one in typed contents, for servers that want that.

    Raises:
        ValidationError: If a type has no typed contents.
    """
    message = messages().ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    _put(message.parameters, request.parameters)
    for tensor in request.inputs:
        put = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        if raw:
            message.raw_input_contents.append(bytes(tensor.data))
        else:
            _put_contents(put.contents, tensor)
    for name in request.outputs:
        message.outputs.add(name=name)
    return message.SerializeToString()


def decode_response(data: bytes) -> InferResponse:
    """Read a response, whichever contents it has.

    Raises:
        ValidationError: If it is none, or its parts do not agree.
    """
    message = _parsed(messages().ModelInferResponse, data)
    raw = list(message.raw_output_contents)
    if raw and len(raw) != len(message.outputs):
        msg = f"the response has {len(message.outputs)} outputs and raw contents for {len(raw)}; the numbers must agree"
        raise ValidationError(msg)
    outputs = [
        Tensor(one.name, one.datatype, tuple(one.shape), raw[index] if raw else _contents(one))
        for index, one in enumerate(message.outputs)
    ]
    return InferResponse(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        outputs=outputs,
        parameters={key: getattr(one, one.WhichOneof("parameter_choice")) for key, one in message.parameters.items()},
    )


def _parsed(kind: Any, data: bytes) -> Any:
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except DecodeError as error:
        msg = f"what came is no {kind.DESCRIPTOR.name}: {error}"
        raise ValidationError(msg) from None


def _put(into: Any, parameters: Mapping[str, Parameter]) -> None:
    for key, value in parameters.items():
        if isinstance(value, bool):
            into[key].bool_param = value
        elif isinstance(value, int):
            into[key].int64_param = value
        elif isinstance(value, float):
            into[key].double_param = value
        else:
            into[key].string_param = value


def _put_contents(into: Any, tensor: Tensor) -> None:
    import numpy as np

    datatype = datatype_of(tensor.datatype)
    field = _CONTENTS.get(datatype.name)
    if field is None:
        msg = f"input '{tensor.name}' is of {datatype.name}, which exists as raw contents only; send it raw, or as FP32"
        raise ValidationError(msg)
    if datatype.size:
        values: list[Any] = np.frombuffer(tensor.data, datatype.numpy).tolist()
    else:
        values = list(split_elements(tensor.name, tensor.data, elements(tensor.name, tensor.shape)))
    getattr(into, field).extend(values)


def _contents(output: Any) -> bytes:
    import numpy as np

    datatype = datatype_of(output.datatype)
    field = _CONTENTS.get(datatype.name)
    values: list[Any] = list(getattr(output.contents, field)) if field else []
    if not datatype.size:
        return join_elements(output.name, values)
    try:
        return np.array(values, datatype.numpy).tobytes()
    except OverflowError:
        msg = f"output '{output.name}' has elements that do not fit in {datatype.name}"
        raise ValidationError(msg) from None
