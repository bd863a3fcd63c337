# SPDX-License-Identifier: Apache-2.0
"""Models that do not let go: each waits for a file, holds what it can, and says where it is in a file of its own."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import forebay

FOLDER = Path(os.environ["FOREBAY_TEST_FOLDER"])


def note(stage):
    (FOLDER / f"{stage}.{os.getpid()}").touch()


if (FOLDER / "importing").exists():
    note("importing")
    while (FOLDER / "hold").exists():
        time.sleep(0.005)


class Stubborn(forebay.Model):
    """Starts a thread that never ends, and never answers; while a file says so it does not even load."""

    def load(self):
        threading.Thread(target=threading.Event().wait).start()
        note("loading")
        while (FOLDER / "hold").exists():
            time.sleep(0.005)

    def predict(self, batch: list[float]) -> list[float]:
        note("serving")
        if max(batch) > 0:
            ctypes.PyDLL(None).sleep(600)  # holds the interpreter's lock
        return batch


class Threaded(forebay.Model):
    """Answers, and leaves a thread of the loop's executor behind that never ends."""

    async def predict(self, batch: list[float]) -> list[float]:
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        return batch


class Forking(forebay.Model):
    """Forks a child that stays."""

    def predict(self, batch: list[float]) -> list[float]:
        if not os.fork():
            note("forked")
            signal.pause()
        return batch


class Terminating(forebay.Model):
    """Forks processes, which wait, and terminates them."""

    def predict(self, batch: list[float]) -> list[float]:
        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, batch)
