# SPDX-License-Identifier: Apache-2.0
"""TensorFlow handlers: section 7 of the specification, on real SavedModels that OpenVINO runs in the worker.

What only TensorFlow runs, and TensorFlow Serving, is in `test_tensorflow_backends.py`.
"""

import base64
import gc
import json
import os
import shutil
import socket
import threading
import time
from typing import Any

import numpy as np
import pytest
import yaml
from tests.circles import left_in_circles
from tests.models.saved_models import saved_models
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import DeadlineExceeded
from forebay.runtimes.signature import Signature, Var
from forebay.surfaces.nucleus import tensorflow_client
from forebay.surfaces.nucleus.config import has_accelerator, read_config
from forebay.surfaces.nucleus.row_batches import NO_INPUT_AXIS, NO_OUTPUT_AXIS, RowBatches
from forebay.surfaces.nucleus.shim import UserException
from forebay.surfaces.nucleus.tensorflow_signatures import SignatureKeys, signature_of
from forebay.surfaces.nucleus.tensorflow_values import arrays_of, flat

ROW = [1.0, 2.0, 3.0, 4.0]

HANDLER = """
class Handler:
    def __init__(self, tensorflow_client, config):
        self.client = tensorflow_client

    def handle_post(self, payload):
        try:
            return self.client.predict(payload["input"], *payload.get("model", []))
        except Exception as error:
            return {"error": f"{type(error).__module__}.{type(error).__name__}", "text": str(error)}
"""


def copied(folder, **models):
    """A folder with SavedModels under other names."""
    for name, version in models.items():
        of, _, number = version.partition("/")
        shutil.copytree(saved_models() / of / number if number else saved_models() / of, folder / name)
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = copied(tmp_path_factory.mktemp("store"), iris="iris", keras="keras", plain="plain/1", images="images")
    copied(folder, several="several", two="two", half="iris", scalar="scalar")
    (folder / "half/1/saved_model.pb").unlink()  # one bad version hides only itself
    (folder / "iris/README.md").write_text("a loose file beside versions")
    (folder / "plain/assets").mkdir(exist_ok=True)
    (folder / "plain/assets/words.txt").write_text("a b")
    (folder / "loose").mkdir()
    (folder / "loose/notes.txt").write_text("no model")
    return folder


@pytest.fixture(scope="module")
def server(serve, store):
    models = {"dir": str(store)}
    return serve(HANDLER, {"type": "tensorflow", "models": models, "threads_per_process": 2})


def ask(server, given, *model):
    answer = server.request("POST", "/", json={"input": given, "model": list(model)})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text_of(server, given, *model):
    found = ask(server, given, *model)
    assert found["error"].startswith("cortex_internal.lib.exceptions.User"), found
    return found["text"]


def test_a_prediction_is_flat_lists(server):  # N125, N126, N130
    found = ask(server, {"x": [ROW, [0, 0, 0, 0]]}, "keras")
    assert found["class_ids"] == ["2", "0"]  # 64 bits are texts
    assert len(found["scores"]) == 6
    assert sum(found["scores"][:3]) == pytest.approx(1)


def test_a_signature_that_a_model_here_has_not_is_told_before_it_is_loaded(store, tmp_path):  # N131
    def told(models):
        (tmp_path / "handler.py").write_text(HANDLER)
        file = tmp_path / "nucleus.yaml"
        file.write_text(yaml.safe_dump({"type": "tensorflow", "path": "handler.py", "models": models}))
        return [warning.removeprefix(str(file)) for warning in read_config(file)[1]]

    two = {"name": "two", "path": str(store / "two")}
    for fits in (
        {"paths": [{**two, "signature_key": "total"}], "signature_key": "totl"},
        {"path": f"file://{store}/two"},
        {"paths": [two, {"name": "later", "path": "not-yet"}, {"name": "away", "path": "s3://bucket/two"}]},
        {"path": str(store / "loose")},
        {"dir": str(store), "signature_key": "totl"},  # what lies there may be very much
    ):
        assert told(fits) == []
    several = {"name": "several", "path": os.path.relpath(store / "several", tmp_path)}
    where = ":{}: models.{}: signature_key ".format
    missing = "'totl' was not found in signature def map for model '{}' of version '1', but found the following keys: "
    assert told({"paths": [{**two, "signature_key": "totl"}, several]}) == [
        where(5, "paths.0.signature_key") + missing.format("two") + "'predict', 'total'",
        where(7, "paths.1.path") + "was not configured by user, please specify one the following keys 'a', 'b' for "
        "model 'several' of version '1' (found in the signature def map)",
    ]
    assert told({"path": str(store / "two"), "signature_key": "totl"}) == [
        where(3, "signature_key") + missing.format("_cortex_default") + "'predict', 'total'"
    ]


