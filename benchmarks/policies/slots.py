# SPDX-License-Identifier: Apache-2.0
"""Several slots beside a grid of hand-set sizes and waits, in a simulation; the tests look at the corners of it.

From the repository, `.venv/bin/python -m benchmarks.policies.slots` prints the rows and writes RESULTS-slots.md, in a
few minutes on two cores.
"""

from __future__ import annotations

import argparse
import itertools
from multiprocessing import Pool
from pathlib import Path

from benchmarks.policies.simulation import CLIFFS, CURVES, OBJECTIVE_S, RETURNS, Crowd, by_hand, most

SLOTS = (2, 4, 8)
CLIENTS = (4, 8, 16, 32, 64, 128, 256)
LOADS = (0.1, 0.3, 0.6, 0.8, 0.95)
STRANGERS = 0.24
"""Share of what the slots can serve that comes whenever it likes, where there is such load beside closed clients."""


def closed(row):
    """Return the row with the best values by hand and what the rule reaches of their throughput."""
    slots, clients, curve, returns, strangers, policy = row
    time_of = {**CURVES, **CLIFFS}[curve]
    traffic = {"clients": clients, "returns": RETURNS[returns], "rows": max(4_000, 48 * clients)}
    if strangers:
        traffic["rate"] = STRANGERS * most(time_of, slots)
    if policy == "gather":
        best, which = by_hand(time_of, slots, **traffic)
        return row, which, Crowd(time_of, slots, **traffic).throughput / best
    objective_s = OBJECTIVE_S[curve]
    traffic["origins"] = policy == "auto"
    best, which = by_hand(time_of, slots, objective_s=objective_s, **traffic)
    auto = Crowd(time_of, slots, objective_s=objective_s, **traffic)
    held = auto.quantile_s(0.95) <= objective_s
    return row, which, auto.throughput / best if held and best else 0.0


def opened(row):
    """Return the row with the mean and the p99 as a share of those of `go`."""
    slots, curve, load = row
    traffic = {"rate": load * most(CURVES[curve], slots), "rows": 16_000}
    rule = Crowd(CURVES[curve], slots, **traffic)
    go = Crowd(CURVES[curve], slots, idle="go", **traffic)
    return row, rule.mean_s / go.mean_s, rule.quantile_s(0.99) / go.quantile_s(0.99)


def kinds():
    """What is simulated, by the line of the table it is summed up in."""
    yield "at once", CURVES, [("at once", False, "gather")]
    yield "within 1 ms", CURVES, [("within 1 ms", False, "gather")]
    yield "log-normal think times, median 5 ms", CURVES, [("thinking", False, "gather")]
    yield "a quarter of the load is strangers", CURVES, [(returns, True, "gather") for returns in RETURNS]
    yield "a latency objective", CURVES, [(returns, False, "auto") for returns in ("at once", "within 1 ms")]
    yield "and clients that cannot be told apart", CURVES, [("at once", False, "auto, no origin")]
    yield "cost that jumps (33 rows and more, tiles of 8)", CLIFFS, [("at once", False, "gather")]
    yield "and a latency objective", CLIFFS, [("at once", False, "auto")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--only", default="", help="lines of the table whose name contains this")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "RESULTS-slots.md")
    args = parser.parse_args()
    lines = ["| traffic | slots | least | mean | rows | the worst, and the best values by hand for it |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    with Pool() as pool:
        for name, curves, settings in kinds():
            if args.only not in name:
                continue
            for slots in SLOTS:
                grid = itertools.product([slots], args.clients, curves, settings)
                rows = [(slots, clients, curve, *setting) for slots, clients, curve, setting in grid]
                found = sorted(pool.map(closed, rows, chunksize=1), key=lambda one: one[2])
                worst, which, ratio = found[0]
                mean = sum(one[2] for one in found) / len(found)
                told = f"{worst[1]} clients, {worst[2]}: {which}"
                lines.append(f"| {name} | {slots} | {ratio:.3f} | {mean:.3f} | {len(found)} | {told} |")
                print(lines[-1], flush=True)
        lines += ["", "| open loop, slots | most of the mean of `go` | mean of these | most of its p99 |"]
        lines.append("| --- | --- | --- | --- |")
        for slots in SLOTS if not args.only else ():
            found = pool.map(opened, list(itertools.product([slots], CURVES, LOADS)), chunksize=1)
            means, tails = [one[1] for one in found], [one[2] for one in found]
            lines.append(f"| {slots} | {max(means):.3f} | {sum(means) / len(means):.3f} | {max(tails):.3f} |")
            print(lines[-1], flush=True)
    args.output.write_text(HEADLINE + "\n".join(lines) + "\n", encoding="utf-8")


HEADLINE = """\
# Several slots beside hand-set sizes and waits, simulated

Throughput as a share of the best of 25 hand-set (max_batch_size, max_wait_ms), by
`python -m benchmarks.policies.slots`: 4 to 256 clients, four curves (`simulation.py`), and one that
jumps. With a latency objective only values that hold it count, and 0 stands for an objective that is missed.

Known limits: the rule takes a batch for a + b n seconds, so a share may end just past a jump of the cost, and a quarter
of strangers beside few clients costs up to 9 %.

"""

if __name__ == "__main__":
    main()
