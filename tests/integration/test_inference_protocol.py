# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over HTTP, byte by byte; real clients are in `test_inference_clients.py`."""

from __future__ import annotations

import gzip
import json
import zlib

import httpx
import numpy as np
import pytest
from tests.models import model_files
from tests.waiting import PATIENCE_S

LENGTH = "Inference-Header-Content-Length"
JSON = "application/json"
CLIENT: httpx.Client


def serve_all(launch, folder, kind, *targets):
    listed = "".join(f"  - {{target: '{target}', worker_kind: {kind}}}\n" for target in targets)
    (folder / "forebay.yaml").write_text(f"models:\n{listed}")
    return launch(folder / "forebay.yaml", "--manage")


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory, models):
    """Models of all kinds."""
    global CLIENT  # opened with the server, which comes again where tests are not run in a row
    folder = tmp_path_factory.mktemp("tensors")
    files = [
        model_files.linear(folder / "price.onnx"),
        model_files.linear(folder / "two.onnx", rows=2),
        model_files.texts(folder / "texts.onnx"),
    ]
    with httpx.Client(trust_env=False, timeout=PATIENCE_S) as CLIENT:
        yield serve_all(launch, folder, "thread", models / "tensors.py", models / "measured.py", *files)


@pytest.fixture(scope="module", params=["thread", "process"])
def either(request, server, launch, tmp_path_factory, models):
    """A few of them, in threads and in processes."""
    if request.param == "thread":
        return server
    folder = tmp_path_factory.mktemp("processes")
    file = model_files.linear(folder / "price.onnx")
    names = ("Doubled", "Head")
    targets = [f"{models / 'tensors.py'}:{name}" for name in names]
    return serve_all(launch, folder, "process", *targets, models / "measured.py", file)


def infer(server, name, body, **headers):
    return CLIENT.post(f"{server.url}/v2/models/{name}/infer", content=body, headers=headers)


def tensor(name, datatype, shape, data):
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def ask(server, name, *inputs, **more):
    return infer(server, name, json.dumps({"inputs": inputs, **more}))


def binary(arrays, **more):
    """The body of a call whose tensors lie behind the JSON, and the header that says where."""
    inputs, behind = [], b""
    for name, datatype, shape, data in arrays:
        inputs.append({"name": name, "datatype": datatype, "shape": shape})
        inputs[-1]["parameters"] = {"binary_data_size": len(data)}
        behind += data
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}, **more}).encode()
    return head + behind, {LENGTH: str(len(head))}


def outputs(answer):
    """The outputs of an answer by name, as lists or as bytes."""
    assert answer.status_code == 200, answer.text
    length = answer.headers.get(LENGTH)
    at = len(answer.content) if length is None else int(length)
    told = json.loads(answer.content[:at])
    found = {}
    for one in told["outputs"]:
        if "data" in one:
            found[one["name"]] = (one["datatype"], one["shape"], one["data"])
        else:
            size = one["parameters"]["binary_data_size"]
            found[one["name"]] = (one["datatype"], one["shape"], answer.content[at : at + size])
            at += size
    assert at == len(answer.content)
    return found


def refusal(answer):
    """The text of an error, in the form that kserve's client reads."""
    assert answer.headers["content-type"] == JSON  # O129
    assert list(answer.json()) == ["error"]
    return answer.status_code, answer.json()["error"]


def test_the_server_tells_of_itself(server):  # O123, O124, O143
    for path in ("/v2", "/v2/"):
        told = CLIENT.get(server.url + path).json()
        assert told["name"] == "forebay"
        assert "binary_tensor_data" in told["extensions"]
    assert CLIENT.get(f"{server.url}/v2/health/live").json() == {"live": True}
    assert CLIENT.get(f"{server.url}/v2/health/ready").json() == {"ready": True}


