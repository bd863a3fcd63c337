# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of the original's model servers, as their clients speak them over gRPC."""

from __future__ import annotations

from typing import Any, Final

from forebay.types.proto_tables import ProtoMethod, ProtoTable

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
