# SPDX-License-Identifier: Apache-2.0
"""Models whose calls wait for each other: they answer only if they run side by side, on the loop of `load`."""

import asyncio
import os
from collections import Counter
from pathlib import Path

import forebay

MARK = Path(os.environ.get("MARK", "no-file"))
IS_SECOND = MARK.exists()


def leave() -> None:
    MARK.touch()
    os._exit(1)


class Meets(forebay.Model):
    """Does what a sample says; `stay` waits for `release`, unless the model was loaded after an `exit`."""

    max_batch_size = 1

    async def load(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.changed, self.released = asyncio.Condition(), asyncio.Event()
        self.arrived: Counter[str] = Counter()
        self.staying = self.cancelled = 0

    async def predict(self, batch: list[str]) -> list[dict[str, int]]:
        (sample,) = batch
        what, _, number = sample.partition(" ")
        assert asyncio.get_running_loop() is self.loop
        async with self.changed:
            if what == "meet":
                self.arrived[number] += 1
                self.changed.notify_all()
                await self.changed.wait_for(lambda: self.arrived[number] >= int(number))
        if what == "stay" and not IS_SECOND:
            self.staying += 1
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            finally:
                self.staying -= 1
        if what == "exit" and not IS_SECOND:
            leave()
        if what == "release":
            self.released.set()
            self.released = asyncio.Event()
        if what == "say":
            await asyncio.sleep(0)
            print(f"said {number}")
        if what == "fail":
            raise RuntimeError("as it was told")
        return [{"pid": os.getpid(), "staying": self.staying, "cancelled": self.cancelled}]


class Echoes(forebay.Model):
    """Answers what it is given, once every call has let the others run."""

    async def predict(self, batch: list[bytes]) -> list[bytes]:
        for _ in range(10):
            await asyncio.sleep(0)
        return batch

    @forebay.endpoint("/length")
    async def length(self, batch: list[bytes]) -> list[int]:
        await asyncio.sleep(0)
        return [len(one) for one in batch]
