# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of Pipeline Serving."""

from __future__ import annotations

from typing import Any, Final

from forebay.types.proto_tables import ProtoMethod, ProtoTable

PACKAGE: Final = "baidu.paddle_serving.pipeline_serving"
SERVICE: Final = f"{PACKAGE}.PipelineService"
METHOD: Final = "inference"
PATH: Final = f"/{SERVICE}/{METHOD}"
"""Of the one RPC."""

_TABLE: Final = ProtoTable(
    file="pipeline_service.proto",
    package=PACKAGE,
    messages={
        "Tensor": (
            "1 int64* int64_data, 2 float* float_data, 3 int32* int_data, 4 double* float64_data, "
            "5 uint32* uint32_data, 6 bool* bool_data, 7 float* complex64_data, 8 double* complex128_data, "
            "9 string* str_data, 10 bytes byte_data, 20 int32 elem_type, 21 int32* shape, 22 int32* lod, 23 string name"
        ),
        "Request": (
            "1 string* key, 2 string* value, 3 Tensor* tensors, 4 string name, 5 string method, 6 int64 logid, "
            "7 string clientip"
        ),
        "Response": "1 int32 err_no, 2 string err_msg, 3 string* key, 4 string* value, 5 Tensor* tensors",
        # Requests as they were numbered before tensors were added.
        "OldRequest": (
            "1 string* key, 2 string* value, 3 string name, 4 string method, 5 int64 logid, 6 string clientip"
        ),
    },
    services={"PipelineService": {METHOD: ProtoMethod("Request", "Response")}},
)


def _class(name: str) -> Any:
    found = getattr(_TABLE.classes(), name)
    found.__module__ = __name__  # where a pickle between our own processes finds it
    return found


Tensor: Final[Any] = _class("Tensor")
Request: Final[Any] = _class("Request")
Response: Final[Any] = _class("Response")
OldRequest: Final[Any] = _class("OldRequest")
