# SPDX-License-Identifier: Apache-2.0
"""An endpoint on a clock that jumps and a pool run by hand: every request gets exactly one reply."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging

import pytest

from forebay.arrays.tensor_rows import STEP_ELEMENTS
from forebay.batching.lines import NEVER
from forebay.batching.queue import BatchConfig
from forebay.errors import BadOutcome, Code, RequestError, RunnerFailed
from forebay.serving import slices
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.stream_delivery import PATIENCE_S, WINDOW_BYTES
from forebay.serving.tensor_face import TensorRequest
from forebay.testing import FakeClock, ManualPool, MemoryOrigin
from forebay.types.call import ALONE, Failure, Request, media_of
from forebay.types.tenant import Tenant
from forebay.workers.pool import CREDIT
from forebay.workers.pools.inline import InlinePool
from forebay.workers.runner import Runner, RunnerSpec


def clocked(test):
    """Runs a coroutine test on a clock that jumps; it is handed over as `clock`."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        clock = FakeClock()
        clock.run(test(*args, **kwargs, clock=clock))

    signature = inspect.signature(test)  # pytest would ask for a fixture named clock
    asked = [parameter for parameter in signature.parameters.values() if parameter.name != "clock"]
    setattr(run, "__signature__", signature.replace(parameters=asked))  # noqa: B010 - type checkers do not know it
    return run


class Echo(Runner):
    def run(self, items):
        return [item.body for item in items]


class OtherServer(ManualPool):
    """A pool that hands on what it is given."""

    is_elsewhere = True


class Desk:
    """An endpoint, its pool, and what was answered."""

    def __init__(
        self, slots=1, timeout_s=30.0, pool=None, split=True, streams=False, deadline_ms=None, idle_s=None, **batching
    ):
        self.pool = pool or ManualPool(slots)
        config = EndpointConfig(
            name="desk",
            timeout_s=timeout_s,
            split=split,
            streams=streams,
            deadline_ms=deadline_ms,
            stream_idle_s=idle_s,
        )
        self.endpoint = Endpoint(config, BatchConfig(**{"idle": "go", "max_size": 4, **batching}), self.pool)
        self.replies = {}
        self.order = []

    async def __aenter__(self):
        await self.endpoint.start()
        return self

    async def __aexit__(self, *_):
        await self.endpoint.drain(0.0)
        assert self.endpoint.in_flight == 0
        assert not self.endpoint._slices

    def submit(self, name, body=None, **fields):
        request = Request(body=name if body is None else body, reply=self._reply, id=name, **fields)
        self.replies[name] = []
        self.endpoint.submit(request)
        return request

    def _reply(self, request, outcome):
        assert request.done
        self.replies[request.id].append(outcome)
        self.order.append(request.id)

    def answer(self, name):
        """The one reply of a request: its result, or the code of its error; None while it is open."""
        found = self.replies[name]
        assert len(found) <= 1, f"{name} was answered {len(found)} times"
        if not found:
            return None
        return found[0].error.code if type(found[0]) is Failure else found[0]

    @property
    def answers(self):
        return {name: self.answer(name) for name in self.replies}

    @property
    def batches(self):
        return ["".join(str(entry.body) for entry in batch.entries) for batch in self.pool.seen]


async def turn():
    await asyncio.sleep(0.0)
    await asyncio.sleep(0.0)


# One reply each


@clocked
async def test_what_arrives_in_one_turn_is_one_batch(clock):
    async with Desk() as desk:
        for name in "abc":
            desk.submit(name)
        assert desk.endpoint.in_flight == 3
        await turn()
        assert desk.batches == ["abc"]
        desk.pool.complete()
        assert desk.answers == {"a": "a", "b": "b", "c": "c"}
        assert desk.endpoint.in_flight == 0


@clocked
async def test_outcomes_are_matched_by_position(clock):
    """G4; elsewhere: answers of a batch are split wrongly (MLServer)."""
    async with Desk() as desk:
        for name in "abc":
            desk.submit(name)
        await turn()
        desk.pool.complete(outcomes=[1, 2, 3])
        assert desk.answers == {"a": 1, "b": 2, "c": 3}


@clocked
async def test_a_worker_that_answers_at_once_finds_its_waiter(clock):
    """G1: the waiter is registered before its work can complete, also if that completes inside `submit`."""
    async with Desk(pool=InlinePool(RunnerSpec("", local=Echo))) as desk:
        desk.submit("a")
        await turn()
        assert desk.answer("a") == "a"
        assert await desk.endpoint.call("b") == "b"


@clocked
async def test_bad_sample_leaves_batch_mates_alone(clock):
    """Elsewhere: one bad request in a batch fails all of them (LitServe, Ray)."""
    async with Desk() as desk:
        for name in "abc":
            desk.submit(name)
        await turn()
        desk.pool.complete(outcomes=["a", Failure(RunnerFailed("bad")), "c"])
        assert desk.answers == {"a": "a", "b": Code.INTERNAL, "c": "c"}


@clocked
async def test_crash_fails_only_its_batch(clock):
    """G2: who was in the batch is answered at once; who waits is served by the worker that is left."""
    async with Desk(slots=2, max_size=1) as desk:
        for name in "abc":
            desk.submit(name)
        await turn()
        desk.pool.die()
        assert desk.answers == {"a": Code.UNAVAILABLE, "b": None, "c": None}
        desk.pool.complete()
        await turn()
        desk.pool.complete()
        assert desk.answers == {"a": Code.UNAVAILABLE, "b": "b", "c": "c"}


