# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalSubscript=false
"""Profile lines and the tracer: what a pipeline server tells of the time of its ops, in the original's forms."""

from __future__ import annotations

import asyncio
import os
import re
import time
from types import SimpleNamespace

import httpx
import pytest
from tests.compat.pipeline.conftest import post
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.graph.pool import GraphPool, Node
from forebay.graph.spec import GraphSpec, NodeSpec
from forebay.graph.values import inputs_of
from forebay.observe.metrics.capacity import accumulation
from forebay.observe.metrics.node_totals import NodeListener
from forebay.observe.traces.timeline import BatchRecord, Recording, Step
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.pipeline.figures.analyst import Analyst
from forebay.surfaces.pipeline.figures.profile import KEY, CallTimes, Profile, ProfileWriter, RequestProfile, take_wish
from forebay.surfaces.pipeline.figures.tracer import MetricsPort, Tracer, TracerFile
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool
from forebay.workers.runner import Runner, RunnerSpec
from forebay.workers.wire.objects import packed

EVENT = r"(?:prep|midp|postp)#\[(?:bow|cnn)\|0\]_[01]:\d{16}"
OP_LINE = re.compile(rf"PROFILE\tpid:(\d+)\t{EVENT}(?: {EVENT}){{5}}\n")


class Op(Runner):
    """Keeps its phases as the runner of an op does."""

    def __init__(self, name):
        self.name = name
        self.phases = []

    def run(self, items):
        self.phases = []
        for phase in ("prep", "midp", "postp"):
            for item in items:
                started = time.monotonic()
                time.sleep(0.002)
                self.phases.append((self.name, phase, started, time.monotonic(), item.params["data_id"]))
        return [next(iter(inputs_of(item).values())) for item in items]


def op(name):
    return Op(name)


def graph_of(kind, batch=1, runner=Op):
    nodes = {}
    for name in ("bow", "cnn"):
        if kind == "process":
            pool = ProcessPool(packed(RunnerSpec(f"{__name__}:op", {"name": name})), path=["."])
        else:
            pool = ThreadPool(RunnerSpec("", local=lambda name=name: runner(name)))
        config = BatchConfig(max_size=batch, idle="go")
        nodes[name] = Node(endpoint=Endpoint(EndpointConfig(name=f"dag/{name}"), config, pool), packs=kind == "process")
    spec = GraphSpec(
        name="dag",
        inputs=("x",),
        outputs={"result": "cnn"},
        nodes=(
            NodeSpec(name="bow", inputs={"x": "x"}, outputs={"out": "bow"}),
            NodeSpec(name="cnn", inputs={"bow": "bow"}, outputs={"out": "cnn"}),
        ),
    )
    return Endpoint(EndpointConfig(name="dag"), BatchConfig(max_size=1, idle="go"), GraphPool(spec, nodes, slots=30))


async def served(endpoint, work):
    await endpoint.start()
    try:
        return await work(endpoint)
    finally:
        await endpoint.drain(2.0)


