# SPDX-License-Identifier: Apache-2.0
"""Metrics that models make with prometheus_client, on the server's page.  # F54"""

import json
import signal
import subprocess
import sys

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.waiting import eventually

from forebay.observe.metrics import author_metrics
from forebay.observe.metrics.author_metrics import MAX_ENDED, MAX_LEFT_BEHIND, MAX_SERIES, Family, MetricStore

MODEL = """
import os
import forebay
from prometheus_client import Counter, Gauge, Histogram, Summary

seen = Counter("app_seen", "What was seen", ["kind"])
size = Histogram("app_size", "How large it was", buckets=[1, 10])
took = Summary("app_took", "How long it took")
level = Gauge("app_level", "How full it is")
total = Gauge("app_total", "In all workers", multiprocess_mode="livesum")
clash = Counter("forebay_requests", "Not theirs")

class Sees(forebay.Model):
    name = "sees"
    max_batch_size = 1

    def predict(self, batch: list[str]) -> list[int]:
        if batch == ["die"]:
            os._exit(1)
        seen.labels(batch[0]).inc()
        clash.inc()
        size.observe(5)
        took.observe(0.5)
        level.set(7)
        total.set(3)
        return [os.getpid()]
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return path


def read(server, name, **labels):
    """The value of a series, None if it is not there."""
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return sample.value
    return None


def test_what_processes_count_is_added_up_and_never_falls(serve, model):
    server = serve(model, "--workers", "2")
    calls = 0
    pids = set()
    while len(pids) < 2:
        pids.add(server.call("sees", "cat").json())
        calls += 1
    eventually(lambda: read(server, "app_seen_total", kind="cat") == calls)
    assert read(server, "app_size_bucket", le="10.0") == calls
    assert read(server, "app_size_count") == calls
    assert read(server, "app_took_sum") == calls / 2
    assert [read(server, "app_level", model="sees", version="1", worker=worker) for worker in "01"] == [7, 7]
    assert read(server, "app_level") is None, "nobody sets the one of the server's own process"
    assert read(server, "app_total") == 6
    assert read(server, "forebay_requests_total", code="ok", endpoint="sees", version="1") == calls
    assert server.client.get("/metrics").text.count("# TYPE forebay_requests_total") == 1
    assert "the metric 'forebay_requests' of a model is left out" in server.log
    server.call("sees", "die")
    eventually(lambda: server.metric("forebay_worker_restarts_total") >= 1)
    assert read(server, "app_seen_total", kind="cat") == calls
    server.call("sees", "dog")
    eventually(lambda: read(server, "app_seen_total", kind="dog") == 1)
    assert read(server, "app_seen_total", kind="cat") == calls


def test_nothing_is_lost_of_processes_that_end_in_order(serve, model):
    server = serve(model)
    calls = 0
    for reloads in range(1, 4):
        for _ in range(5):
            server.call("sees", "cat")
            calls += 1
        server.signal(signal.SIGHUP)
        eventually(lambda: server.log.count("reloaded in") == reloads)  # noqa: B023
        eventually(lambda: read(server, "app_seen_total", kind="cat") == calls)  # noqa: B023


def test_models_and_versions_that_share_a_gauge_have_a_series_each(serve, tmp_path):
    (tmp_path / "models.py").write_text(
        """
import forebay
from prometheus_client import Gauge

level = Gauge("app_level", "How full it is")

class One(forebay.Model):
    def predict(self, batch: list[int]) -> list[int]:
        level.set(batch[0])
        return batch

class Two(One):
    pass
