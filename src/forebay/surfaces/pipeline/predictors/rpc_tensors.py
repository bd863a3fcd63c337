# SPDX-License-Identifier: Apache-2.0
"""What the original's model servers are asked and answer, as the protobuf messages they speak over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from forebay.errors import RunnerFailed, ValidationError
from forebay.surfaces.pipeline.predictors.general_calls import GeneralResponse, GeneralTensor, Output, pack
from forebay.surfaces.pipeline.protocol import general_model as messages

if TYPE_CHECKING:
    from forebay.runtimes.signature import Feed, Value, Var

PATH: Final = messages.PATH


def encode_request(feed: Feed, fetch: Sequence[Var], log_id: int) -> bytes:
    """Write a request; raises ValidationError if these messages cannot hold the type or the shape of an array."""
    request = messages.Request(fetch_var_names=[var.alias for var in fetch], log_id=log_id % 2**64)
    for var, value in feed:
        try:
            _fill(request.tensor.add(), var, value)
        except (ValueError, TypeError) as problem:
            raise ValidationError(f"'{var.alias}' cannot be sent to the model server: {problem}") from problem
    return request.SerializeToString()


def decode_response(data: bytes) -> GeneralResponse:
    """Read an answer; raises RunnerFailed if it is none."""
    try:
        response = messages.Response.FromString(data)
    except DecodeError as problem:
        raise RunnerFailed(f"the model server's answer cannot be read: {problem}") from problem
    outputs = [Output(list(map(_tensor, one.tensor)), one.engine_name) for one in response.outputs]
    return GeneralResponse(outputs, response.err_no, response.err_msg)


def _fill(tensor: Any, var: Var, value: Value) -> None:
    made = pack(var, value, as_json=False)
    for field in made.__struct_fields__:
        found = getattr(made, field)
        if isinstance(found, list):
            getattr(tensor, field).extend(found)
        elif found is not None:
            setattr(tensor, field, found)


def _tensor(message: Any) -> GeneralTensor:
    given: dict[str, Any] = {"shape": []}
    for field, found in message.ListFields():
        if field.name in GeneralTensor.__struct_fields__:
            given[field.name] = found if isinstance(found, int | str | bytes) else list(found)
    return GeneralTensor(**given)
