# SPDX-License-Identifier: Apache-2.0
"""Servings over HTTP."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import numpy as np
import pytest
from tests.waiting import PATIENCE_S

FILE = """
import time

import numpy as np
from forebay import Batch, Media, Serving, hook


def fn(options):
    def run(batch):
        rows = batch.realize()
        if isinstance(rows, dict):
            return {"sum": rows["a"] + rows["b"]}
        if np.any(rows == 13):
            raise ValueError("thirteen")
        if np.all(rows == 7):
            time.sleep(0.003)
        return rows * 2
    return run


double = Serving.new(fn).batch_size(4).process_options(batch_timeout_ms=20)
texts = (
    Serving.new(fn)
    .client_preprocessing(lambda text: (Batch.stack([np.array([len(text)])]), text))
    .client_postprocessing(lambda executed, text: {"text": text, "out": executed[0], "metadata": executed[1]})
)
told = texts.client_preprocessing(
    lambda array: (Batch.stack([np.array([0])]), {"kind": array.dtype.kind, "shape": array.shape})
).client_postprocessing(lambda executed, about: about)
drawn = texts.client_postprocessing(
    lambda _, text: {"text": Media(b"", "image/png")} if text == "inside" else Media(text.encode(), "image/svg+xml")
)
keyed = Serving.new(
    lambda key, options: lambda batch: batch.realize() * {"double": 2, "half": 0.5}[key]
).process_options(batch_keys=["double", "half"])
parts = (
    Serving.new(fn).client_preprocessing(lambda rows: (Batch.concatenate([rows]), None)).streaming().batch_size(2)
)
hooked = Serving.jit(lambda x: hook("double", x * 2) + 1).streaming(hooks=["double"])
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "servings.py"
    path.write_text(FILE)
    return path


def tensor(array):
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": array.tobytes()}


def post(url, value, **options):
    return httpx.post(url, json=value, **options)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_postprocessing_may_answer_with_media(file, serve, kind):  # F29
    url = f"{serve(f'{file}:drawn', '--worker-kind', kind).url}/models/drawn"
    answer = post(url, "<svg/>")
    assert (answer.status_code, answer.headers["content-type"], answer.content) == (200, "image/svg+xml", b"<svg/>")
    assert post(url, "inside").status_code == 500


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_rows_in_and_rows_out(file, serve, kind):
    # S73
    server = serve(f"{file}:double", "--worker-kind", kind)
    url = f"{server.url}/models/double"
    assert post(url, [1, 2, 3]).json() == [2, 4, 6]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: post(url, [n, n + 0.5]).json(), range(8)))
    assert answers == [[2 * n, 2 * n + 1] for n in range(8)]
    assert post(url, {"a": [1, 2], "b": [3, 4]}).json() == {"sum": [4, 6]}
    packed = httpx.post(
        url,
        content=msgspec.msgpack.encode(tensor(np.array([1, 2], dtype=np.float32))),
        headers={"content-type": "application/msgpack", "accept": "application/msgpack"},
    )
    answer = msgspec.msgpack.decode(packed.content)
    assert (answer["dtype"], answer["shape"]) == ("<f4", [2])
    assert np.frombuffer(answer["data"], "<f4").tolist() == [2.0, 4.0]
    about = httpx.get(url).json()
    assert about["batching"]["max_batch_size"] == 4
    assert about["batching"]["mean_batch_size"] >= 1


