# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""Models that say how they are, as a file says: `ok`, `false`, `raise`, `hang`, `exit` or `none`.

Each call of `healthy` adds a line to a second file: the model, and `busy` while a batch runs in it.
"""

import asyncio
import os
import threading
import time
from pathlib import Path

import forebay

STATE = Path(os.environ.get("HEALTH", "no-file"))
CALLS = STATE.with_suffix(".calls")


def said() -> str:
    return STATE.read_text()


class Told(forebay.Model):
    name = "told"
    busy = False

    def predict(self, batch: list[float]) -> list[int]:
        self.busy = True
        time.sleep(max(batch))
        self.busy = False
        return [os.getpid()] * len(batch)

    def healthy(self) -> bool | None:
        with CALLS.open("a") as calls:
            calls.write(f"{self.name} {'busy' if self.busy else ''}\n")
        if said() == "hang":
            threading.Event().wait()
        if said() == "exit":
            os._exit(1)
        if said() == "raise":
            raise RuntimeError("the GPU is gone")
        return None if said() == "none" else said() == "ok"


class Awaits(Told):
    name = "awaits"

    async def predict(self, batch: list[float]) -> list[int]:
        await asyncio.sleep(max(batch))
        return [os.getpid()] * len(batch)

    async def healthy(self) -> bool | None:
        if said() == "hang":
            await asyncio.Event().wait()
        return super().healthy()


class Counts(Told):
    name = "counts"

    def predict(self, batch: list[int]):
        self.busy = True
        try:
            for number in range(max(batch)):
                time.sleep(0.001)
                yield [number if number < last else None for last in batch]
        finally:
            self.busy = False
