# SPDX-License-Identifier: Apache-2.0
"""Server-side batching: section 4 of the specification."""

import contextlib
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.waiting import PATIENCE_S

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import ModelError
from forebay.types.call import Request

HANDLER = """
    import os, threading, time
    from fastapi import HTTPException
    from starlette.responses import JSONResponse, StreamingResponse

    class Handler:
        def __init__(self):
            self.batches = []
            self.running = 0
            self.called_back = []

        def handle_post(self, payload, query_params, headers):
            assert self.running == 0, "two batches at a time"
            self.running += 1
            try:
                return self.answer(payload, query_params, headers)
            finally:
                self.running -= 1

        def answer(self, payload, query_params, headers):
            assert type(payload) is type(query_params) is type(headers) is list
            assert len(payload) == len(query_params) == len(headers)
            modes = [params.get("mode") for params in query_params]
            self.batches.append([params.get("id") for params in query_params])
            for mode in modes:
                if mode == "dict":
                    return {}
                if mode == "generator":
                    return (x for x in payload)
                if mode == "tuple":
                    return tuple(payload)
                if mode == "short":
                    return payload[:-1]
                if mode == "long":
                    return payload + [1]
                if mode == "raise":
                    raise ValueError("bad")
                if mode == "http":
                    raise HTTPException(429, "slow down")
                if mode == "sleep":
                    time.sleep(0.3)
                if mode == "hold":
                    while not os.path.exists("go"):
                        time.sleep(0.01)
            results = []
            for body, params, header in zip(payload, query_params, headers):
                mode = params.get("mode")
                if mode == "bytes":
                    results.append(b"bytes")
                elif mode == "response":
                    results.append(JSONResponse({"no": 1}, status_code=400))
                elif mode == "callback":
                    results.append(({"cb": 1}, lambda: self.called_back.append(1)))
                elif mode == "set":
                    results.append({1})
                elif mode == "stream":
                    results.append(StreamingResponse(iter(["a", "b"])))
                else:
                    results.append([type(body).__name__, body, params.get("id"), header.get("x-id"), len(payload)])
            return results

        def handle_get(self, query_params):
            if query_params.get("what") == "callbacks":
                return len(self.called_back)
            return self.batches
"""

NOOP = """
    class Handler:
        def handle_post(self, payload):
            return payload
        def handle_get(self):
            return 0
"""


def batching(max_batch_size, batch_interval_seconds):
    return {
        "server_side_batching": {"max_batch_size": max_batch_size, "batch_interval_seconds": batch_interval_seconds}
    }


@pytest.fixture(scope="module")
def server(serve):
    """Fires at 3, however long the last one takes to come; one thread."""
    return serve(HANDLER, batching(3, 600))


@pytest.fixture(scope="module")
def hasty(serve):
    """Fires at 3 or after 0.4 seconds; one thread."""
    return serve(HANDLER, batching(3, 0.4))


@pytest.fixture(scope="module")
def post(server):
    clients = server.client()

    def run(number=0, mode=None, content=None, content_type="application/json"):
        params = {"id": str(number)} | ({"mode": mode} if mode else {})
        headers = {"x-id": str(number), "content-type": content_type}
        return clients.post("/", params=params, content=str(number) if content is None else content, headers=headers)

    with clients:
        yield run


@pytest.fixture(scope="module")
def together(post, parallel):
    """Posts several modes at once."""
    return lambda *modes: parallel(lambda pair: post(pair[0], pair[1]), enumerate(modes))


def test_without_handle_post_there_is_nothing_to_batch(open_runner):
    # N77
    with pytest.raises(
        ModelError, match="dynamic batcher has been enabled, but no `handle_post` method could be found"
    ):
        open_runner("class Handler:\n    def handle_get(self): pass", batched=True)


def test_other_verbs_stay_single(server):
    # N77
    before = server.request().json()
    assert isinstance(before, list)
    assert server.request().json() == before, "it is no batch"


def test_arguments_arrive_as_lists_in_the_same_order(together):
    # N78, N87: three waiting requests fill a batch although there is one thread
    answers = together(None, None, None)
    assert [answer.json() for answer in answers] == [["int", n, str(n), str(n), 3] for n in range(3)]


