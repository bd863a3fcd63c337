# SPDX-License-Identifier: Apache-2.0
"""Model files are loaded and tried in a process that may take so much, before a server loads them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from tests.models import model_files
from tests.waiting import eventually

from forebay.errors import ConfigError, Unavailable
from forebay.runtimes import trial
from forebay.runtimes.library import RunOptions
from forebay.runtimes.trial import TrialLimits, tried
from forebay.types.devices import Device

MiB = 1 << 20
NO_END = 1 << 62


def tried_file(path, max_s=600.0, max_bytes=None, devices=()):
    return tried(path, RunOptions(threads=1), devices, TrialLimits(max_s, max_bytes))


@pytest.fixture
def started(monkeypatch):
    """The processes that the test starts."""
    trial._idle.end()
    found = []

    class Noted(subprocess.Popen):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    yield found
    trial._idle.end()


def filled(path, count):
    """Sums up so many numbers; the library finds their number out when it runs."""
    return model_files.save(
        path,
        [
            ("Shape", ["x"], ["s"]),
            ("Sub", ["s", "s"], ["nothing"]),
            ("Add", ["nothing", "size"], ["count"]),
            ("ConstantOfShape", ["count"], ["all"]),
            ("ReduceSum", ["all"], ["sum"], {"keepdims": 0}),
            ("Add", ["x", "sum"], ["y"]),
        ],
        [("x", "FLOAT", ["n"])],
        [("y", "FLOAT", ["n"])],
        [("size", np.array([count], np.int64))],
    )


def test_it_says_what_the_file_is(tmp_path):
    devices = [Device("gpu", 1, "gpu:1")]
    found = tried_file(model_files.elementwise(tmp_path / "m.onnx"), devices=devices)
    assert (found.library, found.missing, found.name, found.others) == ("OnnxRuntime", ("gpu:1",), "", {})
    assert [var.name for var in found.main.signature.feeds] == ["ids"]
    assert found.main.sharing.is_padded


def test_what_is_printed_before_the_first_line_is_no_answer(tmp_path, monkeypatch, started):
    # A server whose environment has a `sitecustomize` that prints ended with a traceback.
    (tmp_path / "sitecustomize.py").write_text("print('hello', flush=True)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert tried_file(model_files.linear(tmp_path / "m.onnx")).library == "OnnxRuntime"
    assert len(started) == 1


def test_memory_goes_by_the_files_of_a_model_and_not_by_all_that_lies_below(tmp_path, monkeypatch):
    # All folders below were walked, of a home directory as well; and weights that lay in one were not counted.
    path = model_files.outside(tmp_path / "m.onnx", "parts/one")
    (tmp_path / "other" / "deep").mkdir(parents=True)
    (tmp_path / "other" / "deep" / "film").write_bytes(bytes(1 << 20))
    scandir, seen = os.scandir, []
    monkeypatch.setattr(os, "scandir", lambda at: seen.append(str(at)) or scandir(at))
    assert trial._size(path) == path.stat().st_size + (tmp_path / "parts" / "one").stat().st_size
    assert seen == [str(tmp_path)]


def test_a_file_that_never_ends_is_killed_and_served_one_request_at_a_time(tmp_path, started):
    # F122: threads of the server went on for ever.
    found = tried_file(model_files.looping(tmp_path / "m.onnx", NO_END), max_s=0.2)
    assert found.main.sharing.why_not == "the process that tried it took more than 0.2 s, and was killed (--trial-s)"
    assert [process.returncode for process in started] == [-9]


def test_a_process_is_kept_for_the_next_file_and_ends_with_what_was_wrong(tmp_path, started):
    good, bad = model_files.linear(tmp_path / "m.onnx"), model_files.across(tmp_path / "a.onnx")
    for path in (good, good, bad, good):
        thread = threading.Thread(target=tried_file, args=(path,))  # which a process does not end with
        thread.start()
        thread.join()
    assert [process.poll() for process in started] == [-9, None]
    started[1].kill()
    assert tried_file(good).main.sharing.has_rows
    assert len(started) == 3


def test_a_kept_process_that_ends_within_a_file_is_not_the_fault_of_that_file(tmp_path, started):
    # One that had run another model of OpenVINO's before did.
    good, endless = model_files.linear(tmp_path / "m.onnx"), model_files.looping(tmp_path / "l.onnx", NO_END)
    tried_file(good)
    found = []
    thread = threading.Thread(target=lambda: found.append(tried_file(endless, max_s=1.0)))
    thread.start()
    eventually(lambda: trial._idle._process is None, "a process that is at work")
    started[0].kill()
    thread.join()
    assert len(started) == 2
    assert "took more than 1 s, and was killed (--trial-s)" in found[0].main.sharing.why_not


def test_a_process_that_has_nothing_to_do_ends(tmp_path, started, monkeypatch):
    monkeypatch.setattr(trial, "IDLE_S", 0.01)
    tried_file(model_files.linear(tmp_path / "m.onnx"))
    (process,) = started
    eventually(lambda: process.returncode is not None, "the end of what has nothing to do")


def test_a_process_that_cannot_be_started_is_told(tmp_path, monkeypatch):
    trial._idle.end()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "none"))
    with pytest.raises(Unavailable, match="the process that tries model files cannot be started: "):
        tried_file(model_files.linear(tmp_path / "m.onnx"))


def test_a_loop_that_ends_is_tried_to_its_end(tmp_path):
    assert tried_file(model_files.looping(tmp_path / "m.onnx", 3)).main.sharing.has_rows


def test_a_file_that_takes_more_memory_than_it_may_when_it_is_run_is_served_one_request_at_a_time(tmp_path):
    # F122: 146 bytes took 9.8 GB of the server.
    found = tried_file(filled(tmp_path / "m.onnx", 1 << 40)).main.sharing
    assert found.why_not.startswith("it cannot be run on values that are made up: ")
    assert found.why_not.endswith(" bytes of memory (--max-trial-bytes)")


def test_a_file_that_takes_more_memory_than_it_may_when_it_is_loaded_is_refused(tmp_path):
    # F122
    path = model_files.outside(tmp_path / "m.onnx", size=24 * MiB)
    with pytest.raises(ConfigError) as refused:
        tried_file(path, max_bytes=64 * MiB)
    assert "m.onnx cannot be loaded: " in refused.value.message
    assert refused.value.message.endswith("; it may have 67,108,864 bytes of memory (--max-trial-bytes)")
    assert tried_file(path).library == "OnnxRuntime"


def test_samples_that_are_large_are_not_made_up(tmp_path):
    # F122: 89 bytes took 2.6 GB of the server.
    shape = ["n", 1 << 26]
    path = model_files.save(
        tmp_path / "m.onnx", [("Neg", ["x"], ["y"])], [("x", "FLOAT", shape)], [("y", "FLOAT", shape)]
    )
    found = tried_file(path, max_bytes=256 * MiB).main.sharing
    assert "a sample has 67,108,864 numbers, and up to 4,194,304 are tried" in found.why_not


def test_a_process_that_ends_before_it_says_anything_is_a_refusal(tmp_path, monkeypatch):
    path = model_files.linear(tmp_path / "m.onnx")
    for script, said in (("exit 3", "ended with status 3"), ("kill -9 $$", "ended by signal 9")):
        (tmp_path / "python").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        trial._idle.end()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        with pytest.raises(ConfigError) as refused:
            tried_file(path, max_bytes=64 * MiB)
        assert said in refused.value.message
        assert "it may have 67,108,864 bytes of memory (--max-trial-bytes)" in refused.value.message


def test_what_the_file_has_to_say_is_said_by_the_process(tmp_path):
    (tmp_path / "bad.onnx").write_text("no model")
    with pytest.raises(ConfigError, match=r"bad.onnx', and bad.onnx cannot be loaded: it is not an ONNX file"):
        tried_file(tmp_path / "bad.onnx")


def test_the_server_loads_nothing_itself(tmp_path):
    # F122: what is not run in this process takes nothing of it.
    code = """
