# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
"""The timeline: what is told of a batch, what a recording keeps, and how it looks as a trace and as a summary."""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.observe.chrome_trace import check

from forebay.batching.queue import BatchConfig
from forebay.errors import InvalidRequest
from forebay.observe.metrics import capacity
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.observe.traces.timeline import BatchRecord, Recording, Step, Timeline
from forebay.observe.traces.trace_format import chrome_trace
from forebay.observe.traces.trace_summary import summarise
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.testing.pool import ManualPool
from forebay.types.batch import EntryBatch, Noted
from forebay.types.call import Request
from forebay.types.server_state import here
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.runner import Runner, RunnerSpec
from forebay.workers.user_calls.phases import lap
from forebay.workers.wire import frames


class Laps(Runner):
    """A runner that ends its phases one by one."""

    def run(self, items):
        ended = lap.get()
        assert (ended is None) == (items[0].body == "unheard")
        time.sleep(0.002)
        if ended is not None:
            ended("preprocess")
            ended("predict")
        return [item.body for item in items]


class Keeps(Laps):
    """A runner that keeps the phases of its last run."""

    def run(self, items):
        now = time.monotonic()
        self.phases = [("op", "prep", now, now, 7)]
        return [item.body for item in items]


class AsyncLaps(Laps):
    async def run_async(self, items):
        ended = lap.get()
        await asyncio.sleep(0.001)
        if ended is not None:
            ended("predict")
        return [item.body for item in items]


def pool_of(kind, runner=Laps):
    here = RunnerSpec("", local=runner)
    if kind == "process":
        return ProcessPool(RunnerSpec(f"{__name__}:{runner.__name__}"), path=["."])
    return ThreadPool(here) if kind == "thread" else InlinePool(here)


def endpoint_of(pool, name="model", **batching):
    return Endpoint(EndpointConfig(name=name), BatchConfig(idle="go", **batching), pool)


async def call(endpoint, *bodies):
    await endpoint.start()
    try:
        return [await endpoint.call(body) for body in bodies]
    finally:
        await endpoint.drain(1.0)


@pytest.mark.parametrize("kind, runner", [("inline", Laps), ("inline", AsyncLaps), ("thread", Laps), ("process", Laps)])
def test_every_kind_of_worker_tells_when_it_ran_and_what_its_phases_were(kind, runner):
    endpoint = endpoint_of(pool_of(kind, runner))
    with Recording() as recording:
        asyncio.run(call(endpoint, "one", "two"))
    assert len(recording.records) == 2
    for record in recording.records:
        (step,) = record.steps
        assert record.endpoint is endpoint
        assert step.arrived <= record.taken <= record.started <= record.ended <= record.done
        assert recording.started <= step.arrived
        assert record.done <= recording.ended
        assert (record.pid == os.getpid()) == (kind != "process")
        assert record.worker == "0"
        names = [phase for _, phase, *_ in record.phases]
        assert names == (["predict"] if runner is AsyncLaps else ["preprocess", "predict"])
        moments = [moment for phase in record.phases for moment in phase[2:4]]
        assert moments == sorted(moments)
        assert record.started <= moments[0]
        assert moments[-1] <= record.ended
    assert recording.records[0].steps[0].id != recording.records[1].steps[0].id


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_a_runner_may_also_keep_its_phases(kind):
    with Recording() as recording:
        asyncio.run(call(endpoint_of(pool_of(kind, Keeps)), "one"))
    ((name, phase, _, _, sample),) = recording.records[0].phases
    assert (name, phase, sample) == ("op", "prep", 7)


@pytest.mark.parametrize("kind", ["inline", "thread", "process"])
def test_nothing_is_noted_while_nobody_listens(kind):  # P144
    assert asyncio.run(call(endpoint_of(pool_of(kind)), "unheard")) == ["unheard"]


def test_a_listener_that_raises_harms_nobody(caplog):
    def broken(_record):
        raise RuntimeError("no")

    with here(Timeline).listening(broken), Recording() as recording:
        assert asyncio.run(call(endpoint_of(pool_of("inline")), 1, 2)) == [1, 2]
    assert len(recording.records) == 2
    assert caplog.text.count("a listener to the timeline failed") == 2
    assert here(Timeline).told == ()


