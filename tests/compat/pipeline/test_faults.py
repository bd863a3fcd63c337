# SPDX-License-Identifier: Apache-2.0
# pyright: reportIncompatibleMethodOverride=false
"""What goes wrong in a running pipeline and costs nobody else an answer: workers that die, hooks that hang, kill -9."""

import asyncio
import base64
import gc
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.compat.pipeline.conftest import ask, post, values_of
from tests.compat.pipeline.predictor_models import onnx_model
from tests.compat.pipeline.test_lifecycle import PROCESSES, UNGUARDED, is_gone, q_of
from tests.waiting import PATIENCE_S

from forebay.surfaces.pipeline.dag import served_graph
from forebay.surfaces.pipeline.ops.op import Op, RequestOp

SLACK_S = 15.0
"""What a machine that is busy with other things may add to a time that is promised."""

FAULTY = """
import os, time
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

HERE = Path(__file__).parent

class Faulty(Op):
    def init_op(self):
        while (HERE / "closed").exists():
            time.sleep(0.01)

    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        if found["q"] == "die":
            os.kill(os.getpid(), 9)
        if found["q"] == "wait":
            (HERE / "waiting").write_text(str(os.getpid()))
            while not (HERE / "go").exists():
                time.sleep(0.01)
        return {"q": found["q"] + "!"}, False, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Faulty(name="A", input_ops=[RequestOp()])]))
server.prepare_server(str(HERE / "config.yml"))
server.run_server()
"""
TWO_WORKERS = {**PROCESSES, "op": {"A": {"concurrency": 2}}}


def status_of(server):
    return server.client.get("/readyz").status_code


@pytest.fixture
def at_once():
    """Asks in threads: `at_once(server, "x")` gives a future of the answer's JSON."""
    with ThreadPoolExecutor(32) as threads:
        yield lambda server, q: threads.submit(post, server, q=q)


def waiting_pid(held, tmp_path, eventually):
    """The process in which a request waits."""
    file = tmp_path / "waiting"
    eventually(lambda: held.done() or (file.exists() and file.read_text()), "the request in its worker")
    assert not held.done(), held.result()
    return int(file.read_text())


def test_a_request_whose_only_worker_dies_is_answered_within_a_second_however_long_the_next_takes_to_start(
    pipeline, tmp_path, eventually, at_once
):
    # P97, trap 8
    server = pipeline(FAULTY, PROCESSES)
    held = at_once(server, "wait")
    pid = waiting_pid(held, tmp_path, eventually)
    queued = [at_once(server, f"q{number}") for number in range(8)]
    eventually(lambda: server.metric("forebay_waiting_samples", endpoint="svc/A") == 8)
    (tmp_path / "closed").touch()
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: status_of(server) == 503, "a server that is not ready")
    answer = held.result(PATIENCE_S)
    assert time.monotonic() - killed < 1.0 + SLACK_S
    assert answer["err_no"] == 9000
    assert "died" in answer["err_msg"]
    assert not any(one.done() for one in queued)
    (tmp_path / "closed").unlink()
    assert [q_of(one.result(PATIENCE_S)) for one in queued] == [f"q{number}!" for number in range(8)]
    assert status_of(server) == 200


def test_a_request_whose_worker_dies_goes_to_one_that_is_idle(pipeline, tmp_path, eventually, at_once):
    # P97
    server = pipeline(FAULTY, TWO_WORKERS)
    held = at_once(server, "wait")
    pid = waiting_pid(held, tmp_path, eventually)
    (tmp_path / "waiting").unlink()
    os.kill(pid, signal.SIGKILL)
    assert waiting_pid(held, tmp_path, eventually) != pid
    assert status_of(server) == 200
    (tmp_path / "go").touch()
    assert q_of(held.result(PATIENCE_S)) == "wait!"
    eventually(lambda: server.metric("forebay_workers", endpoint="svc/A") == 2)


def test_a_request_that_kills_every_worker_it_gets_costs_nobody_else_an_answer(pipeline, eventually, at_once):
    # P97
    server = pipeline(FAULTY, TWO_WORKERS)
    asked = [at_once(server, "die" if number == 10 else f"q{number}") for number in range(30)]
    answers = [one.result(PATIENCE_S) for one in asked]
    deadly = answers.pop(10)
    assert deadly["err_no"] == 9000
    assert [q_of(one) for one in answers] == [f"q{number}!" for number in range(30) if number != 10]
    eventually(lambda: status_of(server) == 200)
    assert q_of(post(server, q="x")) == "x!"


