# SPDX-License-Identifier: Apache-2.0
"""What batch keys gain: the sentence-vectors example as it is, and without its `batch_key`.

Without keys a batch holds short and long sentences, all padded to the longest. Both serve the same sentences to the
same number of clients, each of which asks again as soon as it is answered; rounds alternate, the table has medians.
Lengths are log-uniform from 4 to 150 words: most sentences are short, most tokens are in long ones.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import random
import statistics
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from forebay.protocols.native import PARAMS
from forebay.server.config import Overrides
from forebay.serving.endpoint import Endpoint
from forebay.surfaces.native.model_endpoint import serve_model

MODEL = Path(__file__).resolve().parents[1] / "examples" / "sentence-vectors" / "model.py"
SHORTEST, LONGEST = 4, 150
TEXT = "the a in of market cat river walks slowly behind old green house while seven engineers measure rain"
WORDS = TEXT.split()


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sentence_vectors", MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def sentences(count: int) -> list[bytes]:
    draw = random.Random(0)
    lengths = [round(math.exp(draw.uniform(math.log(SHORTEST), math.log(LONGEST)))) for _ in range(count)]
    return [json.dumps(" ".join(draw.choices(WORDS, k=length))).encode() for length in lengths]


def counted(model: Any) -> Any:
    """The model, counting how many of the tokens it is given are padding."""

    class Counted(model):
        tokens = padded = 0

        def predict(self, batch: Any) -> Any:
            type(self).tokens += int(batch.lengths["length"].sum())
            type(self).padded += batch.arrays["ids"].size
            return super().predict(batch)

    Counted.__module__ = model.__module__
    return Counted


async def rate(endpoint: Endpoint, bodies: list[bytes], clients: int) -> float:
    """Sentences a second."""
    left = iter(bodies)

    async def client() -> None:
        for body in left:
            await endpoint.call(body, params=PARAMS["json", "json"], timeout_s=600.0)

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return len(bodies) / (time.perf_counter() - started)


async def measure(rounds: int, count: int, clients: int) -> dict[str, tuple[list[float], float]]:
    """Rates of all rounds, and the share of padding, with and without keys."""
    model = example().SentenceVectors
    models = {
        "batch keys": counted(model),
        "all to the longest": counted(type("Longest", (model,), {"batch_key": None, "__module__": model.__module__})),
    }
    overrides = Overrides(worker_kind="thread")
    endpoints = {name: serve_model(made, overrides).endpoint for name, made in models.items()}
    rates: dict[str, list[float]] = {name: [] for name in models}
    bodies = sentences(count)
    for endpoint in endpoints.values():
        await endpoint.start()
        await rate(endpoint, bodies[:clients], clients)
    for number in range(rounds):
        for name in list(models)[:: 1 if number % 2 else -1]:
            rates[name].append(await rate(endpoints[name], bodies, clients))
    for endpoint in endpoints.values():
        await endpoint.drain(1.0)
    return {name: (rates[name], 1 - made.tokens / made.padded) for name, made in models.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sentences", type=int, default=400, help="in each round")
    parser.add_argument("--clients", type=int, default=64)
    options = parser.parse_args()
    found = asyncio.run(measure(options.rounds, options.sentences, options.clients))
    print("| | sentences/s, median | lowest | highest | padding |\n|---|---|---|---|---|")
    for name, (rates, padding) in found.items():
        figures = f"{statistics.median(rates):.1f} | {min(rates):.1f} | {max(rates):.1f}"
        print(f"| {name} | {figures} | {padding:.0%} |")
    keyed, longest = (statistics.median(rates) for rates, _ in found.values())
    print(f"\nBatch keys: {keyed / longest:.2f} times the sentences a second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