def test_a_batch_is_one_record_with_all_of_its_requests_under_their_own_ids():
    async def main():
        pool = ManualPool()
        endpoint = endpoint_of(pool, max_size=8)
        await endpoint.start()
        for number in range(3):
            endpoint.submit(Request(body=number, reply=lambda *_: None, id=f"client-{number}"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        endpoint.submit(Request(body=3, reply=lambda *_: None))
        pool.complete()
        await endpoint.drain(0)

    with Recording() as recording:
        asyncio.run(main())
    (record,) = [record for record in recording.records if len(record.steps) == 3]
    assert [step.id for step in record.steps] == ["client-0", "client-1", "client-2"]
    assert len({step.run_id for step in record.steps}) == 3
    assert (record.in_flight, record.waiting) == (1, 1)
    assert record.started == 0, "this pool says nothing of when it ran"


def test_samples_of_a_request_that_is_cut_keep_its_id():
    async def main():
        endpoint = endpoint_of(InlinePool(RunnerSpec("", local=Lists)), max_size=2)
        await endpoint.start()
        assert await endpoint.call([1, 2, 3], size=3) == [1, 2, 3]
        await endpoint.drain(1)

    with Recording() as recording:
        asyncio.run(main())
    assert [step.size for record in recording.records for step in record.steps] == [2, 1]
    assert len({step.id for record in recording.records for step in record.steps} - {""}) == 1
    assert len({step.run_id for record in recording.records for step in record.steps} - {""}) == 1


class Lists(Laps):
    def run(self, items):
        return [list(item.body) for item in items]


def endpoint_named(name, slots=1):
    return SimpleNamespace(name=name, slots=slots, waiting=0, in_flight=0)


def record(endpoint, *steps, taken, started, ended, done, phases=(), worker="0"):
    return BatchRecord(
        endpoint=endpoint,
        steps=tuple(Step(name, arrived, 1, name) for name, arrived in steps),
        taken=taken,
        started=started,
        ended=ended,
        done=done,
        worker=worker,
        pid=4711,
        phases=list(phases),
        waiting=2,
        in_flight=3,
    )


def recorded(*records, seconds=10.0):
    recording = Recording()
    recording.records.extend(records)
    recording.started, recording.ended = 100.0, 100.0 + seconds
    return recording


def test_a_recording_keeps_the_newest_and_counts_what_it_lost():
    model = endpoint_named("model")
    with Recording(max_parts=10) as recording:
        for number in range(100):
            batch = EntryBatch([Request(body=0, reply=lambda *_: None, id=str(number))], None, 1)
            noted = Noted(taken=1.0, phases=[("", "predict", 1.0, 2.0, -1)])
            here(Timeline).end(model, batch, noted, 2.0)
    assert [record.steps[0].id for record in recording.records] == ["95", "96", "97", "98", "99"]
    assert recording.dropped == 95
    assert json.loads(chrome_trace(recording))["otherData"]["dropped_batches"] == 95


def test_a_request_can_be_followed_through_all_nodes_of_a_graph():
    whole, first, second = endpoint_named("ocr", 8), endpoint_named("ocr/detect", 2), endpoint_named("ocr/read")
    events = check(
        chrome_trace(
            recorded(
                record(whole, ("r", 100.0), taken=100.001, started=0, ended=0, done=100.1),
                record(first, ("r", 100.002), taken=100.003, started=100.004, ended=100.04, done=100.05),
                record(second, ("r", 100.051), taken=100.06, started=100.061, ended=100.09, done=100.095),
            )
        )
    )
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    arrows = arrows_in(events)
    assert [(names[begin["pid"]], names[end["pid"]]) for begin, end in arrows if begin["pid"] != end["pid"]] == [
        ("ocr", "ocr/detect"),
        ("ocr/detect", "ocr/read"),
    ]
    assert [(end["ts"], end["tid"]) for begin, end in arrows if begin["pid"] == end["pid"]] == [
        (4000, 1000),
        (61000, 1000),
    ]
    queue = [event["dur"] for event in events if event["name"] == "queue"]
    assert queue == pytest.approx([1000, 1000, 9000], abs=0.01)


def test_arrows_lead_from_each_step_to_those_that_waited_for_it():
    # b and c follow a, and d waits for both; the next call of a model has nothing to do with it
    steps = {"g": (100.0, 100.9), "g/a": (100.1, 100.2), "g/b": (100.21, 100.3), "g/c": (100.21, 100.4)}
    steps |= {"g/d": (100.41, 100.8), "model": (100.9, 101.0)}
    records = [
        record(endpoint_named(name), ("r", begun), taken=begun, started=0, ended=0, done=over)
        for name, (begun, over) in steps.items()
    ]
    events = check(chrome_trace(recorded(*records)))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    found = [(names[begin["pid"]], names[end["pid"]]) for begin, end in arrows_in(events)]
    ways = [("g", "g/a"), ("g/a", "g/b"), ("g/a", "g/c"), ("g/b", "g/d"), ("g/c", "g/d")]
    assert sorted(found) == ways


def arrows_in(events):
    """The begin and the end of each arrow, by the time of its end."""
    ends = [event for event in events if event["ph"] == "f"]
    return [(next(one for one in events if one["ph"] == "s" and one["id"] == end["id"]), end) for end in ends]


def test_counters_show_what_was_open_at_each_moment_with_what_has_no_record():
    model = endpoint_named("model")
    told = record(model, ("a", 100.0), ("b", 100.1), taken=100.2, started=100.2, ended=100.3, done=100.3)
    events = check(chrome_trace(recorded(told)))
    # as it ends, three requests are open and two samples wait of which nothing is recorded
    assert levels(events, "in flight") == [(0, 1), (100_000, 2), (300_000, 3)]
    assert levels(events, "queue length") == [(0, 1), (100_000, 2), (200_000, 0), (300_000, 2)]


def levels(events, name):
    found = [event for event in events if event["ph"] == "C" and event["name"] == name]
    return [(round(event["ts"]), *event["args"].values()) for event in found]


def test_samples_that_shared_a_phase_are_one_slice():
    model = endpoint_named("op")
    phases = [("op", "midp", 101.0, 102.0, 4), ("op", "midp", 101.0, 102.0, 5)]
    told = record(model, ("a", 100.0), taken=100.5, started=101.0, ended=102.0, done=102.0, phases=phases)
    (midp,) = [event for event in check(chrome_trace(recorded(told))) if event["name"] == "midp"]
    assert midp["args"] == {"by": "op", "samples": [4, 5]}


moments = st.floats(0, 10)
drawn_phases = st.lists(
    st.tuples(st.just("op"), st.sampled_from(["prep", "midp", "postp"]), moments, moments, st.integers(-1, 9)),
    max_size=6,
)


@st.composite
def drawn_records(draw):
    """Records of workers that may say anything about their phases."""
    endpoints = [endpoint_named("a"), endpoint_named("b/c", 3)]
    found = []
    for _ in range(draw(st.integers(0, 12))):
        taken, started, ended, done = sorted(draw(st.tuples(moments, moments, moments, moments)))
        arrived = draw(st.lists(st.floats(0, taken), min_size=1, max_size=3))
        ids = st.sampled_from(["r1", "r2", "r3", "", "\n\t\u2028é"])
        knows = draw(st.booleans())
        found.append(
            record(
                draw(st.sampled_from(endpoints)),
                *[(draw(ids), moment) for moment in arrived],
                taken=taken,
                started=started if knows else 0,
                ended=ended if knows else 0,
                done=done,
                phases=draw(drawn_phases),
                worker=draw(st.sampled_from(["0", "1"])),
            )
        )
    return found


@settings(max_examples=60, deadline=None)
@given(drawn_records())
def test_whatever_was_recorded_a_viewer_can_show_it(records):
    events = check(chrome_trace(recorded(*records)))
    requests = [event for event in events if event.get("cat") == "request"]
    assert len(requests) == sum(len(record.steps) for record in records)
    summarise(chrome_trace(recorded(*records)))


def test_an_empty_recording_is_a_trace_as_well():
    assert check(chrome_trace(recorded())) == []
    summary = summarise(chrome_trace(recorded()))
    assert (summary.nodes, summary.bottleneck, summary.critical_path) == ([], "", [])


def test_the_summary_names_costs_bottleneck_and_critical_path():
    # d waits for b and c, and c takes longer: 0.01 + 0.08 + 0.02 s are the critical path
    whole, *nodes = (endpoint_named(name, slots) for name, slots in [("g", 9), ("a", 1), ("b", 2), ("c", 3), ("d", 1)])
    times = [(0.001, 0.01), (0.012, 0.03), (0.012, 0.08), (0.093, 0.02)]
    records = []
    for number in range(10):
        start = 100.0 + number
        for node, (begun, cost) in zip(nodes, times, strict=True):
            at = start + begun
            phases = [("", "preprocess", at, at + cost / 4, -1), ("", "postprocess", at + cost / 2, at + cost, -1)]
            records.append(
                record(
                    node,
                    (f"r{number}", at - 0.0005),
                    taken=at,
                    started=at,
                    ended=at + cost,
                    done=at + cost,
                    phases=phases,
                )
            )
        records.append(record(whole, (f"r{number}", start), taken=start, started=0, ended=0, done=start + 0.2))
    summary = summarise(chrome_trace(recorded(*records)))
    assert summary.critical_path == ["a", "c", "d"]
    assert summary.average_cost_s == pytest.approx(0.11, abs=1e-6)
    costs = {node.name: node.cost_s for node in summary.nodes}
    assert costs == pytest.approx({"a": 0.01, "b": 0.03, "c": 0.08, "d": 0.02}, abs=1e-6)
    # 1/0.01, 2/0.03, 3/0.08, 1/0.02: c lets the least through
    assert (summary.bottleneck, round(summary.throughput, 2)) == ("c", 37.5)
    c = next(node for node in summary.nodes if node.name == "c")
    assert (c.pre.mean, c.process.mean, c.post.mean) == pytest.approx((20, 20, 40), abs=1e-3)
    assert c.queue.p95 == pytest.approx(0.5, abs=1e-3)
    assert c.busy == pytest.approx(10 * 0.08 / (3 * 10), abs=1e-6)
    (door,) = summary.wholes
    assert (door.name, door.requests, round(door.latency.mean, 3)) == ("g", 10, 200)


def test_a_batch_costs_each_request_its_share_but_takes_all_of_them_its_time():
    model = endpoint_named("model")
    steps = [("a", 100.0), ("b", 100.0), ("c", 100.0), ("d", 100.0)]
    summary = summarise(
        chrome_trace(recorded(record(model, *steps, taken=100.1, started=100.1, ended=100.5, done=100.5)))
    )
    assert summary.nodes[0].cost_s == pytest.approx(0.1, abs=1e-6)
    assert summary.average_cost_s == pytest.approx(0.4, abs=1e-6)
    assert summary.throughput == pytest.approx(10, abs=1e-3)


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"traceEvents": []}', b"\xff"])
def test_what_is_no_trace_is_refused_in_one_sentence(text):
    with pytest.raises(InvalidRequest, match="expected a trace that forebay wrote"):
        summarise(text)


def test_the_formulas():
    cost = capacity.NodeCost(0.02, 0.05, 0.01)
    assert cost.total_s == pytest.approx(0.08)  # P140
    assert capacity.concurrency(cost.total_s, 50) == pytest.approx(4)  # P141
    assert [capacity.workers_needed(0.08, qps) for qps in (1, 50, 51)] == [1, 4, 5]
    assert capacity.workers_needed(0.1, 30) == 3, "3.0000000000000004 is three"
    assert capacity.throughput({"a": (0.1, 4), "b": (0.05, 1), "c": (0.0, 1)}) == ("b", pytest.approx(20))  # P142
    assert capacity.accumulation(50, 20, 10) == 300
    assert capacity.accumulation(20, 50, 10) == 0
    with pytest.raises(ValueError, match="no node was seen at work"):
        capacity.throughput({"a": (0.0, 1)})


class Pool:
    """What a slot belongs to."""

    model, log_level, seats = "m", None, 0
    ahead = 0

    def __init__(self):
        self.answers = []
        self.accounts = Accounts()

    def greeted(self, slot, about):
        slot.worker = about["worker"]
        slot.open({})

    def ready(self, slot, before=None):
        if before is not None:
            before()

    def told(self, what, peer, reason):
        pass

    def gone(self, slot):
        pass

    def shared(self):
        return None


class Wire:
    """The server's side of a connection, and what was written to it."""

    def __init__(self, **about):
        self.messages = []
        self.reader = frames.FrameReader()
        self.aborted = False
        self.slot = WorkerSlot(Pool())
        self.slot.connection_made(self)
        self.say(["hello", frames.VERSION, {"worker": "deadbeef-long-name", "pid": 42, **about}])
        self.say(["ready"])

    def write(self, data):
        self.messages += list(self.reader.feed(data))

    def is_closing(self):
        return self.aborted

    def get_extra_info(self, name):
        return None

    def abort(self):
        self.aborted = True

    def say(self, message):
        self.slot.data_received(frames.encode(message))

    def run(self, noted=True):
        """Gives the worker a batch and returns it with its frame."""
        batch = EntryBatch([Request(body=b"", reply=lambda *_: None)], None, 1)
        if noted:
            batch.noted = Noted(taken=time.monotonic())
        self.slot.run(batch, lambda *_: None)
        return batch, self.messages[-1]


def test_only_a_worker_that_can_tell_is_asked_and_only_while_somebody_listens():
    old, new = Wire(), Wire(phases=True)
    assert len(old.run()[1]) == 5
    _, unasked = new.run(noted=False)
    assert len(unasked) == 5
    new.say(["result", unasked[1], [b""], None, 0.5, True])
    assert new.run()[1][5:] == [True]


def test_an_old_worker_answers_as_ever():
    wire = Wire()
    batch, (_, number, *_) = wire.run()
    wire.say(["result", number, [b""], None, 0.5, True])
    assert not wire.aborted
    assert (batch.model_s, batch.noted.started) == (0.5, 0.0)


def test_the_clock_of_another_machine_is_set_by_when_its_answer_came():
    wire = Wire(phases=True)
    sent = time.monotonic()
    batch, (_, number, *_) = wire.run()
    wire.say(["result", number, [b""], None, 0.0, True, [5.0, [["m", "predict", 5.0, 5.25, -1]]]])
    now = time.monotonic()
    assert sent <= batch.noted.started <= now
    ((_, _, begun, ended, _),) = batch.noted.phases
    assert begun == pytest.approx(batch.noted.started)
    assert ended - begun == pytest.approx(0.25)
    assert (batch.noted.worker, batch.noted.pid) == ("deadbeef", 42)


def test_the_clock_of_this_machine_is_taken_as_it_is():
    wire = Wire(phases=True)
    batch, (_, number, *_) = wire.run()
    started = time.monotonic()
    wire.say(["result", number, [b""], None, 0.0, True, [started, []]])
    assert batch.noted.started == started


@pytest.mark.parametrize(
    "told",
    [[], 1, ["now", []], [1.0, [["m", "predict", 1.0]]], [1.0, [["m", 2, 1.0, 2.0, 0]]], [math.nan, []],
     [1.0, [["m", "predict", 1.0, math.inf, 0]]]],
)  # fmt: skip
def test_a_worker_that_tells_nonsense_is_hung_up_on(told):
    wire = Wire(phases=True)
    _, (_, number, *_) = wire.run()
    wire.say(["result", number, [b""], None, 0.5, True, told])
    assert wire.aborted
