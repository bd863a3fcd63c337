# SPDX-License-Identifier: Apache-2.0
"""What endpoints did before the dashboard was opened: coarse samples, and how much of them there can be."""

import json
import random
import sys
import tracemalloc

from forebay.errors import RunnerFailed
from forebay.observe.metrics import endpoint_history
from forebay.observe.metrics.endpoint_history import MAX_NAMES, SAMPLE_BYTES, SAMPLES, STEP_S, EndpointHistory
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.exposition import Reading
from forebay.observe.metrics.histograms import SECONDS

FIELDS = [
    "place",
    "ok",
    "failed",
    "request",
    "waiting",
    "in_flight",
    "batches",
    "rows",
    "busy_ms",
    "parts",
    "endpoints",
]


class One:
    def __init__(self, name):
        self.name, self.version = name, "1"
        self.metrics = EndpointMetrics()
        self.waiting = 0

    def call(self, times=1, seconds=0.003):
        self.metrics.codes["ok"] += times
        self.metrics.request_s.observe(seconds, times)
        self.metrics.ran(2, 1, 0.5)

    def read(self):
        return Reading(self.name, self.version, self.metrics, 0, self.waiting, 1, 0, idle=1, slots=2)


class Server:
    """Endpoints, and a clock that the test turns."""

    def __init__(self, monkeypatch, *names):
        self.now = 1000.0
        monkeypatch.setattr(endpoint_history.time, "monotonic", lambda: self.now)
        self.ones = {name: One(name) for name in names}
        self.history = EndpointHistory(self.every, One.read)
        list(self.history.look())

    def every(self):
        return list(self.ones.values())

    def step(self, seconds=STEP_S):
        self.now += seconds
        list(self.history.look())

    def told(self):
        """The samples, each as (when, how long, what endpoints did by their names)."""
        told = json.loads(ended(self.history.tell()))
        rows = [[dict(zip(FIELDS, row, strict=True)) for row in rows] for _, _, rows in told["samples"]]
        named = [{tuple(told["names"].get(str(row["place"]), ())): row for row in one} for one in rows]
        return [(at, took, found) for (at, took, _), found in zip(told["samples"], named, strict=True)]


def ended(turns):
    while True:
        try:
            next(turns)
        except StopIteration as end:
            return end.value


def test_what_happened_before_anybody_looked_is_told_step_by_step(monkeypatch):
    server = Server(monkeypatch, "iris", "idle")
    iris = server.ones["iris"]
    iris.call(3)
    server.step()
    server.step()
    iris.metrics.failed(RunnerFailed("attack at dawn"))
    iris.metrics.request_s.observe(0.2)
    iris.waiting = 7
    server.now += 4.0
    first, quiet, now = server.told()
    assert (first[:2], quiet[:2], now[:2]) == ((1010.0, 10.0), (1020.0, 10.0), (1024.0, 4.0))
    assert first[2].keys() == {("iris", "1")}
    row = first[2]["iris", "1"]
    assert (row["ok"], row["failed"], row["batches"], row["rows"], row["busy_ms"]) == (3, 0, 1, 2, 500)
    assert row["request"] == [SECONDS.index(0.005), 3]
    assert quiet[2] == {}
    row = now[2]["iris", "1"]
    assert (row["ok"], row["failed"], row["waiting"], row["request"]) == (0, 1, 7, [SECONDS.index(0.25), 1])
    assert server.told()[-1] == now, "looking changes nothing"
    assert [at for at, _, _ in json.loads(ended(server.history.tell(is_last=True)))["samples"]] == [1024.0]
    server.step(6.0)
    assert server.told()[-1][1:] == (10.0, now[2])


def test_it_holds_a_quarter_of_an_hour_and_forgets_names_with_their_samples(monkeypatch):
    server = Server(monkeypatch, "iris", "other")
    server.ones["iris"].call()
    server.step()
    for _ in range(SAMPLES):
        server.ones["other"].call()
        server.told()
        server.step()
    told = server.told()
    assert len(told) == SAMPLES
    assert {name for _, _, found in told for name in found} == {("other", "1")}
    assert len(server.history._names) == 1
    assert told[0][0] == server.now - (SAMPLES - 1) * STEP_S
    server.ones["iris"].call(5)
    server.step()
    assert server.told()[-1][2]["iris", "1"]["ok"] == 5


def test_a_sample_is_bounded_and_the_least_busy_are_added_up(monkeypatch):
    chance = random.Random(7)
    server = Server(monkeypatch, *(f"model-{number}" for number in range(3 * MAX_NAMES)))
    for number, one in enumerate(server.ones.values()):
        for seconds in (*SECONDS, 100.0):
            one.call(10 + number, seconds * chance.random())
    server.step()
    ((_, _, packed),) = server.history._samples
    assert SAMPLE_BYTES / 2 < len(packed) <= SAMPLE_BYTES
    ((_, _, found),) = server.told()
    others = found.pop(())
    assert others["endpoints"] + len(found) == 3 * MAX_NAMES
    assert others["ok"] + sum(row["ok"] for row in found.values()) == sum(
        one.metrics.codes["ok"] for one in server.ones.values()
    )
    assert sum(others["request"][1::2]) == others["ok"]
    assert min(row["ok"] for row in found.values()) >= 19 * (3 * MAX_NAMES - len(found))


def test_endpoints_that_come_and_go_take_no_more_names_than_there_is_room_for(monkeypatch):
    server = Server(monkeypatch)
    for number in range(5):
        server.ones = {name: One(name) for name in (f"{number}-{other}" for other in range(MAX_NAMES // 4))}
        for one in server.ones.values():
            one.call()
        server.step()
    assert len(server.history._names) == MAX_NAMES
    assert server.told()[-1][2][()]["endpoints"] == MAX_NAMES // 4


def test_five_hundred_models_that_all_work_take_two_megabytes_at_most(monkeypatch):
    server = Server(monkeypatch, *(f"model-{number}" for number in range(500)))
    for one in server.ones.values():
        for seconds in SECONDS[3:9]:
            one.call(1000, seconds)
    tracemalloc.start()
    server.step()
    took = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    ((_, _, packed),) = server.history._samples
    most = took + (SAMPLES - 1) * sys.getsizeof(b"x" * SAMPLE_BYTES)
    assert most < 2 * 1024 * 1024, (took, len(packed))


def test_who_asks_while_a_sample_is_taken_waits_for_it(monkeypatch):
    server = Server(monkeypatch, *(f"model-{number}" for number in range(40)))
    for one in server.ones.values():
        one.call()
    server.now += STEP_S
    look, tell = server.history.look(), server.history.tell()
    for _ in range(3):  # it has read the counters, and packs the rows
        next(look)
    next(tell)
    assert list(look) is not None
    ((_, _, rows),) = json.loads(ended(tell))["samples"]
    assert sum(row[FIELDS.index("ok")] for row in rows) == 40


def test_a_look_that_was_cancelled_holds_nobody_up(monkeypatch):
    server = Server(monkeypatch, *(f"model-{number}" for number in range(40)))
    look = server.history.look()
    next(look)
    look.close()
    assert json.loads(ended(server.history.tell()))["samples"] == []
