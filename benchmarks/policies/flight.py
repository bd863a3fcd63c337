# SPDX-License-Identifier: Apache-2.0
"""What single flight gains where contents are asked for by Zipf's law: `python -m benchmarks.policies.flight`.

The endpoint that is shipped runs on a clock that is moved by hand, before a pool whose batches take 10 ms and 0.2 ms a
row. Closed loops keep it busy; each request asks for one of the contents. Answers a second are those of simulated time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from forebay.batching.queue import BatchConfig
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool

CLIENTS = 512
CONTENTS = 10_000
SECONDS = 20.0


async def answers_per_s(clock: FakeClock, sharing: Any, exponent: float, seed: int = 1) -> float:
    """Return the answers a second."""
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1 / rank**exponent for rank in range(1, CONTENTS + 1)))
    pool = ManualPool(1)
    endpoint = Endpoint(EndpointConfig(name="x", single_flight=sharing), BatchConfig(max_size=64), pool)
    await endpoint.start()
    count = 0

    async def client() -> None:
        nonlocal count
        while True:
            (content,) = rng.choices(range(CONTENTS), cum_weights=weights)
            await endpoint.call(b"%d" % content)
            count += 1

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    until = clock.now + SECONDS
    while clock.now < until:
        if pool.running:
            batch = pool.running[0]
            took_s = 0.010 + 0.0002 * batch.rows
            await asyncio.sleep(took_s)
            pool.complete(batch, model_s=took_s)
        else:
            await asyncio.sleep(0.0005)
    for one in clients:
        one.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return count / SECONDS


def main() -> None:
    """Print a row for each exponent."""
    print("| Zipf | off, answers/s | all, answers/s | gain |\n|---|---|---|---|")
    for exponent in (0.8, 1.1):
        rates: list[float] = []
        for sharing in ("off", "all"):
            clock = FakeClock()
            rates.append(clock.run(answers_per_s(clock, sharing, exponent)))
        print(f"| {exponent} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} |")


if __name__ == "__main__":
    main()
