# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of Pipeline Serving."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from forebay.protocols.pipeline import descriptors

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE: Final = "baidu.paddle_serving.pipeline_serving"
SERVICE: Final = f"{PACKAGE}.PipelineService"
METHOD: Final = "inference"
PATH: Final = f"/{SERVICE}/{METHOD}"
"""Of the one RPC."""

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
        "str_data": (9, "string*"),
        "byte_data": (10, "bytes"),
        "elem_type": (20, "int32"),
        "shape": (21, "int32*"),
        "lod": (22, "int32*"),
        "name": (23, "string"),
    },
    "Request": {
        "key": (1, "string*"),
        "value": (2, "string*"),
        "tensors": (3, "Tensor*"),
        "name": (4, "string"),
        "method": (5, "string"),
        "logid": (6, "int64"),
        "clientip": (7, "string"),
    },
    "Response": {
        "err_no": (1, "int32"),
        "err_msg": (2, "string"),
        "key": (3, "string*"),
        "value": (4, "string*"),
        "tensors": (5, "Tensor*"),
    },
    # Requests as they were numbered before tensors were added.
    "OldRequest": {
        "key": (1, "string*"),
        "value": (2, "string*"),
        "name": (3, "string"),
        "method": (4, "string"),
        "logid": (5, "int64"),
        "clientip": (6, "string"),
    },
}


_described: Final = descriptors.classes("pipeline_service.proto", PACKAGE, _MESSAGES, "PipelineService", METHOD)


def _class(name: str) -> Any:
    found = _described(name)
    found.__module__ = __name__  # where a pickle between our own processes finds it
    return found


Tensor: Final[Any] = _class("Tensor")
Request: Final[Any] = _class("Request")
Response: Final[Any] = _class("Response")
OldRequest: Final[Any] = _class("OldRequest")
