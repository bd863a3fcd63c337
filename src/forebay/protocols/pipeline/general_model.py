# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of the original's model servers, as their clients speak them over gRPC."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.protocols.pipeline import descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping

_PACKAGE: Final = "baidu.paddle_serving.predictor.general_model"
_SERVICE: Final = "GeneralModelService"
_METHOD: Final = "inference"
PATH: Final = f"/{_PACKAGE}.{_SERVICE}/{_METHOD}"
"""Of the RPC."""

_MESSAGES: Final[Mapping[str, Mapping[str, tuple[int, str]]]] = {
    "Tensor": {
        "int64_data": (1, "int64*"),
        "float_data": (2, "float*"),
        "int_data": (3, "int32*"),
        "float64_data": (4, "double*"),
        "uint32_data": (5, "uint32*"),
        "bool_data": (6, "bool*"),
        "complex64_data": (7, "float*"),
        "complex128_data": (8, "double*"),
        "data": (9, "string*"),
        "elem_type": (10, "int32"),
        "shape": (11, "int32*"),
        "lod": (12, "int32*"),
        "name": (13, "string"),
        "alias_name": (14, "string"),
        "tensor_content": (15, "bytes"),
    },
    "Request": {
        "tensor": (1, "Tensor*"),
        "fetch_var_names": (2, "string*"),
        "profile_server": (3, "bool"),
        "log_id": (4, "uint64"),
    },
    "ModelOutput": {
        "tensor": (1, "Tensor*"),
        "engine_name": (2, "string"),
    },
    "Response": {
        "outputs": (1, "ModelOutput*"),
        "profile_time": (2, "int64*"),
        "profile_server": (3, "bool"),
        "log_id": (4, "uint64"),
        "err_no": (5, "int32"),
        "err_msg": (6, "string"),
    },
}

_described: Final = descriptors.classes("general_model_service.proto", _PACKAGE, _MESSAGES, _SERVICE, _METHOD)

Request: Final[Any] = _described("Request")
Response: Final[Any] = _described("Response")