def test_metadata_of_all_kinds_of_models(server):  # O125
    def told(name):
        found = CLIENT.get(f"{server.url}/v2/models/{name}").json()
        return [[(one["name"], one["datatype"], one["shape"]) for one in found[side]] for side in ("inputs", "outputs")]

    assert told("doubled") == [[("input", "FP32", [-1, 3])], [("output", "FP32", [-1, 3])]]
    assert told("people/") == [
        [("name", "BYTES", [-1]), ("age", "INT64", [-1]), ("scores", "FP64", [-1, -1]), ("more", "BYTES", [-1])],
        [("text", "BYTES", [-1]), ("older", "INT64", [-1]), ("mean", "FP64", [-1]), ("all", "BYTES", [-1])],
    ]
    assert told("price") == [[("x", "FP32", [-1, 3])], [("price", "FP32", [-1, 1])]]
    assert told("two") == [[("x", "FP32", [2, 3])], [("price", "FP32", [2, 1])]]
    assert told("measured") == [[("input", "BYTES", [-1])], [("output", "INT64", [-1])]]
    assert told("sound") == [[("input", "BYTES", [-1])], [("output", "BYTES", [-1])]]
    assert told("anything/versions/1") == [[], []]
    assert CLIENT.get(f"{server.url}/v2/models/price/ready").json() == {"name": "price", "ready": True}


def test_the_configuration_has_no_axis_of_samples(server):  # O142
    told = CLIENT.get(f"{server.url}/v2/models/doubled/config").json()
    assert told["max_batch_size"] == 4
    assert told["input"] == [{"name": "input", "data_type": "TYPE_FP32", "dims": [3]}]
    assert CLIENT.get(f"{server.url}/v2/models/two/config").json()["max_batch_size"] == 0
    assert CLIENT.get(f"{server.url}/v2/models/words/config").json()["model_transaction_policy"] == {"decoupled": True}


def test_no_tensor_of_a_configuration_is_without_dims(server):
    told = CLIENT.get(f"{server.url}/v2/models/measured/config").json()
    assert told["input"] == [{"name": "input", "data_type": "TYPE_STRING", "dims": [1], "reshape": {"shape": []}}]
    assert told["output"] == [{"name": "output", "data_type": "TYPE_INT64", "dims": [1], "reshape": {"shape": []}}]


@pytest.mark.parametrize("data", [["a", "bcd"], [["a"], ["bcd"]]], ids=["flat", "nested"])
def test_a_sample_without_axes_may_have_the_one_that_its_configuration_tells(server, data):
    assert outputs(ask(server, "measured", tensor("input", "BYTES", [2, 1], data)))["output"] == ("INT64", [2], [1, 9])


@pytest.mark.parametrize("data", [[1, 2, 3, 4, 5, 6.5], [[1, 2, 3], [4, 5, 6.5]]], ids=["flat", "nested"])
def test_lists_are_flat_or_nested(server, data):  # O126, O127
    answer = ask(server, "doubled", tensor("input", "FP32", [2, 3], data), id="seven")
    assert (answer.json()["id"], answer.json()["model_name"], answer.json()["model_version"]) == (
        "seven",
        "doubled",
        "1",
    )
    assert outputs(answer) == {"output": ("FP32", [2, 3], [2, 4, 6, 8, 10, 13])}


def test_a_call_of_more_samples_than_a_batch_is_cut_and_joined(either):
    rows = np.arange(33, dtype=np.float32).reshape(11, 3)
    listed = ask(either, "doubled", tensor("input", "FP32", [11, 3], rows.tolist()))
    assert outputs(listed)["output"] == ("FP32", [11, 3], (rows * 2).ravel().tolist())
    body, headers = binary([("input", "FP32", [11, 3], rows.tobytes())])
    assert outputs(infer(either, "doubled", body, **headers))["output"] == ("FP32", [11, 3], (rows * 2).tobytes())
    texts = ask(either, "measured", tensor("input", "BYTES", [3], ["a", "four", "é"]))
    assert outputs(texts)["output"] == ("INT64", [3], [1, 16, 1])


def test_large_tensors_come_and_go_as_they_lie_in_memory(either):
    array = np.arange(150_000, dtype=np.float32)
    body, headers = binary([("input", "FP32", [1, 150_000], array.tobytes())])
    for _ in range(2):  # the second one is read by what was remembered of the first
        answer = infer(either, "head", body, **headers)
        assert answer.headers["content-type"] == "application/octet-stream"
        assert outputs(answer)["output"] == ("FP32", [1, 4], array[:4].tobytes())
    other, _ = binary([("input", "FP32", [1, 150_000], array[::-1].tobytes())])
    assert outputs(infer(either, "head", other, **headers))["output"][2] == array[::-1][:4].tobytes()


