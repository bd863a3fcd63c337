# SPDX-License-Identifier: Apache-2.0
"""Random graphs and sequences of packets, bounds and results: the engine beside a naive model of MediaPipe's rules.

Each is compared after every event, so one that differs is printed with the graph and all that happened to it.

    .venv/bin/python -m tests.fuzz.door_graphs SECONDS SEED
"""

import sys
import traceback
from collections import Counter

from tests.fuzz.patience import awake
from tests.graph.random_graphs import compare


def main(seconds: float, seed: int) -> int:
    """Fuzz for a while; returns the number of differences."""
    until, count, wrong = awake() + seconds, Counter[str](), 0
    while awake() < until:
        try:
            count += compare(f"{seed}.{count['graphs'] + wrong}")
        except Exception:
            wrong += 1
            if wrong <= 5:
                print(traceback.format_exc(), flush=True)
    print(f"graphs: {dict(count)}, {wrong} differences", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
