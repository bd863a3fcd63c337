# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""Models whose files change while they are served: P152."""

import gc
import itertools
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.compat.pipeline.conftest import ask, post, values_of
from tests.compat.pipeline.predictor_models import REFERENCE, WEIGHTS, describe, onnx_model
from tests.ports import free_port
from tests.waiting import PATIENCE_S

from forebay.errors import ConfigError
from forebay.runtimes.signature import Signature, Value, Var
from forebay.surfaces.pipeline.fronts.pipeline_client import PipelineClient
from forebay.surfaces.pipeline.ops.op import Op, RequestOp
from forebay.surfaces.pipeline.predictors import LocalConf, LocalServiceHandler, PredictorSettings, client_for
from forebay.surfaces.pipeline.predictors.client_watching import ModelWatch, one_version, watch_of
from forebay.surfaces.pipeline.predictors.model_client import ModelClient

X = np.array([[1.0, 2.0, 3.0]], np.float32)
OLD, NEW = 321.0, 642.0
POLL_S = 0.05
THREAD = "forebay-model-watch"


@pytest.fixture(scope="module")
def old(tmp_path_factory):
    return onnx_model(tmp_path_factory.mktemp("models") / "old")


@pytest.fixture(scope="module")
def new(tmp_path_factory):
    return onnx_model(tmp_path_factory.mktemp("models") / "new", weights=2 * WEIGHTS)


@pytest.fixture
def folder(tmp_path, old):
    """A folder with the old model in it."""
    return Path(shutil.copytree(old, tmp_path / "model"))


@pytest.fixture
def watched(caplog):
    """Makes clients whose model is looked at only when the test says so: `watched(path)` gives the watch and them."""
    caplog.set_level(logging.INFO)
    made = []

    def start(path, count=1, **conf) -> Any:
        local = LocalConf(model_config=str(path), **{"model_poll_s": 3600, **conf})
        watch = watch_of("op 'price'", local)
        settings = PredictorSettings(name="price", local_service_conf=local)
        clients = [client_for(settings, concurrency_idx=None, process=False, watch=watch) for _ in range(count)]
        made.extend(clients)
        return watch, clients[0] if count == 1 else clients

    yield start
    for client in made:
        client.close()
    assert watchers() == 0


def watchers():
    return sum(thread.name == THREAD for thread in threading.enumerate())


def price(client):
    return float(client.predict({"x": X})["price"][0, 0])


def settle(watch):
    """Looks as often as it takes to see that nothing changes any more."""
    watch.look()
    watch.look()


def put(model, folder):
    """Puts another model in place, as those do who are careful: beside it, then by its name."""
    shutil.copy(model / "model.onnx", folder / ".coming")
    (folder / ".coming").rename(folder / "model.onnx")


