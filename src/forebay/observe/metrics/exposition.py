# SPDX-License-Identifier: Apache-2.0
"""The numbers of the endpoints as Prometheus text, a slice at a time.

Theory of operation. The numbers live on the loop, so they are read there, but never all of them in one turn: `write` is
a generator that stops after every few endpoints, and whoever drives it lets others have a turn. The text of a histogram
that did not change since the last scrape is kept, and one that nothing was counted in is left out: its series appear
with the first value. So a scrape costs what happened since the one before.

A page is bounded: it holds at most `MAX_ENDPOINTS` endpoints, the busiest of those that were called, then others. An
endpoint that was called and is on the page stays there, so that series do not come and go, and
`forebay_endpoints_left_out` says how many are missing.

The text is written here, as prometheus-client needs ten times as long for it. The rest of the page is written by
prometheus-client: metrics of the models' authors (`author_metrics.py`) and those of other collectors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import msgspec

from forebay.observe.metrics import gen_ai_families, tenant_families
from forebay.observe.metrics.histograms import histogram_text

if TYPE_CHECKING:
    from prometheus_client.registry import Collector

    from forebay.observe.metrics.endpoint_metrics import EndpointMetrics

T = TypeVar("T")

MAX_ENDPOINTS: Final = 1000
"""Endpoints on a page: at about 80 series each it is 6 MB long."""

SLICE: Final = 16
"""Endpoints that are written in one turn of the loop; each takes 40 us if all of its numbers have changed."""

LOOKED_AT: Final = 512
"""Endpoints of which it is seen in one turn how busy they are."""

OPEN_METRICS: Final = "application/openmetrics-text"

COUNTERS: Final = {
    "forebay_requests": "Requests by outcome",
    "forebay_stream_parts": "Parts of streamed answers handed to clients",
    "forebay_worker_restarts": "Workers that were replaced",
    "forebay_shared_requests": "Requests answered by the run of an equal one",
}

GAUGES: Final = {
    "forebay_in_flight": "Requests without an answer yet",
    "forebay_waiting_requests": "Requests that no worker has begun",
    "forebay_running_requests": "Requests that workers have begun and not answered",
    "forebay_waiting_samples": "Samples in the queue",
    "forebay_workers": "Workers that are up",
    "forebay_workers_wanted": "Workers that there should be",
    "forebay_workers_unhealthy": "Workers that are up and whose model says that it cannot answer",
    "forebay_objective_held": "Whether 95 of 100 answers hold the latency objective",
}

HISTOGRAMS: Final = {
    "forebay_request_seconds": "From submission to outcome",
    "forebay_queue_seconds": "From submission to leaving the queue",
    "forebay_model_seconds": "Time of a batch in the worker",
    "forebay_batch_size": "Samples in a batch",
}

OWNERS: Final = {*COUNTERS, *GAUGES, *HISTOGRAMS} - {"forebay_requests", "forebay_in_flight", "forebay_request_seconds"}
"""What is told of a model by the server alone that has its queue, and not by those that hand requests on to it."""

FURTHER: Final = (*tenant_families.FAMILIES, *gen_ai_families.FAMILIES)
"""Families that are on the page only where there is something to tell."""

LEFT_OUT: Final = "forebay_endpoints_left_out"
MISSING: Final = "Endpoints that are not on this page because there are too many"


class Reading(msgspec.Struct, frozen=True):
    """The numbers of one endpoint at this moment; `is_elsewhere` if another server tells of its queue and workers."""

    endpoint: str
    version: str
    metrics: EndpointMetrics
    in_flight: int
    waiting: int
    workers_alive: int
    worker_restarts: int
    objective_held: bool | None = None
    idle: int = 0
    slots: int = 0
    problem: str = ""
    devices: tuple[str, ...] = ()
    is_elsewhere: bool = False
    tenants_waiting: Mapping[str, int] = {}
    workers_wanted: int | None = None
    waiting_requests: int = 0
    workers_unhealthy: int | None = None


class Source(Protocol):
    """What has numbers to be read."""

    @property
    def metrics(self) -> EndpointMetrics:
        """What is counted; which endpoint it is goes by it."""
        ...


S = TypeVar("S", bound=Source)


class Exposition(Generic[S]):
    """Writes metric pages from readings taken at the time of the scrape."""

    def __init__(self, sources: Callable[[], Iterable[S]], read: Callable[[S], Reading], *others: Collector) -> None:
        """Make a page of what `sources` returns, each read by `read`, and of what other collectors yield."""
        self._sources = sources
        self._read = read
        self._others = others
        self._texts: dict[EndpointMetrics, _Text] = {}
        self._kept: set[EndpointMetrics] = set()

    def others(self, accept: str) -> tuple[bytes, str]:
        """Return the end of the page, which is not about endpoints, and its media type. May be called in a thread.

        Args:
            accept: What the scraper takes; it gets OpenMetrics if it prefers that.
        """
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder

        registry = CollectorRegistry()
        for collector in self._others:
            registry.register(collector)
        encoder, media_type = choose_encoder(accept)
        return encoder(registry), media_type

    def write(self) -> Generator[None, None, list[list[bytes]]]:
        """Write the lines about endpoints, in turns: stops where the loop should do something else.

        Returns:
            The lines of each family.
        """
        chosen, left_out = yield from self._choose()
        texts: dict[EndpointMetrics, _Text] = {}
        columns: list[list[bytes]] = [[] for _ in (*COUNTERS, *GAUGES, *HISTOGRAMS)]
        further: list[list[bytes]] = [[] for _ in FURTHER]
        for number, source in enumerate(chosen, 1):
            reading = self._read(source)
            metrics = source.metrics
            text = self._texts.get(metrics)
            if text is None or not text.is_of(reading):
                text = _Text(reading.endpoint, reading.version)
            texts[metrics] = text
            for column, lines in zip(columns, text.lines(reading), strict=True):
                if lines:
                    column.append(lines)
            if metrics.tenants or reading.tenants_waiting or reading.metrics.gen_ai:
                for column, lines in zip(further, text.further_lines(reading), strict=True):
                    if lines:
                        column.append(lines)
            if number % SLICE == 0:
                yield
        self._texts = texts
        return [*columns, [f"{LEFT_OUT} {left_out}.0\n".encode()], *further]

    def _choose(self) -> Generator[None, None, tuple[list[S], int]]:
        """Return the endpoints whose numbers are shown, in the order given, and how many others there are."""
        sources = list(self._sources())
        if len(sources) <= MAX_ENDPOINTS:
            self._kept.clear()
            return sources, 0
        # Who was shown, then the busiest, then the first.
        best: list[tuple[bool, int, int]] = []
        for start in range(0, len(sources), LOOKED_AT):
            some = enumerate(sources[start : start + LOOKED_AT], start)
            best += [(one.metrics not in self._kept, -sum(one.metrics.codes.values()), place) for place, one in some]
            best.sort()
            del best[MAX_ENDPOINTS:]
            yield
        self._kept = {sources[place].metrics for _, calls, place in best if calls}
        return [sources[place] for place in sorted(place for _, _, place in best)], len(sources) - MAX_ENDPOINTS


class _Text:
    """The lines of one endpoint; those of a histogram are kept until it changes."""

    __slots__ = ("_endpoint", "_histograms", "_labels", "_name", "_version")

    def __init__(self, endpoint: str, version: str) -> None:
        self._name = endpoint, version
        self._endpoint = f'endpoint="{_escaped(endpoint)}"'
        self._version = f'version="{_escaped(version)}"'
        self._labels = f"{{{self._endpoint},{self._version}}}"
        self._histograms: list[tuple[list[int], float, bytes]] = [([], 0.0, b"")] * len(HISTOGRAMS)

    def is_of(self, reading: Reading) -> bool:
        """Tell whether these are the lines of that endpoint."""
        return self._name == (reading.endpoint, reading.version)

    def lines(self, reading: Reading) -> list[bytes]:
        """Return the lines for each family, in the order of `COUNTERS`, `GAUGES` and `HISTOGRAMS`."""
        metrics = reading.metrics
        labels = self._labels
        requests = "".join(
            f'forebay_requests_total{{code="{_escaped(code)}",{labels[1:]} {count}.0\n'
            for code, count in metrics.codes.items()
        )
        held, wanted, unhealthy = reading.objective_held, reading.workers_wanted, reading.workers_unhealthy
        lines = [
            requests.encode(),
            f"forebay_stream_parts_total{labels} {metrics.parts}.0\n".encode(),
            f"forebay_worker_restarts_total{labels} {reading.worker_restarts}.0\n".encode(),
            b"" if metrics.shared is None else f"forebay_shared_requests_total{labels} {metrics.shared}.0\n".encode(),
            f"forebay_in_flight{labels} {reading.in_flight}.0\n".encode(),
            f"forebay_waiting_requests{labels} {reading.waiting_requests}.0\n".encode(),
            f"forebay_running_requests{labels} {reading.in_flight - reading.waiting_requests}.0\n".encode(),
            f"forebay_waiting_samples{labels} {reading.waiting}.0\n".encode(),
            f"forebay_workers{labels} {reading.workers_alive}.0\n".encode(),
            b"" if wanted is None else f"forebay_workers_wanted{labels} {wanted}.0\n".encode(),
            b"" if unhealthy is None else f"forebay_workers_unhealthy{labels} {unhealthy}.0\n".encode(),
            b"" if held is None else f"forebay_objective_held{labels} {held:d}.0\n".encode(),
        ]
        if reading.is_elsewhere:
            lines = [b"" if name in OWNERS else line for name, line in zip((*COUNTERS, *GAUGES), lines, strict=True)]
        measured = (metrics.request_s, metrics.queue_s, metrics.model_s, metrics.batch_size)
        for place, (name, histogram) in enumerate(zip(HISTOGRAMS, measured, strict=True)):
            counts, total, text = self._histograms[place]
            if counts != histogram.counts or total != histogram.total:
                is_told = any(histogram.counts) and not (reading.is_elsewhere and name in OWNERS)
                text = histogram_text(name, self._endpoint, self._version, histogram).encode() if is_told else b""
                self._histograms[place] = (histogram.counts.copy(), histogram.total, text)
            lines.append(text)
        return lines

    def further_lines(self, reading: Reading) -> list[bytes]:
        """Return the lines for each family of `FURTHER`."""
        metrics, labels = reading.metrics, (self._endpoint, self._version)
        tenants = tenant_families.tenant_lines(*labels, metrics.tenants, reading.tenants_waiting)
        return [*tenants, *gen_ai_families.gen_ai_lines(*labels, metrics.gen_ai)]


def pieces(columns: list[list[bytes]], media_type: str) -> Iterator[bytes]:
    """Yield the text of each family, as the media type wants it, from what `Exposition.write` returned."""
    kinds = (("counter", COUNTERS), ("gauge", GAUGES), ("histogram", HISTOGRAMS), ("gauge", {LEFT_OUT: MISSING}))
    families = [(name, kind, told) for kind, names in kinds for name, told in names.items()]
    families += FURTHER
    for (name, kind, told), lines in zip(families, columns, strict=True):
        family = f"{name}_total" if kind == "counter" and not media_type.startswith(OPEN_METRICS) else name
        if lines or (name, kind, told) not in FURTHER:
            yield b"".join([f"# HELP {family} {told}\n# TYPE {family} {kind}\n".encode(), *lines])


async def finish_in_turns(turns: Generator[None, None, T]) -> T:
    """Do all turns, with one of the loop for others after each; return what comes of them."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(0)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
