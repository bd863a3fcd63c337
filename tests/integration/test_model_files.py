# SPDX-License-Identifier: Apache-2.0
"""`forebay serve net.onnx`: model files through a socket."""

from __future__ import annotations

import importlib.util
import json

import httpx
import msgspec
import numpy as np
import pandas as pd
import pytest
from tests.models import boosted, model_files, sklearn_files, torch_files
from tests.waiting import PATIENCE_S

THREE = "idle: wait\n    max_wait_ms: 60000\n    max_batch_size: 3"
"""Three samples that come together run together, or not before a minute is over."""

MODEL = """
import numpy as np
import forebay.runtimes
from forebay import Model


class Inside(Model):
    def load(self):
        self.net = forebay.runtimes.load(PATH)

    def predict(self, batch: list[list[float]]) -> list[float]:
        return self.net({"x": np.array(batch)})["price"][:, 0]
"""


@pytest.fixture(scope="module")
def server(launch, tmp_path_factory):
    """Serves all kinds of files, each under its name, in threads but for one."""
    folder = tmp_path_factory.mktemp("files")
    linear = model_files.linear(folder / "price of houses.onnx")
    (folder / "inside.py").write_text(MODEL.replace("PATH", json.dumps(str(linear))))
    targets = {
        linear: "worker_kind: process",
        model_files.linear(folder / "two.onnx", rows=2): "",
        model_files.elementwise(folder / "labels.onnx"): THREE,
        model_files.mean(folder / "mean.onnx"): THREE,
        model_files.table(folder / "table.onnx"): THREE,
        model_files.table(folder / "far.onnx", beyond=100): "",
        model_files.texts(folder / "texts.onnx"): "",
        model_files.single(folder / "single.onnx"): "",
        folder / "inside.py": "",
    }
    if importlib.util.find_spec("openvino") is not None:
        import openvino

        openvino.save_model(openvino.Core().read_model(linear), folder / "ov.xml", compress_to_fp16=False)
        targets[folder / "ov.xml"] = ""
    if importlib.util.find_spec("skops") is not None:
        houses = sklearn_files.save(sklearn_files.houses(), folder / "houses.skops")
        targets[houses] = f"worker_kind: process\n    trust_types: [{sklearn_files.DTYPE}]\n    {THREE}"
    if importlib.util.find_spec("xgboost") is not None:
        table = boosted.frame()
        targets[boosted.save(folder / "flats.json", data=table, labels=boosted.prices(table))] = THREE
    if importlib.util.find_spec("lightgbm") is not None:
        targets[boosted.save(folder / "chances.txt", "multiclass")] = THREE
    if importlib.util.find_spec("torch") is not None:
        targets[torch_files.layer_file(folder / "chances of torch.pt2")] = f"trust_pickle: true\n    {THREE}"
    listed = [
        f"  - target: {path.name}\n    {settings or 'workers: 1'}\n"
        + ("" if "worker_kind" in settings else "    worker_kind: thread\n")
        for path, settings in targets.items()
    ]
    (folder / "forebay.yaml").write_text("models:\n" + "".join(listed))
    return launch(folder / "forebay.yaml")


def ask(server, name, body, **more):
    return httpx.post(f"{server.url}/models/{name}", json=body, timeout=PATIENCE_S, **more)


def ask_together(at_once, server, name, samples):
    """Sends all samples at once; gives their answers in order, and how many batches the model ran for them."""
    answers = at_once(*[lambda sample=sample: ask(server, name, sample) for sample in samples])
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("forebay_batch_size_count") and f'"{name}"' in line]
    return answers, sum(float(line.split()[-1]) for line in counts)


def test_a_request_is_a_sample_of_the_types_that_the_file_declares(server):
    name = "price-of-houses"
    assert ask(server, name, {"x": [1, 2, 3]}).json() == {"price": [321.0]}
    packed = httpx.post(
        f"{server.url}/models/{name}",
        content=msgspec.msgpack.encode({"x": [1, 2, 3]}),
        headers={"content-type": "application/msgpack"},
    )
    assert packed.json() == {"price": [321.0]}
    for wrong, where in (({"x": [1, 2]}, "$.x"), ({"x": [1, 2, "3"]}, "$.x[2]"), ({"y": 1}, "$.x")):
        refused = ask(server, name, wrong)
        assert refused.status_code == 422
        assert refused.json()["error"]["detail"]["path"] == where
    for samples in ([[1, 2, 3]], {"x": [[1], [2], [3]]}):
        told = ask(server, name, samples).json()["error"]["message"]
        assert told.endswith("with a value for each input of the file (/v1 and /v2 take many at once)")
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    numbers = {"type": "array", "items": {"type": "number"}}
    assert schemas["PriceOfHousesInput"]["properties"]["x"] == {**numbers, "minItems": 3, "maxItems": 3}
    assert schemas["PriceOfHousesOutput"]["properties"]["price"] == {**numbers, "minItems": 1, "maxItems": 1}


