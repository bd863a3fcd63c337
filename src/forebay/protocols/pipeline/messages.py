# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages of Pipeline Serving.

The descriptor is written here as a table and lives in a pool of its own. So nothing is generated, any protobuf runtime
will do, and a package that registers the same names in the common pool does not collide with ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

if TYPE_CHECKING:
    from collections.abc import Mapping

PACKAGE: Final = "baidu.paddle_serving.pipeline_serving"
SERVICE: Final = f"{PACKAGE}.PipelineService"
METHOD: Final = "inference"
PATH: Final = f"/{SERVICE}/{METHOD}"
"""Of the one RPC."""

_Field = descriptor_pb2.FieldDescriptorProto
_TYPES: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint32": _Field.TYPE_UINT32,
}

# A type with a star is repeated; a name with a capital letter is a message of this file.
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


def _described() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="pipeline_service.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, form) in fields.items():
            kind = form.rstrip("*")
            added = message.field.add(name=field, number=number)
            added.label = _Field.LABEL_OPTIONAL if kind == form else _Field.LABEL_REPEATED
            if kind in _MESSAGES:
                added.type = _Field.TYPE_MESSAGE
                added.type_name = f".{PACKAGE}.{kind}"
            else:
                added.type = _TYPES[kind]
    file.service.add(name="PipelineService").method.add(
        name=METHOD, input_type=f".{PACKAGE}.Request", output_type=f".{PACKAGE}.Response"
    )
    return file


POOL: Final = descriptor_pool.DescriptorPool()
POOL.Add(_described())  # type: ignore[no-untyped-call]


def _class(name: str) -> Any:
    found = message_factory.GetMessageClass(POOL.FindMessageTypeByName(f"{PACKAGE}.{name}"))
    found.__module__ = __name__  # where a pickle between our own processes finds it
    return found


Tensor: Final[Any] = _class("Tensor")
Request: Final[Any] = _class("Request")
Response: Final[Any] = _class("Response")
OldRequest: Final[Any] = _class("OldRequest")