def test_arrays_whose_bytes_say_nothing_elsewhere_are_sent_as_what_they_mean(tmp_path, serve):
    # S73
    path = tmp_path / "odd.py"
    path.write_text("""
import ml_dtypes
import numpy as np
from forebay import Serving

KINDS = ["bfloat16", "int4", "O", "i4,U2", "c16", "g"]


def fn(rows):
    kind, is_one = rows[0]
    name = KINDS[kind]
    row = {"O": ["ab", 1.5], "i4,U2": [(3, "x")]}.get(name, [3, 1])
    array = np.array([row], getattr(ml_dtypes, name, name))
    return array[:, 0] if is_one else array


odd = Serving.jit(fn).batch_size(1)
""")
    server = serve(f"{path}:odd", "--worker-kind", "thread")
    url = f"{server.url}/models/odd"

    def ask(kind, format, *, is_one=False):
        answer = httpx.post(url, json=[kind, int(is_one)], headers={"accept": f"application/{format}"})
        if answer.status_code != 200:
            return answer.json()["error"]["code"]
        return msgspec.msgpack.decode(answer.content) if format == "msgpack" else answer.json()

    assert [ask(kind, "msgpack") for kind in range(5)] == [
        tensor(np.array([3, 1], "<f4")),
        tensor(np.array([3, 1], "i1")),
        ["ab", 1.5],
        [[3, "x"]],
        tensor(np.array([3, 1], "<c16")),
    ]
    assert [ask(kind, "msgpack", is_one=True) for kind in (0, 3, 4, 5)] == [3, [3, "x"], tensor(np.array(3, "<c16")), 3]
    assert [ask(kind, "json") for kind in (0, 2, 5)] == [[3, 1], ["ab", 1.5], [3, 1]]
    assert [ask(4, "json", is_one=is_one) for is_one in (False, True)] == ["internal", "internal"]

    def infer(kind):
        given = {"name": "input", "datatype": "INT64", "shape": [1, 2], "data": [kind, 0]}
        return httpx.post(f"{server.url}/v2/models/odd/infer", json={"inputs": [given]})

    found = [infer(kind).json()["outputs"][0] for kind in (0, 1)]
    assert [(one["datatype"], one["data"]) for one in found] == [("FP32", [3.0, 1.0]), ("INT8", [3, 1])]
    assert infer(4).status_code == 500  # not 400: the client cannot help it
    server.stop()
    assert server.log.count("BadOutcome: array 'output' is of complex128, which tensors have no data type for"), (
        server.log
    )
    assert server.log.count('"message":"BadOutcome: the answer holds complex numbers, which JSON') == 2, server.log


def test_keys_that_are_numbers_are_texts_and_other_keys_are_told(serve, tmp_path):
    path = tmp_path / "keyed.py"
    path.write_text("""
import numpy as np
from forebay import Serving

KEYS = {0: (1, 2.5), 1: (True, False), 2: (np.int64(3), "x"), 3: (None, "x")}

def fn(rows):
    return {key: rows for key in KEYS[int(rows[0, 0])]}


keyed = Serving.jit(fn).batch_size(1)
""")
    server = serve(f"{path}:keyed", "--worker-kind", "thread")

    def infer(kind):
        given = {"name": "input", "datatype": "INT64", "shape": [1, 1], "data": [kind]}
        return httpx.post(f"{server.url}/v2/models/keyed/infer", json={"inputs": [given]})

    for kind, names in ((0, {"1", "2.5"}), (2, {"3", "x"})):
        assert {one["name"] for one in infer(kind).json()["outputs"]} == names
        assert httpx.post(f"{server.url}/models/keyed", json=[kind]).json().keys() == names
    for kind in (1, 3):
        assert infer(kind).status_code == httpx.post(f"{server.url}/models/keyed", json=[kind]).status_code == 500
    server.stop()
    for key in ("bool", "None"):
        assert (
            server.log.count(f'"message":"BadOutcome: a result holds a dict with a key that is `{key}`; only texts')
            == 2
        )


