# SPDX-License-Identifier: Apache-2.0
"""Models of an op's own: what describes them, what runs them, on which device, and what is refused."""

import contextlib
import json
import logging
import os
import shutil
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compat.pipeline.predictor_models import PRICES, REFERENCE, WEIGHTS, Counter, X, describe, onnx_model
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError, ForebayError
from forebay.runtimes.signature import one_feed
from forebay.surfaces.pipeline.predictors import (
    LocalConf,
    LocalServiceHandler,
    PredictorSettings,
    client_for,
    model_processes,
)
from forebay.surfaces.pipeline.predictors.descriptions import TYPES, read_signature
from forebay.surfaces.pipeline.predictors.local_models import local_client

ROOT = Path(__file__).parents[3]
PADDLE = ROOT / ".venv/environments/paddle/bin/python"
UCI = ROOT / ".venv/environments/paddle/lib"
HOUSE = [0.0137, -0.1136, 0.2553, -0.0692, 0.0582, -0.0727, -0.1583, -0.0584, 0.6283, 0.4919, 0.1856, 0.0795, -0.0332]
PRICE = 18.901152


def local(model_config, *, index=None, process=False, fetch_list=(), **conf) -> Any:
    settings = PredictorSettings(
        name="uci", local_service_conf=LocalConf(model_config=str(model_config), **conf), fetch_list=fetch_list
    )
    return client_for(settings, concurrency_idx=index, process=process)