def test_versions(server):  # N102, N103, N126
    for latest in ((), ("latest",), (None,), ("",), (2,), ("2",), ("002",)):
        assert ask(server, {"x": [ROW]}, "iris", *latest)["class_ids"] == ["0"], latest
    assert ask(server, {"x": [ROW]}, "iris", "1")["class_ids"] == ["2"]  # N135: all of them are there
    assert "model_version must be either a parse-able numeric value or 'latest'" in text_of(server, {}, "iris", "x")


def test_what_is_not_there(server):  # N126, N127
    assert text_of(server, {}) == "error: model_name was not specified: runtime exception"
    assert text_of(server, {}, "rose") == "error: model 'rose' accessed with tag latest couldn't be found"
    assert text_of(server, {}, "rose", "3") == "error: model 'rose' of version '3' couldn't be found"
    assert text_of(server, {}, "iris", "3") == "error: model 'iris' of version '3' couldn't be found"


def test_trees(server):  # N104
    assert ask(server, {"x": [ROW]}, "plain")["class_ids"] == ["2"]  # without variables and versions, with assets
    assert ask(server, {"x": [ROW]}, "half")["class_ids"] == ["0"]
    assert text_of(server, {"x": [ROW]}, "half", "1") == "error: model 'half' of version '1' couldn't be found"
    assert text_of(server, {}, "loose") == "error: model 'loose' accessed with tag latest couldn't be found"


@pytest.mark.parametrize(
    "given, model, said",
    [
        ({}, "iris", "missing key 'x' for model 'iris' of version '2'"),
        ({"x": [ROW], "y": 1}, "iris", "unknown key 'y' for model 'iris' of version '2'; it takes 'x'"),  # N129
        ({"x": [["a"] * 4]}, "iris", 'key "x": expected shape [-1, 4]: could not convert string to float'),
        ({"x": [[1], [1, 2]]}, "iris", 'key "x": expected shape [-1, 4]: '),
        ({"x": ROW}, "iris", 'key "x": expected shape [-1, 4]: found shape [4]'),  # N129: before it runs
        ({"x": [[1, 2]]}, "iris", 'key "x": expected shape [-1, 4]: found shape [1, 2]'),
        ({"x": "a", "y": 1}, "scalar", 'key "x": expected to be a scalar: could not convert'),
        ({"x": [1], "y": 1}, "scalar", 'key "x": expected to be a scalar: found shape [1]'),
    ],
)
def test_what_an_input_may_be(server, given, model, said):  # N128
    assert said in text_of(server, given, model)


def test_scalars_and_whole_numbers(server):  # N128
    assert ask(server, {"x": 1, "y": 2}, "scalar") == {"sum": [3.0]}
    assert ask(server, {"x": [[1, 2, 3, 4]]}, "iris", "1")["class_ids"] == ["2"]


def test_signatures(server, store):  # N131
    text = text_of(server, {}, "several")
    assert (
        "signature_key was not configured by user, please specify one the following keys 'a', 'b' for model 'several' "
        "of version '1' (found in the signature def map)"
    ) in text
    keys = SignatureKeys(default="b", of={"two": "total"})
    assert signature_of(store / "several/1", keys, "several", "1").key == "b"
    assert signature_of(store / "two/1", keys, "two", "1").key == "total"
    assert signature_of(store / "two/1", SignatureKeys(), "two", "1").key == "predict"
    assert signature_of(store / "keras/1", SignatureKeys(), "keras", "1").key == "serving_default"
    with pytest.raises(UserException) as caught:
        signature_of(store / "two/1", SignatureKeys(default="c"), "two", "1")
    assert str(caught.value) == (
        "error: signature_key 'c' was not found in signature def map for model 'two' of version '1', but found the "
        "following keys: 'predict', 'total'"
    )


