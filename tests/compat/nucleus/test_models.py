# SPDX-License-Identifier: Apache-2.0
"""Models of Python handlers: section 6 of the specification, against a real S3 server."""

import asyncio
import contextlib
import gc
import os
import random
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.buckets import FORBIDDEN, GONE, Faults, running_buckets
from tests.circles import left_in_circles
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ModelError
from forebay.server.config import RepositoryConfig
from forebay.surfaces.nucleus import handler_models
from forebay.surfaces.nucleus.config import read_config
from forebay.surfaces.nucleus.handler import _check_models, constructor_arguments
from forebay.surfaces.nucleus.handler_models import HandlerModels, ModelRules
from forebay.surfaces.nucleus.logs import logger
from forebay.surfaces.nucleus.model_store import ModelStore, source_for
from forebay.surfaces.nucleus.shim import UserRuntimeException
from forebay.surfaces.nucleus.worker_requests import Desk, DeskClient


@pytest.fixture(scope="module")
def buckets(tmp_path_factory):
    with running_buckets(tmp_path_factory.mktemp("store")) as found:
        yield found


@pytest.fixture
def bucket(buckets, tmp_path, monkeypatch):
    """The address of a bucket of the test's own, which this process finds."""
    for name, value in buckets.environment().items():
        monkeypatch.setenv(name, value)
    name = f"models-{abs(hash(tmp_path)) % 10**8}"
    buckets.make(name)
    return name


class Model:
    def __init__(self, folder):
        self.folder = Path(folder)
        files = sorted(file for file in self.folder.rglob("*") if file.is_file())
        self.files = {file.relative_to(self.folder).as_posix(): file.read_text() for file in files}


def _elsewhere(function):
    """Calls a function as another call of the handler would: in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(function).result(PATIENCE_S)


class Served:
    """A store and one worker's client of it, as the server and a worker have them."""

    def __init__(self, folder, models, poll_s):
        (folder / "handler.py").touch()
        config = {"type": "python", "path": "handler.py", "multi_model_reloading": models}
        (folder / "nucleus.yaml").write_text(yaml.safe_dump(config))
        self.models: Any = read_config(folder / "nucleus.yaml")[0].served_models
        assert self.models is not None
        self.folder = folder
        self.loaded = []
        self.load = Model
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.desk = Desk()
        self.path = self.run(self.desk.open())
        source = source_for(self.models, folder)
        size, looks = self.models.disk_cache_size, RepositoryConfig(poll_s=poll_s)
        self.store = ModelStore(source, folder / "kept", self.desk, disk_cache_size=size, looks=looks)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def start(self):
        self.run(self.store.start())
        kinds: list[Any] = [kind for kind in ("path", "paths", "dir") if getattr(self.models, kind)]
        names = tuple(one.name for one in self.models.paths or ())
        rules = ModelRules(kind=kinds[0], names=names, cache_size=self.models.cache_size)
        link = DeskClient(self.path)
        self.client = HandlerModels(rules, link)
        self.client.bind(self.load_model)
        link.start()
        self.get = self.client.get_model
        return self

    def load_model(self, model_path):
        self.loaded.append(model_path)
        return self.load(model_path)

    def kept(self):
        """What lies whole on the disk."""
        whole = []
        for one in (self.folder / "kept" / "0").iterdir():
            if one.is_dir() and not one.name.startswith(("coming-", "leaving-")):
                with contextlib.suppress(FileNotFoundError):  # it leaves just now
                    whole += [at for at in one.glob("*/*") if at.is_dir()]
        return sorted(f"{at.parent.name}/{at.name}" for at in whole)

    def stop(self):
        self.store.stop()
        self.loop.call_soon_threadsafe(self.desk.close)


@pytest.fixture
def served(tmp_path):
    made = []

    def make(models, *, start=True, poll_s=0.2):
        made.append(Served(tmp_path, models, poll_s))
        return made[-1].start() if start else made[-1]

    yield make
    for one in made:
        one.stop()


def refused(get, *arguments):
    with pytest.raises(UserRuntimeException) as caught:
        get(*arguments)
    return str(caught.value)


# Which one


