# SPDX-License-Identifier: Apache-2.0
"""Servings that worker processes and servers of the tests can import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np

from forebay import Batch, Serving, hook


def whoami(options):
    def run(batch):
        rows = batch.realize()
        if rows.max() == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        if rows.max() == 13:
            raise ValueError("thirteen")
        return {"rows": rows * 2, "pid": np.full(len(rows), os.getpid())}

    return run


class Counting:
    """Writes a line to a file whenever it is initialised."""

    def init(self, kind, arg, partitions):
        if "FOREBAY_TEST_INITS" in os.environ:
            with Path(os.environ["FOREBAY_TEST_INITS"]).open("a") as file:
                file.write(f"{kind} {arg} {len(partitions)}\n")
        return 0

    def handle_batch(self, batch, partition, state):
        rows = batch.realize()
        if rows.max() == 666:
            os.kill(os.getpid(), signal.SIGKILL)
        return (lambda: (rows + 1, {"partition": partition, "handled": state})), state + 1


class Window:
    """Keeps the first row of every batch, and answers with the sum of each."""

    def init(self, kind, arg, partitions):
        return []

    def handle_batch(self, batch, partition, state):
        rows = batch.realize()
        state = [*state, rows[0]]
        return (lambda: (np.array([[kept.sum() for kept in state]]), None)), state


class Fragile:
    """Dies of row 666, leaving a child that holds its files; hangs where it is initialised while a file is there."""

    def init(self, kind, arg, partitions):
        while Path(os.environ["FOREBAY_TEST_FOLDER"], "hold").exists():
            time.sleep(0.005)

    def handle_batch(self, batch, partition, state):
        rows = batch.realize()
        if rows.max() == 666:
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            Path(os.environ["FOREBAY_TEST_FOLDER"], "child").write_text(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        if rows.max() == 777:
            Path(os.environ["FOREBAY_TEST_FOLDER"], "hangs").touch()
            time.sleep(60)
        return (lambda: (np.full(len(rows), os.getpid()), None)), state


class Gauged:
    """Sets a gauge of its process to the largest row."""

    def init(self, kind, arg, partitions):
        from prometheus_client import Gauge

        return Gauge("zoo_largest", "The largest row")

    def handle_batch(self, batch, partition, state):
        rows = batch.realize()
        state.set(rows.max())
        return (lambda: (rows, None)), state


def round_about(x):
    doubled = hook("double", x * 2)
    return hook("plus_ten", doubled + 10)


pids = Serving.new(whoami)
counting = Serving.new(Counting, arg="seven")
window = Serving.new(Window)
fragile = Serving.new(Fragile)
gauged = Serving.new(Gauged)
hooked = Serving.jit(round_about).streaming(hooks=["double", "plus_ten"]).batch_size(4)
by_key = Serving.new(lambda key, options: lambda batch: batch.realize() * (2 if key == "double" else 0.5))
texts = (
    Serving.new(whoami)
    .client_preprocessing(lambda text: (Batch.stack([np.array(len(text))]), text))
    .client_postprocessing(lambda out, text: f"{text} has {out[0]['rows'][0] // 2}")
    .batch_size(8)
)
