# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false, reportArgumentType=false
"""Graphs of ops: what each op sees, whatever their shape; what is refused before anything starts; what is bounded."""

import asyncio
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.compat.pipeline.conftest import answer_of, ask, hosting, values_of
from tests.waiting import PATIENCE_S, reached, timeouts

from forebay.errors import ConfigError, QueueFull
from forebay.surfaces.pipeline import codes
from forebay.surfaces.pipeline.codes import CustomException
from forebay.surfaces.pipeline.config import read
from forebay.surfaces.pipeline.dag.each_worker import GraphRunner
from forebay.surfaces.pipeline.dag.wiring import wire
from forebay.surfaces.pipeline.ops.op import Op, RequestOp, ResponseOp
from forebay.surfaces.pipeline.protocol.messages import Request, Response
from forebay.surfaces.pipeline.server import PipelineServer
from forebay.workers.runner import WorkerContext
from forebay.workers.wire.objects import UnpackedItem


class Tag(Op):
    """Adds its name to the texts of what it reads, joined by `+` in the order of the predecessors' names."""

    def preprocess(self, input_dicts, data_id, log_id):
        joined = "+".join(input_dicts[name]["q"] for name in sorted(input_dicts))
        return {"q": joined + self.name}, False, None, ""


class Mute:
    """Something that cannot be printed."""

    def __str__(self):
        raise ValueError("no words")


def wired(last, config=None):
    settings_, _ = read({"rpc_port": 18080, **(config or {})})
    return wire("pipeline", ResponseOp(input_ops=[last]), settings_)


def refused(last, config=None):
    with pytest.raises(ConfigError) as caught:
        wired(last, config)
    assert "\n" not in caught.value.message
    return caught.value.message


def diamond(**more):
    request = RequestOp()
    a = Tag(name="A", input_ops=[request])
    b = Tag(name="B", input_ops=[a], **more)
    c = Tag(name="C", input_ops=[a], **more)
    return Tag(name="D", input_ops=[b, c], **more)


async def ask_all(service, count):
    async def one(number):
        return values_of(await ask(service, q=f"q{number}"))["q"]

    return await asyncio.gather(*(one(number) for number in range(count)))


def test_a_diamond_gives_every_op_what_it_reads_for_each_of_many_requests(hosted):
    # P64, P13
    found = hosted(diamond(), lambda service: ask_all(service, 200), {"max_queue": 500})
    assert found == [f"q{number}AB+q{number}ACD" for number in range(200)]