def test_one_model(buckets, bucket, served):
    # N97, N105, N106, N116, N118, N119
    buckets.put(f"{bucket}/iris/model.pkl", b"iris")
    buckets.put(f"{bucket}/iris/below/more", b"more")
    buckets.put(f"{bucket}/iris-2/model.pkl", b"another")
    one = served({"path": f"s3://{bucket}/iris/"})
    model = one.get()
    assert one.get("zzz") is model
    assert model.files == {"model.pkl": "iris", "below/more": "more"}
    assert model.folder.is_absolute()
    assert model.folder.parts[-2:] == ("_cortex_default", "1")
    (told,) = one.store.info()["model_metadata"].items()
    assert told[0] == "_cortex_default"
    assert told[1]["versions"] == ["1"]
    assert [type(stamp) for stamp in told[1]["timestamps"]] == [int]


def test_models_by_name(buckets, bucket, served):
    # N98, N100, N113, N118
    buckets.put(f"{bucket}/a/model", b"a")
    buckets.put(f"{bucket}/my-net-v2.1/3/model", b"b")
    paths = [{"name": name, "path": f"s3://{bucket}/{name}"} for name in ("a", "my-net-v2.1", "none")]
    many = served({"paths": paths})
    assert many.get("a").files == {"model": "a"}
    assert many.get("my-net-v2.1", "3").folder.parts[-2:] == ("my-net-v2.1", "3")
    names = "['a', 'my-net-v2.1', 'none']"
    text = f"error: model_name was not specified, choose one of the following: {names}: runtime exception"
    assert refused(many.get) == text
    assert "'x' model wasn't found in the list of available models" in refused(many.get, "x")
    gone = "'none' model's versions have been removed; add at least a version to the model to resume operations"
    assert gone in refused(many.get, "none")
    # N114: what was not there at the start
    buckets.put(f"{bucket}/none/1/model", b"now")
    eventually(lambda: "none" in many.store.info()["model_metadata"] and many.client._models.get("none"))
    assert many.get("none").files == {"model": "now"}


def test_models_of_a_folder(buckets, bucket, served):
    # N99, N101, N102, N103, N117
    for path in (
        "iris/9/a",
        "iris/10/a",
        "iris/007/a",
        "plain/a",
        "mixed/1/a",
        "mixed/README",
        "minus/-5/a",
        "loose.txt",
    ):
        buckets.put(f"{bucket}/{path}", path.encode())
    many = served({"dir": f"s3://{bucket}/"})
    assert {name: told["versions"] for name, told in many.store.info()["model_metadata"].items()} == {
        "iris": ["007", "9", "10"], "plain": ["1"], "mixed": ["1"], "minus": ["1"],
    }  # fmt: skip
    assert many.get("iris").files == {"a": "iris/10/a"}
    for latest in (None, "", "latest", "10", 10):
        assert many.get("iris", latest) is many.get("iris")
    assert many.get("iris", "007") is many.get("iris", 7)
    assert many.get("iris", "7").files == {"a": "iris/007/a"}
    assert many.get("mixed").files == {"1/a": "mixed/1/a", "README": "mixed/README"}
    assert "model_name was not specified: runtime" in refused(many.get)
    assert "model_version must be either a parse-able numeric value or 'latest'" in refused(many.get, "iris", "x")
    assert "model iris of version 3 wasn't found" in refused(many.get, "iris", "3")
    assert "'x' model wasn't found in the list of available models" in refused(many.get, "x")
    assert "'../iris' model wasn't found" in refused(many.get, "../iris")


def test_a_folder_here(served, tmp_path):
    # N117
    (tmp_path / "models" / "iris" / "1").mkdir(parents=True)
    (tmp_path / "models" / "iris" / "1" / "a").write_text("a")
    for place in ("models", str(tmp_path / "models"), f"file://{tmp_path}/models"):
        here = served({"dir": place})
        eventually(lambda here=here: here.client._models)
        assert here.get("iris").files == {"a": "a"}
        here.stop()