def test_calls_share_batches(server, at_once):
    row = [tensor("input", "FP32", [1, 3], [1, 2, 3])]
    before = CLIENT.get(f"{server.url}/v2/models/doubled/stats").json()["model_stats"][0]
    assert all(answer.status_code == 200 for answer in at_once(*[lambda: ask(server, "doubled", *row)] * 8))
    after = CLIENT.get(f"{server.url}/v2/models/doubled/stats").json()["model_stats"][0]
    assert after["inference_count"] - before["inference_count"] == 8  # O144
    assert 0 < after["execution_count"] - before["execution_count"] <= 8
    assert after["inference_stats"]["success"]["count"] - before["inference_stats"]["success"]["count"] == 8


def test_fields_of_all_kinds(server):
    inputs = [
        tensor("name", "BYTES", [2], ["Ada", "Bo\0b"]),
        tensor("age", "INT32", [2], [36, 41]),
        tensor("scores", "FP64", [2, 2], [1, 2, 3, 1e-300]),
        tensor("more", "BYTES", [2], ['{"x": 1}', "{}"]),
    ]
    found = outputs(ask(server, "people", *inputs))
    assert found["text"] == ("BYTES", [2], ["hello Ada", "hello Bo\0b"])
    assert found["older"] == ("INT64", [2], [37, 42])
    assert found["mean"] == ("FP64", [2], [1.5, 1.5])
    assert [json.loads(text) for text in found["all"][2]] == [{"x": 1, "n": 2}, {"n": 2}]
    few = outputs(ask(server, "people", *inputs[:2], outputs=[{"name": "older"}, {"name": "text"}]))  # O128
    assert list(few) == ["older", "text"]


def test_each_output_says_how_it_comes(server):  # O135
    inputs = [tensor("name", "BYTES", [1], ["Ada"]), tensor("age", "INT64", [1], [2**53])]
    wanted = [{"name": "older", "parameters": {"binary_data": True}}, {"name": "text"}]
    found = outputs(ask(server, "people", *inputs, outputs=wanted))
    assert found == {"older": ("INT64", [1], (2**53 + 1).to_bytes(8, "little")), "text": ("BYTES", [1], ["hello Ada"])}
    wanted = [{"name": "older", "parameters": {"binary_data": False}}, {"name": "text"}]
    found = outputs(ask(server, "people", *inputs, outputs=wanted, parameters={"binary_data_output": True}))
    assert found == {"older": ("INT64", [1], [2**53 + 1]), "text": ("BYTES", [1], b"\x09\0\0\0hello Ada")}


@pytest.mark.parametrize(
    "name, values",
    [
        ("BOOL", [True]), ("UINT8", [255]), ("UINT16", [65535]), ("UINT32", [2**32 - 1]), ("UINT64", [2**64 - 1]),
        ("INT8", [-128]), ("INT16", [-(2**15)]), ("INT32", [-(2**31)]), ("INT64", [2**53 + 1]),
        ("FP32", [0.5]), ("FP64", [1e-300]), ("BYTES", ["a\0é"]),
    ],
)  # fmt: skip
def test_every_type_in_lists_and_in_bytes(server, name, values):  # O127, trap 18
    assert outputs(ask(server, "typed", tensor(name, name, [1], values)))[name] == (name, [1], values)
    if name != "BYTES":
        data = np.array(values, {"BOOL": "?", "FP32": "f4", "FP64": "f8"}.get(name, name.lower())).tobytes()
        body, headers = binary([(name, name, [1], data)])
        assert outputs(infer(server, "typed", body, **headers))[name] == (name, [1], data)


def test_a_model_without_types_gets_python_values_and_says_what_it_gives(server):
    found = outputs(ask(server, "anything", tensor("z", "FP32", [2, 2], [1, 2, 3, 4])))
    assert found["given"] == ("FP64", [2, 2], [1, 2, 3, 4])
    assert found["kind"] == ("BYTES", [2], ["list", "list"])


def test_a_file_that_takes_whole_arrays_gets_them_whole(server):
    two = ask(server, "two", tensor("x", "FP32", [2, 3], [1, 2, 3, 0, 0, 1]))
    assert outputs(two)["price"][1:] == ([2, 1], [321, 100])