def number_of(caught):
    return caught.value.detail["err_no"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return onnx_model(tmp_path_factory.mktemp("model"))


# ---------------------------------------------------------------------------------------------------------------------
# What an op is told


def test_settings_have_the_originals_defaults():  # P35
    conf = LocalConf()
    assert (conf.model_config, conf.client_type, conf.fetch_list) == (None, None, None)
    assert (conf.workdir, conf.thread_num, conf.device_type, conf.devices) == ("", 2, -1, "")
    assert (conf.mem_optim, conf.ir_optim, conf.precision, conf.use_calib) == (True, False, "fp32", False)
    assert (conf.use_mkldnn, conf.mkldnn_cache_capacity, conf.min_subgraph_size) == (False, 0, 3)
    assert (conf.mkldnn_op_list, conf.mkldnn_bf16_op_list) == (None, None)


def test_settings_are_read_from_those_of_an_op():  # P35
    settled = {
        "concurrency": 2,
        "timeout": 200,
        "server_endpoints": None,
        "client_type": "brpc",
        "local_service_conf": {
            "model_config": "m",
            "devices": "0,1",
            "thread_num": 4,
            "client_type": "local_predictor",
        },
        "fetch_list": ["price"],
    }
    found = PredictorSettings.of_op("uci", settled)
    assert (found.kind, found.timeout_s, found.wanted) == ("local_predictor", 0.2, ["price"])
    assert (found.local_service_conf.thread_num, found.local_service_conf.device_ids) == (4, [0, 1])
    with pytest.raises(
        ConfigError,
        match=r"op 'uci': local_service_conf\.thread_num: expected a whole number from 1 to 1024, got 'two'",
    ):
        PredictorSettings.of_op("uci", {"local_service_conf": {"thread_num": "two"}})


@pytest.mark.parametrize(
    "given, kind, wanted",
    [
        ({}, None, ()),
        ({"client_type": "grpc"}, None, ()),
        ({"server_endpoints": ["a:1"]}, "brpc", ()),
        ({"server_endpoints": ["a:1"], "client_type": "pipeline_grpc"}, "pipeline_grpc", ()),
        ({"local_service_conf": LocalConf(model_config="m", fetch_list=["y"])}, "local_predictor", ["y"]),
        ({"local_service_conf": LocalConf(model_config="m", client_type="grpc")}, "grpc", ()),
    ],
)
def test_the_kind_of_client_follows_from_endpoints_and_model(given, kind, wanted):  # P36, P108
    settings = PredictorSettings(**given)
    assert (settings.kind, settings.wanted) == (kind, wanted)


@pytest.mark.parametrize(
    "given, said",
    [
        ({"client_type": "local_predicter"}, "did you mean 'local_predictor'"),  # P108
        ({"local_service_conf": {"client_type": "pipeline_grpc"}}, "expected 'brpc', 'grpc' or 'local_predictor'"),
        ({"endpoint_protocol": "kserve"}, "did you mean 'kserve_v2'"),
        ({"server_endpoints": ["a:1"], "client_type": "local_predictor"}, "leave one of them out"),
        ({"local_service_conf": {"use_encryption_model": True}}, "encrypted models are not supported"),  # P116
        ({"local_service_conf": {"encryption_key": "k"}}, "encrypted models are not supported"),  # P116
        ({"local_service_conf": {"precision": "fp64"}}, "expected fp32, fp16, bf16 or int8"),
        ({"local_service_conf": {"devices": "gpu0"}}, "numbers separated by commas"),
        ({"local_service_conf": {"device_type": 9}}, "from -1 to 7"),
        ({"local_service_conf": {"thread_num": 0}}, "from 1 to 1024"),
        ({"local_service_conf": {"thread_num": 10**9}}, "from 1 to 1024"),  # F134
    ],
)
def test_settings_that_cannot_be_used_are_refused_with_the_op(given, said):
    with pytest.raises(ConfigError, match=said) as caught:
        PredictorSettings.of_op("bow", given)
    assert caught.value.message.startswith("op 'bow'")


def test_an_op_without_a_model_gets_no_client():  # P36
    with pytest.raises(ConfigError, match="op 'op' has no model"):
        client_for(PredictorSettings(), concurrency_idx=None, process=False)


@pytest.mark.parametrize(
    "device_type, devices, shared_out",
    [
        (-1, "", [None, None, None]),
        (-1, "0,1", [0, 1, 0]),
        (-1, 2, [2, 2, 2]),
        (0, "0,1", [None, None, None]),
        (1, "3, 4,5", [3, 4, 5]),
        (1, "", [0, 0, 0]),
        (2, "1", [1, 1, 1]),
        (3, "0", [None, None, None]),
    ],
)
def test_workers_share_out_the_devices(device_type, devices, shared_out):  # P105
    conf = LocalConf(device_type=device_type, devices=devices)
    assert [conf.device_of(index) for index in range(3)] == shared_out
    assert conf.device_of(None) == shared_out[0]  # threads


# ---------------------------------------------------------------------------------------------------------------------
# Descriptions


def test_a_description_is_read_with_all_that_text_format_allows(tmp_path):  # P109
    (tmp_path / "c.prototxt").write_text("""
        # a comment
        feed_var: { name: 'a' "b" , alias_name: "x\\ty\\x41\\101\\"" ; feed_type: 0 shape: [1, -1] shape: 3 }
        feed_var < name: "lod" is_lod_tensor: true >
        fetch_var { name: "out" alias_name: "" fetch_type: 20 unknown: 1.5e3 deeper { deepest {} } }
    """)
    found = read_signature(tmp_path / "c.prototxt")
    assert [(one.name, one.alias, one.dtype, one.shape, one.is_lod) for one in found.feeds] == [
        ("ab", 'x\tyAA"', "int64", (1, -1, 3), False),
        ("lod", "lod", "float32", (), True),
    ]
    assert [(one.name, one.alias, one.dtype) for one in found.fetches] == [("out", "", "str")]


@pytest.mark.parametrize("number, dtype", list(TYPES.items()))
def test_every_type_has_its_number(tmp_path, number, dtype):  # P109
    describe(tmp_path, type=number)
    assert read_signature(tmp_path / "serving_server_conf.prototxt").feeds[0].dtype == dtype


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "expected at least one feed_var and one fetch_var"),
        ('feed_var { name: "x" }', "expected at least one feed_var and one fetch_var, got 1 and 0"),
        ('feed_var { name: "x" feed_type: 10 }', "feed_type: expected .*, got 10"),
        ('feed_var { alias_name: "x" }', "has no name"),
        ("feed_var: 3", "line 1"),
        ('feed_var { name: "x" shape: "a" }', "integer"),
        ("feed_var { name: x", "line 1"),
        ("\n\nfeed_var }", "line 3"),
        ("feed_var", 'Expected "{"'),
        ('feed_var { name: "x\n" }', "line 1"),
        ("a: [1, 2", "line 1"),
        ("a { " * 100_000, "deep"),
        ("x" * 2_000_000, "longer than"),
        ('feed_var{name:"x"} feed_var{name:"x"} fetch_var{name:"y"}', "stands there twice"),
    ],
)
def test_what_describes_no_model_is_told_with_its_place(tmp_path, text, said):
    (tmp_path / "c.prototxt").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_signature(tmp_path / "c.prototxt")
    assert "c.prototxt" in caught.value.message