def test_payload_types_may_differ_and_bad_bodies_never_enter(server, post, eventually):
    # N79
    kinds = [(b'{"a": 1}', "application/json"), (b"text", "text/plain")]
    with ThreadPoolExecutor() as threads:
        waiting = [threads.submit(post, 0, None, *kind) for kind in kinds]
        eventually(lambda: server.gauge("forebay_waiting_samples") == 2)
        assert post(0, None, b"{").status_code == 400  # told at once, not with the batch
        last = post(1)
        answers = [one.result().json() for one in waiting] + [last.json()]
    assert [answer[0] for answer in answers] == ["dict", "str", "int"]
    assert [answer[4] for answer in answers] == [3, 3, 3]


def test_what_is_checked_before_a_batch_is_what_json_reads(hasty, parallel):
    # N79
    bodies = [b"NaN", b"[" * 100_000, b'"\xff"', b""]
    headers = {"content-type": "application/json"}
    answers = parallel(lambda body: hasty.request("POST", content=body, headers=headers), bodies)
    assert [answer.status_code for answer in answers] == [200, 400, 400, 400]
    assert [answer.json()["error"] != "" for answer in answers[1:]] == [True] * 3


def test_each_element_follows_the_result_rules(server, together, eventually):
    # N80
    answers = together("bytes", "response", "callback")
    assert answers[0].content == b"bytes"
    assert (answers[1].status_code, answers[1].json()) == (400, {"no": 1})
    assert answers[2].json() == {"cb": 1}
    eventually(lambda: server.request(params={"what": "callbacks"}).json() == 1)
    answers = together("set", "stream", None)
    assert (answers[0].status_code, answers[0].text) == (500, "internal server error")
    assert answers[1].text == "ab"
    assert answers[2].json()[4] == 3


@pytest.mark.parametrize("mode", ["dict", "tuple", "generator"])
def test_anything_but_a_list_is_500_for_all(together, mode):
    # N81
    for answer in together(mode, None, None):
        assert answer.status_code == 500
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.text == (
            f"error: please return a list when using server side batching, got <class '{mode}'>: runtime exception"
        )


@pytest.mark.parametrize("mode, length", [("short", 2), ("long", 4)])
def test_trap_lists_of_another_length_fail_loudly(together, mode, length):
    # N82
    for answer in together(mode, None, None):
        assert answer.status_code == 500
        assert f"{length} elements for 3 requests" in answer.text
    assert [answer.status_code for answer in together(None, None, None)] == [200] * 3


def test_an_exception_is_told_to_all(server, together, eventually):
    # N83
    for answer in together("raise", None, None):
        assert (answer.status_code, answer.text) == (500, "bad")
        assert answer.headers["content-type"].startswith("text/plain")
    eventually(lambda: server.has_logged("ValueError: bad", "exc_info"))
    assert [answer.status_code for answer in together("http", None, None)] == [429] * 3
    assert [answer.status_code for answer in together(None, None, None)] == [200] * 3


@pytest.mark.parametrize("idle_s", [0.1, 0.25])
def test_trap_the_interval_begins_with_the_first_request(hasty, idle_s):
    # N84
    time.sleep(idle_s)
    started = time.monotonic()
    assert hasty.request("POST", json=1).json()[4] == 1
    assert 0.35 < time.monotonic() - started < 60


def test_batches_keep_the_order_of_arrival_and_do_not_overlap(server, eventually):
    # N85, N86
    with contextlib.ExitStack() as stack:
        raws = []
        for number in range(100, 109):  # one connection each, strictly one after the other
            raw = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S))
            mode = "hold" if number == 100 else "none"
            raw.sendall(
                f"POST /?id={number}&mode={mode} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
                "content-type: text/plain\r\n\r\n".encode()
            )
            raws.append(raw)
            eventually(lambda: server.gauge("forebay_in_flight") == len(raws))
        (server.folder / "go").touch()
        for raw in raws:
            assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
    batches = [batch for batch in server.request().json() if batch[0] and int(batch[0]) >= 100]
    assert [[int(id_) for id_ in batch] for batch in batches] == [
        [100, 101, 102],
        [103, 104, 105],
        [106, 107, 108],
    ]


