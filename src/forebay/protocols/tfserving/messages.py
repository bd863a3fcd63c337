# SPDX-License-Identifier: Apache-2.0
"""The messages of TensorFlow Serving's gRPC services."""

from __future__ import annotations

from typing import Final

from forebay.types.proto_tables import ProtoMethod, ProtoTable
from forebay.types.tensorflow_messages import TENSORFLOW

PACKAGE: Final = "tensorflow.serving"
PREDICTION: Final = f"{PACKAGE}.PredictionService"
MODELS: Final = f"{PACKAGE}.ModelService"

STATES: Final = {"UNKNOWN": 0, "START": 10, "LOADING": 20, "AVAILABLE": 30, "UNLOADING": 40, "END": 50}
"""Where a version is in its life."""
_CODES: Final = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED"),
    *("INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)

_SPEC: Final = (
    "1 string name, 2 google.protobuf.Int64Value|version_choice version, 4 string|version_choice version_label, "
    "3 string signature_name"
)

UNCUT: Final = ProtoTable(
    "forebay/tensorflow_serving_uncut.proto",
    PACKAGE,
    {
        "ModelSpec": _SPEC,
        "PredictRequest": "1 ModelSpec model_spec, 2 map:bytes inputs, 3 string* output_filter",
        "InferenceTask": "1 ModelSpec model_spec, 2 string method_name",
        "MultiInferenceRequest": "1 InferenceTask* tasks, 2 bytes input",
    },
)
"""The same messages with tensors and examples that nobody has read. `types.tensor_proto.tensor_in` reads a tensor."""

SERVING: Final = ProtoTable(
    "forebay/tensorflow_serving.proto",
    PACKAGE,
    {
        "ModelSpec": _SPEC,
        "PredictRequest": "1 ModelSpec model_spec, 2 map:tensorflow.TensorProto inputs, 3 string* output_filter",
        "PredictResponse": "2 ModelSpec model_spec, 1 map:tensorflow.TensorProto outputs",
        "ExampleList": "1 tensorflow.Example* examples",
        "ExampleListWithContext": "1 tensorflow.Example* examples, 2 tensorflow.Example context",
        "Input": "1 ExampleList|kind example_list, 2 ExampleListWithContext|kind example_list_with_context",
        "Class": "1 string label, 2 float score",
        "Classifications": "1 Class* classes",
        "ClassificationResult": "1 Classifications* classifications",
        "ClassificationRequest": "1 ModelSpec model_spec, 2 Input input",
        "ClassificationResponse": "1 ClassificationResult result, 2 ModelSpec model_spec",
        "Regression": "1 float value",
        "RegressionResult": "1 Regression* regressions",
        "RegressionRequest": "1 ModelSpec model_spec, 2 Input input",
        "RegressionResponse": "1 RegressionResult result, 2 ModelSpec model_spec",
        "InferenceTask": "1 ModelSpec model_spec, 2 string method_name",
        "MultiInferenceRequest": "1 InferenceTask* tasks, 2 Input input",
        "InferenceResult": (
            "1 ModelSpec model_spec, 2 ClassificationResult|result classification_result, "
            "3 RegressionResult|result regression_result"
        ),
        "MultiInferenceResponse": "1 InferenceResult* results",
        "SignatureDefMap": "1 map:tensorflow.SignatureDef signature_def",
        "GetModelMetadataRequest": "1 ModelSpec model_spec, 2 string* metadata_field",
        "GetModelMetadataResponse": "1 ModelSpec model_spec, 2 map:google.protobuf.Any metadata",
        "GetModelStatusRequest": "1 ModelSpec model_spec",
        "StatusProto": "1 !ErrorCode error_code, 2 string error_message",
        "ModelVersionStatus": "1 int64 version, 2 !.State state, 3 StatusProto status",
        "GetModelStatusResponse": "1 ModelVersionStatus* model_version_status",
        "ServableVersionPolicy": "100 .Latest|policy_choice latest, 101 .All|policy_choice all, "
        "102 .Specific|policy_choice specific",
        "ServableVersionPolicy.Latest": "1 uint32 num_versions",
        "ServableVersionPolicy.All": "",
        "ServableVersionPolicy.Specific": "1 int64* versions",
        "ModelConfig": (
            "1 string name, 2 string base_path, 4 string model_platform, 7 ServableVersionPolicy model_version_policy, "
            "8 map:int64 version_labels"
        ),
        "ModelConfigList": "1 ModelConfig* config",
        "ModelServerConfig": (
            "1 ModelConfigList|config model_config_list, 2 google.protobuf.Any|config custom_model_config"
        ),
        "ReloadConfigRequest": "1 ModelServerConfig config",
        "ReloadConfigResponse": "1 StatusProto status",
    },
    # The codes are those of `tensorflow.error.Code`, which is in a package of its own there.
    {"ModelVersionStatus.State": STATES, "ErrorCode": {name: number for number, name in enumerate(_CODES)}},
    {
        "PredictionService": {
            "Classify": ProtoMethod("ClassificationRequest", "ClassificationResponse"),
            "Regress": ProtoMethod("RegressionRequest", "RegressionResponse"),
            "Predict": ProtoMethod("PredictRequest", "PredictResponse"),
            "MultiInference": ProtoMethod("MultiInferenceRequest", "MultiInferenceResponse"),
            "GetModelMetadata": ProtoMethod("GetModelMetadataRequest", "GetModelMetadataResponse"),
        },
        "ModelService": {
            "GetModelStatus": ProtoMethod("GetModelStatusRequest", "GetModelStatusResponse"),
            "HandleReloadConfigRequest": ProtoMethod("ReloadConfigRequest", "ReloadConfigResponse"),
        },
    },
    imports=(TENSORFLOW,),
)
