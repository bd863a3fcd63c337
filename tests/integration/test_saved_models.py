# SPDX-License-Identifier: Apache-2.0
"""`forebay serve FOLDER` of a SavedModel, and of a repository of them."""

import base64
import json
import shutil
import struct
import zlib

import numpy as np
import pytest
from tests.buckets import running_buckets
from tests.integration.tfserving.conftest import Client, M
from tests.models.saved_models import PYTHON, QUIET, SOURCE, saved_models

from forebay.arrays.numpy_tensors import from_array, to_array
from forebay.types.tensor import join_elements
from forebay.types.tensor_proto import put, tensor_of

IRIS = {"x": [1, 2, 3, 4]}


@pytest.fixture(scope="module")
def iris(launch):
    return launch(saved_models() / "iris/1")


def test_a_folder_is_served_under_its_name_with_its_types(iris):
    answer = iris.call("iris", IRIS).json()  # and not as `1`, which is its version
    assert answer["class_ids"] == 2
    assert sum(answer["scores"]) == pytest.approx(1)
    told = iris.client.get("/v2/models/iris").json()
    assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert [one["name"] for one in told["outputs"]] == ["class_ids", "scores"]
    assert iris.call("iris", {"x": [1, 2, 3]}).status_code == 422


def test_a_repository_of_saved_models_and_its_broken_ones(serve, tmp_path):
    shutil.copytree(saved_models() / "iris", tmp_path / "iris")
    shutil.copytree(saved_models() / "plain/1", tmp_path / "plain")  # without versions
    shutil.copytree(saved_models() / "iris/1", tmp_path / "half/1")
    (tmp_path / "half/1/variables/variables.index").unlink()
    shutil.copytree(saved_models() / "texts", tmp_path / "texts")  # OpenVINO cannot run it
    server = serve(tmp_path, "--worker-kind", "thread", "--lazy", "--versions", "all")
    answer = server.call("iris", IRIS)
    assert answer.status_code == 200, answer.text + server.log
    assert answer.json()["class_ids"] == 0  # version 2 turns the scores round
    assert server.client.post("/models/iris/versions/1", json=IRIS).json()["class_ids"] == 2
    assert server.call("plain", IRIS).json()["class_ids"] == 2
    assert server.call("half", IRIS).status_code == 404
    assert "no variables/variables.index" in json.dumps(server.client.get("/models").json())
    refused = server.call("texts", {"texts": "a"})
    assert "TensorFlow can: pip install" in refused.json()["error"]["message"]


def test_one_that_changes_is_exchanged(serve, tmp_path, eventually):
    folder = shutil.copytree(saved_models() / "iris/1", tmp_path / "flowers")
    server = serve(folder, "--worker-kind", "thread")
    assert server.call("flowers", IRIS).json()["class_ids"] == 2
    shutil.copytree(saved_models() / "iris/2", folder, dirs_exist_ok=True)
    eventually(lambda: server.call("flowers", IRIS).json()["class_ids"] == 0)


def test_saved_models_in_a_bucket(serve, tmp_path):
    with running_buckets(tmp_path) as buckets:
        buckets.make("flowers")
        for path in saved_models().glob("iris/**/*"):
            if path.is_file():
                buckets.put(f"flowers/all/{path.relative_to(saved_models())}", path.read_bytes())
        for path in (saved_models() / "plain/1").glob("*.pb"):
            buckets.put(f"flowers/plain/{path.name}", path.read_bytes())
        options = ["--worker-kind", "thread", "--repository-folder", str(tmp_path / "cache")]
        server = serve(None, "s3://flowers/all", *options, env=buckets.environment())
        assert server.call("iris", IRIS).json()["class_ids"] == 0
        one = serve(None, "s3://flowers/plain", *options, env=buckets.environment())
        assert one.call("plain", IRIS).json()["class_ids"] == 2  # the place is a model itself


@pytest.fixture(scope="module")
def in_tensorflow(launch, tmp_path_factory):
    """What only TensorFlow serves."""
    folder = tmp_path_factory.mktemp("in-tensorflow")
    names = ("texts", "two", "keras", "several")
    listed = [f"  - target: {saved_models()}/{name}/1\n    worker_kind: thread\n" for name in names]
    (folder / "forebay.yaml").write_text("models:\n" + "".join(listed))
    command = [str(PYTHON), "-m", "forebay", "serve"]
    return launch(folder / "forebay.yaml", command=command, env={**QUIET, "PYTHONPATH": str(SOURCE)})


def test_tensorflow_serves_what_only_it_can(in_tensorflow):
    assert in_tensorflow.call("texts", {"texts": "b\u00fc"}).json() == {"length": 3, "upper": "B\u00fc"}
    assert in_tensorflow.call("texts", {"texts": 3}).status_code == 422


def _asked(server, name, **body):
    answer = server.client.post(f"/v1/models/{name}:predict", json=body)
    assert answer.status_code == 200, answer.text + server.log
    return answer.json()["predictions"]