def test_a_hostile_description_is_read_in_no_time(tmp_path):
    path = tmp_path / "c.prototxt"
    for text in ("a:" * 200_000, "a:[" * 100_000, '"' * 100_001, "a: " + "9" * 500_000, "#" * 900_000):
        path.write_text(text)
        try:
            read_signature(path)
        except ConfigError:
            continue


# ---------------------------------------------------------------------------------------------------------------------
# A model in this process


def test_a_model_is_asked_by_aliases_and_answers_by_aliases(model):  # P109
    client = local(model)
    found = client.predict({"x": X})
    assert sorted(found) == ["doubled", "price"]
    np.testing.assert_array_equal(found["price"], PRICES)
    np.testing.assert_array_equal(found["doubled"], 2 * PRICES)
    assert list(client.predict({"x": X}, ["doubled"])) == ["doubled"]
    assert list(local(model, fetch_list=["price"]).predict({"x": X})) == ["price"]


def test_values_are_cast_to_the_declared_type(model):  # P109
    for dtype in ("f8", "i4", "u1", "f2"):
        np.testing.assert_array_equal(local(model).predict({"x": X.astype(dtype)})["price"], PRICES)


def test_samples_of_a_list_are_put_together(model):
    client = local(model)
    np.testing.assert_array_equal(
        client.predict([{"x": X}, {"x": X[:1]}])["price"], np.concatenate([PRICES, PRICES[:1]])
    )
    np.testing.assert_array_equal(client.predict([{"x": row} for row in X], batch=False)["price"], PRICES)
    np.testing.assert_array_equal(client.predict([{"x": X[0]}], batch=False)["price"], PRICES[:1])
    np.testing.assert_array_equal(client.predict({"x": X[0]}, batch=False)["price"], PRICES[:1])


def test_offsets_of_samples_of_a_list_go_on_where_those_before_end():
    samples = [{"x": X, "x.lod": [0, 2]}, {"x": X, "x.lod": [0, 1, 2]}]
    for batch in (True, False):
        found, is_batch = one_feed(samples, batch=batch)
        assert (found["x.lod"].tolist(), found["x"].shape, is_batch) == ([0, 2, 3, 4], (4, 3), True)


@pytest.mark.parametrize("names", [("in", "out", "twice"), ("x", "price", "doubled"), ("i", "o", "p")])
def test_names_are_the_files_or_the_aliases_or_go_by_position(tmp_path, names):  # P109
    found = local(onnx_model(tmp_path, names=names)).predict({"x": X}, ["doubled"])
    np.testing.assert_array_equal(found["doubled"], 2 * PRICES)


def test_a_description_that_names_more_than_the_model_has_stops_the_start(tmp_path):
    onnx_model(tmp_path)
    describe(tmp_path, second="thrice")
    with pytest.raises(ConfigError, match=r"names the outputs thrice, and the model has only out, twice"):
        local(tmp_path)


def test_a_model_nobody_describes_has_the_names_of_its_file(tmp_path):
    client = local(onnx_model(tmp_path, described=False) / "model.onnx")
    np.testing.assert_array_equal(client.predict({"in": X.astype("f8")})["out"], PRICES)


@pytest.mark.parametrize(
    "feed, fetch, number",
    [
        ({}, None, 5000),
        ({"y": X}, None, 5000),
        ({"x": X, "help": X}, None, 5000),  # trap 26: a key too many is not ignored
        ({"x": X}, ["cost"], 5000),
        ({"x": [1, 2, 3]}, None, 7000),
        ({"x": "1, 2, 3"}, None, 7000),
        ({"x": np.array(["a"])}, None, 7000),
        ("x", None, 7000),
        ([{"x": X}, {"y": X}], None, 5000),
        ([{"x": X}, {"x": X[:, :2]}], None, 5000),
        ({"x": X[:, :2]}, None, 9000),
        ({"x": X, "x.lod": [0, 9]}, None, 5000),
        ({"x": X, "x.lod": "a"}, None, 5000),
        ({"x": X, "x.lod": [0, 1, 2]}, None, 5000),  # two sequences, and no runtime that knows them
    ],
)
def test_what_a_model_cannot_be_asked_has_a_number(model, feed, fetch, number):  # P92, P110
    with pytest.raises(ForebayError) as caught:
        local(model).predict(feed, fetch)
    assert number_of(caught) == number
    assert "Traceback" not in caught.value.message


