# SPDX-License-Identifier: Apache-2.0
"""Clients that leave, that do not read and that do not write: none of them costs the others anything."""

import contextlib
import json
import signal
import socket
import sys
import time
from pathlib import Path

import pytest


@pytest.fixture(scope="module", params=["process", "thread"])
def zoo(request, launch):
    return launch("zoo.py", "--worker-kind", request.param, "--max-body-bytes", "200000")


@pytest.fixture(scope="module")
def impatient(launch):
    """A server whose limits on time are two seconds each, of which each passes when it is told so."""
    command = (sys.executable, str(Path(__file__).parent / "impatient.py"))
    return launch("zoo.py", "--worker-kind", "thread", command=command)


def in_flight(server, model):
    return server.client.get(f"/models/{model}").json()["in_flight"]


def test_a_client_gone_while_its_sample_waits_never_has_it_run(zoo, tmp_path, eventually):
    until = tmp_path / "until"
    name = f"gone-{time.monotonic()}"
    with zoo.connect() as holder, zoo.connect() as leaver:
        holder.send(holder.request("POST", "/models/diary", json.dumps({"until": str(until)}).encode()))
        eventually(lambda: in_flight(zoo, "diary") == 1)
        leaver.send(leaver.request("POST", "/models/diary", b'{"name": "%b"}' % name.encode()))
        eventually(lambda: in_flight(zoo, "diary") == 2)
        leaver.socket.close()
        eventually(lambda: in_flight(zoo, "diary") == 1)
        until.touch()
        assert name not in holder.read().json()
    assert name not in zoo.call("diary", {}).json()


def test_a_client_that_resets_is_like_one_that_closes(zoo, eventually):
    with zoo.connect() as wire:
        wire.send(wire.request("POST", "/models/patient", b'{"s": 60}'))
        eventually(lambda: in_flight(zoo, "patient") == 1)
        wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        wire.socket.close()
    eventually(lambda: in_flight(zoo, "patient") == 0)
    assert zoo.call("patient", {}).json() == "cancelled"


def test_a_client_that_leaves_with_a_further_request_behind_is_noticed_before_its_time_is_over(zoo, eventually):
    before = zoo.metric("forebay_requests_total", endpoint="patient", code="cancelled")
    with zoo.connect() as wire:
        wire.send(wire.request("POST", "/models/patient", b'{"s": 60}') + wire.request("POST", "/models/echo", b"1"))
        eventually(lambda: in_flight(zoo, "patient") == 1)
    eventually(lambda: in_flight(zoo, "patient") == 0)
    assert zoo.metric("forebay_requests_total", endpoint="patient", code="cancelled") == before + 1


@pytest.mark.parametrize(
    "beginning, told",
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "this port speaks HTTP/1.1, and HTTP/2 came; gRPC has a port of its own"),
        (b"PROXY TCP4 127.0.0.1 127.0.0.1 40000 8080\r\n", "this port does not read the PROXY protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n\x21\x11\0\x0c" + bytes(12), "this port does not read the PROXY protocol"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32), "this port speaks plain HTTP, and TLS came"),
    ],
)
def test_who_speaks_another_protocol_is_told_which(zoo, beginning, told):
    with zoo.connect() as wire:
        wire.send(beginning)
        answer = wire.read()
    assert answer.status == 400
    assert told in answer.body.decode()


@pytest.fixture(scope="module", params=["inline", "thread", "process"])
def answering(request, launch):
    return launch("zoo.py", "--worker-kind", request.param)


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize(
    "method, target, body, answer",
    [
        ("POST", "/models/echo", b"1", b"1"),  # the fast lane
        ("GET", "/healthz", b"", None),  # the slow lane
        ("POST", "/models/later", b"0.01", b"0.01"),
    ],
)
def test_all_requests_are_answered_before_a_client_closed_its_side(
    answering, method, target, body, answer, count
):  # F135
    with answering.connect() as wire:
        wire.send(wire.request(method, target, body) * count)
        wire.socket.shutdown(socket.SHUT_WR)
        found = []
        while len(found) < count:
            read = wire.read()
            if read.status != 100:  # that asks whether the client is still there
                found.append(read)
        assert wire.is_closed_by_server()
    assert [read.status for read in found] == [200] * count
    assert answer is None or {read.body for read in found} == {answer}


def test_what_a_half_closed_client_has_not_sent_whole_is_dropped_and_the_rest_answered(answering):  # F135
    with answering.connect() as wire:
        whole = wire.request("POST", "/models/later", b"0.05")
        wire.send(whole + whole[:-2])
        wire.socket.shutdown(socket.SHUT_WR)
        read = wire.read()
        assert (read if read.status != 100 else wire.read()).body == b"0.05"
        assert wire.is_closed_by_server()


