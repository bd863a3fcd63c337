# SPDX-License-Identifier: Apache-2.0
"""Models that one server owns and another one serves as well."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import forebay


def wait_for(path: str) -> None:
    """Wait until a file is there."""
    while not Path(path).exists():
        time.sleep(0.005)


class Clip(forebay.Model):
    """Says what came, in which process, and how many came together."""

    max_batch_size = 16
    max_queue = 64
    timeout_ms = 20_000

    def predict(self, batch: list[float]) -> list[tuple[float, int, int]]:
        return [(sample, os.getpid(), len(batch)) for sample in batch]


class Gate(forebay.Model):
    """Waits until the file is there that its request names."""

    max_batch_size = 1
    max_queue = 4
    timeout_ms = 60_000

    def predict(self, batch: list[str]) -> list[int]:
        for path in batch:
            Path(path + ".begun").touch()
            wait_for(path)
        return [len(batch) for _ in batch]


class Slow(forebay.Model):
    """Streams a number, and the others once the file is there that its request names; if it is a folder, it breaks."""

    timeout_ms = 60_000

    def predict(self, batch: list[tuple[str, int]]) -> Iterator[list[str | None]]:
        for number in range(max(count for _, count in batch)):
            yield [f"part {number}" if number < count else None for _, count in batch]
            for path, _ in batch:
                wait_for(path)
                if Path(path).is_dir():
                    raise RuntimeError("broken")


class Fails(forebay.Model):
    """Refuses some samples, and breaks at others."""

    def predict(self, batch: list[str]) -> list[str]:
        for sample in batch:
            if sample == "break":
                raise RuntimeError("broken")
            if sample == "refuse":
                raise forebay.InvalidRequest("this sample is refused", detail={"sample": sample})
        return batch