async def infer(endpoint, data_id, value="hello"):
    """What the server does with a request: its times, around its way through the graph."""
    times = CallTimes(started=time.monotonic())
    times.unpacked = time.monotonic()
    await endpoint.call({"x": value}, params={"data_id": data_id, "log_id": 0})
    times.packing = time.monotonic()
    times.ended = time.monotonic()
    return times


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_each_op_and_each_call_is_a_line_on_the_standard_streams(kind, capfd, tmp_path):  # P134
    writer = ProfileWriter(Profile("dag", in_threads=kind == "thread"))

    async def work(endpoint):
        with writer:
            for data_id in range(2):
                writer.called(data_id, await infer(endpoint, data_id))
        await infer(endpoint, 99)  # nothing is written any more

    before = time.time()
    asyncio.run(served(graph_of(kind), work))
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert len(lines) == 6
    ops = [found for line in lines if (found := OP_LINE.fullmatch(line))]
    assert len(ops) == 4
    assert (int(ops[0][1]) == os.getpid()) == (kind == "thread")
    assert len({found[1] for found in ops}) == (1 if kind == "thread" else 2)
    calls = [line for line in lines if "call_" in line]
    dag = "#DAG" if kind == "thread" else "#DAG-1"
    assert re.fullmatch(
        rf"PROFILE\tpid:{os.getpid()}\tcall_1{dag}_0:\d+ call_1{dag}_1:\d+"
        r" prepack_1#@DAGExecutor_0:\d+ prepack_1#@DAGExecutor_1:\d+"
        r" postpack_1#@DAGExecutor_0:\d+ postpack_1#@DAGExecutor_1:\d+\n",
        calls[1],
    )
    path = tmp_path / "profile.txt"
    path.write_text("a line of a log\n" + "".join(lines))
    trace = Analyst(path).get_trace()
    assert len(trace) == 2 * (4 * 3 + 2 * 3)
    assert all(before - 1 < event["ts"] / 1e6 < time.time() + 1 for event in trace)
    times = Analyst(path).get_profile()[3].times("bow")
    assert all(2 <= times[step] < 1000 for step in ("prep", "midp", "postp"))


def told(phases, *, name="dag/bow", worker="0", steps=1):
    return BatchRecord(
        endpoint=SimpleNamespace(name=name, slots=1, waiting=0, in_flight=0),
        steps=tuple(Step(str(number), 9.0, 1, str(number)) for number in range(steps)),
        taken=10.0,
        started=10.0,
        ended=10.5,
        done=10.6,
        worker=worker,
        pid=4711,
        phases=phases,
        waiting=0,
        in_flight=0,
    )


def test_a_batch_is_one_line_whatever_it_holds():
    phases = [
        ("bow", "prep", 1.0, 1.1, 0),
        ("bow", "prep", 1.1, 1.3, 1),
        ("bow", "midp", 1.3, 1.5, 0),
        ("bow", "midp", 1.3, 1.5, 1),
        ("bow", "postp", 1.5, 1.6, 0),
        ("bow", "postp", 1.6, 1.65, 1),
    ]
    line = Profile("dag", in_threads=True).batch_line(told(phases, steps=2))
    assert line.count("_0:") == line.count("_1:") == 3
    begun = {name: int(us) for name, us in re.findall(r"(\w+)#\[bow\|0\]_0:(\d+)", line)}
    ended = {name: int(us) for name, us in re.findall(r"(\w+)#\[bow\|0\]_1:(\d+)", line)}
    taken = {name: ended[name] - begun[name] for name in begun}
    # Each of both ends is rounded: a wall clock's seconds leave a quarter of a microsecond.
    assert taken == pytest.approx({"prep": 300_000, "midp": 200_000, "postp": 150_000}, abs=2)


@pytest.mark.parametrize("name", ["other/bow", "dag", "bow", "dagger/bow"])
def test_what_is_no_op_of_the_graph_has_no_line(name):
    assert Profile("dag", in_threads=True).batch_line(told([("", "prep", 1.0, 2.0, 0)], name=name)) == ""


def test_an_op_that_skips_a_stage_has_no_event_for_it():
    line = Profile("dag", in_threads=True).batch_line(
        told([("bow", "prep", 1.0, 2.0, 0), ("bow", "postp", 2.0, 3.0, 0)])
    )
    assert "midp" not in line
    assert line.count("#") == 4