def test_info(server):  # N133
    found = server.request("GET", "/info").json()["model_metadata"]
    assert {"iris-1", "iris-2", "keras-1", "plain-1", "images-1", "half-2"} <= found.keys()
    assert not {"several-1", "half-1", "loose-1"} & found.keys()
    one = found["keras-1"]
    assert set(one) == {"disk_path", "signature_def", "signature_key", "input_signatures", "timestamp"}
    assert one["signature_key"] == "serving_default"
    assert one["input_signatures"] == {"x": {"shape": [-1, 4], "type": "float32"}}
    x = one["signature_def"]["serving_default"]["inputs"]["x"]
    assert x["dtype"] == "DT_FLOAT"
    assert [axis["size"] for axis in x["tensorShape"]["dim"]] == ["-1", "4"]
    assert one["signature_def"]["serving_default"]["methodName"] == "tensorflow/serving/predict"
    assert found["scalar-1"]["input_signatures"]["x"]["shape"] == ["scalar"]
    assert type(one["timestamp"]) is int


def test_changes_are_seen(serve, tmp_path):  # N109, N132, N135
    copied(tmp_path, iris="keras")
    models = {"dir": str(tmp_path), "signature_key": "serving_default"}
    config = {"type": "tensorflow", "models": models}
    server = serve(HANDLER, config, "--repository-poll-s", "0.2")
    assert ask(server, {"x": [ROW]}, "iris")["class_ids"] == ["2"]
    shutil.copytree(saved_models() / "iris/2", tmp_path / "iris/2")
    shutil.copytree(saved_models() / "keras", tmp_path / "more")
    eventually(lambda: ask(server, {"x": [ROW]}, "iris").get("class_ids") == ["0"])
    eventually(lambda: ask(server, {"x": [ROW]}, "more").get("class_ids") == ["2"])
    shutil.rmtree(tmp_path / "iris")
    eventually(lambda: "couldn't be found" in ask(server, {"x": [ROW]}, "iris").get("text", ""))


def test_the_latest_is_the_newest_that_can_be_loaded(serve, tmp_path):  # N135
    copied(tmp_path, iris="keras")
    server = serve(HANDLER, {"type": "tensorflow", "models": {"dir": str(tmp_path)}}, "--repository-poll-s", "0.2")
    (tmp_path / "iris/2").mkdir()
    (tmp_path / "iris/2/saved_model.pb").write_bytes(b"no model")
    eventually(lambda: "version 2" in text_of(server, {"x": [ROW]}, "iris", "2"))
    assert ask(server, {"x": [ROW]}, "iris")["class_ids"] == ["2"]
    shutil.rmtree(tmp_path / "iris/1")
    eventually(lambda: "model iris of version 2" in ask(server, {"x": [ROW]}, "iris").get("text", ""))


def test_a_cache_of_models(serve, store):  # N119, N120, N132
    models = {"dir": str(store), "cache_size": 1, "disk_cache_size": 2}
    server = serve(HANDLER, {"type": "tensorflow", "models": models})
    folders = server.state / "models"
    assert not list(folders.rglob("saved_model.pb"))  # nothing is copied before it is asked
    for name in ("keras", "plain", "keras", "images"):
        given = {"images": [[[[1.0]]]]} if name == "images" else {"x": [ROW]}
        assert "error" not in ask(server, given, name)
    eventually(lambda: len(list(folders.rglob("saved_model.pb"))) == 2)
    told = server.request("GET", "/info").json()["model_metadata"]
    assert told["iris"]["versions"] == ["1", "2"]
    assert text_of(server, {}, "rose") == "error: model 'rose' accessed with tag latest couldn't be found"


def test_a_path_is_one_model_and_paths_have_names(serve, store):  # N6, N97, N98, N126
    one = serve(HANDLER, {"type": "tensorflow", "gpu": not has_accelerator(), "models": {"path": str(store / "iris")}})
    assert (
        has_accelerator() or "no accelerator is to be seen on this machine, serving on the CPU" in one.err.read_text()
    )
    for name in ((), ("zzz",), (None, "latest")):
        assert ask(one, {"x": [ROW]}, *name)["class_ids"] == ["0"]
    paths = [{"name": name, "path": str(store / of)} for name, of in (("a", "iris"), ("b", "keras"))]
    both = serve(HANDLER, {"type": "tensorflow", "models": {"paths": paths}})
    assert ask(both, {"x": [ROW]}, "b")["class_ids"] == ["2"]
    text = "error: model_name was not specified, choose one of the following: ['a', 'b']: runtime exception"
    assert text_of(both, {}) == text
    text = "error: 'c' model wasn't found in the list of available models: runtime exception"
    assert text_of(both, {}, "c") == text


