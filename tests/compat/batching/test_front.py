# SPDX-License-Identifier: Apache-2.0
"""The HTTP side of `forebay batching`: what clients of the original service rely on."""

import re
import socket
import time
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

USUAL = ("-batch", "8", "-latency", "50", "-timeout", "50000")
HURRIED = ("-batch", "4", "-capacity", "2", "-latency", "0", "-timeout", "600")
SINGLE = ("-batch", "1", "-capacity", "1", "-timeout", "50000")
PATIENT = ("-batch", "4", "-latency", "500")


def raw(front, data, until=b"\r\n\r\n"):
    """Sends bytes over a connection of its own and reads until a mark; returns what came and the socket."""
    connection = socket.create_connection(("127.0.0.1", front.port), timeout=PATIENCE_S)
    connection.sendall(data)
    found = b""
    while until not in found and (piece := connection.recv(65536)):
        found += piece
    return found, connection


@pytest.mark.parametrize(
    "method, path",
    [("POST", "/inference"), ("POST", "/x/y?z=1"), ("PUT", "/"), ("GET", "/health"), ("BREW", "/"), ("SETUP", "/a")],
)
def test_a_body_is_a_job_whatever_the_path_and_method(shared, method, path):  # B7
    front = shared(*USUAL)
    with front.peer() as peer:
        job = front.send(b"hi", method, path)
        assert peer.serve() == [b"hi"]
        assert (job.read().status, job.body) == (200, b"did hi")


def test_a_method_that_nobody_has_registered_is_any_other(shared):  # B7, F48
    front = shared(*USUAL)
    asked = b"X-%s-a / HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    found, connection = raw(front, asked % b"1")
    with connection:
        assert found.startswith(b"HTTP/1.1 200 ")
        connection.sendall(asked % b"2")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        connection.sendall(asked % b"(3)")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 ")


def test_bodies_pass_byte_for_byte(shared):  # B7, B9
    front = shared(*USUAL)
    every_byte = bytes(range(256))
    with front.peer() as peer:
        job = front.send(every_byte, headers={"content-type": "application/json"})
        jobs = peer.take()
        assert [body for _, body in jobs] == [every_byte]
        peer.answer(jobs, make=lambda body: body[::-1])
        assert (job.read().status, job.body) == (200, every_byte[::-1])


@pytest.mark.parametrize(
    "method, path", [("GET", "/"), ("POST", "/inference"), ("GET", "/metrics"), ("HEAD", "/"), ("DELETE", "/health")]
)
def test_a_request_without_a_body_is_answered_at_once_without_a_worker(shared, method, path):  # B8, B36
    answer = shared(*USUAL).send(b"", method, path, {"content-length": "0"}).read()
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    "sent, answered",
    [
        ("application/json", "application/json"),
        ("application/msgpack", "application/msgpack"),
        ("application/json; charset=utf-8", "application/json"),
        ("image/png", "text/plain; charset=utf-8"),
        (None, "text/plain; charset=utf-8"),
    ],
)
def test_the_type_of_an_answer_is_the_request_s_if_it_is_json_or_msgpack(shared, sent, answered):  # B9
    front = shared(*USUAL)
    with front.peer() as peer:
        job = front.send(b"\x81", headers={"content-type": sent} if sent else {})
        peer.serve()
        assert job.read().type == answered


def test_a_bad_job_gets_422_with_the_worker_s_words_and_its_mates_200(shared):  # B10, B46
    front = shared(*USUAL)
    with front.peer() as peer:
        sent = [front.send(b"%d" % number) for number in range(8)]
        jobs = peer.take()
        peer.answer(jobs, errors=[job for job, body in jobs if body == b"5"])
        answers = [job.read() for job in sent]
    assert [answer.status for answer in answers] == [200] * 5 + [422] + [200] * 2
    assert [answer.body for answer in answers] == [b"did %d" % number for number in range(8)]


def test_a_job_nobody_takes_gets_408_after_its_time(shared):  # B11
    answer = shared(*HURRIED).send(b"x").read()
    assert (answer.status, answer.body) == (408, b"Timeout!")
    assert 0.59 < answer.seconds < 60.0


def test_a_late_answer_is_ignored_and_the_next_job_is_done(shared):  # B11
    front = shared(*HURRIED)
    with front.peer() as peer:
        late = front.send(b"late")
        jobs = peer.take()
        assert late.read().status == 408
        peer.answer(jobs)
        job = front.send(b"next")
        assert peer.serve() == [b"next"]
        assert job.read().body == b"did next"