def test_a_name_makes_no_line_or_event_of_its_own(tmp_path):  # P159
    name = "dag/x\nPROFILE\tpid:1\tprep#[evil|0]_0:1 prep#[evil|0]_1:2\r\u2028"
    line = Profile("dag", in_threads=True).batch_line(told([("", "prep", 1.0, 2.0, 0)], name=name, worker="0\n"))
    assert line.count("\n") == 1
    assert len(line.splitlines()) == 1
    assert len(line.split()) == 4, "PROFILE, the process, begin and end"
    path = tmp_path / "profile.txt"
    path.write_text(line)
    (only,) = Analyst(path).get_profile()[3].ops
    assert only.startswith("x\\x0aPROFILE\\x09")


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_a_client_gets_the_lines_of_its_own_request_only(kind, tmp_path):  # P136
    profile = Profile("dag", in_threads=kind == "thread")

    async def one(endpoint, data_id):
        with RequestProfile(profile, data_id) as mine:
            return mine.text(await infer(endpoint, data_id))

    async def work(endpoint):
        return await asyncio.gather(*[one(endpoint, data_id) for data_id in range(4)])

    for data_id, text in enumerate(asyncio.run(served(graph_of(kind), work))):
        assert len(text.splitlines()) == 3
        path = tmp_path / "profile.txt"
        path.write_text(text)
        assert Analyst(path).get_profile()[3].ops == ["bow", "cnn"]
        assert [line.split("\t")[2].split("#")[0] for line in text.splitlines()] == ["prep", "prep", f"call_{data_id}"]


def test_a_request_in_a_batch_gets_the_line_of_that_batch():
    profile = Profile("dag", in_threads=True)

    async def one(endpoint, data_id):
        with RequestProfile(profile, data_id) as mine:
            return mine.text(await infer(endpoint, data_id))

    async def work(endpoint):
        return await asyncio.gather(*[one(endpoint, data_id) for data_id in range(4)])

    texts = asyncio.run(served(graph_of("thread", batch=4), work))
    assert all(len(text.splitlines()) == 3 for text in texts)
    assert len({text.splitlines()[0] for text in texts}) == 1


@pytest.mark.parametrize("wish, meant", [("1", True), (1, True), ("true", True), ("0", False), ("", False)])
def test_the_key_that_asks_for_a_profile_is_seen_by_no_op(wish, meant):  # trap 19
    inputs = {"words": "good", KEY: wish}
    assert take_wish(inputs) is meant
    assert inputs == {"words": "good"}
    assert take_wish(inputs) is False