def test_a_model_that_cannot_be_loaded_leaves_nothing_in_a_circle(served, tmp_path, monkeypatch):
    monkeypatch.setattr(logger, "disabled", True)  # pytest would keep what is logged
    (tmp_path / "models" / "iris" / "1").mkdir(parents=True)
    (tmp_path / "models" / "iris" / "1" / "a").write_text("a")
    here = served({"dir": "models"})
    eventually(lambda: here.client._models)
    here.load = lambda folder: 1 / 0

    def ask():
        with pytest.raises(UserRuntimeException):
            here.get("iris")

    ask()
    with left_in_circles() as left:
        for _ in range(20):
            ask()
    assert len(left) < 20, sorted(set(left))


# What the server says while handlers ask


class Hearsay:
    """A desk whose server is the test; it has every folder at once."""

    def __init__(self):
        self.told: dict[str, Any] = {}
        self.on_end = []

    def ask(self, kind, *what):
        if kind == "take":
            self.told["taken"](what[0], f"folder of {what[1]}")


class Interrupted(str):  # noqa: SLOT000
    """A name; when it has been looked up a few times, another thread has its turn."""

    after: int
    interruption: Any

    def __new__(cls, text, after, interruption):
        name = super().__new__(cls, text)
        name.after, name.interruption = after, interruption
        return name

    def __hash__(self):
        self.after -= 1
        if self.after == -1:
            _elsewhere(self.interruption)
        return super().__hash__()


def _client(*names):
    desk: Any = Hearsay()
    client = HandlerModels(ModelRules(kind="dir"), desk)
    client.bind(str)
    desk.told["catalog"]({name: [["1", f"{name}1", 1]] for name in names})
    return client, desk.told["catalog"]


@pytest.mark.parametrize("after", range(6))
def test_a_model_that_leaves_while_it_is_looked_up_is_still_given(after):
    client, told = _client("a", "b")
    name = Interrupted("a", after, lambda: told({"b": [["1", "b1", 1]]}))
    assert client.get_model(name) == "folder of a1"
    assert name.after < 0
    assert "wasn't found" in refused(client.get_model, "a")


@pytest.mark.parametrize("after", range(2))
def test_a_catalog_is_taken_in_while_another_thread_loads_a_model(after):
    client, told = _client("a", "b")
    name = Interrupted("a", 1000, lambda: client.get_model("b"))
    client.get_model(name)
    name.after = after
    told({"b": [["1", "b1", 1]]})
    assert name.after < 0 or after > 0  # how often a key is hashed is the interpreter's own affair
    assert client.get_model("b") == "folder of b1"
    assert "wasn't found" in refused(client.get_model, "a")


def test_what_the_server_says_does_not_end_the_thread_that_hears_it(served, tmp_path, caplog):
    one = served({"dir": str(tmp_path)}, start=False)
    link, heard = DeskClient(one.path), threading.Event()
    link.told = {"catalog": lambda _models: {}["no such thing"], "good": heard.set}
    link.start()
    (visitor,) = eventually(lambda: one.desk.visitors)
    one.loop.call_soon_threadsafe(visitor.tell, "good")
    assert heard.wait(PATIENCE_S)
    assert "KeyError: 'no such thing'" in caplog.text


# Loading


def test_who_asks_at_the_same_time_shares_one_load(buckets, bucket, served, parallel):
    # N106
    buckets.put(f"{bucket}/a/model", b"a")
    buckets.put(f"{bucket}/b/model", b"b")
    many = served({"dir": f"s3://{bucket}"})
    begun, go = threading.Event(), threading.Event()

    def load(folder):
        if folder.endswith("a/1"):
            begun.set()
            assert go.wait(PATIENCE_S)
        return Model(folder)

    def ask(number):
        if number < 7:
            return many.get("a")
        begun.wait(PATIENCE_S)
        other = many.get("b")
        go.set()
        return other

    many.load = load
    found = parallel(ask, range(8))
    assert len(set(found[:7])) == 1
    assert sorted(Path(path).parent.name for path in many.loaded) == ["a", "b"]


def test_a_load_that_fails_is_tried_again_and_may_give_none(buckets, bucket, served):
    # N107
    buckets.put(f"{bucket}/iris/model", b"a")
    one = served({"path": f"s3://{bucket}/iris"})

    def fail(_folder):
        raise KeyError("weights")

    one.load = fail
    text = refused(one.get)
    assert "failed (re-)loading model _cortex_default of version 1 (thread " in text
    assert "weights" in text
    one.load = lambda _folder: None
    assert one.get() is None
    assert one.get() is None
    assert len(one.loaded) == 2


