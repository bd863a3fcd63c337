# SPDX-License-Identifier: Apache-2.0
"""`forebay costs URL|FOLDER`: what tenants and models have cost, of a running server or its `--cost-log` folder."""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from forebay.cli.numbers import positive, seconds
from forebay.cli.request_head import add_key_flag
from forebay.cli.server_page import page_of
from forebay.cli.trace import aligned
from forebay.errors import ConfigError
from forebay.observe.metrics.cost_files import CostLine, lines_since, summed
from forebay.observe.metrics.tenant_accounts import NOTHING, Amounts, plus

DESCRIPTION = """\
Print how long workers were busy for each tenant and model. SOURCE is a server that runs with --cost-log, or the folder
of its files. With a price for a worker second (--price), it prints the cost as well.
"""

EPILOG = """\
examples:
  forebay costs http://127.0.0.1:8080 --since 1h --by tenant,model
  forebay costs costs/ --since 30d --by tenant --price 0.0004 --csv
"""

BY: Final = ("tenant", "model", "version")
_LONGEST_S: Final = 20 * 365 * 86_400


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "costs", help="show the costs of tenants and models", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("source", metavar="SOURCE", help="http://HOST:PORT of a server, or a folder")
    parser.add_argument(
        "--since",
        type=seconds(1, _LONGEST_S),
        default=3600.0,
        metavar="TIME",
        help="how far back: 90s, 15m, 1h, 30d (1h)",
    )
    parser.add_argument(
        "--by", type=_by, default=("tenant", "model"), metavar="NAMES", help="of tenant, model, version (tenant,model)"
    )
    parser.add_argument("--price", type=positive, metavar="P", help="of a worker second")
    parser.add_argument("--csv", action="store_true", help="write CSV instead of a table")
    add_key_flag(parser)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Add up and print."""
    is_url = re.match(r"https?://", parsed.source) is not None
    lines = _asked(parsed) if is_url else _read(Path(parsed.source), parsed.since)
    head, *rows = table(lines, parsed.by, parsed.price, has_tokens=parsed.csv)
    if parsed.csv:
        csv.writer(sys.stdout, lineterminator="\n").writerows([head, *rows])
    elif not rows:
        sys.stdout.write("nothing ran in this time\n")
    else:
        for text in aligned([head, *rows]):
            sys.stdout.write(text + "\n")
    return 0


def table(
    lines: Sequence[CostLine], by: Sequence[str], price: float | None, *, has_tokens: bool = False
) -> list[list[str]]:
    """Return the head and the rows of what lines come to, the dearest first.

    Args:
        by: The names of the fields by which.
        price: Of a worker second.
        has_tokens: Whether there are columns for tokens although no model has counted any.
    """
    sums: dict[tuple[str, ...], Amounts] = {}
    for line in lines:
        key = tuple(getattr(line, name) for name in by)
        sums[key] = plus(sums.get(key, NOTHING), line.amounts)
    total = sum(worker_s for worker_s, *_ in sums.values()) or 1.0
    has_tokens = has_tokens or any(prompt or completion for *_, prompt, completion in sums.values())
    names = ["prompt_tokens", "completion_tokens"] if has_tokens else []
    found = [[*by, "worker_s", "rows", "share", *names, *(["cost"] if price else [])]]
    for key, (worker_s, rows, *tokens) in sorted(sums.items(), key=lambda one: (-one[1][0], one[0])):
        cost = [f"{worker_s * price:.6g}"] if price else []
        counted = map(str, tokens) if has_tokens else ()
        found.append([*key, f"{worker_s:.6f}", str(rows), f"{worker_s / total:.4f}", *counted, *cost])
    return found


def _read(folder: Path, since_s: float) -> list[CostLine]:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of --cost-log, or a server with http://")
    try:
        return summed(lines_since(folder, time.time() - since_s))
    except OSError as failure:
        raise ConfigError(f"{failure.filename or folder} cannot be read: {failure.strerror}") from failure


def _asked(parsed: argparse.Namespace) -> list[CostLine]:
    path = f"costs?since_s={parsed.since:.0f}"
    return page_of(parsed.source, path, parsed.api_key, list[CostLine])


def _by(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= {*BY} or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(BY)} with commas between them, got {text!r}")
    return names
