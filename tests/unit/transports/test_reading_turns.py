# SPDX-License-Identifier: Apache-2.0
"""However many clients send large bodies, a turn of the loop reads a few of them."""  # F72

import asyncio

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.transports.body_reader import TURN_BYTES
from forebay.transports.reading_turns import AT_ONCE, ReadingTurns
from forebay.workers.memory.landing import HERE, Landing

BODY = bytes(3 * TURN_BYTES)
CLIENTS = 5


@pytest.fixture
def door():
    door = Door()
    door.routes[b"/models/alpha"].places = HERE
    yield door
    door.close()


def turn(loop):
    """Lets the loop do what it has to do in one turn."""
    loop.call_soon(loop.stop)
    loop.run_forever()


@pytest.mark.linux
def test_of_many_that_send_large_bodies_few_are_read_in_a_turn_and_all_in_the_end(door):
    clients = [door.connect() for _ in range(CLIENTS)]
    sent = request("alpha", BODY)
    left = {}
    for client in clients:
        client.connection.data_received(sent[:1000])
        left[client] = client.transport.receive(sent[1000:])
    assert all(client.transport.is_paused for client in clients)
    turns = 0
    while any(left.values()):
        turn(door.loop)
        reading = [client for client in clients if not client.transport.is_paused and left[client]]
        assert len(reading) <= AT_ONCE
        for client in reading:
            left[client] = client.transport.receive(left[client])
        turns += 1
        assert turns < 100
    for _ in range(100):  # the elements of long bodies are counted, in turns as well
        turn(door.loop)
    assert [client.answers for client in clients] == [[(200, b"alpha " + BODY)]] * CLIENTS


@pytest.mark.linux
def test_a_request_whose_first_byte_came_with_the_body_before_it_is_read(door, monkeypatch):  # F72
    early = []
    byte_after = Landing.byte_after
    monkeypatch.setattr(Landing, "byte_after", lambda self: (early.append(byte_after(self)), early[-1])[1])
    client = door.connect()
    bodies = [bytes([number]) * 200_000 for number in range(4)]
    first, *others = [request("alpha", body) for body in bodies]
    client.connection.data_received(first[:1000])
    left = first[1000:] + b"".join(others)
    for _ in range(100):
        if not client.transport.is_paused:
            left = client.transport.receive(left)
        turn(door.loop)
    assert client.answers == [(200, b"alpha " + body) for body in bodies]
    assert early == [b"P"] * 3


@pytest.mark.linux
def test_a_byte_behind_a_body_that_begins_no_request_is_refused_at_once(door):  # F72
    client = door.connect()
    sent = request("alpha", bytes(200_000)) + b'"'
    client.connection.data_received(sent[:1000])
    left = sent[1000:]
    for _ in range(100):
        if left and not client.transport.is_paused:
            left = client.transport.receive(left)
        turn(door.loop)
    assert [status for status, _ in client.answers] == [200, 400]


def test_who_has_waited_longest_is_next():
    loop = asyncio.new_event_loop()
    turns, read = ReadingTurns(loop), []

    def reads(name):
        read.append(name)
        if read.count(name) < 3:
            turns.wait(lambda: reads(name))

    for name in "abcd":
        turns.wait(lambda name=name: reads(name))
    counts = []
    while len(read) < 12:
        turn(loop)
        counts.append(len(read))
    loop.close()
    assert "".join(read) == "abcd" * 3
    assert counts == [2, 4, 6, 8, 10, 12]


def test_what_one_raises_takes_no_turn_from_the_others():
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda _loop, _context: None)
    turns, read = ReadingTurns(loop), []

    def fails():
        raise RuntimeError

    for read_on in (fails, *(lambda name=name: read.append(name) for name in "abc")):
        turns.wait(read_on)
    for _ in range(5):
        turn(loop)
    loop.close()
    assert "".join(read) == "abc"
