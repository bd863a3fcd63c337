# SPDX-License-Identifier: Apache-2.0
"""A server ends as it should where it can write nowhere: its terminal was closed, or nobody reads its stderr."""

import os
import signal
import subprocess
import sys

from tests.waiting import PATIENCE_S

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


def test_a_last_word_for_a_terminal_that_is_gone_is_not_the_exit_status():
    terminal, inside = os.openpty()
    command = ["setsid", "--ctty", sys.executable, "-c", SERVER]
    server = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside)
    os.close(inside)
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)
    assert server.wait() == 0


STUCK = """
import os
from forebay.transports.signals import Signals

os.set_blocking(2, False)
os.write(2, bytes(1 << 24))
os.set_blocking(2, True)
with Signals(lambda number: None, lambda: 0.0, lambda: 3):
    print("ready", flush=True)
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