def test_what_is_wrong_is_the_requests_own_error(file, serve):
    # S73
    server = serve(f"{file}:double", "--worker-kind", "thread")
    url = f"{server.url}/models/double"
    assert httpx.post(url, content=b"[1,").status_code == 400
    assert post(url, [[1, 2], [3]]).status_code == 400
    assert post(url, None).status_code == 400
    assert post(url, [1, "a"]).status_code == 400  # F37: not ['1', 'a']
    assert post(url, [1, True]).status_code == 400
    wrong = [
        {"dtype": "V4", "shape": [1], "data": b"1234"},
        {"dtype": "M8", "shape": [1], "data": b"12345678"},
        {"dtype": "f4", "shape": [-1], "data": b"1234"},
        {"dtype": 4, "shape": [1], "data": b"1234"},
        {"dtype": "f4", "shape": "1", "data": b"1234"},
        {"dtype": "f4", "shape": [2**40, 2**40], "data": b""},
    ]
    for value in wrong:  # F37
        refused = httpx.post(
            url, content=msgspec.msgpack.encode(value), headers={"content-type": "application/msgpack"}
        )
        assert refused.status_code == 400, (value, refused.text)
    assert post(url, [10**400]).status_code == 400
    failed = post(url, [13], headers={"via": "a proxy"})
    assert failed.status_code == 500
    assert "thirteen" not in failed.text
    assert post(url, [1]).json() == [2]
    assert post(url, [10**20, 1]).json() == [2e20, 2]  # as JavaScript writes 1e20


def test_texts_of_which_one_is_long_take_no_more_room_than_they_came_with(file, serve):
    server = serve(f"{file}:told", "--worker-kind", "thread")
    long = ["x" * 400_000] + [""] * 400_000  # as NumPy keeps texts, 640 GB
    assert post(server.url, ["a", "bcd"]).json() == {"kind": "U", "shape": [2]}
    assert post(server.url, [["a", "b"], ["c", "d"]]).json() == {"kind": "U", "shape": [2, 2]}
    assert post(server.url, long, timeout=PATIENCE_S).json() == {"kind": "O", "shape": [400_001]}
    packed = msgspec.msgpack.encode([text.encode() for text in long])
    told = httpx.post(server.url, content=packed, headers={"content-type": "application/msgpack"}, timeout=PATIENCE_S)
    assert told.json() == {"kind": "O", "shape": [400_001]}
    assert post(server.url, [["a", "b"], ["c"]]).status_code == 400


def test_pre_and_postprocessing_make_the_body(file, serve):
    # S73
    server = serve(f"{file}:texts", "--worker-kind", "thread")
    assert post(server.url, "four").json() == {"text": "four", "out": [[8]], "metadata": "server_info"}
    refused = post(server.url, 4)  # F37
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "the client preprocessing does not take this body: TypeError"


def test_batch_keys_stand_in_the_query(file, serve):
    # S73
    server = serve(f"{file}:keyed", "--worker-kind", "thread")
    url = f"{server.url}/models/keyed"
    for _ in range(2):  # the second one has a head that is known
        assert post(f"{url}?key=double", [2]).json() == [4]
        assert post(f"{url}?key=half", [2]).json() == [1.0]
    wrong = post(f"{url}?key=duble", [2])
    assert wrong.status_code == 400
    assert "unknown batch key: 'duble' (expected one of ['double', 'half'])" in wrong.json()["error"]["message"]
    assert post(url, [2]).status_code == 400


@pytest.mark.parametrize(
    "name,body,events",
    [
        ("parts", [1, 2, 3], [["batch", [2, 4], "server_info"], ["batch", [6], "server_info"]]),
        ("hooked", [1], [["double", [2]], ["batch", [3], "server_info"]]),  # F37: one row, as plain answers
    ],
)
def test_streams_are_events(file, serve, name, body, events):
    # S73
    server = serve(f"{file}:{name}", "--worker-kind", "thread")
    answer = post(f"{server.url}/models/{name}", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line] == events


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_streams_of_a_serving_take_turns(file, serve, kind):  # F50
    server = serve(f"{file}:parts", "--worker-kind", kind, "--timeout-ms", "60000")
    url = f"{server.url}/models/parts"
    with httpx.stream("POST", url, json=[7] * 8000, timeout=PATIENCE_S) as first:
        lines = (line for line in first.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))[0] == "batch"
        assert post(url, [1, 2, 3], timeout=PATIENCE_S).text.count("data:") == 2
        assert server.metric("forebay_in_flight", endpoint="parts") == 1.0  # the first one goes on
        assert json.loads(next(lines).removeprefix("data: "))[:2] == ["batch", [14, 14]]


