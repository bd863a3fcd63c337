# SPDX-License-Identifier: Apache-2.0
"""The protobuf messages, made from a table in a pool of their own: no generated code, and no clash with anybody's."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, Final

from forebay.errors import ValidationError

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"

_TENSOR: Final = "1 string name, 2 string datatype, 3 int64* shape, 4 map parameters"
_OUTER: Final = "1 string model_name, 2 string model_version, 3 string id, 4 map parameters"
_NAMED: Final = "1 string name, 2 string version"
_REGION: Final = "1 string name, 2 string key, 3 uint64 offset, 4 uint64 byte_size"
_CUDA_REGION: Final = "1 string name, 2 uint64 device_id, 3 uint64 byte_size"

_LAYOUT: Final = {
    # A star repeats; `|` puts a field into the message's only oneof; `map` is from text to an InferParameter, or to
    # what is named behind it; `.Name` is a message within this one; `!Name` an enumeration.
    "ServerLiveRequest": "",
    "ServerLiveResponse": "1 bool live",
    "ServerReadyRequest": "",
    "ServerReadyResponse": "1 bool ready",
    "ModelReadyRequest": _NAMED,
    "ModelReadyResponse": "1 bool ready",
    "ServerMetadataRequest": "",
    "ServerMetadataResponse": f"{_NAMED}, 3 string* extensions",
    "ModelMetadataRequest": _NAMED,
    "ModelMetadataResponse": (
        "1 string name, 2 string* versions, 3 string platform, 4 .TensorMetadata* inputs, 5 .TensorMetadata* outputs"
    ),
    "ModelMetadataResponse.TensorMetadata": "1 string name, 2 string datatype, 3 int64* shape",
    "InferParameter": (
        "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 double| double_param, "
        "5 uint64| uint64_param"
    ),
    "InferTensorContents": (
        "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, 4 uint32* uint_contents, "
        "5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents, 8 bytes* bytes_contents"
    ),
    "ModelInferRequest": (
        f"{_OUTER}, 5 .InferInputTensor* inputs, 6 .InferRequestedOutputTensor* outputs, 7 bytes* raw_input_contents"
    ),
    "ModelInferRequest.InferInputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 map parameters",
    "ModelInferResponse": f"{_OUTER}, 5 .InferOutputTensor* outputs, 6 bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
    "ModelConfigRequest": _NAMED,
    "ModelConfigResponse": "1 ModelConfig config",
    # What there is of a configuration here; whoever reads it passes over what is not.
    "ModelInput": "1 string name, 2 !DataType data_type, 4 int64* dims, 8 bool optional",
    "ModelOutput": "1 string name, 2 !DataType data_type, 3 int64* dims",
    "ModelDynamicBatching": "1 int32* preferred_batch_size, 2 uint64 max_queue_delay_microseconds",
    "ModelTransactionPolicy": "1 bool decoupled",
    "ModelInstanceGroup": "1 string name, 2 int32 count",
    "ModelConfig": (
        "1 string name, 2 string platform, 4 int32 max_batch_size, 5 ModelInput* input, 6 ModelOutput* output, "
        "7 ModelInstanceGroup* instance_group, 11 ModelDynamicBatching dynamic_batching, 17 string backend, "
        "19 ModelTransactionPolicy model_transaction_policy"
    ),
    "ModelStatisticsRequest": _NAMED,
    "StatisticDuration": "1 uint64 count, 2 uint64 ns",
    "InferStatistics": (
        "1 StatisticDuration success, 2 StatisticDuration fail, 3 StatisticDuration queue, "
        "4 StatisticDuration compute_input, 5 StatisticDuration compute_infer, 6 StatisticDuration compute_output, "
        "7 StatisticDuration cache_hit, 8 StatisticDuration cache_miss"
    ),
    "InferBatchStatistics": (
        "1 uint64 batch_size, 2 StatisticDuration compute_input, 3 StatisticDuration compute_infer, "
        "4 StatisticDuration compute_output"
    ),
    "ModelStatistics": (
        f"{_NAMED}, 3 uint64 last_inference, 4 uint64 inference_count, 5 uint64 execution_count, "
        "6 InferStatistics inference_stats, 7 InferBatchStatistics* batch_stats"
    ),
    "ModelStatisticsResponse": "1 ModelStatistics* model_stats",
    "ModelRepositoryParameter": (
        "1 bool| bool_param, 2 int64| int64_param, 3 string| string_param, 4 bytes| bytes_param"
    ),
    "RepositoryIndexRequest": "1 string repository_name, 2 bool ready",
    "RepositoryIndexResponse": "1 .ModelIndex* models",
    "RepositoryIndexResponse.ModelIndex": f"{_NAMED}, 3 string state, 4 string reason",
    "RepositoryModelLoadRequest": (
        "1 string repository_name, 2 string model_name, 3 map:ModelRepositoryParameter parameters"
    ),
    "RepositoryModelLoadResponse": "",
    "RepositoryModelUnloadRequest": (
        "1 string repository_name, 2 string model_name, 3 map:ModelRepositoryParameter parameters"
    ),
    "RepositoryModelUnloadResponse": "",
    "SystemSharedMemoryStatusRequest": "1 string name",
    "SystemSharedMemoryStatusResponse": "1 map:.RegionStatus regions",
    "SystemSharedMemoryStatusResponse.RegionStatus": _REGION,
    "SystemSharedMemoryRegisterRequest": _REGION,
    "SystemSharedMemoryRegisterResponse": "",
    "SystemSharedMemoryUnregisterRequest": "1 string name",
    "SystemSharedMemoryUnregisterResponse": "",
    "CudaSharedMemoryStatusRequest": "1 string name",
    "CudaSharedMemoryStatusResponse": "1 map:.RegionStatus regions",
    "CudaSharedMemoryStatusResponse.RegionStatus": _CUDA_REGION,
    "CudaSharedMemoryRegisterRequest": "1 string name, 2 bytes raw_handle, 3 int64 device_id, 4 uint64 byte_size",
    "CudaSharedMemoryRegisterResponse": "",
    "CudaSharedMemoryUnregisterRequest": "1 string name",
    "CudaSharedMemoryUnregisterResponse": "",
    "TraceSettingRequest": "1 map:.SettingValue settings, 2 string model_name",
    "TraceSettingRequest.SettingValue": "1 string* value",
    "TraceSettingResponse": "1 map:.SettingValue settings",
    "TraceSettingResponse.SettingValue": "1 string* value",
    "LogSettingsRequest": "1 map:.SettingValue settings",
    "LogSettingsRequest.SettingValue": "1 bool| bool_param, 2 uint32| uint32_param, 3 string| string_param",
    "LogSettingsResponse": "1 map:.SettingValue settings",
    "LogSettingsResponse.SettingValue": "1 bool| bool_param, 2 uint32| uint32_param, 3 string| string_param",
}

_DATA_TYPES: Final = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)

STREAMED: Final = "ModelStreamInfer"
"""The method that takes the requests of `ModelInfer`, any number of them, and gives any number of answers."""
METHODS: Final = (*(name[:-7] for name in _LAYOUT if name.endswith("Request")), STREAMED)
"""Each takes a message of its own name with `Request` behind it, and gives one with `Response`."""


@cache
def messages() -> Any:
    """Return the message classes as attributes, those within a message as attributes of it.

    They are made at the first call, which imports protobuf.
    """
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClassesForFiles

    file = _file()
    pool = DescriptorPool()
    pool.Add(file)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
    return SimpleNamespace(
        **{
            name.removeprefix(f"{PACKAGE}."): made
            for name, made in GetMessageClassesForFiles([file.name], pool).items()
        }
    )


def parsed(kind: str, data: bytes) -> Any:
    """Read a message.

    Raises:
        ValidationError: If it is none of this kind.
    """
    from google.protobuf.message import DecodeError

    try:
        return getattr(messages(), kind).FromString(data)
    except DecodeError as error:
        msg = f"what came is no {kind}: {error}"
        raise ValidationError(msg) from None


def described() -> bytes:
    """Return the descriptor of the file the messages and the service are in, serialized."""
    return _file().SerializeToString()


def _file() -> Any:
    from google.protobuf.descriptor_pb2 import FileDescriptorProto

    file = FileDescriptorProto(name="forebay/kserve.proto", package=PACKAGE, syntax="proto3")
    types = file.enum_type.add(name="DataType")
    for number, name in enumerate(_DATA_TYPES):
        types.value.add(name=f"TYPE_{name}", number=number)
    for path, layout in _LAYOUT.items():
        outer, _, inner = path.partition(".")
        message = next(one for one in file.message_type if one.name == outer) if inner else file.message_type.add()
        if inner:
            message = message.nested_type.add()
        message.name = inner or outer
        for line in filter(None, layout.split(", ")):
            _add_field(message, f".{PACKAGE}.{path}", line)
    service = file.service.add(name=SERVICE.rpartition(".")[2])
    for name in METHODS:
        method = service.method.add(name=name, output_type=f".{PACKAGE}.{name}Response")
        method.input_type = f".{PACKAGE}.{name.replace(STREAMED, 'ModelInfer')}Request"
        method.client_streaming = method.server_streaming = name == STREAMED
    return file


def _add_field(message: Any, path: str, line: str) -> None:
    number, kind, name = line.split()
    field = message.field.add(name=name, number=int(number))
    word = kind.rstrip("*|")
    is_map = word.startswith("map")
    field.label = field.LABEL_REPEATED if kind.endswith("*") or is_map else field.LABEL_OPTIONAL
    if is_map:
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        _add_field(entry, f"{path}.{entry.name}", "1 string key")
        _add_field(entry, path, f"2 {word.partition(':')[2] or 'InferParameter'} value")
        field.type_name = f"{path}.{entry.name}"
    elif word.startswith("!"):
        field.type_name = f".{PACKAGE}.{word[1:]}"
        field.type = field.TYPE_ENUM
    elif word.startswith("."):
        field.type_name = f"{path}{word}"
    elif word[0].isupper():
        field.type_name = f".{PACKAGE}.{word}"
    else:
        field.type = field.Type.Value(f"TYPE_{word.upper()}")
    if field.type_name and field.type != field.TYPE_ENUM:
        field.type = field.TYPE_MESSAGE
    if kind.endswith("|"):
        if not message.oneof_decl:
            message.oneof_decl.add(name="parameter_choice")
        field.oneof_index = 0