def test_a_model_that_is_there_asks_nobody(buckets, bucket, served, monkeypatch):
    # N123: 10,000 times one of 50, each in less than 100 us, and no file is opened or locked for it
    names = [f"m{number}" for number in range(50)]
    for name in names:
        buckets.put(f"{bucket}/{name}/1/model", b"a")
    many = served({"dir": f"s3://{bucket}", "cache_size": 50, "disk_cache_size": 50})
    models = [many.get(name) for name in names]
    opened: list[Any] = []
    sys.addaudithook(lambda event, told: opened.append(told) if event in {"open", "fcntl.flock"} and spied() else None)
    me, is_spied = threading.get_ident(), True

    def spied():
        return is_spied and threading.get_ident() == me

    monkeypatch.setattr(many.client._desk, "ask", None)
    started = time.thread_time()
    for _ in range(200):
        for name, model in zip(names, models, strict=True):
            assert many.get(name) is model
    took_s, is_spied = time.thread_time() - started, False
    assert took_s < 1.0
    assert opened == []


# Changes


def test_changes_are_seen_and_a_broken_one_leaves_the_old_model(buckets, bucket, served):
    # N107, N109, N110, N112, N113
    buckets.put(f"{bucket}/iris/1/model", b"one")
    buckets.put(f"{bucket}/other/1/model", b"other")
    many = served({"dir": f"s3://{bucket}"})
    first, other = many.get("iris"), many.get("other")
    buckets.put(f"{bucket}/iris/2/model", b"two")
    eventually(lambda: many.get("iris").files == {"model": "two"})
    assert many.get("iris", "1") is first
    many.load = lambda _folder: 1 / 0
    second = many.get("iris")
    buckets.put(f"{bucket}/iris/2/model", b"TWOS")
    eventually(lambda: len(many.loaded) == 3 or not many.get("iris"))
    eventually(lambda: many.get("iris") is second and len(many.loaded) > 3)
    many.client._failed.clear()
    many.load = Model
    assert many.get("iris").files == {"model": "TWOS"}
    buckets.remove(f"{bucket}/iris/1/model")
    eventually(lambda: "1" not in many.store.info()["model_metadata"]["iris"]["versions"])
    gone = weakref.ref(first)
    del first
    eventually(lambda: gc.collect() is None or gone() is None)
    buckets.remove(f"{bucket}/iris/2/model")
    eventually(lambda: "iris" not in many.client._models)
    assert "'iris' model wasn't found" in refused(many.get, "iris")
    assert many.get("other") is other


def test_a_store_that_fails_changes_nothing(buckets, bucket, served, monkeypatch):
    # N59, N111, N115
    buckets.put(f"{bucket}/iris/1/model", b"one")
    faults = Faults(buckets.port)
    for name, value in buckets.environment(faults.port).items():
        monkeypatch.setenv(name, value)
    faults.fault = lambda _method, _path: (403, FORBIDDEN)
    one = served({"path": f"s3://{bucket}/iris"}, start=False)
    starting = asyncio.run_coroutine_threadsafe(one.store.start(), one.loop)
    eventually(lambda: len(faults.seen) > 1)
    assert not starting.done()
    starting.cancel()
    faults.fault = lambda _method, _path: None
    one.folder.joinpath("kept").rename(one.folder / "first")
    one.start()
    model = one.get()
    faults.fault = lambda _method, path: (403, FORBIDDEN) if "model" in path else None
    buckets.put(f"{bucket}/iris/1/model", b"twos")
    seen = len(faults.seen)
    eventually(lambda: any("model" in path for _, path in faults.seen[seen:]))
    assert one.get() is model
    faults.fault = lambda _method, _path: None
    eventually(lambda: one.get().files == {"model": "twos"})
    faults.close()


