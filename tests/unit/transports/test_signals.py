# SPDX-License-Identifier: Apache-2.0
"""A server whose terminal is closed ends as it should, with nowhere to write to."""

import os
import subprocess
import sys

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
