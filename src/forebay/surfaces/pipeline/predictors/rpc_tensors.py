# SPDX-License-Identifier: Apache-2.0
"""What the original's model servers are asked and answer, as the protobuf messages they speak over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from forebay.errors import RunnerFailed, ValidationError
from forebay.surfaces.pipeline.predictors.general_calls import GeneralResponse, GeneralTensor, Output, pack
from forebay.types.proto_tables import ProtoMethod, ProtoTable

if TYPE_CHECKING:
    from forebay.runtimes.signature import Feed, Value, Var

_PACKAGE: Final = "baidu.paddle_serving.predictor.general_model"
PATH: Final = f"/{_PACKAGE}.GeneralModelService/inference"
"""Of the RPC."""

_TABLE: Final = ProtoTable(
    file="general_model_service.proto",
    package=_PACKAGE,
    messages={
        "Tensor": (
            "1 int64* int64_data, 2 float* float_data, 3 int32* int_data, 4 double* float64_data, "
            "5 uint32* uint32_data, 6 bool* bool_data, 7 float* complex64_data, 8 double* complex128_data, "
            "9 string* data, 10 int32 elem_type, 11 int32* shape, 12 int32* lod, 13 string name, 14 string alias_name, "
            "15 bytes tensor_content"
        ),
        "Request": "1 Tensor* tensor, 2 string* fetch_var_names, 3 bool profile_server, 4 uint64 log_id",
        "ModelOutput": "1 Tensor* tensor, 2 string engine_name",
        "Response": (
            "1 ModelOutput* outputs, 2 int64* profile_time, 3 bool profile_server, 4 uint64 log_id, 5 int32 err_no, "
            "6 string err_msg"
        ),
    },
    services={"GeneralModelService": {"inference": ProtoMethod("Request", "Response")}},
)

Request: Final[Any] = _TABLE.classes().Request
Response: Final[Any] = _TABLE.classes().Response


def encode_request(feed: Feed, fetch: Sequence[Var], log_id: int) -> bytes:
    """Write a request; raises ValidationError if these messages cannot hold the type or the shape of an array."""
    request = Request(fetch_var_names=[var.alias for var in fetch], log_id=log_id % 2**64)
    for var, value in feed:
        try:
            _fill(request.tensor.add(), var, value)
        except (ValueError, TypeError) as problem:
            raise ValidationError(f"'{var.alias}' cannot be sent to the model server: {problem}") from problem
    return request.SerializeToString()


def decode_response(data: bytes) -> GeneralResponse:
    """Read an answer; raises RunnerFailed if it is none."""
    try:
        response = Response.FromString(data)
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