@clocked
async def test_a_worker_that_comes_back_serves_who_waits(clock):
    async with Desk(max_size=1) as desk:
        desk.submit("a")
        await turn()
        desk.pool.die()
        desk.submit("b")
        await turn()
        assert desk.batches == ["a"]
        desk.pool.revive()
        await turn()
        desk.pool.complete()
        assert desk.answer("b") == "b"


@clocked
async def test_a_full_queue_answers_at_once(clock):
    """G7: Elsewhere Bento and MLServer queue without bound."""
    async with Desk(capacity=2, max_size=1) as desk:
        desk.submit("running")
        await turn()
        for name in "abc":
            desk.submit(name)
        assert desk.answers == {"running": None, "a": None, "b": None, "c": Code.RESOURCE_EXHAUSTED}
        assert desk.endpoint.in_flight == 3
        assert desk.endpoint.metrics.codes == {"ok": 0, "resource_exhausted": 1}


@clocked
async def test_a_full_batch_starts_before_the_answers_of_the_last_are_written(clock):
    async with Desk(max_size=2) as desk:
        for name in "abcd":
            desk.submit(name)
        await turn()
        desk.pool.complete()
        assert desk.batches == ["ab", "cd"]


# Gone, late


@clocked
async def test_a_client_that_left_does_not_run(clock):
    """G3: a waiter that is gone is skipped and never affects its neighbours (MLServer hangs)."""
    async with Desk() as desk:
        desk.submit("a")
        gone = desk.submit("b")
        desk.submit("c")
        desk.endpoint.cancel(gone)
        await turn()
        assert desk.batches == ["ac"]
        desk.pool.complete()
        desk.endpoint.cancel(gone)
        assert desk.answers == {"a": "a", "b": Code.CANCELLED, "c": "c"}


@clocked
async def test_a_client_that_left_while_it_ran_is_skipped(clock):
    """G3."""
    async with Desk() as desk:
        requests = [desk.submit(name) for name in "abc"]
        await turn()
        desk.endpoint.cancel(requests[1])
        assert not desk.pool.running[0].cancelled
        desk.pool.complete()
        assert desk.answers == {"a": "a", "b": Code.CANCELLED, "c": "c"}


@clocked
async def test_work_nobody_waits_for_is_called_off(clock):
    """Elsewhere: no way to stop work nobody waits for (Triton, TorchServe)."""
    async with Desk() as desk:
        requests = [desk.submit(name) for name in "ab"]
        await turn()
        batch = desk.pool.running[0]
        told = []
        batch.on_cancel = lambda: told.append(batch)
        desk.endpoint.cancel(requests[0])
        assert told == []
        desk.endpoint.cancel(requests[1])
        assert told == [batch]
        assert batch.cancelled
        desk.pool.complete()
        assert set(desk.answers.values()) == {Code.CANCELLED}


@clocked
async def test_a_neighbour_that_cancels_inside_a_reply_is_skipped(clock):
    """G3: the outcome that comes second is dropped."""
    async with Desk() as desk:
        second = Request(body="b", reply=desk._reply, id="b")
        desk.replies["b"] = []
        desk.endpoint.submit(Request(body="a", reply=lambda *_: desk.endpoint.cancel(second)))
        desk.endpoint.submit(second)
        desk.submit("c")
        await turn()
        desk.pool.complete()
        assert desk.answers == {"b": Code.CANCELLED, "c": "c"}


@clocked
async def test_a_storm_of_abandoned_requests_leaves_nothing_behind(clock):
    """Elsewhere: clients that go away leave the batcher stuck or slow (Ray, TorchServe)."""
    async with Desk(max_size=8, capacity=10_000) as desk:
        desk.submit("running")
        await turn()
        for number in range(3_000):
            desk.endpoint.cancel(desk.submit(f"gone{number}"))
        desk.submit("last")
        assert (desk.endpoint.waiting, desk.endpoint.in_flight) == (1, 2)
        desk.pool.complete()
        await turn()
        desk.pool.complete()
        assert desk.answer("last") == "last"
        assert len(desk.pool.seen) == 2


@clocked
async def test_nothing_waits_without_a_deadline(clock):
    """G5: neither in the queue nor for a worker that hangs."""
    async with Desk(timeout_s=2.0, max_size=1) as desk:
        desk.submit("hangs")
        desk.submit("waits")
        desk.submit("sooner", deadline=clock.now + 1.0)
        await asyncio.sleep(1.01)
        assert desk.answers == {"hangs": None, "waits": None, "sooner": Code.DEADLINE_EXCEEDED}
        await asyncio.sleep(1.01)
        assert set(desk.answers.values()) == {Code.DEADLINE_EXCEEDED}
        assert desk.endpoint.waiting == 0
        assert desk.pool.running[0].cancelled


@clocked
async def test_deadlines_are_absolute(clock):
    """G5: a deadline does not start again on the way; `sleep` here is the loop being blocked."""
    async with Desk() as desk:
        late = desk.submit("late", deadline=clock.now + 1.0)
        clock.advance(5.0)
        desk.submit("fine")
        await turn()
        assert desk.batches == ["fine"]
        await asyncio.sleep(0.01)
        assert desk.answer("late") == Code.DEADLINE_EXCEEDED
        assert late.deadline == 1001.0


