# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's REST API; what KServe's first version is of it is tested with that protocol."""

import base64

import pytest
from tests.models import model_files
from tests.models.saved_models import saved_models

ROW = [1, 2, 3, 4]


@pytest.fixture(scope="module")
def files(launch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    model_files.texts(folder / "texts.onnx")
    axes = [("in", "FLOAT", [2, 3])], [("out", "FLOAT", [3, 2])]
    model_files.save(folder / "turned.onnx", [("Transpose", ["in"], ["out"])], *axes)
    listed = [saved_models() / f"{name}/1" for name in ("iris", "scalar", "images")]
    listed += ["texts.onnx", "turned.onnx"]
    text = "models:\n" + "".join(f"  - target: {path}\n    worker_kind: thread\n" for path in listed)
    (folder / "forebay.yaml").write_text(text)
    return launch(folder / "forebay.yaml")


def post(server, path, body):
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return server.client.post(f"/v1/models/{path}", **content)


def answered(server, path, body):
    answer = post(server, path, body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer):
    assert answer.headers["content-type"] == "application/json"
    (text,) = answer.json().values()  # {"error": "..."}
    assert "error" in answer.json()
    return answer.status_code, text


def test_rows_with_names_and_without(files):
    named = answered(files, "iris:predict", {"instances": [{"x": ROW}, {"x": [0, 0, 0, 0]}]})["predictions"]
    assert [sorted(one) for one in named] == [["class_ids", "scores"]] * 2
    bare = answered(files, "iris:predict", {"signature_name": "serving_default", "instances": [ROW, [0, 0, 0, 0]]})
    assert bare["predictions"] == named
    assert answered(files, "iris/versions/1:predict", {"instances": [ROW]})["predictions"] == named[:1]


def test_columns_with_names_and_without(files):
    named = answered(files, "iris:predict", {"inputs": {"x": [ROW, [0, 0, 0, 0]]}})["outputs"]
    assert named["class_ids"] == [2, 0]
    assert [len(row) for row in named["scores"]] == [3, 3]
    assert answered(files, "iris:predict", {"inputs": [ROW, [0, 0, 0, 0]]})["outputs"] == named


def test_a_single_output_goes_without_its_name(files):
    assert answered(files, "scalar:predict", {"inputs": {"x": 1, "y": 2}}) == {"outputs": 3}
    assert answered(files, "scalar:predict", {"instances": [{"x": 1, "y": 2}]}) == {"predictions": [3]}


def test_axes_of_any_length_are_what_the_lists_are(files):
    images = [[[[1.0], [3.0]], [[5.0], [7.0]]]]
    assert answered(files, "images:predict", {"inputs": images}) == {"outputs": [4]}
    assert answered(files, "images:predict", {"instances": [*images, [[[2.0]]]]}) == {"predictions": [4, 2]}


def test_models_of_python_are_asked_in_columns_too(server):
    found = answered(server, "species:predict", {"inputs": {"x": [ROW]}})
    assert found == {"outputs": {"classes": [["small", "large"]], "scores": [[1, 10]]}}
    rows = answered(server, "species:predict", {"instances": [{"x": ROW}]})
    assert rows == {"predictions": [{"classes": ["small", "large"], "scores": [1, 10]}]}
    assert answered(server, "price:predict", {"inputs": {"rooms": [1, 2], "size": [0, 1]}}) == {"outputs": [100, 201]}
    assert answered(server, "words:predict", {"inputs": ["a", "b"]}) == {"outputs": ["A", "B"]}


def test_numbers_of_sixteen_bits_are_numbers(server):
    assert answered(server, "every:predict", {"inputs": {"FP16": [[1, 2.5]]}}) == {"outputs": [[1, 2.5]]}
    rows = {"instances": [{"FP16": [1, 2.5]}]}
    assert answered(server, "every:predict", rows) == {"predictions": [{"FP16": [1, 2.5]}]}
    status, text = refused(post(server, "every:predict", {"inputs": {"FP16": [[1e5]]}}))
    assert (status, text) == (400, "tensor 'FP16' holds a number that does not fit FP16")


def test_bytes_stand_in_base64(server):
    told = {"b64": base64.b64encode("\u00fc".encode()).decode()}
    assert answered(server, "words:predict", {"instances": [told, "a"]}) == {"predictions": ["\u00dc", "A"]}
    assert answered(server, "words:predict", {"inputs": [told]}) == {"outputs": ["\u00dc"]}
    # Bytes that are no text come back as such; so does what is called `..._bytes`.
    raw = {"b64": base64.b64encode(b"\xff\x00").decode()}
    assert answered(server, "sounds:predict", {"instances": [raw]}) == {"predictions": [raw]}
    assert answered(server, "pictures:predict", {"instances": ["a"]}) == {
        "predictions": [{"thumb_bytes": {"b64": "QQ=="}, "name": "a"}]
    }


def odd(server, path, body):
    """What is answered to a body with NaN and infinities, which httpx does not write."""
    return answered(server, path, body.encode())


def test_nan_and_infinities_go_both_ways(server):  # F83
    assert str(odd(server, "nans:predict", '{"inputs": [1.0]}')) == "{'outputs': [nan]}"
    assert str(odd(server, "nans:predict", '{"instances": [1.0]}')) == "{'predictions': [nan]}"
    rows = '{"instances": [{"FP32": [NaN, -Infinity, 1]}, {"FP32": [Infinity, 2.5, 0.1]}]}'
    assert str(odd(server, "every:predict", rows)["predictions"]) == "[[nan, -inf, 1.0], [inf, 2.5, 0.1]]"
    columns = '{"inputs": {"FP64": [[NaN, Infinity]]}}'
    assert str(odd(server, "every:predict", columns)["outputs"]) == "[[nan, inf]]"
    found = odd(server, "species:classify", '{"examples": [{"x": [NaN, 0, 0, 0]}, {"x": [Inf, 0, 0, 0]}]}')
    assert str(found["results"]) == "[[['small', 1.0], ['large', nan]], [['small', 1.0], ['large', inf]]]"
    assert str(odd(server, "price:regress", '{"examples": [{"rooms": 1, "size": -Infinity}]}')) == "{'results': [-inf]}"
    for wrong in ('{"inputs": {"INT64": [[NaN]]}}', '{"instances": [{"BOOL": [Infinity]}]}', '{"inputs": NaN'):
        assert refused(post(server, "every:predict", wrong.encode()))[0] == 400
    assert refused(post(server, "words:predict", b'{"inputs": ["NaN", NaN]}'))[0] == 400
    assert answered(server, "words:predict", b'{"inputs": ["NaN", "-Inf"]}') == {"outputs": ["NAN", "-INF"]}


def test_floats_have_the_digits_of_their_type(server):  # F83
    rows = {"instances": [{"FP32": [0.1, 1.1], "FP64": [0.1]}]}
    assert '[{"FP32":[0.1,1.1],"FP64":[0.1]}]' in post(server, "every:predict", rows).text
    columns = {"inputs": {"FP32": [[0.1, 1 / 3]]}}
    assert post(server, "every:predict", columns).text == '{"outputs":[[0.1,0.333333343]]}'


def test_base64_may_come_without_padding(server):  # F85
    for text, given in (("YQ", "A"), ("YQ==", "A"), ("YWI", "AB"), ("YWJj", "ABC"), ("", "")):
        assert answered(server, "words:predict", {"inputs": [{"b64": text}]}) == {"outputs": [given]}
        assert answered(server, "words:predict", {"instances": [{"b64": text}]}) == {"predictions": [given]}


def test_bytes_in_rows_are_objects_at_any_depth(server):  # F82
    found = answered(server, "nested:predict", {"instances": [1]})
    assert found == {"predictions": [{"parts": [{"b64": "/wA="}], "named": {"raw": {"b64": ""}}}]}


def test_rows_for_a_file_without_an_axis_of_samples_are_one_tensor(files):  # F84
    # The original makes one tensor of all instances, and rows of what comes along its first axis.
    assert answered(files, "turned:predict", {"instances": [[1, 2, 3], [4, 5, 6]]}) == {
        "predictions": [[1, 4], [2, 5], [3, 6]]
    }
    assert answered(files, "turned:predict", {"instances": [{"in": [1, 2, 3]}, {"in": [4, 5, 6]}]})["predictions"] == [
        [1, 4],
        [2, 5],
        [3, 6],
    ]
    assert refused(post(files, "turned:predict", {"instances": [[1, 2, 3]]}))[0] == 400


def test_further_methods_are_signatures(server):
    # deliverable 4: every signature is reached by its name
    weight = {"signature_name": "weight"}
    assert answered(server, "species:predict", {**weight, "instances": [{"x": ROW}]}) == {"predictions": [5]}
    assert answered(server, "species:predict", {**weight, "inputs": {"x": [ROW]}}) == {"outputs": [5]}
    marks = answered(server, "species:predict", {"signature_name": "marks", "instances": [{"x": ROW}]})
    assert marks == {"predictions": [{"mark_bytes": {"b64": "bQ=="}, "first": 1}]}
    assert answered(server, "species:regress", {**weight, "examples": [{"x": ROW}]}) == {"results": [5]}
    status, text = refused(post(server, "species:predict", {"signature_name": "w", "instances": [{"x": ROW}]}))
    assert (status, text) == (
        400,
        "the model 'species' has no signature 'w'; there is 'serving_default', 'marks', 'weight'",
    )


def test_classify_and_regress(server):
    found = answered(server, "species:classify", {"examples": [{"x": ROW}, {"x": [0.0] * 4}]})
    assert found == {"results": [[["small", 1], ["large", 10]], [["small", 1], ["large", 0]]]}
    rows = {"context": {"rooms": 3}, "examples": [{"size": 1.5}, {"size": [2.5], "rooms": 4}]}
    assert answered(server, "price:regress", rows) == {"results": [301.5, 402.5]}


def test_a_feature_may_have_any_length_where_an_input_has_any_shape(server):
    assert answered(server, "brightness:regress", {"examples": [{"input": [1, 2]}]}) == {"results": [1.5]}
    rows = {"examples": [{"input": 1}, {"input": [2.5]}]}
    assert answered(server, "brightness:regress", rows) == {"results": [1, 2.5]}
    unlike = {"examples": [{"input": 1}, {"input": [2, 3]}]}
    assert "unlike lengths [1, 2]" in refused(post(server, "brightness:regress", unlike))[1]


def test_status(server):
    status = {"error_code": "OK", "error_message": ""}
    one = {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": status}]}
    assert server.client.get("/v1/models/species").json() == one
    assert server.client.get("/v1/models/species/versions/1").json() == one
    assert refused(server.client.get("/v1/models/species/versions/2"))[0] == 404
    assert refused(server.client.get("/v1/models/specie/versions/2"))[0] == 404
    assert "no version with the label 'stable'" in refused(server.client.get("/v1/models/species/labels/stable"))[1]


def test_metadata(server):
    found = server.client.get("/v1/models/species/metadata").json()
    assert found["model_spec"] == {"name": "species", "signature_name": "", "version": "1"}
    signatures = found["metadata"]["signature_def"]["signature_def"]
    assert set(signatures) == {"serving_default", "weight", "marks"}
    signature = signatures["serving_default"]
    assert signature["method_name"] == "tensorflow/serving/predict"
    dim = [{"size": "-1", "name": ""}, {"size": "4", "name": ""}]
    shape = {"dim": dim, "unknown_rank": False}
    assert signature["inputs"] == {"x": {"dtype": "DT_FLOAT", "tensor_shape": shape, "name": ""}}
    assert server.client.get("/v1/models/species/versions/1/metadata").json() == found
    told = server.client.get("/v1/models/brightness/metadata").json()["metadata"]["signature_def"]["signature_def"]
    unranked, rows = ({"dim": dim, "unknown_rank": not dim} for dim in ([], [{"size": "-1", "name": ""}]))
    assert told["serving_default"]["inputs"]["input"]["tensor_shape"] == unranked
    assert told["serving_default"]["outputs"]["output"]["tensor_shape"] == rows
    told = server.client.get("/v1/models/every/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert told["serving_default"]["outputs"]["FP32"]["tensor_shape"] == unranked
    assert refused(server.client.get("/v1/models/species/nothing"))[0] == 404
    assert refused(server.client.get("/v1/models/broken/versions/9/metadata"))[0] == 404


@pytest.mark.parametrize(
    "path, body, status, said",
    [
        ("iris:predict", {}, 400, 'expected "instances" (rows) or "inputs" (columns), got neither'),
        ("iris:predict", {"instances": [ROW], "inputs": [ROW]}, 400, "got both"),
        ("iris:predict", {"instances": []}, 400, "instances: expected at least one sample, got none"),
        ("iris:predict", {"instances": 3}, 400, "Expected `array`, got `int` - at `$.instances`"),
        ("iris:predict", b"[1", 400, "body: expected {"),
        ("iris:predict", b"\xff", 400, "body: expected {"),
        ("iris:predict", {"instances": [ROW], "signature_name": "other"}, 400, "no signature 'other'"),
        ("iris:predict", {"instances": [[1, 2]]}, 400, "sample 0"),
        ("iris:predict", {"instances": [{"y": ROW}]}, 400, "missing required field `x`"),
        ("iris:predict", {"inputs": {"y": [ROW]}}, 400, "the model has no input 'y'"),
        ("iris:predict", {"inputs": [[1, 2]]}, 400, "expected the shape [-1, 4], got [1, 2]"),
        ("iris:predict", {"inputs": [ROW, [1]]}, 400, "expected a list of FP32, flat or of the shape [2, 4]"),
        ("iris:predict", {"inputs": [["a"] * 4]}, 400, "expected a list of FP32"),
        ("iris:predict", {"inputs": 3}, 400, "expected the shape [-1, 4], got []"),
        ("iris:predict", b'{"inputs": ' + b"[" * 40 + b"]" * 40 + b"}", 400, "is deeper than 32 lists"),
        ("iris:predict", b'{"inputs": ' + b"[" * 100_000, 400, "body: expected "),
        ("scalar:predict", {"inputs": [1]}, 400, "the model has several inputs"),
        ("words:predict", {"inputs": [{"b64": "?"}]}, 400, "expected base64 in b64"),
        ("words:predict", {"instances": [{"b64": 3}, {"b64": "QQ=="}]}, 400, "expected base64 in b64"),
        ("words:predict", {"inputs": [{"b64": "QQ=="}, [{"b64": "QQ=="}]]}, 400, "takes texts, or bytes"),
        ("words:predict", {"inputs": [{"b64": ""}] * 50_001}, 413, "more than 50000 values"),
        ("words:predict", {"inputs": [{"b64": ""}, *[""] * 100_000]}, 413, "more than 50000 values"),
        ("words:predict", {"inputs": [{"b64": "/w=="}]}, 400, "holds bytes that are not UTF-8"),
        ("words:predict", b'{"instances": [{"b64": 1e999}]}', 400, "Number out of range"),
        ("words:predict", b'{"instances": [{"b64": ' + b"1" * 5000 + b"}]}", 400, "out of range"),
        ("words:predict", b'{"inputs": ["a\xff", {"b64": "QQ=="}]}', 400, "input 'input' cannot be read"),
        ("words:predict", b'{"inputs": {"\xff": ["a"]}}', 400, "the names of inputs cannot be read"),
        ("parts:predict", {"instances": [1]}, 400, "streams its answers"),
        ("broken:predict", {"inputs": [1.0]}, 500, "the model failed"),
        ("species:classify", {}, 400, "body: expected {"),
        ("species:classify", {"examples": []}, 400, "expected at least one example, got none"),
        ("species:classify", {"examples": [{"x": 1}]}, 400, "feature 'x' of example 0: expected [4] values, got 1"),
        ("species:classify", {"examples": [{"x": [{}] * 4}]}, 400, "takes texts, or bytes"),
        ("species:classify", {"examples": [{"x": ROW}], "signature_name": "s"}, 400, "no signature 's'"),
        ("species:regress", {"examples": [{"x": ROW}]}, 400, "does no regression"),
        ("words:regress", {"examples": [{"input": "a"}]}, 400, "does no regression"),
        ("specie:predict", {"instances": [1]}, 404, "did you mean 'species'?"),
        ("species:guess", {"instances": [1]}, 404, "there is NAME:predict, :classify and :regress"),
        ("species", {"instances": [1]}, 404, "there is NAME:predict, :classify and :regress"),
        ("species/versions/9:predict", {"instances": [1]}, 404, "has no version '9'"),
        ("species/labels/stable:predict", {"instances": [1]}, 404, "no version with the label 'stable'"),
    ],
)
def test_what_is_refused_in_the_protocols_form(server, files, path, body, status, said):
    name = path.partition(":")[0].partition("/")[0]
    found, text = refused(post(files if name in {"iris", "scalar"} else server, path, body))
    assert (found, said in text) == (status, True), text


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
@pytest.mark.parametrize("path", ["iris:predict", "iris/versions/1:predict", "iris:classify"])
def test_another_method_is_refused_as_the_protocol_does(files, method, path):
    answer = files.client.request(method, f"/v1/models/{path}")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, OPTIONS")
    if method != "HEAD":
        assert refused(answer) == (405, f"{method} is not allowed here; use POST, OPTIONS")


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("path", ["nothing:predict", "iris:nothing"])
def test_what_is_not_there_is_told_alike_by_every_method(files, method, path):
    status, text = refused(files.client.request(method, f"/v1/models/{path}"))
    assert (status, "nothing" in text) == (404, True)
