# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The store for values that are too large to be handed on: files in memory, files on a disk, a redis server."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ports import free_port
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import BadOutcome, ConfigError, NotFound, Unavailable
from forebay.observe.logs import throttled_log
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.store import store as stores
from forebay.surfaces.pipeline.store.redis import decode, encode
from forebay.surfaces.pipeline.store.store import Storage, StoreConfig, Stored, open_store


class RedisServer:
    """A redis server of the tests' own, which can go away and come back."""

    def __init__(self, folder):
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("no redis-server on the PATH (Debian: apt-get install redis-server)")
        self.port = free_port()
        self.command = [program, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.process = None
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        eventually(self.answers)

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as wire:
                wire.sendall(b"PING\r\n")
                return wire.recv(100).startswith(b"+PONG")
        except OSError:
            return False

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def keys(self):
        import redis

        with redis.Redis(port=self.port) as client:
            return client.keys("*")


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def config_of(request, tmp_path):
    def config(kind, **settings):
        if kind == "redis":
            settings["url"] = request.getfixturevalue("redis_server").url
        elif kind == "file":
            settings["dir"] = str(tmp_path / "store")
        return StoreConfig(type=kind, **settings)

    return config


@pytest.fixture(params=["shm", "file", "redis"])
def storage(request, config_of):
    storage = Storage(config_of(request.param))
    yield storage
    storage.close()


def left(storage):
    """What is in the store."""
    if storage.config.type == "redis":
        import redis

        with redis.Redis.from_url(storage.config.url) as client:
            return client.keys(f"{storage.config.place}*")
    return [path for path, _, _ in os.walk(storage.config.place) if path != storage.config.place]


def is_gone(store, key):
    try:
        store.get(key)
    except NotFound:
        return True
    return False


def run_of(storage, run="1"):
    return open_store(storage.config, run=run)


# ---------------------------------------------------------------------------------------------------------------------
# what ops use


@pytest.mark.parametrize(
    "value",
    [
        {"boxes": [[1, 2.5], []], "text": "ocr é", "none": None, "flags": (True, False), 3: b"\x00\xff"},
        b"x" * 200_000,
        [],
        ("a", ("b", [("c",)])),
        2**63,
        {"score": 0.30000000000000004, "nan": float("inf")},
    ],
)
def test_a_value_comes_out_as_it_was_put_in(storage, value):  # P147
    store = run_of(storage)
    assert store.get(store.put(value)) == value


@pytest.mark.parametrize(
    "array",
    [
        np.arange(300_000, dtype=np.float32).reshape(3, 100_000),
        np.arange(20, dtype=np.int64)[::2],
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.zeros((2, 0)),
        np.array(5, dtype=np.uint8),
        np.array([1.5, np.nan], dtype=np.float16),
        np.array(["wörter", ""]),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array([True, False]),
        np.array([1 + 2j]),
    ],
    ids=lambda array: f"{array.dtype}-{array.shape}",
)
def test_an_array_comes_out_with_its_type_and_shape_and_may_be_written_to(storage, array):  # P145, P147
    store = run_of(storage)
    key = store.put({"image": array})
    found = store.get(key)["image"]
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert np.array_equal(found, array, equal_nan=array.dtype.kind == "f")
    if found.size:
        found[...] = np.zeros_like(found)
        again = store.get(key)["image"]  # nobody else sees it
        assert np.array_equal(again, array, equal_nan=array.dtype.kind == "f")
    scalar = np.float32(1.5)
    assert type(store.get(store.put(scalar))) is np.float32


def test_a_key_is_all_that_another_process_needs(storage):  # P147
    """One process puts, another one gets and puts; both know only plain data."""
    code = """
import json, sys, msgspec
from forebay.surfaces.pipeline.store.store import StoreConfig, open_store
settings, key = json.loads(sys.argv[1])
store = open_store(msgspec.convert(settings, StoreConfig), run="7")
print(store.put(store.get(key) * 2))
"""
    store = run_of(storage, "7")
    key = store.put(np.arange(100_000))
    told = json.dumps([msgspec.to_builtins(storage.config), key])
    answer = subprocess.run([sys.executable, "-c", code, told], capture_output=True, text=True, check=True)
    assert np.array_equal(store.get(answer.stdout.strip()), np.arange(100_000) * 2)


def test_threads_share_a_store(storage):  # P147
    store = run_of(storage)
    found = [None] * 8

    def work(number):
        found[number] = store.get(store.put([number] * 1000))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[number] * 1000 for number in range(8)]


