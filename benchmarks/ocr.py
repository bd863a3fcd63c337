# SPDX-License-Identifier: Apache-2.0
"""What the OCR example gains as a server: pictures a second against the same networks in a plain loop of one thread.

The loop calls the functions and models of the example one after the other, as a script would. The server runs in a
process of its own and is asked over HTTP by several clients, each of which asks again as soon as it is answered.
Rounds alternate. The networks compute in the thread that calls them in both cases: a second core is the server's doing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ocr"
BAR = 1.2


def plain_reader(example: Any) -> Callable[[bytes], Any]:
    """The example as a script would have it: no queue, no thread, no batch of more than one picture."""
    detect, turn, read = example.Detect(), example.Turn(), example.Read()
    for model in (detect, turn, read):
        model.load()

    def page_of(encoded: bytes) -> Any:
        picture = example.decode(encoded)
        (boxes,) = detect.predict([picture])
        lines = turn.predict(example.crop(picture, boxes))
        return example.layout(boxes, lines, [text for line in lines for text in read.predict([line])])

    return page_of


def loop_round(page_of: Callable[[bytes], Any], pictures: list[bytes]) -> list[float]:
    """Seconds for each picture, one after the other."""
    return [seconds for _, seconds in map(timed(page_of), pictures)]


def timed(function: Callable[[bytes], Any]) -> Callable[[bytes], tuple[Any, float]]:
    def call(picture: bytes) -> tuple[Any, float]:
        started = time.perf_counter()
        return function(picture), time.perf_counter() - started

    return call


def alternating(rounds: int) -> Iterator[tuple[str, str]]:
    """Who goes first changes from round to round."""
    for number in range(rounds):
        yield ("loop", "server") if number % 2 else ("server", "loop")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--repeats", type=int, default=4, help="how often each of the three pictures is sent in a round"
    )
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    sys.path.insert(0, str(EXAMPLE))
    example, demo = importlib.import_module("model"), importlib.import_module("demo")
    pictures = [path.read_bytes() for path in sorted((EXAMPLE / "pictures").glob("*.jpg"))]
    page_of = plain_reader(example)
    rates: dict[str, list[float]] = {"loop": [], "server": []}
    latencies: dict[str, list[float]] = {"loop": [], "server": []}
    with (
        demo.running_server() as address,
        httpx.Client(timeout=60.0) as http,
        ThreadPoolExecutor(options.clients) as clients,
    ):

        def ask(picture: bytes) -> str:
            return http.post(f"{address}/models/ocr", content=picture).raise_for_status().json()["text"]

        for picture in pictures:
            if ask(picture) != page_of(picture).text:
                print("the server and the loop read different texts")
                return 1
        list(clients.map(ask, pictures * 2))  # both are warm from here on
        for order in alternating(options.rounds):
            for name in order:
                each = pictures * options.repeats
                started = time.perf_counter()
                if name == "loop":
                    seconds = loop_round(page_of, each)
                else:
                    seconds = [seconds for _, seconds in clients.map(timed(ask), each)]
                rates[name].append(len(each) / (time.perf_counter() - started))
                latencies[name] += seconds
        nodes = http.get(f"{address}/models/ocr").raise_for_status().json()["nodes"]
    print(f"{os.cpu_count()} cores, {options.clients} clients, {options.rounds} rounds of {len(each)} pictures\n")
    print("| | pictures/s, median | lowest | highest | p50 ms | p95 ms |\n|---|---|---|---|---|---|")
    for name, found in rates.items():
        p95 = statistics.quantiles(latencies[name], n=20)[-1]
        figures = f"{statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f}"
        print(f"| {name} | {figures} | {statistics.median(latencies[name]) * 1000:.0f} | {p95 * 1000:.0f} |")
    print("\n| node | batches | samples in one, mean |\n|---|---|---|")
    for name, told in nodes.items():
        print(f"| {name} | {told['batching']['batches']} | {told['batching']['mean_batch_size']} |")
    gain = statistics.median(rates["server"]) / statistics.median(rates["loop"])
    print(f"\nThe server reads {gain:.2f} times the pictures a second; the bar is {BAR}")
    return 0 if gain >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
