# SPDX-License-Identifier: Apache-2.0
"""Partitions in operating system processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from enum import Enum

import numpy as np
import pytest
from tests.serving import zoo
from tests.serving.conftest import PATIENCE_S, abandon, cat, wait_until

from forebay import Batch, ConfigError, Serving, ServingCrashed
from forebay.arrays.tree_structure import flatten
from forebay.errors import BadOutcome, ModelError, RunnerFailed
from forebay.serving.nx_serving.packed_trees import pack, unpack


def test_partitions_are_processes_of_their_own():
    # S55
    with zoo.pids.start(worker_kind="process", partitions=2, batch_size=4, batch_timeout_ms=1) as process:
        out = process.batched_run(cat(1, 2, 3))
        assert out["rows"].tolist() == [2, 4, 6]
        assert os.getpid() not in out["pid"]
        large = process.batched_run(Batch.concatenate([np.arange(200_000.0).reshape(4, -1)]))  # by shared memory
        assert (large["rows"] == np.arange(200_000.0).reshape(4, -1) * 2).all()
        for found in (out, large):
            found["rows"] += 1  # it belongs to its caller
        with pytest.raises(ServingCrashed) as caught:
            process.batched_run(cat(13))
        assert "ValueError: thirteen" in str(caught.value.__cause__)
        assert isinstance(caught.value.__cause__, RunnerFailed)
        assert 'raise ValueError("thirteen")' in caught.value.__cause__.trace


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_rows_that_a_module_keeps_stay_as_they_were(kind):
    # F17
    with zoo.window.start(worker_kind=kind, batch_timeout_ms=1) as process:
        for count in range(1, 4):
            sums = process.batched_run(cat(np.full(20_000, float(count))))
            assert sums.tolist() == [[20_000.0 * number for number in range(1, count + 1)]]


def test_a_killed_process_is_replaced_and_initialised_again(tmp_path, monkeypatch):
    # S43
    inits = tmp_path / "inits"
    monkeypatch.setenv("FOREBAY_TEST_INITS", str(inits))
    with zoo.counting.start(worker_kind="process", batch_size=2, batch_timeout_ms=1, tenants={"*": {}}) as process:
        assert inits.read_text() == "process seven 1\n"
        failed, answered = [], []

        def caller(number):
            for turn in range(10):
                value = 666 if (number, turn) == (0, 5) else number
                try:
                    answer = process.batched_run(cat(value), timeout_s=PATIENCE_S, tenant=f"caller-{number}")
                    assert answer.tolist() == [value + 1]
                    answered.append(number)
                except ServingCrashed as error:
                    failed.append(str(error.__cause__))

        callers = [threading.Thread(target=caller, args=(number,)) for number in range(4)]
        for one in callers:
            one.start()
        for one in callers:
            one.join()
        # One batch of one or two rows was lost.
        assert failed in (["the process of partition 0 ended by signal 9"] * n for n in (1, 2))
        assert len(answered) + len(failed) == 40
        assert process._partitions._dispatch._queue.running == 0  # each batch was charged to its tenants
        assert inits.read_text() == "process seven 1\n" * 2


def test_where_waits_were_replaced_it_says_so(monkeypatch):  # as gevent does, threads left alone
    def replaced(*_):
        return [], [], []

    monkeypatch.setattr(replaced, "__module__", "gevent.select")
    monkeypatch.setattr(select, "select", replaced)
    with pytest.raises(ConfigError, match=r"has replaced select of this program: run it in threads"):
        zoo.pids.start(worker_kind="process")


def test_hooks_come_out_of_processes():
    # S55, S58
    with zoo.hooked.start(worker_kind="process", batch_timeout_ms=1) as process:
        for _ in range(3):
            events = [(kind, out.tolist()) for kind, out, *_ in process.batched_run(cat(1, 2))]
            assert events == [("double", [2, 4]), ("plus_ten", [12, 14]), ("batch", [12, 14])]


def test_a_serving_that_cannot_be_imported_says_how():
    # S55
    with pytest.raises(ConfigError, match="not at the top of a module; write"):
        Serving.jit(lambda x: x).start(worker_kind="process")
    with pytest.raises(ConfigError, match=r"batch_keys: expected a string or a number"):
        zoo.pids.start(worker_kind="process", batch_keys=[("a", 1)])


def test_a_module_that_does_not_start_says_why(tmp_path):
    # S20, S55
    script = tmp_path / "script.py"
    script.write_text(
        "from forebay import Serving\n"
        "class Broken:\n"
        "    def init(self, kind, arg, partitions): raise ValueError('no weights')\n"
        "    def handle_batch(self, batch, partition, state): ...\n"
        "serving = Serving.new(Broken)\n"
        "if __name__ == '__main__':\n"
        "    serving.start(worker_kind='process')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert "ModelError: Broken could not be initialised: ValueError: no weights" in done.stderr


def test_a_script_that_starts_when_it_is_imported_is_told_so(tmp_path):
    # S55
    script = tmp_path / "script.py"
    script.write_text(
        "from forebay import Serving\n"
        "serving = Serving.new(lambda options: len)\n"
        "serving.start(worker_kind='process')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert 'put the start under `if __name__ == "__main__":`' in done.stderr
    assert done.returncode == 1


@pytest.mark.parametrize(
    "tree",
    [
        np.arange(6, dtype=np.float32).reshape(2, 3),
        {"a": np.zeros((0, 4)), "b": [np.array(["x", "yz"]), (np.bool_(1), None)]},
        {1: np.datetime64("2020-01-01"), 2: np.arange(4)[::2]},
        {("a", 1): np.arange(2), ("a", ("b", 2)): np.arange(2)},
        np.array([b"abc", b"def"], "V3"),
    ],
)
def test_trees_travel_as_bytes(tree):
    # S55
    packed = pack(tree, {"metadata": [1, "a"]})
    found, about = unpack(bytes(packed))
    assert about == {"metadata": [1, "a"]}
    assert Serving.jit(lambda x: x) is not None
    assert flatten(found)[1] == flatten(tree)[1]
    assert pack(found) == pack(tree)


TORCH_TYPES = ("bfloat16", "float8_e4m3fn", "complex32", "complex64", "uint16", "bool", "int64")


@pytest.mark.parametrize("name", TORCH_TYPES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_tensors_stay_what_they_are(name):
    # S14, S55
    torch = pytest.importorskip("torch", reason="torch is an extra")
    matrix = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
    for tensor in (matrix, matrix.T, matrix[0, 1], matrix[:0], matrix.conj()):
        found, _ = unpack(pack(tensor))
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert found.tolist() == tensor.tolist()


def test_arrays_of_jax_stay_what_they_are_where_it_is_not_yet_imported():
    # S14, S55
    import jax

    for name in ("bfloat16", "float8_e4m3fn", "int4", "int32"):
        array = jax.numpy.arange(3).astype(name)
        code = (
            "import sys\n"
            "from forebay.serving.nx_serving.packed_trees import pack, unpack\n"
            "sys.stdout.buffer.write(pack(unpack(sys.stdin.buffer.read())[0]))\n"
        )
        for one in (array, np.asarray(array)):  # numpy has such arrays as well, as they come from jax
            done = subprocess.run([sys.executable, "-c", code], input=pack(one), capture_output=True, check=True)
            found, _ = unpack(done.stdout)
            assert (isinstance(found, jax.Array), found.dtype) == (isinstance(one, jax.Array), one.dtype)
            assert found.tolist() == [0, 1, 2]


def test_what_cannot_travel_is_named():
    with pytest.raises(BadOutcome, match=r"\$\.a is an array of object"):
        pack({"a": np.array([{}])})
    with pytest.raises(BadOutcome, match="the metadata cannot travel"):
        pack(np.zeros(1), object())


def test_keys_of_dicts_that_would_arrive_as_others_are_refused():
    # S55
    assert unpack(pack({1: np.zeros(1), ("b", 2): np.zeros(1)}))[0].keys() == {1, ("b", 2)}
    for key in (Enum("Colour", "RED").RED, np.int64(1), frozenset([1])):
        with pytest.raises(BadOutcome, match=r"a dict has the key .*, which cannot travel between processes"):
            pack({"a": {key: np.zeros(1)}})


def test_four_devices_are_four_partitions():
    # S53, S54
    code = (
        "import numpy as np, jax, threading\n"
        "from forebay import Batch, Serving\n"
        "from forebay.arrays.tree_rows import to_host\n"
        "barrier = threading.Barrier(4)\n"
        "def meet(x): barrier.wait(30)\n"
        "def fn(options):\n"
        "    compiled = jax.jit(lambda x: x * 2)\n"
        "    def run(batch):\n"
        "        barrier.wait(30)\n"
        "        return compiled(jax.device_put(batch.realize(), options['device']))\n"
        "    return run\n"
        "serving = Serving.new(fn, compiler='jax')\n"
        "with serving.start(partitions=True, batch_timeout_ms=1) as process:\n"
        "    assert process.statistics().partitions == 4\n"
        "    found = []\n"
        "    call = lambda n: found.append((n, process.batched_run(Batch.concatenate([np.array([n])]))))\n"
        "    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]\n"
        "    [one.start() for one in callers]; [one.join() for one in callers]\n"
        "    assert {next(iter(out.devices())).id for _, out in found} == {0, 1, 2, 3}\n"
        "    assert all(to_host(out).tolist() == [2 * n] for n, out in found)\n"
    )
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=PATIENCE_S)


def test_a_process_that_never_gets_ready_fails_the_start(monkeypatch):
    # S43
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ModelError, match="the process of partition 0 ended with status 1"):
        zoo.pids.start(worker_kind="process")


@pytest.fixture
def fragile(tmp_path, monkeypatch):
    """Starts processes that can be broken, in a folder of their own."""
    monkeypatch.setenv("FOREBAY_TEST_FOLDER", str(tmp_path))
    started = []

    def start(partitions):
        started.append(zoo.fragile.start(worker_kind="process", partitions=partitions, batch_timeout_ms=1))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def pid_of(process):
    return int(process.batched_run(cat(1), timeout_s=PATIENCE_S)[0])


def test_a_process_that_dies_is_noticed_though_its_child_holds_the_socket(fragile, tmp_path):
    # F21
    process = fragile(1)
    with pytest.raises(ServingCrashed, match="the process of partition 0 ended by signal 9"):
        process.batched_run(cat(666), timeout_s=PATIENCE_S)
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert pid_of(process)


def test_a_process_that_dies_idle_is_replaced_beside_the_others(fragile, tmp_path):
    # F21
    process = fragile(2)
    dead = pid_of(process)
    before = set(process._partitions.pool.pids())
    (tmp_path / "hold").touch()  # so its successor takes as long as the test likes
    os.kill(dead, signal.SIGKILL)
    wait_until(lambda: set(process._partitions.pool.pids()) != before)  # nobody has called
    (other,) = before - {dead}
    assert [pid_of(process) for _ in range(4)] == [other] * 4
    (tmp_path / "hold").unlink()
    wait_until(lambda: process.statistics().idle == 2)


def test_a_process_that_hangs_on_what_nobody_waits_for_is_replaced(fragile, tmp_path, quickly):
    # issue 11: a hang kept its partition for good
    process = fragile(1)
    before = pid_of(process)
    abandon(process, cat(777), lambda: wait_until((tmp_path / "hangs").exists))
    assert pid_of(process) != before
    assert process._partitions.pool.restarts == 1


def test_callers_are_told_when_no_process_can_be_had(fragile, monkeypatch):
    # F21
    process = fragile(1)

    def call_until_told():
        while True:  # the first calls may have waited for the next attempt
            process.batched_run(cat(1), timeout_s=PATIENCE_S)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/bin/false")
        os.kill(pid_of(process), signal.SIGKILL)
        wait_until(lambda: process.statistics().idle == 0)
        with pytest.raises(ServingCrashed, match="has no process: the process of partition 0 ended with status 1"):
            call_until_told()
    wait_until(lambda: process._partitions._refusal is None)
    assert pid_of(process)


def test_a_script_that_imported_multiprocessing_is_found(tmp_path):
    # F22
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\nimport numpy as np\nfrom forebay import Batch, Serving\n"
        "serving = Serving.new(lambda options: lambda batch: batch.realize() + 1)\n"
        "if __name__ == '__main__':\n"
        "    with serving.start(worker_kind='process', batch_timeout_ms=1) as process:\n"
        "        print(process.batched_run(Batch.concatenate([np.array([1])])).tolist())\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("[2]\n", "")


def test_trees_of_a_scripts_own_classes_reach_its_processes_and_come_back(tmp_path):
    # S55
    script = tmp_path / "script.py"
    script.write_text(
        "from dataclasses import dataclass\nimport numpy as np\nfrom forebay import Batch, Serving\n"
        "@dataclass\n"
        "class Pair:\n"
        "    left: object\n"
        "    right: object\n"
        "serving = Serving.jit(lambda pair: Pair(pair.right, pair.left))\n"
        "if __name__ == '__main__':\n"
        "    with serving.start(worker_kind='process', batch_timeout_ms=1) as process:\n"
        "        found = process.batched_run(Batch.stack([Pair(1, 2)]))\n"
        "        print(type(found) is Pair, found.left, found.right)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert (done.stdout, done.stderr) == ("True [2] [1]\n", "")


def test_processes_outlive_the_thread_that_started_them(fragile):
    # F23: the kernel's parent-death signal is tied to a thread
    started = []
    thread = threading.Thread(target=lambda: started.append(fragile(1)))
    thread.start()
    thread.join()
    pid = pid_of(started[0])
    assert pid_of(started[0]) == pid