def test_only_its_own_request_can_read_an_entry(storage):
    key = run_of(storage, "1").put("secret")
    with pytest.raises(NotFound, match="no entry"):
        run_of(storage, "2").get(key)


@pytest.mark.parametrize(
    "key", ["", "../lock", "a" * 32 + "/x", "A" * 32, "a" * 31, "a" * 32 + ".0", "a" * 32 + "\n", None, 5, "*"]
)
def test_what_is_no_key_reaches_no_file(storage, key):  # P159
    with pytest.raises(NotFound, match="is not a key"):
        run_of(storage).get(key)


@pytest.mark.parametrize("run", ["", "../1", "a b", "1/2", "x" * 65, "."])
def test_what_is_no_name_of_a_run_is_refused(storage, run):
    with pytest.raises(ConfigError, match="expected a run name"):
        open_store(storage.config, run=run)


def test_large_values_of_a_result_are_put_away_and_brought_back(storage):  # P145
    store = run_of(storage)
    values = {
        "image": np.ones(64 * 1024 // 8),
        "png": b"p" * 64 * 1024,
        "small": np.ones(3),
        "text": "x" * 100_000,
    }
    handed_on = store.offload(values)
    assert {name for name, value in handed_on.items() if isinstance(value, Stored)} == {"image", "png"}
    assert handed_on["text"] is values["text"]
    found = store.restore(pickle.loads(pickle.dumps(handed_on)))
    assert found.keys() == values.keys()
    assert found["png"] == values["png"]
    assert np.array_equal(found["image"], values["image"])


# ---------------------------------------------------------------------------------------------------------------------
# how entries end


def test_an_entry_is_gone_once_it_was_released(storage):  # P146
    store = run_of(storage)
    key = store.put("x")
    store.release(key)
    store.release(key)
    with pytest.raises(NotFound):
        store.get(key)


def test_an_entry_is_freed_by_its_last_reader(storage):  # P146
    store = run_of(storage)
    key = store.put(np.arange(10_000), readers=3)
    for _ in range(3):
        assert store.get(key).sum() == sum(range(10_000))
    with pytest.raises(NotFound):
        store.get(key)
    unread = store.put("x", readers=2)
    store.release(unread)
    with pytest.raises(NotFound):
        store.get(unread)


def test_as_many_readers_as_were_announced_get_it_however_they_race(storage):
    store = run_of(storage)
    key = store.put(b"x" * 100_000, readers=5)
    outcomes = []

    def read():
        try:
            outcomes.append(len(store.get(key)))
        except NotFound:
            outcomes.append(None)

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes, key=str) == [100_000] * 5 + [None] * 7


@pytest.mark.parametrize("readers", [0, -1, 10_000])
def test_a_number_of_readers_must_make_sense(storage, readers):
    with pytest.raises(BadOutcome, match="readers: expected"):
        run_of(storage).put("x", readers=readers)


def test_a_run_that_is_forgotten_takes_its_entries_along_and_no_others(storage):  # P146
    first, second = run_of(storage, "1"), run_of(storage, "2")
    keys = [first.put(number) for number in range(3)]
    kept = second.put("kept")
    found = first.get(keys[0])
    storage.forget("1")
    storage.forget("unknown")
    eventually(lambda: is_gone(first, keys[0]))
    assert is_gone(first, keys[1])
    assert found == 0
    assert second.get(kept) == "kept"


def test_an_array_that_was_read_outlives_its_entry(storage):
    store = run_of(storage)
    array = store.get(store.put(np.arange(200_000), readers=1))
    storage.forget("1")
    eventually(lambda: not left(storage))
    assert array.sum() == sum(range(200_000))


def test_an_entry_of_a_batch_ends_with_its_last_request(storage):  # P146
    batch = open_store(storage.config, run=["1", "2"])
    key = batch.put("x" * 100)
    storage.forget("1")
    eventually(lambda: is_gone(run_of(storage, "1"), key))
    assert run_of(storage, "2").get(key) == batch.get(key) == "x" * 100
    storage.forget("2")
    eventually(lambda: not left(storage))


