# SPDX-License-Identifier: Apache-2.0
"""`forebay analyse PROFILE`: what the profile lines of a pipeline server say, and how many workers its ops need."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.cli.numbers import positive
from forebay.cli.trace import advice, aligned
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.figures.analyst import Analyst

DESCRIPTION = """\
Read the PROFILE lines that a pipeline server wrote with use_profile: true, or that a client printed with profile=True,
and print the cost of each op, the bottleneck, and how many workers each op needs. Other lines are skipped. Profiles of
the original work as well.
"""

EPILOG = """\
examples:
  forebay serve service.py > profile.txt 2>&1
  forebay analyse profile.txt --qps 50 --trace trace.json
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "analyse", help="report on the profile of a pipeline server", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("profile", metavar="PROFILE", type=Path, help="a file with PROFILE lines")
    parser.add_argument(
        "--qps", type=positive, metavar="N", help="print how many workers each op needs for N requests a second"
    )
    parser.add_argument(
        "--path",
        metavar="OP,OP",
        help="ops of the critical path, for the average cost (all of them)",
    )
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write the events as a trace for Perfetto")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Read and print."""
    from forebay.surfaces.pipeline.figures.analyst import Analyst

    analyst = Analyst(parsed.profile)
    for line in report(analyst, parsed.qps, parsed.path.split(",") if parsed.path else None):
        sys.stdout.write(line + "\n")
    if parsed.trace is not None:
        try:
            analyst.save_trace(parsed.trace)
        except OSError as failure:
            raise ConfigError(f"{parsed.trace} cannot be written: {failure.strerror}") from failure
        sys.stderr.write(f"forebay: wrote {parsed.trace}; open it in https://ui.perfetto.dev or chrome://tracing\n")
    return 0


def report(analyst: Analyst, qps: float | None, path: list[str] | None) -> list[str]:
    """Return the lines that tell a person what a profile says.

    Args:
        qps: Requests a second that are expected.
        path: The critical path; None takes all ops.

    Raises:
        ConfigError: If no op ran, or the path names one that did not.
    """
    from forebay.observe.metrics import capacity

    call_ms, prepack_ms, postpack_ms, ops = analyst.get_profile()
    if not ops.ops:
        msg = "the file has no PROFILE line of an op; serve with use_profile: true under dag, and send requests"
        raise ConfigError(msg)
    costs_s = {op: ops.cost(op).total_s for op in ops.ops}
    shares_s = {op: cost_s / ops.calls_per_run(op) for op, cost_s in costs_s.items()}
    rows = [
        [
            op,
            *(f"{ops.times(op).get(step, 0.0):.3f}" for step in ("prep", "midp", "postp")),
            f"{costs_s[op] * 1000:.3f}",
            f"{ops.calls_per_run(op):.2f}",
        ]
        for op in ops.ops
    ]
    workers = [["workers"], *([str(ops.workers(op))] for op in ops.ops)]
    table = [["mean in ms", "prep", "midp", "postp", "cost", "calls/run"], *rows]
    lines = [*aligned([row + more for row, more in zip(table, workers, strict=True)]), ""]
    if call_ms:
        lines.append(
            f"a call took {call_ms:.3f} ms: {prepack_ms:.3f} of them to read it, {postpack_ms:.3f} to write its answer"
        )
    slowest, able = capacity.throughput({op: (max(shares_s[op], 1e-9), ops.workers(op)) for op in ops.ops})
    lines.append(f"bottleneck: {slowest}, which lets up to {able:.4g} requests/s through")
    on_path = path or ops.ops
    average_ms = sum(ops.cost(op).total_s for op in on_path) * 1000
    hint = "" if path or len(on_path) == 1 else "; give --path if some of them run in parallel"
    lines.append(f"without waiting, a request takes {average_ms:.4g} ms on the path {', '.join(on_path)}{hint}")
    if qps is not None:
        lines += advice(shares_s, qps, able)
    return lines
