# SPDX-License-Identifier: Apache-2.0
"""Requests that are submitted and answered together get what each would get by itself."""

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.errors import InternalError, Unavailable
from forebay.transports.http.connection_state import DUE, GONE, IDLE
from forebay.types.call import Failure, ReplyToAll

WHOLE = request("alpha", b"[1]")


@pytest.fixture
def doors():
    opened = []

    def make(**more):
        opened.append(Door(waits=True, **more))
        opened[-1].connect().send(WHOLE)  # its head is remembered
        opened[-1].alpha.asked.clear()
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def arrive(door, count):
    """So many clients send a request in this turn."""
    return [door.connect().send(WHOLE, brings=False) for _ in range(count)]


def answer_all(requests, outcomes):
    """As an endpoint does."""
    for one, outcome in requests[0].reply.to_all(requests, outcomes):
        one.reply(one, outcome)


def test_what_arrives_in_a_turn_is_submitted_at_its_end_and_answered_together(doors):
    door = doors()
    clients = arrive(door, 3)
    assert door.alpha.asked == []
    assert [each.state for each in clients] == [DUE] * 3
    door.bring()
    asked = door.alpha.asked
    assert [(each.body, each.origin) for each in asked] == [(b"[1]", client.connection) for client in clients]
    answer_all(asked, [b"a", b"b" * 40_000, b"c"])
    assert [each.answers for each in clients] == [[(200, b"a")], [(200, b"b" * 40_000)], [(200, b"c")]]
    again = arrive(door, 3)
    door.bring()
    answer_all(asked[3:], [b"d"] * 3)
    assert [each.answers for each in again] == [[(200, b"d")]] * 3
    assert all(each.state is IDLE for each in clients + again)


def test_who_leaves_before_the_turn_ends_is_called_off(doors):
    door = doors()
    first, second, third = arrive(door, 3)
    second.connection.connection_lost(None)
    assert door.alpha.gone == [door.alpha.asked[1]]
    assert second.state is GONE
    third.connection.abort()
    door.bring()
    assert len(door.alpha.asked) == 3
    assert len(door.alpha.gone) == 2
    answer_all(door.alpha.asked[:1], [b"a"])
    assert first.answers == [(200, b"a")]
    door.clients = [first]


def test_of_more_than_there_is_room_for_the_first_are_submitted_together_and_the_others_refused(doors):  # F69
    door = doors()
    door.alpha.room = 3
    submitted = []
    submit_all = door.alpha.submit_all
    door.alpha.submit_all = lambda requests, now: (submitted.append(len(requests)), submit_all(requests, now))
    clients = arrive(door, 5)
    door.bring()
    assert submitted == [3]
    assert [each.statuses for each in clients] == [[]] * 3 + [[429]] * 2
    answer_all(door.alpha.asked, [b"a"] * 3)
    assert [each.state for each in clients] == [IDLE] * 5


@pytest.mark.parametrize("aborts", [False, True])
def test_who_leaves_a_full_queue_before_the_turn_ends_is_counted_and_not_told(doors, aborts):
    door = doors()
    door.alpha.room = 0
    gone, other = arrive(door, 2)
    if aborts:
        gone.connection.abort()
    else:
        gone.transport.is_closed = True
        gone.connection.connection_lost(None)
    door.bring()
    assert gone.transport.written == b""
    assert gone.state is GONE
    assert other.statuses == [429]
    assert len(door.alpha.rejected) == 2
    door.clients = [other]


def test_who_leaves_as_the_model_takes_nothing_more_is_not_told(doors):
    door = doors()
    gone, other = arrive(door, 2)
    door.alpha.submit = lambda request: request.reply(request, Failure(Unavailable("the server stops")))
    gone.transport.is_closed = True
    gone.connection.connection_lost(None)
    assert gone.transport.written == b""
    assert gone.state is GONE
    assert other.statuses == [503]
    door.clients = [other]


@pytest.mark.parametrize("brings", [False, True])
def test_a_client_that_sends_more_is_answered_by_itself_and_in_order(doors, brings):
    door = doors()
    alone, other = arrive(door, 2)
    alone.send(request("beta", b"2"), WHOLE, brings=brings)
    door.bring()
    first, second = door.alpha.asked
    assert not isinstance(first.reply, ReplyToAll)
    assert isinstance(second.reply, ReplyToAll)
    answer_all([second], [b"b"])
    first.reply(first, b"a")
    door.beta.answer()
    door.alpha.answer()
    assert [status for status, _ in alone.answers] == [200] * 3
    assert alone.answers[0] == (200, b"a")
    assert other.answers == [(200, b"b")]
    assert alone.state is other.state is IDLE


def test_a_queue_without_room_for_all_takes_those_who_came_first(doors):
    door = doors()
    door.alpha.room = 2
    clients = arrive(door, 4)
    door.bring()
    door.lane.refusals.stop()  # on a busy machine the first may cost so much that the second has to wait
    assert [each.origin for each in door.alpha.asked] == [each.connection for each in clients[:2]]
    assert [each.statuses for each in clients] == [[], [], [429], [429]]
    assert [each.code for each in door.alpha.rejected] == [each.code for each in door.alpha.rejected[:1]] * 2
    assert all(not client.connection.arrived for client in clients)


def test_answers_of_other_kinds_and_a_client_that_cannot_be_written_to_harm_nobody(doors, caplog):
    door = doors()
    clients = arrive(door, 4)
    door.bring()
    asked = list(door.alpha.asked)

    def raises(_data):
        raise RuntimeError

    clients[1].connection.send = raises
    asked[2].id = "named-in-the-log"
    asked[3].reply(asked[3], Failure(InternalError("x")))
    answer_all(asked[:3], [b"a", b"b", b"c"])
    assert clients[0].answers == [(200, b"a")]
    assert clients[1].answers == []
    assert "failed to deliver an answer" in caplog.text
    assert clients[2].answers == [(200, b"c")]
    assert b"x-request-id: named-in-the-log\r\n" in clients[2].transport.written
    assert clients[3].statuses == [500]


def test_answers_of_a_server_that_stops_close_their_connections(doors):
    door = doors()
    clients = arrive(door, 2)
    door.bring()
    door.lane.drain()
    answer_all(list(door.alpha.asked), [b"a", b"b"])
    assert [each.answers for each in clients] == [[(200, b"a")], [(200, b"b")]]
    assert all(b"connection: close\r\n" in each.transport.written and each.transport.is_closed for each in clients)


def test_a_head_that_differs_in_one_byte_is_read_anew(doors):
    door = doors()
    start = WHOLE.index(b"\r\n\r\n") + 4
    door.connect().send(WHOLE[:start] + b"[2]")
    assert [each.body for each in door.alpha.asked] == [b"[2]"]
    for at in range(start):
        for byte in {WHOLE[at] - 1, WHOLE[at] + 1}:
            other = WHOLE[:at] + bytes([byte]) + WHOLE[at + 1 :]
            client = door.connect().send(other, brings=False)
            assert not client.connection.arrived, (at, byte)