@clocked
async def test_whoever_is_called_off_as_its_time_is_over_was_late(clock):
    async with Desk() as desk:
        late = desk.submit("late", deadline=clock.now + 1.0)
        await turn()
        clock.advance(1.0)
        desk.endpoint.cancel(late)
        assert desk.answer("late") == Code.DEADLINE_EXCEEDED
        assert desk.replies["late"][0].error.message == "timed out after 1000 ms while it ran"
        assert desk.pool.running[0].cancelled


@clocked
async def test_a_request_asks_for_no_more_than_the_longest_time(clock):
    async with Desk() as desk:
        late = desk.submit("late", deadline=clock.now + 1e9)
        assert late.deadline == clock.now + EndpointConfig(name="x").max_timeout_s


# F45: a default deadline per model and tenant
@pytest.mark.parametrize(
    "tenant_s, stated_s, given_s",
    [(None, None, 1.0), (2.0, None, 1.0), (0.5, None, 0.5), (NEVER, None, 1.0), (0.5, 3.0, 3.0)],
)
@clocked
async def test_a_model_and_a_tenant_have_a_deadline_for_what_states_none(clock, tenant_s, stated_s, given_s):
    """The shorter one holds, and what is stated holds instead of both."""
    tenant = None if tenant_s is None else Tenant("a", deadline_s=tenant_s)
    async with Desk(deadline_ms=1000.0) as desk:
        due = NEVER if stated_s is None else clock.now + stated_s
        request = desk.submit("a", tenant=tenant, deadline=due, due=due)
        assert request.due == request.deadline == clock.now + given_s
        await asyncio.sleep(given_s + 0.01)
        assert desk.answer("a") == Code.DEADLINE_EXCEEDED


@clocked
async def test_requests_of_one_turn_have_the_deadline_of_their_model_as_well(clock):
    async with Desk(deadline_ms=1000.0) as desk:
        requests = [Request(body=name, reply=desk._reply, id=name) for name in "ab"]
        desk.replies |= {"a": [], "b": []}
        desk.endpoint.submit_all(requests, clock.now)
        assert {request.due for request in requests} == {clock.now + 1.0}


@clocked
async def test_an_expired_request_is_told_that_it_never_ran(clock):
    async with Desk(max_size=1) as desk:
        desk.submit("first", deadline=clock.now + 1.0)
        await turn()
        desk.submit("late", deadline=clock.now + 1.0)
        clock.advance(5.0)
        await asyncio.sleep(0.01)
        assert desk.replies["first"][0].error.message == "timed out after 1000 ms while it ran"
        assert desk.replies["late"][0].error.message == "timed out after 1000 ms before a worker was free"


@clocked
async def test_an_expired_request_is_told_that_a_worker_was_free_but_its_batch_not_full(clock):
    async with Desk(idle="wait", max_wait_s=60.0) as desk:
        desk.submit("late", deadline=clock.now + 1.0)
        await asyncio.sleep(1.1)
        assert desk.replies["late"][0].error.message == "timed out after 1000 ms while it waited for its batch"


@clocked
async def test_an_expired_request_that_was_cut_is_told_whether_any_of_it_ran(clock):
    async with Desk(max_size=2) as desk:
        desk.submit("cut", body=list("abc"), size=3, deadline=clock.now + 1.0)
        await turn()
        desk.submit("waits", body=list("def"), size=3, deadline=clock.now + 1.0)
        await asyncio.sleep(1.1)
        assert desk.replies["cut"][0].error.message == "timed out after 1000 ms while it ran"
        assert desk.replies["waits"][0].error.message == "timed out after 1000 ms before a worker was free"


@clocked
async def test_a_request_that_expired_while_the_loop_itself_was_the_worker_is_told_that_it_never_ran(clock):
    class Slow(Echo):
        def run(self, items):
            clock.advance(2.0)
            return super().run(items)

    async with Desk(pool=InlinePool(RunnerSpec("", local=Slow)), max_size=1) as desk:
        desk.submit("first")
        desk.submit("late", deadline=clock.now + 1.0)
        await asyncio.sleep(0.01)
        assert desk.answer("first") == "first"
        assert desk.replies["late"][0].error.message == "timed out after 1000 ms before a worker was free"


@clocked
async def test_many_deadlines_take_one_timer(clock):
    """G6: no polling; a timer is a due moment."""
    async with Desk(capacity=10_000, max_size=1) as desk:
        for number in range(1_000):
            desk.submit(f"{number}", deadline=clock.now + 1.0 + number * 1e-6)
        before = clock.turns
        await asyncio.sleep(2.0)
        assert clock.turns - before < 20
        assert set(desk.answers.values()) == {Code.DEADLINE_EXCEEDED}


@clocked
async def test_short_deadlines_are_kept_under_load(clock):
    """G5."""
    async with Desk(timeout_s=0.002, max_size=1) as desk:
        for number in range(100):
            desk.submit(f"{number}")
            await asyncio.sleep(0.001)
        assert desk.answer("1") == Code.DEADLINE_EXCEEDED


@clocked
async def test_an_idle_endpoint_does_nothing(clock):
    """G6: no timer is left once everything is answered."""
    async with Desk(idle="gather") as desk:
        desk.submit("a", origin=MemoryOrigin())
        await turn()
        clock.advance(0.003)
        desk.pool.complete()
        await asyncio.sleep(1.0)
        before = clock.turns
        await asyncio.sleep(20.0)
        assert clock.turns - before < 5