def test_one_sequence_is_an_ordinary_array(model):
    np.testing.assert_array_equal(local(model).predict({"x": X, "x.lod": [[0, 2]]})["price"], PRICES)


def test_a_result_that_is_declared_as_sequences_has_their_offsets(tmp_path):  # F108
    text = 'feed_var { name: "in" } fetch_var { name: "out" is_lod_tensor: true } fetch_var { name: "twice" }'
    onnx_model(tmp_path, described=False)
    (tmp_path / "serving_server_conf.prototxt").write_text(text)
    found = local(tmp_path).predict({"in": X, "in.lod": [[0, 2]]})
    assert sorted(found) == ["out", "out.lod", "twice"]
    assert found["out.lod"].tolist() == [0, 2]


def test_a_feed_may_have_lod_in_its_name(tmp_path):  # P110
    text = 'feed_var { name: "in" alias_name: "explode.lod" } fetch_var { name: "out" }'
    onnx_model(tmp_path, described=False)
    (tmp_path / "serving_server_conf.prototxt").write_text(text)
    np.testing.assert_array_equal(local(tmp_path).predict({"explode.lod": X})["out"], PRICES)


def test_math_threads_are_the_models_own(model):  # P104
    assert [local(model, thread_num=count)._backend.runtime.threads for count in (1, 3)] == [1, 3]


def test_a_device_the_library_lacks_is_told_once(model, caplog):  # P105
    with caplog.at_level(logging.WARNING):
        clients = [local(model, device_type=1, devices="0,1", index=index) for index in (1, 1)]
    np.testing.assert_array_equal(clients[0].predict({"x": X})["price"], PRICES)
    if clients[0]._backend.runtime.providers == ["CPUExecutionProvider"]:
        assert [one.message for one in caplog.records if "runs nothing on device_type 1" in one.message] != []
        assert len(caplog.records) == 1


def test_settings_the_runtime_has_no_use_for_are_told_once(tmp_path, caplog):  # P35
    folder = onnx_model(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            local(folder, use_mkldnn=True, min_subgraph_size=5, precision="fp16", mkldnn_op_list=["conv2d"])
    (told,) = [one.message for one in caplog.records]
    assert told.endswith("has no use for use_mkldnn, mkldnn_op_list, min_subgraph_size, precision")


@pytest.mark.parametrize(
    "files, said",
    [
        ([], "holds no model"),
        (["a.pdmodel"], "holds no model"),
        (["a.onnx", "b.onnx"], "several models: a.onnx, b.onnx"),
    ],
)
def test_a_folder_without_one_model_is_told(tmp_path, files, said):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=said):
        local(tmp_path)


def test_a_model_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match="which does not exist"):
        local(tmp_path / "none")


@pytest.mark.parametrize("files", [["__model__"], ["__model__", "__params__"], ["m.pdmodel", "m.pdiparams"]])
def test_models_of_paddle_need_paddle(tmp_path, files):  # P109
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"pip install paddlepaddle setuptools$"):  # F44: two words for a shell
        local(tmp_path)


def test_every_thread_has_a_predictor_of_its_own(model, at_once):  # P111
    rows = np.random.default_rng(0).random((200, 3), np.float32)
    clients = [local(model) for _ in range(4)]
    assert len({id(client._backend.runtime) for client in clients}) == 4

    def ask(client):
        return lambda: [client.predict({"x": rows[at : at + 1]})["price"][0, 0] for at in range(len(rows))]

    alone = ask(local(model))()
    for found in at_once(*map(ask, clients)):
        assert found == alone


def test_a_model_of_openvino(tmp_path, model):  # P104, P109
    openvino = pytest.importorskip("openvino")
    openvino.save_model(
        openvino.Core().read_model(model / "model.onnx"), tmp_path / "model.xml", compress_to_fp16=False
    )
    describe(tmp_path)
    client = local(tmp_path, thread_num=1)
    first = client.predict({"x": X})
    np.testing.assert_allclose(first["price"], PRICES)
    np.testing.assert_allclose(client.predict({"x": X[:1]}, ["doubled"])["doubled"], 2 * PRICES[:1])
    np.testing.assert_allclose(first["price"], PRICES)  # not written over by the second call
    assert client._backend.runtime.threads == 1
    with pytest.raises(ForebayError) as caught:
        client.predict({"x": X[:, :2]})
    assert number_of(caught) == 5000  # it is held to its shapes before it runs


