# SPDX-License-Identifier: Apache-2.0
"""Server-side batching: section 4 of the specification."""

import re
import socket
import statistics
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import ModelError
from forebay.types.call import Request

HANDLER = """
    import threading, time
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


def test_payload_types_may_differ_and_bad_bodies_never_enter(post, parallel):
    # N79
    kinds = [(b'{"a": 1}', "application/json"), (b"text", "text/plain"), (b"{", "application/json")]
    order = []

    def send(pair):
        answer = post(pair[0], None, *pair[1])
        order.append(answer.status_code)
        return answer

    answers = parallel(send, enumerate(kinds))
    assert [answer.status_code for answer in answers] == [200, 200, 400]
    assert [answer.json()[0] for answer in answers[:2]] == ["dict", "str"]
    assert answers[0].json()[4] == 2
    assert order[0] == 400  # told at once, not with the batch


def test_what_is_checked_before_a_batch_is_what_json_reads(post, parallel):
    # N79
    bodies = [b"NaN", b"[" * 100_000, b'"\xff"', b""]
    answers = parallel(lambda body: post(0, None, body), bodies)
    assert [answer.status_code for answer in answers] == [200, 400, 400, 400]
    assert [answer.json()["error"] != "" for answer in answers[1:]] == [True] * 3


def test_each_element_follows_the_result_rules(server, together):
    # N80
    answers = together("bytes", "response", "callback")
    assert answers[0].content == b"bytes"
    assert (answers[1].status_code, answers[1].json()) == (400, {"no": 1})
    assert answers[2].json() == {"cb": 1}
    deadline = time.monotonic() + 60
    while server.request(params={"what": "callbacks"}).json() != 1:
        assert time.monotonic() < deadline
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


@pytest.fixture(scope="module")
def patient(serve, parallel):
    """Posts several modes at once to a server that fires at 3, however long the last one takes to come."""
    with serve(HANDLER, batching(3, 20)).client() as client:

        def post(pair):
            return client.post("/", params={"id": str(pair[0])} | ({"mode": pair[1]} if pair[1] else {}), json=pair[0])

        yield lambda *modes: parallel(post, enumerate(modes))


@pytest.mark.parametrize("mode, length", [("short", 2), ("long", 4)])
def test_trap_lists_of_another_length_fail_loudly(patient, mode, length):
    # N82
    for answer in patient(mode, None, None):
        assert answer.status_code == 500
        assert f"{length} elements for 3 requests" in answer.text
    assert [answer.status_code for answer in patient(None, None, None)] == [200] * 3


def test_an_exception_is_told_to_all(server, together):
    # N83
    for answer in together("raise", None, None):
        assert (answer.status_code, answer.text) == (500, "bad")
        assert answer.headers["content-type"].startswith("text/plain")
    assert any("ValueError: bad" in line.get("exc_info", "") for line in server.logged)
    assert [answer.status_code for answer in together("http", None, None)] == [429] * 3
    assert [answer.status_code for answer in together(None, None, None)] == [200] * 3


@pytest.mark.parametrize("idle_s", [0.1, 0.25])
def test_trap_the_interval_begins_with_the_first_request(post, idle_s):
    # N84
    time.sleep(idle_s)
    started = time.monotonic()
    assert post(1).json()[4] == 1
    assert 0.35 < time.monotonic() - started < 10


def test_batches_keep_the_order_of_arrival_and_do_not_overlap(server):
    # N85, N86
    raws = []
    for number in range(100, 110):  # one connection each, strictly one after the other
        raw = socket.create_connection(("127.0.0.1", server.port), timeout=10)
        mode = "sleep" if number == 100 else "none"
        raw.sendall(
            f"POST /?id={number}&mode={mode} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n"
            "content-type: text/plain\r\n\r\n".encode()
        )
        raws.append(raw)
        time.sleep(0.01)
    for raw in raws:
        assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
        raw.close()
    batches = [batch for batch in server.request().json() if batch[0] and int(batch[0]) >= 100]
    ids = [int(id_) for batch in batches for id_ in batch]
    assert ids == list(range(100, 110))
    assert [len(batch) for batch in batches] == [3, 3, 3, 1]


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


def test_trap_a_client_that_leaves_does_not_hold_up_the_others(server, post, parallel):
    # N89
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(b"POST /?id=gone HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        time.sleep(0.05)
    time.sleep(0.05)
    answers = parallel(post, [901, 902])
    assert [answer.json()[4] for answer in answers] == [2, 2]
    assert not any("gone" in batch for batch in server.request().json())


def test_batches_of_one_wait_for_nothing(serve):
    # N86, N88
    server = serve(NOOP, batching(1, 5.0))
    with server.client() as client:
        for _ in range(20):
            client.post("/", json=1)
            client.get("/")
        times = {"POST": [], "GET": []}
        for _ in range(100):
            for method, found in times.items():
                started = time.perf_counter()
                answer = client.request(method, "/", json=1)
                found.append(time.perf_counter() - started)
                assert answer.status_code == 200
    assert statistics.median(times["POST"]) - statistics.median(times["GET"]) < 0.001


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
                time.sleep(0.2)
                return payload
            def handle_get(self):
                return self.sizes
        """,
        batching(32, 0.1),
    )

    connected = threading.Barrier(128)

    def caller(number):
        with server.client() as client:
            client.get("/")
            connected.wait(30)
            for turn in range(4):
                assert client.post("/", json=[number, turn]).json() == [number, turn]

    with ThreadPoolExecutor(128) as threads:
        list(threads.map(caller, range(128)))
    sizes = server.request().json()
    assert sum(sizes) == 128 * 4
    assert max(sizes) == 32
    assert sizes[2:-4] == [32] * len(sizes[2:-4])


def test_load_case_of_the_original_two_clients(server, together):
    # N90
    for _ in range(2):
        started = time.monotonic()
        answers = together(None, None)
        assert [answer.json()[4] for answer in answers] == [2, 2]
        assert 0.35 < time.monotonic() - started < 10


def test_a_partial_batch_fires_at_once_while_draining(serve, at_once):
    # F41, N60: nobody else comes, so there is nothing to wait for
    server = serve(HANDLER, batching(5, 600), "--drain-s", "5")
    opened = server.client()

    def post():
        return opened.post("/", json="x")

    def stop():
        deadline = time.monotonic() + 60
        while not re.search(r"^forebay_waiting\S* 1", page := opened.get("/metrics").text, re.MULTILINE):
            assert time.monotonic() < deadline, page
        return server.stop()

    with opened:
        answer, status = at_once(post, stop)
    assert status == 0
    assert answer.json() == ["str", "x", None, None, 1]