@pytest.mark.parametrize("kind", ["shm", "redis"])
def test_what_nobody_frees_ends_with_its_time(config_of, kind, monkeypatch):  # P146
    # As after a hook that went on though its request had timed out: the run was forgotten before.
    monkeypatch.setattr(stores, "SWEEP_S", 0.02)
    storage = Storage(config_of(kind, ttl_s=0.2))
    try:
        storage.forget("1")
        run_of(storage).put("late")
        eventually(lambda: not left(storage))
    finally:
        storage.close()


def test_nothing_is_left_after_a_storm_and_a_kill(storage):  # P146
    """1,000 requests: read, released, forgotten in the middle; a process dies while it writes."""
    dice = random.Random(1)
    large = np.ones(20_000)
    code = """
import json, sys, time, msgspec, numpy
from forebay.surfaces.pipeline.store.store import StoreConfig, open_store
store = open_store(msgspec.convert(json.loads(sys.argv[1]), StoreConfig), run="killed")
print("ready", flush=True)
for _ in range(100):
    store.put(numpy.ones(100_000))
    time.sleep(0.01)
time.sleep(30)
"""
    told = json.dumps(msgspec.to_builtins(storage.config))
    with subprocess.Popen([sys.executable, "-c", code, told], stdout=subprocess.PIPE) as other:
        try:
            for number in range(1000):
                store = run_of(storage, str(number))
                key = store.put(large if number % 10 == 0 else {"n": number}, readers=dice.choice([None, 1, 2]))
                if number % 3:
                    store.get(key)
                if number % 5 == 0:
                    with pytest.raises(BadOutcome):
                        store.put(threading.Lock())
                if number % 7 == 0:
                    store.release(key)
                storage.forget(str(number))
            assert other.stdout is not None
            assert other.stdout.readline() == b"ready\n"
            eventually(lambda: any("killed" in str(path) for path in left(storage)))
        finally:
            other.kill()
    storage.forget("killed")
    eventually(lambda: not left(storage))


@pytest.mark.parametrize("kind", ["shm", "file"])
def test_the_folder_goes_with_the_server(config_of, kind):  # P146
    storage = Storage(config_of(kind))
    run_of(storage).put("x")
    folder = Path(storage.config.place)
    assert folder.stat().st_mode & 0o777 == 0o700
    storage.close()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["shm", "file"])
def test_the_next_server_clears_up_after_one_that_was_killed(config_of, kind):  # P146
    config = config_of(kind)
    code = """
import json, sys, time, msgspec
from forebay.surfaces.pipeline.store.store import Storage, StoreConfig, open_store
storage = Storage(msgspec.convert(json.loads(sys.argv[1]), StoreConfig))
open_store(storage.config, run="1").put(b"x" * 100_000)
print(storage.config.place, flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, json.dumps(msgspec.to_builtins(config))], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        try:
            folder = Path(other.stdout.readline().strip())
            assert folder.is_dir()
        finally:
            other.kill()
    storage = Storage(config)
    assert not folder.exists()
    storage.close()


# ---------------------------------------------------------------------------------------------------------------------
# what cannot be stored


def test_what_is_too_large_says_so(config_of):
    for kind in ("shm", "redis"):
        storage = Storage(config_of(kind, max_mb=1))
        with pytest.raises(BadOutcome, match=r"too large for the store, which takes 1048576 \(max_mb\)"):
            run_of(storage).put(b"x" * (2 << 20))
        assert not left(storage)
        storage.close()


class Point:
    """Of the user's."""


def test_files_take_objects_of_the_users_classes(config_of):
    storage = Storage(config_of("shm"))
    store = run_of(storage)
    assert type(store.get(store.put({"p": Point()}))["p"]) is Point
    with pytest.raises(BadOutcome, match="of type lock, cannot be"):
        store.put(threading.Lock())
    storage.close()


def test_a_full_store_fails_the_request_that_needs_it(config_of, monkeypatch):
    storage = Storage(config_of("shm"))
    store = run_of(storage)
    real = Path.open

    def full(self, *args, **kwargs):
        if "run-" in str(self):
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(Unavailable, match="No space left on device"):
            store.put("x")
    assert store.get(store.put("x")) == "x"
    storage.close()


LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    "value, name",
    [
        ({"p": [Point()]}, "$['p'][0] is a tests.Point"),
        (threading.Lock(), "$ is a _thread.lock"),
        ({1, 2}, "$ is a set"),
        (np.array([Point()]), "array of object"),
        (np.zeros(2, dtype=[("a", "i4")]), "array of"),
        ({(1, 2): 3}, "a dict with a key of type tuple"),
        (LOOP, "nested more than"),
        (2**70, "a value cannot be stored in redis: $ is a whole number of more than 64 bits"),
        ("\ud800", "surrogates"),
    ],
    ids=["class", "lock", "set", "objects", "records", "keys", "loop", "integer", "surrogate"],
)
def test_redis_takes_plain_data_only_and_names_what_it_does_not(value, name):  # P160
    with pytest.raises(BadOutcome, match=re.escape(name)):
        encode(value)


class Exploit:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def test_nothing_from_redis_is_unpickled(config_of, tmp_path, monkeypatch):  # P160
    import redis

    monkeypatch.chdir(tmp_path)
    storage = Storage(config_of("redis"))
    store = run_of(storage)
    key = store.put("x")
    with redis.Redis.from_url(storage.config.url) as client:
        client.hset(f"{storage.config.place}:1", key, pickle.dumps(Exploit()))
    with pytest.raises(BadOutcome, match="was not written by this server"):
        store.get(key)
    assert not (tmp_path / "pwned").exists()
    storage.close()


@given(data=st.binary(max_size=80) | st.binary(max_size=60).map(lambda index: msgspec.msgpack.encode([index])))
@settings(max_examples=150, deadline=None)
def test_no_bytes_from_redis_do_harm(data):
    try:
        decode(data)
    except BadOutcome:
        pass


def array_that_says(dtype, shape, size):
    index = msgspec.msgpack.encode([msgspec.msgpack.Ext(18, b""), [[dtype, shape, False]]])
    return msgspec.msgpack.encode([index, bytes(size)])


@pytest.mark.parametrize(
    "dtype, shape, size",
    [
        ("<f4", [2**31, 2**31], 16),
        ("<f4", [-1, -4], 16),
        ("|O", [2], 16),
        ("<f4", [3], 16),
        ("i4,i4", [2], 16),
        ("nonsense", [2], 16),
        ("|V8", [2], 16),
    ],
)
def test_an_array_from_redis_must_be_what_it_says(dtype, shape, size):  # P157
    with pytest.raises(BadOutcome):
        decode(array_that_says(dtype, shape, size))
    assert decode(array_that_says("<f4", [2, 2], 16)).tolist() == [[0, 0], [0, 0]]


# ---------------------------------------------------------------------------------------------------------------------
# redis comes and goes


def test_a_server_does_not_start_without_its_redis():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        config = StoreConfig(type="redis", url=f"redis://user:hidden@127.0.0.1:{port}/0", timeout_ms=500)
        with pytest.raises(ConfigError, match=f"redis 127.0.0.1:{port} does not answer") as caught:
            Storage(config)
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "127.0.0.1:6379", "redis://127.0.0.1:port"])
def test_an_address_that_is_none_says_so(url):
    with pytest.raises(ConfigError, match=r"external_store\.url: expected the address"):
        Storage(StoreConfig(type="redis", url=url))


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"install forebay\[redis\]"):
        Storage(StoreConfig(type="redis"))