def test_openvino_reports_to_nobody_that_it_is_used(tmp_path, model):
    openvino = pytest.importorskip("openvino")
    openvino.save_model(openvino.Core().read_model(model / "model.onnx"), tmp_path / "model.xml")
    code = """
import os, sys
from pathlib import Path
os.register_at_fork(before=lambda: print("forked"))
from forebay.runtimes.library import RunOptions
from forebay.runtimes.openvino import OpenVino
OpenVino(Path(sys.argv[1]), RunOptions())
print(sys.modules.get("openvino_telemetry"))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "model.xml")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "None\n"


# ---------------------------------------------------------------------------------------------------------------------
# A model that is a callable


def test_a_callable_is_a_model():  # P109
    client = local(f"{REFERENCE}:twice")
    np.testing.assert_array_equal(client.predict({"x": X})["y"], 2 * X)
    assert list(client.predict({"x": X}, ["y"])) == ["y"]
    assert client.predict({"x": X[0]}, ["y"], batch=False)["y"].shape == (1, 3)


def test_a_class_is_made_once_for_each_predictor():  # P111
    Counter.made = 0
    clients = [local(f"{REFERENCE}:Counter") for _ in range(2)]
    assert [clients[0].predict({})["calls"][0], clients[0].predict({})["calls"][0]] == [1, 2]
    assert clients[1].predict({})["calls"][0] == 1
    assert Counter.made == 2


@pytest.mark.parametrize(
    "name, said",
    [("none", "cannot be imported"), ("__doc__", "cannot be called"), ("Counter.made", "cannot be called")],
)
def test_what_is_no_callable_stops_the_start(name, said):
    with pytest.raises(ConfigError, match=said):
        local(f"{REFERENCE}:{name}")


@pytest.mark.parametrize(
    "name, fetch, number", [("broken", None, 9000), ("listed", None, 9000), ("twice", ["z"], 5000)]
)
def test_a_callable_that_fails_has_a_number(name, fetch, number):
    with pytest.raises(ForebayError) as caught:
        local(f"{REFERENCE}:{name}").predict({"x": X}, fetch)
    assert number_of(caught) == number


# ---------------------------------------------------------------------------------------------------------------------
# The same description before Paddle's model and its twin


def uci_folder():
    found = next(
        UCI.glob("python*/site-packages/paddle_serving_server/env_check/simple_web_service/uci_housing_model"), None
    )
    if found is None:
        pytest.skip("the model of house prices is not there; `make setup` fetches it")
    return found


def parameter(path):
    """The numbers in a parameter file of Paddle: a version, offsets, a version, a description, then the elements."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<i", data, 16)
    return np.frombuffer(data[20 + size :], np.float32)


def test_house_prices_from_the_onnx_twin(tmp_path):  # P109
    uci = uci_folder()
    folder = onnx_model(
        tmp_path,
        weights=parameter(uci / "fc_0.w_0").reshape(13, 1),
        bias=parameter(uci / "fc_0.b_0"),
        names=("x", "fc_0.tmp_1", "more"),
        described=False,
    )
    shutil.copy(uci / "serving_server_conf.prototxt", folder)
    found = local(folder, fetch_list=["price"]).predict({"x": np.array([HOUSE])})
    assert found["price"].tolist() == [[pytest.approx(PRICE, abs=1e-5)]]


PADDLE_SCRIPT = """
import json, sys
import numpy as np
from forebay.errors import ForebayError
from forebay.surfaces.pipeline.predictors.local_models import local_client
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf

order = json.load(sys.stdin)
found = []
for folder in order["folders"]:
    client = local_client(LocalConf(model_config=folder, **order["conf"]), [], None)
    found.append([client.predict({"x": np.array(rows)})["price"].tolist() for rows in order["rows"]])
try:
    client.predict({"x": np.zeros((1, 3))})
except ForebayError as error:
    refused = [error.detail["err_no"], error.message]
print("\\n" + json.dumps([found, client._backend.runtime.threads, refused]))
"""