def test_numbers_that_the_type_cannot_hold_are_refused(server):
    refused = ask(server, "price-of-houses", {"x": [1e300, 0, 0]})
    assert refused.status_code == 422
    assert "'x': expected an array of float32" in refused.json()["error"]["message"]


def test_samples_of_unlike_length_share_a_batch_where_padding_changes_nothing(server, at_once):
    samples = [[1, 2, 3, 4], [5], [6, 7]]
    answers, batches = ask_together(at_once, server, "labels", [{"ids": ids} for ids in samples])
    assert [answer.json()["labels"] for answer in answers] == [[2 * one for one in ids] for ids in samples]
    assert batches == 1


def test_samples_of_unlike_length_are_right_where_padding_would_change_them(server, at_once):
    samples = [{"values": one} for one in ([1.0, 2.0], [3.0], [5.0, 7.0])]
    answers, batches = ask_together(at_once, server, "mean", samples)
    assert [answer.json()["mean"] for answer in answers] == [1.5, 3.0, 6.0]
    assert batches == 1


def test_one_bad_sample_fails_alone(server, at_once):
    answers, _ = ask_together(at_once, server, "table", [{"at": 0}, {"at": 9}, {"at": 3}])
    assert [answer.status_code for answer in answers] == [200, 500, 200]
    assert answers[2].json() == {"row": [6.0, 7.0]}


def test_a_model_that_cannot_be_tried_runs_samples_one_by_one(server, at_once):
    # F90: what no made-up value shows was believed.
    answers, _ = ask_together(at_once, server, "far", [{"at": 100}, {"at": 101}, {"at": 103}])
    assert [answer.json() for answer in answers] == [{"row": [0.0, 1.0]}, {"row": [2.0, 3.0]}, {"row": [6.0, 7.0]}]
    assert httpx.get(f"{server.url}/models/far").json()["batching"]["max_batch_size"] == 1


def test_a_fixed_batch_dimension_is_served_as_it_is(server):
    assert ask(server, "two", {"x": [[1, 2, 3], [4, 5, 6]]}).json() == {"price": [[321.0], [654.0]]}
    assert ask(server, "two", {"x": [[1, 2, 3]]}).status_code == 422
    assert httpx.get(f"{server.url}/models/two").json()["batching"]["max_batch_size"] == 1


def test_texts_and_names_of_any_kind(server):
    assert ask(server, "texts", {"in:0": "größer"}).json() == {"out:0": "größer"}


def test_a_file_inside_a_model(server):
    assert ask(server, "inside", [1, 2, 3]).json() == 321.0


def test_a_file_of_openvino(server):
    pytest.importorskip("openvino")
    assert ask(server, "ov", {"x": [1, 2, 3]}).json() == {"price": [321.0]}


def test_rows_of_a_file_of_skops_are_typed_and_the_same_in_a_batch_and_alone(server, at_once):
    pytest.importorskip("skops")
    houses = [{"area": area, "city": "Köln", "zone": 3, "about": "dark"} for area in (50, 70.5, 90)]
    answers, batches = ask_together(at_once, server, "houses", houses)
    model = sklearn_files.houses()
    prices = [model.predict(pd.DataFrame([house]))[0] for house in houses]
    assert [answer.json()["predict"] for answer in answers] == pytest.approx(prices)
    assert batches == 1
    schemas = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]
    types = {name: one["type"] for name, one in schemas["HousesInput"]["properties"].items()}
    assert types == {"area": "number", "city": "string", "zone": "number", "about": "string"}
    mixed, _ = ask_together(at_once, server, "houses", [*houses[:2], houses[2] | {"city": 5}])
    assert [answer.status_code for answer in mixed] == [200, 200, 422]
    assert mixed[2].json()["error"]["detail"]["path"] == "$.city"


def test_rows_of_xgboost_are_typed_may_miss_values_and_are_the_same_in_a_batch_and_alone(server, at_once, tmp_path):
    pytest.importorskip("xgboost")
    table = boosted.frame(9, seed=5)
    rows = boosted.samples(table)
    path = boosted.save(tmp_path / "flats.json", data=boosted.frame(), labels=boosted.prices(boosted.frame()))
    answers, batches = ask_together(at_once, server, "flats", rows)
    assert [answer.json()["predict"] for answer in answers] == boosted.predicted(path, table).tolist()
    assert any(None in row.values() for row in rows)
    assert batches == 3
    properties = httpx.get(f"{server.url}/openapi.json").json()["components"]["schemas"]["FlatsInput"]["properties"]
    types = {name: [kind["type"] for kind in one["anyOf"]] for name, one in properties.items()}
    number, text = ["number", "null"], ["string", "null"]
    assert types == {"area": number, "floor": number, "city": text, "zone": number}
    wrong = [rows[1] | {"city": 5}, rows[2] | {"city": "Rom"}]
    mixed, _ = ask_together(at_once, server, "flats", [rows[0], *wrong])
    assert [answer.status_code for answer in mixed] == [200, 422, 400]
    assert mixed[1].json()["error"]["detail"]["path"] == "$.city"
    assert "'city': expected a category of the model" in mixed[2].json()["error"]["message"]