def test_a_handler_that_does_not_ask_for_its_models(serve, store):  # N125
    handler = "class Handler:\n    def handle_get(self): return 1\n"
    server = serve(handler, {"type": "tensorflow", "models": {"dir": str(store)}}, wait=False)
    assert server.process.wait(PATIENCE_S) == 1
    assert '"tensorflow_client" is a required argument, but was not provided' in server.err.read_text()


def test_calls_are_batched_below_the_handler(serve, store, at_once, eventually):  # N136, N137
    batching = {"max_batch_size": 2, "batch_interval_seconds": 1.0}
    config = {"type": "tensorflow", "models": {"dir": str(store)}, "server_side_batching": batching}
    server = serve(HANDLER, {**config, "threads_per_process": 2})
    ask(server, {"x": [ROW, ROW]}, "keras")  # a full batch waits for nobody

    def two_at_once():
        began = time.monotonic()
        found = at_once(*[lambda row=row: ask(server, {"x": [row]}, "keras")["class_ids"] for row in (ROW, [0.0] * 4)])
        assert found == [["2"], ["0"]]
        return time.monotonic() - began

    eventually(lambda: two_at_once() < 1.0, "an answer without the wait for others")
    began = time.monotonic()
    assert ask(server, {"x": [ROW]}, "keras")["class_ids"] == ["2"]
    assert time.monotonic() - began >= 1.0
    assert NO_INPUT_AXIS in text_of(server, {"x": 1, "y": 2}, "scalar")
    assert ask(server, {"images": [[[[1.0], [3.0]]]]}, "images") == {"mean": [2.0]}


def test_a_handler_over_grpc(serve, store):  # N125
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("grpc_tools")
    handler = """
    class Handler:
        def __init__(self, config, tensorflow_client, proto_module_pb2):
            self.client, self.messages = tensorflow_client, proto_module_pb2

        def Classify(self, payload):
            found = self.client.predict({"x": [list(payload.numbers)]}, "keras")
            return self.messages.Answer(number=int(found["class_ids"][0]))
    """
    proto = """
    syntax = "proto3";
    service Flowers { rpc Classify(Given) returns (Answer); }
    message Given { repeated float numbers = 1; }
    message Answer { int32 number = 1; }
    """
    config = {"type": "tensorflow", "models": {"dir": str(store)}, "protobuf_path": "flowers.proto"}
    server = serve(handler, config, flowers__proto=proto)
    with grpc.insecure_channel(server.url.removeprefix("grpc://")) as channel:
        packed = np.array(ROW, "<f4").tobytes()
        assert channel.unary_unary("/Flowers/Classify")(b"\n\x10" + packed, timeout=PATIENCE_S) == b"\x08\x02"


# Without a server


def batches(run, max_rows, interval_s, *, timeout_s=30.0):
    return RowBatches(run, max_rows, interval_s, threads=2, timeout_s=timeout_s)