NEWEST_SCRIPT = """
import json, sys
import numpy as np
import paddle
from forebay.surfaces.pipeline.predictors.local_models import local_client
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf
from forebay.surfaces.pipeline.predictors import model_processes
from forebay.surfaces.pipeline.predictors.descriptions import TYPES

DESCRIPTION = (
    'feed_var {{ name: "x" feed_type: {0} shape: 2 }} feed_var {{ name: "z" feed_type: 1 shape: 1 }}'
    'fetch_var {{ name: "y" fetch_type: {0} shape: 1 }} fetch_var {{ name: "more" fetch_type: 1 shape: 1 }}'
)

paddle.enable_static()
found = {}
for number in json.load(sys.stdin):
    program, startup = paddle.static.Program(), paddle.static.Program()
    with paddle.static.program_guard(program, startup):
        x = paddle.static.data("x", [-1, 2], TYPES[number])
        z = paddle.static.data("z", [-1, 1], "float32")
        fetched = [paddle.reshape(x, [-1, 1]), paddle.static.nn.fc(z, 1)]
        executor = paddle.static.Executor(paddle.CPUPlace())
        executor.run(startup)
        paddle.static.save_inference_model(f"{number}/model", [x, z], fetched, executor, program=program)
    with open(f"{number}/serving_server_conf.prototxt", "w") as file:
        file.write(DESCRIPTION.format(number))
    client = local_client(LocalConf(model_config=str(number), ir_optim=number == 1), [], None)
    y = client.predict({"x": np.array([[1, 0]]), "z": np.ones((1, 1))})["y"]
    found[number] = [y.dtype.name, y.tolist()]
print("\\n" + json.dumps(found))
"""


def in_paddle(script, order, folder):
    """What a script prints in its last line in the environment of Paddle."""
    if sys.version_info >= (3, 14) and not PADDLE.exists():
        pytest.skip("Paddle has no wheels for this Python")
    ran = subprocess.run(
        [PADDLE, "-W", "ignore", "-c", script],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.fixture
def uci_forms(tmp_path):
    """The same model with a file for each parameter, with one for all, and under the names of later versions."""
    uci = uci_folder()
    together = b"".join((uci / name).read_bytes() for name in ("fc_0.b_0", "fc_0.w_0"))
    forms = {"first": ("__model__", "__params__"), "later": ("uci.pdmodel", "uci.pdiparams")}
    for name, (program, parameters) in forms.items():
        (tmp_path / name).mkdir()
        shutil.copy(uci / "__model__", tmp_path / name / program)
        (tmp_path / name / parameters).write_bytes(together)
        shutil.copy(uci / "serving_server_conf.prototxt", tmp_path / name)
    return [str(uci), *(str(tmp_path / name) for name in forms)]


@pytest.mark.slow
def test_house_prices_from_paddle(tmp_path, uci_forms):  # P104, P109
    order = {
        "folders": uci_forms,
        "conf": {"thread_num": 3, "use_mkldnn": True, "ir_optim": True},
        "rows": [[HOUSE], [HOUSE, HOUSE]],
    }
    found, threads, refused = in_paddle(PADDLE_SCRIPT, order, tmp_path)
    price = pytest.approx(PRICE, abs=1e-5)
    assert found == [[[[price]], [[price], [price]]]] * 3
    assert threads == 3
    assert refused[0] == 9000
    assert "second dimension is 3" in refused[1]


@pytest.mark.slow
def test_paddles_newest_format_with_every_type_it_feeds(tmp_path):  # P109
    uci_folder()  # skips without the environment
    numbers = [number for number in TYPES if number not in {4, 6, 20}]  # it makes an int32 of an int16
    found = in_paddle(NEWEST_SCRIPT, numbers, tmp_path)
    assert found == {str(number): [TYPES[number], [[1], [0]]] for number in numbers}


# ---------------------------------------------------------------------------------------------------------------------
# A process that is started for the model


@pytest.fixture
def hosted(model):
    made = []

    def make(**conf):
        made.append(local(model, client_type="brpc", **conf))
        return made[-1]

    yield make
    for client in made:
        client.close()


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def pids_of(client):
    return client._host.value.pids


def test_a_model_service_is_started_where_there_are_no_endpoints(hosted, eventually):  # P113
    client = hosted()
    found = client.predict({"x": X}, log_id=7)
    np.testing.assert_array_equal(found["price"], PRICES)
    assert found["price"].dtype == np.float32
    assert sorted(client.feed_names_) == ["x"]
    (pid,) = pids_of(client)
    again = hosted()  # the next thread of the op
    assert pids_of(again) == [pid]
    again.close()
    assert is_running(pid)
    with pytest.raises(ForebayError) as caught:
        client.predict({"x": X[:, :2]})
    assert number_of(caught) == 9000
    # It is started again when it dies, and those who ask then wait for it.
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: pids_of(client) not in ([pid], []), "a new process")
    np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)
    # The last one that closes its client ends it.
    (pid,) = pids_of(client)
    client.close()
    eventually(lambda: not is_running(pid), "the end of the process")


