# SPDX-License-Identifier: Apache-2.0
"""A connection driven by hand: what one client sends never becomes what another one gets, and limits hold early."""

import asyncio
import errno
import gc
import itertools
import os
import socket

import pytest
from tests.unit.transports.http.driven import Door, request

from forebay.errors import InternalError, TooLarge
from forebay.protocols.native import Contract
from forebay.transports.http.bodies import read_body
from forebay.transports.http.connection import LONGEST_SLEEP, HttpConnection
from forebay.transports.http.connection_state import BODY, GONE, IDLE, LINGER
from forebay.transports.http.route import Route
from forebay.transports.http.streamed_answer import StreamedAnswer
from forebay.types.call import Failure
from forebay.workers.memory.landing import Places

KEY = "x-api-key: k1"


@pytest.fixture
def doors():
    opened = []

    def make(**more):
        opened.append(Door(**more))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


async def told(scope, receive, send):
    """Answers with the length of the body."""
    size, goes_on = 0, True
    while goes_on:
        message = await receive()
        size, goes_on = size + len(message["body"]), message["more_body"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"%07d" % size})


async def told_at_once(scope, receive, send):
    """Answers before it has read any of the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"7")]})
    await send({"type": "http.response.body", "body": b"at once"})


def chunked(model, *headers):
    return request(model, b"", *headers, "transfer-encoding: chunked", length=False)


def test_the_head_of_a_second_request_is_not_remembered_under_the_bytes_of_the_first(doors):  # F1
    door = doors(api_keys=("k1",))
    first = chunked("alpha", "content-type: application/json", "x-filler: 1")
    second = request("beta", b"", "content-type: application/json", KEY, "content-length: ", length=False)[:-4]
    rest = b"2\r\n[]\r\n0\r\n\r\n" + second
    length = len(rest) + 3 + 4 + 3  # what the second head names is the length of all that follows the first
    attack = first + rest + b"%d\r\n\r\n[1," % length
    assert len(attack) == len(first) + length
    door.connect().send(attack)
    thief = door.connect().send(first + b"3" * length)
    assert door.beta.asked == []
    assert thief.statuses in ([401], [400])


def test_a_remembered_head_is_taken_only_between_two_requests(doors):
    door = doors()
    whole = request("alpha", b"[1]")
    client = door.connect().send(whole, whole)
    assert door.lane.heads
    inner = door.connect().send(request("beta", b"x" * len(whole))[: -len(whole)], whole)
    assert [each.body for each in door.beta.asked] == [whole]
    assert inner.state is client.state is IDLE


def test_a_remembered_head_is_not_read_again_when_its_body_comes_bit_by_bit(doors, monkeypatch):  # F72
    door = doors()
    whole = request("alpha", b"x" * 2000)
    first, second = door.connect().send(whole[:-1500]), door.connect()
    assert door.lane.heads
    monkeypatch.setattr(HttpConnection, "_parse", lambda *_: pytest.fail("it was read again"))
    second.send(whole[:-1999], whole[-1999:-7], whole[-7:], whole, whole[:-2000], whole[-2000:])
    monkeypatch.undo()
    assert first.send(whole[-1500:]).statuses == [200]
    assert second.statuses == [200] * 3
    # What follows is read as ever, wherever it is cut.
    messages = whole + request("beta", b"y") + whole + b"GET /nobody HTTP/1.1\r\nhost: localhost\r\n\r\n"
    for size in (len(whole) - 1000, len(whole) + 3, 997):
        client = door.connect().send(*(messages[at : at + size] for at in range(0, len(messages), size)))
        door.turn()
        assert client.statuses == [200, 200, 200, 404], size
        assert client.answers[1] == (200, b"beta y")


def test_a_remembered_head_whose_body_is_refused_is_not_refused_to_others(doors):
    door = doors(max_buffered_bytes=10_000)
    whole = request("alpha", b"x" * 8000)
    first = door.connect().send(whole[:-10])
    second = door.connect().send(whole[:-5])
    assert second.statuses == [503]
    assert first.send(whole[-10:], whole, whole[:-1], whole[-1:]).statuses == [200] * 3
    assert door.lane.byte_budget.held_bytes == 0
    door.alpha.room = 0
    long = request("alpha", b"x" * 300_000)
    full = [door.connect().send(long[:size]) for size in (200, 100_000, -1)]
    door.turn()
    assert [each.statuses for each in full] == [[429]] * 3


def test_answers_that_are_due_are_written_before_a_refusal_and_nothing_after_it(doors):  # F2
    door = doors(waits=True)
    client = door.connect()
    client.send(
        request("alpha", b"1") + request("alpha", b"2", "content-type: text/csv") + request("beta", b"3") + b"\0"
    )
    door.alpha.answer()
    assert client.statuses == [200, 415]
    door.beta.answer()
    assert client.statuses == [200, 415, 200, 400]
    assert client.state is LINGER
    client.send(request("alpha", b"4"))
    assert len(door.alpha.asked) == 1


@pytest.mark.parametrize("framing", ["length", "chunks"])
@pytest.mark.parametrize("pieces", [1, 2, 1000])
def test_the_body_of_a_request_to_upgrade_is_no_request(doors, framing, pieces):  # F3
    door = doors()
    inner = request("beta", b"1")
    asks = ["connection: upgrade", "upgrade: h2c"]
    if framing == "length":
        data = request("alpha", inner, *asks)
    else:
        data = chunked("alpha", *asks) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    size = -(-len(data) // pieces)
    client = door.connect().send(*(data[at : at + size] for at in range(0, len(data), size)))
    assert [each.body for each in door.alpha.asked] == [inner]
    assert door.beta.asked == []
    assert client.answers == [(200, b"alpha " + inner)]
    assert client.transport.is_closed


def test_a_body_that_is_too_long_is_refused_as_such_also_if_it_came_with_a_request_to_upgrade(doors):
    client = doors(max_body_bytes=10).connect()
    asked = chunked("alpha", "connection: upgrade", "upgrade: h2c")
    client.send(asked + b"b\r\n%b\r\n0\r\n\r\n" % (b"x" * 11))
    assert client.statuses == [413]


def test_spaces_after_a_value_are_no_part_of_it(doors):  # F116
    door = doors(api_keys=("k1",))
    for key in ("x-api-key: k1 ", "x-api-key:k1\t ", "authorization:  Bearer k1  "):
        assert door.connect().send(request("alpha", b"1", key, "x-request-id: a ")).statuses == [200], key
    assert door.alpha.asked[0].id == "a"


def test_a_refusal_for_want_of_a_key_is_logged_as_such(doors, caplog):  # F116
    doors(api_keys=("k1",)).connect().send(request("alpha", b"1"))
    assert [record.kind for record in caplog.records] == ["Unauthorized"]


def test_a_stream_that_says_nothing_to_a_client_that_has_closed_its_side_is_called_off(doors):  # F135
    door = doors(waits=True, contract=Contract(streams=True))
    client = door.connect().send(request("alpha", b"1"))
    (asked,) = door.alpha.asked
    assert client.connection.eof_received()
    assert client.transport.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    for _ in range(3):  # while parts come, they tell whether the client is there
        door.pass_seconds(4)
        asked.on_part(b"b", lambda: None)
    assert door.alpha.gone == []
    door.pass_seconds(7)
    assert door.alpha.gone == [asked]
    assert client.transport.is_closed


def test_a_tunnel_is_refused(doors):  # F67
    door = doors()
    for target in ("/models/alpha", "a:1"):
        client = door.connect().send(request("", b"1", method="CONNECT", target=target), request("beta", b"1"))
        assert client.statuses == [405]
        assert client.state is LINGER
    assert door.beta.asked == []


@pytest.mark.parametrize("what", ["trailers", "one trailer", "extensions", "empty chunks"])
def test_what_frames_a_body_is_bounded_before_keys_are_checked(doors, what):  # F4
    door = doors(api_keys=("k1",))
    client = door.connect().send(chunked("alpha"), b"2\r\n[]\r\n")
    begin, again = {
        "trailers": (b"0\r\n", b"x: y\r\n" * 1000),
        "one trailer": (b"0\r\nx: ", b"y" * 6000),
        "extensions": (b"2;x=", b"y" * 6000),
        "empty chunks": (b"", b"00000000000000000001\r\nx\r\n" * 240),
    }[what]
    client.send(begin)
    for count in itertools.count(1):
        client.send(again)
        if client.answers:
            break
        assert count * len(again) < 3 * 64 * 1024
    assert client.statuses == [431]
    assert client.state is LINGER


def test_a_body_without_a_key_is_not_kept(doors):
    door = doors(api_keys=("k1",))
    short = door.connect().send(request("alpha", b"x" * 60_000)[:-1000])
    assert short.connection.held_bytes == 0
    assert short.send(b"x" * 1000).statuses == [401]
    assert short.state is IDLE  # a short one is read to its end, so that the connection can go on
    long = door.connect().send(request("alpha", b"x" * 100_000)[:200])
    assert long.statuses == [401]
    assert long.state is LINGER
    endless = door.connect().send(chunked("alpha"), *[b"4000\r\n" + b"x" * 0x4000 + b"\r\n"] * 5)
    assert endless.statuses == [401]
    assert endless.state is LINGER


def test_the_largest_of_the_bodies_that_arrive_gives_way_when_they_are_too_large_together(doors):  # F67
    door = doors(max_buffered_bytes=10_000)
    small = [door.connect().send(request("alpha", b"x" * 2000)[:-500]) for _ in range(3)]
    large = door.connect().send(request("alpha", b"x" * 8000)[:-3000])
    assert large.state is BODY
    late = door.connect().send(request("alpha", b"x" * 2000)[:-500])
    assert large.statuses == [503]
    assert late.send(b"x" * 500).statuses == [200]
    assert [each.send(b"x" * 500).statuses for each in small] == [[200]] * 3
    assert door.lane.byte_budget.held_bytes == 0


def test_bodies_of_the_slow_lane_count_as_well(doors):  # F67
    async def slow(scope, receive, send):
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                seen.append("gone")
                return
            body += message["body"]
            if not message["more_body"]:
                return

    seen = []
    door = doors(app=slow, max_buffered_bytes=10_000)
    client = door.connect().send(request("", b"x" * 30_000, target="/other")[:5000])
    door.turn()
    assert client.state.is_inside
    client.send(b"x" * 6000)
    door.turn()
    assert client.statuses == [503]
    assert seen == ["gone"]
    assert door.lane.byte_budget.held_bytes == 0


@pytest.mark.parametrize("target", ["/models/alpha", "/other"])
def test_a_byte_now_and_then_does_not_keep_a_request_alive(doors, target):  # F67
    door = doors(read_timeout_s=30.0)
    client = door.connect().send(request("", b"x" * 5000, target=target)[:-4000])
    steady = door.connect().send(request("alpha", b"x" * 80_000)[:-70_000])
    for _ in range(3):
        door.pass_seconds(29)
        client.send(b"x")
        steady.send(b"x" * 20_000)
        door.turn()
    assert client.statuses == [408]
    assert steady.send(b"x" * 10_000).statuses == [200]


@pytest.mark.parametrize("rate, statuses", [(100, [200]), (300, [408])])
def test_how_slowly_a_request_may_come_is_a_setting(doors, rate, statuses):
    door = doors(read_timeout_s=30.0, min_bytes_per_s=rate)
    client = door.connect().send(request("alpha", b"x" * 12_000)[:-6000])
    for number in (1000, 5000):
        door.pass_seconds(20)  # within 30 seconds come 7,000 bytes
        client.send(b"x" * number)
    door.turn()
    assert client.statuses == statuses


def test_a_head_of_a_pipelining_client_is_not_charged_for_the_requests_before_it(doors):  # F66
    door = doors()
    one = request("alpha", b"x" * 50)
    data = one * (100_000 // len(one) + 1)
    client = door.connect().send(data + one[:60], one[60:])
    while client.transport.is_paused:
        door.turn()
    assert set(client.statuses) == {200}
    assert len(client.statuses) == len(data) // len(one) + 1


@pytest.mark.parametrize(
    "one",
    [request("", target="/", method="GET", length=False), request("alpha"), request("alpha", b"1", KEY)],
    ids=["slow lane", "refused", "fast lane"],
)
def test_of_many_requests_that_come_at_once_a_few_are_read_at_a_time(doors, one):
    """Each becomes kilobytes and takes a while: 14 MB from 50 clients stopped the loop for seconds and held 400 MB."""
    door = doors(waits=True, api_keys=("k1",))
    client = door.connect()

    def written():
        return client.transport.written.count(b"HTTP/1.1 ")

    count = 200_000 // len(one)
    client.send(one * count)
    assert client.transport.is_paused
    most = written()
    while client.transport.is_paused or client.state.owes:
        before = written()
        door.loop.run_until_complete(asyncio.sleep(0))
        if client.connection.active is not None:
            door.alpha.answer()
        most = max(most, len(client.connection.talk.waiting), written() - before)
    assert most < 500
    assert written() == count
    assert client.state is IDLE


@pytest.mark.parametrize("app", [None, told, told_at_once])
def test_of_many_chunks_that_come_at_once_a_few_are_read_at_a_time(doors, app):
    """Of one byte each, those of one client took 40 ms of a turn."""
    door, count = doors(**({} if app is None else {"app": app})), 16_000
    head = chunked("alpha") if app is None else chunked("", "x: y").replace(b"/models/", b"/other")
    data = head + b"1\r\nx\r\n" * count + b"0\r\n\r\n" + request("beta", b"1")
    client = door.connect().send(data)
    talk, read = client.connection.talk, 0
    while client.transport.is_paused:
        assert read <= talk.body_bytes <= read + 6000  # it may be more than one turn
        read = talk.body_bytes
        door.loop.run_until_complete(asyncio.sleep(0))
    door.turn()
    assert read > count / 2
    body = {None: b"alpha " + b"x" * count, told: b"0016000", told_at_once: b"at once"}[app]
    assert client.answers == [(200, body), (200, b"beta 1")]
    assert client.state is IDLE
    bit_by_bit = door.connect().send(*(data[at : at + 4096] for at in range(0, len(data), 4096)))
    door.turn()
    assert bit_by_bit.answers == client.answers


@pytest.mark.parametrize("app", [None, told])
def test_who_leaves_while_chunks_wait_or_sends_nonsense_behind_them_leaves_nothing(doors, app):
    door = doors(**({} if app is None else {"app": app}))
    head = chunked("alpha") if app is None else chunked("", "x: y").replace(b"/models/", b"/other")
    broken = door.connect().send(head + b"1\r\nx\r\n" * 16_000 + b"nonsense\r\n")
    gone = door.connect().send(head + b"1\r\nx\r\n" * 16_000)
    assert gone.transport.is_paused
    gone.transport.close()
    gone.connection.connection_lost(None)
    door.clients.remove(gone)
    while broken.transport.is_paused and broken.state.reads:
        door.turn()
    assert broken.statuses == [400]
    assert door.alpha.asked == []
    assert door.lane.byte_budget.held_bytes == 0


@pytest.mark.parametrize("behind", [0, 1, 1000])
def test_who_waits_for_the_end_of_a_client_is_told_whatever_it_has_sent_behind(doors, behind, caplog):
    async def until_it_leaves(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (await receive())["type"] != "http.disconnect":
            pass
        seen.append("gone")

    seen = []
    door = doors(app=until_it_leaves)
    client = door.connect().send(request("", target="/other", method="GET", length=False) * (1 + behind))
    door.turn()
    client.transport.close()
    client.connection.connection_lost(None)
    door.clients.remove(client)
    door.turn()
    assert seen == ["gone"]
    assert not caplog.records


@pytest.mark.parametrize("lane", ["slow", "fast"])
@pytest.mark.parametrize("count", [40, 100, 1000])
def test_a_body_behind_many_requests_that_came_at_once_is_read_to_its_end(doors, lane, count):
    door = doors(app=told)
    long = request("beta", b"x" * 50_000)
    if lane == "slow":
        long = request("", b"x" * 50_000, target="/other")
    few = request("alpha", b"y")
    for first in (request("", target="/other", method="GET", length=False), few):
        data = first * count + long + few
        for cut in (len(data), len(data) - 20_000, len(data) - len(few)):
            client = door.connect().send(data[:cut], data[cut:])
            while client.transport.is_paused or client.state.owes:
                door.turn()
            assert client.statuses == [200] * (count + 2)
            assert client.answers[-2][1] == (b"0050000" if lane == "slow" else b"beta " + b"x" * 50_000)
            assert client.answers[-1][1] == b"alpha y"


def test_what_came_at_once_and_was_not_read_yet_is_answered_while_the_server_drains(doors):
    door = doors(api_keys=("k1",))
    one = request("alpha", b"", "x: " + "y" * (128 - len(request("alpha", b"", "x: "))))
    client = door.connect().send(one * 1000 + request("alpha", b"1", KEY, "connection: close"))
    assert client.state is IDLE  # what is parsed at once ends with a request
    client.connection.shutdown()
    door.pass_seconds(3)
    assert not client.transport.is_closed
    while client.transport.is_paused and not client.transport.is_closed:
        door.turn()
    assert client.statuses[-1] == 200
    assert client.transport.is_closed


OTHER = request("", target="/other", method="GET", length=False)


@pytest.mark.parametrize(
    "segments, rest, closes_at",
    [
        ([OTHER], b"", 1),  # answered after the drain has begun, though read before
        ([OTHER * 3], b"", 3),
        ([request("", b"12", target="/other")[:-1]], b"2", 1),
        ([OTHER, OTHER[:9]], OTHER[9:], 2),
        ([OTHER, request("alpha", b"1")[:-1]], b"1", 2),
        ([OTHER, request("alpha", b"1")], b"", 2),
    ],
)
def test_the_last_answer_of_a_drain_says_that_the_connection_closes(doors, segments, rest, closes_at):
    door = doors()
    client = door.connect().send(*segments)
    door.lane.drain()
    client.send(*[rest] * bool(rest))
    while client.state.owes:
        door.turn()
    assert len(client.answers) == closes_at
    assert client.transport.written.count(b"connection: close") == 1
    assert b"connection: close" in client.transport.written.rpartition(b"HTTP/1.1")[2]
    assert client.transport.is_closed or client.transport.has_ended


def test_a_refusal_comes_before_what_was_not_read_yet(doors):
    door = doors(waits=True, max_body_bytes=10)
    client = door.connect().send(request("alpha", b"1") * 100 + request("alpha", b"x" * 11) + request("beta") * 1000)
    while not client.transport.has_ended:
        if client.connection.active is not None:
            door.alpha.answer()
        door.turn()
    assert client.statuses == [200] * 100 + [413]
    assert door.beta.asked == []


def test_a_line_of_the_log_names_the_peer_and_the_reason_once_a_second(doors, caplog):
    door = doors(api_keys=("k1",))
    client = door.connect().send(*[request("alpha", b"1")] * 5)
    assert client.statuses == [401] * 5
    door.connect().send(b"\0")
    lines = [record.getMessage() for record in caplog.records if record.name == "forebay.refusals"]
    assert len(lines) == 2
    assert "192.0.2.1:7" in lines[0]
    assert "key" in lines[0]
    door.pass_seconds(1)
    client.send(request("alpha", b"1"))
    lines = [record.getMessage() for record in caplog.records if record.name == "forebay.refusals"]
    assert len(lines) == 3
    assert "4 more" in lines[2]


def test_a_slow_answer_that_has_begun_is_cut_when_its_body_breaks_a_limit(doors):
    async def early(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(3600)

    door = doors(app=early, read_timeout_s=5.0)
    client = door.connect().send(request("", b"x" * 5000, target="/other")[:-4000])
    door.turn()
    door.pass_seconds(7)
    assert client.transport.is_closed
    assert client.state is GONE
    for task in list(door.lane.server_state.tasks):
        task.cancel()


async def refuse(scope, receive, send):
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"long"})


def test_a_body_refused_before_it_came_is_read_to_its_end_or_the_answer_says_that_it_will_not_be(doors):  # F67
    door = doors(app=refuse, max_body_bytes=100_000)
    client = door.connect().send(request("", b"x" * 100_000, target="/other")[:200])
    door.turn()
    assert client.answers == [(413, b"long")]
    assert b"connection: close" not in client.transport.written
    client.send(*[b"x" * 10_000] * 9, request("", b"x" * 100_000, target="/other")[90_200:])
    assert client.state is IDLE
    client = door.connect().send(request("", b"x" * 100_001, target="/other")[:200])
    door.turn()
    assert client.answers == [(413, b"long")]
    assert b"connection: close" in client.transport.written
    assert client.state is LINGER
    assert client.transport.has_ended
    assert not client.transport.is_closed, "its client gets a moment to read the answer"
    client.send(b"x" * 100_000)
    assert client.answers == [(413, b"long")]


def test_a_client_that_was_not_read_has_its_whole_time_once_it_is(doors):
    read = asyncio.Event()

    async def late(scope, receive, send):
        await read.wait()
        while (await receive())["more_body"]:
            pass
        await refuse(scope, receive, send)

    door = doors(app=late)
    whole = request("", b"x" * 100_000, target="/other")
    client = door.connect().send(whole[:90_000])
    door.turn()
    door.pass_seconds(60)  # the application is behind
    read.set()
    door.turn()
    door.pass_seconds(20)
    assert client.send(whole[90_000:]).statuses == []
    door.turn()
    assert client.answers == [(413, b"long")]


def test_a_drain_does_not_wait_for_the_rest_of_a_body_that_was_answered(doors):
    door = doors(app=refuse)
    client = door.connect().send(request("", b"12", target="/other")[:-1])
    while client.state.owes:
        door.turn()
    assert client.state is BODY
    door.lane.drain()
    assert client.answers == [(413, b"long")]
    assert client.transport.has_ended


def test_what_an_application_has_left_is_read_once_it_has_answered(doors):
    answers = asyncio.Event()

    async def early(scope, receive, send):
        await answers.wait()
        await refuse(scope, receive, send)

    door = doors(app=early)
    whole = request("", b"x" * 100_000, target="/other")
    client = door.connect().send(whole[:90_000])
    door.turn()
    door.pass_seconds(1)
    assert client.transport.is_paused
    answers.set()
    door.turn()
    assert (client.answers, client.transport.is_paused) == ([(413, b"long")], False)
    client.send(whole[90_000:])
    assert client.state is IDLE


async def limited(scope, receive, send):
    try:
        await read_body(receive, 1000)
    except TooLarge:
        await refuse(scope, receive, send)


PIECE = b"258\r\n" + b"x" * 600 + b"\r\n"


def refused_while_it_grows(door):
    client = door.connect().send(request("", b"", "transfer-encoding: chunked", target="/other", length=False))
    for _ in range(2):
        client.send(PIECE)
        door.turn()
    assert client.answers == [(413, b"long")]
    return client


def test_the_answer_to_a_body_that_grew_over_the_limit_says_that_the_connection_closes(doors):
    client = refused_while_it_grows(doors(app=limited, max_body_bytes=1000))
    assert b"connection: close\r\n" in client.transport.written
    assert client.state is LINGER
    assert client.transport.has_ended
    client.send(PIECE)
    assert client.answers == [(413, b"long")]


def test_who_goes_on_sending_after_the_last_answer_is_read_for_a_while(doors):
    door = doors(app=limited, max_body_bytes=1000)
    slow, quiet = refused_while_it_grows(door), refused_while_it_grows(door)
    for _ in range(5):
        slow.send(PIECE)
        door.pass_seconds(1)
    assert not slow.transport.is_closed
    assert quiet.transport.is_closed
    quick = refused_while_it_grows(door)
    for _ in range(100):  # F116: it reads its answer once it has sent everything, however much that is
        quick.send(b"x" * (1 << 20))
    assert not quick.transport.is_closed
    for _ in range(26):
        slow.send(PIECE)
        door.pass_seconds(1)
    assert slow.transport.is_closed


@pytest.mark.parametrize("headers, version", [(["connection: close"], b"1.1"), ([], b"1.0")])
def test_an_answer_before_the_end_of_a_body_is_not_lost_where_the_connection_closes_after_it(doors, headers, version):
    # nginx, which speaks HTTP/1.0 unless it is told not to, said 502 in place of an answer that a reset overtook.
    door = doors(app=refuse)
    whole = request("", b"x" * 1000, *headers, target="/other").replace(b"HTTP/1.1", b"HTTP/" + version)
    client = door.connect().send(whole[:-500])
    door.turn()
    assert client.answers == [(413, b"long")]
    assert (client.state, client.transport.has_ended) == (LINGER, True)
    whole_at_once = door.connect().send(whole)
    door.turn()
    assert whole_at_once.answers == [(413, b"long")]
    assert whole_at_once.transport.is_closed


def test_a_long_body_that_came_before_its_answer_ends_the_connection_too(doors):
    door = doors(app=refuse, max_body_bytes=1000)
    client = door.connect().send(request("", b"x" * 1001, target="/other"))
    door.turn()
    assert client.answers == [(413, b"long")]
    assert b"connection: close" in client.transport.written
    assert client.state is GONE
    assert client.transport.is_closed


def test_a_request_that_is_being_answered_has_all_the_time_it_needs(doors):
    door = doors(waits=True, keep_alive_s=5.0, read_timeout_s=5.0, write_timeout_s=5.0)
    client = door.connect().send(request("alpha", b"1"))
    door.pass_seconds(3600)
    assert not client.transport.is_closed
    door.alpha.answer()
    assert client.answers == [(200, b"alpha 1")]


def lose(door, client):
    door.clients.remove(client)
    client.connection.connection_lost(None)


def test_who_says_nothing_is_looked_at_again_when_its_time_is_over(doors):
    door = doors(keep_alive_s=5.0)
    client, other = door.connect(), door.connect()
    door.pass_seconds(2)
    assert door.lane.awake == set()
    lose(door, other)
    door.pass_seconds(3)
    assert not client.transport.is_closed
    door.pass_seconds(1)
    assert client.transport.is_closed
    lose(door, client)
    assert door.lane.connections == door.lane.awake == set()
    assert not any(door.lane._asleep.values())


def test_who_wakes_up_has_the_limits_of_everybody_and_its_whole_time_again(doors):
    door = doors(keep_alive_s=60.0, read_timeout_s=5.0)
    first = door.connect().send(request("alpha", b"1"))
    first.transport.written = b""
    door.pass_seconds(40)
    assert door.lane.awake == set()
    first.send(request("alpha", b"2"))  # a head that is remembered
    assert door.lane.awake == {first.connection}
    assert first.answers == [(200, b"alpha 2")]
    door.pass_seconds(60)
    assert not first.transport.is_closed
    first.send(request("alpha", b"345")[:-1])
    door.pass_seconds(6)
    assert first.statuses == [200, 408]


def test_the_time_of_an_idle_client_begins_with_its_answer(doors):
    door = doors(keep_alive_s=10.0, waits=True)
    client = door.connect().send(request("alpha", b"1"))
    door.pass_seconds(20)
    door.alpha.answer()
    door.pass_seconds(9)
    assert client.state is IDLE
    assert not client.transport.is_closed
    door.pass_seconds(2)
    assert client.transport.is_closed


def test_a_client_that_is_refused_again_and_again_is_not_idle(doors):
    door = doors(keep_alive_s=3.0)
    again = request("alpha", b"1")
    client = door.connect().send(again, again)
    door.alpha.room = 0
    for _ in range(6):
        client.send(again)
        door.lane.refusals.stop()  # tells everybody in line
        door.pass_seconds(1)
    assert client.statuses == [200] * 2 + [429] * 6
    assert not client.transport.is_closed


def test_those_that_sleep_for_years_are_looked_at_now_and_then(doors):
    door = doors(keep_alive_s=1e308)
    client = door.connect()
    for _ in range(3 * LONGEST_SLEEP):
        leaver = door.connect()
        door.pass_seconds(2)
        lose(door, leaver)
    assert not client.transport.is_closed
    assert len(door.lane._asleep) <= LONGEST_SLEEP + 1  # a set of connections for each


@pytest.mark.parametrize("is_last", [False, True])
def test_who_leaves_the_end_of_an_answer_unread_is_cut_off(doors, is_last):
    door = doors(keep_alive_s=5.0, write_timeout_s=5.0)
    asks = ["connection: close"] if is_last else []
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made = door.loop.connect_accepted_socket(lambda: HttpConnection(door.lane), ours)
        transport, _ = door.loop.run_until_complete(made)
        theirs.sendall(request("alpha", b"x" * 30_000, *asks))
        while not transport.get_write_buffer_size():  # and never so much that the client is slow
            door.turn()
        door.pass_seconds(20)
        door.turn()
    assert door.lane.connections == set()


def test_who_takes_a_long_answer_slowly_gets_all_of_it(doors):
    door = doors(write_timeout_s=5.0)
    size = 400_000
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made = door.loop.connect_accepted_socket(lambda: HttpConnection(door.lane), ours)
        door.loop.run_until_complete(made)
        door.loop.run_until_complete(
            door.loop.run_in_executor(None, theirs.sendall, request("alpha", b"x" * size, "connection: close"))
        )
        got = 0
        while taken := len(theirs.recv(20_000)):
            got += taken
            door.turn()
            door.pass_seconds(1)
        assert got > size


def test_a_parser_is_there_while_something_has_to_be_parsed(doors):
    door = doors(read_timeout_s=5.0)
    first = door.connect()
    first.send(request("alpha", b"12"))
    second = door.connect().send(request("alpha", b"34"))
    assert second.answers == [(200, b"alpha 34")]
    second.send(request("alpha", b"56")[:-1])
    assert first.connection.parser is not None
    assert second.connection.parser is None  # it has sent nothing but what is remembered
    door.pass_seconds(6)
    assert second.statuses == [200, 408]
    assert first.connection.parser is None
    assert first.send(request("alpha", b"7")).answers == [(200, b"alpha 12"), (200, b"alpha 7")]


def test_a_message_without_its_end_is_told_of_by_its_method_also_if_no_parser_has_read_it(doors, caplog):
    caplog.set_level("INFO", "forebay.access")
    door = doors(read_timeout_s=5.0, access_log=True)
    door.connect().send(request("alpha", b"12"))
    late = door.connect().send(request("alpha", b"34")[:-1])
    door.pass_seconds(6)
    assert late.statuses == [408]
    told = [record.getMessage() for record in caplog.records if record.name == "forebay.access"]
    assert told == ["POST /models/alpha 200", "POST /models/alpha 408"]


def test_an_answer_that_cannot_be_written_leaves_room_for_an_error_in_its_place(doors):  # F27, G8
    door = doors(waits=True)
    client = door.connect().send(request("alpha", b"1") + request("beta", b"2"))
    asked = door.alpha.asked[-1]
    with pytest.raises(TypeError):
        asked.reply(asked, object())  # what no codec has made
    assert client.transport.written == b""
    asked.reply(asked, Failure(InternalError("the answer could not be written")))
    door.beta.answer()
    assert client.statuses == [500, 200]
    asked.reply(asked, b"too late")
    assert client.statuses == [500, 200]


@pytest.mark.parametrize("more", [(), ("x-request-id: a",)])
@pytest.mark.parametrize("outcome", [b"all of it", Failure(InternalError("no part came")), None])
def test_nothing_is_kept_of_an_answer_that_may_come_in_parts_once_it_was_given(doors, outcome, more):
    door = doors(waits=True, contract=Contract(streams=True))
    door.connect().send(request("alpha", b"1", *more))
    door.alpha.asked[-1].reply(door.alpha.asked.pop(), outcome)
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is StreamedAnswer and one._lane is door.lane]


def test_a_part_without_a_byte_does_not_end_the_answer(doors):
    door = doors(waits=True, contract=Contract(streams=True, raw_output=True))
    client = door.connect().send(request("alpha", b"1"))
    asked = door.alpha.asked[-1]
    released = []
    for part in (b"", b"a", b"", b"b"):
        asked.on_part(part, lambda: released.append(1))
    asked.on_bundle([b"", b""], lambda: released.append(2))
    asked.reply(asked, None)
    assert client.transport.written.partition(b"\r\n\r\n")[2] == b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"
    assert released == [1, 1, 1, 1, 2]
    assert client.state is IDLE


@pytest.mark.parametrize("more", [(), ("connection: close",), ("x-request-id: a",)])
def test_a_request_that_we_fail_to_make_is_answered_and_the_connection_freed(doors, monkeypatch, caplog, more):  # G8
    door = doors()

    def fail(*_):
        raise ZeroDivisionError("a defect")

    whole = request("alpha", b"1", *more)
    monkeypatch.setattr(Route, "request", fail)
    clients = [door.connect().send(whole), door.connect().send(whole[:-1], whole[-1:])]
    clients.append(door.connect().send(whole + whole))
    assert {status for client in clients for status in client.statuses} == {500}
    assert len(clients[2].statuses) == (1 if "connection: close" in more else 2)
    assert len(door.alpha.rejected) == sum(len(client.statuses) for client in clients)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]  # in a second
    monkeypatch.undo()
    if "connection: close" not in more:
        assert clients[0].send(whole).statuses == [500, 200]


@pytest.mark.parametrize("more", [(), ("connection: close",), ("x-request-id: a",)])
def test_a_request_that_its_endpoint_fails_to_take_is_answered_and_the_connection_freed(doors, caplog, more):  # G8
    door = doors()
    submit = door.alpha.submit

    def fail(*_):
        raise ZeroDivisionError("a defect")

    door.alpha.submit = fail
    client = door.connect().send(request("alpha", b"1", *more))
    assert client.statuses == [500]
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]
    assert client.connection.request is None
    door.alpha.submit = submit
    if "connection: close" not in more:
        assert client.send(request("alpha", b"1", *more)).statuses == [500, 200]


def test_a_target_with_a_fragment_is_none(doors):  # some would read it as the path before it
    door = doors()
    for target in ("/#models/alpha", "/models/alpha#", "/models/alpha?x#y"):
        assert door.connect().send(request("", b"1", target=target)).statuses == [400]
    assert door.alpha.asked == []


def test_an_absolute_target_without_a_path_means_the_root(doors, caplog):  # RFC 9110, 4.2.3
    paths = []

    async def tell(scope, receive, send):
        paths.append((scope["path"], scope["query_string"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    door = doors(app=tell)
    client = door.connect()
    for target in ("http://localhost", "http://localhost?a=b/c", "http://localhost/x", "http://localhost/?a"):
        client.send(request("", method="GET", target=target))
        door.turn()
    assert client.statuses == [200] * 4
    assert paths == [("/", b""), ("/", b"a=b/c"), ("/x", b""), ("/", b"a")]
    assert not caplog.records


@pytest.mark.parametrize("raises", [True, False])
def test_a_client_that_asks_first_may_read_that_the_application_failed(doors, raises):
    async def fails(scope, receive, send):
        if raises:
            raise RuntimeError("nothing was received")

    door = doors(app=fails)
    client = door.connect().send(
        request("", b"", "expect: 100-continue", "content-length: 2", target="/", length=False)
    )
    door.turn()
    assert client.statuses == [500]
    # Its body may be on its way, and a close while it comes could take the answer along.
    assert (client.state, client.transport.has_ended, client.transport.is_closed) == (LINGER, True, False)
    client.send(b"12")
    door.pass_seconds(3)
    assert client.transport.is_closed


def test_a_client_that_asks_first_without_a_body_is_not_told_to_go_on(doors):
    async def reads(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    door = doors(app=reads)
    client = door.connect().send(request("", b"", "expect: 100-continue", target="/", length=False))
    door.turn()
    assert client.statuses == [200]


def test_a_client_that_closes_its_side_amid_a_streamed_answer_is_told_nothing_in_it(doors):
    door = doors(waits=True, contract=Contract(streams=True))
    client = door.connect().send(request("alpha", b"a"))
    (asked,) = door.alpha.asked
    asked.on_part(b"part", lambda: None)
    assert not client.connection.eof_received()
    assert b"100 Continue" not in client.transport.written


def test_nor_amid_an_answer_of_the_application(doors):
    async def streams(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await receive()
        await receive()

    door = doors(app=streams)
    client = door.connect().send(request("", b"", target="/", method="GET", length=False))
    door.turn()
    assert b"part" in client.transport.written
    assert not client.connection.eof_received()
    assert b"100 Continue" not in client.transport.written


def test_a_length_is_read_whatever_number_it_is(doors):
    door = doors(max_body_bytes=1000)
    zeros = "content-length: " + "0" * 5000
    for target, status in ("/models/alpha", 200), ("/nobody", 404):
        client = door.connect().send(request("", b"", zeros, target=target, length=False))
        door.turn()
        assert client.statuses == [status]
        client.send(request("", b"1", zeros + "1", target=target, length=False))
        door.turn()
        assert client.statuses == [status] * 2
    for digits in (4, 15, 16, 19):
        more = "expect: 100-continue", "content-length: " + "1" * digits
        client = door.connect().send(request("alpha", b"", *more, length=False))
        assert client.statuses == [413], digits


@pytest.mark.linux
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("is_remembered", [False, True])
def test_a_body_for_which_memory_runs_out_while_it_lands_is_read_to_its_end(doors, monkeypatch, steps, is_remembered):
    door = doors()
    door.routes[b"/models/alpha"].places = Places()
    client = door.connect()
    body = bytes(range(256)) * 2048
    if is_remembered:
        client.send(request("alpha", body)[:5000], request("alpha", body)[5000:])
    left, reserve = [steps], os.posix_fallocate

    def runs_out(*asked):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space left")
        reserve(*asked)

    monkeypatch.setattr(os, "posix_fallocate", runs_out)
    sent = request("alpha", body) + request("alpha", b"next")
    client.send(sent[:9000], *(sent[at : at + 50_000] for at in range(9000, len(sent), 50_000)))
    assert client.answers[-2:] == [(200, b"alpha " + body), (200, b"alpha next")]