def test_redis_may_go_away_and_come_back(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    storage = Storage(StoreConfig(type="redis", url=server.url, timeout_ms=500))
    try:
        store = run_of(storage)
        key = store.put("before")
        server.stop()
        started = time.monotonic()
        for ask in (lambda: store.put("x"), lambda: store.get(key)):
            with pytest.raises(Unavailable, match="does not answer"):
                ask()
        store.release(key)  # never fails a request
        storage.forget("another")  # in a while, maybe when the server is back: not the run that goes on
        assert time.monotonic() - started < PATIENCE_S
        server.start()
        assert store.get(store.put("after")) == "after"
        with pytest.raises(NotFound):
            store.get(key)
    finally:
        storage.close()
        server.stop()


def test_a_redis_that_is_away_is_told_once(tmp_path, caplog):
    server = RedisServer(tmp_path)
    server.start()
    storage = Storage(StoreConfig(type="redis", url=server.url))
    tries = 0

    def away():
        nonlocal tries
        server.stop()
        with socket.create_server(("127.0.0.1", server.port)) as listening:
            enough = tries + 6
            while tries < enough:
                storage.forget("1")
                listening.accept()[0].close()
                tries += 1

    def told():
        return sum("cannot delete entries of the store" in one.message for one in caplog.records)

    try:
        away()
        eventually(told)
        server.start()
        run_of(storage).put("x")
        storage.forget("1")
        eventually(lambda: not left(storage))
        away()
    finally:
        storage.close()
        server.stop()
    assert told() == 2


def test_entries_that_a_redis_that_is_away_does_not_free_are_told_once_a_second(tmp_path, caplog, monkeypatch):
    now = time.monotonic()
    monkeypatch.setattr(throttled_log, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stores, "_unfreed", throttled_log.ThrottledLog(stores.log))
    server = RedisServer(tmp_path)
    server.start()
    storage = Storage(StoreConfig(type="redis", url=server.url))
    try:
        store = run_of(storage)
        key = store.put("x")
        server.stop()
        for _ in range(2):
            for _ in range(3):
                store.release(key)
            now += throttled_log.QUIET_S
    finally:
        storage.close()
        server.stop()
    told = [one.message for one in caplog.records if "could not be freed" in one.message]
    assert len(told) == 2
    assert told[1].endswith(" (2 more were not logged)")


def test_a_redis_that_hangs_is_given_up_on(tmp_path):
    server = RedisServer(tmp_path)
    server.start()
    storage = Storage(StoreConfig(type="redis", url=server.url, timeout_ms=2000))
    try:
        store = run_of(storage)
        store.put("x")
        assert server.process is not None
        server.process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(Unavailable):
            store.put("y")
        assert time.monotonic() - started < PATIENCE_S
        server.process.send_signal(signal.SIGCONT)
        assert store.get(store.put("z")) == "z"
    finally:
        storage.close()
        server.stop()


# ---------------------------------------------------------------------------------------------------------------------
# configuration


def read_store(tmp_path, settings):
    file = tmp_path / "config.yml"
    file.write_text(yaml.safe_dump({"rpc_port": 18080, "dag": {"external_store": settings}}))
    return read(file)


def test_the_configuration_is_read(tmp_path):
    given = {"type": "redis", "url": "redis://cache:6379/1", "threshold_kb": 256, "ttl_s": 30}
    config, warnings = read_store(tmp_path, given)
    assert config.dag.external_store == given
    assert warnings == []


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"type": "shmem"},
            "dag.external_store.type: expected 'file', 'redis' or 'shm', got 'shmem'; did you mean 'shm'?",
        ),
        ({"type": ["shm"]}, "type: expected 'file', 'redis' or 'shm', got ['shm']"),
        ({"ttl_s": 0}, "ttl_s: expected seconds >= 1, such as 30 or 5m, got 0"),
        ({"threshold_kb": -1}, "threshold_kb: expected a number >= 0, got -1"),
        ({"threshold_kb": float("nan")}, "threshold_kb: expected a number >= 0, got nan"),
        ({"max_mb": "many"}, "dag.external_store.max_mb: expected a number >= 1, got 'many'"),
        ({"dir": 5}, "dag.external_store.dir: expected a string, got 5"),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_configuration_is_named_with_its_place(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=rf"config.yml:\d: .*{re.escape(message)}"):
        read_store(tmp_path, settings)


@pytest.mark.parametrize("key", ["treshold_kb", "place"])
def test_a_key_that_the_store_does_not_have_is_a_warning(tmp_path, key):
    config, (warning,) = read_store(tmp_path, {key: 5})
    assert f"nothing reads the key 'dag.external_store.{key}'" in warning
    assert "config.yml:3" in warning
    assert config.dag.external_store == {}


def test_a_folder_that_cannot_be_made_stops_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"no folder can be made in '.*file/below'"):
        Storage(StoreConfig(type="file", dir=str(tmp_path / "file" / "below")))