def test_one_batch_at_a_time_in_a_process(open_runner, items):
    # N85: whichever of its threads has it
    runner = open_runner(HANDLER, batched=True)
    batch = [items(query=b"mode=sleep", body=b"1")]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(runner.run, [batch, batch]))
    assert [answer[0][0] for answer in found] == [200, 200]


def test_a_batch_that_may_not_run_yet_sets_no_timer():
    # N85: else the server would spin while threads are idle and the one batch a process may run is running
    queue = BatchQueue(BatchConfig(max_size=2, max_wait_s=1.0, idle="wait", max_running=1))
    first, second = (Request(body=b"", reply=print, key="post") for _ in range(2))
    queue.offer(first, 0.0)
    running = queue.take(1.0)
    assert running is not None
    queue.offer(second, 1.0)
    assert queue.take(5.0) is None
    assert queue.next_due() is None
    queue.answered(running, 5.0)
    assert queue.next_due() == 2.0
    following = queue.take(5.0)
    assert following is not None
    assert following.entries == [second]


def test_trap_a_client_that_leaves_does_not_hold_up_the_others(server, together, eventually):
    # N89
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(b"POST /?id=gone HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        eventually(lambda: server.gauge("forebay_waiting_samples") == 1)
    eventually(lambda: server.gauge("forebay_waiting_samples") == 0)
    assert [answer.json()[4] for answer in together(None, None, None)] == [3, 3, 3]
    assert not any("gone" in batch for batch in server.request().json())


def test_batches_of_one_wait_for_nothing(serve):
    # N86, N88: neither for others nor for the next look of somebody who polls
    queue = BatchQueue(BatchConfig(max_size=1, max_wait_s=600.0, idle="wait", max_running=1))
    queue.offer(Request(body=b"", reply=print, key="post"), 0.0)
    assert queue.take(0.0) is not None
    with serve(NOOP, batching(1, 600)).client() as client:
        for number in range(20):
            assert client.post("/", json=number).json() == number


@pytest.mark.slow
def test_load_case_of_the_original_many_clients(serve):
    # N90: every batch after the warm-up is full, every answer reaches its caller
    server = serve(
        """
        import time
        class Handler:
            def __init__(self):
                self.sizes = []
            def handle_post(self, payload):
                self.sizes.append(len(payload))
                time.sleep(0.1)
                return payload
            def handle_get(self):
                return self.sizes
        """,
        batching(32, 5.0),  # but for the last ones nobody waits so long, however busy the machine
    )

    connected = threading.Barrier(128)

    def caller(number):
        with server.client() as client:
            client.get("/")
            connected.wait(PATIENCE_S)
            for turn in range(4):
                assert client.post("/", json=[number, turn]).json() == [number, turn]

    with ThreadPoolExecutor(128) as threads:
        list(threads.map(caller, range(128)))
    sizes = server.request().json()
    assert sum(sizes) == 128 * 4
    assert max(sizes) == 32
    assert sizes[2:-4] == [32] * len(sizes[2:-4])


def test_load_case_of_the_original_two_clients(hasty, eventually):
    # N90: what has come by the time the interval is over is one batch
    def post(mode):
        return hasty.request("POST", params={"mode": mode}, json=1).json()[4]

    with ThreadPoolExecutor() as threads:
        held = threads.submit(post, "hold")
        eventually(lambda: (hasty.gauge("forebay_in_flight"), hasty.gauge("forebay_waiting_samples")) == (1, 0))
        two = [threads.submit(post, "none") for _ in range(2)]
        eventually(lambda: hasty.gauge("forebay_waiting_samples") == 2)
        (hasty.folder / "go").touch()
        assert [one.result() for one in (held, *two)] == [1, 2, 2]


def test_a_partial_batch_fires_at_once_while_draining(serve, at_once):
    # F41, N60: nobody else comes, so there is nothing to wait for
    server = serve(HANDLER, batching(5, 600), "--drain-s", "5")
    opened = server.client()

    def post():
        return opened.post("/", json="x")

    def stop():
        deadline = time.monotonic() + PATIENCE_S
        while not re.search(r"^forebay_waiting\S* 1", page := opened.get("/metrics").text, re.MULTILINE):
            assert time.monotonic() < deadline, page
        return server.stop()

    with opened:
        answer, status = at_once(post, stop)
    assert status == 0
    assert answer.json() == ["str", "x", None, None, 1]