EDGE = """
import time
from pathlib import Path
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

HERE = Path(__file__).parent

class Hangs(RequestOp):
    def unpack_request_package(self, request):
        while request.value[0] == "hang" and not (HERE / "go").exists():
            time.sleep(0.01)
        return super().unpack_request_package(request)

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Op(name="A", input_ops=[Hangs()])]))
server.prepare_server(str(HERE / "config.yml"))
server.run_server()
"""


def test_a_server_whose_request_hooks_all_hang_is_not_ready_until_one_comes_back(pipeline, tmp_path, eventually):
    # P90
    server = pipeline(EDGE, {"worker_num": 1})

    def hangs():
        assert post(server, timeout_ms=200, q="hang")["err_no"] == 6000
        return status_of(server) == 503

    eventually(hangs, "a server that is not ready")
    assert "hooks" in server.client.get("/readyz").text
    (tmp_path / "go").touch()
    eventually(lambda: status_of(server) == 200, "a server that is ready again")
    assert q_of(post(server, q="x")) == "x"


# ---------------------------------------------------------------------------------------------------------------------
# kill -9 of the server


def descendants(pid):
    """All processes below one, however deep."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal() and not is_gone(folder.name):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            parents[int(folder.name)] = int(stat[1])
    found, ring = set(), {pid}
    while ring := {child for child, parent in parents.items() if parent in ring}:
        found |= ring
    return found


MODEL = """
import os
import numpy as np
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Price(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        return {"x": np.ones((1, 3), dtype="float32")}, False, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Price(name="price", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize(
    "client_type,config,count",
    [
        ("brpc", {}, 1),
        ("local_predictor", PROCESSES, 1),
        ("brpc", PROCESSES, 2),
        ("brpc", {"build_dag_each_worker": True, "worker_num": 2}, 4),
    ],
    ids=[
        "threads with a model process",
        "processes with predictors",
        "processes with model processes",
        "graphs with model processes",
    ],
)
def test_kill_9_of_the_server_leaves_no_process(pipeline, eventually, tmp_path, client_type, config, count):
    # P107, P113
    conf = {"model_config": str(onnx_model(tmp_path)), "fetch_list": ["price"], "client_type": client_type}
    server = pipeline(MODEL, {**config, "op": {"price": {"local_service_conf": conf}}})
    assert post(server, q="x")["err_no"] == 0
    left = descendants(server.process.pid)
    guards = {pid for pid in left if Path(f"/proc/{pid}/comm").read_text() == "sh\n"}  # of the folders of stores
    assert len(left - guards) == count

    def folders():
        return [found for pid in (server.process.pid, *left) for found in Path("/dev/shm").glob(f"forebay-{pid}-*")]

    assert len(folders()) == len(guards) > 0
    server.signal(signal.SIGKILL)
    server.wait()
    eventually(lambda: all(is_gone(pid) for pid in left), "the end of its processes")
    assert folders() == []


# ---------------------------------------------------------------------------------------------------------------------
# A full disk

STORES = """
import os
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp

class Keeps(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        if found["q"] == "large":
            key = self.store.put(b"x" * 50_000)
            return {"q": str(len(self.store.get(key)))}, False, None, ""
        return {"q": found["q"] + "!"}, False, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Keeps(name="A", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


def test_a_full_disk_costs_only_what_has_to_be_on_it(pipeline, small_disk, eventually):
    folder = str(small_disk.folder)
    store = {"type": "file", "dir": folder}
    config = {"log_path": folder, "dag": {"external_store": store, "tracer": {"interval_s": 1}}}
    server = pipeline(STORES, config)
    assert q_of(post(server, q="large")) == "50000"
    eventually(lambda: not list(small_disk.folder.glob("forebay-*/run-*")))
    small_disk.fill()
    for number in range(3):
        refused = post(server, q="large")
        assert refused["err_no"] != 0
        assert "the store cannot be written: No space left on device" in refused["err_msg"]
        assert q_of(post(server, q=f"q{number}")) == f"q{number}!"
    eventually(lambda: "pipeline.tracer cannot be written" in server.log)
    small_disk.empty()
    eventually(lambda: q_of(post(server, q="large")) == "50000")
    server.signal()
    assert server.wait() == 0
    told = [line for line in server.lines if "cannot be written: No space left on device; " in line]
    for file in (f"the store {folder}", *(f"/pipeline.{end} cannot" for end in ("tracer", "log", "log.wf"))):
        assert len([line for line in told if file in line]) == 1, file
    assert len(told) == 4
    assert "Logging error" not in server.log


# ---------------------------------------------------------------------------------------------------------------------
# Starts


def test_scripts_start_again_and_again_guarded_or_not(pipeline):
    # P101, trap 28; benchmarks/starts.py does so fifty times
    guarded = FAULTY.replace("server.run_server()", "if __name__ == '__main__':\n    server.run_server()")
    for text in (FAULTY, guarded, FAULTY):
        server = pipeline(text, PROCESSES)
        assert q_of(post(server, q="x")) == "x!"
        server.client.close()
        server.signal(signal.SIGTERM)
        assert server.wait() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Hooks that hang


class Hangs(Op):
    """Hangs until it is let go when it is asked to."""

    def init_op(self):
        self.gate = threading.Event()
        self.inside = set()

    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        if found["q"] == "hang":
            self.inside.add(id(self))
            self.gate.wait(PATIENCE_S)
        return {"q": f"{found['q']}!"}, False, None, ""


@pytest.mark.parametrize("concurrency", [1, 2])
def test_requests_after_ones_that_hang_in_a_thread_are_answered(hosted, monkeypatch, concurrency):
    # P88, P90
    monkeypatch.setattr(served_graph, "STUCK_S", 0.1)
    op = Hangs(name="A", input_ops=[RequestOp()], concurrency=concurrency)

    async def use(service):
        hung = await asyncio.gather(*(ask(service, timeout_s=0.3, q="hang") for _ in range(concurrency)))
        found = await asyncio.gather(*(ask(service, q=f"q{number}") for number in range(100)))
        again = await ask(service, timeout_s=0.3, q="hang")
        last = await ask(service, q="last")
        op.gate.set()
        return [one.err_no for one in [*hung, again]], [values_of(one)["q"] for one in [*found, last]]

    hung, found = hosted(op, use, {"max_queue": 200})
    assert hung == [6000] * (concurrency + 1)
    assert found == [*(f"q{number}!" for number in range(100)), "last!"]
    assert len(op.inside) == concurrency + 1  # never two inside of one instance


# ---------------------------------------------------------------------------------------------------------------------
# What the log says of it

FAILING = """
import os
from paddle_serving_server.pipeline import Op, PipelineServer, RequestOp, ResponseOp
from paddle_serving_server.pipeline.error_catch import CustomException, CustomExceptionCode

class Failing(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (found,) = input_dicts.values()
        how, payload = found["q"].split(" ", 1)
        if how == "raise":
            raise ValueError("no luck")
        if how == "bare":
            raise ValueError
        if how == "nested":
            try:
                {}[how]
            except KeyError as error:
                raise CustomException(CustomExceptionCode.UNKNOW, "no luck", False) from error
        if how == "tell":
            raise ValueError("cannot read " + payload)
        if how in ("list", "text", "tuple"):
            return {"list": [payload], "text": payload, "tuple": (payload, payload)}[how]
        return {"q": payload, "how": how}, False, None, ""

    def process(self, feed_batch, typical_logid):
        (feed,) = feed_batch
        if feed["how"] == "none":
            return None
        if feed["how"] == "code":
            return feed, 77, "no luck"
        return feed

    def postprocess(self, input_dicts, fetch_data, data_id, log_id):
        how, payload = fetch_data["how"], fetch_data["q"]
        more = {"unsendable": lambda: payload, "number": 5}.get(how, "")
        return payload if how == "post" else {"q": payload, "more": more}, None, ""

server = PipelineServer("svc")
server.set_response_op(ResponseOp(input_ops=[Failing(name="A", input_ops=[RequestOp()])]))
server.prepare_server(os.path.join(os.path.dirname(os.path.abspath(__file__)), "config.yml"))
server.run_server()
"""


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
def test_requests_stand_in_the_log_only_where_the_script_says_so(pipeline, threads):
    # P95
    secret = "payload-4711"
    config = {"dag": {"is_thread_op": threads, "request_parse": "literal"}, "op": {"A": {"run_process": True}}}
    server = pipeline(FAILING, config)
    ways = ["raise", "bare", "nested", "list", "text", "tuple", "none", "code", "post", "number", "unsendable"]
    for how in ways:
        assert post(server, q=f"{how} {secret}")["err_no"] != 0, how
    npy = b"\x93NUMPY\x01\x00v\x00{'descr': '" + secret.encode()
    for tensor in (
        {"name": "x", "elem_type": 13, "byte_data": base64.b64encode(npy).decode()},
        {"name": "x", "elem_type": 99, "str_data": [secret]},
        {"name": "x", "elem_type": 0, "int64_data": [1], "shape": [4711, 4711]},
    ):
        answer = server.client.post("/svc/prediction", json={"tensors": [tensor]})
        assert answer.json()["err_no"] == 8000
    assert post(server, q=f"array([{secret}")["err_no"] == 10000
    assert server.client.post("/svc/prediction", content=f'{{"key": [{secret}').status_code == 400
    assert server.client.post("/svc/prediction", json={"key": ["q", "r"], "value": [secret]}).json()["err_no"] == 8000
    assert post(server, q=f"tell {secret}")["err_no"] == 10000
    server.stop()
    errors = [record for record in server.records if record["level"] == "error"]
    assert len(errors) > 5
    telling = {record["message"].partition(", at /")[0] for record in errors if secret in str(record)}
    assert telling == {f"RunnerFailed: [A] Failed to preprocess: cannot read {secret}"}
    assert secret not in "".join(line for line in server.lines if not line.startswith("{"))


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
def test_what_an_op_raised_is_logged_once_by_the_ids_that_its_client_is_told(pipeline, threads):  # P93, P95
    config = {"dag": {"is_thread_op": threads, "request_parse": "literal"}, "op": {"A": {"run_process": True}}}
    server = pipeline(FAILING, config)
    post(server, q="raise x")
    answer = server.client.post("/svc/prediction", json={"key": ["q"], "value": ["tell x"], "logid": 77}).json()
    (ids,) = re.findall(r"^\((data_id=1 log_id=77)\)", answer["err_msg"])
    server.stop()
    (record,) = [record for record in server.records if ids in str(record)]
    assert record["request_ids"] == [ids]
    assert "cannot read x" in record["trace"]


# ---------------------------------------------------------------------------------------------------------------------
# What is left of requests

BLOB = "b" * 20_000


def rss_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Join(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        if self.name == "C" and data_id % 2:
            raise ValueError("odd")
        return dict(next(iter(input_dicts.values()))), False, None, ""


def test_a_thousand_requests_that_failed_in_one_branch_leave_nothing_in_memory(hosted, caplog):
    # P70
    caplog.set_level("CRITICAL", logger="forebay")  # or pytest would keep every line
    request = RequestOp()
    branches = [Join(name=name, input_ops=[request]) for name in "BC"]

    async def use(service):
        async def rounds(count):
            for _ in range(count):
                answers = await asyncio.gather(*(ask(service, q=BLOB) for _ in range(50)))
                assert [one.err_no for one in answers] == [0, 10000] * 25
            gc.collect()
            return rss_bytes(os.getpid()), len(gc.get_objects()), threading.active_count()

        seen = [await rounds(10), await rounds(20), await rounds(20)]  # what is made once is made in the first
        grown = [[after - before for before, after in zip(*pair, strict=True)] for pair in itertools.pairwise(seen)]
        return map(min, *grown)  # what leaks does so each time

    memory, objects, threads = hosted(Join(name="D", input_ops=branches), use, {"max_queue": 1000})
    assert memory < 4_000_000  # a fifth of what the requests carried
    assert objects < 500
    assert threads <= 0


async def soak(server, count, draw):
    """Sends requests on a connection, a new one after going away; returns how often each code came."""
    found, streams = Counter(), None
    for number in range(count):
        wish = draw.choices(["x", "raise", "sleep 0.005 ", "leave"], [80, 8, 6, 6])[0]
        body = json.dumps({"key": ["z" if wish == "raise" else "q", "blob"], "value": [wish, f"{number}{BLOB}"]})
        limit = "X-Request-Timeout-Ms: 2\r\n" if "sleep" in wish else ""
        head = f"POST /svc/prediction HTTP/1.1\r\nHost: localhost\r\n{limit}Content-Length: {len(body)}\r\n\r\n"
        if streams is None:
            streams = await asyncio.open_connection(server.host, server.port)
        reader, writer = streams
        writer.write((head + body).encode())
        if wish == "leave":
            await asyncio.sleep(draw.random() * 0.002)
            writer.transport.abort()
            streams = None
            continue
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        found[wish.split()[0], json.loads(await reader.readexactly(length)).get("err_no", 503)] += 1
    if streams is not None:
        streams[1].close()
    return found


def test_memory_stays_flat_over_errors_timeouts_and_clients_that_go_away(pipeline):
    # P153; benchmarks/soak.py sends fifty thousand
    server = pipeline(UNGUARDED, {"dag": {"use_profile": True}, "log_level": "error"})

    def load(count, seed):
        async def main():
            clients = [soak(server, count // 16, random.Random(seed + number)) for number in range(16)]
            return sum(await asyncio.gather(*clients), Counter())

        return asyncio.run(main())

    load(1000, 0)  # what is made once is made now
    before = rss_bytes(server.process.pid)
    found = load(4000, 100)
    grown = rss_bytes(server.process.pid) - before
    # What has too little time is refused, or ends while it waits or runs.
    assert {("x", 0), ("raise", 10000)} < set(found) <= {("x", 0), ("raise", 10000), ("sleep", 6000), ("sleep", 503)}
    assert grown < 8_000_000, grown  # a tenth of what the requests carried
    assert server.metric("forebay_in_flight") == 0