@pytest.mark.stress
def test_a_storm_of_requests_whose_clients_leave_is_followed_by_normal_service(zoo, eventually):
    body = b'{"s": 0.001, "name": "storm"}'
    lines = len(zoo.lines)
    for _ in range(5):
        wires = [zoo.connect() for _ in range(100)]
        for wire in wires:
            wire.send(wire.request("POST", "/models/narrow", body) + wire.request("POST", "/models/diary", body))
        for wire in wires:
            wire.socket.close()
    # Who waits for a refusal may ask its second question later, before the server sees that it has left.
    eventually(
        lambda: (
            in_flight(zoo, "narrow") == 0
            and in_flight(zoo, "diary") == 0
            and zoo.metric("forebay_waiting_samples") == 0
        )
    )
    assert zoo.call("narrow", {"name": "after"}).json() == "after"
    assert zoo.call("echo", 1).json() == 1
    log = "".join(zoo.lines[lines:])
    assert "Traceback" not in log, log[log.index("Traceback") :][:4000]


def test_a_client_that_reads_nothing_of_a_large_answer_holds_no_worker(zoo):
    with zoo.connect() as lazy:
        lazy.send(lazy.request("POST", "/models/large", b"30000000"))
        started = time.monotonic()
        while time.monotonic() - started < 0.3:
            assert zoo.call("large", 3).content == bytes(3)
        assert len(lazy.read().body) == 30_000_000


def test_a_client_that_reads_nothing_of_a_stream_stops_it_from_growing(serve, eventually):
    server = serve("zoo.py:Count", "--worker-kind", "thread")

    def resident_bytes():
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096

    server.call("count", 3)
    before = resident_bytes()
    with server.connect() as lazy:
        lazy.send(lazy.request("POST", "/models/count", b"-2"))
        lazy.read_head()
        time.sleep(0.5)  # an unchecked stream would have made gigabytes by now
        assert resident_bytes() - before < 60_000_000
        assert server.client.get("/healthz").status_code == 200
    eventually(lambda: server.metric("forebay_in_flight") == 0)
    assert server.call("count", 1).text == "data: 0\n\n"


def test_many_clients_that_never_finish_a_request_keep_nobody_out(zoo):
    beginnings = [b"", b"P", b"POST /models/echo HT", b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\n"]
    beginnings.append(b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n[")
    beginnings.append(b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n[")
    slow = [zoo.connect().send(beginnings[number % len(beginnings)]) for number in range(120)]
    try:
        started = time.monotonic()
        for number in range(20):
            assert zoo.call("echo", number).json() == number
        assert time.monotonic() - started < 60
        assert in_flight(zoo, "echo") == 0
    finally:
        for wire in slow:
            wire.socket.close()


def test_connections_beyond_the_limit_are_told_so(serve, eventually):
    server = serve("zoo.py:Echo", "--worker-kind", "thread", "--max-connections", "3")
    with server.connect() as one, server.connect() as two, server.connect() as three:
        for wire in (one, two, three):
            assert wire.ask("POST", "/", b"1").status == 200
        with server.connect() as fourth:
            answer = fourth.read()
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.headers["retry-after"]
            assert fourth.is_closed_by_server()
        assert one.ask("POST", "/", b"1").status == 200

    def served_again():
        with server.connect() as wire:
            return wire.ask("POST", "/", b"1").status == 200

    eventually(served_again)


def test_clients_that_stall_are_ended_and_others_are_not(impatient, tmp_path, eventually):
    def pass_a_second():
        impatient.call("echo", 1)  # what was sent before is read by now
        before = impatient.log.count("a second has passed")
        impatient.signal(signal.SIGUSR1)
        eventually(lambda: impatient.log.count("a second has passed") > before)

    heads = [
        b"POST /mod",
        b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\n",
        b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n[",
        b"POST /models/echo HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n5\r\n[",
    ]
    with contextlib.ExitStack() as stack:
        stalled = [stack.enter_context(impatient.connect()).send(head) for head in heads]
        idle, silent, deaf, at_work, steady = (stack.enter_context(impatient.connect()) for _ in range(5))
        assert idle.ask("POST", "/models/echo", b"1").status == 200
        deaf.send(deaf.request("POST", "/models/large", b"50000000"))
        deaf.read_head()
        errand = json.dumps({"until": str(tmp_path / "until")}).encode()
        at_work.send(at_work.request("POST", "/models/diary", errand))
        eventually(lambda: in_flight(impatient, "diary") == 1)
        body = b'"' + b"x" * 5000 + b'"'
        data = steady.request("POST", "/models/echo", body)
        steady.send(data[:-4000])
        for start in range(len(data) - 4000, len(data), 500):
            steady.send(data[start : start + 500])
            pass_a_second()
        for wire in stalled:
            answer = wire.read()
            wire.read_rest()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert idle.is_closed_by_server()
        assert silent.is_closed_by_server()
        with pytest.raises((EOFError, ConnectionError)):
            deaf._exactly(50_000_000)
        (tmp_path / "until").touch()
        assert at_work.read().status == 200
        assert steady.read().body == body
    assert in_flight(impatient, "echo") == 0


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_client_that_sends_far_too_much_reads_its_413_after_that(zoo, framing):  # F116: it was cut off after 64 MiB
    size, piece = 150 << 20, bytes(1 << 20)
    with zoo.connect() as wire:
        if framing == "length":
            wire.send(wire.head("POST", "/models/echo", f"content-length: {size}"))
        else:
            wire.send(wire.head("POST", "/models/echo", "transfer-encoding: chunked"))
        for _ in range(size // len(piece)):
            wire.send(piece if framing == "length" else b"%x\r\n%b\r\n" % (len(piece), piece))
        assert wire.read().status == 413
