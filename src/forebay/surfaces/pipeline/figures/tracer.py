# SPDX-License-Identifier: Apache-2.0
"""The tracer: every `dag.tracer.interval_s` a block of figures in a file, and the same as metrics of Prometheus.

The server tells it of each request that was answered. What ops do is learnt from the timeline of the process that
hosts them.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.observe.metrics.node_totals import NodeTotals
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline.figures.profile import token

if TYPE_CHECKING:
    from prometheus_client import Metric

SHORTEST_S: Final = 1.0
"""An interval below this turns the tracer off."""
FILE: Final = "pipeline.tracer"
LATENCIES: Final = 100_000
"""Latencies kept of one interval; of more, a fair sample."""
ERROR_IDS: Final = 100
"""Failed requests named in one block."""
MAX_BYTES: Final = 64 * 1024 * 1024
KEPT: Final = 5
_SHARES: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)


class Tracer:
    """Counts what the ops of a graph and its requests do, as it is told; a collector of prometheus-client as well.

    The metrics are the original's five, by the original's names; they only rise.
    """

    def __init__(
        self,
        workers: Mapping[str, int],
        inputs: Mapping[str, Sequence[str]] = MappingProxyType({}),
        waiting: Callable[[], Mapping[str, int]] = dict,
        limit: int = 0,
    ) -> None:
        """Describe the graph.

        Args:
            waiting: Returns how many requests are before each op now.
            limit: How many may be; 0 for any number.
        """
        self._workers = workers
        self._inputs = inputs
        self._waiting = waiting
        self._limit = limit
        self._ever: dict[str, NodeTotals] = {}
        self._by_outcome = {True: 0, False: 0}
        self._query_s = 0.0
        self._begin(time.monotonic())

    def _begin(self, now: float) -> None:
        self._since = now
        self._ops = {op: NodeTotals() for op in self._workers}
        self._latencies = array("d")
        self._answered = self._failures = 0
        self._latency_s = 0.0
        self._failed: list[int] = []

    def ran(self, op: str, totals: NodeTotals) -> None:
        """Count what an op did."""
        if op in self._ops:
            self._ops[op].add(totals)
        self._ever.setdefault(op, NodeTotals()).add(totals)

    def answered(self, data_id: int | None, latency_s: float, *, ok: bool) -> None:
        """Count one request that was answered; it has no number if it was refused before it got one."""
        self._by_outcome[ok] += 1
        self._query_s += latency_s
        self._answered += 1
        self._latency_s += latency_s
        if len(self._latencies) < LATENCIES:
            self._latencies.append(latency_s)
        elif (place := random.randrange(self._answered)) < LATENCIES:  # noqa: S311 - a sample, not a secret
            self._latencies[place] = latency_s
        if not ok:
            self._failures += 1
            if data_id is not None and len(self._failed) < ERROR_IDS:
                self._failed.append(data_id)

    def block(self, now: float | None = None) -> str:
        """Return the figures since the last block, and begin the next interval at `now`, by `time.monotonic`."""
        now = time.monotonic() if now is None else now
        seconds = max(now - self._since, 1e-9)
        lines = ["==================== TRACER ======================"]
        for op, totals in self._ops.items():
            lines += self._op_lines(op, totals, seconds)
        lines += self._call_lines(seconds)
        lines.append("Channel:")
        for number, (op, size) in enumerate(self._waiting().items()):  # the channel that its predecessors write
            producers = [token(name) for name in self._inputs[op]]
            lines.append(f"\tchl{number}(In: {producers}, Out: {[token(op)]}) size[{size}/{self._limit}]")
        lines.append(lines[0])
        self._begin(now)
        return "\n".join(lines) + "\n"

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; the interface of prometheus-client's collectors."""
        from prometheus_client.core import CounterMetricFamily

        for name, said, value in (
            ("success", "Requests that were answered", self._by_outcome[True]),
            ("failure", "Requests that were answered with an error", self._by_outcome[False]),
            ("duration_us", "Time of all requests, in microseconds", self._query_s * 1e6),
        ):
            yield CounterMetricFamily(f"pd_query_request_{name}", said, value=value)
        count = CounterMetricFamily("pd_inference_count", "Requests that the model of an op ran", labels=["model"])
        duration = CounterMetricFamily(
            "pd_inference_duration_us", "Time of the models of an op, in microseconds", labels=["model"]
        )
        for op, totals in [*self._ever.items()]:  # another thread asks
            count.add_metric([op], totals.requests)
            duration.add_metric([op], totals.process_s * 1e6)
        yield count
        yield duration

    def _op_lines(self, op: str, totals: NodeTotals, seconds: float) -> list[str]:
        batches, requests = max(totals.runs, 1), max(totals.requests, 1)
        means = {
            "in": totals.waited_s / requests,
            "prep": totals.pre_s / batches,
            "midp": totals.process_s / batches,
            "postp": totals.post_s / batches,
            "out": totals.out_s / batches,
        }
        idle = min(max(1 - totals.busy_s / (self._workers[op] * seconds), 0.0), 1.0)
        return [
            f"Op({token(op)}):",
            *(f"\t{name}[{mean_s * 1000:.3f} ms]" for name, mean_s in means.items()),
            f"\tidle[{idle:.3f}]",
        ]

    def _call_lines(self, seconds: float) -> list[str]:
        count = self._answered
        latencies = sorted(self._latencies)
        return [
            "DAGExecutor:",
            f"\tQuery count[{count}]",
            f"\tQPS[{count / seconds:.3f} q/s]",
            f"\tSucc[{(count - self._failures) / count if count else 1.0:.3f}]",
            f"\tError req[{', '.join(map(str, self._failed))}]",
            "\tLatency:",
            f"\t\tave[{self._latency_s / max(count, 1) * 1000:.3f} ms]",
            *(f"\t\t{_share(share)}[{_at(latencies, share) * 1000:.3f} ms]" for share in _SHARES),
        ]


