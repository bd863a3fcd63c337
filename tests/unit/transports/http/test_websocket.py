# SPDX-License-Identifier: Apache-2.0
"""A WebSocket driven by hand: who may open one, what its messages ask, how it closes, and what a client may send."""

import itertools
import json
import random
import subprocess
import sys
from functools import partial

import msgspec
import pytest
from tests.unit.transports.http.driven import Door, request
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import Protocol, Side

from forebay.protocols.native import Contract
from forebay.transports.http.connection_state import GONE, LINGER, MESSAGE, SOCKET, SOCKET_DUE
from forebay.types.call import Failure
from forebay.types.failures import failure_of

HANDSHAKE = (
    "connection: keep-alive, Upgrade",
    "upgrade: WebSocket",
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    "sec-websocket-version: 13",
)
ACCEPTED = b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo="
"""The example of RFC 6455, 1.2."""


@pytest.fixture
def doors():
    opened = []

    def make(**more):
        opened.append(Door(**more))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def asked(*headers, model="alpha", handshake=HANDSHAKE, **more):
    return request(model, b"", *handshake, *headers, method="GET", **{"length": False, **more})


def text(data, *, fin=True, mask=True):
    return Frame(Opcode.TEXT, data, fin).serialize(mask=mask)


def more(data, *, fin=True):
    return Frame(Opcode.CONT, data, fin).serialize(mask=True)


class Socket:
    """A client that has opened a WebSocket."""

    def __init__(self, door, *headers, **more):
        self.client = door.connect().send(asked(*headers, **more))
        head, _, rest = self.client.transport.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head
        assert ACCEPTED in head.split(b"\r\n")
        assert b"sec-websocket-extensions" not in head.lower()
        assert self.client.state is SOCKET
        self.read = len(head) + 4 - len(rest)
        self.wire = Protocol(Side.CLIENT, max_size=None)

    @property
    def state(self):
        return self.client.state

    def send(self, *segments):
        self.client.send(*segments)
        return self

    def frames(self):
        """The frames that came since the last time."""
        written, self.read = self.client.transport.written[self.read :], len(self.client.transport.written)
        if written:
            self.wire.receive_data(written)
        return [each for each in self.wire.events_received() if isinstance(each, Frame)]

    def told(self):
        """The messages, each with whether it is a text."""
        return [(each.opcode is Opcode.TEXT, bytes(each.data)) for each in self.frames()]

    def closed(self):
        """The code and the reason of the close that came last."""
        last = self.frames()[-1]
        assert last.opcode is Opcode.CLOSE
        found = Close.parse(last.data)
        return int(found.code), found.reason


def test_each_message_is_a_request_and_is_answered_in_order(doors):
    door = doors(waits=True)
    socket, last = Socket(door), text(b"3")
    socket.send(text(b"1") + text(b"2"), last[:4], last[4:])
    assert [each.body for each in door.alpha.asked] == [b"1"]
    assert socket.client.transport.is_paused, "nothing is read while a message waits"
    for number in (b"1", b"2"):
        door.alpha.answer()
        assert socket.told() == [(True, b"alpha " + number)]
        door.turn()
    assert not socket.client.transport.is_paused
    door.alpha.answer()
    assert socket.told() == [(True, b"alpha 3")]
    assert len({each.id for each in door.alpha.asked}) == 3
    assert socket.state is SOCKET


def test_any_cut_of_the_bytes_is_the_same(doors):
    door, dice = doors(), random.Random(7)
    whole = text(b"[1]") + text(b"[", fin=False) + Frame(Opcode.PING, b"?").serialize(mask=True)
    whole += more(b"2", fin=False) + more(b"]") + Frame(Opcode.BINARY, b"\x93\x01\x02\x03" * 30).serialize(mask=True)
    for _ in range(20):
        data, cuts = asked() + whole, sorted(dice.sample(range(len(asked() + whole)), 5))
        client = door.connect().send(*(data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)))
        for _ in range(3):
            door.turn()
        assert [each.body for each in door.alpha.asked] == [b"[1]", b"[2]", b"\x93\x01\x02\x03" * 30]
        assert client.state is SOCKET
        assert b"\x8a\x01?" in client.transport.written  # the pong
        door.alpha.asked.clear()


