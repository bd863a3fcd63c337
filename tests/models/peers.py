# SPDX-License-Identifier: Apache-2.0
"""Models for what users of other servers suffer from."""

import os
import time
from pathlib import Path

from forebay import Model, is_cancelled


class Picky(Model):
    """Refuses one sample; tells the others how many shared their batch."""

    max_wait_ms = 60_000
    max_batch_size = 4

    def predict(self, batch: list[int]):
        return [ValueError("no sevens") if sample == 7 else [sample, len(batch)] for sample in batch]


class Rows(Model):
    """Arrays of samples; tells the size of the batch each of them was in."""

    batchable = True
    max_batch_size = 8

    def predict(self, batch: list[int]) -> list[list[int]]:
        return [[sample, len(batch)] for sample in batch]


class Single(Model):
    """Batches of one."""

    max_batch_size = 1

    def predict(self, batch: list[int]) -> list[int]:
        return [len(batch)] * len(batch)


class Long(Model):
    """Works for the seconds it is given unless nobody waits any more; notes how it ended in a file."""

    max_batch_size = 1

    def predict(self, batch: list[tuple[float, str]]):
        seconds, path = batch[0]
        Path(path).touch()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not is_cancelled():
            time.sleep(0.005)
        Path(path).write_text("stopped" if is_cancelled() else "finished")
        return ["finished"]


class Mortal(Model):
    """Tells its process, once the file is there that it is given."""

    def predict(self, batch: list[str]) -> list[int]:
        while not all(Path(sample).exists() for sample in batch if sample):
            time.sleep(0.005)
        return [os.getpid()] * len(batch)