class TracerFile:
    """Writes the blocks of a tracer to a file that is rotated when it is large."""

    def __init__(self, tracer: Tracer, folder: Path, interval_s: float) -> None:
        """Open the file.

        Args:
            folder: Where `pipeline.tracer` is made.
            interval_s: Seconds between two blocks, at least `SHORTEST_S`.

        Raises:
            ConfigError: If the folder cannot be written.
        """
        self._tracer = tracer
        self._interval_s = interval_s
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = logs.PatientFile(folder / FILE, maxBytes=MAX_BYTES, backupCount=KEPT, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the tracer's folder {folder} cannot be written: {error.strerror}") from error
        self._file.setFormatter(logging.Formatter("%(asctime)s\n%(message)s"))

    async def run(self) -> None:
        """Write a block every interval, until cancelled; what happened since the last one is then written as well."""
        try:
            while True:
                await asyncio.sleep(self._interval_s)
                self.write()
        finally:
            self.write()
            self._file.close()

    def write(self) -> None:
        """Write a block now."""
        self._file.handle(logging.makeLogRecord({"msg": self._tracer.block(), "created": time.time()}))


class MetricsPort:
    """A port of its own where Prometheus finds the counters: `dag.enable_prometheus`; served by a thread."""

    def __init__(self, tracer: Tracer, host: str, port: int) -> None:
        """Open the port; 0 takes any that is free.

        Raises:
            ConfigError: If it is taken.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(tracer)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"prometheus_port {port} cannot be used: {error.strerror}; choose another one") from error

    @property
    def port(self) -> int:
        """The port."""
        return self._server.server_port

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _share(share: float) -> str:
    return f"{share:.2f}".removeprefix("0")


def _at(values: Sequence[float], share: float) -> float:
    """Return the value that this share of sorted values does not exceed."""
    return values[min(int(len(values) * share), len(values) - 1)] if values else 0.0