"""
    )
    asked = [("one", "1", -5), ("one", "2", 3), ("two", "1", 4)]
    targets = [{"target": f"models.py:{name.title()}", "version": version} for name, version, _ in asked]
    (tmp_path / "forebay.yaml").write_text(json.dumps({"models": targets}))
    server = serve(tmp_path)
    for name, version, value in asked:
        server.call(f"{name}/versions/{version}", value)

    def told():
        return [read(server, "app_level", model=name, version=version, worker="0") for name, version, _ in asked]

    eventually(lambda: told() == [value for *_, value in asked])


def test_threads_count_in_the_server(serve, model):
    server = serve(model, "--worker-kind", "thread")
    server.call("sees", "cat")
    assert read(server, "app_seen_total", kind="cat") == 1
    assert read(server, "app_level") == 7


def test_what_attached_workers_count_comes_too(serve, model, tmp_path):
    server = serve(None, "--attach", f"unix:{tmp_path}/door")
    run = "import sys; from forebay.cli.main import main; sys.exit(main())"
    with subprocess.Popen(
        [sys.executable, "-c", run, "worker", str(model), "--connect", f"unix:{tmp_path}/door"]
    ) as one:
        try:
            eventually(lambda: server.client.get("/models/sees").status_code == 200)
            server.call("sees", "cat")
            eventually(lambda: read(server, "app_seen_total", kind="cat") == 1)
            assert server.metric("app_level", model="sees", version="1") == 7
            for _ in range(5):
                server.call("sees", "cat")
        finally:
            one.terminate()
    eventually(lambda: read(server, "app_total") is None)
    assert read(server, "app_seen_total", kind="cat") == 6


# Put together


def sent(*families):
    return msgspec.msgpack.encode(families)


def counter(value, name="a", **labels):
    return Family(name, "counter", "", "", "all", [(f"{name}_total", labels, value)])


def shown(store):
    own = {family.name for family in author_metrics.of_registry(is_servers=True)}
    return {
        (name, *sorted(labels.items())): value
        for family in store.families()
        if family.name not in own
        for name, labels, value in family.samples
    }


def test_counts_of_many_that_ended_are_kept_in_one_sum():
    store = MetricStore()
    for number in range(3 * MAX_ENDED):
        store.told(number, {"worker": "0"}, sent(counter(1.0)))
        store.gone(number)
    assert shown(store) == {("a_total",): 3.0 * MAX_ENDED}
    assert len(store._ended) == MAX_ENDED
    store.told(3 * MAX_ENDED - 1, {"worker": "0"}, sent(counter(5.0)))  # it was only gone for a while
    assert shown(store) == {("a_total",): 3.0 * MAX_ENDED + 4.0}


def test_of_those_that_ended_no_more_series_are_kept_than_a_page_takes(caplog):
    """With a label for each user, each end of a worker had held the loop for longer, by seconds in the end."""
    store = MetricStore()

    def ends(number, *users):
        samples = [("a_total", {"user": user}, 1.0) for user in users]
        store.told(number, {"worker": "0"}, sent(Family("a", "counter", "", "", "all", samples)))
        store.gone(number)

    ends(0, "first")
    for number in range(1, 2 * MAX_ENDED):
        ends(number, *(f"{number}-{user}" for user in range(100)))
    ends(2 * MAX_ENDED, "first")
    store.told("lives", {"worker": "0"}, sent(counter(1.0, user="first"), counter(1.0, user="another")))
    found = shown(store)
    assert found["a_total", ("user", "first")] == 3.0
    assert found["a_total", ("user", "another")] == 1.0
    assert len(found) == MAX_LEFT_BEHIND + 1
    assert sum(len(family.samples) for family in store._sum.values()) == MAX_LEFT_BEHIND
    assert f"series of 'a' are left out: of ended workers {MAX_LEFT_BEHIND} are kept" in caplog.text


def test_of_a_histogram_of_those_that_ended_all_is_kept_or_nothing():
    store = MetricStore()
    room = MAX_LEFT_BEHIND
    for number in range(room // 100):
        users = [("a_total", {"user": f"{number}-{user}"}, 1.0) for user in range(100 - (number == 0))]
        store.told(number, {"worker": "0"}, sent(Family("a", "counter", "", "", "all", users)))
        store.gone(number)
    for number in range(MAX_ENDED + 1):
        samples = [
            sample
            for kind in "xy"
            for sample in (
                ("h_bucket", {"kind": kind, "le": "1.0"}, 1.0),
                ("h_bucket", {"kind": kind, "le": "+Inf"}, 1.0),
                ("h_count", {"kind": kind}, 1.0),
                ("h_sum", {"kind": kind}, 1.0),
            )
        ]
        many = [Family(f"b{name}", "counter", "", "", "all", [(f"b{name}_total", {}, 1.0)]) for name in range(9)]
        store.told(("h", number), {"worker": "0"}, sent(Family("h", "histogram", "", "", "all", samples), *many))
        store.gone(("h", number))
    (kept,) = [family for family in store._sum.values() if family.name == "h"]
    assert {labels["kind"] for _, labels, _ in kept.samples} == {"x"}
    assert len(kept.samples) == 4
    assert [*store._sum] == ["a", "h"]


@pytest.mark.parametrize(
    "odd",
    [
        b"nonsense",
        msgspec.msgpack.encode([["a", 1]]),
        sent(counter(1.0, name="forebay_mine")),
        sent(counter(1.0, name="gen_ai_server_request_duration_seconds")),
        sent(counter(1.0, name="a b")),
        sent(counter(1.0, **{"a-b": "x"})),
        sent(Family("b", "counter", "", "", "all", [("forebay_requests_total", {}, 1.0)])),
        sent(Family("b", "nonsense", "", "", "all", [("b", {}, 1.0)])),
        sent(Family("a", "gauge", "", "", "all", [("a", {}, 1.0)])),
    ],
)
def test_what_cannot_stand_on_a_page_is_left_out(odd):
    store = MetricStore()
    store.told(1, {"worker": "0"}, sent(counter(2.0)))
    store.told(2, {"worker": "1"}, odd)
    assert shown(store) == {("a_total",): 2.0}


def test_a_label_of_the_authors_is_not_taken():
    store = MetricStore()
    gauge = Family("g", "gauge", "", "", "all", [("g", {"worker": "theirs"}, 1.0), ("g", {"model": "its"}, 2.0)])
    store.told(1, {"model": "m", "worker": "0"}, sent(gauge))
    assert shown(store) == {
        ("g", ("forebay_worker", "0"), ("model", "m"), ("worker", "theirs")): 1.0,
        ("g", ("forebay_model", "m"), ("model", "its"), ("worker", "0")): 2.0,
    }


def test_a_page_takes_so_many_series(caplog):
    store = MetricStore()
    samples = [("g", {"n": str(number)}, 1.0) for number in range(MAX_SERIES)]
    for worker in ("0", "1"):
        store.told(worker, {"worker": worker}, sent(counter(1.0), Family("g", "gauge", "", "", "all", samples)))
    assert "a" in {metric.name for metric in store.collect()}
    assert sum(len(metric.samples) for metric in store.collect()) <= MAX_SERIES
    assert "a page takes 5000 series" in caplog.text