@clocked
async def test_a_lone_client_is_served_in_the_turn_it_comes(clock):
    async with Desk(idle="gather") as desk:
        origin = MemoryOrigin()
        for number in range(20):
            desk.submit(f"{number}", origin=origin)
            await turn()
            assert len(desk.pool.running) == 1
            clock.advance(0.003)
            desk.pool.complete()
            await asyncio.sleep(0.0005)


# Waiting for a batch to fill


@clocked
async def test_wait_ends_at_its_moment(clock):
    """G6: the timer is the batch's due moment."""
    async with Desk(idle="wait", max_wait_s=0.5) as desk:
        desk.submit("a")
        await asyncio.sleep(0.4)
        desk.submit("b")
        assert desk.batches == []
        await asyncio.sleep(0.11)
        assert desk.batches == ["ab"]
        assert clock.turns < 20


@clocked
async def test_a_key_at_its_limit_does_not_spin(clock):
    """G6."""
    async with Desk(slots=2, idle="wait", max_wait_s=0.1, max_running=1, max_size=1) as desk:
        desk.submit("a")
        desk.submit("b")
        await asyncio.sleep(1.0)
        assert desk.batches == ["a"]


@clocked
async def test_alone_runs_alone(clock):
    async with Desk(slots=3) as desk:
        desk.submit("a")
        desk.submit("b", key=ALONE)
        desk.submit("c")
        await turn()
        assert sorted(desk.batches) == ["ac", "b"]


# More samples than a batch takes


@clocked
async def test_5_splits_4_plus_1_and_joins_in_order(clock):
    async with Desk(slots=2) as desk:
        desk.submit("x", body=list("abcde"), size=5)
        await turn()
        assert [batch.rows for batch in desk.pool.seen] == [4, 1]
        desk.pool.complete(desk.pool.running[1])  # the second first
        assert desk.answer("x") is None
        desk.pool.complete()
        assert desk.answer("x") == list("abcde")


@clocked
async def test_the_first_failure_of_a_slice_is_the_answer(clock):
    async with Desk(slots=1, max_size=2) as desk:
        desk.submit("x", body=list("abcdef"), size=6)
        desk.submit("y", body=["y"])
        await turn()
        desk.pool.fail(ValueError("no"))
        assert desk.answer("x") == Code.INTERNAL
        while desk.pool.running:
            desk.pool.complete()
            await turn()
        assert desk.answer("y") == ["y"]
        assert desk.endpoint.waiting == 0
        assert len(desk.pool.seen) <= 3  # slices nobody waits for do not run


@clocked
async def test_cancelling_a_large_request_takes_all_its_slices_along(clock):
    async with Desk(max_size=2) as desk:
        large = desk.submit("x", body=list("abcdef"), size=6)
        await turn()
        desk.endpoint.cancel(large)
        assert desk.endpoint.waiting == 0
        assert desk.pool.running[0].cancelled
        desk.pool.complete()
        assert desk.answer("x") == Code.CANCELLED


@clocked
async def test_slices_fill_their_batches_with_others(clock):
    async with Desk() as desk:
        desk.submit("x", body=list("abcdef"), size=6)
        desk.submit("y", body=["y"])
        await turn()
        desk.pool.complete()
        await turn()
        assert [batch.rows for batch in desk.pool.seen] == [4, 3]
        desk.pool.complete()
        assert desk.answers == {"x": list("abcdef"), "y": ["y"]}


@clocked
async def test_the_time_of_a_large_request_counts_from_its_submission(clock):
    async with Desk(max_size=2, slots=2) as desk:
        large = desk.submit("x", body=list("abcd"), size=4)
        await turn()
        clock.advance(0.5)
        desk.pool.complete()
        desk.pool.complete()
        assert desk.answer("x") == list("abcd")
        assert large.arrived == 1000.0
        assert desk.endpoint.metrics.request_s.total == pytest.approx(0.5)


@clocked
async def test_a_large_request_is_queued_whole_or_not_at_all(clock):
    """G7."""
    async with Desk(capacity=5, max_size=2) as desk:
        desk.submit("w", body=list("uv"), size=2)
        desk.submit("x", body=list("abcd"), size=4)
        assert desk.answers == {"w": None, "x": Code.RESOURCE_EXHAUSTED}
        assert (desk.endpoint.waiting, desk.endpoint.in_flight) == (2, 1)


@clocked
async def test_a_request_waits_until_a_part_of_it_runs(clock):  # issue 48
    async with Desk(max_size=2) as desk:
        endpoint = desk.endpoint
        desk.submit("runs", body=["r"], size=1)
        await turn()
        desk.submit("large", body=list("abcd"), size=4)
        desk.submit("last", body=["z"], size=1)
        assert (endpoint.in_flight, endpoint.waiting_requests, endpoint.waiting) == (3, 2, 5)
        desk.pool.complete(outcomes=[["r"]])
        await turn()
        assert (endpoint.in_flight, endpoint.waiting_requests, endpoint.waiting) == (2, 1, 3)
        await serve_all(desk)
        assert (endpoint.in_flight, endpoint.waiting_requests) == (0, 0)


async def serve_all(desk):
    """Run batches until nothing is left; returns the most samples that ever waited."""
    most = desk.endpoint.waiting
    await turn()
    while desk.pool.running:
        desk.pool.complete(outcomes=[entry.body for entry in desk.pool.running[0].entries])
        most = max(most, desk.endpoint.waiting)
        await turn()
    return most


