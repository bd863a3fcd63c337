# SPDX-License-Identifier: Apache-2.0
"""`forebay bench URL [DATA]`: ask a server again and again, and show how many answers come and how long they take."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.numbers import between, seconds
from forebay.cli.output_file import require_writable
from forebay.cli.request_body import body_of
from forebay.cli.request_head import add_header_flags, headers_of
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.cli.load_generator import Measurement

DESCRIPTION = """\
Send one request repeatedly for some seconds, and print throughput and latency. DATA is as in `forebay call`: JSON,
@FILE, - for standard input, or NAME=VALUE. Without DATA the URL is fetched with GET.

  closed loop   --clients 32: each client sends its next request as soon as it has its answer. It measures the most that
                a server can do. A slow server gets fewer requests, so its latency looks better than it is.
  open loop     --rate 200: requests are sent at a fixed rate. Latency counts from the moment a request was due. It
                measures latency at that load. Choose a rate below the closed loop's; above it, only the queue grows.

One request is sent first. If it fails, nothing is measured. Look at the high percentiles: half of all requests take
longer than p50, one in a hundred longer than p99.
"""

EPILOG = """\
examples:
  forebay bench http://127.0.0.1:8080/models/iris '{"measures": [5.1, 3.5, 1.4, 0.2]}'
  forebay bench http://127.0.0.1:8080/models/iris @flower.json --clients 64 --seconds 20
  forebay bench http://127.0.0.1:8080/models/iris @flower.json --rate 500 --svg iris.svg
"""

_FULL: Final = 0.9
"""Part of its time this program may work before it is what is measured."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench", help="measure how fast a server answers", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("url", metavar="URL", help="such as http://127.0.0.1:8080/models/iris")
    parser.add_argument("data", metavar="DATA", nargs="*", help="the body to send")
    load = parser.add_mutually_exclusive_group()
    load.add_argument(
        "--clients", "-c", type=between(int, 1, 5000), metavar="N", help="clients of a closed loop, 1 to 5000 (16)"
    )
    load.add_argument(
        "--rate", "-r", type=between(float, 0.1, 100_000), metavar="N", help="requests a second of an open loop"
    )
    parser.add_argument(
        "--seconds", "-s", type=seconds(0.2, 3600), default=10.0, metavar="S", help="how long, 0.2 to 3600 (10)"
    )
    parser.add_argument(
        "--warmup-s", type=seconds(0, 600), default=1.0, metavar="S", help="asked before, and not counted (1)"
    )
    parser.add_argument(
        "--timeout-s", type=seconds(0.01, 600), default=30.0, metavar="S", help="an answer is lost after it (30)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the times into this file as well")
    add_header_flags(parser)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure and show; the exit status is 0 if every answer was good, and 1 if not."""
    import uvloop

    from forebay.cli import load_generator

    body, content_type = body_of(parsed.data)
    target = load_generator.target_of(parsed.url, body, headers_of(parsed, content_type))
    if parsed.svg is not None:
        require_writable("--svg", parsed.svg)

    async def measure() -> Measurement:
        status, answer = await load_generator.ask_once(target, parsed.timeout_s)
        if status >= 400:
            hint = "; add DATA, the body to send" if body is None else ""
            msg = f"{parsed.url} answers {status}: {answer[:300].decode(errors='replace')}{hint}; nothing was measured"
            raise ConfigError(msg)
        times = parsed.seconds, parsed.warmup_s, parsed.timeout_s
        if parsed.rate is not None:
            return await load_generator.open_loop(target, parsed.rate, *times)
        return await load_generator.closed_loop(target, parsed.clients or 16, *times)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(measure())
    except OSError as error:
        raise ConfigError(f"{parsed.url} does not let in more clients: {error.strerror or error}") from error
    _show(parsed, result)
    return 1 if result.failed or result.unsent or not result.took else 0


def _show(parsed: argparse.Namespace, result: Measurement) -> None:
    from forebay.cli import plots

    load = f"{parsed.rate:g} requests a second" if parsed.rate is not None else f"{parsed.clients or 16} clients"
    asked = f" of {parsed.seconds:g} s, then Ctrl+C" if result.seconds < parsed.seconds else ""
    print(f"{parsed.url}, {load}, {result.seconds:.4g} s{asked}")
    print(f"  {len(result.took)} good answers, {result.per_second:.4g} a second")
    for status, count in sorted(result.statuses.items()):
        if status >= 400:
            print(f"  {count} answers with status {status}")
    for why, count in result.lost.most_common():
        print(f"  {count} lost: {why}")
    if result.unsent:
        print(f"  {result.unsent} were due while all connections waited, and were not sent: the rate is too high")
    if result.busy > _FULL:
        print("  this program had no time left: the server may be faster than that; measure with fewer, or from two")
    if not result.took:
        return
    ordered = sorted(result.took)
    shown = [f"p{percent:g} {plots.spelled(plots.percentile(ordered, percent))}" for percent in plots.PERCENTILES]
    print("  " + ", ".join([*shown, f"slowest {plots.spelled(ordered[-1])}"]), end="\n\n")
    sys.stdout.writelines(line + "\n" for line in plots.bars(result.took))
    if parsed.svg is not None:
        title = f"{parsed.url}, {load}: {result.per_second:.4g} answers a second"
        try:
            parsed.svg.write_text(plots.svg(title, result.took, result.ended, result.seconds), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{parsed.svg} cannot be written: {error.strerror}") from error
