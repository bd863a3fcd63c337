# SPDX-License-Identifier: Apache-2.0
"""The end and the birth of other processes, by what Linux has for that and without it."""

import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from forebay.observe.logs.model_log import Voice
from forebay.workers.processes import process_life
from forebay.workers.processes.process_life import birth_of, open_end, send_signal
from forebay.workers.user_calls import captured_output


@pytest.fixture(params=["linux", "portable"])
def is_portable(request, monkeypatch):
    if request.param == "portable":
        monkeypatch.delattr(os, "pidfd_open", raising=False)
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system tells of the end of a process in no such way")
    return request.param == "portable"


@pytest.fixture
def process():
    """One that ends when it is told something."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def has_ended(descriptor, within_s):
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


@pytest.mark.parametrize("is_child", [True, False])
def test_the_end_of_a_process_is_seen(is_portable, process, is_child):
    end = open_end(process.pid, process.wait if is_child else None)
    try:
        assert not has_ended(end, 0)
        send_signal(end, process.pid, signal.SIGKILL)
        if not is_child:
            process.wait()  # until then its id is taken
        assert has_ended(end, 60)
    finally:
        os.close(end)
    assert process.wait() == -signal.SIGKILL


def test_a_process_that_is_gone_has_no_end_to_wait_for(is_portable, process):
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        open_end(process.pid)


def test_a_process_begins_once(process):
    assert birth_of(process.pid) == birth_of(process.pid) != birth_of(1)
    process.kill()
    end = open_end(process.pid, process.wait)
    assert has_ended(end, 60)
    os.close(end)
    assert birth_of(process.pid) is None  # also while nobody has asked for its status
    process.wait()
    assert birth_of(process.pid) is None


def test_the_birth_of_a_process_is_told_by_ps_where_there_is_no_proc():
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        told = process_life._told_birth(process.pid)
        assert told is not None
        assert before - 2 <= told <= time.time() + 2  # seconds, and here `ps` rounds them
    assert process_life._told_birth(process.pid) is None


def test_a_process_finds_its_open_files():
    with tempfile.TemporaryFile() as file:
        assert str(file.fileno()) in {one.name for one in Path(process_life.OPEN_FILES).iterdir()}


def test_a_process_whose_end_cannot_be_watched_is_not_left_running(monkeypatch, process):
    def full(*_):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(captured_output, "open_end", full)
    with pytest.raises(OSError, match="Too many"):
        captured_output.started(lambda _streams: process, Voice("x", "worker 1"))
    assert process.returncode == -signal.SIGKILL