def test_a_defect_of_the_store_is_told_to_who_waits_for_a_model(served, tmp_path, monkeypatch):
    (tmp_path / "models/iris/1").mkdir(parents=True)
    (tmp_path / "models/iris/1/model").write_text("one")
    one = served({"dir": str(tmp_path / "models"), "cache_size": 1, "disk_cache_size": 1})

    def broken(_revision):
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(one.store, "_fetch", broken)
        assert "the server could not bring it" in refused(one.get, "iris")
    assert one.get("iris").files == {"model": "one"}


def test_a_store_that_says_nothing_is_not_waited_for_without_end(served, tmp_path, monkeypatch):
    (tmp_path / "models/iris/1").mkdir(parents=True)
    (tmp_path / "models/iris/1/model").write_text("one")
    one = served({"dir": str(tmp_path / "models"), "cache_size": 1, "disk_cache_size": 1})
    late, released = [], []
    take, release = one.desk.asked["take"], one.desk.asked["release"]
    monkeypatch.setitem(one.desk.asked, "take", lambda *asked: late.append(asked))
    monkeypatch.setitem(one.desk.asked, "release", lambda *asked: (released.append(asked), release(*asked)))
    monkeypatch.setattr(handler_models, "ANSWER_S", 0.01)
    assert "no answer" in refused(one.get, "iris")
    eventually(lambda: late)
    one.loop.call_soon_threadsafe(take, *late[0])  # what comes all the same is given back
    eventually(lambda: released)


def test_two_edits_within_a_second_and_an_older_file_that_is_gone(served, tmp_path):
    # N109, N110: length, and time in whole seconds, are the same; or the newest file is
    there = tmp_path / "models" / "iris" / "1"
    there.mkdir(parents=True)

    def write(name, text, at):
        coming = tmp_path / "coming"
        coming.write_text(text)
        os.utime(coming, (at, at))
        coming.rename(there / name)

    write("model", "one", 1_000_000_000.0)
    one = served({"path": "models/iris"})
    assert one.get().files == {"model": "one"}
    write("model", "two", 1_000_000_000.2)
    write("model", "six", 1_000_000_000.4)
    eventually(lambda: one.get().files == {"model": "six"})
    write("old", "older", 900_000_000.0)
    eventually(lambda: one.get().files == {"model": "six", "old": "older"})
    (there / "old").unlink()
    eventually(lambda: one.get().files == {"model": "six"})


def test_what_is_being_loaded_stays_as_it_is(buckets, bucket, served):
    # N111: a new version of the same number is here, and published, before the slow load of the old one ends
    buckets.put(f"{bucket}/iris/1/a", b"old")
    buckets.put(f"{bucket}/iris/1/b", b"old")
    one = served({"dir": f"s3://{bucket}"})
    begun, go = threading.Event(), threading.Event()

    def load(folder):
        begun.set()
        assert go.wait(PATIENCE_S)
        return Model(folder)

    one.load = load
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(one.get, "iris")
        assert begun.wait(PATIENCE_S)
        before = one.client._models["iris"]
        buckets.put(f"{bucket}/iris/1/a", b"newer")
        buckets.put(f"{bucket}/iris/1/b", b"newer")
        eventually(lambda: one.client._models["iris"] != before)
        go.set()
        assert loading.result(PATIENCE_S).files == {"a": "old", "b": "old"}
    eventually(lambda: one.get("iris").files == {"a": "newer", "b": "newer"})


def test_a_version_that_is_removed_while_a_call_uses_it(buckets, bucket, served):
    # N109, N113: the call keeps model and files; the next one is told
    for version in "12":
        buckets.put(f"{bucket}/iris/{version}/model", version.encode())
    one = served({"dir": f"s3://{bucket}"})
    one.client.begin()
    model = one.get("iris", 2)
    buckets.remove(f"{bucket}/iris/2/model")
    eventually(lambda: 2 not in one.client._models["iris"])
    assert "model iris of version 2 wasn't found" in refused(one.get, "iris", "2")
    assert one.get("iris").files == {"model": "1"}
    eventually(lambda: len(one.store._held) == 1)
    assert Model(model.folder).files == {"model": "2"}
    one.client.end()
    eventually(lambda: one.kept() == ["iris/1"])