def test_a_file_whose_samples_share_runs_takes_any_number(either):
    three = ask(either, "price", tensor("x", "FP32", [3, 3], [1, 2, 3, 0, 0, 1, 1, 1, 1]))
    assert outputs(three)["price"] == ("FP32", [3, 1], [321, 100, 111])
    body, headers = binary([("x", "FP32", [1, 3], np.array([1, 2, 3], np.float32).tobytes())])
    assert outputs(infer(either, "price", body, **headers))["price"][2] == np.float32(321).tobytes()
    body, headers = binary([("x", "FP32", [2_000, 3], np.ones((2_000, 3), np.float32).tobytes())])
    assert outputs(infer(either, "price", body, **headers))["price"][2] == np.full(2_000, 111, np.float32).tobytes()


def test_bytes_are_elements(server):
    body, headers = binary([("input", "BYTES", [2], b"\x02\0\0\0\xff\x01\0\0\0\0")])
    found = outputs(infer(server, "sound", body, **headers))
    assert found["output"] == ("BYTES", [2], b"\x02\0\0\0\x01\xff\0\0\0\0")


def test_what_json_cannot_say_is_to_be_asked_for_as_binary(server):  # O42
    half = ask(server, "typed", tensor("FP32", "FP32", [1], [1]), outputs=[{"name": "FP32"}])
    assert half.status_code == 200
    status, text = refusal(ask(server, "typed", tensor("FP16", "FP16", [1], [1])))  # O127
    assert (status, text) == (400, "input 'FP16' is FP16, which JSON cannot express; send it as binary")
    bits = np.array([0.5], np.float16).tobytes()
    body, headers = binary([("FP16", "FP16", [1], bits)])
    assert outputs(infer(server, "typed", body, **headers))["FP16"] == ("FP16", [1], bits)
    status, text = refusal(infer(server, "typed", body.replace(b"true", b"null"), **headers))
    assert status == 400
    assert "ask for it as binary" in text


ROW = tensor("input", "FP32", [1, 3], [1, 2, 3])


@pytest.mark.parametrize(
    "inputs, told",
    [
        ([], "the call has no inputs; the model takes 'input'"),
        ([{**ROW, "name": "imput"}], "the model has no input 'imput'; did you mean 'input'?"),
        ([ROW, ROW], "input 'input' came twice"),
        ([{**ROW, "datatype": "FP64"}], "input 'input': expected FP32, got FP64"),
        ([{**ROW, "datatype": "FP33"}], "expected FP32, got 'FP33'"),
        ([{**ROW, "shape": [1, 4]}], "input 'input': expected the shape [-1, 3], got [1, 4] (-1 is any length)"),
        ([{**ROW, "shape": [3]}], "input 'input': expected the shape [-1, 3], got [3]"),
        ([{**ROW, "shape": [0, 3], "data": []}], "there must be at least one"),
        ([{**ROW, "shape": [-1, 3]}], "every axis must be 0 or more"),
        ([{**ROW, "shape": [2**62, 2**62, 3]}], "all within 2^63 bytes"),
        ([{**ROW, "shape": [1] * 10_000}], "got 10000"),
        ([{**ROW, "data": [1, 2]}], "expected 3 elements, got 2"),
        ([{**ROW, "data": [[1, 2], [3]]}], "expected a list of FP32, flat or of the shape [1, 3]"),
        ([{**ROW, "data": [1, "b", 3]}], "flat or of the shape [1, 3]: Expected `float`, got `str` - at `$[1]`"),
        ([{**ROW, "data": [[1, "b", 3]]}], "flat or of the shape [1, 3]: Expected `float`, got `str` - at `$[0][1]`"),
        ([{**ROW, "data": [1, 2, 1e39]}], "holds a number that does not fit FP32"),
        ([{**ROW, "datatype": "INT8", "data": [1, 2, 300]}], "holds a number that does not fit INT8"),
        ([{**ROW, "datatype": "INT8", "data": [1, 2, True]}], "expected a list of INT8"),
        ([{**ROW, "parameters": {"binary_data_size": 12}}], "both data and a binary_data_size"),
        ([{"name": "input", "datatype": "FP32", "shape": [1, 3]}], f"bytes after the JSON with {LENGTH}, got neither"),
    ],
)  # fmt: skip
def test_a_wrong_input_is_named_with_what_is_expected(server, inputs, told):  # O33, O122, O129
    status, text = refusal(ask(server, "doubled", *inputs))
    assert status == 400
    assert told in text, text