@clocked
async def test_a_request_larger_than_the_queue_is_fed_in(clock):  # F36
    async with Desk(capacity=5, max_size=2) as desk:
        desk.submit("x", body=list("abcdefghi"), size=9)
        desk.submit("y", body=["y"], size=1)  # there is room for others
        assert await serve_all(desk) <= 5
        assert desk.answers == {"x": list("abcdefghi"), "y": ["y"]}


@clocked
async def test_a_request_that_fits_into_a_batch_but_not_into_the_queue_is_fed_in(clock):
    async with Desk(capacity=4, max_size=8) as desk:
        for size in (4, 5, 8, 9, 20):
            body = [f"{size}.{row}" for row in range(size)]
            desk.submit(str(size), body=body, size=size)
            assert await serve_all(desk) <= 4
            assert desk.answer(str(size)) == body


@clocked
async def test_what_a_slice_costs_does_not_grow_with_its_request(clock):
    async with Desk(capacity=4, max_size=1) as desk:
        large = desk.submit("x", body=list(range(100)), size=100)
        await turn()
        while desk.pool.running:  # each time slices are fed in, and at the end, all of these are looked at
            assert len(desk.endpoint._slices.of(large)) <= 4 + 1
            desk.pool.complete(outcomes=[entry.body for entry in desk.pool.running[0].entries])
            await turn()
        assert desk.answer("x") == list(range(100))


@clocked
async def test_a_request_that_cannot_be_read_is_answered_at_once_whatever_was_raised(clock):
    class Unreadable(TensorRequest, gc=False, eq=False):
        def opening(self):
            raise MemoryError("no room")
            yield

    async with Desk(capacity=64, max_size=4) as desk:
        desk.replies["odd"] = []
        desk.endpoint.submit(Unreadable([b""], desk._reply, {}, size=9, id="odd"))
        assert desk.answer("odd") is Code.INTERNAL
        desk.submit("next")
        await turn()
        desk.pool.complete(outcomes=["next"])
        assert desk.answer("next") == "next"


@clocked
async def test_what_waits_for_room_and_cannot_be_read_is_answered_at_once(clock):
    class Patient(Request, gc=False, eq=False):
        def may_wait(self):
            return True

        def opening(self):
            raise MemoryError("no room")
            yield

    async with Desk(capacity=4, max_size=4, slots=0) as desk:
        desk.submit("full", body=list("full"), size=4)
        desk.replies["odd"] = []
        desk.endpoint.submit(Patient(list("odd"), desk._reply, size=3, id="odd"))
        assert desk.answer("odd") is Code.INTERNAL
        assert desk.endpoint.in_flight == 1


@clocked
async def test_requests_that_are_read_take_room_in_the_queue(clock, monkeypatch):
    monkeypatch.setattr(slices, "OPENING_S", 0.0)
    rows = 64
    params = {"given": [["x", "BYTES", [rows], False]], "wanted": [], "is_json": False}

    class Slow(TensorRequest, gc=False, eq=False):
        def opening(self):
            yield
            yield from super().opening()

    async with Desk(capacity=100, max_size=32) as desk:
        for name in ("first", "second"):
            desk.replies[name] = []
            desk.endpoint.submit(Slow([bytes(4 * rows)], desk._reply, params, size=rows, id=name))
        assert desk.answer("second") is Code.RESOURCE_EXHAUSTED
        desk.endpoint.cancel(next(iter(desk.endpoint._open)))
        await turn()
        desk.replies["third"] = []
        desk.endpoint.submit(Slow([bytes(4 * rows)], desk._reply, params, size=rows, id="third"))
        assert not desk.replies["third"]


@clocked
async def test_of_requests_larger_than_the_queue_no_more_are_read_than_have_room_for_a_slice(clock, monkeypatch):
    monkeypatch.setattr(slices, "OPENING_S", 0.0)
    rows = 128
    params = {"given": [["x", "BYTES", [rows], False]], "wanted": [], "is_json": False}
    read = []

    class Slow(TensorRequest, gc=False, eq=False):
        def opening(self):
            read.append(self.id)
            yield
            yield from super().opening()

    async with Desk(capacity=64, max_size=32) as desk:
        for name in ("first", "second", "third"):
            desk.replies[name] = []
            desk.endpoint.submit(Slow([bytes(4 * rows)], desk._reply, params, size=rows, id=name))
        assert desk.answers == {"first": None, "second": None, "third": Code.RESOURCE_EXHAUSTED}
        assert read == ["first", "second"]


@clocked
async def test_the_loop_goes_on_while_a_request_of_many_rows_is_read(clock, monkeypatch):
    monkeypatch.setattr(slices, "OPENING_S", 0.0)  # a step in each turn
    rows = 20 * STEP_ELEMENTS
    params = {"given": [["x", "BYTES", [rows], False]], "wanted": [], "is_json": False}
    async with Desk(capacity=64, max_size=64) as desk:
        large = TensorRequest([bytes(4 * rows)], desk._reply, params, size=rows, id="large")
        desk.replies["large"] = []
        desk.endpoint.submit(large)
        turns = 0
        while not desk.endpoint._slices.of(large):  # all of its rows have to be found before it can be cut
            await asyncio.sleep(0.0)
            turns += 1
            if turns == 3:
                desk.submit("small")
                await turn()
                desk.pool.complete(outcomes=["small"])
                assert desk.answer("small") == "small"
        assert turns > 10
        await turn()
        while not desk.answer("large"):
            assert len(desk.endpoint._slices.of(large)) <= 2
            for entry in (running := desk.pool.running[0]).entries:
                assert len(entry.body[0]) == 4 * entry.size
            told = [[[["y", "BYTES", [entry.size], False]], entry.body[0]] for entry in running.entries]
            desk.pool.complete(outcomes=told)
            await turn()
        assert desk.answer("large") == [[["y", "BYTES", [rows], False]], bytes(4 * rows)]