def test_a_store_that_fails_at_the_second_file(buckets, bucket, served, monkeypatch):
    # N111, N115: the old files stay together until all new ones have come; half of them is nowhere
    faults = Faults(buckets.port)
    for name, value in buckets.environment(faults.port).items():
        monkeypatch.setenv(name, value)
    for name in "ab":
        buckets.put(f"{bucket}/iris/1/{name}", b"old")
    one = served({"path": f"s3://{bucket}/iris"})
    assert one.get().files == {"a": "old", "b": "old"}
    faults.fault = lambda _method, path: (404, GONE) if path.partition("?")[0].endswith("/b") else None
    seen = len(faults.seen)
    for name in "ab":
        buckets.put(f"{bucket}/iris/1/{name}", b"newer")
    eventually(lambda: sum(path.endswith("/b") for _, path in faults.seen[seen:]) > 1)
    assert one.get().files == {"a": "old", "b": "old"}
    assert Model(one.get().folder).files == {"a": "old", "b": "old"}
    faults.fault = lambda _method, _path: None
    eventually(lambda: one.get().files == {"a": "newer", "b": "newer"})
    faults.close()


# Caching


def test_models_that_evict_each_other_while_calls_use_them(buckets, bucket, served, parallel):
    # N120, N121: room for two of three, four callers: what a call has stays whole, and there are never more than two
    for name in "abc":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    many = served({"dir": f"s3://{bucket}", "cache_size": 2, "disk_cache_size": 2})
    in_memory: set[int] = set()

    class Counted(Model):
        def __init__(self, folder):
            super().__init__(folder)
            in_memory.add(id(self))

        def __del__(self):
            in_memory.discard(id(self))

    many.load = Counted
    together = threading.Barrier(4)

    def call(number):
        picked = random.Random(number)
        together.wait(PATIENCE_S)
        for _ in range(40):
            name = picked.choice("abc")
            many.client.begin()
            try:
                model = many.get(name)
                assert model.files == Model(model.folder).files == {"model": name}
                assert len(in_memory) <= 3  # what calls use at the same time is there, also beyond the limit
                del model
            finally:
                many.client.end()

    parallel(call, range(4))
    gc.collect()
    assert len(in_memory) <= 2
    eventually(lambda: len(many.kept()) <= 2)
    assert len(many.loaded) > 3