def test_a_full_queue_refuses_at_once_with_429(shared):  # B12
    front = shared(*SINGLE)
    waiting = front.post(b"secret")
    refused = [front.send(b"secret").read() for _ in range(3)]  # while that one waits
    assert [answer.status for answer in refused] == [429] * 3
    assert all(answer.body and b"secret" not in answer.body for answer in refused)
    with front.peer() as peer:
        assert peer.serve() == [b"secret"]
    assert waiting.read().status == 200


def test_jobs_a_worker_has_do_not_count_as_waiting(shared):  # B13
    front = shared(*SINGLE)
    with front.peer() as peer:
        first = front.send(b"1")
        held = peer.take()
        second = front.post(b"2")
        assert front.send(b"3").read().status == 429
        peer.answer(held)
        assert peer.serve() == [b"2"]
        assert [first.read().body, second.read().body] == [b"did 1", b"did 2"]


def test_a_job_whose_time_was_over_is_not_sent_and_keeps_no_place(shared):  # B14, B15
    front = shared(*HURRIED)
    late = [front.post(b"late"), front.post(b"late")]
    assert [(job.read().status, job.body) for job in late] == [(408, b"Timeout!")] * 2
    with front.peer() as peer:
        assert not peer.hears(0.1)
        fresh = front.send(b"fresh")
        assert peer.serve() == [b"fresh"]
        assert fresh.read().status == 200


def test_a_job_whose_client_left_is_not_sent_and_keeps_no_place(shared):  # B15
    front = shared(*SINGLE)
    before = front.log.count("a job has ended")
    front.post(b"gone").leave()
    front.wait_for(lambda: front.log.count("a job has ended") > before)
    job = front.post(b"here")
    with front.peer() as peer:
        assert peer.serve() == [b"here"]
        assert job.read().status == 200


def test_a_full_batch_leaves_at_once_and_another_after_the_latency(shared):  # B16, B18
    front = shared(*PATIENT)
    with front.idle_peer() as peer:
        taken = []
        while not taken or (min(taken) > 0.45 and len(taken) < 10):  # another process may have the core now and then
            began = time.monotonic()
            sent = [front.send(b"%d" % number) for number in range(4)]
            assert len(peer.serve()) == 4
            taken.append(time.monotonic() - began)
            assert {job.read().status for job in sent} == {200}
        assert min(taken) < 0.45
        began = time.monotonic()
        sent = [front.send(b"%d" % number) for number in range(2)]
        assert len(peer.serve()) == 2
        assert 0.49 < time.monotonic() - began < 60.0
        assert {job.read().status for job in sent} == {200}


def test_what_waits_leaves_together_without_a_latency(start):  # B17, B22
    front = start("-batch", "8", "-latency", "0")
    sent = [front.post(b"%d" % number) for number in range(8)]
    with front.peer() as peer:
        assert peer.serve() == [b"%d" % number for number in range(8)]
    assert {job.read().status for job in sent} == {200}


def test_jobs_leave_in_the_order_in_which_they_came(shared):  # B19
    front = shared(*USUAL)
    sent = [front.post(b"%d" % number) for number in range(24)]
    with front.peer() as peer:
        frames = [peer.serve() for _ in range(3)]
    assert frames == [[b"%d" % number for number in range(start, start + 8)] for start in (0, 8, 16)]
    assert [job.read().body for job in sent] == [b"did %d" % number for number in range(24)]


def test_one_job_after_the_other_costs_little_over_the_worker_s_time(shared):  # B18
    front = shared(*SINGLE)
    times = []
    with front.peer() as peer:
        for _ in range(30):
            job = front.send(b"x")
            peer.serve()
            times.append(job.read().seconds)
    assert min(times) < 0.02  # a fraction of a millisecond each on a machine that is not shared


