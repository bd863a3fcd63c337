# SPDX-License-Identifier: Apache-2.0
"""What tells where it runs: when its file was imported, when it was loaded, and now."""

import os
import threading

import forebay

NAMES = ("FOREBAY_DEVICE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
AT_IMPORT = [os.environ.get(name) for name in NAMES]
ALL = threading.Barrier(3)


class Where(forebay.Model):
    max_batch_size = 1

    def load(self):
        self.loaded_on = self.device

    def predict(self, batch: list[str]) -> list[dict]:
        if batch == ["meet"]:
            ALL.wait(60)
        return [
            {
                "device": self.device,
                "loaded_on": self.loaded_on,
                "seen": AT_IMPORT,
                "cores": sorted(os.sched_getaffinity(0)),
                "pid": os.getpid(),
            }
        ]


class Own(Where):
    devices = ("cuda:1", "npu")
    device = "its own"


node = forebay.node(Where, worker_kind="thread", devices=["gpu:3"], max_batch_size=1)


@forebay.compose
def graph(text: str) -> dict:
    return node(text)


class Compiler:
    def compile(self, fn, options):
        return lambda rows: rows * 0 + (1 if options["device"] == "cuda:0" else 2)


serving = forebay.Serving.jit(lambda rows: rows, compiler=Compiler())