def test_calls_may_use_more_models_than_are_kept(buckets, bucket, served):
    # N121, F102: the original counts every ten seconds and takes as many as come in between
    for name in "abc":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    many = served({"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1})
    many.client.begin()
    one, two = many.get("a"), many.get("b")
    _elsewhere(lambda: many.get("c"))
    assert [Model(each.folder).files for each in (one, two)] == [{"model": "a"}, {"model": "b"}]
    many.client.end()
    eventually(lambda: len(many.kept()) == 1)
    assert many.get("c").files == {"model": "c"}


def test_a_cached_model_that_changes_while_a_call_uses_it(buckets, bucket, served):
    # N122: its successor has room although it is still in use
    buckets.put(f"{bucket}/a/1/model", b"one")
    many = served({"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1})
    many.client.begin()
    old = many.get("a")
    buckets.put(f"{bucket}/a/1/model", b"two-two")
    assert _elsewhere(lambda: eventually(lambda: many.get("a").files == {"model": "two-two"}))
    assert Model(old.folder).files == {"model": "one"}
    many.client.end()
    assert many.get("a").files == {"model": "two-two"}
    eventually(lambda: many.kept() == ["a/1"])


def test_the_cache_keeps_what_was_used_last(buckets, bucket, served):
    # N120, N121, N122
    for name in "abc":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    many = served({"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 2})
    assert many.kept() == []
    assert set(many.store.info()["model_metadata"]) == {"a", "b", "c"}
    gone = weakref.ref(many.get("a"))
    for name in ("b", "a", "c"):
        assert many.get(name).files == {"model": name}
        if name == "b":
            gc.collect()
            assert gone() is None
    assert [Path(path).parent.name for path in many.loaded] == ["a", "b", "a", "c"]
    eventually(lambda: many.kept() == ["a/1", "c/1"])
    assert "'x' model of tag latest wasn't found in the list of available models" in refused(many.get, "x")
    buckets.put(f"{bucket}/c/1/model", b"CC")
    eventually(lambda: many.get("c").files == {"model": "CC"})
    gone = weakref.ref(many.get("c"))
    buckets.remove(f"{bucket}/c/1/model")
    eventually(lambda: gc.collect() is None or gone() is None)
    eventually(lambda: "c/1" not in many.kept())


def test_what_was_changed_since_the_last_look_is_looked_at_again(buckets, bucket, served):
    # N122: what is cached no longer is not there any more as it was listed, and the next look is far away
    for name in "abc":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    many = served({"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1}, poll_s=3600)
    assert many.get("a").files == {"model": "a"}
    assert many.get("b").files == {"model": "b"}
    buckets.put(f"{bucket}/a/1/model", b"newer")
    buckets.remove(f"{bucket}/c/1/model")
    assert many.get("a").files == {"model": "newer"}
    assert "'c' model wasn't found" in refused(many.get, "c", "1")
    assert list(many.store.info()["model_metadata"]) == ["a", "b"]


def test_what_a_call_uses_stays_until_it_is_over(buckets, bucket, served):
    # N121
    for name in "ab":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    many = served({"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1})
    many.client.begin()
    first, second = many.get("a"), many.get("b")
    assert first.folder.exists()
    assert second.folder.exists()
    many.client.end()
    eventually(lambda: many.kept() == ["b/1"])


# Handlers


@pytest.mark.parametrize(
    "body, key, said",
    [
        ("def __init__(self, config): pass", "multi_model_reloading", '"model_client" is a required argument'),
        (
            "def __init__(self, model_client): pass",
            "multi_model_reloading",
            "required method `load_model` is not defined",
        ),
        ("def __init__(self, model_client): pass", "models", "'models' field not supported for 'python' type"),
    ],
)
def test_a_handler_that_cannot_have_models(body, key, said):
    # N16, N96
    names = {}
    exec(f"class Handler:\n    {body}", names)
    with pytest.raises(ModelError, match=said):
        _check_models(names["Handler"], constructor_arguments(names["Handler"]), key)


HANDLER = """
    import os

    class Handler:
        def __init__(self, python_client, config):
            self.client = python_client
            self.first = python_client.get_model()

        def load_model(self, model_path):
            with open(os.path.join(model_path, "model")) as file:
                return [file.read(), os.environ["CORTEX_MODEL_DIR"] in model_path]

        def handle_post(self, payload):
            return self.client.get_model(payload) + [self.first is self.client.get_model()]
"""


def test_a_server_with_models(buckets, bucket, serve):
    # N10, N16, N59, N105, N106, N108, N119, N124: the seed's own spelling; credentials in the project's own file
    faults = Faults(buckets.port)
    buckets.put(f"{bucket}/iris/model", b"iris")
    told = "\n".join(f"{name}={value}" for name, value in buckets.environment(faults.port).items())
    config = {"models": {"path": f"s3://{bucket}/iris"}, "processes": 3}
    server = serve(HANDLER, config, __env=told)
    for _ in range(4):
        assert server.request("POST", json="zzz").json() == ["iris", True, True]
    told = server.request(path="/info").json()["model_metadata"]["_cortex_default"]
    assert told["versions"] == ["1"]
    assert sum(path.endswith("/model") for _, path in faults.seen) == 1  # all have the same copy
    faults.close()


def test_a_constructor_that_asks_for_a_cached_model(buckets, bucket, serve):
    # N108, N120
    buckets.put(f"{bucket}/iris/1/model", b"iris")
    told = "\n".join(f"{name}={value}" for name, value in buckets.environment().items())
    config = {"models": {"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1}}
    server = serve(HANDLER.replace("get_model()", "get_model('iris')"), config, __env=told)
    assert server.request("POST", json="iris").json() == ["iris", True, True]


BUSY = """
    import os, time
    from pathlib import Path

    class Handler:
        def __init__(self, config, model_client):
            self.client = model_client

        def load_model(self, model_path):
            return Path(model_path, "model").read_text()

        def handle_post(self, payload):
            text = self.client.get_model(payload["model"])
            while payload.get("until") and not os.path.exists(payload["until"]):
                Path(payload["begun"]).touch()
                time.sleep(0.01)
            return text
"""


def test_a_cache_that_is_in_use_takes_another_model_all_the_same(buckets, bucket, serve, tmp_path):
    # N120, N121, F102: through the front door
    for name in "ab":
        buckets.put(f"{bucket}/{name}/1/model", name.encode())
    told = "\n".join(f"{name}={value}" for name, value in buckets.environment().items())
    caching = {"dir": f"s3://{bucket}", "cache_size": 1, "disk_cache_size": 1}
    server = serve(BUSY, {"multi_model_reloading": caching, "threads_per_process": 3}, __env=told)
    begun, until = tmp_path / "begun", tmp_path / "until"
    with ThreadPoolExecutor(1) as thread:
        long = {"model": "a", "begun": str(begun), "until": str(until)}
        running = thread.submit(lambda: server.request("POST", json=long))
        eventually(begun.exists)
        other = server.request("POST", json={"model": "b"})
        same = server.request("POST", json={"model": "a"})
        until.touch()
        assert running.result().text == "a"
    assert (other.status_code, other.text) == (200, "b")
    assert (same.status_code, same.text) == (200, "a")
    assert server.request("POST", json={"model": "b"}).text == "b"
    assert server.process.poll() is None


WATCHING = """
    import os, signal

    class Handler:
        def __init__(self, config, model_client):
            self.client = model_client

        def load_model(self, model_path):
            with open(os.path.join(model_path, "model")) as file:
                text = file.read()
            if text == "deadly":
                os.kill(os.getpid(), signal.SIGKILL)
            return text

        def handle_post(self, payload):
            try:
                return self.client.get_model(*payload)
            except Exception as error:
                return str(error)
"""


def test_a_server_follows_its_store_and_outlives_it(buckets, bucket, serve):
    # N101, N109, N112, N115, N119, N122: through the front door, with a store that is gone in the end
    faults = Faults(buckets.port)
    told = "\n".join(f"{name}={value}" for name, value in buckets.environment(faults.port).items())
    buckets.put(f"{bucket}/iris/1/model", b"one")
    config = {"multi_model_reloading": {"dir": f"s3://{bucket}"}}
    server = serve(WATCHING, config, "--repository-poll-s", "0.2", __env=told)

    def answers(text, *asked):
        with server.client() as client:
            return eventually(lambda: text in client.post("/", json=asked).text)

    answers("one", "iris")
    buckets.put(f"{bucket}/iris/2/model", b"two-two")
    answers("two-two", "iris")
    buckets.put(f"{bucket}/wine/5/model", b"five")
    answers("five", "wine", 5)
    buckets.put(f"{bucket}/iris/2/model", b"second")
    answers("second", "iris")
    buckets.remove(f"{bucket}/iris/2/model")
    answers("one", "iris")
    buckets.remove(f"{bucket}/wine/5/model")
    answers("'wine' model wasn't found in the list of available models", "wine")
    assert list(server.request(path="/info").json()["model_metadata"]) == ["iris"]
    faults.fault = lambda _method, _path: ("cut", 0)
    eventually(lambda: "retrying" in server.out.read_text() + server.err.read_text())
    assert server.request("POST", json=["iris"]).text == "one"
    faults.close()


def test_a_worker_that_dies_while_it_loads_leaves_a_whole_disk(buckets, bucket, serve, tmp_path):
    # N60, N106, N124: the server ends with it, and the next one takes over what was copied
    faults = Faults(buckets.port)
    told = "\n".join(f"{name}={value}" for name, value in buckets.environment(faults.port).items())
    buckets.put(f"{bucket}/good/1/model", b"good")
    buckets.put(f"{bucket}/bad/1/model", b"deadly")
    config = {"multi_model_reloading": {"dir": f"s3://{bucket}"}}
    server = serve(WATCHING, config, state=tmp_path / "state", __env=told)
    assert server.request("POST", json=["bad"]).status_code == 502
    assert server.process.wait(PATIENCE_S) == 128 + 9

    def copied():
        return sum(path.endswith("/model") for _, path in faults.seen)

    assert copied() == 2
    server = serve(WATCHING, config, state=tmp_path / "state", __env=told)
    assert server.request("POST", json=["good"]).text == "good"
    assert copied() == 2
    faults.close()
