# SPDX-License-Identifier: Apache-2.0
"""The messages of the gRPC face."""

from __future__ import annotations

from typing import Any, Final

from forebay.types.proto_tables import ProtoMethod, ProtoTable

PACKAGE: Final = "inference"
SERVICE: Final = f"{PACKAGE}.GRPCInferenceService"

_TENSOR: Final = "1 string name, 2 string datatype, 3 int64* shape, 4 map:InferParameter parameters"
_OUTER: Final = "1 string model_name, 2 string model_version, 3 string id, 4 map:InferParameter parameters"
_NAMED: Final = "1 string name, 2 string version"
_REGION: Final = "1 string name, 2 string key, 3 uint64 offset, 4 uint64 byte_size"
_SETTING: Final = (
    "1 bool|parameter_choice bool_param, 2 uint32|parameter_choice uint32_param, 3 string|parameter_choice string_param"
)
_CUDA_REGION: Final = "1 string name, 2 uint64 device_id, 3 uint64 byte_size"

_LAYOUT: Final = {
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
        "1 bool|parameter_choice bool_param, 2 int64|parameter_choice int64_param, "
        "3 string|parameter_choice string_param, 4 double|parameter_choice double_param, "
        "5 uint64|parameter_choice uint64_param"
    ),
    "InferTensorContents": (
        "1 bool* bool_contents, 2 int32* int_contents, 3 int64* int64_contents, 4 uint32* uint_contents, "
        "5 uint64* uint64_contents, 6 float* fp32_contents, 7 double* fp64_contents, 8 bytes* bytes_contents"
    ),
    "ModelInferRequest": (
        f"{_OUTER}, 5 .InferInputTensor* inputs, 6 .InferRequestedOutputTensor* outputs, 7 bytes* raw_input_contents"
    ),
    "ModelInferRequest.InferInputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
    "ModelInferRequest.InferRequestedOutputTensor": "1 string name, 2 map:InferParameter parameters",
    "ModelInferResponse": f"{_OUTER}, 5 .InferOutputTensor* outputs, 6 bytes* raw_output_contents",
    "ModelInferResponse.InferOutputTensor": f"{_TENSOR}, 5 InferTensorContents contents",
    "ModelStreamInferResponse": "1 string error_message, 2 ModelInferResponse infer_response",
    "ModelConfigRequest": _NAMED,
    "ModelConfigResponse": "1 ModelConfig config",
    # What there is of a configuration here; whoever reads it passes over what is not.
    "ModelInput": "1 string name, 2 !DataType data_type, 4 int64* dims, 5 ModelTensorReshape reshape, 8 bool optional",
    "ModelOutput": "1 string name, 2 !DataType data_type, 3 int64* dims, 5 ModelTensorReshape reshape",
    "ModelTensorReshape": "1 int64* shape",
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
        "1 bool|parameter_choice bool_param, 2 int64|parameter_choice int64_param, "
        "3 string|parameter_choice string_param, 4 bytes|parameter_choice bytes_param"
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
    "LogSettingsRequest.SettingValue": _SETTING,
    "LogSettingsResponse": "1 map:.SettingValue settings",
    "LogSettingsResponse.SettingValue": _SETTING,
}

_DATA_TYPES: Final = (
    *("INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "STRING", "BF16"),
)

STREAMED: Final = "ModelStreamInfer"
"""The method that takes the requests of `ModelInfer`, any number of them, and gives any number of answers."""
METHODS: Final = (*(name[:-7] for name in _LAYOUT if name.endswith("Request")), STREAMED)
"""Each takes a message of its own name with `Request` behind it, and gives one with `Response`."""

_TABLE: Final = ProtoTable(
    "forebay/kserve.proto",
    PACKAGE,
    _LAYOUT,
    {"DataType": {f"TYPE_{name}": number for number, name in enumerate(_DATA_TYPES)}},
    {
        SERVICE.rpartition(".")[2]: {
            name: ProtoMethod(f"{name.replace(STREAMED, 'ModelInfer')}Request", f"{name}Response", name == STREAMED)
            for name in METHODS
        }
    },
)


def messages() -> Any:
    """Return the message classes as attributes, those within a message as attributes of it."""
    return _TABLE.classes()


def parsed(kind: str, data: bytes) -> Any:
    """Read a message; raises ValidationError if it is none of this kind."""
    return _TABLE.parsed(kind, data)


def described() -> bytes:
    """Return the descriptor of the file the messages and the service are in, serialized."""
    return _TABLE.described()[-1]