@clocked
async def test_a_request_that_is_found_to_be_broken_late_or_is_called_off_before_leaves_nothing(clock):
    rows = 4 * STEP_ELEMENTS
    params = {"given": [["x", "BYTES", [rows], False]], "wanted": [], "is_json": False}
    async with Desk(capacity=128, max_size=64) as desk:
        for name in ("broken", "gone"):
            desk.replies[name] = []
            request = TensorRequest([bytes(4 * rows) + b"x"], desk._reply, params, size=rows, id=name)
            desk.endpoint.submit(request)
        desk.endpoint.cancel(request)
        while desk.answer("broken") is None:
            await turn()
        assert desk.answers == {"broken": Code.INVALID_ARGUMENT, "gone": Code.CANCELLED}
        assert desk.endpoint.in_flight == 0
        assert not desk.pool.seen


@clocked
async def test_what_is_fed_in_ends_with_its_request(clock):  # F36
    async with Desk(capacity=4, max_size=2, timeout_s=5.0) as desk:
        first = desk.submit("x", body=list("abcdefgh"), size=8)
        desk.submit("late", body=list("ijklmn"), size=6)
        assert desk.answer("late") is None
        desk.submit("refused", body=list("opqrst"), size=6)
        assert desk.answer("refused") == Code.RESOURCE_EXHAUSTED  # there is not even room for its first samples
        await turn()
        desk.endpoint.cancel(first)
        clock.advance(6.0)
        await turn()
        assert desk.answers == {
            "x": Code.CANCELLED,
            "late": Code.DEADLINE_EXCEEDED,
            "refused": Code.RESOURCE_EXHAUSTED,
        }
        assert desk.endpoint.waiting == 0
        assert not desk.endpoint._fed


@pytest.mark.parametrize("settings", [{"split": False}, {"streams": True}])
def test_what_may_not_be_split_is_refused_by_name(settings):
    """Elsewhere: oversized input is split or refused by name."""

    async def main():
        async with Desk(**settings) as desk:
            desk.submit("x", body=list("abcde"), size=5)
            assert desk.answer("x") == Code.INVALID_ARGUMENT
            assert "5 samples, endpoint 'desk' takes 4" in desk.replies["x"][0].error.message
        async with Desk(**settings, max_size=8, capacity=4) as desk:
            desk.submit("x", body=list("abcde"), size=5)
            assert "5 samples, endpoint 'desk' takes 4" in desk.replies["x"][0].error.message

    FakeClock().run(main())


# Whatever goes wrong


@clocked
async def test_what_the_user_raised_is_logged_with_the_request_ids(clock, caplog):
    """G8."""
    with caplog.at_level(logging.ERROR):
        async with Desk() as desk:
            desk.submit("a")
            desk.submit("b")
            await turn()
            desk.pool.fail(ValueError("user's"))
            assert desk.answers == {"a": Code.INTERNAL, "b": Code.INTERNAL}
    (record,) = [record for record in caplog.records if record.name == "forebay.requests"]
    assert record.request_ids == ["a", "b"]
    assert "ValueError: user's" in record.trace


@clocked
async def test_a_part_that_cannot_be_sent_is_logged_with_its_request_id(clock, caplog):
    """G8: clients of a stream are sent to the log as well, for the first part and for later ones."""
    with caplog.at_level(logging.ERROR):
        async with Desk(streams=True) as desk:
            for name in "abc":
                desk.submit(name, on_part=lambda part, release: release())
            await turn()
            desk.pool.part([Failure(BadOutcome("a number")), 1, Failure(RequestError("no words"))], lambda: None)
            desk.pool.part([None, media_of(b"1", ("", 202, ())), None], lambda: None)
            assert desk.answers == {"a": Code.INTERNAL, "b": Code.INTERNAL, "c": Code.INVALID_ARGUMENT}
    logged = [
        (record.getMessage(), record.request_ids) for record in caplog.records if record.name == "forebay.requests"
    ]
    assert logged == [
        ("BadOutcome: a number", ["a"]),
        ("BadOutcome: only the first part of a stream can be a forebay.Answer", ["b"]),
    ]


@clocked
async def test_a_reply_that_raises_harms_nobody_else(clock):
    """G3, G8: a defect in a transport never becomes a silent wait of the neighbours."""

    def broken(*_):
        raise RuntimeError("the transport is gone")

    async with Desk() as desk:
        desk.endpoint.submit(Request(body="x", reply=broken))
        desk.submit("a")
        await turn()
        try:
            desk.pool.complete()
        except RuntimeError:
            pass
        assert desk.answer("a") == "a"


@clocked
async def test_a_pool_that_cannot_take_a_batch_fails_it_at_once(clock):
    """G8."""
    async with Desk() as desk:

        def broken(batch, done):
            raise TypeError("cannot be encoded")

        desk.pool.submit = broken
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        desk.submit("a")
        await turn()
        assert desk.answer("a") == Code.INTERNAL


@clocked
async def test_a_thousand_full_batches_on_an_inline_pool(clock):
    """Elsewhere: max_batch_size=1 breaks (BentoML)."""
    async with Desk(pool=InlinePool(RunnerSpec("", local=Echo)), max_size=1) as desk:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        names = [str(number) for number in range(1_000)]
        for name in names:
            desk.submit(name)
        await asyncio.sleep(0.001)
        assert desk.order == names