def run_together(batches, *calls):
    """Runs calls in threads of their own; returns what each got or raised, in their order."""
    outcomes: list[Any] = [None] * len(calls)

    def call(place, arrays):
        try:
            outcomes[place] = batches.run(arrays)
        except Exception as error:
            outcomes[place] = error

    threads = [threading.Thread(target=call, args=one) for one in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def rows(*values):
    return {"x": np.array(values, np.float32)}


def test_rows_of_several_calls_run_together_and_unlike_ones_apart():  # N136, N137
    sizes = []

    def run(arrays):
        sizes.append(arrays["x"].shape)
        return {"y": arrays["x"] * 2}

    found = run_together(batches(run, 3, 30.0), rows([1.0]), rows([2.0], [3.0]))
    assert [one["y"].tolist() for one in found] == [[[2.0]], [[4.0], [6.0]]]
    assert sizes == [(3, 1)]
    sizes.clear()
    run_together(batches(run, 3, 30.0), rows([1.0]), rows([1.0, 2.0]), rows([3.0]))
    assert sorted(sizes) == [(1, 2), (2, 1)]


def test_a_batch_that_fails_is_run_call_by_call():
    def run(arrays):
        if (arrays["x"] < 0).any():
            raise ValueError("below 0")
        return {"y": arrays["x"]}

    good, bad = run_together(batches(run, 2, 30.0), rows([1.0]), rows([-1.0]))
    assert good["y"].tolist() == [[1.0]]
    assert str(bad) == "below 0"


def test_what_has_no_axis_of_rows_fails_alone():  # N137
    with pytest.raises(ValueError, match=NO_INPUT_AXIS.replace("(", r"\(").replace(")", r"\)")):
        batches(dict, 2, 0.01).run({"x": np.zeros((), np.float32)})
    with pytest.raises(ValueError, match=NO_OUTPUT_AXIS):
        batches(lambda arrays: {"y": arrays["x"].sum()}, 2, 0.01).run(rows([1.0]))
    with pytest.raises(ValueError, match="has the shape"):
        batches(lambda _arrays: {"y": np.zeros(3)}, 2, 0.01).run(rows([1.0]))


def test_a_model_that_hangs_holds_its_callers_for_a_limited_time():
    go = threading.Event()

    def run(arrays):
        go.wait()
        return arrays

    first, second = run_together(batches(run, 2, 30.0, timeout_s=0.05), rows([1.0]), rows([2.0]))
    go.set()
    assert isinstance(first, DeadlineExceeded)
    assert isinstance(second, DeadlineExceeded)


def test_the_threads_of_a_model_end_with_it():
    one = batches(dict, 2, 0.01)
    assert one.run(rows([1.0]))["x"].tolist() == [[1.0]]
    names = {thread.name for thread in threading.enumerate()}
    mine = {name for name in names if name.startswith(one._serving.name)}
    assert len(mine) == 2
    del one
    gc.collect()
    eventually(lambda: not mine & {thread.name for thread in threading.enumerate()})


def test_what_a_handler_gets_of_each_type():  # N130
    assert flat(np.array([1.5, 0.1], np.float32)) == [1.5, 0.10000000149011612]
    assert flat(np.array([[1, 2]], np.int32)) == [1, 2]
    assert flat(np.array([2**62, -1], np.int64)) == [str(2**62), "-1"]
    assert flat(np.array([2**63], np.uint64)) == [str(2**63)]
    assert flat(np.array([True, False])) == [True, False]
    assert flat(np.array(["a", b"\xff"], object)) == ["YQ==", base64.b64encode(b"\xff").decode()]
    assert flat(np.array([-1], np.int8)) == [-1]
    assert flat(np.zeros((0, 3), np.float32)) == []
    assert json.dumps(flat(np.array([1, 2], np.uint8))) == "[1, 2]"


def test_texts_and_any_shape():  # N128
    signature = Signature((Var("t", "t", "BYTES"), Var("a", "a", "FP32")), ())
    shapes = {"t": [-1], "a": None}
    found = arrays_of(signature, shapes, {"t": ["a", b"b"], "a": [[1]]}, "m", "1")
    assert found["t"].tolist() == ["a", b"b"]
    with pytest.raises(UserException, match=r'key "a": can be of any rank and shape: could not convert'):
        arrays_of(signature, shapes, {"t": [], "a": "x"}, "m", "1")
    with pytest.raises(UserException, match=r'key "t": expected shape \[-1\]: expected strings or bytes, got int'):
        arrays_of(signature, shapes, {"t": [1], "a": 1}, "m", "1")
    with pytest.raises(UserException, match="model_input is a mapping"):
        arrays_of(signature, shapes, [1], "m", "1")


def test_an_input_of_the_wrong_kind_leaves_nothing_in_a_circle():
    signature = Signature((Var("a", "a", "FP32"),), ())

    def ask():
        with pytest.raises(UserException):
            arrays_of(signature, {"a": None}, {"a": "x"}, "m", "1")

    ask()
    with left_in_circles() as left:
        for _ in range(20):
            ask()
    assert len(left) < 20, sorted(set(left))


def test_a_backend_that_does_not_answer_in_time(monkeypatch):  # N138, with less than its 300 s
    pytest.importorskip("grpc")
    monkeypatch.setattr(tensorflow_client, "TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:

        class Models:
            bind = staticmethod(lambda load: setattr(Models, "load", staticmethod(load)))
            get_model = staticmethod(lambda *_: Models.load(str(saved_models() / "iris/1")))  # pyright: ignore[reportAttributeAccessIssue]

        models: Any = Models()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = tensorflow_client.TensorFlowClient(models, tensorflow_client.TensorFlowRules(address=address))
        with pytest.raises(UserException, match=r"model 'iris' of version '1' cannot be run: .* does not answer"):
            client.predict({"x": [ROW]})
