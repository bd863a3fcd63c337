# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages, made from a table in a pool of their own: no generated code, and no clash with anybody's."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Final

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"

_TENSOR: Final = "1 string name, 2 string datatype, 3 int64* shape, 4 map parameters"
_OUTER: Final = "1 string model_name, 2 string model_version, 3 string id, 4 map parameters"

_LAYOUT: Final = {
    # A star repeats; `|` puts a field into the message's only oneof; `map` is from text to an InferParameter.
    "InferParameter": (
        "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 double| double_param, "
        "5 uint64| uint64_param"
    ),
    "InferTensorContents": (
        "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, 4 uint32* uint_contents, "
        "5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents, 8 bytes* bytes_contents"
    ),
    "ModelReadyRequest": "1 string name, 2 string version",
    "ModelReadyResponse": "1 bool ready",
    "ModelMetadataRequest": "1 string name, 2 string version",
    "ModelMetadataResponse": (
        "1 string name, 2 string* versions, 3 string platform, 4 .TensorMetadata* inputs, 5 .TensorMetadata* outputs"
    ),
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "ModelInferRequest": (
        f"{_OUTER}, 5 .InferInputTensor* inputs, 6 .InferRequestedOutputTensor* outputs, 7 bytes* raw_input_contents"
    ),
    "ModelInferRequest.InferInputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 map parameters",
    "ModelInferResponse": f"{_OUTER}, 5 .InferOutputTensor* outputs, 6 bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
}


@cache
def messages() -> Any:
    """Return the message classes as attributes, those within a message as attributes of it.

    They are made at the first call, which imports protobuf.
    """
    from google.protobuf.descriptor_pb2 import FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClassesForFiles

    file = FileDescriptorProto(name="forebay/kserve.proto", package=PACKAGE, syntax="proto3")
    for path, layout in _LAYOUT.items():
        outer, _, inner = path.partition(".")
        message = next(one for one in file.message_type if one.name == outer) if inner else file.message_type.add()
        if inner:
            message = message.nested_type.add()
        message.name = inner or outer
        for line in layout.split(", "):
            _add_field(message, f".{PACKAGE}.{path}", line)
    pool = DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    return SimpleNamespace(
        **{
            name.removeprefix(f"{PACKAGE}."): made
            for name, made in GetMessageClassesForFiles([file.name], pool).items()
        }
    )


def _add_field(message: Any, path: str, line: str) -> None:
    number, kind, name = line.split()
    field = message.field.add(name=name, number=int(number))
    word = kind.rstrip("*|")
    field.label = field.LABEL_REPEATED if kind.endswith("*") or word == "map" else field.LABEL_OPTIONAL
    if word == "map":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{path}.{entry.name}", "1 string key")
        _add_field(entry, f"{path}.{entry.name}", "2 InferParameter value")
        field.type_name = f"{path}.{entry.name}"
    elif word.startswith("."):
        field.type_name = f"{path}{word}"
    elif word[0].isupper():
        field.type_name = f".{PACKAGE}.{word}"
    else:
        field.type = field.Type.Value(f"TYPE_{word.upper()}")
    if field.type_name:
        field.type = field.TYPE_MESSAGE
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
