# SPDX-License-Identifier: Apache-2.0
"""Ops at work: batches through the hooks of an op, without a server."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.compat.pipeline.op_items import Item, opened, request, requests, run_one, told
from tests.waiting import PATIENCE_S

from forebay.batching.bill import divide
from forebay.errors import ModelError, Unavailable
from forebay.surfaces.pipeline.codes import CustomException, CustomExceptionCode, ProductErrCode, err_of
from forebay.surfaces.pipeline.ops.op import REQUEST, Op
from forebay.surfaces.pipeline.ops.runner import OpInstances, OpRun
from forebay.types.batch import EntryBatch
from forebay.types.call import After, Failure, Request
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import RunnerSpec, WorkerContext
from forebay.workers.user_calls.cancel import is_cancelled
from forebay.workers.user_calls.phases import needed
from forebay.workers.wire.objects import packed

ROOT = str(Path(__file__).parents[3])


class Doubles(Op):
    """A model that doubles `x`, and notes what it is asked."""

    def init_op(self) -> None:
        self.calls: list[Any] = []

    def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
        self.calls.append((feed_batch, typical_logid))
        return {"y": feed_batch[0]["x"] * 2}, 0, ""


def rows(*values: float) -> dict[str, Any]:
    return {"x": np.array(values, dtype="float32")}


# ---------------------------------------------------------------------------------------------------------------------
# The way of one sample


def test_the_request_is_an_input_like_any_other() -> None:  # P39
    seen: list[Any] = []

    class Echo(Op):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            seen.append((list(input_dicts), data_id, log_id))
            return input_dicts[REQUEST], False, None, ""

    assert run_one(Echo("echo"), {"q": "text"}) == {"q": "text"}
    assert seen == [([REQUEST], 3, 7)]


def test_without_a_model_postprocess_gets_what_preprocess_made() -> None:  # P36
    class Own(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            raise AssertionError

    assert run_one(Op("plain"), {"q": 1}) == {"q": 1}
    assert run_one(Own("own"), {"q": 1}) == {"q": 1}


def test_a_process_of_ones_own_runs_where_that_is_asked_for() -> None:  # P36
    assert run_one(Doubles("own"), rows(1), run_process=True)["y"].tolist() == [2]


def test_postprocess_sees_the_inputs_that_preprocess_changed() -> None:  # P47
    class Changes(Doubles):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            input_dicts[REQUEST]["seen"] = "yes"
            input_dicts["more"] = 1
            return rows(1)

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"seen": input_dicts[REQUEST]["seen"], "more": input_dicts["more"], **fetch_data}

    outcome = run_one(Changes("changes"), {}, run_process=True)
    assert (outcome["seen"], outcome["more"], outcome["y"].tolist()) == ("yes", 1, [2])


def test_other_readers_of_an_input_never_see_what_this_op_does_to_it() -> None:  # P65
    class Spoils(Op):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            (found,) = input_dicts.values()
            found["x"][:] = -1
            found["added"] = 1
            return found

    value = rows(1, 2)
    outcome = run_one(Spoils("spoils"), value, shared_inputs=frozenset({REQUEST}))
    assert outcome["x"].tolist() == [-1, -1]
    assert list(value) == ["x"]
    assert value["x"].tolist() == [1, 2]
    # The only reader needs no copy.
    assert run_one(Spoils("spoils"), value)["x"] is value["x"]


def test_an_input_that_cannot_be_copied_fails_its_own_request() -> None:  # P65
    runner = opened(Op("a"), shared_inputs=frozenset({REQUEST}))
    bad, good = runner.run(requests({"lock": threading.Lock()}, {"q": 1}))
    assert told(bad)[0] == 7000
    assert f"the result of '{REQUEST}' cannot be copied" in told(bad)[1]
    assert good == {"q": 1}


def test_the_op_of_a_skipped_predecessor_just_does_not_find_it() -> None:  # P39
    class Joins(Op):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            return {name: value["n"] for name, value in input_dicts.items()}

    (outcome,) = opened(Joins("join")).run([Item({"cnn": {"n": 2}, "bow": {"n": 1}}, {})])
    assert outcome == {"bow": 1, "cnn": 2}  # trap 29: names count, not the order


# ---------------------------------------------------------------------------------------------------------------------
# Batches


def test_samples_share_a_call_and_get_their_own_rows_back() -> None:  # P44, P45, P80, P81
    runner = opened(op := Doubles("doubles"), run_process=True, share_instance=True)
    outcomes = runner.run(requests(rows(1), rows(2, 3, 4), rows(5, 6)))
    assert [outcome["y"].tolist() for outcome in outcomes] == [[2], [4, 6, 8], [10, 12]]
    ((feed_batch, typical),) = op.calls
    assert isinstance(feed_batch, list)
    assert len(feed_batch) == 1
    assert feed_batch[0]["x"].tolist() == [1, 2, 3, 4, 5, 6]
    assert typical == 100  # that of the first sample


def test_a_sample_without_log_id_is_known_by_its_data_id() -> None:  # P45
    runner = opened(op := Doubles("doubles"), run_process=True, share_instance=True)
    runner.run([request(rows(1), data_id=5, log_id=0)])
    runner.run([request(rows(1), data_id=6, log_id=9)])
    assert [typical for _, typical in op.calls] == [5, 9]


def test_samples_that_do_not_fit_together_are_all_answered() -> None:  # P82, trap 7
    runner = opened(op := Doubles("doubles"), run_process=True, share_instance=True)
    values = [{"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}, {"x": np.ones((2, 2))}]
    assert [outcome["y"].shape for outcome in runner.run(requests(*values))] == [(1, 2), (1, 3), (2, 2)]
    assert len(op.calls) == 2
    # The op is as good as new.
    (outcome,) = runner.run([request(rows(1))])
    assert outcome["y"].tolist() == [2]


def test_the_list_style_gives_each_sample_a_dict_of_its_own() -> None:  # P44
    class Stacks(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            self.sizes = len(feed_batch)
            return {"y": np.stack([feed["x"] for feed in feed_batch]) * 2}

    runner = opened(op := Stacks("stacks"), run_process=True, batch_style="list", share_instance=True)
    outcomes = runner.run(requests(rows(1, 2), rows(3, 4)))
    assert op.sizes == 2
    assert [outcome["y"].tolist() for outcome in outcomes] == [[2, 4], [6, 8]]


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("nothing", [None, []])
def test_a_list_of_results_is_one_however_many_there_are(count: int, nothing: Any) -> None:  # P44, P46
    class Finds(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            return [nothing if feed["x"][0] == 1 else {"x": feed["x"]} for feed in feed_batch]

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"found": fetch_data["x"].tolist() if fetch_data else "nothing"}

    runner = opened(Finds("finds"), run_process=True, batch_style="list")
    outcomes = runner.run(requests(*(rows(place) for place in range(count))))
    assert [outcome["found"] for outcome in outcomes] == [[0], "nothing", [2], [3]][:count]


def test_skipping_concerns_one_sample_of_a_batch() -> None:  # P42, trap 15
    class Skips(Doubles):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            (found,) = input_dicts.values()
            return found, bool(found["x"][0] > 10), None, ""

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"names": list(fetch_data), "values": next(iter(fetch_data.values())).tolist()}

    runner = opened(op := Skips("skips"), run_process=True, share_instance=True)
    outcomes = runner.run(requests(rows(1), rows(11), rows(2)))
    assert [outcome["values"] for outcome in outcomes] == [[2], [11], [4]]
    assert [outcome["names"] for outcome in outcomes] == [["y"], ["x"], ["y"]]
    assert [feed[0]["x"].tolist() for feed, _ in op.calls] == [[1, 2]]


class Own(ProductErrCode):
    TOO_SAD = 71


def test_a_product_error_ends_one_sample_before_the_model_sees_it() -> None:  # P43
    posted: list[int] = []

    class Refuses(Doubles):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            (found,) = input_dicts.values()
            code = Own.TOO_SAD if found["x"][0] < 0 else None
            return found, False, code, "too sad"

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            data_id, _log_id = ids
            posted.append(data_id)
            return fetch_data, (70 if data_id == 2 else None), "too late"

    runner = opened(op := Refuses("refuses"), run_process=True, share_instance=True)
    first, second, third = runner.run(requests(rows(1), rows(-1), rows(3)))
    assert first["y"].tolist() == [2]
    assert told(second) == (71, "too sad")
    assert told(third) == (70, "too late")
    assert err_of(second.error).product
    assert [feed[0]["x"].tolist() for feed, _ in op.calls] == [[1, 3]]
    assert posted == [0, 2]


@pytest.mark.parametrize("hook", ["preprocess", "postprocess"])
def test_a_sample_that_fails_leaves_its_batch_mates_alone(hook: str) -> None:  # P86
    def fails(self: Any, *arguments: Any) -> Any:
        if arguments[0][REQUEST]["x"][0] == 2:
            raise ValueError("two")
        return arguments[0][REQUEST] if hook == "preprocess" else arguments[1]

    op = type("Fails", (Doubles,), {hook: fails})("fails")
    first, second, third = opened(op, run_process=True).run(requests(rows(1), rows(2), rows(3)))
    assert (first["y"].tolist(), third["y"].tolist()) == ([2], [6])
    assert told(second) == (10000, f"[fails] Failed to {hook}: two")


class FailsAtTwo(Doubles):
    def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
        found = super().process(feed_batch, typical_logid)
        if 2 in feed_batch[0]["x"]:
            raise ValueError("two")
        return found


def test_a_process_that_fails_fails_its_batch() -> None:  # P86
    outcomes = opened(FailsAtTwo("fails"), run_process=True).run(requests(rows(1), rows(2), rows(3)))
    assert [told(outcome) for outcome in outcomes] == [(10000, "[fails] Failed to process: two")] * 3


def test_a_batch_that_failed_can_be_run_one_by_one() -> None:  # P86
    runner = opened(FailsAtTwo("fails"), run_process=True, isolate_failures=True)
    first, second, third = runner.run(requests(rows(1), rows(2), rows(3)))
    assert (first["y"].tolist(), third["y"].tolist()) == ([2], [6])
    assert told(second)[0] == 10000


def test_the_runs_of_a_failed_batch_one_by_one_are_paid_by_what_failed() -> None:  # P86
    class Slow(FailsAtTwo):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            time.sleep(0.004)
            return super().process(feed_batch, typical_logid)

    runner = opened(Slow("slow"), run_process=True, isolate_failures=True)
    own_s: list[float] = []
    token = needed.set(own_s)
    try:
        items = [Request(item.body, print, item.params) for item in requests(rows(1), rows(2), rows(3))]
        started = time.monotonic()
        runner.run(items)
        batch = EntryBatch(items, None, 3, model_s=time.monotonic() - started, own_s=own_s)
    finally:
        needed.reset(token)
    first, second, third = divide(batch, None)
    assert first + second + third == pytest.approx(batch.model_s, abs=1e-9)
    assert second - first == pytest.approx(second - third)
    assert second - first >= 0.012 - 1e-9  # the three runs alone


def test_a_list_that_failed_can_be_run_one_by_one() -> None:  # P86, P44
    class Fails(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            if any(2 in feed["x"] for feed in feed_batch):
                raise ValueError("two")
            return [{"y": feed["x"] * 2} for feed in feed_batch]

    runner = opened(Fails("fails"), run_process=True, isolate_failures=True, batch_style="list")
    first, second = runner.run(requests(rows(1), rows(2)))
    assert first["y"].tolist() == [2]
    assert told(second)[0] == 10000


def test_a_result_that_cannot_be_shared_out_is_told() -> None:  # P81, P92
    class Short(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            return {"y": np.ones(2)}

    outcomes = opened(Short("short"), run_process=True).run(requests(rows(1), rows(2), rows(3)))
    expected = "[short] Failed to process: process returned 2 rows as 'y', the batch needs 3"
    assert [told(outcome) for outcome in outcomes] == [(7000, expected)] * 3


@pytest.mark.parametrize("timeout_ms", [-1, 10_000])
def test_a_list_of_dicts_is_run_one_after_the_other(timeout_ms: float) -> None:  # P49, trap 18
    class Pages(Doubles):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            return [rows(1), rows(2, 3), rows(4)], False, None, ""

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"pages": [page["y"].tolist() for page in fetch_data]}

    runner = opened(op := Pages("pages"), run_process=True, timeout_ms=timeout_ms, share_instance=True)
    outcomes = runner.run(requests({}, {}))
    assert outcomes == [{"pages": [[2], [4, 6], [8]]}] * 2
    assert [feed[0]["x"].tolist() for feed, _ in op.calls] == [[1], [2, 3], [4]] * 2


def test_a_sample_may_have_no_dict_at_all_to_run() -> None:  # P49
    class Blank(Doubles):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            return []

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"pages": fetch_data}

    assert run_one(Blank("blank"), {}, run_process=True) == {"pages": []}


def test_sequences_are_answered_as_one_by_one() -> None:  # P84
    class Tags(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            (feed,) = feed_batch
            ends = feed["words.lod"]
            sums = [feed["words"][start:end].sum() for start, end in itertools.pairwise(ends)]
            return {"sum": np.array(sums), "words": feed["words"] * 2, "words.lod": ends}

    values = [
        {"words": np.arange(3), "words.lod": np.array([0, 1, 3])},
        {"words": np.arange(5), "words.lod": np.array([0, 5])},
    ]
    runner = opened(Tags("tags"), run_process=True)
    together = runner.run(requests(*values))
    alone = [runner.run([request(value)])[0] for value in values]
    for one, other in zip(together, alone, strict=True):
        assert {name: list(value) for name, value in one.items()} == {
            name: list(value) for name, value in other.items()
        }


# ---------------------------------------------------------------------------------------------------------------------
# Time-outs


class Slow(Op):
    """Hangs in its first calls until it is let go."""

    hanging = 1

    def init_op(self) -> None:
        self.release = threading.Event()
        self.ended = threading.Semaphore(0)
        self.calls: list[Any] = []

    def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
        self.calls.append(feed_batch[0]["x"].tolist())
        if len(self.calls) <= self.hanging:
            feed_batch[0]["late"] = True
            self.release.wait(PATIENCE_S)
            self.mark = "late"
            self.ended.release()
        return {"y": feed_batch[0]["x"] * 2, "fed": sorted(feed_batch[0])}


def test_a_call_that_takes_too_long_is_6000() -> None:  # P87
    runner = opened(op := Slow("slow"), run_process=True, timeout_ms=30)
    started = time.monotonic()
    (outcome,) = runner.run([request(rows(1))])
    assert time.monotonic() - started < PATIENCE_S / 2
    assert told(outcome) == (6000, "[slow] Failed to process: timeout after 30 ms")
    assert len(op.calls) == 1  # retry 1 is no retry
    op.release.set()


def test_a_time_out_is_tried_again() -> None:  # P87, trap 18
    runner = opened(op := Slow("slow"), run_process=True, timeout_ms=300, retry=3)
    op.hanging = runner._op.hanging = 2  # type: ignore[union-attr]
    (outcome,) = runner.run([request(rows(1))])
    op.release.set()
    assert outcome["y"].tolist() == [2]
    assert outcome["fed"] == ["x"]  # not what the late call did to its feed
    assert len(op.calls) == 3


def test_only_time_outs_are_tried_again() -> None:  # P87
    calls: list[int] = []

    class Raises(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            calls.append(1)
            raise ValueError("no")

    assert told(run_one(Raises("raises"), {"x": 1}, run_process=True, retry=3, timeout_ms=10_000))[0] == 10000
    assert len(calls) == 1


@pytest.mark.parametrize("how", ["returned", "raised"])
def test_a_process_that_says_6000_itself_has_ended_and_is_not_tried_again(how: str) -> None:  # P87
    calls: list[int] = []

    class Says(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            calls.append(1)
            if how == "raised":
                raise CustomException(CustomExceptionCode.TIMEOUT, "late", isSendToUser=True)
            return None, CustomExceptionCode.TIMEOUT.value, "late"

    assert told(run_one(Says("says"), {"x": 1}, run_process=True, retry=3)) == (6000, "late")
    assert len(calls) == 1


def test_after_a_time_out_the_next_request_is_served_and_the_late_result_is_nobodys() -> None:  # P88
    runner = opened(op := Slow("slow"), run_process=True, timeout_ms=500)
    (late,) = runner.run([request(rows(1))])
    op.release.set()
    assert op.ended.acquire(timeout=PATIENCE_S)
    (outcome,) = runner.run([request(rows(5))])
    assert told(late)[0] == 6000
    assert outcome["y"].tolist() == [10]
    # What the late call set on its `self` is not what later requests see.
    assert not hasattr(runner._op, "mark")
    runner.close()


def test_what_preprocess_kept_on_self_is_there_after_a_retry() -> None:  # P53, P87
    class Keeps(Slow):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            self.kept = input_dicts[REQUEST]["name"]
            return rows(1)

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {"name": self.kept}

    runner = opened(op := Keeps("keeps"), run_process=True, timeout_ms=300, retry=2)
    (outcome,) = runner.run([request({"name": "a"})])
    op.release.set()
    assert outcome == {"name": "a"}


def test_a_call_that_is_left_behind_can_ask_and_end() -> None:  # P88
    ended = threading.Event()

    class Polite(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            while not is_cancelled():
                time.sleep(0.002)
            ended.set()
            return {}

    assert told(run_one(Polite("polite"), rows(1), run_process=True, timeout_ms=20))[0] == 6000
    assert ended.wait(PATIENCE_S)


def test_time_that_is_enough_changes_nothing() -> None:  # P87
    class Asks(Doubles):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            assert not is_cancelled()
            return super().process(feed_batch, typical_logid)

    runner = opened(op := Asks("asks"), run_process=True, timeout_ms=60_000, share_instance=True)
    for value in range(3):
        (outcome,) = runner.run([request(rows(value))])
        assert outcome["y"].tolist() == [2 * value]
    assert len(op.calls) == 3


def test_the_model_of_a_worker_is_opened_again_after_a_time_out() -> None:  # P88, P111
    made: list[Client] = []

    class Hangs(Client):
        def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
            if self is made[0]:
                release.wait(PATIENCE_S)
            return super().predict(feed, fetch, batch, log_id)

        def close(self) -> None:
            super().close()
            closed.set()

    release, closed = threading.Event(), threading.Event()
    instances = OpInstances(Op("op"), OpRun(timeout_ms=300), client_for=lambda _: made.append(Hangs()) or made[-1])
    runner = instances.runner()
    runner.open(WorkerContext())
    (late,) = runner.run([request(rows(1))])
    assert len(made) == 1, "a client waits for no model to be loaded to be told that its time is over"
    (outcome,) = runner.run([request(rows(2))])
    release.set()
    assert told(late)[0] == 6000
    assert outcome["y"].tolist() == [4]
    assert closed.wait(PATIENCE_S)
    assert [client.closed for client in made] == [1, 0]
    runner.close()
    assert [client.closed for client in made] == [1, 1]


def test_a_model_that_cannot_be_opened_again_is_tried_by_each_request() -> None:  # P88
    class Hangs(Client):
        def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
            release.wait(PATIENCE_S)
            return super().predict(feed, fetch, batch, log_id)

    def make(_index: int | None) -> Any:
        made = making.pop(0)
        if isinstance(made, Exception):
            raise made
        return made

    release = threading.Event()
    hangs, last = Hangs(), Client()
    making: list[Any] = [hangs, OSError("no room"), last]
    runner = OpInstances(Op("op"), OpRun(timeout_ms=300), client_for=make).runner()
    runner.open(WorkerContext())
    late, missed, served = (runner.run([request(rows(number))])[0] for number in range(3))
    runner.close()
    release.set()
    assert told(late)[0] == 6000
    assert told(missed) == (3003, "[op] the model cannot be opened again after a time-out: no room")
    assert served["y"].tolist() == [4]
    assert last.closed == 1


def test_a_worker_that_ends_leaves_its_client_to_the_call_that_still_uses_it() -> None:  # P88
    class Hangs(Client):
        def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
            release.wait(PATIENCE_S)
            used.append(self.closed)
            return super().predict(feed, fetch, batch, log_id)

        def close(self) -> None:
            super().close()
            closed.set()

    release, closed, used = threading.Event(), threading.Event(), list[int]()
    runner = opened(Op("op"), client=Hangs(), timeout_ms=30)
    assert told(runner.run([request(rows(1))])[0])[0] == 6000
    runner.close()
    release.set()
    assert closed.wait(PATIENCE_S)
    assert used == [0]


def test_a_worker_process_with_a_stuck_call_ends_once_it_has_answered() -> None:  # P88
    runner = opened(op := Slow("slow"), run_process=True, timeout_ms=300, own_process=True)
    first, second = runner.run(requests({"x": np.ones((1, 2))}, {"x": np.ones((1, 3))}))
    op.release.set()
    assert isinstance(first, After)
    assert told(first.outcome)[0] == 6000
    assert second["y"].tolist() == [[2, 2, 2]]


# ---------------------------------------------------------------------------------------------------------------------
# Workers


def test_threads_initialise_an_op_once_and_work_on_copies() -> None:  # P50, P51, P54, trap 25
    calls: list[Any] = []

    class Counts(Op):
        def init_op(self) -> None:
            calls.append(self.concurrency_idx)
            self.words = {"a": 1}

    instances = OpInstances(op := Counts("counts"), OpRun())
    taken = [instances.take(WorkerContext(index)) for index in range(3)]
    assert calls == [None]
    assert len({id(one) for one in [op, *taken]}) == 4
    assert all(one.words is op.words for one in taken)  # pyright: ignore[reportAttributeAccessIssue]
    assert [one.concurrency_idx for one in taken] == [None] * 3


def test_threads_can_be_told_to_share_the_instance() -> None:  # P54
    instances = OpInstances(op := Op("shared"), OpRun(share_instance=True))
    assert [instances.take(WorkerContext(index)) for index in range(2)] == [op, op]


def test_a_worker_process_knows_its_number() -> None:  # P50, P51
    seen: list[Any] = []

    class Knows(Op):
        def init_op(self) -> None:
            seen.append(self.concurrency_idx)

    opened(Knows("knows"), own_process=True, index=2)
    assert seen == [2]


@pytest.mark.parametrize("raised", [ValueError("no vocabulary"), SystemExit("no vocabulary")])
def test_an_op_that_cannot_be_initialised_says_so_with_its_name(raised: BaseException) -> None:  # P52
    class Broken(Op):
        def init_op(self) -> None:
            raise raised

    with pytest.raises(ModelError, match=r"op 'broken' could not be initialised: \w+: no vocabulary") as caught:
        opened(Broken("broken"))
    assert "in init_op" in caught.value.trace


def test_a_model_that_cannot_be_opened_says_so_with_its_op() -> None:  # P52
    def client_for(_index: int | None) -> Any:
        raise ModelError("there is no model.onnx", trace="where")

    runner = OpInstances(Op("bow"), OpRun(), client_for=client_for).runner()
    with pytest.raises(ModelError, match=r"op 'bow': there is no model\.onnx") as caught:
        runner.open(WorkerContext())
    assert caught.value.trace == "where"


def test_what_hooks_keep_on_self_is_their_batchs() -> None:  # P53, P54, trap 25
    class Keeps(Op):
        def preprocess(self, input_dicts: Any, data_id: Any = None, log_id: Any = None) -> Any:
            self.nonce = input_dicts[REQUEST]["nonce"]
            return {"x": 1}

        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            time.sleep(0.0005)
            return {"seen": self.nonce}

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            return {**fetch_data, "nonce": self.nonce}

    async def serve() -> list[Any]:
        instances = OpInstances(Keeps("keeps"), OpRun(run_process=True))
        pool = ThreadPool(RunnerSpec(factory="", local=instances.runner), workers=3)
        await pool.start()
        outcomes: list[Any] = [None] * 300
        left = asyncio.Semaphore(3)
        done = asyncio.Event()

        def finished(place: int, found: Any) -> None:
            outcomes[place] = found[0]
            left.release()
            if None not in outcomes:
                done.set()

        for place in range(len(outcomes)):
            await left.acquire()
            entry = Request(body={REQUEST: {"nonce": place}}, reply=lambda *_: None)
            pool.submit(EntryBatch([entry], None, 1), lambda _batch, found, place=place: finished(place, found))
        await done.wait()
        await pool.stop(1.0)
        return outcomes

    assert asyncio.run(serve()) == [{"seen": place, "nonce": place} for place in range(300)]


def stuck_op() -> Any:
    """Build the runner of a worker process whose process hangs when it is told to; see the test below."""

    class Hangs(Op):
        def init_op(self) -> None:
            self.stop = threading.Event()

        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            if feed_batch[0]["hang"]:
                self.stop.wait(PATIENCE_S)
            return {"worker": self.concurrency_idx}

        def postprocess(self, input_dicts: Any, fetch_data: Any, *ids: Any) -> Any:
            import os

            return {**fetch_data, "pid": os.getpid()}

    return OpInstances(Hangs("hangs"), OpRun(run_process=True, timeout_ms=1000), own_process=True).runner()


def test_a_process_with_a_stuck_call_is_replaced() -> None:  # P88
    from forebay.workers.wire.objects import open_outcome, pack

    async def serve() -> list[Any]:
        pool = ProcessPool(packed(RunnerSpec(factory=f"{__name__}:stuck_op")), workers=1, path=[ROOT])
        idle = asyncio.Event()
        pool.watch(idle.set)
        await pool.start()
        found: list[Any] = []
        try:
            for hang in (False, True, False):
                answered = asyncio.get_running_loop().create_future()
                while not pool.idle:
                    idle.clear()
                    await asyncio.wait_for(idle.wait(), PATIENCE_S)
                entry = Request(body=pack({REQUEST: {"hang": hang}}), reply=lambda *_: None)
                pool.submit(
                    EntryBatch([entry], None, 1), lambda _batch, found, answered=answered: answered.set_result(found)
                )
                (outcome,) = await asyncio.wait_for(answered, PATIENCE_S)
                opened = outcome if isinstance(outcome, Failure) else open_outcome(outcome)
                found.append(opened if isinstance(opened, Failure) else opened.load())  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            await pool.stop(1.0)
        return found

    before, late, after = asyncio.run(serve())
    assert told(late)[0] == 6000
    assert before["worker"] == after["worker"] == 0
    assert before["pid"] != after["pid"]


# ---------------------------------------------------------------------------------------------------------------------
# Models


class Client:
    """A model that doubles `x`."""

    feed_names_ = ("x",)
    fetch_names_ = ("y", "z")

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[Any] = []
        self.closed = 0

    def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
        self.calls.append((feed, fetch, batch, log_id))
        if isinstance(self.answer, BaseException):
            raise self.answer
        return {"y": feed["x"] * 2} if self.answer is None else self.answer

    def close(self) -> None:
        self.closed += 1


def test_the_default_process_asks_the_model_about_the_merged_batch() -> None:  # P44, P45
    runner = opened(Op("bow", fetch_list=["y"]), client=(client := Client()))
    first, second = runner.run(requests(rows(1), rows(2, 3)))
    assert (first["y"].tolist(), second["y"].tolist()) == ([2], [4, 6])
    ((feed, fetch, batch, log_id),) = client.calls
    assert feed["x"].tolist() == [1, 2, 3]
    assert (fetch, batch, log_id) == (["y"], True, 100)
    runner.close()
    assert client.closed == 1


def test_the_settled_fetch_list_counts() -> None:  # P31
    opened(Op("bow"), client=(client := Client()), fetch_list=("z",)).run([request(rows(1))])
    assert client.calls[0][1] == ["z"]


def test_the_list_style_hands_the_model_the_samples_as_they_are() -> None:  # P44
    class Stacks(Client):
        def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
            self.calls.append((feed, batch))
            return {"y": np.stack([one["x"] for one in feed])}

    runner = opened(Op("bow"), client=(client := Stacks()), batch_style="list")
    assert [outcome["y"].tolist() for outcome in runner.run(requests(rows(1), rows(2)))] == [[1], [2]]
    assert client.calls[0][1] is False
    assert len(client.calls[0][0]) == 2


@pytest.mark.parametrize(
    "feed, err_no, said",
    [
        ({"x": "text"}, 7000, "the value of 'x' is str, a model takes ndarrays"),
        ({"x": 1.5}, 7000, "the value of 'x' is float"),
        ({"w": np.ones(1)}, 5000, "the feed has 'w', the model takes 'x'"),
        ({}, 5000, "the feed has nothing, the model takes 'x'"),
        # An extra key is not ignored: it is a mistake of the op's.
        ({"x": np.ones(1), "helper": np.ones(1)}, 5000, "the feed has 'helper', 'x'"),  # trap 26
        ({"x": np.ones(1), "explode": np.ones(1)}, 5000, "the feed has 'explode', 'x'"),  # P110
    ],
)
def test_a_feed_that_is_not_the_models_is_told(feed: Any, err_no: int, said: str) -> None:  # P92
    found = told(run_one(Op("bow"), feed, client=(client := Client())))
    assert found[0] == err_no
    assert found[1].startswith("[bow] Failed to process: ")
    assert said in found[1]
    assert not client.calls


def test_offsets_belong_to_their_feed() -> None:  # P110
    feed = {"x": np.ones(3), "x.lod": [0, 1, 3]}
    assert run_one(Op("bow"), feed, client=(client := Client()))["y"].tolist() == [2, 2, 2]
    assert set(client.calls[0][0]) == {"x", "x.lod"}


def test_a_fetch_that_is_not_the_models_is_told() -> None:  # P92
    found = told(run_one(Op("bow", fetch_list=["y", "q"]), rows(1), client=Client()))
    assert found == (5000, "[bow] Failed to process: fetch_list names 'q', the model gives 'y', 'z'")


@pytest.mark.parametrize(
    "answer, err_no",
    [
        ({"serving_status_code": 5, "y": 1}, 9000),
        (ConnectionRefusedError("refused"), 9000),
        (TimeoutError(), 6000),
        (Unavailable("all endpoints are down"), 9000),
        (ValueError("bad shape"), 10000),
        (CustomException(CustomExceptionCode.CONF_ERROR, "no conf", True), 4000),
    ],
)
def test_a_model_that_fails_is_told(answer: Any, err_no: int) -> None:  # P92
    outcome = run_one(Op("bow"), rows(1), client=Client(answer))
    assert isinstance(outcome, Failure)
    assert err_of(outcome.error).err_no == err_no


def test_a_model_that_returns_nothing_is_9000() -> None:  # P92, P46
    class Mute(Client):
        def predict(self, feed: Any, fetch: Any = None, batch: Any = True, log_id: Any = 0) -> Any:
            return None

    assert told(run_one(Op("bow"), rows(1), client=Mute())) == (
        9000,
        "[bow] Failed to process: the model client returned nothing",
    )


def test_a_remote_time_out_is_tried_again() -> None:  # P87
    client = Client(TimeoutError())
    assert told(run_one(Op("bow"), rows(1), client=client, retry=3))[0] == 6000
    assert len(client.calls) == 3


def test_a_client_that_takes_texts_is_given_texts() -> None:  # P114
    class Remote:
        takes_text = True

        def predict(self, feed: Any, fetch: Any) -> Any:
            return {"y": [feed["q"].upper()]}

    assert run_one(Op("next"), {"q": "a"}, client=Remote()) == {"y": ["A"]}


def test_a_handler_is_used_instead_of_the_configured_model() -> None:  # P37
    handler = Client()
    runner = opened(Op("bow", local_service_handler=handler), client=(configured := Client()))
    (outcome,) = runner.run([request(rows(2))])
    assert outcome["y"].tolist() == [4]
    assert not configured.calls
    runner.close()
    assert not handler.closed  # it is the project's


def test_a_handler_that_makes_clients_is_started_and_asked_for_one() -> None:  # P37
    steps: list[Any] = []

    class Handler:
        def prepare_server(self) -> None:
            steps.append("prepare")

        def start_server(self) -> None:
            steps.append("start")

        def get_port_list(self) -> list[int]:
            return []

        def get_client_config(self) -> str:
            return ""

        def get_fetch_list(self) -> list[str]:
            return ["z"]

        def get_client(self, index: int | None) -> Client:
            steps.append(index)
            return client

    class Loads(Op):
        def init_op(self) -> None:
            self.local_service_handler = Handler()

    client = Client()
    instances = OpInstances(Loads("loads"), OpRun())
    for index in range(2):
        runner = instances.runner()
        runner.open(WorkerContext(index))
        (outcome,) = runner.run([request(rows(1))])
        assert outcome["y"].tolist() == [2]
    assert steps == ["prepare", "start", None, None]
    assert [call[1] for call in client.calls] == [["z"]] * 2
    steps.clear()
    opened(Loads("loads"), own_process=True, index=1)
    assert steps == ["prepare", "start", 1]


def test_an_op_without_a_model_says_so_if_its_process_is_called() -> None:  # P92
    class Calls(Op):
        def process(self, feed_batch: Any, typical_logid: Any = 0) -> Any:
            return super().process(feed_batch, typical_logid)

    found = told(run_one(Calls("calls"), rows(1), run_process=True))
    assert found[0] == 3000
    assert "the op has no model" in found[1]


def test_super_process_answers_in_the_form_of_the_ops_version() -> None:  # P46
    found: list[Any] = []

    def process(self: Any, feed_batch: Any, typical_logid: Any) -> Any:
        found.append(Op.process(self, feed_batch, typical_logid))
        return found[-1]

    old = type("Old", (Op,), {"process": process, "postprocess": lambda self, i, fetch_dict: fetch_dict})
    new = type("New", (Op,), {"process": process, "postprocess": lambda self, i, f, data_id, log_id: (f, None, "")})
    for cls in (old, new):
        assert run_one(cls("made"), rows(1), client=Client())["y"].tolist() == [2]
    assert isinstance(found[0], dict)
    assert isinstance(found[1], tuple)


def test_the_seeds_example_runs_with_its_logger_named() -> None:  # trap 3
    class CombineOp(Op):
        def preprocess(self, input_data):  # pyright: ignore[reportIncompatibleMethodOverride]
            combined_prediction = 0
            for _op_name, data in input_data.items():  # noqa: PERF102 - as the original has it
                combined_prediction += data["prediction"]
            data = {"prediction": combined_prediction / 2}
            return data  # noqa: RET504 - as the original has it

    item = Item({"bow": {"prediction": np.array([0.2, 0.8])}, "cnn": {"prediction": np.array([0.4, 0.6])}}, {})
    (outcome,) = opened(CombineOp(name="combine", input_ops=[Op("bow"), Op("cnn")])).run([item])
    np.testing.assert_allclose(outcome["prediction"], [0.3, 0.7])


# ---------------------------------------------------------------------------------------------------------------------
# Phases


def test_the_time_of_each_hook_is_noted_for_each_sample() -> None:  # P134, P140
    runner = opened(Doubles("doubles"), run_process=True)
    before = time.monotonic()
    runner.run(requests(rows(1), rows(2)))
    after = time.monotonic()
    assert sorted((phase, data_id) for _, phase, _, _, data_id in runner.phases) == [
        ("midp", 0),
        ("midp", 1),
        ("postp", 0),
        ("postp", 1),
        ("prep", 0),
        ("prep", 1),
    ]
    for name, _, started, ended, _ in runner.phases:
        assert name == "doubles"
        assert before <= started <= ended <= after
    runner.run(requests(rows(1)))
    assert len(runner.phases) == 3