SLEEPY = """
import os, time
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Sleep(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        assert list(found) == ["q"], found
        time.sleep(0.03 if self.name == "slow" else 0.01)
        return found, False, None, ""

request = RequestOp()
quick = Sleep(name="quick", input_ops=[request])
slow = Sleep(name="slow", input_ops=[quick])
server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[slow]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize("in_threads", [True, False])
def test_a_served_script_tells_where_its_time_goes(pipeline, cli, tmp_path, at_once, in_threads):
    # P134, P136, P137, P142, P159
    settings = {"is_thread_op": in_threads, "use_profile": True, "tracer": {"interval_s": 1}}
    server = pipeline(SLEEPY, {"dag": settings, "op": {"slow": {"concurrency": 2}}, "log_path": str(tmp_path)})
    evil = "a\nPROFILE\tpid:1\tprep#[evil|0]_0:1 prep#[evil|0]_1:2"
    body = {"key": ["q"], "value": [evil], "clientip": evil}
    assert server.client.post("/svc/prediction", json=body).json()["err_no"] == 0
    asked = post(server, q="x", **{KEY: "1"})
    assert asked["key"] == ["q", KEY]
    told = asked["value"][1].splitlines()
    assert [re.sub(r"\d+", "N", line.split("#")[0]) for line in told] == [
        *["PROFILE\tpid:N\tprep"] * 2,
        "PROFILE\tpid:N\tcall_N",
    ]
    at_once(*[lambda: [post(server, q="x") for _ in range(10)]] * 5)
    trace = server.client.get("/trace?seconds=0.2")
    assert trace.status_code == 200
    assert server.client.get("/trace?seconds=no").status_code == 400
    server.signal()
    assert server.wait() == 0
    path = tmp_path / "profile.txt"
    path.write_text(server.log)
    ops = Analyst(path).get_profile()[3]
    assert sorted(ops.ops) == ["quick", "slow"], "and none that a client made up"
    assert ops.workers("slow") == 2
    analysed = cli("analyse", path, "--qps", "100")
    predicted = float(re.search(r"bottleneck: slow, which lets up to ([\d.]+)", analysed.stdout)[1])
    # While all is busy two calls end every 30 ms, or later on a busy machine: what is predicted is what the op took,
    # and no more come out of it.
    assert predicted < 2 / 0.03
    trace = Analyst(path).get_trace()
    moments = [one["ts"] / 1e6 for one in trace if one["ph"] in "BE"]
    calls = sum(one["ph"] == "E" and one["name"].startswith("call") for one in trace)
    assert calls / (max(moments) - min(moments)) < 1.15 * predicted
    assert any(f"slow {int(200 / predicted) + more}" in analysed.stdout for more in (1, 2))
    blocks = (tmp_path / "PipelineServingLogs" / "pipeline.tracer").read_text()
    counts = [int(count) for count in re.findall(r"Query count\[(\d+)\]", blocks)]
    assert sum(counts) == 52
    assert "chl0(In: ['@DAGExecutor'], Out: ['quick'])" in blocks
    assert "evil" not in blocks


class Sleeper(Op):
    """Prepares each sample, then runs all of them together."""

    def __init__(self, prep_s, midp_s):
        super().__init__("sleeper")
        self.prep_s, self.midp_s = prep_s, midp_s

    def run(self, items):
        self.phases = []
        for item in items:
            started = time.monotonic()
            time.sleep(self.prep_s)
            self.phases.append((self.name, "prep", started, time.monotonic(), item.params["data_id"]))
        started = time.monotonic()
        time.sleep(self.midp_s)
        self.phases.append((self.name, "midp", started, time.monotonic(), -1))
        return [item.body["x"] if "x" in item.body else item.body["bow"] for item in items]


def sleepers(batch=1, **seconds):
    return graph_of("thread", batch, lambda name: Sleeper(*seconds[name]))


def recorded(endpoint, requests):
    """The batches of each op while so many requests came at once."""

    async def work(endpoint):
        with Recording() as recording:
            await asyncio.gather(*[infer(endpoint, data_id) for data_id in range(requests)])
        return recording.records

    records = asyncio.run(served(endpoint, work))
    return [[one for one in records if one.endpoint.name == f"dag/{name}"] for name in ("bow", "cnn")]


def test_what_gathers_before_a_slow_op_is_what_the_formula_says():  # P143
    endpoint = sleepers(bow=(0.005, 0.0), cnn=(0.02, 0.0))
    quick, slow = recorded(endpoint, 30)
    first = quick[0].done
    at_end = [one for one in slow if one.done <= quick[-1].done][-1]
    seconds = at_end.done - first
    came, went = (sum(first < one.done <= at_end.done for one in ops) / seconds for ops in (quick, slow))
    assert at_end.waiting == pytest.approx(accumulation(came, went, seconds), abs=2)
    assert at_end.waiting > 5


def test_what_a_request_in_a_batch_costs_is_what_the_formula_says():  # P143
    batches = recorded(sleepers(4, bow=(0.004, 0.02), cnn=(0.0, 0.0)), 40)[0]
    away = []
    for one in [one for one in batches if len(one.steps) == 4]:
        measured = (one.ended - one.started) / 4
        prep = sum(ended - started for _, phase, started, ended, _ in one.phases if phase == "prep") / 4
        (midp,) = [ended - started for _, phase, started, ended, _ in one.phases if phase == "midp"]
        away.append(measured / ((4 * prep + midp) / 4))
    assert 0.9 < min(away) < 1.1  # a busy machine makes some of them longer, and between the phases


# --- the tracer ------------------------------------------------------------------------------------------------------


def numbers(block):
    """The figures of a block by what stands before them."""
    found = {}
    op = ""
    for line in block.splitlines():
        if heading := re.fullmatch(r"(?:Op\((.*)\)|(DAGExecutor|Channel)):", line):
            op = heading[1] or heading[2]
        elif value := re.fullmatch(r"\t+([\w .]+)\[([\d.]+)(?: ms| q/s)?\]", line):
            found[op, value[1]] = float(value[2])
    return found


def test_a_block_of_the_tracer_says_what_the_ops_and_the_requests_took():  # P137
    inputs = {"bow": ["@DAGExecutor", "c\nnn"], "c\nnn": ["@DAGExecutor"]}
    tracer = Tracer({"bow": 2, "cnn": 1}, inputs, lambda: {"bow": 1, "c\nnn": 0}, 4)

    tracer.block(100.0)

    async def work(endpoint):
        with NodeListener("dag", ("bow", "cnn"), tracer.ran):
            for data_id in range(5):
                times = await infer(endpoint, data_id)
                tracer.answered(data_id, times.ended - times.started, ok=data_id != 3)

    asyncio.run(served(graph_of("thread"), work))
    block = tracer.block(102.0)
    told = numbers(block)
    assert (told["DAGExecutor", "Query count"], told["DAGExecutor", "QPS"]) == (5, 2.5)
    assert told["DAGExecutor", "Succ"] == 0.8
    assert "\tError req[3]\n" in block
    for op_name, workers in (("bow", 2), ("cnn", 1)):
        stages = [told[op_name, stage] for stage in ("prep", "midp", "postp")]
        assert all(2 <= stage < 500 for stage in stages)
        assert told[op_name, "in"] >= 0
        assert told[op_name, "out"] >= 0
        busy_s = 5 * sum(stages) / 1000
        assert told[op_name, "idle"] == pytest.approx(1 - busy_s / (2 * workers), abs=0.02)
    latencies = [told["DAGExecutor", share] for share in (".50", ".60", ".70", ".80", ".90", ".95", ".99")]
    assert latencies == sorted(latencies)
    assert 12 <= latencies[0] <= told["DAGExecutor", "ave"] * 5
    assert "\tchl0(In: ['@DAGExecutor', 'c\\\\x0ann'], Out: ['bow']) size[1/4]\n" in block
    assert "\tchl1(In: ['@DAGExecutor'], Out: ['c\\\\x0ann']) size[0/4]\n" in block
    assert block.splitlines()[0] == block.splitlines()[-1]
    assert numbers(tracer.block(104.0))["DAGExecutor", "Query count"] == 0, "each block begins anew"


def test_a_name_makes_no_line_in_a_block():  # P159
    block = Tracer({"x\nDAGExecutor:\n\tQuery count[7]": 1}).block()
    assert "\n\tQuery count[7]" not in block
    assert block.count("DAGExecutor:") == 2, "one in the name, on its line"
    assert block.count("\nDAGExecutor:") == 1


def test_an_idle_tracer_writes_a_block_without_figures():
    told = numbers(Tracer({"bow": 1}).block())
    assert told["bow", "idle"] == 1
    assert told["DAGExecutor", "Succ"] == 1


def test_latencies_are_a_fair_sample_when_there_are_many(monkeypatch):
    monkeypatch.setattr("forebay.surfaces.pipeline.figures.tracer.LATENCIES", 1000)
    tracer = Tracer({})
    for number in range(20_000):
        tracer.answered(number, number / 20_000, ok=number % 2 == 0)
    block = tracer.block()
    told = numbers(block)
    assert told["DAGExecutor", "Query count"] == 20_000
    assert told["DAGExecutor", "ave"] == pytest.approx(500, abs=1)
    assert told["DAGExecutor", ".50"] == pytest.approx(500, abs=100)
    (ids,) = re.findall(r"Error req\[(.*)\]", block)
    assert len(ids.split(", ")) == 100


def test_blocks_are_written_every_interval_and_when_it_ends(tmp_path):
    class Told(Tracer):
        def block(self, now=None):
            blocks.release()
            return super().block(now)

    blocks = asyncio.Semaphore(0)

    async def main():
        tracer = Told({"bow": 1})
        writing = asyncio.create_task(TracerFile(tracer, tmp_path / "PipelineServingLogs", 0.02).run())
        tracer.answered(0, 0.001, ok=True)
        path = tmp_path / "PipelineServingLogs" / "pipeline.tracer"
        for _ in range(3):
            await blocks.acquire()
        tracer.answered(1, 0.001, ok=False)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        return path.read_text()

    text = asyncio.run(asyncio.wait_for(main(), PATIENCE_S))
    assert text.count("Query count[1]") == 2
    assert "Error req[1]" in text.split("TRACER")[-2]


def test_a_folder_that_cannot_be_written_is_told_at_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"the tracer's folder .* cannot be written"):
        TracerFile(Tracer({}), tmp_path / "file" / "logs", 1.0)


def test_prometheus_finds_counters_under_the_original_names_that_only_rise():  # P138
    tracer = Tracer({"bow": 1})
    port = MetricsPort(tracer, "127.0.0.1", 0)
    try:

        def scrape():
            page = httpx.get(f"http://127.0.0.1:{port.port}/metrics", timeout=PATIENCE_S).text
            lines = [line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#")]
            return {name: float(value) for name, value in lines}

        first = scrape()
        with NodeListener("dag", ("bow",), tracer.ran):
            asyncio.run(served(graph_of("thread"), lambda endpoint: infer(endpoint, 0)))
        tracer.answered(0, 0.25, ok=True)
        tracer.answered(1, 0.5, ok=False)
        second = scrape()
        tracer.block()  # a block begins anew, the counters do not
        third = scrape()
        with pytest.raises(ConfigError, match=f"prometheus_port {port.port} cannot be used"):
            MetricsPort(tracer, "127.0.0.1", port.port)
    finally:
        port.close()
    assert second["pd_query_request_success_total"] == second["pd_query_request_failure_total"] == 1
    assert second["pd_query_request_duration_us_total"] == 750_000
    assert second['pd_inference_count_total{model="bow"}'] == 1
    assert second['pd_inference_duration_us_total{model="bow"}'] >= 2000
    for name, value in second.items():
        assert value >= first.get(name, 0)
        assert third[name] == value


def test_requests_that_only_came_together_have_a_line_each():
    phases = []
    for sample in range(3):
        begun = 10.0 + sample
        steps = (("prep", begun, begun + 0.1), ("midp", begun + 0.1, begun + 0.3), ("postp", begun + 0.3, begun + 0.4))
        phases += [("bow", step, started, ended, sample) for step, started, ended in steps]
    lines = Profile("dag", in_threads=True).batch_line(told(phases, steps=3)).splitlines()
    assert len(lines) == 3
    for line in lines:
        stamps = dict(re.findall(r"(\S+):(\d+)", line))
        assert int(stamps["midp#[bow|0]_1"]) - int(stamps["midp#[bow|0]_0"]) == pytest.approx(200_000, abs=2)


def test_the_stages_of_a_batch_are_those_of_all_of_its_samples():
    phases = [("bow", "prep", 10.0, 10.1, 0), ("bow", "prep", 10.1, 10.2, 1), ("bow", "midp", 10.2, 10.5, -1)]
    (line,) = Profile("dag", in_threads=True).batch_line(told(phases, steps=2)).splitlines()
    stamps = dict(re.findall(r"(\S+):(\d+)", line))
    assert int(stamps["prep#[bow|0]_1"]) - int(stamps["prep#[bow|0]_0"]) == pytest.approx(200_000, abs=2)
