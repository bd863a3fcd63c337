# SPDX-License-Identifier: Apache-2.0
"""The numbers as Prometheus text, written by prometheus-client when somebody asks.

The user's own metrics (in the default registry) stand in the same page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client import Metric
    from prometheus_client.core import HistogramMetricFamily
    from prometheus_client.registry import Collector

    from forebay.observe.metrics import EndpointMetrics, Histogram


class Reading(msgspec.Struct, frozen=True):
    """The numbers of one endpoint at this moment."""

    endpoint: str
    version: str
    metrics: EndpointMetrics
    in_flight: int
    waiting: int
    workers_alive: int
    worker_restarts: int
    objective_held: bool | None = None


class Exposition:
    """Writes metric pages from readings taken at the time of the scrape."""

    def __init__(self, read: Callable[[], Iterable[Reading]], *others: Collector) -> None:
        """Make a page of the endpoints that `read` returns and of what other collectors yield."""
        self._read = read
        self._collectors: tuple[Collector, ...] = (self, *others)

    def page(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its media type, OpenMetrics if the scraper prefers that."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import choose_encoder
        from prometheus_client.registry import REGISTRY

        registry = CollectorRegistry()
        for collector in self._collectors:
            registry.register(collector)
        registry.register(REGISTRY)
        encoder, media_type = choose_encoder(accept)
        return encoder(registry), media_type

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; the interface of prometheus-client's collectors."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        labels = ["endpoint", "version"]
        requests = CounterMetricFamily("forebay_requests", "Requests by outcome", labels=[*labels, "code"])
        parts = CounterMetricFamily(
            "forebay_stream_parts", "Parts of streamed answers handed to clients", labels=labels
        )
        restarts = CounterMetricFamily("forebay_worker_restarts", "Workers that were replaced", labels=labels)
        in_flight = GaugeMetricFamily("forebay_in_flight", "Requests without an answer yet", labels=labels)
        waiting = GaugeMetricFamily("forebay_waiting_samples", "Samples in the queue", labels=labels)
        workers = GaugeMetricFamily("forebay_workers", "Workers that are up", labels=labels)
        held = GaugeMetricFamily(
            "forebay_objective_held", "Whether 95 of 100 answers hold the latency objective", labels=labels
        )
        histograms: list[HistogramMetricFamily] = [
            HistogramMetricFamily("forebay_request_seconds", "From submission to outcome", labels=labels),
            HistogramMetricFamily("forebay_queue_seconds", "From submission to leaving the queue", labels=labels),
            HistogramMetricFamily("forebay_model_seconds", "Time of a batch in the worker", labels=labels),
            HistogramMetricFamily("forebay_batch_size", "Samples in a batch", labels=labels),
        ]
        for reading in self._read():
            names = [reading.endpoint, reading.version]
            metrics = reading.metrics
            for code, count in metrics.codes.items():
                requests.add_metric([*names, code], count)
            parts.add_metric(names, metrics.parts)
            restarts.add_metric(names, reading.worker_restarts)
            in_flight.add_metric(names, reading.in_flight)
            waiting.add_metric(names, reading.waiting)
            workers.add_metric(names, reading.workers_alive)
            if reading.objective_held is not None:
                held.add_metric(names, reading.objective_held)
            measured = [metrics.request_s, metrics.queue_s, metrics.model_s, metrics.batch_size]
            for family, histogram in zip(histograms, measured, strict=True):
                family.add_metric(names, cumulated(histogram), histogram.total)
        yield from (requests, parts, restarts, in_flight, waiting, workers, held, *histograms)


def cumulated(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the buckets as prometheus-client takes them: how many values were at most as large as each bound."""
    total = 0
    buckets: list[tuple[str, float]] = []
    for bound, count in zip([*histogram.bounds, float("inf")], histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), total))
    return buckets
