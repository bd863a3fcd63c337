# SPDX-License-Identifier: Apache-2.0
"""Each worker has a device of its own. No GPU is needed to see that: all that a process is told is its environment."""

import os
import signal

import pytest
from tests.models import devices as where
from tests.models import model_files

from forebay.errors import ConfigError
from forebay.runtimes.trial import tried
from forebay.server.config import Overrides
from forebay.surfaces.native.model_files import read_model_file
from forebay.testing import client
from forebay.types.devices import Device, read_devices
from forebay.workers.processes import device_binding as devices
from forebay.workers.processes.device_binding import environment_on, existing, spelled

CORE = min(os.sched_getaffinity(0))
TWO_GPUS = {"CUDA_VISIBLE_DEVICES": "4,GPU-7"}


def all_of(server, model, count, key):
    """Ask until so many different ones have answered."""
    found = {}
    while len(found) < count:
        told = server.call(model, "x").json()
        found[key(told)] = told
    return list(found.values())


def test_each_worker_process_gets_a_device_before_it_imports_and_keeps_it(serve, eventually):  # F51
    server = serve("devices.py:Where", "--devices", "cuda:0,cuda:1", "--workers", "3", env=TWO_GPUS)
    workers = server.client.get("/models/where").json()["workers"]
    assert (workers["slots"], workers["devices"]) == (3, ["cuda:0", "cuda:1", "cuda:0"])
    told = all_of(server, "where", 3, lambda told: told["pid"])
    assert sorted(one["seen"][1] for one in told) == ["4", "4", "GPU-7"]
    # A process that sees one device finds it as the first.
    assert {(one["device"], one["loaded_on"], one["seen"][0]) for one in told} == {("cuda:0",) * 3}
    (second,) = [one for one in told if one["seen"][1] == "GPU-7"]
    os.kill(second["pid"], signal.SIGKILL)
    eventually(lambda: server.metric("forebay_workers") == 3 and server.metric("forebay_worker_restarts_total") == 1)
    again = all_of(server, "where", 3, lambda told: told["pid"])
    assert sorted(one["seen"][1] for one in again) == ["4", "4", "GPU-7"]
    assert second["pid"] not in {one["pid"] for one in again}


def test_a_worker_process_is_tied_to_its_processors(serve, monkeypatch):  # F51
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    server = serve("devices.py:Where", "--devices", f"cpu:{CORE}")
    told = server.call("where", "x").json()
    assert (told["cores"], told["device"], told["seen"]) == ([CORE], "cpu", ["cpu", None, "1"])


def test_each_worker_in_a_thread_has_its_device_and_processors():  # F51
    with client(where.Where, devices=["cuda:0", f"cpu:{CORE}", "npu"]) as opened:
        told = opened.call_all(["meet"] * 3)
    every = sorted(os.sched_getaffinity(0))
    assert sorted((one["device"], one["cores"]) for one in told) == sorted(
        [("cuda:0", every), ("cpu", [CORE]), ("npu:0", every)]
    )


def test_a_class_and_a_node_say_their_devices_and_a_device_of_their_own_stays(serve):  # F51
    server = serve("devices.py:graph")
    assert server.call("graph", "x").json()["device"] == "gpu:3"
    assert server.client.get("/models/graph").json()["nodes"]["where"]["workers"]["devices"] == ["gpu:3"]


def test_the_devices_of_a_class_hold_unless_others_are_told():
    with client(where.Own, workers=3) as opened:
        assert opened.call("x")["device"] == "its own"
        assert opened.describe()["workers"]["devices"] == ("cuda:1", "npu", "cuda:1")
    with client(where.Own, devices="npu") as opened:
        assert opened.describe()["workers"]["devices"] == ("npu",)


def test_a_serving_is_compiled_for_the_device_of_its_worker(serve):
    server = serve("devices.py:serving", "--devices", "cuda:1", env=TWO_GPUS)
    assert server.call("serving", 5).json() == 1