# Start and end


@clocked
async def test_before_start_and_after_drain_requests_are_refused(clock):
    desk = Desk()
    desk.submit("early")
    assert desk.answer("early") == Code.UNAVAILABLE
    async with desk:
        pass
    desk.submit("late")
    assert desk.answer("late") == Code.UNAVAILABLE


@clocked
async def test_drain_finishes_the_old_and_refuses_the_new(clock):
    async with Desk(max_size=1) as desk:
        desk.submit("a")
        desk.submit("b")
        await turn()
        draining = asyncio.ensure_future(desk.endpoint.drain(5.0))
        await turn()
        desk.submit("c")
        desk.pool.complete()
        await turn()
        desk.pool.complete()
        await draining
        assert desk.answers == {"a": "a", "b": "b", "c": Code.UNAVAILABLE}
        assert clock.now < 1001.0


@clocked
async def test_drain_answers_what_does_not_end_in_time(clock):
    """G2, G5."""
    async with Desk(max_size=1) as desk:
        desk.submit("a")
        desk.submit("b")
        await turn()
        await desk.endpoint.drain(3.0)
        assert desk.answers == {"a": Code.UNAVAILABLE, "b": Code.UNAVAILABLE}
        assert clock.now == pytest.approx(1003.0, abs=0.1)


# Called as a coroutine


@clocked
async def test_call_returns_or_raises(clock):
    async with Desk() as desk:
        calls = [asyncio.ensure_future(desk.endpoint.call(name)) for name in "ab"]
        await turn()
        desk.pool.complete(outcomes=[1, Failure(RunnerFailed("bad"))])
        assert await calls[0] == 1
        with pytest.raises(RunnerFailed, match="bad"):
            await calls[1]


@clocked
async def test_a_cancelled_call_cancels_its_request(clock):
    async with Desk() as desk:
        call = asyncio.ensure_future(desk.endpoint.call("a"))
        await turn()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert desk.endpoint.in_flight == 0
        assert desk.pool.running[0].cancelled


# Streamed answers


def taker(got):
    return lambda part, release: got.append((part, release))