def test_options_that_a_serving_does_not_know(file):
    # S73
    for options, message in (
        (["--threads", "2"], "give it more --workers"),
        (["--isolate-errors"], "no --isolate-errors"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "forebay", "check", f"{file}:double", *options],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert message in done.stderr


@pytest.mark.parametrize("hook", ["client_preprocessing", "client_postprocessing"])
def test_a_serving_whose_callers_would_have_to_be_tasks_is_not_served(file, hook):
    # S73
    file.write_text(f"{FILE}\n\nasync def later(*given):\n    return given\n\n\nawaited = double.{hook}(later)\n")
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "check", f"{file}:awaited"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert f"{file}:awaited: its {hook}, later, is a coroutine function; write it with `def`" in done.stderr


def test_a_misspelt_serving_is_answered_with_the_nearest(file):
    # S73
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "check", f"{file}:duoble"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "has no forebay.Serving named duoble; did you mean double?" in done.stderr


def test_a_file_of_servings_needs_the_name_of_one(file):
    # S73
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "check", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "defines no forebay.Model, but servings: " in done.stderr
    assert f"{file.name}:double" in done.stderr


def test_a_serving_may_have_any_name_that_a_model_may_have(file):
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "check", f"{file}:double", "--name", "Twice_2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("POST /models/Twice_2 "), done.stderr


def test_check_says_what_would_be_served(file):
    # S73
    done = subprocess.run(
        [sys.executable, "-m", "forebay", "check", f"{file}:double"], capture_output=True, text=True, check=True
    )
    assert "POST /models/double" in done.stdout
    assert "batches of up to 4 (waits 20 ms)" in done.stdout


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_tensors_are_rows_and_a_dict_of_arrays(file, serve, kind):
    def ask(server, *inputs):
        told = [dict(zip(("name", "datatype", "shape", "data"), one, strict=True)) for one in inputs]
        answer = httpx.post(f"{server.url}/v2/models/double/infer", json={"inputs": told})
        assert answer.status_code == 200, answer.text
        return [(one["name"], one["datatype"], one["shape"], one["data"]) for one in answer.json()["outputs"]]

    server = serve(f"{file}:double", "--worker-kind", kind)
    assert ask(server, ("x", "INT32", [2, 3], [1, 2, 3, 4, 5, 6])) == [
        ("output", "INT32", [2, 3], [2, 4, 6, 8, 10, 12])
    ]
    (found,) = ask(server, ("x", "INT64", [99], list(range(20, 119))))  # more rows than a batch takes
    assert found[2:] == ([99], list(range(40, 238, 2)))
    assert ask(server, ("a", "FP32", [1, 2], [1, 2]), ("b", "FP32", [1, 2], [3, 4])) == [
        ("sum", "FP32", [1, 2], [4, 6])
    ]


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_instances_are_samples(file, serve, kind):
    def ask(server, name, *instances):
        return httpx.post(f"{server.url}/v1/models/{name}:predict", json={"instances": instances})

    server = serve(f"{file}:double", "--worker-kind", kind)
    assert ask(server, "double", [1, 2]).json() == {"predictions": [[2, 4]]}
    assert ask(server, "double", {"a": 1, "b": 2}, {"a": 3, "b": 4}).json() == {"predictions": [{"sum": 3}, {"sum": 7}]}
    rows = [[number] for number in range(20, 29)]  # more than a batch takes, and of unlike shapes
    answer = ask(server, "double", *rows, [1, 2])
    assert answer.json() == {"predictions": [[2 * number] for (number,) in rows] + [[2, 4]]}
    assert ask(server, "double", [1, "a"]).status_code == 400
    assert ask(server, "double", [1], [13]).status_code == 500
    assert ask(server, "double", [1]).json() == {"predictions": [[2]]}


def test_instances_go_through_the_preprocessing(file, serve):
    server = serve(f"{file}:texts", "--worker-kind", "thread")
    answer = httpx.post(f"{server.url}/v1/models/texts:predict", json={"instances": ["four", "a"]})
    assert answer.json() == {
        "predictions": [
            {"text": "four", "out": [[8]], "metadata": "server_info"},
            {"text": "a", "out": [[2]], "metadata": "server_info"},
        ]
    }
