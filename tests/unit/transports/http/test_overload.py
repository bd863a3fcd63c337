# SPDX-License-Identifier: Apache-2.0
"""A full queue: what a request is told late is what it would be told at once, in its turn, and it holds nothing."""

import gc
import random
import re
import weakref

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.errors import QueueFull
from forebay.protocols.native import Contract
from forebay.transports.http.connection_state import (
    BODY,
    BODY_DUE,
    DUE,
    GONE,
    IDLE,
    LINGER,
    MAX_AWAITED_BYTES,
    REFUSED,
)
from forebay.transports.refusal_pacing import RefusalLine
from forebay.types.call import Failure

ID = re.compile(rb"[0-9a-f]{8}-[0-9a-f]{1,8}")


class Line(RefusalLine):
    """Tells nobody until the test does."""

    def __init__(self, loop, tell_all):
        super().__init__(loop, tell_all)
        self.waiting = []

    def refuse_all(self, clients):
        self.waiting += clients

    def tell(self, count=1_000_000):
        while self.waiting and count:
            group = self.waiting[:count]
            del self.waiting[:count]
            self._tell_all(group)
            count -= len(group)

    def stop(self):
        self.tell()


@pytest.fixture
def doors():
    opened = []

    def make(*, room=1, **more):
        door = Door(waits=True, **more)
        door.alpha.room = room
        door.lane.refusals = Line(door.loop, door.lane.same_turn.tell_refused)
        opened.append(door)
        return door

    yield make
    for each in opened:
        each.close()


def refuse(asked):
    """Refuses a request as an endpoint does: the error knows the frames, which know the request."""
    try:
        raise QueueFull("there is no room")
    except QueueFull as error:
        asked.reply(asked, Failure(error))


def test_nothing_is_kept_of_a_client_that_leaves_before_it_is_told(doors):
    door = doors(room=100)
    client = door.connect().send(request("alpha", b"x"))
    refuse(door.alpha.asked.pop())
    gone = weakref.ref(client.connection)
    client.connection.connection_lost(None)
    door.lane.refusals.tell()
    door.alpha.gone.clear()
    door.clients.remove(client)
    del client
    gc.collect()
    assert gone() is None


def without_ids(answer):
    return ID.sub(b"ID", answer)


def fill(door):
    client = door.connect().send(request("alpha", b"first"))
    assert len(door.alpha.asked) == 1
    return client


def test_a_late_refusal_is_the_answer_that_a_client_with_its_own_id_gets(doors):  # F69
    door = doors()
    fill(door)
    plain, named = door.connect(), door.connect()
    for _ in range(2):  # read by the parser, then remembered
        plain.send(request("alpha", b"[1]"))
        named.send(request("alpha", b"[1]", "x-request-id: 00000000-00000000"))
        assert plain.transport.written == named.transport.written == b""
        assert plain.state is named.state is DUE
        door.lane.refusals.tell()
        assert plain.statuses == named.statuses == [429]
        assert len(set(ID.findall(plain.transport.written))) == 1  # the id of the header is that of the body
        assert without_ids(plain.transport.written) == without_ids(named.transport.written)
        assert b"retry-after: 1\r\n" in plain.transport.written
        plain.transport.written = named.transport.written = b""
        assert plain.state is named.state is IDLE
    assert len(door.alpha.asked) == 1
    assert [type(each) for each in door.alpha.rejected] == [QueueFull] * 4


