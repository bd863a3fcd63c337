# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalSubscript=false
"""Streams through a socket: they share the worker, and its steps."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S, eventually, timeouts

LONG = 100_000
MODELS = ["shared", "shared-async", "generated", "generated-async"]


@pytest.fixture(scope="module", params=["process", "thread", "inline"])
def server(request, launch):
    found = launch("streams.py", "--worker-kind", request.param, "--timeout-ms", "600000")
    found.kind = request.param
    return found


class Stream:
    """One stream of a client that reads it event by event."""

    def __init__(self, server, model, number=None, **sample):
        body = json.dumps(sample if number is None else number).encode()
        self.socket = socket.create_connection(("127.0.0.1", server.port))
        self.socket.settimeout(PATIENCE_S)
        self.socket.sendall(
            b"POST /models/%b HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (model.encode(), len(body), body)
        )
        self.buffer = b""

    def next(self):
        """The next event; None once there is none."""
        while b"\n\n" not in self.buffer:
            data = self.socket.recv(65536)
            if not data:
                self.drop()
                return None
            self.buffer += data
        event, _, self.buffer = self.buffer.partition(b"\n\n")
        return json.loads(event.rpartition(b"data: ")[2])

    def rest(self):
        found = []
        while (event := self.next()) is not None:
            found.append(event)
        return found

    def drop(self):
        self.socket.close()


def descriptors(pid):
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def alive(server, model="shared"):
    return server.client.get(f"/models/{model}/alive").json()


@pytest.mark.parametrize("model", MODELS)
def test_a_second_client_does_not_wait_for_the_first_ones_stream(server, model):  # F50
    first = Stream(server, model, length=LONG, seconds=0.001)
    assert first.next()[0] == 1
    second = Stream(server, model, length=5)
    assert [number for number, _ in second.rest()] == [1, 2, 3, 4, 5]
    assert first.next()[0] > 1  # and it is still there
    first.drop()


@pytest.mark.parametrize("model", MODELS)
def test_parts_of_a_stream_come_in_order_and_once(server, model):
    streams = [Stream(server, model, length=length, seconds=0.0005) for length in (1, 50, 7, 23, 40, 3)]
    found = [[number for number, _ in stream.rest()] for stream in streams]
    assert found == [list(range(1, length + 1)) for length in (1, 50, 7, 23, 40, 3)]


@pytest.mark.parametrize("length", [5, 6])
@pytest.mark.parametrize("model", ["shared-some", "shared-some-async", "generated-some"])
def test_a_part_that_postprocess_leaves_out_is_not_sent(server, model, length):
    assert [number for number, _ in Stream(server, model, length=length).rest()] == [1, 3, 5]


@pytest.mark.parametrize("model", MODELS[:2])
def test_streams_that_are_open_make_a_step_together(server, model):
    first = Stream(server, model, length=LONG, seconds=0.002)
    assert first.next() == [1, 1]
    second = Stream(server, model, length=LONG, seconds=0.002)
    assert second.next() == [1, 2]
    while first.next()[1] != 2:
        pass
    second.drop()  # its seat is free at a next step
    while first.next()[1] != 1:
        pass
    first.drop()


def test_a_worker_does_not_look_again_and_again_at_async_generators_that_wait(server):
    """It was 100 times a second; who comes meanwhile still takes part at once."""
    waiting = Stream(server, "awaiting")
    other = Stream(server, "awaiting")
    (looks,) = waiting.rest()
    assert looks <= 10  # for the other one, at most a bundle of them, and for what it says
    other.rest()


def test_no_more_streams_sit_than_there_are_seats(server):
    streams = [Stream(server, "shared", length=LONG, seconds=0.001) for _ in range(4)]
    assert [stream.next()[0] for stream in streams] == [1] * 4
    late = Stream(server, "shared", length=3)
    while streams[0].next()[1] != 4:
        pass
    assert streams[1].next()[1] <= 4
    streams[0].drop()
    assert [number for number, _ in late.rest()] == [1, 2, 3]
    for stream in streams:
        stream.drop()


@pytest.mark.parametrize("how", ["raise", "short", "error"])
def test_a_step_that_goes_wrong_ends_streams_and_lets_go_of_their_states(server, how):
    eventually(lambda: alive(server)["states"] == 0)
    wrong = Stream(server, "shared", length=9, how=how)
    found = wrong.rest()
    assert [event[0] for event in found[:-1]] == [1, 2]
    error = found[-1]["error"]
    assert ("this one" in error["message"]) == (how == "error")
    eventually(lambda: alive(server)["states"] == 0)
    assert [number for number, _ in Stream(server, "shared", length=2).rest()] == [1, 2]


@pytest.mark.parametrize("model", ["shared", "shared-async"])
@pytest.mark.parametrize(
    "how, said",
    [
        ("none", "step returned a NoneType for"),
        ("nothing", "step returned None 500 times in a row for a stream, which says that there is nothing this time"),
        ("nothing, late", "step returned None 500 times in a row for a stream"),  # the processor was elsewhere
    ],
)
def test_a_stream_that_none_is_to_end_is_told_how_streams_end(server, model, how, said):
    """At once, and not when its deadline has passed."""
    other = Stream(server, "shared", length=LONG)
    wrong = Stream(server, model, length=9, how=how)
    found = wrong.rest()
    assert [event[0] for event in found[:-1]] == [1, 2]
    assert found[-1]["error"]["code"] == "internal"
    eventually(lambda: said in server.log)
    if how != "none":
        assert "return Last(part), or Last(), where a stream ends" in server.log
        assert other.next()[0] == 1
    other.drop()


def test_an_error_of_one_stream_is_its_own(server):
    other = Stream(server, "shared", length=LONG, seconds=0.001)
    assert other.next()[0] == 1
    assert Stream(server, "shared", length=9, how="error").rest()[-1]["error"]["message"] == "this one"
    answer = server.client.post("/models/shared", json={"length": 1, "how": "no start"})
    assert answer.status_code == 400
    assert other.next()[0] > 1
    other.drop()


def test_a_client_that_never_reads_costs_the_others_nothing(server):
    slow = Stream(server, "shared", length=LONG)
    others = [Stream(server, "shared", length=300) for _ in range(3)]
    assert [len(stream.rest()) for stream in others] == [300] * 3
    slow.drop()
    eventually(lambda: alive(server)["states"] == 0)


def test_a_thousand_streams_that_are_dropped_leave_nothing(server):
    """States, generators, threads, descriptors."""
    Stream(server, "shared", length=3).rest()
    eventually(lambda: alive(server)["states"] == 0)
    before = alive(server)
    front = descriptors(server.process.pid)
    dice = random.Random(7)
    open_ones = []
    for number in range(1000):
        model = dice.choice(["shared", "shared", "generated"])
        open_ones.append(Stream(server, model, length=LONG, seconds=0.0002))
        if number % 3 == 0:
            dice.choice(open_ones).socket.setblocking(False)
        if len(open_ones) > 12:
            open_ones.pop(dice.randrange(len(open_ones))).drop()
    for stream in open_ones:
        stream.drop()
    eventually(lambda: alive(server)["states"] == 0 and alive(server, "generated") == 0)
    eventually(lambda: alive(server)["descriptors"] <= before["descriptors"] + 1)
    eventually(lambda: descriptors(server.process.pid) <= front + 1)
    assert alive(server)["threads"] <= before["threads"]
    eventually(lambda: server.metric("forebay_in_flight", endpoint="shared") == 0)


def test_a_deadline_ends_a_stream_and_frees_its_seat(server):
    late = server.client.post(
        "/models/shared", json={"length": LONG, "seconds": 0.01}, headers={"x-request-timeout-ms": "300"}
    )
    assert "deadline_exceeded" in late.text
    eventually(lambda: alive(server)["states"] == 0)


def test_a_finish_that_awaits_is_not_interrupted_though_nobody_waits(server, tmp_path):
    note = tmp_path / "note"
    note.touch()
    first, second = (Stream(server, "shared-async", length=LONG, seconds=0.001, tidies=str(note)) for _ in range(2))
    assert first.next()[0] == second.next()[0] == 1
    first.drop()
    eventually(lambda: "begun" in note.read_text())
    second.drop()  # while the first one is finished
    eventually(lambda: len(note.read_text().split()) == 4)
    assert note.read_text().split() == ["begun", "ended"] * 2
    late = {"length": LONG, "seconds": 0.01, "tidies": str(note)}
    for timeout_s in timeouts(0.3):
        time_given = {"x-request-timeout-ms": f"{1000 * timeout_s:.0f}"}
        if "[1," in server.client.post("/models/shared-async", json=late, headers=time_given).text:
            break
    else:
        pytest.fail("no call was late once it had begun")
    eventually(lambda: len(note.read_text().split()) >= 6 and note.read_text().endswith("ended "))
    told = note.read_text().split()
    assert told == ["begun", "ended"] * (len(told) // 2)


@pytest.mark.parametrize("seconds", [0.001, 60.0])
def test_an_async_generator_that_needs_long_to_end_goes_on_in_a_worker_with_nothing_to_do(server, tmp_path, seconds):
    note = tmp_path / "note"
    for others in (False, True):
        note.write_text("")
        stream = Stream(server, "generated-async", length=LONG, seconds=seconds, tidies=str(note))
        assert stream.next() == [1, 1]
        stream.drop()
        eventually(lambda: "begun" in note.read_text())
        if others:
            assert Stream(server, "generated-async", length=2).rest() == [[1, 1], [2, 1]]
        eventually(lambda: len(note.read_text().split()) == 2)
        assert note.read_text().split() == ["begun", "ended"]


def test_streams_of_a_worker_that_dies_end_or_begin_again(launch, tmp_path):
    server = launch("streams.py:Shared", "--worker-kind", "process", "--timeout-ms", "600000")
    first = Stream(server, "shared", length=LONG, seconds=0.001)
    assert first.next()[0] == 1
    os.kill(alive(server)["pid"], signal.SIGKILL)
    events = first.rest()
    assert "died" in events[-1]["error"]["message"]
    note = tmp_path / "died"
    again = Stream(server, "shared", length=2, how="exit at first", note=str(note))
    assert [number for number, _ in again.rest()] == [1, 2]  # it had sent nothing, and was handed on
    assert note.exists()


@pytest.fixture(scope="module", params=["process", "thread"])
def graphs(request, launch):
    found = launch("streamed_graphs.py", "--worker-kind", request.param, "--timeout-ms", "600000")
    found.kind = request.param
    return found


@pytest.mark.parametrize("graph", ["twice", "generated", "generated-async"])
def test_the_last_node_of_a_graph_streams(graphs, graph):
    """Its seats are those of a model that is served by itself."""
    first = Stream(graphs, graph, 10 * LONG)
    assert first.next() == 1
    assert Stream(graphs, graph, 3).rest() == [1, 2, 3, 4, 5, 6]  # a node before it doubles
    assert first.next() == 2
    first.drop()
    wrong = graphs.client.post(f"/models/{graph}", json="many")
    assert wrong.status_code == 422
    assert "integer" in wrong.text or "int" in wrong.text


def test_a_stream_at_the_end_of_a_graph_fails_for_itself(graphs):
    other = Stream(graphs, "numbers", 10 * LONG)
    assert other.next() == 1
    assert Stream(graphs, "numbers", 7).rest()[:3] == [1, 2, 3]
    assert Stream(graphs, "numbers", 7).rest()[-1]["error"]["message"] == "three are enough"
    assert graphs.client.post("/models/numbers", json=-1).status_code == 400
    assert other.next() == 2
    other.drop()


def test_streams_of_a_graph_that_are_dropped_leave_nothing(graphs):
    Stream(graphs, "numbers", 3).rest()
    descriptors_before = descriptors(graphs.process.pid)
    dice = random.Random(5)
    open_ones = []
    for _ in range(300):
        open_ones.append(Stream(graphs, dice.choice(["numbers", "twice", "generated"]), 10 * LONG))
        if len(open_ones) > 12:
            open_ones.pop(dice.randrange(len(open_ones))).drop()
    for stream in open_ones:
        stream.drop()
    names = ["numbers", "numbers/numbers", "twice", "twice/numbers", "generated", "generated/generated"]
    eventually(lambda: not any(graphs.metric("forebay_in_flight", endpoint=name) for name in names))
    eventually(lambda: descriptors(graphs.process.pid) <= descriptors_before + 1)
    if graphs.kind == "thread":
        assert graphs.client.post("/models/alive", json=0).json() == 0
    assert Stream(graphs, "numbers", 2).rest() == [1, 2]
