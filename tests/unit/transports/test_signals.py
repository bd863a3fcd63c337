# SPDX-License-Identifier: Apache-2.0
"""A server ends as it should where it can write nowhere: its terminal was closed, or nobody reads its stderr."""

import os
import signal
import subprocess
import sys

import pytest
from tests.waiting import PATIENCE_S

from forebay.transports.signals import early_hangup

SERVER = """
import asyncio, sys
from forebay.transports.signals import Signals

async def serve():
    ended = asyncio.Event()
    with Signals(lambda number: ended.set(), lambda: 60.0, lambda: 1) as signals:
        signals.attend(asyncio.get_running_loop())
        print("ready", flush=True)
        await ended.wait()

asyncio.run(serve())
sys.stdout.write("a last word")
"""


EARLY = """
import time
from forebay.transports.signals import early_hangup

with early_hangup():
    print("ready", flush=True)
    time.sleep(600)
"""


def status_of(code):
    """How a program ends that says "ready", after which its terminal is closed."""
    terminal, inside = os.openpty()
    command = ["env", "--default-signal=HUP", "setsid", "--ctty", sys.executable, "-c", code]
    server = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    return server.wait()


def test_a_last_word_for_a_terminal_that_is_gone_is_not_the_exit_status():
    assert status_of(SERVER) == 0


def test_a_terminal_that_is_closed_before_there_is_a_server_ends_the_process():
    assert status_of(EARLY) == -signal.SIGHUP


@pytest.mark.parametrize("own", [signal.SIG_IGN, lambda _number, _frame: None])
def test_what_a_program_does_at_sighup_is_left_as_it_is(own):
    before = signal.signal(signal.SIGHUP, own)
    try:
        with early_hangup():
            assert signal.getsignal(signal.SIGHUP) is own
        assert signal.getsignal(signal.SIGHUP) is own
    finally:
        signal.signal(signal.SIGHUP, before)


STUCK = """
import os
from forebay.transports.signals import Signals

os.set_blocking(2, False)
os.write(2, bytes(1 << 24))
os.set_blocking(2, True)
with Signals(lambda number: None, lambda: 0.0, lambda: 3):
    print("ready", flush=True)
    for _ in range(3):
        pass  # Python 3.14 looks here whether a signal has come, and not between two calls
    os.write(2, b"stuck")
"""


def test_a_stderr_that_nobody_reads_does_not_keep_a_server():
    server = subprocess.Popen([sys.executable, "-c", STUCK], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    server.send_signal(signal.SIGTERM)
    try:
        assert server.wait(PATIENCE_S) == 3
    finally:
        server.kill()
        server.communicate()
