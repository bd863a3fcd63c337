# SPDX-License-Identifier: Apache-2.0
"""Runs every fuzzer of this folder for an equal part of the time: `python -m tests.fuzz.run --minutes 30 --seed 1`.

A fuzzer is a module `door_*.py` with `main(seconds, seed)`, which prints what it found and returns how many differences
that are.
"""

import argparse
import importlib
import sys
from pathlib import Path


def doors() -> list[str]:
    """The names of the fuzzers there are."""
    return sorted(path.stem for path in Path(__file__).parent.glob("door_*.py"))


def run(names: list[str], seconds: float, seed: int) -> int:
    """Run these fuzzers one after the other; returns the number of differences."""
    print(f"fuzzing {', '.join(names)} for {seconds:.0f} seconds with seed {seed}", flush=True)
    return sum(importlib.import_module(f"tests.fuzz.{name}").main(seconds / len(names), seed) for name in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="time for all of them together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("doors", nargs="*", default=doors(), help="only these")
    given = parser.parse_args()
    sys.exit(run(given.doors, given.minutes * 60, given.seed) > 0)
