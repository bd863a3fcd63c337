# SPDX-License-Identifier: Apache-2.0
"""Counters of started servings, by batch key, and how they stand on the page of metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from forebay.observe.metrics.histograms import ROWS, SECONDS, Histogram, cumulated

if TYPE_CHECKING:
    from prometheus_client import Metric


class KeyMetrics:
    """Everything counted for one batch key of a started serving.

    Attributes:
        rows: Rows that were executed.
        padding_rows: Rows that were executed and belong to nobody.
        crashes: Batches that failed.
        batch_size: Rows of each batch, without padding; its count is the number of batches.
        queue_s: From a call's arrival until rows of it were taken.
        execute_s: Time of each batch.
    """

    __slots__ = ("batch_size", "crashes", "execute_s", "padding_rows", "queue_s", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.padding_rows = 0
        self.crashes = 0
        self.batch_size = Histogram(ROWS)
        self.queue_s = Histogram(SECONDS)
        self.execute_s = Histogram(SECONDS)

    def took(self, rows: int, taken_s: float, arrivals_s: Sequence[float], execute_s: float) -> None:
        """Count one batch, whatever became of it."""
        self.rows += rows
        self.batch_size.observe(rows)
        self.execute_s.observe(execute_s)
        self.queue_s.observe_since(taken_s, arrivals_s)


class ServingReading(msgspec.Struct, frozen=True):
    """The numbers of one started serving at this moment."""

    name: str
    waiting_rows: int
    in_flight: int
    by_key: dict[str, KeyMetrics]


class ServingCollector:
    """Adds the started servings of this program to a page of metrics."""

    def __init__(self, read: Callable[[], Iterable[ServingReading]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families; the interface of prometheus-client's collectors."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        one, both = ["serving"], ["serving", "key"]
        waiting = GaugeMetricFamily("forebay_serving_waiting_rows", "Rows in the queue", labels=one)
        in_flight = GaugeMetricFamily("forebay_serving_in_flight", "Calls without an answer yet", labels=one)
        rows = CounterMetricFamily("forebay_serving_rows", "Rows executed", labels=both)
        padding = CounterMetricFamily("forebay_serving_padding_rows", "Rows executed as padding", labels=both)
        crashes = CounterMetricFamily("forebay_serving_crashes", "Batches that failed", labels=both)
        histograms = [
            HistogramMetricFamily("forebay_serving_batch_size", "Rows in a batch", labels=both),
            HistogramMetricFamily("forebay_serving_queue_seconds", "From arrival to a partition", labels=both),
            HistogramMetricFamily("forebay_serving_execute_seconds", "Time of a batch", labels=both),
        ]
        for reading in self._read():
            waiting.add_metric([reading.name], reading.waiting_rows)
            in_flight.add_metric([reading.name], reading.in_flight)
            for key, metrics in reading.by_key.items():
                labels = [reading.name, key]
                rows.add_metric(labels, metrics.rows)
                padding.add_metric(labels, metrics.padding_rows)
                crashes.add_metric(labels, metrics.crashes)
                measured = [metrics.batch_size, metrics.queue_s, metrics.execute_s]
                for family, histogram in zip(histograms, measured, strict=True):
                    family.add_metric(labels, cumulated(histogram), histogram.total)
        yield from (waiting, in_flight, rows, padding, crashes, *histograms)