def copy_slowly(model, folder):
    """Writes over the file that is there, piece by piece."""
    data = (model / "model.onnx").read_bytes()
    with (folder / "model.onnx").open("wb", buffering=0) as file:
        for at in range(0, len(data), 1 + len(data) // 20):
            file.write(data[at : at + 1 + len(data) // 20])
            time.sleep(POLL_S / 2)


# ---------------------------------------------------------------------------------------------------------------------
# When a change counts


def test_a_change_counts_when_two_looks_found_the_same(folder, new, watched, caplog):  # P152
    watch, client = watched(folder)
    put(new, folder)
    assert price(client) == OLD
    watch.look()
    assert price(client) == OLD
    watch.look()
    assert price(client) == NEW
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("forebay.pipeline", logging.INFO)
    assert record.getMessage().startswith(f"op 'price': replaced the model in {folder}: that of 20")
    settle(watch)
    assert len(caplog.records) == 1


def test_a_model_that_is_being_copied_is_not_read(folder, new, watched, caplog):  # P152
    watch, client = watched(folder)
    data = (new / "model.onnx").read_bytes()
    for size in range(0, len(data), 20):
        (folder / "model.onnx").write_bytes(data[:size])
        watch.look()
        assert price(client) == OLD
    (folder / "model.onnx").write_bytes(data)
    settle(watch)
    assert price(client) == NEW
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_what_changes_while_it_is_loaded_is_not_taken(folder, old, new, watched, monkeypatch):  # P152
    watch, client = watched(folder)
    put(new, folder)
    load = client.successor

    def slow():
        found = load()
        (folder / "more").write_text("a file that was still missing")
        return found

    monkeypatch.setattr(client, "successor", slow)
    settle(watch)
    assert price(client) == OLD
    monkeypatch.undo()
    settle(watch)
    assert price(client) == NEW


def switch(folder, new):
    """Leads the link to another folder."""
    (folder.parent / "next").symlink_to(new)
    (folder.parent / "next").rename(folder.parent / "link")


def touch_same_size(folder, new):
    data = (new / "model.onnx").read_bytes()
    assert len(data) == (folder / "model.onnx").stat().st_size
    (folder / "model.onnx").write_bytes(data)


def exchange(folder, new):
    """Moves one folder away and another one in."""
    folder.rename(folder.parent / "away")
    shutil.copytree(new, folder)


def link_file(folder, new):
    """Puts a link to a file of the same size and time in place."""
    about = (folder / "model.onnx").stat()
    twin = folder.parent / "twin.onnx"
    shutil.copy(new / "model.onnx", twin)
    os.utime(twin, ns=(about.st_atime_ns, about.st_mtime_ns))
    (folder / "model.onnx").unlink()
    (folder / "model.onnx").symlink_to(twin)


@pytest.mark.parametrize("change", [touch_same_size, exchange, switch, link_file], ids=lambda change: change.__name__)
@pytest.mark.parametrize("is_file", [False, True], ids=["folder", "file"])
def test_every_kind_of_change_is_noticed(folder, new, watched, change, is_file):  # P152
    (folder.parent / "link").symlink_to(folder)
    at = folder.parent / "link" if change is switch else folder
    watch, client = watched(at / "model.onnx" if is_file else at)
    settle(watch)
    assert price(client) == OLD
    change(folder, new)
    settle(watch)
    assert price(client) == NEW


def test_of_a_file_only_what_belongs_to_it_is_looked_at(folder, new, watched, caplog):  # P152
    watch, _client = watched(folder / "model.onnx")
    for name in ("other.onnx", "pipeline.log", ".model.onnx.swp"):
        (folder / name).write_text("nothing to the model")
    settle(watch)
    assert caplog.records == []
    describe(folder, feed="in")
    settle(watch)
    assert len(caplog.records) == 1


def test_every_predictor_is_replaced_and_it_is_told_once(folder, new, watched, caplog):  # P111, P152
    watch, clients = watched(folder, count=3)
    assert watchers() == 1
    put(new, folder)
    settle(watch)
    assert [price(client) for client in clients] == [NEW] * 3
    assert len(caplog.records) == 1


def test_a_batch_asks_one_model_from_start_to_end(folder, new, watched):  # P152
    watch, client = watched(folder)
    with one_version():
        assert price(client) == OLD
        put(new, folder)
        settle(watch)
        assert price(client) == OLD
    assert price(client) == NEW


# ---------------------------------------------------------------------------------------------------------------------
# What is not taken


def empty(folder):
    for file in folder.iterdir():
        file.unlink()


def ruin(folder):
    (folder / "model.onnx").write_bytes(b"no model")


def halve(folder):
    data = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(data[: len(data) // 2])


def fail_when_run(folder):
    """A model that can be loaded, of which it cannot be seen that it takes four numbers."""
    import onnx

    onnx_model(folder, weights=np.ones((4, 1), np.float32))
    model = onnx.load(folder / "model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "k"
    onnx.save(model, folder / "model.onnx")


def undescribe(folder):
    (folder / "serving_server_conf.prototxt").write_text("feed_var {")


@pytest.mark.parametrize(
    "harm", [shutil.rmtree, empty, ruin, halve, fail_when_run, undescribe], ids=lambda harm: harm.__name__
)
def test_what_is_broken_or_gone_is_told_once_and_heals_by_itself(folder, new, watched, caplog, harm):  # P152
    watch, client = watched(folder)
    assert price(client) == OLD
    harm(folder)
    for _ in range(5):
        watch.look()
        assert price(client) == OLD
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "has changed and is rejected; the served one stays" in record.getMessage()
    shutil.copytree(new, folder, dirs_exist_ok=True)
    settle(watch)
    assert price(client) == NEW
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]


def test_a_model_that_comes_back_is_not_loaded_again(folder, watched, caplog):  # P152
    watch, client = watched(folder)
    folder.rename(folder.parent / "away")
    settle(watch)
    (folder.parent / "away").rename(folder)
    settle(watch)
    settle(watch)
    assert price(client) == OLD
    assert [one.levelname for one in caplog.records] == ["WARNING", "INFO"]
    assert "is the served one again" in caplog.records[1].getMessage()


def test_what_could_not_be_loaded_is_tried_again(folder, new, watched, caplog, monkeypatch, eventually):  # P152
    _watch, client = watched(folder, model_poll_s=0.01)
    load = client.successor
    tries = itertools.count(1)

    def short_of_memory():
        if next(tries) < 4:
            raise MemoryError
        return load()

    monkeypatch.setattr(client, "successor", short_of_memory)
    put(new, folder)
    eventually(lambda: price(client) == NEW, "the new model")
    eventually(lambda: [one.levelname for one in caplog.records] == ["WARNING", "INFO"], "what is told")


def rename_feed(folder):
    describe(folder, feed="in")
    path = folder / "serving_server_conf.prototxt"
    path.write_text(path.read_text().replace('"x"', '"z"'))


def one_fetch_less(folder):
    path = folder / "serving_server_conf.prototxt"
    path.write_text(path.read_text().replace('fetch_var { name: "twice" alias_name: "doubled"', "ignored {"))


def other_type(folder):
    describe(folder, type=3)


def other_shape(folder):
    onnx_model(folder, weights=np.ones((4, 1), np.float32))


def other_file_type(folder):
    import onnx

    model = onnx.load(folder / "model.onnx")
    feed = model.graph.input[0]
    feed.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    model.graph.node.insert(0, onnx.helper.make_node("Cast", [feed.name], ["cast"], to=onnx.TensorProto.FLOAT))
    model.graph.node[1].input[0] = "cast"
    onnx.save(model, folder / "model.onnx")


@pytest.mark.parametrize(
    "change, said",
    [
        (rename_feed, "it takes z instead of x"),
        (one_fetch_less, "it gives price instead of doubled, price"),
        (other_type, "it takes 'x' as float64 instead of float32"),
        (other_shape, "it takes 'x' of the shape [4] instead of [3]"),
        (other_file_type, "it takes 'x' as float64 instead of float32"),
    ],
)
def test_a_model_that_takes_or_gives_something_else_is_refused(folder, old, new, watched, caplog, change, said):  # P152
    watch, client = watched(folder)
    change(folder)
    for _ in range(4):
        watch.look()
        assert price(client) == OLD
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith(said)
    shutil.copytree(new, folder, dirs_exist_ok=True)
    settle(watch)
    assert price(client) == NEW


class Stub:
    """A model of which nobody knows the types, as Paddle's."""

    def __init__(self, dtype):
        self._dtype = dtype

    def signature(self):
        return Signature((Var("x", "x"),), (Var("y", "y"),))

    def run(self, feed, fetch, log_id):
        return [Value(np.zeros(1, self._dtype))]

    def close(self):
        """Nothing is to be let go of."""


def test_a_model_that_answers_with_other_types_is_refused(tmp_path, caplog):  # P152
    stubs = [Stub("float32"), Stub("float64"), Stub("float32")]
    watch = ModelWatch("op 'price'", tmp_path, 3600)
    client = watch.client(lambda: ModelClient(stubs.pop(0), None, ()))
    try:
        client.predict({"x": X})
        for step, said in enumerate(["it gives 'y' as float64 instead of float32", ""]):
            (tmp_path / "model").write_text("x" * step)
            settle(watch)
            assert client.predict({"x": X})["y"].dtype == np.float32
            assert caplog.text.rstrip().endswith(said)
        assert stubs == []
    finally:
        client.close()


def test_a_predictor_that_is_made_anew_must_be_like_the_others(folder, watched):  # P88, P152
    watch, client = watched(folder)
    rename_feed(folder)
    settings = PredictorSettings(name="price", local_service_conf=LocalConf(model_config=str(folder)))
    with pytest.raises(ConfigError, match="it takes z instead of x"):
        client_for(settings, concurrency_idx=None, process=False, watch=watch)
    assert price(client) == OLD


def test_a_model_may_call_its_inputs_otherwise_behind_the_same_description(folder, watched):  # P109, P152
    watch, client = watched(folder)
    onnx_model(folder, weights=2 * WEIGHTS, names=("given", "found", "more"), described=False)
    settle(watch)
    assert price(client) == NEW


def test_a_model_that_is_broken_at_the_start_still_ends_it(folder, watched):  # P52, P152
    empty(folder)
    with pytest.raises(ConfigError, match="holds no model"):
        watched(folder)


# ---------------------------------------------------------------------------------------------------------------------
# What is not looked at


def test_models_that_are_no_files_of_the_configuration_are_not_looked_at(folder):  # P152
    assert watch_of("op", LocalConf()) is None
    assert watch_of("op", LocalConf(model_config=str(folder), model_poll_s=0)) is None
    assert watch_of("op", LocalConf(model_config=f"{REFERENCE}:twice")) is None
    client = LocalServiceHandler(str(folder)).get_client()
    assert watchers() == 0
    assert price(client) == OLD


@pytest.mark.parametrize("wrong", [-1, 1e9])
def test_a_poll_that_cannot_be_is_refused(wrong):  # P38, P152
    with pytest.raises(ConfigError, match=r"model_poll_s: expected seconds from 0 .*, got "):
        PredictorSettings.of_op("price", {"local_service_conf": {"model_poll_s": wrong}})


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_twenty_models_leave_nothing_behind(tmp_path, watched):  # P152, P153
    rows = 1_000_000  # 4 MB
    models = [
        onnx_model(tmp_path / name, weights=np.full((rows, 1), weight, np.float32), described=False)
        for name, weight in (("a", 1.0), ("b", 2.0))
    ]
    folder = Path(shutil.copytree(models[0], tmp_path / "model"))
    watch, client = watched(folder)
    feed = {"in": np.ones((1, rows), np.float32)}

    def swap(model, weight):
        put(model, folder)
        settle(watch)
        assert client.predict(feed)["out"][0, 0] == rows * weight

    def swap_often(count):
        for _ in range(count):
            swap(models[1], 2.0)
            swap(models[0], 1.0)
        gc.collect()
        return resident_bytes(), len(list(Path("/proc/self/task").iterdir()))

    before, threads = swap_often(3)
    after, threads_after = swap_often(10)
    assert threads_after <= threads  # of those that the library itself kept for a while some may have ended
    assert after - before < 40e6  # 20 models have 80 MB


def test_a_model_of_openvino_is_replaced_and_not_read_from_the_disk_any_more(tmp_path, watched):  # P152
    openvino = pytest.importorskip("openvino")
    from openvino import opset13 as ops

    def save(folder, value):
        folder.mkdir()
        row = ops.parameter([-1], dtype=np.int64, name="in")
        table = ops.constant(np.full((100_000, 8), value, np.float32))
        found = ops.gather(table, row, ops.constant(0))
        found.output(0).set_names({"out"})
        row.output(0).set_names({"in"})
        openvino.save_model(openvino.Model([found], [row], "rows"), folder / "model.xml", compress_to_fp16=False)
        return folder

    folder, new = save(tmp_path / "model", 1.0), save(tmp_path / "new", 2.0)
    watch, client = watched(folder)

    def ask():
        return set(client.predict({"in": np.array([0, 99_999])})["out"].ravel().tolist())

    assert ask() == {1.0}
    with (folder / "model.bin").open("r+b") as file:  # in place, under the model that is in use
        file.write((new / "model.bin").read_bytes())
    assert ask() == {1.0}
    settle(watch)
    assert ask() == {2.0}


# ---------------------------------------------------------------------------------------------------------------------
# In a graph


class Price(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        return {"x": X}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"price": str(float(fetch_data["price"][0, 0]))}, None, ""


class Twice(Price):
    """Asks its model before and after the test has changed it."""

    def init_op(self):
        self.asked, self.go_on = threading.Event(), threading.Event()

    def process(self, feed_batch, typical_logid):
        first = self.client.predict(feed_batch[0])["price"]
        self.asked.set()
        assert self.go_on.wait(PATIENCE_S)
        return {"price": np.stack([first, self.client.predict(feed_batch[0])["price"]])}, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"prices": str(fetch_data["price"].ravel().tolist())}, None, ""


def watching(folder, **settings):
    return {"op": {"price": {"local_service_conf": {"model_config": str(folder), "model_poll_s": POLL_S}, **settings}}}


@pytest.mark.parametrize("settings", [{}, {"timeout": 20_000}, {"share_instance": True, "concurrency": 2}], ids=str)
def test_a_request_sees_one_model_from_start_to_end(hosted, folder, new, caplog, eventually, settings):  # P54, P152
    caplog.set_level(logging.INFO)
    op = Twice(name="price", input_ops=[RequestOp()])

    async def use(service):
        import asyncio

        def change():
            assert op.asked.wait(PATIENCE_S)
            put(new, folder)
            eventually(lambda: "replaced the model" in caplog.text, "the new model")
            op.go_on.set()

        changing = asyncio.get_running_loop().run_in_executor(None, change)
        first = values_of(await ask(service, x="1"))
        await changing
        return first, values_of(await ask(service, x="1"))

    first, second = hosted(op, use, watching(folder, **settings))
    assert (first, second) == ({"prices": f"[{OLD}, {OLD}]"}, {"prices": f"[{NEW}, {NEW}]"})
    assert watchers() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Under load

SCRIPT = """
import os
import numpy as np
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Price(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (given,) = input_dicts.values()
        return {"x": np.array([given["x"].split(",")], dtype="float32")}, False, None, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"price": str(float(fetch_data["price"][0, 0]))}, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp([Price(name="price", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


class Load:
    """Clients of both ports, each asking as often as it can."""

    def __init__(self, server, rpc_port):
        self.answers = []
        self._stop = threading.Event()
        asks = [self._over_http(server)] * 3 + [self._over_grpc(rpc_port)] * 2
        self._threads = [threading.Thread(target=ask) for ask in asks]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _over_http(self, server):
        def go():
            with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
                while not self._stop.is_set():
                    found = client.post("/svc/prediction", json={"key": ["x"], "value": ["1,2,3"]}).json()
                    self.answers.append((found["err_no"], found["err_msg"], *map(float, found["value"])))

        return go

    def _over_grpc(self, port):
        def go():
            with PipelineClient(timeout=PATIENCE_S) as client:
                client.connect([f"127.0.0.1:{port}"])
                while not self._stop.is_set():
                    found = client.predict({"x": "1,2,3"}, fetch=["price"])
                    self.answers.append((found.err_no, found.err_msg, *map(float, found.value)))

        return go

    def more(self, eventually, count=20):
        """Waits until so many more requests were answered."""
        until = len(self.answers) + count
        eventually(lambda: len(self.answers) >= until, f"{count} more answers")


@pytest.mark.parametrize(
    "config, client_type",
    [
        ({}, None),
        ({"dag": {"is_thread_op": False}}, None),
        ({"build_dag_each_worker": True, "worker_num": 2}, None),
        ({}, "brpc"),
    ],
    ids=["threads", "processes", "each", "hosted"],
)
def test_no_request_notices_that_the_model_is_replaced(  # P109, P111, P113, P152
    pipeline, folder, old, new, eventually, config, client_type
):
    rpc_port = free_port()
    settings = watching(folder, concurrency=2)
    settings["op"]["price"]["local_service_conf"]["client_type"] = client_type
    server = pipeline(SCRIPT, {**config, **settings, "rpc_port": rpc_port})

    def answered():
        return float(post(server, x="1,2,3")["value"][0])

    def wait_for(price):
        eventually(lambda: all(answered() == price for _ in range(8)), f"the model that says {price}")

    with Load(server, rpc_port) as load:
        load.more(eventually)
        put(new, folder)
        wait_for(NEW)
        copy_slowly(old, folder)
        wait_for(OLD)
        shutil.rmtree(folder)
        eventually(lambda: "is rejected" in server.log, "the warning")
        load.more(eventually)
        shutil.copytree(new, folder)
        wait_for(NEW)
        load.more(eventually, max(20, 300 - len(load.answers)))
    assert set(load.answers) == {(0, "", OLD), (0, "", NEW)}
    assert load.answers[-1] == (0, "", NEW)
    assert "replaced the model in" in server.log
    server.signal()
    assert server.wait() == 0
