# SPDX-License-Identifier: Apache-2.0
"""What tritonclient.grpc asks for, one call at a time: `python unary.py ADDRESS`."""

import sys

import numpy as np
import tritonclient.grpc as triton  # pyright: ignore[reportMissingImports]
from tritonclient.utils import InferenceServerException  # pyright: ignore[reportMissingImports]


def tensor(name, array, datatype):
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array)
    return given


def refused(call):
    try:
        call()
    except InferenceServerException as error:
        return f"{error.status()}: {error.message()}"
    raise AssertionError("the call was answered")


client = triton.InferenceServerClient(sys.argv[1])
assert client.is_server_live()
assert client.is_server_ready()
assert client.is_model_ready("add")
assert client.is_model_ready("add", "1")
about = client.get_server_metadata()
assert about.name == "forebay"
assert {"binary_tensor_data", "statistics", "model_configuration"} <= set(about.extensions)

metadata = client.get_model_metadata("add", as_json=True)
assert [(one["name"], one["datatype"], one["shape"]) for one in metadata["inputs"]] == [
    ("left", "FP32", ["-1", "4"]),
    ("right", "FP32", ["-1", "4"]),
]
config = client.get_model_config("add", as_json=True)["config"]
assert config["max_batch_size"] == 8
assert config["input"][0] == {"name": "left", "data_type": "TYPE_FP32", "dims": ["4"]}
assert client.get_model_config("count").config.model_transaction_policy.decoupled

# One row, several, and more than a batch takes.
for rows in (1, 3, 20):
    left = np.random.default_rng(rows).random((rows, 4), "f4")
    inputs = [tensor("left", left, "FP32"), tensor("right", left * 2, "FP32")]
    result = client.infer("add", inputs, request_id=f"request {rows}")
    assert np.array_equal(result.as_numpy("sum"), left + left * 2)
    assert result.get_response().id == f"request {rows}"
    assert result.get_response().model_name == "add"
    assert result.get_response().model_version == "1"
    wanted = client.infer("add", inputs, outputs=[triton.InferRequestedOutput("sum")], model_version="1")
    assert np.array_equal(wanted.as_numpy("sum"), left + left * 2)

texts = np.array([b"ab", b"", "é".encode()], object)
assert client.infer("upper", [tensor("input", texts, "BYTES")]).as_numpy("output").tolist() == [
    b"AB",
    b"",
    "É".encode(),
]

# Parameters that servers know, and such as they do not.
one = np.array([1.5], "f8")
slow = client.infer(
    "slow", [tensor("input", one * 0, "FP64")], priority=3, timeout=5_000_000, sequence_id=7, parameters={"mine": 1.5}
)
assert slow.as_numpy("output").tolist() == [0]

large = np.zeros((1, 16 << 18), "f4")
large[0, -1] = 7
assert client.infer("mirror", [tensor("input", large, "FP32")]).as_numpy("output")[0, -1] == 7
for algorithm in ("gzip", "deflate"):
    packed = client.infer("mirror", [tensor("input", large, "FP32")], compression_algorithm=algorithm)
    assert packed.as_numpy("output").shape == large.shape

# Errors
left = np.zeros((1, 4), "f4")
given = tensor("left", left, "FP32")
assert (
    refused(lambda: client.infer("ad", [given]))
    == "StatusCode.NOT_FOUND: Request for unknown model: there is no model 'ad'; did you mean 'add'?"
)
assert "StatusCode.NOT_FOUND: the model 'add' has no version '7'" in refused(lambda: client.infer("add", [given], "7"))
assert "INVALID_ARGUMENT: input 'right' is missing" in refused(lambda: client.infer("add", [given]))
assert "INVALID_ARGUMENT: the model has no input 'wrong'" in refused(
    lambda: client.infer("add", [given, tensor("wrong", left, "FP32")])
)
assert "input 'right': expected FP32, got INT32" in refused(
    lambda: client.infer("add", [given, tensor("right", left.astype("i4"), "INT32")])
)
assert "input 'right': expected the shape [-1, 4], got [1, 5]" in refused(
    lambda: client.infer("add", [given, tensor("right", np.zeros((1, 5), "f4"), "FP32")])
)
assert "INTERNAL: the model failed" in refused(
    lambda: client.infer("broken", [tensor("input", np.array([1]), "INT64")])
)
assert "ModelStreamInfer" in refused(lambda: client.infer("count", [tensor("input", np.array([1]), "INT64")]))
assert "DEADLINE_EXCEEDED" in refused(
    lambda: client.infer("slow", [tensor("input", np.array([5.0]), "FP64")], client_timeout=0.2)
)
assert "DEADLINE_EXCEEDED" in refused(
    lambda: client.infer("slow", [tensor("input", np.array([0.5]), "FP64")], timeout=100_000)
)
told = client.infer("told", [tensor("input", np.array([b"x-mine"], object), "BYTES")], headers={"x-mine": "yours"})
assert told.as_numpy("output").tolist() == [b"yours"]

# The rest of the service
before = client.get_inference_statistics("add").model_stats[0].inference_count
client.infer("add", [given, tensor("right", left, "FP32")])
assert client.get_inference_statistics("add").model_stats[0].inference_count == before + 1
assert {one.name for one in client.get_inference_statistics().model_stats} >= {"add", "count"}
index = client.get_model_repository_index()
assert {(one.name, one.version, one.state) for one in index.models} >= {("add", "1", "READY")}
traced = client.get_trace_settings(as_json=True)["settings"]  # O146
assert traced["trace_level"] == {"value": ["OFF"]}
assert client.get_trace_settings("add", as_json=True)["settings"] == traced
logged = client.get_log_settings(as_json=True)["settings"]
assert logged["log_error"] == {"bool_param": True}
assert logged["log_verbose_level"] == {"uint32_param": 0}
for change in (
    lambda: client.update_trace_settings(settings={"trace_level": "TIMESTAMPS"}),
    lambda: client.update_log_settings({"log_verbose_level": 1}),
):
    assert "UNIMPLEMENTED: " in (said := refused(change)), said
    assert "where the server is started" in said
assert client.get_log_settings(as_json=True)["settings"] == logged
assert "StatusCode.UNIMPLEMENTED" in refused(client.get_system_shared_memory_status)
assert "PERMISSION_DENIED" in refused(lambda: client.load_model("add"))
client.close()
