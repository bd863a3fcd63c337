# SPDX-License-Identifier: Apache-2.0
"""What connections of the HTTP port hold: heads, bodies and unread answers count against one budget."""

import asyncio
import logging

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.protocols.native import Contract
from forebay.server.byte_budget import GRACE_S, SMALL_BYTES
from forebay.server.served import StandIn
from forebay.transports.http.asgi_inference import Predict
from forebay.transports.http.connection_state import GONE, IDLE, LINGER
from forebay.transports.http.forms_and_gzip import Staging
from forebay.transports.http.route import Route

KIB = 1024


@pytest.fixture
def doors():
    opened = []

    def make(**more):
        opened.append(Door(**more))
        return opened[-1]

    yield make
    for each in opened:
        held = each.lane.byte_budget
        each.close()
        assert (held.held_bytes, held.unread_bytes, held.arriving, held.unread) == (0, 0, {}, {})


@pytest.fixture
def clock(monkeypatch):
    class Clock:
        now = 1000.0

        @staticmethod
        def of(door):
            door.lane.byte_budget.clock = lambda: Clock.now

    return Clock


def test_a_head_with_too_many_lines_is_refused_before_keys_are_checked(doors):  # F77
    door = doors(api_keys=("k1",))
    client = door.connect().send(b"POST /models/alpha HTTP/1.1\r\n", *[b"a:b\r\n" * 64] * 2)
    assert client.statuses == []
    assert len(client.connection.headers) == 127  # the last one may go on
    client.send(b"a:b\r\n" * 100)
    assert client.statuses == [431]
    assert b"more than 128 headers (--max-head-lines)" in client.answers[0][1]
    assert client.state is LINGER
    assert door.connect().send(b"GET / HTTP/1.1\r\n" + b"a:b\r\n" * 129 + b"\r\n").statuses == [431]
    few = doors(max_head_lines=3)
    assert few.connect().send(request("alpha", b"1", "a: b")).statuses == [200]
    assert few.connect().send(request("alpha", b"1", "a: b", "c: d")).statuses == [431]


def test_trailers_are_no_headers(doors):  # F77: they are not kept
    client = doors(max_head_lines=3).connect()
    client.send(request("alpha", b"", "transfer-encoding: chunked", length=False))
    assert client.send(b"1\r\n1\r\n0\r\n" + b"a:b\r\n" * 200 + b"\r\n").statuses == [200]


def test_heads_that_do_not_end_count_with_the_objects_made_of_them(doors):  # F77
    door = doors(max_buffered_bytes=400 * KIB)
    budget = door.lane.byte_budget
    begun = b"GET / HTTP/1.1\r\n" + b"".join(b"name-%d: %b\r\n" % (index, b"x" * 250) for index in range(100))
    heads = [door.connect().send(begun) for _ in range(30)]
    assert budget.held_bytes <= budget.max_bytes
    assert all(client.connection.held_bytes >= len(begun) + 100 * 100 for client in heads if not client.statuses)
    refused = [client for client in heads if client.statuses]
    assert {*map(len, [client.statuses for client in refused])} == {1}
    assert {client.statuses[0] for client in refused} == {503}
    assert 18 <= len(refused) < 30
    assert door.connect().send(request("alpha", b"1")).statuses == [200]
    one_line = doors().connect().send(b"GET /", *[b"x" * 20_000] * 3)
    assert one_line.connection.held_bytes > 60_000


def test_an_idle_connection_holds_no_head(doors):  # F77
    door = doors()
    long = [f"name-{index}: {'x' * 400}" for index in range(100)]
    for target in ("/models/alpha", "/other"):
        client = door.connect().send(request("", b"1", *long, target=target))
        door.turn()
        assert client.state is IDLE
        door.pass_seconds(3)
        connection = client.connection
        assert (connection.headers, connection.scope, connection.cycle, connection._reading) == (None,) * 4
        assert client.send(request("alpha", b"1")).statuses[-1] == 200