def test_an_idle_front_uses_next_to_no_processor_time(shared):  # B18
    front = shared(*PATIENT)

    def seconds():
        fields = Path(f"/proc/{front.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    with front.peer():
        before = seconds()
        time.sleep(1.0)
        assert seconds() - before <= 0.03


def test_a_job_may_come_before_its_worker(shared):  # B22
    front = shared(*USUAL)
    job = front.post(b"early")
    with front.peer() as peer:
        assert peer.serve() == [b"early"]
    assert job.read().body == b"did early"


def test_a_client_that_does_not_finish_its_body_gets_408_and_is_hung_up_on(shared):  # B31
    front = shared(*HURRIED)
    began = time.monotonic()
    found, connection = raw(front, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhalf", b"Timeout!")
    with connection:
        assert found.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in found
        assert 0.59 < time.monotonic() - began < 60.0
        assert connection.recv(1) == b""


def test_an_idle_connection_outlives_the_time_of_a_job(shared):  # B31
    front = shared(*HURRIED)
    request = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    found, connection = raw(front, request)
    with connection:
        assert found.startswith(b"HTTP/1.1 200 ")
        time.sleep(1.0)
        connection.sendall(request)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_a_client_that_leaves_while_its_job_runs_does_not_disturb_the_others(shared):  # B15
    front = shared(*USUAL)
    with front.peer() as peer:
        sent = [front.send(b"%d" % number) for number in range(8)]
        jobs = peer.take()
        before = front.log.count("a job has ended")
        sent[3].leave()
        front.wait_for(lambda: front.log.count("a job has ended") > before)
        peer.answer(jobs)
        del sent[3]
        assert {job.read().status for job in sent} == {200}


def test_five_mebibytes_go_there_and_back(shared):  # B32, B48
    front = shared(*USUAL)
    body = bytes(range(256)) * 4096 * 5
    with front.peer() as peer:
        job = front.send(body)
        peer.answer(peer.take(), make=lambda body: body)
        assert job.read().body == body


@pytest.mark.parametrize("expect", [b"", b"expect: 100-continue\r\n"])
def test_a_body_over_the_limit_gets_413_unread(shared, expect):  # B32, B33
    front = shared(*USUAL)
    found, connection = raw(front, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1073741824\r\n%b\r\n" % expect)
    with connection:
        assert found.startswith(b"HTTP/1.1 413 ")


def test_a_chunked_body_over_the_limit_gets_413(start):  # B32
    front = start("-max-body-bytes", "1000")
    head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    found, connection = raw(front, head + b"400\r\n" + b"x" * 1024 + b"\r\n")
    with connection:
        assert found.startswith(b"HTTP/1.1 413 ")


def test_expect_chunks_keep_alive_and_pipelining(shared):  # B33
    front = shared(*USUAL)
    head = b"POST / HTTP/1.1\r\nhost: x\r\n"
    with front.peer() as peer:
        found, connection = raw(front, head + b"expect: 100-continue\r\ncontent-length: 3\r\n\r\n")
        with connection:
            assert found == b"HTTP/1.1 100 Continue\r\n\r\n"
            chunked = head + b"transfer-encoding: chunked\r\n\r\n1\r\nf\r\n2\r\nou\r\n0\r\n\r\n"
            connection.sendall(b"one" + head + b"content-length: 3\r\n\r\ntwo" + chunked)
            for body in (b"one", b"two", b"fou"):
                assert peer.serve() == [body]
                answer = b""
                while not answer.endswith(b"did " + body):
                    answer += connection.recv(1)
                assert answer.startswith(b"HTTP/1.1 200 ")


def test_ids_are_random_uuids(shared):  # B34
    front = shared(*SINGLE)
    pattern = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
    seen = set()
    with front.peer() as peer:
        for _ in range(50):
            job = front.send(b"x")
            jobs = peer.take()
            assert all(re.fullmatch(pattern, name) for name, _ in jobs)
            seen.update(name for name, _ in jobs)
            peer.answer(jobs)
            job.read()
    assert len(seen) == 50


def test_the_log_tells_what_happens_and_never_a_body(shared):  # B35
    front = shared(*USUAL)
    with front.peer() as peer:
        job = front.post(b"my secret body")
        peer.serve()
        job.read()
    messages = {record["message"] for record in front.records}
    assert {"a job was added", "sent a batch", "a job has ended"} <= messages
    assert any("workers may attach at" in message and front.address in message for message in messages)  # B4
    assert any("has joined" in message for message in messages)
    assert "secret" not in front.log


def test_live_figures_are_on_a_port_of_their_own(start):  # B36
    front = start("-metrics-port", "0")
    url = front.wait_for(lambda: re.search(r"metrics at http://127.0.0.1:(\d+)/metrics", front.log))
    with front.peer() as peer:
        job = front.send(b"x")
        peer.serve()
        job.read()
        with socket.create_connection(("127.0.0.1", int(url[1])), timeout=PATIENCE_S) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            page = b""
            while piece := connection.recv(65536):
                page += piece
    assert page.startswith(b"HTTP/1.1 200 ")
    assert re.search(rb'forebay_requests_total\{[^}]*endpoint="batching"[^}]*\} 1', page)
