# SPDX-License-Identifier: Apache-2.0
"""The elements of long bodies are counted before a request is made of them, in turns of the loop (F73, F75)."""

import json

import pytest
from tests.circles import left_in_circles
from tests.unit.transports.http.driven import Door, request

from forebay.types import json_elements

FEW = json.dumps(["a text, and another, " * 100, 1, 2]).encode()
MANY = json.dumps([[]] * 100).encode()


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setattr(json_elements, "BOUND_BYTES", 100)
    monkeypatch.setattr(json_elements, "EXACT_BYTES", 100)
    door = Door(max_elements=20, max_tensor_elements=20)
    yield door
    door.close()


def turn(loop):
    loop.call_soon(loop.stop)
    loop.run_forever()


def test_a_body_with_too_many_is_refused_and_nothing_is_made_of_it(door):
    client = door.connect()
    client.connection.data_received(request("alpha", MANY))
    assert not client.answers
    for _ in range(100):
        turn(door.loop)
    ((status, body),) = client.answers
    assert (status, json.loads(body)["error"]["code"]) == (413, "too_large")
    assert b"body: expected at most 20 elements in arrays, got more" in body
    client.connection.data_received(request("alpha", b"[1]"))
    assert client.statuses == [413, 200]


def test_one_with_few_is_answered_and_others_behind_it_wait(door):
    client, other = door.connect(), door.connect()
    client.connection.data_received(request("alpha", FEW) + request("alpha", b"[1]"))
    turn(door.loop)
    other.connection.data_received(request("alpha", b"[2]"))
    assert (client.answers, other.answers) == ([], [(200, b"alpha [2]")])
    for _ in range(200):
        turn(door.loop)
    assert client.answers == [(200, b"alpha " + FEW), (200, b"alpha [1]")]


def test_nothing_is_made_for_a_client_that_has_left(door):
    client = door.connect()
    client.connection.data_received(request("alpha", FEW))
    turn(door.loop)
    door.clients.remove(client)
    client.connection.connection_lost(None)
    for _ in range(200):
        turn(door.loop)
    assert not client.answers
    assert not door.alpha.asked


def test_counting_leaves_no_circle_that_holds_the_body(door):  # F73
    client = door.connect()
    with left_in_circles() as left:
        for body in (FEW, MANY):
            client.connection.data_received(request("alpha", body))
            for _ in range(200):
                turn(door.loop)
    assert client.statuses == [200, 413]
    assert left == []
