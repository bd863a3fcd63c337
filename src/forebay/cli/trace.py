# SPDX-License-Identifier: Apache-2.0
"""`forebay trace URL`: record what a running server does, keep it for Perfetto, and say where the time goes."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException, InvalidURL
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib import error, request

import msgspec

from forebay.cli.call_model import reason_of
from forebay.cli.numbers import positive, seconds
from forebay.cli.output_file import require_writable
from forebay.cli.request_head import add_key_flag, key_header, url_of
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.observe.traces.trace_summary import NodeSummary, Summary, Times

_AGAIN_S: Final = 0.5
_AT_ONCE_S: Final = 0.3
"""Within this time come answers that need no recording, such as errors."""

DESCRIPTION = """\
Record a running server for some seconds and write a trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.
Print where the time goes: how long requests wait and run in each model and graph node, which one is the bottleneck, and
how many workers each needs.
"""

EPILOG = """\
examples:
  forebay trace http://127.0.0.1:8080
  forebay trace http://127.0.0.1:8080 --seconds 30 -o busy.json --qps 50
"""

MARGIN_S = 60.0
"""How long the server may take to write the trace after it has recorded it."""

IDLE: Final = 0.05
"""Of a node that runs for less than this share of the time it is not known what it limits."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "trace", help="record a running server and show where the time goes", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("url", metavar="URL", help="of the server, such as http://127.0.0.1:8080")
    parser.add_argument(
        "--seconds", type=seconds(0.1, 86_400), default=10.0, metavar="S", help="how long to record (10)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("trace.json"), metavar="FILE", help="where to write it (trace.json)"
    )
    add_key_flag(parser)
    parser.add_argument(
        "--qps", type=positive, metavar="N", help="print how many workers each node needs for N requests a second"
    )
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Record, write and print."""
    from forebay.errors import InvalidRequest
    from forebay.observe.traces.trace_summary import summarise

    require_writable("--output", parsed.output)
    name = f"cli-{os.getpid()}-{time.monotonic_ns()}"
    trace = _with_progress(
        lambda: _fetch(parsed.url, f"seconds={parsed.seconds:g}&id={name}", parsed.api_key, parsed.seconds),
        parsed.seconds,
        end=lambda: _fetch(parsed.url, f"id={name}", parsed.api_key, 0.0, "POST"),
    )
    try:
        summary = summarise(trace)
    except InvalidRequest as failure:
        raise ConfigError(f"{parsed.url} answers, but is not a forebay server: {failure.message}") from failure
    try:
        parsed.output.write_bytes(trace)
    except OSError as failure:
        raise ConfigError(f"{parsed.output} cannot be written: {failure.strerror}") from failure
    finally:  # what was recorded is told even so
        for line in report(summary, parsed.qps):
            sys.stdout.write(line + "\n")
    sys.stderr.write(f"forebay: wrote {parsed.output}; open it in https://ui.perfetto.dev or chrome://tracing\n")
    return 0


def report(summary: Summary, qps: float | None) -> list[str]:
    """Return the lines that tell a person what a trace says."""
    if not summary.nodes:
        return [f"no batch ran within {summary.seconds:.3g} s; send requests while the server is recorded"]
    lines = [*_table(summary.nodes), ""]
    lines += [
        f"{whole.name}: {whole.requests} requests, {_pair(whole.latency)} ms from door to door (mean/p95)"
        for whole in summary.wholes
    ]
    limit = next(node for node in summary.nodes if node.name == summary.bottleneck)
    workers = "1 worker" if limit.slots == 1 else f"{limit.slots} workers"
    lets = f"lets up to {summary.throughput:.4g} requests/s through"
    if limit.busy < IDLE:
        lines.append(f"nothing was saturated: {limit.name}, the busiest, ran {limit.busy:.1%} of the time; it {lets}")
    else:
        lines.append(f"bottleneck: {limit.name}, busy {limit.busy:.0%} of the time with {workers}; it {lets}")
    lines.append(
        f"without waiting, a request takes {summary.average_cost_s * 1000:.4g} ms on the critical path "
        f"({', '.join(summary.critical_path)})"
    )
    if qps is not None:
        lines += advice({node.name: node.cost_s for node in summary.nodes}, qps, summary.throughput)
    if summary.dropped:
        lines.append(f"{summary.dropped} batches did not fit into the recording; record for a shorter time")
    return lines


def advice(costs_s: Mapping[str, float], qps: float, able: float) -> list[str]:
    """Return what `qps` requests a second need, and what becomes of them as it is.

    Args:
        costs_s: What one request costs a worker of each node, in seconds.
        qps: Requests a second that are expected.
        able: Requests a second that can be answered now.
    """
    from forebay.observe.metrics import capacity

    needs = ", ".join(f"{name} {capacity.workers_needed(cost_s, qps)}" for name, cost_s in costs_s.items())
    lines = [f"workers needed for {qps:g} requests/s: {needs}"]
    more = capacity.accumulation(qps, able, 1.0)
    if more:
        lines.append(f"with the workers there are, {more:.4g} requests more wait after each second")
    return lines


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]


def _table(nodes: Sequence[NodeSummary]) -> list[str]:
    head = ["mean/p95 in ms", "requests", "queue", "pre", "process", "post", "batch", "busy"]
    rows = [
        [
            node.name,
            str(node.requests),
            _pair(node.queue),
            _pair(node.pre),
            _pair(node.process),
            _pair(node.post),
            f"{node.requests / node.batches:.2f}",
            f"{node.busy:.0%} of {node.slots}",
        ]
        for node in nodes
    ]
    return aligned([head, *rows])


def _pair(times: Times) -> str:
    return f"{times.mean:.2f}/{times.p95:.2f}"


def _with_progress(work: Callable[[], bytes], seconds: float, end: Callable[[], object]) -> bytes:
    """Do the work and say every second how far it is; Ctrl+C calls `end`, and a second one gives up.

    Raises:
        ConfigError: What the work raised.
    """
    result: list[bytes] = []
    failures: list[BaseException] = []
    done = threading.Event()  # a `join` that Ctrl+C interrupts takes the thread for dead (Python 3.11)

    def do() -> None:
        try:
            result.append(work())
        except BaseException as failure:  # noqa: BLE001 - raised again below
            failures.append(failure)
        done.set()

    threading.Thread(target=do, daemon=True).start()
    try:
        _show_progress(done, seconds)
    except KeyboardInterrupt:
        sys.stderr.write("\nforebay: finishing the recording; press Ctrl+C again to discard it\n")
        while not done.is_set():  # it may not have begun yet
            with contextlib.suppress(ConfigError):
                end()
            done.wait(_AGAIN_S)
    if sys.stderr.isatty():
        sys.stderr.write("\r\033[K")
    if failures:
        raise failures[0]
    return result[0]


def _show_progress(done: threading.Event, seconds: float) -> None:
    started = time.monotonic()
    if not done.wait(_AT_ONCE_S):
        sys.stderr.write(f"forebay: recording for {seconds:g} s; Ctrl+C ends it early\n")
    while not done.wait(1.0):
        passed = min(time.monotonic() - started, seconds)
        if sys.stderr.isatty():
            sys.stderr.write(f"\rforebay: recording, {passed:.0f} of {seconds:g} s ")
            sys.stderr.flush()


def _fetch(url: str, query: str, api_key: str | None, seconds: float, method: str = "GET") -> bytes:
    asked = f"{url_of(url).geturl().rstrip('/')}/trace?{query}"
    try:
        message = request.Request(asked, headers=key_header(api_key), method=method)  # noqa: S310 - http or https
        with request.urlopen(message, timeout=seconds + MARGIN_S) as answer:  # noqa: S310 - http or https
            return answer.read()
    except error.HTTPError as answer:
        raise ConfigError(f"{url} answers {answer.code}: {fault_of(answer.read())}") from answer
    except InvalidURL as failure:
        raise ConfigError(f"{url!r} is not a URL: {failure}") from failure
    except (error.URLError, HTTPException, OSError) as failure:
        raise ConfigError(f"{url} does not answer: {reason_of(failure)}") from failure


def fault_of(body: bytes) -> str:
    """Return the sentence in an error answer of forebay's, else the beginning of whatever it is."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return body[:100].decode(errors="replace").strip() or "nothing more"