def test_a_model_service_that_cannot_be_started_again_says_why_and_nobody_waits_for_it(tmp_path, eventually):  # P113
    folder = onnx_model(tmp_path / "model")
    conf = LocalConf(model_config=str(folder), client_type="brpc")
    settings = PredictorSettings(name="uci", local_service_conf=conf, timeout_ms=300)
    client = client_for(settings, concurrency_idx=None, process=False)

    def answer():
        try:
            return client.predict({"x": X})["price"].tolist()
        except ForebayError as error:
            return (error.detail or {}).get("err_no"), str(error)

    try:
        eventually(lambda: answer() == PRICES.tolist(), "an answer in time")
        (folder / "model.onnx").rename(tmp_path / "good")
        (folder / "model.onnx").write_text("no model")
        os.kill(pids_of(client)[0], signal.SIGKILL)
        eventually(lambda: "model.onnx cannot be loaded" in str(answer()), "the reason in place of what waits in vain")
        assert answer()[0] == 9000
        (tmp_path / "good").rename(folder / "model.onnx")
        eventually(lambda: answer() == PRICES.tolist(), "a new process")
    finally:
        client.close()


def test_the_first_call_of_a_model_service_may_take_long(monkeypatch, eventually):  # P113
    monkeypatch.setattr(model_processes, "STUCK_S", 0.2)
    conf = LocalConf(model_config=f"{REFERENCE}:warms_up", client_type="brpc")
    settings = PredictorSettings(name="uci", local_service_conf=conf, timeout_ms=300)
    client = client_for(settings, concurrency_idx=None, process=False)

    def answer():
        with contextlib.suppress(ForebayError):
            return client.predict({"x": X}, ["pid"])

    try:
        assert answer() is None
        eventually(answer, "an answer of the same process")
    finally:
        client.close()


@pytest.mark.parametrize("how", ["stopped", "in a call"])
def test_a_model_service_that_hangs_is_replaced_once_nobody_waits_for_it(monkeypatch, eventually, how):  # P88, P113
    monkeypatch.setattr(model_processes, "STUCK_S", 0.2)
    conf = LocalConf(model_config=f"{REFERENCE}:hangs", client_type="brpc")
    settings = PredictorSettings(name="uci", local_service_conf=conf, timeout_ms=300)
    client = client_for(settings, concurrency_idx=None, process=False)

    def pid_told():
        with contextlib.suppress(ForebayError):
            return client.predict({"x": X}, ["pid"])["pid"][0]

    try:
        pid = int(eventually(pid_told, "an answer in time"))
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(ForebayError) as late:
            client.predict({"x": X if how == "stopped" else -X}, ["y"])
        assert number_of(late) == 6000
        eventually(lambda: not is_running(pid), "the end of the process")
        eventually(lambda: pid_told() not in (pid, None), "an answer of the next one")
    finally:
        client.close()


def test_a_model_service_gives_all_results_where_nobody_names_any(tmp_path):  # P109, P113
    undescribed = onnx_model(tmp_path / "plain", described=False)
    for model, feed, wanted in (undescribed, "in", {"out", "twice"}), (f"{REFERENCE}:twice", "x", {"y", "pid"}):
        client = local(model, client_type="brpc")
        try:
            found = client.predict({feed: X})
            assert set(found) == wanted
            assert {value.shape[0] for name, value in found.items() if name != "pid"} == {2}
            (one,) = sorted(wanted)[:1]
            assert set(client.predict({feed: X}, fetch=[one])) == {one}
        finally:
            client.close()


