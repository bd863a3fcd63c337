# SPDX-License-Identifier: Apache-2.0
"""The messages of TensorFlow that travel or lie in files: tensors, examples, and what a SavedModel says of itself.

What is not named here is passed over by who reads it: above all the graph of a model.
"""

from __future__ import annotations

from typing import Final

from forebay.types.datatypes import DATATYPES
from forebay.types.proto_tables import ProtoTable

_OTHER_TYPES: Final = {
    "INVALID": 0,
    "COMPLEX64": 8,
    "QINT8": 11,
    "QUINT8": 12,
    "QINT32": 13,
    "QINT16": 15,
    "QUINT16": 16,
    "COMPLEX128": 18,
    "RESOURCE": 20,
    "VARIANT": 21,
}
"""Types of tensors that there are, and that are none of ours."""
TYPE_NAMES: Final = dict(
    sorted(
        [(row.tensorflow, f"DT_{row.tensorflow_name}") for row in DATATYPES.values()]
        + [(number, f"DT_{name}") for name, number in _OTHER_TYPES.items()]
    )
)
"""What the types of tensors are called, by number."""
PREDICT: Final = "tensorflow/serving/predict"
"""The method of a signature that takes and gives tensors; `classify` and `regress` are the others."""
CLASSIFY: Final = "tensorflow/serving/classify"
REGRESS: Final = "tensorflow/serving/regress"

TENSORFLOW: Final = ProtoTable(
    "forebay/tensorflow.proto",
    "tensorflow",
    {
        "TensorShapeProto": "2 .Dim* dim, 3 bool unknown_rank",
        "TensorShapeProto.Dim": "1 int64 size, 2 string name",
        "TensorProto": (
            "1 !DataType dtype, 2 TensorShapeProto tensor_shape, 3 int32 version_number, 4 bytes tensor_content, "
            "13 int32* half_val, 5 float* float_val, 6 double* double_val, 7 int32* int_val, 8 bytes* string_val, "
            "9 float* scomplex_val, 10 int64* int64_val, 11 bool* bool_val, 12 double* dcomplex_val, "
            "16 uint32* uint32_val, 17 uint64* uint64_val"
        ),
        "TensorInfo": "1 string name, 2 !DataType dtype, 3 TensorShapeProto tensor_shape",
        "SignatureDef": (
            "1 map:TensorInfo inputs, 2 map:TensorInfo outputs, 3 string method_name, 4 map:TensorProto defaults"
        ),
        "MetaGraphDef": "1 .MetaInfoDef meta_info_def, 5 map:SignatureDef signature_def",
        "MetaGraphDef.MetaInfoDef": "4 string* tags",
        "SavedModel": "1 int64 saved_model_schema_version, 2 MetaGraphDef* meta_graphs",
        "BytesList": "1 bytes* value",
        "FloatList": "1 float* value",
        "Int64List": "1 int64* value",
        "Feature": "1 BytesList|kind bytes_list, 2 FloatList|kind float_list, 3 Int64List|kind int64_list",
        "Features": "1 map:Feature feature",
        "Example": "1 Features features",
    },
    {"DataType": {name: number for number, name in TYPE_NAMES.items()}},
)