def test_an_axis_that_only_the_models_wider_type_has_no_room_for_is_the_clients_fault(server):
    """Nothing is in it, and a library multiplies the other axes all the same."""
    status, text = refusal(ask(server, "typed", tensor("INT64", "INT8", [1, 0, 2**62], [])))
    assert status == 400
    assert "input 'INT64' has the shape [1, 0, 4611686018427387904]; as INT64" in text, text


def test_a_missing_input_and_an_unknown_output(server):
    assert refusal(ask(server, "people", tensor("name", "BYTES", [1], ["Ada"]))) == (
        400,
        "input 'age' is missing; the model takes 'name', 'age', 'scores', 'more'",
    )
    unlike = [tensor("name", "BYTES", [2], ["A", "B"]), tensor("age", "INT64", [1], [1])]
    assert "the other inputs have 2" in refusal(ask(server, "people", *unlike))[1]
    status, text = refusal(ask(server, "doubled", ROW, outputs=[{"name": "out"}]))  # O128
    assert status == 400
    assert "the model has no output 'out'" in text


def test_what_is_null_was_not_said(server):
    """Clients whose messages are objects write every field that these have."""
    wanted = [{"name": "output", "parameters": None}]
    found = ask(server, "doubled", {**ROW, "parameters": None}, outputs=wanted, parameters=None, id=None)
    assert outputs(found) == {"output": ("FP32", [1, 3], [2, 4, 6])}


def test_classes_are_not_answered_with_numbers(server):  # O146
    status, text = refusal(
        ask(server, "doubled", ROW, outputs=[{"name": "output", "parameters": {"classification": 2}}])
    )
    assert status == 400
    assert text.startswith("output 'output' is wanted as classes, an extension that this server does not have")


@pytest.mark.parametrize(
    "body, length, told",
    [
        (b"", None, "expected an inference request"),
        (b"[]", None, "expected an inference request"),
        (b"{}", None, "missing required field `inputs`"),
        (b"[" * 100_000, None, "expected an inference request"),
        (b'{"inputs":[]}', "99", "expected the length of the JSON, at most 13 bytes, got"),
        (b'{"inputs":[]}', "-1", "expected the length of the JSON, at most 13 bytes, got"),
        (b'{"inputs":[]}', "1e1", "expected the length of the JSON, at most 13 bytes, got"),
        (b'{"inputs":[]}', "9" * 5000, "expected the length of the JSON, at most 13 bytes, got"),
        (b'{"inputs":[]}rest', "13", "4 bytes follow the data"),
    ],
)
def test_a_malformed_call_is_refused(server, body, length, told):  # O129, O133
    status, text = refusal(infer(server, "doubled", body, **({} if length is None else {LENGTH: length})))
    assert status == 400
    assert told in text, text


@pytest.mark.parametrize("timeout", [-1, "soon", 1.5, True])
def test_a_time_that_is_no_number_of_microseconds_is_refused(server, timeout):
    status, text = refusal(ask(server, "doubled", ROW, parameters={"timeout": timeout}))
    assert (status, text) == (400, f"parameter 'timeout': expected a whole number of microseconds, got {timeout!r}")


@pytest.mark.parametrize("size", [-4, 16, 2**70, "12", 12.5, True])
def test_a_size_that_lies_is_refused(server, size):  # O133
    head = json.dumps(
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": size}}]}
    ).encode()
    status, text = refusal(infer(server, "doubled", head + bytes(12), **{LENGTH: str(len(head))}))
    assert status == 400
    assert "input 'input' announces" in text, text


def test_data_and_shape_that_do_not_agree(server):
    body, headers = binary([("input", "FP32", [1, 3], bytes(8))])
    assert "expected 12 bytes of data, got 8" in refusal(infer(server, "doubled", body, **headers))[1]
    for data in (b"\xff\xff\xff\xffab", b"\x02\0\0\0a", b"\0\0\0\0\0\0\0\0", b"\x01"):
        body, headers = binary([("input", "BYTES", [1], data)])
        assert refusal(infer(server, "sound", body, **headers))[0] == 400