import sys
from pathlib import Path
from forebay.server.config import Overrides
from forebay.surfaces.native.model_files import read_model_file
read_model_file(Path(sys.argv[1]), Overrides())
print(sorted({"numpy", "onnxruntime", "openvino"} & sys.modules.keys()))
"""
    command = [sys.executable, "-c", code, str(model_files.linear(tmp_path / "m.onnx"))]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout in {"[]\n", "['numpy']\n"}


def test_it_ends_with_the_server(tmp_path):
    # F122
    code = """
import sys
from pathlib import Path
from forebay.runtimes.library import RunOptions
from forebay.runtimes.trial import TrialLimits, tried
tried(Path(sys.argv[1]), RunOptions(), [], TrialLimits(3600.0, None))
"""
    path = model_files.looping(tmp_path / "m.onnx", NO_END)
    server = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        (child,) = eventually(lambda: _children(server.pid), "the process that tries the file")
    finally:
        server.kill()
        server.wait()
    eventually(lambda: not Path(f"/proc/{child}/stat").exists() or _is_gone(child), "the end of that process")


def _children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_memory_of_a_trial_goes_by_the_files_that_are_there(tmp_path):
    (tmp_path / "a").mkdir()
    for name, size in (("m.onnx", 100), ("m.data", 10), ("a/other", 1)):
        (tmp_path / name).write_bytes(bytes(size))
    assert trial._size(tmp_path / "m.onnx") == 110
    assert trial._size(tmp_path) == 111