def when(answer):
    seconds, milliseconds = re.findall(rb"\r\nretry-after: (\d+)\r\nretry-after-ms: (\d+)\r\n", answer)[0]
    assert int(seconds) == -(-int(milliseconds) // 1000)
    return int(milliseconds)


def test_each_client_is_told_when_it_should_try_again_less_the_time_in_line(doors, monkeypatch):  # F69
    door = doors()
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    door.alpha.ticket, door.alpha.step_s = now + 1.0, 0.25
    fill(door)
    many = [door.connect().send(request("alpha", b"1")) for _ in range(3)]
    named = door.connect().send(request("alpha", b"1", "x-request-id: mine"))
    now += 1.375  # they have waited in line
    door.lane.refusals.tell()
    assert [when(one.transport.written) for one in many] == [1, 125, 375]
    assert when(named.transport.written) == 625


def test_every_refusal_has_an_id_of_its_own(doors):
    door = doors()
    fill(door)
    clients = [door.connect().send(request("alpha", b"1")) for _ in range(50)]
    door.lane.refusals.tell()
    ids = {ID.findall(client.transport.written)[0] for client in clients}
    assert len(ids) == 50


def test_those_who_are_told_together_are_told_each_by_its_own_head(doors, caplog):  # F69
    door = doors()
    fill(door)
    clients = [door.connect() for _ in range(6)]
    others = [door.connect().send(request("alpha", b"1", "x-other: 1")) for _ in range(2)]
    named = door.connect().send(request("alpha", b"1", "x-request-id: mine"))
    closing = door.connect().send(request("alpha", b"1", "connection: close"))
    pipelining = door.connect().send(request("alpha", b"1") + request("beta", b"2"))
    door.beta.waits = False
    for client in clients:
        client.send(request("alpha", b"1"))
    door.lane.refusals.tell()
    assert len(door.alpha.rejected) == 11
    assert all(client.statuses == [429] and client.state is IDLE for client in [*clients, *others, named])
    assert b"x-request-id: mine\r\n" in named.transport.written
    assert b"connection: close\r\n" in closing.transport.written
    assert closing.state is GONE
    assert [status for status, _ in pipelining.answers] == [429, 200]
    door.lane.stop()
    told = [record.getMessage() for record in caplog.records if record.name == "forebay.refusals"]
    assert len(told) == 2
    assert told[1].startswith("10 more were refused")


def test_answers_leave_in_order_also_behind_a_late_refusal(doors):
    door = doors()
    fill(door)
    client = door.connect().send(request("alpha", b"1") + request("beta", b"2") + request("alpha", b"3"))
    assert door.beta.asked == []  # its turn has not come
    door.lane.refusals.tell()
    door.beta.answer()
    door.lane.refusals.tell()
    assert [status for status, _ in client.answers] == [429, 200, 429]


def test_a_client_that_leaves_while_it_waits_is_counted_and_not_written_to(doors):
    door = doors()
    fill(door)
    client = door.connect().send(request("alpha", b"1"))
    client.connection.connection_lost(None)
    door.clients.remove(client)
    door.lane.refusals.tell()
    assert client.transport.written == b""
    assert client.state is GONE
    assert [type(each) for each in door.alpha.rejected] == [QueueFull]


def head_only(length, *lines):
    whole = request("alpha", b"x" * length, *lines)
    return whole[: -length or None]


def test_a_large_body_for_a_full_queue_is_refused_at_its_head(doors):  # F69
    door = doors()
    fill(door)
    client = door.connect().send(head_only(MAX_AWAITED_BYTES + 1))
    assert client.state is REFUSED
    assert client.transport.written == b""  # in its turn
    client.send(b"x" * MAX_AWAITED_BYTES)
    assert door.lane.byte_budget.held_bytes == 0  # nobody keeps what still comes
    door.lane.refusals.tell()
    assert client.statuses == [429]
    assert b"connection: close\r\n" in client.transport.written
    assert b"retry-after: 1\r\n" in client.transport.written
    assert client.state is LINGER
    client.send(b"x")
    assert [type(each) for each in door.alpha.rejected] == [QueueFull]


@pytest.mark.parametrize("length", [1, MAX_AWAITED_BYTES + 1])
def test_a_client_that_asks_first_is_not_told_to_send_what_is_refused(doors, length):  # F69
    door = doors()
    fill(door)
    client = door.connect().send(head_only(length, "expect: 100-continue"))
    door.lane.refusals.tell()
    assert client.transport.written.startswith(b"HTTP/1.1 429 ")
    assert client.state is LINGER
    assert door.lane.refusals.waiting == []


def test_a_body_that_may_come_at_once_is_awaited_so_that_the_connection_goes_on(doors):
    door = doors()
    fill(door)
    client = door.connect().send(head_only(MAX_AWAITED_BYTES), b"x" * (MAX_AWAITED_BYTES - 1))
    assert client.state is BODY
    client.send(b"x")
    door.lane.refusals.tell()
    assert client.statuses == [429]
    assert client.state is IDLE


def test_a_large_body_behind_another_request_is_judged_when_its_turn_comes(doors):
    door = doors()
    first = door.connect().send(request("alpha", b"first") + head_only(MAX_AWAITED_BYTES + 1))
    assert door.alpha.is_full()
    assert first.state is BODY_DUE


def test_what_fails_later_for_want_of_room_waits_in_line_too_with_its_own_sentence(doors):
    door = doors(room=10)
    client = door.connect().send(request("alpha", b"1"))
    submitted = door.alpha.asked[-1]
    submitted.reply(submitted, Failure(QueueFull("come back later")))
    assert client.transport.written == b""
    door.lane.refusals.tell()
    assert client.statuses == [429]
    assert b"come back later" in client.transport.written


def test_an_array_is_not_cut_for_a_queue_that_is_full(doors):
    door = doors(contract=Contract(batchable=True))
    door.alpha.room = 0
    client = door.connect().send(request("alpha", b"no array at all"))
    door.lane.refusals.tell()
    assert client.statuses == [429]


def test_a_draining_server_tells_all_who_wait_and_closes(doors):
    door = doors()
    fill(door)
    client = door.connect().send(request("alpha", b"1"))
    door.lane.drain()
    assert client.statuses == [429]
    assert b"connection: close" in client.transport.written


def test_any_mixture_is_answered_as_one_by_one(doors):  # F69
    draw = random.Random(7)
    for _ in range(40):
        door = doors(room=draw.randrange(4))
        clients = [door.connect() for _ in range(4)]
        expected = {client: [] for client in clients}
        for step in range(draw.randrange(1, 40)):
            client = draw.choice(clients)
            kind = draw.random()
            if kind < 0.6 and client.state is IDLE:
                head = ("x-request-id: 00000000-1",) if draw.random() < 0.3 else ()
                is_full = door.alpha.is_full()
                client.send(request("alpha", b"%d" % step, *head))
                expected[client].append((429, None) if is_full else (200, b"alpha %d" % step))
            elif kind < 0.8:
                door.lane.refusals.tell(draw.randrange(3))
            elif door.alpha.asked:
                door.alpha.answer()
                door.alpha.asked.pop()
        while door.alpha.asked:
            door.alpha.answer()
            door.alpha.asked.pop()
        door.lane.refusals.tell()
        for client in clients:
            assert client.state is IDLE
            found = [(status, body if status == 200 else None) for status, body in client.answers]
            assert found == expected[client]
