# SPDX-License-Identifier: Apache-2.0
"""Asks a server with the original client of TensorFlow Serving, where that is installed; prints what came as JSON."""

import json
import sys
import urllib.request

import grpc
import numpy as np
import tensorflow as tf
from google.protobuf import json_format
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow_serving.apis import (  # pyright: ignore[reportMissingImports]
    classification_pb2,
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_pb2,
    model_service_pb2_grpc,
    predict_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.types.tensor_proto import put, tensor_of
from forebay.types.tensorflow_messages import TENSORFLOW

channel = grpc.insecure_channel(sys.argv[1])
predictions = prediction_service_pb2_grpc.PredictionServiceStub(channel)
models = model_service_pb2_grpc.ModelServiceStub(channel)
rows = np.array([[1, 2, 3, 4], [0, 1, 0, 1]], np.float32)


def predict(model, **inputs):
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = "serving_default"
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return predictions.Predict(request, timeout=120)


def examples(request, model, *rows):
    request.model_spec.name = model
    for row in rows:
        features = {
            name: tf.train.Feature(int64_list=tf.train.Int64List(value=values))
            if isinstance(values[0], int)
            else tf.train.Feature(float_list=tf.train.FloatList(value=values))
            for name, values in row.items()
        }
        request.input.example_list.examples.append(tf.train.Example(features=tf.train.Features(feature=features)))
    return request


def refused(work):
    try:
        work()
    except grpc.RpcError as error:
        return [error.code().name, error.details()]


def codec():
    """Returns the types whose arrays do not come out of TensorFlow's messages, or ours, as they went in."""
    kinds = ["bool", "float16", "float32", "float64", *(f"{u}int{n}" for u in ("", "u") for n in (8, 16, 32, 64))]
    wrong = []
    for kind in kinds:
        for shape in ((3,), (2, 3), (0, 2), (), (1, 1, 1)):
            array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind)
            ours = TENSORFLOW.classes().TensorProto()
            put(ours, from_array("x", array))
            theirs = tf.make_ndarray(TensorProto.FromString(ours.SerializeToString()))
            filled = tf.make_tensor_proto(kind == "bool" or 1, dtype=kind, shape=shape)  # one element, for all
            for message, expected in ((tf.make_tensor_proto(array), array), (filled, np.ones(shape, kind))):
                read = TENSORFLOW.classes().TensorProto.FromString(message.SerializeToString())
                found = to_array(tensor_of("x", read))
                if found.dtype != expected.dtype or not np.array_equal(found, expected):
                    wrong.append(["from", kind, shape, found.tolist()])
            if theirs.dtype != array.dtype or not np.array_equal(theirs, array):
                wrong.append(["to", kind, shape, theirs.tolist()])
    return wrong


def over_rest(path, message):
    """Reads what is told over REST with a message of the original, which takes no members that it does not know."""
    with urllib.request.urlopen(f"{sys.argv[2]}/v1/models/species{path}") as answer:
        told = json.load(answer)
    if not path:
        return json_format.ParseDict(told, message)
    signatures = json_format.ParseDict(told["metadata"]["signature_def"], message)
    return json_format.ParseDict(told["model_spec"], model_pb2.ModelSpec()), signatures


def told_of(signatures):
    return {
        name: [one.dtype, [axis.size for axis in one.tensor_shape.dim]]
        for name, one in signatures.signature_def["serving_default"].inputs.items()
    }


(rest_state,) = over_rest("", get_model_status_pb2.GetModelStatusResponse()).model_version_status  # pyright: ignore[reportAttributeAccessIssue]
rest_spec, rest_signatures = over_rest("/metadata", get_model_metadata_pb2.SignatureDefMap())
answer = predict("species", x=rows)
metadata = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
metadata.model_spec.name = "species"
signatures = get_model_metadata_pb2.SignatureDefMap()
predictions.GetModelMetadata(metadata).metadata["signature_def"].Unpack(signatures)
status = get_model_status_pb2.GetModelStatusRequest()
status.model_spec.name = "species"
classified = predictions.Classify(
    examples(classification_pb2.ClassificationRequest(), "species", {"x": [1.0, 2.0, 3.0, 4.0]})
)
regressed = predictions.Regress(examples(regression_pb2.RegressionRequest(), "price", {"rooms": [3], "size": [1.5]}))
(state,) = models.GetModelStatus(status).model_version_status
print(
    json.dumps(
        {
            "scores": tf.make_ndarray(answer.outputs["scores"]).tolist(),
            "classes": [one.decode() for one in tf.make_ndarray(answer.outputs["classes"])[0]],
            "version": answer.model_spec.version.value,
            "texts": [one.decode() for one in tf.make_ndarray(predict("words", input=["a", "b"]).outputs["output"])],
            "classify": [[one.label, one.score] for one in classified.result.classifications[0].classes],
            "regress": [one.value for one in regressed.result.regressions],
            "inputs": told_of(signatures),
            "rest_inputs": told_of(rest_signatures),
            "rest_spec": [rest_spec.name, rest_spec.version.value],
            "rest_state": [rest_state.version, rest_state.state, rest_state.status.error_code],
            "method": signatures.signature_def["serving_default"].method_name,
            "state": [state.version, state.state, state.status.error_code],
            "unknown": refused(lambda: predict("specie", x=rows)),
            "shape": refused(lambda: predict("species", x=rows[0])),
            "unmanaged": refused(
                lambda: models.HandleReloadConfigRequest(model_management_pb2.ReloadConfigRequest(), timeout=120)
            ),
            "codec": codec(),
        }
    )
)