def test_a_text_is_json_and_bytes_are_msgpack_or_what_a_model_of_bytes_takes(doors):
    for contract, sent, accept, given, wanted in [
        (Contract(), Opcode.TEXT, "*/*", "json", "json"),
        (Contract(), Opcode.BINARY, "application/json", "msgpack", "json"),
        (Contract(), Opcode.TEXT, "application/msgpack", "json", "msgpack"),
        (Contract(raw_input=True), Opcode.BINARY, "*/*", "json", "json"),
        (Contract(raw_input=True, raw_output=True), Opcode.BINARY, "*/*", "json", "json"),
    ]:
        door = doors(contract=contract)
        socket = Socket(door, f"accept: {accept}", "x-request-timeout-ms: 50000")
        socket.send(Frame(sent, msgspec.msgpack.encode(7)).serialize(mask=True))
        assert dict(door.alpha.asked[0].params) == {"in": given, "out": wanted}
        assert door.alpha.asked[0].deadline != float("inf")
        assert [is_text for is_text, _ in socket.told()] == [wanted == "json" and not contract.raw_output]


def test_parts_are_messages_and_an_empty_text_ends_them(doors):
    for is_raw in (False, True):
        door = doors(waits=True, contract=Contract(streams=True, raw_output=is_raw), answer_cost=True)
        socket = Socket(door).send(text(b"3"))
        released: list[None] = []
        request = door.alpha.asked[0]
        request.cost_s = 1.0  # which is not told here
        request.on_part(b"1", partial(released.append, None))
        request.on_part(b"2", partial(released.append, None))
        assert request.on_bundle is None, "each part is a message"
        request.reply(request, None)
        assert socket.told() == [(not is_raw, b"1"), (not is_raw, b"2"), (True, b"")]
        assert len(released) == 2
        socket.send(text(b"4"))
        request = door.alpha.asked[1]
        request.on_part(b"1", list)
        request.reply(request, failure_of(RuntimeError("broken")))
        (is_text, _), (is_json, error), end = socket.told()
        assert (is_text, is_json, end) == (not is_raw, True, (True, b""))
        assert json.loads(error)["error"]["request_id"] == request.id
        assert socket.state is SOCKET


def test_a_client_that_does_not_read_gets_no_more_parts_and_no_more_answers(doors):
    door = doors(waits=True, contract=Contract(streams=True))
    socket = Socket(door).send(text(b"1"), text(b"2"))
    released = []
    socket.client.leave_unread(100_000)
    door.alpha.asked[0].on_part(b"1", lambda: released.append(1))
    assert not released
    door.alpha.asked[0].reply(door.alpha.asked[0], None)
    assert len(door.alpha.asked) == 1
    assert socket.client.transport.is_paused
    socket.client.leave_unread(0)
    assert released
    assert len(door.alpha.asked) == 2


def test_a_client_that_closes_or_leaves_cancels_what_runs_for_it(doors):
    door = doors(waits=True)
    close = Frame(Opcode.CLOSE, b"\x03\xe8").serialize(mask=True)
    Socket(door).send(text(b"0") + close)
    assert not door.alpha.asked
    socket = Socket(door).send(text(b"1"), close)
    assert door.alpha.gone == door.alpha.asked
    assert socket.closed() == (1000, "")
    assert socket.state is LINGER
    assert socket.client.transport.has_ended
    for is_late in (False, True):
        socket = Socket(door).send(text(b"2"), *[text(b"3")] * is_late)
        if is_late:  # it is not read, so only a look tells
            socket.client.connection._probe()
            socket.client.connection._leave_if_gone()
        else:
            assert not socket.client.connection.eof_received()
            socket.client.connection.connection_lost(None)
            door.clients.remove(socket.client)
        assert door.alpha.gone == door.alpha.asked
        assert socket.state is GONE


@pytest.mark.parametrize(
    "frames, code",
    [
        (text(b"1", mask=False), 1002),
        (b"\x8b\x80aaaa", 1002),
        (b"\xf1\x80aaaa", 1002),
        (more(b"1"), 1002),
        (text(b"1", fin=False) + text(b"2"), 1002),
        (b"\x09\x80aaaa", 1002),
        (text(b"\xff\xfe"), 1007),
        (text(b"\xe2\x82", fin=False) + more(b"\x28"), 1007),
        (text(b"1" * 1001), 1009),
        (text(b"1" * 600, fin=False) + more(b"1" * 600), 1009),
        (b"\x81\xff" + b"\x7f" * 8, 1009),
        (b"\x81\xff" + b"\xff" * 8, 1009),
    ],
    ids=itertools.count(),  # not after the frames, whose masks are random: each process would name them differently
)
def test_frames_that_are_none_close_it_with_a_code_and_a_line_in_the_log(doors, frames, code, caplog):
    door = doors(waits=True, max_body_bytes=1000)
    socket = Socket(door).send(text(b"0"), frames)
    assert socket.closed()[0] == code
    assert f"192.0.2.1:7 was refused: WebSocket: {code} " in caplog.text
    assert door.alpha.gone == door.alpha.asked
    assert socket.state is LINGER
    socket.send(text(b"9"))
    assert len(door.alpha.asked) == 1