LARGE = b"x" * (WINDOW_BYTES // 8)
"""A part of which more than eight, and than `CREDIT`, fill a window."""


def send(desk, parts, released):
    """Send steps until one of them is held; returns how many were not."""
    for number in range(2000):
        count = len(released)
        desk.pool.part(parts, lambda: released.append(1))
        if len(released) == count:
            return number
    pytest.fail("no window was ever full")


@clocked
async def test_parts_reach_their_clients_and_a_step_is_over_once_all_have_room(clock):
    async with Desk(streams=True) as desk:
        got = {"a": [], "b": []}
        requests = [desk.submit(name, on_part=taker(got[name])) for name in "ab"]
        await turn()
        released = []
        desk.pool.part([1, None], lambda: released.append("first"))
        desk.pool.part([2, 3], lambda: released.append("second"))
        assert [part for part, _ in got["a"]] == [1, 2]
        assert [part for part, _ in got["b"]] == [3]
        assert released == ["first", "second"]
        sent = send(desk, [LARGE, None], released)
        assert sent == CREDIT - 2
        count = len(released)
        got["a"][0][1]()
        assert len(released) == count + 1
        got["a"][0][1]()  # once more: it counts once
        desk.pool.part([LARGE, None], lambda: released.append(1))
        assert len(released) == count + 1
        desk.endpoint.cancel(requests[0])
        assert len(released) == count + 2
        desk.pool.part([4, 5], lambda: None)
        desk.pool.complete(outcomes=[None, None])
        assert desk.answers == {"a": Code.CANCELLED, "b": None}
        assert desk.replies["b"] == [None]


@clocked
async def test_a_client_that_does_not_read_stalls_its_batch_mates_for_a_moment_only(clock):  # F8
    async with Desk(streams=True) as desk:
        got = []
        desk.submit("stuck", on_part=lambda part, release: None)
        desk.submit("quick", on_part=lambda part, release: got.append(part) or release())
        await turn()
        released = []
        assert send(desk, [b"", b""], released) > 16 * CREDIT  # small parts do not even hold it for that
        clock.advance(PATIENCE_S)
        await turn()
        assert desk.answers == {"stuck": Code.DEADLINE_EXCEEDED, "quick": None}
        assert len(released) == len(got)
        for _ in range(1000):
            desk.pool.part([None, LARGE], lambda: released.append(1))
        assert len(released) == len(got)
        desk.pool.complete(outcomes=[None, None])
        assert desk.replies["quick"] == [None]


@clocked
async def test_a_client_that_reads_slowly_has_so_much_time_in_all(clock):  # F8
    async with Desk(streams=True) as desk:
        taken = []
        desk.submit("slow", on_part=taker(taken))
        desk.submit("quick", on_part=lambda part, release: release())
        await turn()
        released = []
        for _ in range(10):
            if desk.answer("slow") is not None:
                break
            send(desk, [LARGE, LARGE], released)
            clock.advance(PATIENCE_S / 4)
            await turn()
            while taken:
                taken.pop(0)[1]()
        assert desk.answers == {"slow": Code.DEADLINE_EXCEEDED, "quick": None}


@clocked
async def test_a_model_that_a_slow_client_holds_up_is_not_silent(clock):
    async with Desk(streams=True, idle_s=1.0) as desk:
        taken = []
        desk.submit("slow", on_part=taker(taken))
        desk.submit("quick", on_part=lambda part, release: release())
        await turn()
        send(desk, [LARGE, b""], [])
        await asyncio.sleep(0.75 * PATIENCE_S)
        assert desk.answers == {"slow": None, "quick": None}
        for _, release in taken:
            release()
        await asyncio.sleep(0.9)
        assert desk.answers == {"slow": None, "quick": None}
        await asyncio.sleep(0.2)
        assert set(desk.answers.values()) == {Code.DEADLINE_EXCEEDED}
        (silent,) = desk.replies["quick"]
        assert silent.error.message == "no part for 1000 ms (stream_idle_ms)"
        assert desk.pool.running[0].cancelled  # so that its worker is looked after


@clocked
async def test_parts_take_no_timers(clock):
    """G6."""
    async with Desk(streams=True, idle_s=1.0) as desk:
        desk.submit("a", on_part=lambda part, release: release())
        await turn()
        desk.pool.part([b""], lambda: None)
        timers = len(asyncio.get_running_loop()._scheduled)  # pyright: ignore[reportAttributeAccessIssue]
        for _ in range(1000):
            desk.pool.part([b""], lambda: None)
        assert len(asyncio.get_running_loop()._scheduled) == timers  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("is_elsewhere", [False, True])
@clocked
async def test_only_the_server_with_the_model_looks_for_silence_and_without_a_limit_none_does(clock, is_elsewhere):
    pool = OtherServer() if is_elsewhere else ManualPool()
    async with Desk(pool=pool, streams=True, idle_s=1.0 if is_elsewhere else 0.0) as desk:
        started = clock.now
        request = desk.submit("a", on_part=lambda part, release: release())
        await turn()
        assert request.deadline == started + 30.0
        desk.pool.part([b""], lambda: None)
        await asyncio.sleep(3599.0)
        assert desk.answer("a") is None
        await asyncio.sleep(1.0)
        (late,) = desk.replies["a"]
        assert late.error.message == "timed out after 3600000 ms (max_timeout_ms) while it ran"


@clocked
async def test_what_a_front_hands_on_has_the_usual_times_unless_its_client_states_one(clock):
    async with Desk(streams=True, idle_s=60.0) as desk:
        stated, usual = (Request(b"", lambda *_: None, deadline=clock.now + 5.0) for _ in range(2))
        stated.due = stated.deadline
        desk.endpoint.submit_bundle([stated, usual], clock.now)
        assert stated.deadline == clock.now + 5.0
        assert usual.deadline == clock.now + 30.0


@clocked
async def test_who_holds_up_nobody_may_take_its_time(clock):  # F8
    async with Desk(streams=True, max_size=1, timeout_s=100.0) as desk:
        desk.submit("slow", on_part=taker([]))
        await turn()
        released = []
        send(desk, [LARGE], released)
        for _ in range(10):
            clock.advance(PATIENCE_S)
            await turn()
        assert desk.answer("slow") is None
        desk.submit("next", on_part=taker([]))  # there is no worker for it but this one
        clock.advance(PATIENCE_S)
        await turn()
        assert desk.answers == {"slow": Code.DEADLINE_EXCEEDED, "next": None}


@clocked
async def test_a_part_that_fails_ends_that_stream_only(clock):
    async with Desk(streams=True) as desk:
        got = []
        for name in "ab":
            desk.submit(name, on_part=lambda part, release: got.append(part))
        await turn()
        desk.pool.part([Failure(RunnerFailed("bad")), 1], lambda: None)
        assert desk.answers == {"a": Code.INTERNAL, "b": None}
        desk.pool.part([2, 2], lambda: None)
        assert got == [1, 2]


@clocked
async def test_a_transport_that_fails_to_take_a_part_stops_no_other_stream(clock):  # F2
    def broken(part, release):
        raise RuntimeError("the transport has ended")

    async with Desk(streams=True) as desk:
        got, released = [], []
        desk.submit("a", on_part=broken)
        desk.submit("b", on_part=lambda part, release: (got.append(part), release()))
        await turn()
        desk.pool.part([1, 2], lambda: released.append(1))
        assert (got, released) == ([2], [1])


@clocked
async def test_a_client_that_leaves_gives_its_room_back(clock):
    """G3: neighbours in a streaming batch go on."""
    async with Desk(streams=True) as desk:
        slow = desk.submit("slow", on_part=lambda part, release: None)
        desk.submit("quick", on_part=lambda part, release: release())
        await turn()
        released = []
        count = send(desk, [LARGE, LARGE], released)
        desk.endpoint.cancel(slow)
        assert len(released) == count + 1


# Numbers


@clocked
async def test_every_request_is_counted_once(clock):
    async with Desk(max_size=4, capacity=8) as desk:
        for name in "abcd":
            desk.submit(name)
        await turn()
        clock.advance(0.02)
        desk.pool.complete(outcomes=["a", Failure(RunnerFailed("x")), "c", "d"], model_s=0.02)
        metrics = desk.endpoint.metrics
        assert metrics.codes == {"ok": 3, "internal": 1}
        assert (metrics.request_s.count, metrics.batch_size.count, metrics.batch_size.total) == (4, 1, 4.0)
        assert metrics.request_s.total == pytest.approx(0.08, abs=0.001)
        assert metrics.model_s.total == 0.02
        assert metrics.queue_s.count >= 3