def test_rows_of_lightgbm_are_lists_in_which_values_may_be_missing(server, at_once, tmp_path):
    pytest.importorskip("lightgbm")
    data = boosted.rows(9, seed=5)
    wanted = boosted.predicted(boosted.save(tmp_path / "chances.txt", "multiclass"), data)
    rows = [{"x": [None if one != one else one for one in row]} for row in data.tolist()]  # noqa: PLR0124
    answers, batches = ask_together(at_once, server, "chances", rows)
    assert [answer.json()["predict"] for answer in answers] == wanted.tolist()
    assert any(None in row["x"] for row in rows)
    assert batches == 3
    whole = [at for at, row in enumerate(rows) if None not in row["x"]][:3]
    tensor = {"name": "x", "datatype": "FP64", "shape": [3, 4], "data": data[whole].ravel().tolist()}
    answer = httpx.post(f"{server.url}/v2/models/chances/infer", json={"inputs": [tensor]}, timeout=PATIENCE_S)
    assert answer.json()["outputs"][0]["data"] == wanted[whole].ravel().tolist()


def test_rows_of_a_program_of_pytorch_are_typed_and_the_same_in_a_batch_and_alone(server, at_once):
    pytest.importorskip("torch")
    rows = np.random.default_rng(5).normal(size=(9, 4)).astype("f")
    answers, batches = ask_together(at_once, server, "chances-of-torch", [{"input": row} for row in rows.tolist()])
    assert np.allclose([answer.json()["output"] for answer in answers], torch_files.answer(rows), atol=1e-6)
    assert batches == 3
    mixed, _ = ask_together(at_once, server, "chances-of-torch", [{"input": one} for one in ([1], *rows[:2].tolist())])
    assert [answer.status_code for answer in mixed] == [422, 200, 200]


def test_a_file_that_may_run_code_is_refused_until_it_is_trusted(tmp_path, cli):
    pytest.importorskip("skops")
    for name, said in (("a.pkl", "--trust-pickle"), ("a.skops", f"--trust-types {sklearn_files.TREE}")):
        done = cli("check", sklearn_files.save(sklearn_files.forest(), tmp_path / name))
        assert (done.returncode, "Traceback" in done.stderr) == (2, False)
        assert said in done.stderr
    assert cli("check", tmp_path / "a.pkl", "--trust-pickle").returncode == 0


@pytest.mark.parametrize(
    "name, said",
    [
        ("none.onnx", "none.onnx', and no file is there"),
        ("bad.onnx", "bad.onnx cannot be loaded"),
        ("other.json", "other.json', which holds no model; expected an .onnx or .skops file, XGBoost's .ubj or .json"),
        ("notes.txt", "notes.txt', which holds no model"),
        ("parts.onnx", "its output 'parts' is of the type seq(tensor(float)), which cannot be served"),
        ("chances.onnx", "and string can; skl2onnx makes tensors with options={'zipmap': False}\n"),
    ],
)
def test_what_cannot_be_served_is_said_in_a_sentence(tmp_path, cli, name, said):
    for file in ("bad.onnx", "other.json", "notes.txt"):
        (tmp_path / file).write_text("no model")
    model_files.sequence(tmp_path / "parts.onnx")
    model_files.maps(tmp_path / "chances.onnx")
    done = cli("serve", tmp_path / name, "--port", "0")
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_check_says_what_would_be_served_and_warns_of_what_is_declared_and_not_so(tmp_path, cli):
    done = cli("check", model_files.one_inside(tmp_path / "one.onnx"))
    assert done.returncode == 0, done.stderr
    assert "POST /models/one" in done.stdout
    assert "is run on one request at a time: its operator ReduceSum computes over all samples" in done.stderr


SINGLE = {"x": [1, 2], "flag": True, "count": 3, "weight": 2.5, "word": "a"}


def test_a_single_value_is_taken_as_it_is(server):
    answer = server.client.post("/models/single", json=SINGLE | {"weight": 2})
    assert answer.json() == {"sum": [3], "flag_out": True, "count_out": 3, "weight_out": 2, "word_out": "a"}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"flag": value} for value in ("false", {"a": 1}, 2.7, 1, None)),
        *({"count": value} for value in (2.7, True, "5", None, 2**70)),
        *({"weight": value} for value in (None, "nan", "5", True, 1e300)),
        *({"word": value} for value in (None, {"a": 1}, 5, [["a"], ["b", "c"]])),
    ],
    ids=str,
)
def test_a_single_value_of_another_type_is_refused_where_numpy_would_make_one_of_it(server, wrong):
    answer = server.client.post("/models/single", json=SINGLE | wrong)
    ((name, _),) = wrong.items()
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["detail"]["path"] == f"$.{name}"