def test_a_size_that_was_left_out_follows_from_the_shape(server):  # O134
    head = json.dumps(
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 3]}], "parameters": {"binary_data_output": True}}
    ).encode()
    answer = infer(server, "doubled", head + np.ones(3, "f4").tobytes(), **{LENGTH: str(len(head))})
    assert outputs(answer)["output"][2] == np.full(3, 2, "f4").tobytes()


def test_an_error_of_the_model_fails_its_call_alone(server, at_once):
    answers = at_once(
        *[lambda value=value: ask(server, "wrong", tensor("input", "INT64", [1], [value])) for value in (2, -1)]
    )
    assert outputs(answers[0])["output"] == ("INT64", [1, 2], [2, 2])
    status, text = refusal(answers[1])
    assert status == 500
    assert "secret" not in text
    status, text = refusal(ask(server, "wrong", tensor("input", "INT64", [2], [1, 2])))
    assert status == 500


def test_samples_that_failed_are_no_inferences(server):  # O144
    def counted():
        told = CLIENT.get(f"{server.url}/v2/models/wrong/stats").json()["model_stats"][0]
        outcomes = told["inference_stats"]
        return told["inference_count"], outcomes["success"]["count"], outcomes["fail"]["count"]

    inferences, successes, failures = counted()
    outputs(ask(server, "wrong", tensor("input", "INT64", [1], [2])))
    for value in (-1, 2**63):  # the model fails, and the worker cannot read it
        refusal(ask(server, "wrong", tensor("input", "INT64", [1], [value])))
    assert counted() == (inferences + 1, successes + 1, failures + 2)


def test_nobody_and_nothing_is_there(server):  # O122, O125, O129
    # Triton's client examples hold errors to these words.
    told = refusal(ask(server, "dubled", ROW))[1]
    assert told.startswith("Request for unknown model: there is no model 'dubled'")
    for path in ("/v2/models/dubled", "/v2/models/dubled/infer", "/v2/models/doubled/versions/9/ready", "/v2/a/../b"):
        assert refusal(CLIENT.get(server.url + path))[0] == 404, path
    assert "did you mean 'doubled'?" in refusal(ask(server, "dubled", ROW))[1]
    status, text = refusal(CLIENT.post(f"{server.url}/v2/models/doubled/versions//infer", json={"inputs": [ROW]}))
    assert (status, text) == (404, "nothing is served at /v2/models/doubled/versions//infer")
    assert refusal(CLIENT.get(f"{server.url}/v2/models/doubled/infer"))[0] == 405
    assert refusal(CLIENT.post(f"{server.url}/v2/models/doubled"))[0] == 405
    cuda = f"{server.url}/v2/cudasharedmemory"  # F88, O146
    assert CLIENT.get(f"{cuda}/status").json() == []
    assert refusal(CLIENT.get(f"{cuda}/region/a/status")) == (404, "there is no shared memory region 'a' of CUDA")
    assert "region 'a' of CUDA cannot be registered" in refusal(CLIENT.post(f"{cuda}/region/a/register", json={}))[1]
    assert CLIENT.post(f"{cuda}/unregister").json() == {}
    assert CLIENT.post(f"{cuda}/region/a/unregister").json() == {}
    assert refusal(CLIENT.get(f"{cuda}/nothing"))[0] == 404
    status, text = refusal(ask(server, "words", tensor("input", "BYTES", [1], ["a"])))
    assert status == 400
    assert "streams its answers" in text


@pytest.mark.parametrize("coding, unpack", [("gzip", gzip.decompress), ("deflate", zlib.decompress)])
def test_bodies_are_packed_both_ways(server, coding, unpack):  # O131
    body, headers = binary([("input", "FP32", [1, 3], np.ones(3, "f4").tobytes())])
    pack = gzip.compress if coding == "gzip" else zlib.compress
    headers |= {"content-encoding": coding, "accept-encoding": coding}
    with CLIENT.stream("POST", f"{server.url}/v2/models/doubled/infer", content=pack(body), headers=headers) as answer:
        assert answer.headers["content-encoding"] == coding
        raw = unpack(b"".join(answer.iter_raw()))
    assert raw[int(answer.headers[LENGTH]) :] == np.full(3, 2, "f4").tobytes()


