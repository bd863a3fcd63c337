# SPDX-License-Identifier: Apache-2.0
"""Whoever has the id of a process that has ended is not killed in its place."""

import signal
import subprocess
import sys
import time

from tests.processes import kill_if_noted

THREADED = "import threading; t = threading.Thread(target=input); t.start(); print(t.native_id, flush=True)"


def test_only_the_process_that_was_noted_is_killed(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as process:
        kill_if_noted(process.pid, time.time() - 10)  # it is younger than the note
        assert process.poll() is None
        kill_if_noted(process.pid, time.time())
        assert process.wait() == -signal.SIGKILL
    kill_if_noted(process.pid, time.time())


def test_a_thread_that_has_the_id_of_a_process_does_not_end_its_own():
    command = [sys.executable, "-c", THREADED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        kill_if_noted(int(process.stdout.readline()), time.time())
        process.communicate("\n")
    assert process.returncode == 0