def test_a_model_file_runs_on_its_device(tmp_path, monkeypatch):
    path = model_files.linear(tmp_path / "net.onnx")
    with pytest.raises(
        ConfigError, match=r"cannot run on gpu:1: what runs it here \(OnnxRuntime\) knows no such device"
    ):
        read_model_file(path, Overrides(devices=("gpu:1",)))
    told = []

    def tried_here(path, options, devices, limits):
        told.extend(map(str, devices))
        return tried(path, options, [], limits)

    monkeypatch.setitem(read_model_file.__globals__, "tried", tried_here)
    target = read_model_file(path, Overrides(devices=("gpu:1", f"cpu:{CORE}")))
    assert told == ["gpu:1"]
    assert target.model.plan.threads is None  # the processors of each worker decide
    made = target.model()
    made.device = "gpu:1"
    options = []
    monkeypatch.setattr("forebay.serving.models.file_model.load_with", lambda _path, given: options.append(given))
    made.load()
    assert options[0].device == Device("gpu", 1, "gpu:1")


def test_a_worker_that_joins_is_on_its_device_before_it_imports(cli, tmp_path):
    (tmp_path / "tell.py").write_text(
        "import os, forebay\n"
        "print(os.environ['FOREBAY_DEVICE'], sorted(os.sched_getaffinity(0)), flush=True)\n"
        "class Model(forebay.Model):\n    def predict(self, batch): return batch\n"
    )
    there = ["worker", str(tmp_path / "tell.py"), "--connect", "unix:nowhere", "--once"]
    told = cli(*there, "--device", f"cpu:{CORE}")
    assert told.stdout == f"cpu [{CORE}]\n"
    told = cli(*there, "--device", "cuda:0,cuda:1")
    assert (told.returncode, told.stdout) == (2, "")
    assert "argument --device: expected one device, got 2" in told.stderr


# ---------------------------------------------------------------------------------------------------------------------
# What is written, and what is there


@pytest.mark.parametrize(
    "texts, names",
    [
        (["cuda:0,cuda:1"], ["cuda:0", "cuda:1"]),
        (["CUDA:0", " gpu "], ["cuda:0", "gpu:0"]),
        (["cpu:0,2,cpu:1,3-4,npu"], ["cpu", "cpu", "npu:0"]),
        (["cpu:0", "2", "xpu:1"], ["cpu", "xpu:1"]),
        ([], []),
    ],
)
def test_devices_are_read(texts, names):
    assert [one.name for one in read_devices(texts)] == names


def test_sets_of_processors_are_read_and_spelled():
    (one, two) = read_devices(["cpu:0,2,cpu:1-3,7"])
    assert (one.cores, two.cores) == ((0, 2), (1, 2, 3, 7))
    assert (spelled(one.cores), spelled(two.cores)) == ("cpu:0,2", "cpu:1-3,7")


@pytest.mark.parametrize(
    "text, told",
    [
        ("cuda0", "expected a device such as cpu, .*, got 'cuda0'; did you mean cuda:0?"),
        ("cdua:1", "did you mean cuda:1"),
        ("cuda:0,1", "expected a device, got '1'; did you mean cuda:1?"),
        ("cpu:3-1", "expected a device such as .*, got 'cpu:3-1'"),
        ("cuda:x", "expected a device such as .*, got 'cuda:x'"),
        ("cpu:9998-9999", "expected CPUs that this process may use \\(cpu:.*\\), got cpu:9998-9999"),
        ("cuda:2", "expected cuda:0 to cuda:1, got cuda:2; CUDA_VISIBLE_DEVICES is '4,GPU-7'"),
    ],
)
def test_what_is_no_device_or_not_there_is_one_sentence(monkeypatch, text, told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-7")
    with pytest.raises(ValueError, match=told):
        existing([text])


def test_what_is_left_to_a_process_is_counted_from_there():
    assert environment_on(Device("cuda", 1), TWO_GPUS) == {"CUDA_VISIBLE_DEVICES": "GPU-7", "FOREBAY_DEVICE": "cuda:0"}
    assert environment_on(Device("cuda", 1), {})["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES is '4'"):
        environment_on(Device("cuda", 1), {"CUDA_VISIBLE_DEVICES": "4"})
    told = environment_on(Device("cpu", cores=(0, 1)), {"OMP_NUM_THREADS": "1"})
    assert (told["OMP_NUM_THREADS"], told["MKL_NUM_THREADS"]) == ("1", "2")  # what a person has set stays


def test_devices_that_may_not_be_there_are_a_warning(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(devices.Path, "glob", lambda *_: [])
    assert "cuda:0: no NVIDIA device is seen here" in devices.doubtful(read_devices(["cuda:0,npu"]))
    assert devices.doubtful(read_devices(["npu"])) == ""