@pytest.mark.parametrize(
    "headers, status",
    [
        (["origin: http://elsewhere"], 403),
        (["origin: null"], 403),
        (["host: other"], 400),
        (["x-request-timeout-ms: soon"], 400),
        (["content-length: 1"], 404),
    ],
)
def test_who_may_not_ask_the_model_opens_no_socket(doors, headers, status):
    door = doors()
    client = door.connect().send(asked(*headers) + b"1")
    door.turn()
    assert client.statuses == [status]
    assert door.connect().send(asked("origin: http://localhost")).state is SOCKET


def test_a_key_is_needed_as_for_a_post(doors):
    door = doors(api_keys=("k1",))
    assert door.connect().send(asked()).statuses == [401]
    assert door.connect().send(asked("authorization: Bearer k2")).statuses == [401]
    Socket(door, "x-api-key: k1").send(text(b"1"))
    assert len(door.alpha.asked) == 1


@pytest.mark.parametrize(
    "lacking, status", [(0, 404), (1, 404), (2, 400), (3, 400)], ids=["connection", "upgrade", "key", "version"]
)
def test_a_handshake_lacks_nothing(doors, lacking, status):
    client = doors().connect().send(asked(handshake=HANDSHAKE[:lacking] + HANDSHAKE[lacking + 1 :]))
    client.door.turn()
    assert client.statuses == [status]


def test_only_a_get_of_a_model_between_two_requests_opens_one(doors):
    door = doors(waits=True)
    for head in (request("alpha", b"", *HANDSHAKE), asked(target="/other")):
        client = door.connect().send(head)
        door.turn()
        assert client.state not in {SOCKET, SOCKET_DUE}
    door.alpha.asked.clear()
    client = door.connect().send(request("alpha", b"1") + asked())
    door.alpha.answer()
    door.turn()
    assert client.statuses == [200, 404]
    client = door.connect().send(request("alpha", b"1"))
    door.alpha.answer()
    assert client.send(asked()).state is SOCKET


def test_other_protocols_have_none_at_their_paths(doors):
    door = doors()
    door.routes[b"/v2/models/alpha/infer"] = door.routes[b"/models/alpha"]
    assert door.connect().send(asked(target="/v2/models/alpha/infer")).state is not SOCKET
    door.routes[b"/"] = door.routes[b"/models/alpha"]
    assert door.connect().send(asked(target="/")).state is SOCKET


def test_each_message_asks_the_version_that_there_is_with_the_query_of_the_handshake(doors):
    door = doors(contract=Contract(query=("width",)))
    socket = Socket(door, target="/models/alpha?width=3").send(text(b"1"))
    assert door.alpha.asked[0].params["width"] == "3"
    door.routes[b"/models/alpha"] = door.routes[b"/models/beta"]
    assert socket.send(text(b"2")).told() == [(True, b"alpha 1"), (True, b"beta 2")]
    del door.routes[b"/models/alpha"]
    assert socket.send(text(b"3")).told() == [(True, b"beta 3")], "its route is told when it leaves"


def test_without_the_library_the_answer_says_what_to_install(doors, monkeypatch):
    monkeypatch.setitem(sys.modules, "forebay.transports.http.websocket", None)
    [(status, body)] = doors().connect().send(asked()).answers
    assert status == 501
    assert "pip install 'forebay[websockets]'" in json.loads(body)["error"]["message"]


def test_nothing_of_it_is_imported_before_the_first_one():
    script = "import sys, forebay.transports.http.listener; print([one for one in sys.modules if 'websocket' in one])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout == b"[]\n"