def test_bodies_count_until_they_are_answered(doors):  # F78: those that wait for a worker were forgotten
    door = doors(waits=True, max_buffered_bytes=400 * KIB)
    budget = door.lane.byte_budget
    whole = request("alpha", bytes(100 * KIB))
    clients = [door.connect().send(whole[:50_000], whole[50_000:]) for _ in range(2)]
    clients += [door.connect().send(whole)]
    assert budget.held_bytes == 3 * 100 * KIB
    late = door.connect().send(whole[: 60 * KIB])
    assert budget.held_bytes > 3 * 100 * KIB
    late.send(whole[60 * KIB : -10])
    assert late.statuses == []
    more = door.connect().send(whole[: 50 * KIB])
    assert [more.statuses, late.statuses] == [[], [503]]
    small = door.connect().send(request("alpha", b"1"))  # clients that hold little are not hurt
    for asked in door.alpha.asked:
        asked.reply(asked, b"1")
    assert small.statuses == [200]
    assert [client.statuses for client in clients] == [[200]] * 3
    more.send(whole[50 * KIB :])
    door.alpha.answer()
    assert more.statuses == [200]
    assert budget.held_bytes == 0


def test_bodies_of_the_slow_lane_count_until_they_are_answered(doors):  # F78
    async def slow(scope, receive, send):
        while (await receive())["more_body"]:
            pass
        seen.append(door.lane.byte_budget.held_bytes)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    seen = []
    door = doors(app=slow)
    whole = request("", bytes(100 * KIB), target="/other")
    client = door.connect().send(whole[:50_000])
    door.turn()
    client.send(whole[50_000:])
    door.turn()
    assert client.statuses == [200]
    assert seen[0] >= 100 * KIB
    assert door.lane.byte_budget.held_bytes == 0
    both = door.connect().send(whole[:50_000], whole[50_000:] + request("alpha", b"1"))
    door.turn()
    assert both.statuses == [200, 200]


def test_what_a_pipelining_client_holds_is_released_with_each_answer(doors):
    door = doors(waits=True)
    budget = door.lane.byte_budget
    whole = request("alpha", bytes(60 * KIB))
    client = door.connect().send(whole[:-1], whole[-1:])
    for count in range(1, 5):
        client.send(whole[:-1], whole[-1:])  # another one waits behind it
        assert budget.held_bytes == 2 * 60 * KIB
        door.alpha.answer()
        assert len(client.statuses) == count
    door.alpha.answer()
    assert budget.held_bytes == 0
    client.send(request("alpha", bytes(1000)) * 100)  # what was not parsed yet, behind an answer that is due
    assert budget.held_bytes > 90 * KIB
    while len(client.statuses) < 105:
        door.alpha.answer()
        door.turn()
    assert budget.held_bytes == 0


def test_clients_that_do_not_read_are_cut_off_and_those_that_read_are_not(doors, clock, caplog):  # F78
    door = doors(max_buffered_bytes=1000 * KIB)
    clock.of(door)
    budget = door.lane.byte_budget
    lazy = [door.connect().send(request("alpha", b"1")).leave_unread(100 * KIB) for _ in range(6)]
    clock.now += 10
    reader = door.connect().send(request("alpha", b"1")).leave_unread(230 * KIB)
    clock.now += GRACE_S
    reader.leave_unread(150 * KIB)
    reader.connection.count_unread()
    with caplog.at_level(logging.WARNING, "forebay.refusals"):
        for _ in range(5):
            door.connect().send(request("alpha", b"1")).leave_unread(150 * KIB)  # their turn to read has just come
        door.turn()
        assert budget.held_bytes <= budget.max_bytes
        assert [client.state for client in lazy].count(GONE) >= 5
        assert all(client.transport.is_closed == (client.state is GONE) for client in lazy)
    assert [each.state for each in door.clients[6:]] == [IDLE] * 6
    text = "was refused: the client does not read 102400 bytes of answers, and the server holds more than 1024000"
    told = [line for line in caplog.messages if text in line]
    assert len(told) == 1
    assert told[0].startswith("client 192.0.2.1:7 ")
    assert door.connect().send(request("alpha", b"2")).statuses == [200]
    body = request("alpha", bytes(100 * KIB))
    assert reader.leave_unread(0).send(body[:1000], body[1000:]).statuses == [200, 200]


def test_a_client_that_reads_is_not_judged_by_what_was_unread_at_the_last_look(doors, clock):  # F78
    door = doors(max_buffered_bytes=1000 * KIB)
    clock.of(door)
    reader = door.connect().send(request("alpha", b"1")).leave_unread(900 * KIB)
    clock.now += 2 * GRACE_S
    reader.transport.unread = 200 * KIB
    body = request("alpha", bytes(300 * KIB))
    assert door.connect().send(body[: 200 * KIB], body[200 * KIB :]).statuses == [200]
    assert reader.state is IDLE