def raw(server, model, body):
    return CLIENT.post(f"{server.url}/v2/models/{model}/infer", content=body, headers={LENGTH: "0"})


def test_a_raw_body_is_the_only_input(server):  # F88
    answer = raw(server, "doubled", np.array([1, 2, 3], np.float32).tobytes())
    assert answer.status_code == 200, answer.text
    head = int(answer.headers[LENGTH])
    (output,) = json.loads(answer.content[:head])["outputs"]
    assert (output["shape"], output["parameters"]) == ([1, 3], {"binary_data_size": 12})
    assert answer.content[head:] == np.array([2, 4, 6], np.float32).tobytes()
    # An axis of any length is as long as the data makes it, and a text is one element.
    answer = raw(server, "head", np.array([1, 2, 3, 4, 5], np.float32).tobytes())
    assert answer.content[int(answer.headers[LENGTH]) :] == np.array([1, 2, 3, 4], np.float32).tobytes()
    assert raw(server, "measured", b"abc").status_code == 200
    assert "expected 12 bytes of data, got 5" in refusal(raw(server, "doubled", b"12345"))[1]
    status, text = refusal(raw(server, "people", b"12345"))
    assert (status, "0 sends the body as the only input, but the model takes 'name', 'age'" in text) == (400, True)


def test_the_first_version_takes_samples(server):
    url = f"{server.url}/v1/models"
    assert CLIENT.get(f"{url}/people").json()["model_version_status"][0]["state"] == "AVAILABLE"
    found = CLIENT.post(
        f"{url}/people:predict", json={"instances": [{"name": "Ada", "age": 1}, {"name": "B", "age": 2}]}
    )
    assert [one["older"] for one in found.json()["predictions"]] == [2, 3]
    found = CLIENT.post(f"{url}/doubled/versions/1:predict", json={"instances": [[n, n, n] for n in range(9)]})
    assert found.json()["predictions"][8] == [16, 16, 16]
    assert CLIENT.post(f"{url}/measured:predict", json={"instances": ["abc", ""]}).json() == {"predictions": [9, 0]}
    assert refusal(CLIENT.post(f"{url}/people:predict", json={"instances": []}))[0] == 400
    assert "expected {" in refusal(CLIENT.post(f"{url}/people:predict", json=[1]))[1]
    status, text = refusal(CLIENT.post(f"{url}/people:predict", json={"instances": [{"name": "Ada", "age": "x"}]}))
    assert status == 400
    assert "sample 0" in text


def test_the_repository(server, eventually):  # O145
    url = f"{server.url}/v2/repository"

    def state(name):
        return {one["name"]: one["state"] for one in CLIENT.post(f"{url}/index").json()}[name]

    assert state("typed") == "READY"
    assert CLIENT.post(f"{url}/models/head/unload", json={}).json() == {}
    assert CLIENT.get(f"{server.url}/v2/models/head/ready").status_code == 404
    eventually(lambda: state("head") == "UNAVAILABLE")
    assert "head" not in [one["name"] for one in CLIENT.post(f"{url}/index", json={"ready": True}).json()]
    assert CLIENT.post(f"{url}/models/head/load").json() == {}
    assert CLIENT.get(f"{server.url}/v2/models/head/ready").json() == {"name": "head", "ready": True}
    assert refusal(CLIENT.post(f"{url}/models/nobody/load"))[0] == 404
    assert refusal(CLIENT.post(f"{url}/models/head/load", json={"parameters": {"config": "{}"}}))[0] == 400
    for wrong in (5, "abc", ["config"]):
        asked = CLIENT.post(f"{url}/models/head/load", json={"parameters": wrong})
        assert refusal(asked) == (400, f"parameters: expected an object, got {wrong!r}")


def test_what_needs_a_key_says_so_in_the_protocols_form(serve, models):
    server = serve(f"{models / 'tensors.py'}:Doubled", "--api-key", "k", "--worker-kind", "inline")
    assert CLIENT.get(f"{server.url}/v2/health/ready").status_code == 200
    assert refusal(CLIENT.get(f"{server.url}/v2"))[0] == 401
    assert refusal(ask(server, "doubled", ROW))[0] == 401
    assert refusal(CLIENT.post(f"{server.url}/v2/repository/models/head/unload", headers={"x-api-key": "no"}))[0] == 401