def test_bytes_that_are_a_remembered_request_are_no_request_there(doors):
    door = doors()
    head = request("alpha", b"1")
    door.connect().send(head, head)
    assert door.lane.heads
    door.alpha.asked.clear()
    socket = Socket(door).send(head)
    assert socket.closed()[0] == 1002
    assert not door.alpha.asked


def test_a_server_that_stops_answers_what_it_has_and_goes_away(doors):
    door = doors(waits=True)
    idle, busy = Socket(door), Socket(door).send(text(b"1"))
    door.lane.drain()
    assert idle.closed()[0] == 1001
    assert busy.state is SOCKET_DUE
    door.alpha.answer()
    answer, close = busy.frames()
    assert (answer.data, close.opcode, busy.state) == (b"alpha 1", Opcode.CLOSE, LINGER)
    assert door.connect().send(asked()).state is not SOCKET


def test_a_full_queue_and_a_bad_request_are_answers_and_the_socket_stays(doors):
    door = doors(waits=True)
    socket = Socket(door)
    door.alpha.room = 0
    socket.send(text(b"1"))
    door.alpha.room = 10
    socket.send(text(b"2"))
    request = door.alpha.asked[0]
    request.reply(request, Failure(failure_of(ValueError("no")).error))
    codes = [json.loads(data)["error"]["code"] for _, data in socket.told()]
    assert codes == ["resource_exhausted", "internal"]
    assert socket.state is SOCKET


def test_a_quiet_client_is_pinged_and_one_that_is_gone_is_closed(doors):
    door = doors(keep_alive_s=10.0)
    alive, gone = Socket(door), Socket(door)
    for _ in range(4):
        door.pass_seconds(6)
        assert [each.opcode for each in alive.frames()] == [Opcode.PING]
        alive.send(Frame(Opcode.PONG, b"").serialize(mask=True))
    assert alive.state is SOCKET
    assert gone.client.transport.is_closed


def test_a_client_that_waits_for_its_answer_is_not_quiet(doors):
    door = doors(keep_alive_s=10.0, waits=True)
    socket = Socket(door).send(text(b"1"))
    door.pass_seconds(30)
    door.alpha.answer()
    door.pass_seconds(3)
    assert [each.opcode for each in socket.frames()] == [Opcode.TEXT]
    assert socket.state is SOCKET
    assert not socket.client.transport.is_closed


def test_a_message_that_comes_too_slowly_or_is_all_frames_is_closed(doors):
    door = doors(read_timeout_s=5.0)
    slow = Socket(door).send(text(b"1" * 100)[:50])
    assert slow.state is MESSAGE
    for _ in range(7):
        door.pass_seconds(1)
        slow.send(b"1")
    assert slow.closed() == (1008, "the request comes too slowly")
    hollow = Socket(door).send(text(b"1", fin=False))
    for _ in range(20):
        hollow.send(more(b"", fin=False) * 1000)
        door.turn()
    assert hollow.closed()[0] == 1008


def test_a_message_counts_while_it_arrives_and_the_largest_is_refused(doors):
    door = doors(max_buffered_bytes=1_000_000, max_body_bytes=2_000_000)
    budget = door.lane.byte_budget
    ping = Frame(Opcode.PING, b"1" * 100).serialize(mask=True)
    Socket(door).send(ping[:50], ping[50:])
    assert not budget.held_bytes
    small, large, message = Socket(door), Socket(door), text(b"1" * 300_000)
    small.send(message[:200_000])
    large.send(text(b"1" * 900_000)[:600_000])
    door.turn()
    assert 790_000 < budget.held_bytes < 810_000
    large.send(b"1" * 299_000)
    door.turn()
    assert large.closed()[0] == 1013
    assert budget.held_bytes < 210_000
    small.send(message[200_000:])
    door.turn()
    assert len(door.alpha.asked[-1].body) == 300_000
    assert not budget.held_bytes


def test_many_small_frames_give_way_to_other_clients(doors):
    door, pings = doors(), Frame(Opcode.PING, b"").serialize(mask=True) * 5000
    socket = Socket(door).send(pings)
    pongs = len(socket.frames())
    assert 0 < pongs < 300
    early = door.connect().send(asked() + pings)
    assert early.transport.written.count(b"\x8a\x00") < 300
    while pongs < 5000 or early.transport.written.count(b"\x8a\x00") < 5000:
        door.turn()
        pongs += len(socket.frames())
    assert (socket.state, early.state) == (SOCKET, SOCKET)