def test_every_signature_is_served(in_tensorflow):
    """Deliverable 4: at a path of its own, and by its name in TensorFlow Serving's protocol."""
    server = in_tensorflow
    rows = [[1, 2, 3, 4], [0, 0, 0, 0]]
    assert _asked(server, "two", signature_name="total", instances=rows) == [10, 0]
    assert [one["class_ids"] for one in _asked(server, "two", signature_name="predict", instances=rows)] == [2, 0]
    assert _asked(server, "two", instances=rows) == _asked(server, "two", signature_name="predict", instances=rows)
    assert server.client.post("/models/two/total", json=IRIS).json() == {"total": 10}
    assert server.client.post("/models/two/total", json={"x": [1]}).status_code == 422
    told = server.client.get("/v1/models/two/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert {name: sorted(one["outputs"]) for name, one in told.items()} == {
        "predict": ["class_ids", "scores"],
        "total": ["total"],
    }
    refused = server.client.post("/v1/models/two:predict", json={"signature_name": "sum", "instances": rows})
    assert (refused.status_code, "no signature 'sum'; there is 'predict', 'total'" in refused.text) == (400, True)
    same = [_asked(server, "keras", signature_name=name, instances=rows) for name in ("serve", "serving_default")]
    assert same[0] == same[1]
    assert _asked(server, "several", signature_name="b", instances=rows) == [10, 0]
    assert _asked(server, "several", instances=rows) == _asked(server, "several", signature_name="a", instances=rows)
    assert "has no signature 'serving_default'; what names none is answered by 'a'" in server.log


def test_what_only_tensorflow_serves_is_named(serve):
    server = serve(saved_models() / "keras/1", "--worker-kind", "thread")
    assert "the signatures 'serve' are not served; TensorFlow can: pip install" in server.log
    refused = server.client.post("/v1/models/keras:predict", json={"signature_name": "serve", "instances": [[1] * 4]})
    assert "the model 'keras' has no signature 'serve'; there is 'serving_default'" in refused.json()["error"]


@pytest.fixture(scope="module")
def photos(launch):
    command = [str(PYTHON), "-m", "forebay", "serve"]
    options = ["--worker-kind", "thread", "--grpc-port", "0"]
    return launch(saved_models() / "photos/1", *options, command=command, env={**QUIET, "PYTHONPATH": str(SOURCE)})


def _picture(color):
    """The bytes of a picture, which are no text."""
    raw = b"".join(b"\0" + bytes(color) * 2 for _ in range(2))
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")]
    told = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(told)


RED, BLUE = _picture((200, 0, 0)), _picture((0, 0, 200))


def _top(scores):
    return ["red", "green", "blue"][max(range(3), key=list(scores).__getitem__)]


@pytest.mark.parametrize("form", ["rows", "named rows", "columns", "named columns"])
def test_an_image_classifier_is_asked_over_rest(photos, form):  # F80
    told = [{"b64": base64.b64encode(one).decode()} for one in (RED, BLUE)]
    body = {
        "rows": {"instances": told},
        "named rows": {"instances": [{"image_bytes": one} for one in told]},
        "columns": {"inputs": told},
        "named columns": {"inputs": {"image_bytes": told}},
    }[form]
    answer = photos.client.post("/v1/models/photos:predict", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    scores = [one["scores"] for one in found["predictions"]] if "rows" in form else found["outputs"]["scores"]
    assert [_top(one) for one in scores] == ["red", "blue"]


def test_an_image_classifier_is_asked_with_examples(photos):  # F80
    examples = [{"image/encoded": {"b64": base64.b64encode(one).decode()}} for one in (RED, BLUE)]
    answer = photos.client.post("/v1/models/photos:classify", json={"signature_name": "classify", "examples": examples})
    assert answer.status_code == 200, answer.text
    assert [max(one, key=lambda pair: pair[1])[0] for one in answer.json()["results"]] == ["red", "blue"]


def test_an_image_classifier_is_asked_over_grpc(photos):  # F80
    client = Client(photos)
    request = M.PredictRequest()
    request.model_spec.name = "photos"
    put(request.inputs["image_bytes"], from_array("image_bytes", np.array([RED, BLUE], object)))
    answer = client.call("Predict", request)
    scores = to_array(tensor_of("scores", answer.outputs["scores"]))
    assert [_top(one) for one in scores] == ["red", "blue"]
    classify = M.ClassificationRequest()
    classify.model_spec.name, classify.model_spec.signature_name = "photos", "classify"
    for one in (RED, BLUE):
        example = classify.input.example_list.examples.add()
        example.features.feature["image/encoded"].bytes_list.value.append(one)
    rows = client.call("Classify", classify).result.classifications
    client.close()
    assert [max(one.classes, key=lambda each: each.score).label for one in rows] == ["red", "blue"]


def test_an_image_classifier_is_asked_in_the_second_protocol(photos):  # F80
    data = join_elements("image_bytes", [RED, BLUE])
    asked = {
        "inputs": [
            {"name": "image_bytes", "shape": [2], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
        ]
    }
    head = json.dumps(asked).encode()
    answer = photos.client.post(
        "/v2/models/photos/infer", content=head + data, headers={"inference-header-content-length": str(len(head))}
    )
    assert answer.status_code == 200, answer.text
    outputs = {one["name"]: one for one in answer.json()["outputs"]}
    scores = outputs["scores"]["data"]
    assert [_top(scores[:3]), _top(scores[3:])] == ["red", "blue"]