def test_one_process_for_each_device(hosted, caplog, eventually):  # P113
    client = hosted(devices="0,1")
    pids = pids_of(client)
    assert len(set(pids)) == 2
    for _ in range(2):
        np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)


def test_a_model_service_that_cannot_start_stops_the_start(tmp_path):  # P113
    with pytest.raises(ConfigError, match="holds no model"):
        local(tmp_path, client_type="grpc")


HOSTING = """
import os, sys, time
from forebay.surfaces.pipeline.predictors.model_processes import take_host
from forebay.surfaces.pipeline.predictors.model_settings import LocalConf
host = take_host(LocalConf(model_config=sys.argv[1], client_type="brpc"), None)
print(host.value.pids[0], flush=True)
time.sleep(60)
"""


def test_a_model_service_dies_with_its_parent(model, eventually):  # P113
    with subprocess.Popen([sys.executable, "-c", HOSTING, str(model)], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_running(pid)
        finally:
            parent.kill()
    eventually(lambda: not is_running(pid), "the end of the model service")


# ---------------------------------------------------------------------------------------------------------------------
# LocalServiceHandler


def test_a_handler_serves_a_local_model(model):  # P37
    handler = LocalServiceHandler(str(model), fetch_names=["price"], thread_num=1, use_profile=True)
    handler.prepare_server()
    handler.start_server()
    assert handler.get_port_list() == []
    assert handler.get_fetch_list() == ["price"]
    assert Path(handler.get_client_config()) == model / "serving_server_conf.prototxt"
    first, second = handler.get_client(0), handler.get_client(1)
    assert first is not second
    assert list(first.predict(feed={"x": X}, fetch=None, batch=True, log_id=0)) == ["price"]
    assert LocalServiceHandler(str(model)).get_fetch_list() == ["price", "doubled"]


def test_a_handler_starts_a_process_for_its_model(model):  # P37, P113
    handler = LocalServiceHandler(str(model), "brpc")
    handler.prepare_server()
    handler.start_server()
    client = handler.get_client(None)
    (port,) = handler.get_port_list()
    assert port > 0
    np.testing.assert_array_equal(client.predict({"x": X})["price"], PRICES)
    client.close()
    handler.close()
    assert handler.get_port_list() == []


def test_a_handler_is_refused_what_a_configuration_is(model):  # P108
    with pytest.raises(ConfigError, match="did you mean 'local_predictor'"):
        LocalServiceHandler(str(model), client_type="local")


def test_weights_are_as_the_tests_say(model):
    assert local_client(LocalConf(model_config=str(model)), [], None).predict({"x": np.eye(3)})["price"].tolist() == (
        WEIGHTS.tolist()
    )


# ---------------------------------------------------------------------------------------------------------------------
# In a pipeline

SCRIPT = """
import os
import numpy as np
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Price(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {"x": np.array([given["x"].split(",")], dtype="float32")}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"price": str(float(fetch_data["price"][0, 0])), "pid": str(os.getpid())}, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp([Price(name="price", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


def asked(server):
    answer = server.client.post("/svc/prediction", json={"key": ["x"], "value": ["1,2,3"]}).json()
    assert answer["err_no"] == 0, answer
    return dict(zip(answer["key"], answer["value"], strict=True))


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
@pytest.mark.parametrize("client_type", ["local_predictor", "brpc"])
def test_an_op_of_a_pipeline_has_its_model(pipeline, model, threads, client_type):  # P36, P109, P111, P113
    conf = {"model_config": str(model), "fetch_list": ["price"], "client_type": client_type}
    server = pipeline(
        SCRIPT,
        {"dag": {"is_thread_op": threads}, "op": {"price": {"concurrency": 2, "local_service_conf": conf}}},
    )
    for _ in range(4):
        found = asked(server)
        assert float(found["price"]) == PRICES[0, 0]
        assert (int(found["pid"]) == server.process.pid) is threads


@pytest.mark.parametrize(
    "op, said",
    [
        ({"client_type": "grcp", "server_endpoints": ["127.0.0.1:1"]}, "did you mean 'grpc'"),  # P108
        ({"local_service_conf": {"model_config": "none"}}, "which does not exist"),
    ],
)
def test_a_model_that_cannot_be_had_stops_the_start(pipeline, op, said):
    server = pipeline(SCRIPT, {"op": {"price": op}}, ready=False)
    assert server.wait() != 0
    assert said in server.log
    assert "price" in server.log