def test_a_long_body_counts_no_longer_once_it_came_to_a_full_queue(doors):  # F78
    door = doors(max_elements=20, max_tensor_elements=20)
    client = door.connect().send(request("alpha", b"[%b1]" % bytes(100 * KIB).replace(b"\0", b" ")))
    door.alpha.room = 0  # while its elements are counted
    while not client.answers:
        door.turn()
    assert (client.statuses, client.state) == ([429], IDLE)
    assert door.lane.byte_budget.held_bytes == 0


def test_unread_answers_never_exceed_the_budget(doors, clock):  # F78: not even while nobody's pace is known
    door = doors(max_buffered_bytes=1000 * KIB)
    clock.of(door)
    budget = door.lane.byte_budget
    for _ in range(50):
        door.connect().send(request("alpha", b"1")).leave_unread(100 * KIB)
        door.turn()
        clock.now += GRACE_S / 100
        assert budget.unread_bytes <= budget.max_bytes
    assert [client.state for client in door.clients[-10:]] == [IDLE] * 10


def test_a_body_is_refused_only_if_no_unread_answer_can_make_room(doors, clock):  # F78
    door = doors(max_buffered_bytes=1000 * KIB)
    clock.of(door)
    lazy = [door.connect().send(request("alpha", b"1")).leave_unread(100 * KIB) for _ in range(10)]
    clock.now += 1
    body = request("alpha", bytes(200 * KIB))
    sender = door.connect().send(body[: 100 * KIB], body[100 * KIB :])
    assert sender.statuses == [200]
    assert [client.state for client in lazy].count(GONE) == 2


def test_a_client_that_does_not_read_is_found_by_the_sweep(doors, clock):
    door = doors(max_buffered_bytes=1000 * KIB)
    clock.of(door)
    lazy = [door.connect().send(request("alpha", b"1")).leave_unread(99 * KIB) for _ in range(10)]
    clock.now += 1
    lazy[0].transport.unread += 50 * KIB  # a stream goes on
    door.pass_seconds(2)
    assert [client.state for client in lazy].count(GONE) == 1


def test_one_connection_has_a_budget_of_its_own(doors):
    door = doors(max_connection_bytes=100 * KIB, max_body_bytes=80 * KIB)
    body = request("alpha", bytes(80 * KIB))
    client = door.connect().send(request("alpha", b"1")).leave_unread(50 * KIB)
    client.send(body[:-100])
    assert client.statuses == [200, 503]
    assert b"--max-connection-bytes" in client.answers[1][1]
    large = doors(max_connection_bytes=1, max_body_bytes=80 * KIB).connect()
    assert large.send(body[:1000], body[1000:]).statuses == [200]  # one body is always allowed


def test_what_is_small_has_no_account(doors):
    door = doors(waits=True)
    client = door.connect().send(request("alpha", bytes(SMALL_BYTES // 8)))
    assert door.lane.byte_budget.held_bytes == 0
    assert client.connection._body._account is None


def test_bodies_that_come_over_another_server_count_until_they_are_answered(doors):  # F78
    door = doors(waits=True, max_buffered_bytes=100 * KIB)
    budget = door.lane.byte_budget
    staging = Staging(door.lane.config, budget)
    route = Route(StandIn(door.alpha, Contract()), 1 << 20, (), staging=staging)
    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")], "query_string": b""}

    async def ask(size, answers):
        sent, messages = [], [{"type": "http.request", "body": bytes(size // 2), "more_body": left} for left in (1, 0)]

        async def receive():
            return messages.pop(0) if messages else await asyncio.Future()

        async def send(message):
            sent.append(message)

        asking = asyncio.ensure_future(Predict(route)({**scope, "path": "/"}, receive, send))
        await asyncio.sleep(0)
        held = budget.staged_bytes
        if answers:
            door.alpha.answer()
        await asking
        return sent[0]["status"], held

    assert door.loop.run_until_complete(ask(60 * KIB, answers=True)) == (200, 60 * KIB)
    assert budget.staged_bytes == 0
    assert door.loop.run_until_complete(ask(120 * KIB, answers=False))[0] == 503
    assert budget.staged_bytes == 0
