# SPDX-License-Identifier: Apache-2.0
"""Counters and histograms, and the page they make."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.metrics_page import whole_page

from forebay.errors import Code, InternalError, RunnerFailed, Unavailable
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.exposition import Exposition, Reading
from forebay.observe.metrics.gen_ai_families import DURATION, histogram_of
from forebay.observe.metrics.histograms import ROWS, SECONDS, Histogram

times = st.floats(0, 100, allow_nan=False)


@pytest.mark.parametrize(
    "value, bucket", [(0.0, 0), (0.99, 0), (1.0, 0), (1.01, 1), (2.0, 1), (4.0, 2), (4.01, 3), (1e9, 3)]
)
def test_a_bound_belongs_to_its_bucket(value, bucket):
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.observe(value)
    assert histogram.counts.index(1) == bucket
    assert (histogram.count, histogram.total) == (1, value)


@pytest.mark.parametrize("bounds", [SECONDS, ROWS])
def test_bounds_rise(bounds):
    assert list(bounds) == sorted(set(bounds))


@given(st.lists(times))
def test_nothing_is_lost(values):
    histogram = Histogram(SECONDS)
    for value in values:
        histogram.observe(value)
    assert histogram.count == len(values)
    assert histogram.total == pytest.approx(sum(values))


@given(st.lists(times, min_size=1, max_size=40))
def test_many_moments_at_once_count_as_one_by_one(moments):
    moments.sort()
    bulk, single = Histogram(SECONDS), Histogram(SECONDS)
    bulk.observe_since(100.0, moments)
    for moment in moments:
        single.observe(100.0 - moment)
    assert bulk.counts == single.counts
    assert bulk.total == pytest.approx(single.total)


def test_failures_are_counted_by_code():
    metrics = EndpointMetrics()
    for error in (InternalError("a"), Unavailable("b"), RunnerFailed("c", trace="line 1")):
        metrics.failed(error, "r-1")
    assert metrics.codes == {"ok": 0, "internal": 2, "unavailable": 1}
    last = metrics.reasons["internal"]
    assert (last.kind, last.message, last.trace, last.is_users, last.request_id) == (
        "RunnerFailed",
        "c",
        "line 1",
        True,
        "r-1",
    )


def page(accept="text/plain"):
    metrics = EndpointMetrics()
    metrics.codes["ok"] = 3
    metrics.failed(InternalError("a defect"))
    for rows in (1, 2, 64, 5000):
        metrics.ran(rows, 1, 0.0)
    reading = Reading(
        endpoint="iris",
        version="2",
        metrics=metrics,
        in_flight=4,
        waiting=5,
        workers_alive=1,
        worker_restarts=7,
        waiting_requests=3,
    )
    body, media_type = whole_page(Exposition(lambda: [reading], lambda one: one), accept)
    return body.decode().splitlines(), media_type


def test_the_page_has_the_times_that_only_fronts_have_counted():  # Issue 48
    owner, shown = EndpointMetrics(), EndpointMetrics()
    histogram_of(shown.gen_ai, (DURATION, "chat", "")).observe(0.1)
    told = Reading("words", "1", shown, 0, 0, 1, 0)
    before = Reading("words", "1", owner, 0, 0, 1, 0)
    body, _ = whole_page(Exposition(lambda: [before], lambda _one: told), "text/plain")
    assert f"{DURATION}_count{{".encode() in body


def test_the_page_tells_the_numbers():
    lines, media_type = page()
    names = 'endpoint="iris",version="2"'
    assert "text/plain" in media_type
    assert f'forebay_requests_total{{code="ok",{names}}} 3.0' in lines
    assert f'forebay_requests_total{{code="internal",{names}}} 1.0' in lines
    assert f"forebay_in_flight{{{names}}} 4.0" in lines
    assert f"forebay_waiting_requests{{{names}}} 3.0" in lines
    assert f"forebay_running_requests{{{names}}} 1.0" in lines
    assert f"forebay_waiting_samples{{{names}}} 5.0" in lines
    assert f"forebay_workers{{{names}}} 1.0" in lines
    assert f"forebay_worker_restarts_total{{{names}}} 7.0" in lines


def test_request_queue_batch_and_model_time_each_have_a_histogram():
    """Elsewhere: top-level latency is not in the metrics, only the model's (Ray)."""
    lines, _ = page()
    for name in ("request_seconds", "queue_seconds", "model_seconds", "batch_size"):
        assert f"# TYPE forebay_{name} histogram" in lines


def test_buckets_are_cumulated():
    lines, _ = page()
    counts = [float(line.split()[-1]) for line in lines if line.startswith("forebay_batch_size_bucket")]
    assert len(counts) == len(ROWS) + 1
    assert counts == sorted(counts)
    assert (counts[0], counts[1], counts[6], counts[-1]) == (1.0, 2.0, 3.0, 4.0)
    assert 'forebay_batch_size_sum{endpoint="iris",version="2"} 5067.0' in lines


def test_a_scraper_that_prefers_openmetrics_gets_it():
    lines, media_type = page("application/openmetrics-text; version=1.0.0")
    assert "openmetrics" in media_type
    assert lines[-1] == "# EOF"


def test_the_reference_names_every_metric():
    import re
    from collections import defaultdict
    from pathlib import Path

    from forebay.observe.metrics import exposition
    from forebay.observe.metrics.repository_metrics import RepositoryCollector, StockReading
    from forebay.observe.metrics.serving_metrics import KeyMetrics, ServingCollector, ServingReading

    counters = {f"{name}_total" for name in exposition.COUNTERS}
    counters |= {f"{name}_total" if kind == "counter" else name for name, kind, _ in exposition.FURTHER}
    ours = counters | {*exposition.GAUGES, *exposition.HISTOGRAMS, exposition.LEFT_OUT}
    repositories = RepositoryCollector()
    repositories.reading = StockReading({}, defaultdict(float))
    servings = ServingCollector(lambda: [ServingReading("s", 0, 0, {"k": KeyMetrics()})])
    families = [*servings.collect(), *repositories.collect()]
    ours |= {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    page = Path(__file__).parents[3] / "docs/reference/metrics.md"
    cells = re.findall(r"^\| (`\w+_[^|]+) \| (?:counter|gauge|histogram)\b", page.read_text(), re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == ours
    (codes,) = re.findall(r"^Codes: (.+)\.$", page.read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", codes)) == sorted(["ok", *Code])