@pytest.mark.parametrize("late", ["B", "C"])
def test_of_two_branches_that_fail_the_first_input_counts(hosted, late):  # F106
    other = threading.Event()

    class Refuse(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            if self.name == late:
                assert other.wait(PATIENCE_S)
            try:
                return {}, False, {"B": 71, "C": 72}[self.name], f"refused by {self.name}"
            finally:
                other.set()

    request = RequestOp()
    join = Tag(name="D", input_ops=[Refuse(name=name, input_ops=[request]) for name in "BC"])
    last = Tag(name="E", input_ops=[join])
    answer = hosted(last, lambda service: ask(service, q="x"))
    assert (answer.err_no, answer.err_msg) == (71, "refused by B")


def test_what_a_branch_still_does_when_another_has_failed_changes_no_answer(hosted):  # F106
    has_run = threading.Event()

    class Fail(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            raise ValueError("broken")

    class Late(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            has_run.set()
            return {"q": "late"}, False, None, ""

    request = RequestOp()
    join = Tag(name="D", input_ops=[Late(name="B", input_ops=[request]), Fail(name="C", input_ops=[request])])
    answer = hosted(join, lambda service: ask(service, q="x"))
    assert answer.err_no != 0
    assert "broken" in answer.err_msg
    assert has_run.is_set()


def test_an_edge_may_skip_a_level(hosted):
    # P67, trap 11
    request = RequestOp()
    a = Tag(name="A", input_ops=[request])
    b = Tag(name="B", input_ops=[a])
    c = Tag(name="C", input_ops=[a, b, request])
    assert hosted(c, lambda service: ask_all(service, 3))[0] == "q0+q0A+q0ABC"


def test_a_join_with_a_channel_size_of_one_answers_everybody(hosted):
    # P72, trap 6
    found = hosted(diamond(), lambda service: ask_all(service, 200), {"max_queue": 500, "dag": {"channel_size": 1}})
    assert len(set(found)) == 200


def test_what_one_branch_changes_in_place_the_other_does_not_see(hosted):
    # P65
    class First(Op):
        def preprocess(self, input_dicts):
            return {"array": np.zeros(3), "inner": {"list": [1]}}

    class Vandal(Op):
        def preprocess(self, input_dicts):
            (found,) = input_dicts.values()
            found["array"] += 7
            found["inner"]["list"].append(2)
            found["more"] = 1
            return found

    class Look(Op):
        def preprocess(self, input_dicts):
            seen = input_dicts["calm"]
            return {"seen": f"{seen['array'].sum()} {seen['inner']['list']} {sorted(seen)}"}

    first = First(name="first", input_ops=[RequestOp()])
    vandals = [Vandal(name=f"vandal{n}", input_ops=[first]) for n in range(3)]
    calm = Op(name="calm", input_ops=[first])
    look = Look(name="look", input_ops=[*vandals, calm])

    async def use(service):
        return [values_of(await ask(service, q=""))["seen"] for _ in range(20)]

    assert set(hosted(look, use)) == {"0.0 [1] ['array', 'inner']"}


def test_branches_run_side_by_side(hosted):
    # P66
    met = threading.Barrier(2, timeout=PATIENCE_S)

    class Meet(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            met.wait()  # only if both are inside at once does anybody come out
            return super().preprocess(input_dicts, data_id, log_id)

    request = RequestOp()
    b, c = (Meet(name=name, input_ops=[request]) for name in "BC")
    assert hosted(Tag(name="D", input_ops=[b, c]), lambda service: ask_all(service, 1)) == ["q0B+q0CD"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_an_op_runs_as_many_requests_at_a_time_as_its_concurrency(hosted, concurrency):
    # P99
    inside, most = [], []
    full = threading.Barrier(concurrency, timeout=PATIENCE_S)
    lock = threading.Lock()

    class Count(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            with lock:
                inside.append(data_id)
                most.append(len(inside))
            full.wait()
            with lock:
                inside.remove(data_id)
            return super().preprocess(input_dicts, data_id, log_id)

    op = Count(name="A", input_ops=[RequestOp()], concurrency=concurrency)
    hosted(op, lambda service: ask_all(service, 4 * concurrency))
    assert max(most) == concurrency


def test_no_more_requests_are_inside_than_worker_num_and_the_others_wait_outside(hosted):
    # P73
    gate = threading.Event()

    class Gate(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            gate.wait(PATIENCE_S)
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        asked = [asyncio.ensure_future(ask(service, q=f"q{number}")) for number in range(50)]
        await reached(lambda: service.endpoint.waiting == 46)
        inside = service.endpoint.pool.in_flight
        gate.set()
        return inside, [values_of(one)["q"] for one in await asyncio.gather(*asked)]

    op = Gate(name="A", input_ops=[RequestOp()], concurrency=8)
    inside, found = hosted(op, use, {"worker_num": 4})
    assert inside == 4
    assert len(set(found)) == 50


def test_when_too_many_wait_outside_the_next_is_refused_at_once(hosted):
    # P73
    gate = threading.Event()

    class Gate(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            gate.wait(PATIENCE_S)
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        asked = [asyncio.ensure_future(ask(service, q="q"))]
        await reached(lambda: service.endpoint.pool.in_flight == 1)
        asked += [asyncio.ensure_future(ask(service, q="q")) for _ in range(2)]
        await reached(lambda: service.endpoint.waiting == 2)
        with pytest.raises(QueueFull):
            await ask(service, q="q")
        gate.set()
        return [one.err_no for one in await asyncio.gather(*asked)]

    assert hosted(Gate(name="A", input_ops=[RequestOp()]), use, {"worker_num": 1, "max_queue": 2}) == [0, 0, 0]


class Sizes(Tag):
    """Notes how many samples each call of `process` gets."""

    def init_op(self):
        self.sizes = []

    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        return {"q": found["q"], "x": np.array([[data_id]])}, False, None, ""

    def process(self, feed_batch, typical_logid):
        self.sizes.append(len(feed_batch[0]["x"]))
        return {"x": feed_batch[0]["x"]}, 0, ""

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        return {"q": str(fetch_data["x"][0][0])}, None, ""


def test_a_batch_leaves_when_it_is_full_or_its_first_sample_has_waited_long_enough(hosted):
    # P77, P78, P80, trap 27: the window is the first sample's, and no later one makes it longer
    op = Sizes(name="A", input_ops=[RequestOp()])
    config = {"op": {"A": {"batch_size": 4, "auto_batching_timeout": 400, "run_process": True}}}

    async def use(service):
        started = time.monotonic()
        found = [values_of(one)["q"] for one in await asyncio.gather(*(ask(service, q="q") for _ in range(6)))]
        taken_s = time.monotonic() - started
        started = time.monotonic()

        async def later(delay_s):
            await asyncio.sleep(delay_s)
            return await ask(service, q="q")

        await asyncio.gather(later(0.0), later(0.1))
        return found, taken_s, time.monotonic() - started

    found, taken_s, staggered_s = hosted(op, use, config)
    assert found == [str(number) for number in range(6)]
    assert op.sizes == [4, 2, 2]
    assert 0.35 < taken_s < PATIENCE_S
    assert 0.35 < staggered_s < PATIENCE_S


def test_requests_whose_clients_went_away_never_reach_an_op(hosted):
    # P98
    gate, seen = threading.Event(), []

    class Gate(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            seen.append(data_id)
            gate.wait(PATIENCE_S)
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        asked = [asyncio.ensure_future(ask(service, q="q")) for _ in range(100)]
        await reached(lambda: seen)
        for one in asked:
            one.cancel()
        await reached(lambda: service.endpoint.in_flight == 0)
        gate.set()
        return values_of(await ask(service, q="q"))["q"]

    assert hosted(Gate(name="A", input_ops=[RequestOp()]), use, {"worker_num": 8}) == "qA"
    assert len(seen) == 2


def test_a_join_sees_its_predecessors_in_the_order_it_names_them(hosted):
    # Trap 29
    class Order(Op):
        def preprocess(self, input_dicts):
            return {"q": " ".join(input_dicts)}

    class Late(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            time.sleep(0.02)
            return super().preprocess(input_dicts, data_id, log_id)

    request = RequestOp()
    quick, slow = Tag(name="quick", input_ops=[request]), Late(name="slow", input_ops=[request])
    assert hosted(Order(name="D", input_ops=[slow, quick]), lambda service: ask_all(service, 2)) == ["slow quick"] * 2


@pytest.mark.parametrize("store", [None, {"type": "file", "threshold_kb": 1}], ids=["usual", "file"])
def test_ops_may_hand_on_the_key_of_a_value_in_the_store(hosted, store, tmp_path):
    # P147
    class Put(Op):
        def preprocess(self, input_dicts):
            return {"key": self.store.put(np.arange(100_000))}

    class Get(Op):
        def preprocess(self, input_dicts):
            return {"q": str(self.store.get(input_dicts["put"]["key"]).sum())}

    last = Get(name="get", input_ops=[Put(name="put", input_ops=[RequestOp()])])
    config = {} if store is None else {"dag": {"external_store": {**store, "dir": str(tmp_path)}}}
    assert hosted(last, lambda service: ask_all(service, 3), config) == ["4999950000"] * 3
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_large_goes_through_the_store_that_is_configured(hosted, tmp_path):
    # P145
    files = []

    class Big(Op):
        def preprocess(self, input_dicts):
            return {"array": np.arange(100_000), "small": np.arange(3)}

    class Look(Op):
        def preprocess(self, input_dicts):
            files.append([path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 100_000])
            return input_dicts["big"]

    last = Look(name="look", input_ops=[Big(name="big", input_ops=[RequestOp()])])
    config = {"dag": {"external_store": {"type": "file", "threshold_kb": 64, "dir": str(tmp_path)}}}

    async def use(service):
        return values_of(await ask(service, q="q"))

    found = hosted(last, use, config)
    assert len(files[0]) == 1
    assert found["array"].count(",") > 99_000
    assert found["small"].startswith("array([0, 1, 2]")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_an_op_takes_the_oldest_request_first(hosted):
    # P71
    order, gate = [], threading.Event()
    slow = random.Random(7)

    class Shuffle(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            time.sleep(slow.random() / 100)
            return super().preprocess(input_dicts, data_id, log_id)

    class Note(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            if not order:
                gate.wait(PATIENCE_S)  # until the others wait for it, in whatever order they came
            order.append(data_id)
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        asked = asyncio.ensure_future(ask_all(service, 20))
        await reached(lambda: service.endpoint.pool.nodes["N"].endpoint.waiting == 19)
        gate.set()
        await asked

    last = Note(name="N", input_ops=[Shuffle(name="S", input_ops=[RequestOp()], concurrency=8)])
    hosted(last, use)
    assert order[1:] == sorted(order[1:])
    assert len(order) == 20


def test_the_first_arrival_alone_goes_on_if_that_is_configured(hosted):
    # P74
    gate, ran = threading.Event(), []

    class Slow(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            gate.wait(PATIENCE_S)
            return super().preprocess(input_dicts, data_id, log_id)

    class Last(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            ran.append(data_id)
            return super().preprocess(input_dicts, data_id, log_id)

    request = RequestOp()
    b, c = Tag(name="B", input_ops=[request]), Slow(name="C", input_ops=[request])

    async def use(service):
        found = values_of(await ask(service, q="q"))["q"]
        gate.set()
        again = values_of(await ask(service, q="q"))["q"]
        return found, again

    found, again = hosted(Last(name="D", input_ops=[b, c]), use, {"dag": {"channel_recv_frist_arrive": True}})
    assert found == "qBD"
    assert again in {"qBD", "qCD"}
    assert len(ran) == 2


def test_an_error_in_one_branch_is_the_one_answer_and_leaves_nothing_behind(hosted):
    # P70
    class Fail(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            if data_id % 2:
                msg = "odd"
                raise ValueError(msg)
            return super().preprocess(input_dicts, data_id, log_id)

    request = RequestOp()
    b, c = Tag(name="B", input_ops=[request]), Fail(name="C", input_ops=[request])

    async def use(service):
        answers = await asyncio.gather(*(ask(service, q="q") for _ in range(1000)))
        pool = service.endpoint.pool
        left = pool.in_flight, service.endpoint.in_flight, sum(one.in_flight for one in pool.endpoints)
        return [one.err_no for one in answers], left

    codes, left = hosted(Tag(name="D", input_ops=[b, c]), use, {"max_queue": 1000})
    assert codes == [0, 10000] * 500
    assert left == (0, 0, 0)


def test_only_ops_that_lead_to_the_answer_are_started(hosted):
    # P34
    started = []

    class Noted(Tag):
        def init_op(self):
            started.append(self.name)

    request = RequestOp()
    bow, _cnn = (Noted(name=name, input_ops=[request]) for name in ("bow", "cnn"))
    hosted(bow, lambda service: ask_all(service, 1))
    assert started == ["bow"]


def test_a_request_that_times_out_may_be_tried_again_as_a_whole_and_the_server_goes_on(hosted):
    # P89, trap 5
    ran, again = [], threading.Event()

    class Slow(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            (found,) = input_dicts.values()
            found["q"] += "!"  # in place: the second attempt must not see it
            return found, False, None, ""

        def process(self, feed_batch, typical_logid):
            ran.append(1)
            if len(ran) == 1:
                again.wait(PATIENCE_S)
            again.set()
            return feed_batch[0], 0, ""

    op = Slow(name="A", input_ops=[RequestOp()], timeout=1000)

    async def use(service):
        first = values_of(await ask(service, q="q"))["q"]
        return [first, *await ask_all(service, 10)]

    found = hosted(op, use, {"dag": {"retry": 2}, "op": {"A": {"run_process": True}}})
    assert found == ["q!", *(f"q{number}!" for number in range(10))]
    assert len(ran) == 12


def test_the_time_of_a_request_covers_everything_and_what_it_held_is_free_afterwards(hosted):
    # P90, P79
    class Pair(Tag):
        def process(self, feed_batch, typical_logid):
            return feed_batch[0], 0, ""

    op = Pair(name="A", input_ops=[RequestOp()], batch_size=2)

    async def use(service):
        late = []
        for timeout_s in timeouts(0.2):
            late.append(await ask(service, timeout_s=timeout_s, q="q"))  # waits for a second sample, and none comes
            if "in 'A'" in late[-1].err_msg:
                break
        pairs = await asyncio.gather(*(ask(service, q="q") for _ in range(100)))
        return late[-1], [one.err_no for one in pairs]

    alone, pairs = hosted(op, use, {"worker_num": 4, "max_queue": 200})
    assert alone.err_no == 6000
    assert "in 'A' while it waited for its batch" in alone.err_msg
    assert pairs == [0] * 100


def test_a_request_without_a_time_of_its_own_has_the_configured_one(hosted):
    # P90
    class Stuck(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            time.sleep(0.5)
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        return await ask(service, timeout_s=None, q="q")

    assert hosted(Stuck(name="A", input_ops=[RequestOp()]), use, {"dag": {"timeout": 50}}).err_no == 6000


class See(Tag):
    """Notes the numbers of its requests."""

    def init_op(self):
        self.seen = []

    def preprocess(self, input_dicts, data_id, log_id):
        self.seen.append((data_id, log_id))
        return super().preprocess(input_dicts, data_id, log_id)


def test_requests_are_numbered_and_log_ids_are_the_clients(hosted):
    # P13, P11: log ids need not be unique
    async def use(service):
        for logid in (55, 0, 55):
            await ask(service, logid=logid, q="q")

    op = See(name="A", input_ops=[RequestOp()])
    hosted(op, use)
    assert op.seen == [(0, 55), (1, 0), (2, 55)]


def test_a_graph_in_each_worker_numbers_its_requests_between_those_of_the_others():
    # P13, P103
    op = See(name="A", input_ops=[RequestOp()])
    server = PipelineServer()
    server.set_response_op(ResponseOp(input_ops=[op]))
    server.prepare_server(yml_dict={"rpc_port": 18080, "worker_num": 3, "build_dag_each_worker": True})
    runner = GraphRunner(server, 3)
    runner.open(WorkerContext(index=1))
    try:
        item = UnpackedItem(
            Request(key=["q"], value=["q"]).SerializeToString(),
            {"deadline": time.monotonic() + PATIENCE_S, "peer": ""},
            1,
        )
        for _ in range(3):
            (outcome,) = runner.run([item])
            assert values_of(Response.FromString(outcome)) == {"q": "qA"}
    finally:
        runner.close()
    assert [data_id for data_id, _ in op.seen] == [1, 4, 7]


def test_the_text_of_an_error_has_the_ids_of_the_request_and_names_no_python(hosted):
    # P95
    class Wrong(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            raise KeyError("secret payload")

    async def use(service):
        return await ask(service, logid=77, q="q")

    last = Wrong(name="A", input_ops=[RequestOp()])
    quiet, loud = (hosted(last, use, {"debug_errors": debug}).err_msg for debug in (False, True))
    assert quiet.startswith("(data_id=0 log_id=77) [A] Failed to preprocess")
    assert "Wrong" not in quiet
    assert "KeyError" not in quiet
    assert "KeyError" in loud


@pytest.mark.parametrize("codes,number", [("v0.7", 10000), ("v0.4", 8)])
def test_answers_carry_the_numbers_of_the_generation_that_is_configured(hosted, codes, number):
    # P91
    class Wrong(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            raise KeyError("x")

    last = Wrong(name="A", input_ops=[RequestOp()])
    assert hosted(last, lambda service: ask(service, q="q"), {"error_codes": codes}).err_no == number


def test_a_time_without_an_end_is_none(hosted):
    # P32, P87: what stands for "as long as it takes" in configurations
    class Same(Op):
        def process(self, feed_batch, typical_logid):
            return feed_batch[0], 0, ""

    config = {"op": {"A": {"timeout": 10**13, "run_process": True}}}
    last = Same(name="A", input_ops=[RequestOp()])
    assert values_of(hosted(last, lambda service: ask(service, q="q"), config)) == {"q": "q"}


def test_results_that_cannot_be_told_have_the_numbers_that_are_configured(hosted):
    # P61, P91
    class Number(Op):
        def preprocess(self, input_dicts, data_id, log_id):
            return {"q": 1}, False, None, ""

    last = Number(name="A", input_ops=[RequestOp()])
    for codes_, number in ("v0.7", 7000), ("v0.4", 3):
        assert hosted(last, lambda service: ask(service, q="q"), {"error_codes": codes_}).err_no == number


@pytest.mark.parametrize(
    "own,err_no,pairs",
    [
        ({"err_no": 0, "key": ["q"], "value": ["instead"]}, 0, {"q": "instead"}),
        ({"err_no": 777}, 777, {}),
        ({}, 10000, {}),
        ({"err_msg": "sorry"}, 10000, {}),
    ],
    ids=["result", "number", "nothing", "text"],
)
def test_a_response_op_of_ones_own_decides_what_an_error_is_answered_with(hosted, own, err_no, pairs):
    # P59, P63
    class Mine(ResponseOp):
        def pack_response_package(self, channeldata):
            assert channeldata.error_code == 10000
            return Response(**own)

    class Wrong(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            raise KeyError("x")

    last = Mine(input_ops=[Wrong(name="A", input_ops=[RequestOp()])])
    found = hosted(last, lambda service: ask(service, q="q"))
    assert found.err_no == err_no
    assert dict(zip(found.key, found.value, strict=True)) == pairs


@pytest.mark.parametrize(
    "hook,number",
    [
        (lambda self, request: {"q": "q" + request.method}, 0),
        (lambda self, request: ({"q": "q" + request.method}, 5, None, ""), 0),
        (lambda self, request: ({}, 5, 71, "no such method"), 71),
        (lambda self, request: 5, 8000),
        (lambda self, request: {}["method"], 8000),
    ],
    ids=["dict", "tuple", "product error", "other type", "raises"],
)
def test_a_request_op_of_ones_own_decides_what_is_accepted(hosted, hook, number):
    # P26, P56
    request_op = type("Mine", (RequestOp,), {"unpack_request_package": hook})()
    last = Tag(name="A", input_ops=[request_op])

    async def use(service):
        return await answer_of(service, Request(method="go"), PATIENCE_S)

    found = hosted(last, use)
    assert found.err_no == number
    if not number:
        assert values_of(found) == {"q": "qgoA"}


@pytest.mark.parametrize("at", ["unpack", "pack"])
def test_hooks_at_the_edges_that_hang_leave_their_threads_to_others(hosted, at):
    # P56, P63, P90
    gate = threading.Event()

    class First(RequestOp):
        def unpack_request_package(self, request):
            if at == "unpack" and request.value[0] == "hang":
                gate.wait(PATIENCE_S)
            return super().unpack_request_package(request)

    class Last(ResponseOp):
        def pack_response_package(self, channeldata):
            if at == "pack" and not channeldata.error_code and channeldata.parse()["q"] == "hangA":
                gate.wait(PATIENCE_S)
            return super().pack_response_package(channeldata)

    async def use(service):
        late = [await ask(service, timeout_s=0.5, q="hang") for _ in range(3)]
        return [found.err_no for found in late], values_of(await ask(service, timeout_s=PATIENCE_S, q="q"))

    found = hosted(Last(input_ops=[Tag(name="A", input_ops=[First()])]), use, {"worker_num": 2})
    gate.set()
    assert found == ([6000] * 3, {"q": "qA"})


@pytest.mark.parametrize("packs_itself", [False, True])
@pytest.mark.parametrize(
    "found,number,text",
    [
        (({}, 0, 4_000_000_000, "too big"), 8000, "unpack_request_package returned 4000000000 as prod_errcode"),
        (({}, 0, 71, "bad \ud800"), 71, "bad \\ud800"),
        (CustomException(71, "bad \ud800", True), 71, "bad \\ud800"),
        (CustomException(4_000_000_000, "too big", True), 10000, "too big"),
        (({}, 0, 71, Mute()), 71, "cannot be made"),
    ],
    ids=["code", "text", "raised text", "raised code", "mute"],
)
def test_codes_and_texts_that_no_answer_can_carry_are_answered_all_the_same(hosted, found, number, text, packs_itself):
    # P43, P56, P93
    class Strict(RequestOp):
        def unpack_request_package(self, request):
            if isinstance(found, Exception):
                raise found
            return found

    class Mine(ResponseOp):
        def pack_response_package(self, channeldata):
            return super().pack_response_package(channeldata)

    last = (Mine if packs_itself else ResponseOp)(input_ops=[Tag(name="A", input_ops=[Strict()])])
    answer = hosted(last, lambda service: asyncio.wait_for(ask(service, q="q"), PATIENCE_S))
    assert answer.err_no == number
    assert text in answer.err_msg


def test_a_request_that_cannot_be_copied_for_another_try_is_7000(hosted):
    # P88
    class Locked(RequestOp):
        def unpack_request_package(self, request):
            return {"lock": threading.Lock()}, 0, None, ""

    last = Tag(name="A", input_ops=[Locked()])
    answer = hosted(last, lambda service: asyncio.wait_for(ask(service, q="q"), PATIENCE_S), {"dag": {"retry": 2}})
    assert answer.err_no == 7000
    assert "lock" in answer.err_msg


def test_a_defect_in_any_step_of_a_request_is_answered_once(hosted, monkeypatch):
    ended = []

    def fail(*arguments):
        raise ValueError("a defect")

    async def use(service):
        count = service._ended
        monkeypatch.setattr(service, "_ended", lambda *told: (ended.append(told), count(*told)))
        found = []
        for broken in ("_unpack", "_enter", "_pack_result", "_answered"):
            with monkeypatch.context() as patched:
                patched.setattr(service, broken, fail)
                found.append(await asyncio.wait_for(ask(service, q="q"), PATIENCE_S))
                patched.setattr(service, "_pack", fail)
                found.append(await asyncio.wait_for(ask(service, q="q"), PATIENCE_S))
                patched.setattr(codes, "numbered", fail)
                found.append(await asyncio.wait_for(ask(service, q="q"), PATIENCE_S))
        return found

    answers = hosted(Tag(name="A", input_ops=[RequestOp()]), use)
    assert [answer.err_no for answer in answers] == [10000] * 12
    assert all("the server failed; its log says why" in answer.err_msg for answer in answers)
    assert len(ended) == 12


def test_a_response_op_of_ones_own_writes_answers_and_errors(hosted):
    # P59, P63
    from forebay.surfaces.pipeline.ops.packing import Response

    class Mine(ResponseOp):
        def pack_response_package(self, channeldata):
            response = Response()
            if channeldata.ecode != 0:
                response.error_info = "sorry: " + channeldata.error_info
                response.ecode = channeldata.ecode
                return response
            if channeldata.parse()["q"] == "raiseA":
                raise ValueError("cannot write this")
            response.key.append("mine")
            response.value.append(channeldata.parse()["q"])
            return response

    class Picky(Tag):
        def preprocess(self, input_dicts, data_id, log_id):
            if input_dicts["@DAGExecutor"]["q"] == "bad":
                raise ValueError("bad")
            return super().preprocess(input_dicts, data_id, log_id)

    async def use(service):
        return [await ask(service, q=q) for q in ("good", "bad", "raise")]

    good, bad, broken = hosted(Mine(input_ops=[Picky(name="A", input_ops=[RequestOp()])]), use)
    assert values_of(good) == {"mine": "goodA"}
    assert bad.err_no == 10000
    assert bad.err_msg.startswith("sorry: ")
    assert broken.err_no == 8000
    assert (list(broken.key), list(broken.value)) == ([], [])


# ---------------------------------------------------------------------------------------------------------------------
# Graphs of any shape


@st.composite
def shapes(draw):
    """For each op the numbers of those it reads: -1 for the request, else ops before it; the last one is the end."""
    count = draw(st.integers(1, 7))
    return [sorted(draw(st.sets(st.integers(-1, number - 1), min_size=1, max_size=4))) for number in range(count)]


def evaluated(shape, number, q):
    """What op `number` answers, in plain Python."""
    if number < 0:
        return q
    inputs = {"@DAGExecutor" if one < 0 else f"op{one}": evaluated(shape, one, q) for one in shape[number]}
    return "+".join(inputs[name] for name in sorted(inputs)) + f"op{number}"


@given(shapes())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_graph_of_any_shape_answers_what_plain_python_answers(shape):
    # P68
    request = RequestOp()
    ops = []
    for number, reads in enumerate(shape):
        before = [request if one < 0 else ops[one] for one in reads]
        ops.append(Tag(name=f"op{number}", input_ops=before))

    async def main():
        async with hosting(ops[-1]) as service:
            return await ask_all(service, 5)

    assert asyncio.run(main()) == [evaluated(shape, len(shape) - 1, f"q{number}") for number in range(5)]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what is only odd


def test_a_cycle_is_refused_with_the_ops_along_it():
    # P69, trap 10
    a = Tag(name="a", input_ops=[RequestOp()])
    b = Tag(name="b", input_ops=[a])
    a._input_ops.append(b)
    message = refused(b)
    assert "cycle" in message
    assert "'a'" in message
    assert "'b'" in message


def test_two_request_ops_are_refused():
    # P69
    last = Tag(name="c", input_ops=[Tag(name="a", input_ops=[RequestOp()]), Tag(name="b", input_ops=[RequestOp()])])
    assert "expected one RequestOp that leads to the answer, got 2" in refused(last)


def test_a_graph_without_a_request_op_is_refused():
    # P69
    assert "'a'" in refused(Tag(name="a"))


def test_a_graph_without_an_op_is_refused():
    # P69
    assert "expected at least one op between the RequestOp and the ResponseOp" in refused(RequestOp())


def test_two_ops_of_one_name_are_refused():
    # P29, P69
    request = RequestOp()
    last = Tag(name="z", input_ops=[Tag(name="a", input_ops=[request]), Tag(name="a", input_ops=[request])])
    assert "'a' is given to two ops" in refused(last)


def test_ops_without_a_name_get_one_each():
    # P29
    first = Tag(input_ops=[RequestOp()])
    names = list(wired(Tag(input_ops=[first])).ops)
    assert len(set(names)) == 2
    assert all(name.startswith("Op") for name in names)


def test_a_join_that_would_fail_for_every_request_is_refused_at_the_start():
    # P40
    request = RequestOp()
    a, b = (Tag(name=name, input_ops=[request]) for name in "ab")
    message = refused(Op(name="c", input_ops=[a, b]))
    assert "'c'" in message
    assert "override its preprocess" in message


def test_jumping_is_refused_with_what_to_do_instead():
    # P75
    a = Tag(name="a", input_ops=[RequestOp()])
    assert "'b' has jump_to_ops, which is not supported" in refused(Op(name="b", input_ops=[a], jump_to_ops=[a]))


def test_a_client_type_that_is_not_known_is_refused_at_the_start():
    # P108
    message = refused(Op(name="a", input_ops=[RequestOp()], client_type="brcp", server_endpoints=["127.0.0.1:1"]))
    assert "op 'a'" in message
    assert "did you mean 'brpc'" in message


def test_ops_that_lead_nowhere_and_one_that_does_not_exist_are_warnings():
    # P33, P69: no variable need hold them
    a = Tag(name="detect", input_ops=[RequestOp()])
    Tag(name="deader", input_ops=[Tag(name="dead", input_ops=[a]), a])
    warnings = wired(a, {"op": {"detec": {"concurrency": 2}}}).warnings
    assert any(one.startswith("yml_dict: ") and "'detec'" in one and "did you mean 'detect'" in one for one in warnings)
    assert any("'dead' is not used" in one for one in warnings)
    assert any("'deader' is not used" in one for one in warnings)
    assert len(warnings) == 3


def test_a_batch_that_waits_for_ever_is_a_warning():
    # P79
    a = Tag(name="a", input_ops=[RequestOp()], batch_size=4)
    assert any("waits until it has 4 samples" in one for one in wired(a, {"worker_num": 8}).warnings)
    assert any("worker_num lets only 2" in one for one in wired(a, {"worker_num": 2}).warnings)
    # P72: what bounds a channel is the op that takes the fewest at a time
    config = {"worker_num": 16, "dag": {"channel_size": 2}}
    (told,) = wired(Tag(name="B", input_ops=[a]), config).warnings
    assert told.startswith("op 'a'")
    assert "channel_size lets only 3 requests in at a time; raise channel_size" in told
    quiet = Tag(name="a", input_ops=[RequestOp()], batch_size=4, auto_batching_timeout=10)
    assert wired(quiet, {"worker_num": 8}).warnings == ()


def test_a_process_that_is_not_called_is_a_warning():
    # P36
    class Mine(Op):
        def process(self, feed_batch, typical_logid):
            return {}

    a = Mine(name="a", input_ops=[RequestOp()])
    assert any("run_process" in one for one in wired(a).warnings)
    assert wired(a, {"op": {"a": {"run_process": True}}}).warnings == ()


def test_a_graph_in_each_worker_makes_no_batches():
    # P85
    a = Tag(name="a", input_ops=[RequestOp()], batch_size=4, auto_batching_timeout=100)
    dag = wired(a, {"worker_num": 8, "build_dag_each_worker": True})
    assert dag.settings["a"]["batch_size"] == 1
    assert any("batch_size 4 is taken as 1" in one for one in dag.warnings)


def test_a_graph_tells_its_levels_and_edges():
    # P151
    lines = wired(diamond()).lines()
    assert "level 0: @DAGExecutor" in lines
    assert "level 2: B, C" in lines
    assert "D <- B, C" in lines
