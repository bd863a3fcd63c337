# SPDX-License-Identifier: Apache-2.0
"""What single flight gains where contents are asked for by Zipf's law: `python -m benchmarks.policies.flight`.

The endpoint that is shipped runs on a clock that is moved by hand, before a pool whose batches take 10 ms and 0.2 ms a
row. Closed loops keep it busy; each request asks for one of the contents. Answers a second are those of simulated time.

Then: the CPU time of a request on its way through such an endpoint where no two are equal, without single flight and
with it, the least of five runs each. The control is the digest alone of as many bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from hashlib import blake2b
from typing import Any

from forebay.batching.queue import BatchConfig
from forebay.protocols.native import PARAMS
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing import FakeClock, ManualPool
from forebay.types.call import Request

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


async def cpu_us(sharing: Any, size: int, requests: int) -> float:
    """Return the microseconds of CPU time that a request takes in the endpoint; no two have equal bodies."""
    pool = ManualPool(1)
    endpoint = Endpoint(EndpointConfig(name="x", single_flight=sharing), BatchConfig(max_size=64), pool)
    await endpoint.start()
    bodies = [number.to_bytes(8) + bytes(size - 8) for number in range(requests)]
    left = requests

    def replied(_request: Request, _outcome: Any) -> None:
        nonlocal left
        left -= 1

    began = time.process_time()
    for first in range(0, requests, 64):
        for body in bodies[first : first + 64]:
            endpoint.submit(Request(body, replied, PARAMS["json", "json"]))
        while endpoint.in_flight:
            await asyncio.sleep(0)
            for batch in [*pool.running]:
                pool.complete(batch, [b""] * len(batch.entries), 0.01)
    took_s = time.process_time() - began
    assert left == 0
    return took_s / requests * 1e6


def digest_us(size: int, requests: int) -> float:
    """Return the microseconds of CPU time that the digest of so many bytes takes."""
    body = bytes(size)
    began = time.process_time()
    for _ in range(requests):
        blake2b(body, digest_size=16).digest()
    return (time.process_time() - began) / requests * 1e6


def print_cpu() -> None:
    """Print a row for each length of a body."""
    print("| body, bytes | off, us | all, us | more, us | digest alone, us |\n|---|---|---|---|---|")
    for size, requests in ((100, 6400), (1_000, 6400), (16_000, 3200), (100_000, 640), (1_000_000, 128)):
        off, shared = (min(asyncio.run(cpu_us(how, size, requests)) for _ in range(5)) for how in ("off", "all"))
        alone = min(digest_us(size, requests) for _ in range(5))
        print(f"| {size} | {off:.1f} | {shared:.1f} | {shared - off:.1f} | {alone:.1f} |")


def main() -> None:
    """Print a row for each exponent, and then what a request takes."""
    print("| Zipf | off, answers/s | all, answers/s | gain |\n|---|---|---|---|")
    for exponent in (0.8, 1.1):
        rates: list[float] = []
        for sharing in ("off", "all"):
            clock = FakeClock()
            rates.append(clock.run(answers_per_s(clock, sharing, exponent)))
        print(f"| {exponent} | {rates[0]:.0f} | {rates[1]:.0f} | {rates[1] / rates[0]:.2f} |")
    print_cpu()


if __name__ == "__main__":
    main()
