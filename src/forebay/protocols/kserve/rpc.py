# SPDX-License-Identifier: Apache-2.0
"""Calls to and from the protobuf messages of the gRPC face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from forebay.errors import ValidationError
from forebay.protocols.kserve import contents
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, ModelMetadata, Parameter, TensorMetadata
from forebay.protocols.kserve.messages import SERVICE, messages, parsed
from forebay.types.tensor import Tensor

INFER: Final = f"/{SERVICE}/ModelInfer"
METADATA: Final = f"/{SERVICE}/ModelMetadata"


def encode_metadata_request(model: str, version: str = "") -> bytes:
    """Return the bytes that ask what a model takes and gives."""
    return messages().ModelMetadataRequest(name=model, version=version).SerializeToString()


def decode_metadata(data: bytes) -> ModelMetadata:
    """Read the answer to that; raises ValidationError if it is none."""
    message = parsed("ModelMetadataResponse", data)
    inputs, outputs = (
        [TensorMetadata(one.name, one.datatype, tuple(one.shape)) for one in side]
        for side in (message.inputs, message.outputs)
    )
    return ModelMetadata(name=message.name, inputs=inputs, outputs=outputs)


def encode_request(request: InferRequest) -> bytes:
    """Return the bytes of a request, with elements as they lie in memory."""
    message = messages().ModelInferRequest(model_name=request.model, model_version=request.version, id=request.id)
    _put(message.parameters, request.parameters)
    for tensor in request.inputs:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensor.data))
    for name in request.outputs:
        message.outputs.add(name=name)
    return message.SerializeToString()


def decode_response(data: bytes) -> InferResponse:
    """Read a response, whichever contents it has; raises ValidationError if it is none, or its parts do not agree."""
    message = parsed("ModelInferResponse", data)
    raw = list(message.raw_output_contents)
    if raw and len(raw) != len(message.outputs):
        msg = f"the response has {len(message.outputs)} outputs and raw contents for {len(raw)}; the numbers must agree"
        raise ValidationError(msg)
    outputs = [
        Tensor(
            one.name,
            one.datatype,
            shape,
            raw[index] if raw else contents.taken(one.name, one.datatype, shape, one.contents),
        )
        for index, (one, shape) in enumerate((one, tuple(one.shape)) for one in message.outputs)
    ]
    return InferResponse(
        model=message.model_name,
        version=message.model_version,
        id=message.id,
        outputs=outputs,
        parameters=parameters_in(message.parameters),
    )


def parameters_in(entries: Any) -> dict[str, Parameter]:
    """Return a map of parameters; one without a value is none."""
    chosen = {key: one.WhichOneof("parameter_choice") for key, one in entries.items()}
    return {key: getattr(entries[key], choice) for key, choice in chosen.items() if choice}


def _put(into: Any, parameters: Mapping[str, Parameter]) -> None:
    for key, value in parameters.items():
        if isinstance(value, bool):
            into[key].bool_param = value
        elif isinstance(value, int):
            setattr(into[key], "int64_param" if value < 1 << 63 else "uint64_param", value)
        elif isinstance(value, float):
            into[key].double_param = value
        else:
            into[key].string_param = value
