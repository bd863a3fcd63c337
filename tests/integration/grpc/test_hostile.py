# SPDX-License-Identifier: Apache-2.0
"""Clients that break the rules, by mistake or to do harm: each is told so, and nobody else notices."""

import contextlib
import gzip
import itertools
import socket
import ssl
import struct
import threading
import time
import zlib

import grpc
import hpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tests.integration.grpc.served import ALONE, PATIENCE_S, ask, path
from tests.integration.grpc.wire import (
    ACK,
    CANCEL,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    ENABLE_PUSH,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADER_TABLE_SIZE,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_FRAME_SIZE,
    MAX_STREAMS,
    NO_ERROR,
    OPENING,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Answer,
    Wire,
    call,
    data,
    frame,
    header_list,
    headers,
    number,
    packed,
    prefixed,
    settings,
)

from forebay.transports.intake import FULL_BUFFER

INTERNAL, UNIMPLEMENTED, RESOURCE_EXHAUSTED, DEADLINE_EXCEEDED = 13, 12, 8, 4
OPEN = headers("Hang")
"""A call whose message has not come yet."""
WHOLE = call("Hang")


class Bystander:
    """A client with good manners that calls all the time; every call must be answered."""

    def __init__(self, port):
        self.answered = 0
        self.slowest_s = 0.0
        self._channel = grpc.insecure_channel(port.endpoint, ALONE)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error = None

    def _run(self):
        try:
            while not self._is_over.is_set():
                began = time.monotonic()
                message = b"%d" % self.answered
                assert ask(self._channel, "Echo", message) == message
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                self.answered += 1
                self._is_over.wait(0.01)
        except BaseException as error:
            self._error = error

    def __enter__(self):
        ask(self._channel, "Echo")
        self._thread.start()
        return self

    def __exit__(self, *_error):
        before = self.answered
        deadline = time.monotonic() + PATIENCE_S
        while self.answered < before + 2 and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.005)
        self._is_over.set()
        self._thread.join(PATIENCE_S)
        self._channel.close()
        assert self._error is None, self._error
        assert self.answered >= before + 2
        assert self.slowest_s < PATIENCE_S / 2


@pytest.fixture(scope="module")
def bystander(shared_port):
    """Whoever is on the port besides."""
    with Bystander(shared_port) as bystander:
        yield bystander


@pytest.fixture
def unharmed(bystander):
    """Fails if the bystander is not answered any more."""
    yield
    before, deadline = bystander.answered, time.monotonic() + PATIENCE_S
    while bystander.answered == before:
        assert bystander._error is None, bystander._error
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---------------------------------------------------------------------------------------------------------------------
# what ends a connection (RFC 9113, numbers of its sections)

BROKEN = {
    # 4.2, 6: sizes
    "a frame that is too long": (frame(DATA, length=(1 << 24) - 1), {FRAME_SIZE_ERROR}),
    "settings of five bytes": (frame(SETTINGS, bytes(5)), {FRAME_SIZE_ERROR}),
    "settings that acknowledge and say something": (frame(SETTINGS, bytes(6), flags=ACK), {FRAME_SIZE_ERROR}),
    "a ping of seven bytes": (frame(PING, bytes(7)), {FRAME_SIZE_ERROR}),
    "a window update of three bytes": (frame(WINDOW_UPDATE, bytes(3)), {FRAME_SIZE_ERROR}),
    "a reset of three bytes": (OPEN + frame(RST_STREAM, bytes(3), stream=1), {FRAME_SIZE_ERROR}),
    "a priority of four bytes for what nobody has opened": (
        frame(PRIORITY, bytes(4), stream=1),
        {FRAME_SIZE_ERROR},
    ),
    "a goaway of seven bytes": (frame(GOAWAY, bytes(7)), {FRAME_SIZE_ERROR}),
    # 6: frames on streams where they have no place
    "data on stream 0": (frame(DATA, b"x"), {PROTOCOL_ERROR}),
    "headers on stream 0": (headers("Echo", stream=0), {PROTOCOL_ERROR}),
    "priority on stream 0": (frame(PRIORITY, bytes(5)), {PROTOCOL_ERROR}),
    "a reset on stream 0": (frame(RST_STREAM, number(8)), {PROTOCOL_ERROR}),
    "continuation on stream 0": (frame(CONTINUATION, b""), {PROTOCOL_ERROR}),
    "settings on a stream": (frame(SETTINGS, stream=1), {PROTOCOL_ERROR}),
    "a ping on a stream": (frame(PING, bytes(8), stream=1), {PROTOCOL_ERROR}),
    "goaway on a stream": (frame(GOAWAY, bytes(8), stream=1), {PROTOCOL_ERROR}),
    "a promise of the client's": (OPEN + frame(PUSH_PROMISE, number(2), stream=1), {PROTOCOL_ERROR}),
    # 5.1: streams that are idle or closed
    "data on an idle stream": (data(b"x", stream=1), {PROTOCOL_ERROR}),
    "a reset of an idle stream": (frame(RST_STREAM, number(8), stream=1), {PROTOCOL_ERROR}),
    "a window for an idle stream": (frame(WINDOW_UPDATE, number(1), stream=1), {PROTOCOL_ERROR}),
    "a stream of the server's": (headers("Echo", stream=2), {PROTOCOL_ERROR}),
    # F13, and 5.1.1: it was never opened, so that it is no closed one
    "a stream below the last one": (headers("Hang", stream=5) + headers("Echo", stream=3), {PROTOCOL_ERROR}),
    "a stream below the last one that was opened and closed": (
        OPEN + frame(RST_STREAM, number(8), stream=1) + headers("Hang", stream=5) + headers("Echo", stream=1),
        {STREAM_CLOSED},
    ),
    # 6.5.2, 6.9: values
    "push neither on nor off": (settings((ENABLE_PUSH, 2)), {PROTOCOL_ERROR}),
    "a window of 2 GiB": (settings((INITIAL_WINDOW_SIZE, 1 << 31)), {FLOW_CONTROL_ERROR}),
    "frames that are too small": (settings((MAX_FRAME_SIZE, 16_383)), {PROTOCOL_ERROR}),
    "frames that are too large": (settings((MAX_FRAME_SIZE, 1 << 24)), {PROTOCOL_ERROR}),
    "no more window": (frame(WINDOW_UPDATE, number(0)), {PROTOCOL_ERROR}),
    "a window that overflows": (frame(WINDOW_UPDATE, number((1 << 31) - 1)), {FLOW_CONTROL_ERROR}),
    "settings that make a window overflow": (
        WHOLE + frame(WINDOW_UPDATE, number(1 << 30), stream=1) + settings((INITIAL_WINDOW_SIZE, (1 << 31) - 1)),
        {FLOW_CONTROL_ERROR},
    ),
    # 6.1, 6.2: padding
    "data that is all padding and more": (OPEN + frame(DATA, b"\x06abcde", flags=PADDED, stream=1), {PROTOCOL_ERROR}),
    "data of a call that is over and is all padding": (
        call("Nothing") + frame(DATA, b"\x06abcde", flags=PADDED, stream=1),
        {PROTOCOL_ERROR},
    ),
    "padded data without a length": (
        OPEN + frame(DATA, b"", flags=PADDED, stream=1),
        {PROTOCOL_ERROR, FRAME_SIZE_ERROR},
    ),
    "headers that are all padding and more": (
        frame(HEADERS, b"\xff" + packed(header_list("Echo")), flags=END_HEADERS | PADDED, stream=1),
        {PROTOCOL_ERROR},
    ),
    "headers too short for their priority": (
        frame(HEADERS, b"abc", flags=END_HEADERS | WITH_PRIORITY, stream=1),
        {PROTOCOL_ERROR, FRAME_SIZE_ERROR},
    ),
    # 6.10: header blocks
    "continuation of nothing": (frame(CONTINUATION, b"", flags=END_HEADERS, stream=1), {PROTOCOL_ERROR}),
    "continuation of what has ended": (OPEN + frame(CONTINUATION, b"", flags=END_HEADERS, stream=1), {PROTOCOL_ERROR}),
    "a ping within a header block": (headers("Echo", flags=0) + frame(PING, bytes(8)), {PROTOCOL_ERROR}),
    "headers within a header block": (headers("Echo", flags=0) + headers("Echo", stream=3), {PROTOCOL_ERROR}),
    "another stream's continuation": (
        headers("Echo", flags=0) + frame(CONTINUATION, b"", flags=END_HEADERS, stream=3),
        {PROTOCOL_ERROR},
    ),
    "an unknown frame within a header block": (headers("Echo", flags=0) + frame(0xFA, b"x"), {PROTOCOL_ERROR}),
    # RFC 7541
    "an index of nothing": (frame(HEADERS, b"\x80", flags=END_HEADERS, stream=1), {COMPRESSION_ERROR}),
    "an index beyond the table": (frame(HEADERS, b"\xff\x20", flags=END_HEADERS, stream=1), {COMPRESSION_ERROR}),
    "an index without end": (frame(HEADERS, b"\xff" * 1000, flags=END_HEADERS, stream=1), {COMPRESSION_ERROR}),
    "a block that ends too soon": (frame(HEADERS, b"\x40\x0aabc", flags=END_HEADERS, stream=1), {COMPRESSION_ERROR}),
    "a string that is longer than all": (
        frame(HEADERS, b"\x40\x7f\xff\xff\xff\xff\x07", flags=END_HEADERS, stream=1),
        {COMPRESSION_ERROR},
    ),
    "padding that is no end of a string": (
        frame(HEADERS, b"\x40\x81\x00\x01x", flags=END_HEADERS, stream=1),
        {COMPRESSION_ERROR},
    ),
    "a table that is larger than allowed": (
        frame(HEADERS, b"\x3f\xff\xff\x07", flags=END_HEADERS, stream=1),
        {COMPRESSION_ERROR},
    ),
    "a table that changes all the time": (
        frame(HEADERS, b"\x20\x3f\xe1\x1f" * 100 + packed(header_list("Echo")), flags=END_HEADERS, stream=1),
        {COMPRESSION_ERROR},
    ),
    "a table that changes too late": (
        frame(HEADERS, packed(header_list("Echo")) + b"\x20", flags=END_HEADERS, stream=1),
        {COMPRESSION_ERROR},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_breaks_the_protocol_ends_the_connection(shared_port, unharmed, name):
    sent, codes = BROKEN[name]
    with Wire(shared_port) as wire:
        wire.settle()  # so that nothing the server sends can be lost
        wire.send(sent)
        assert wire.end() in codes


@pytest.mark.parametrize("name", ["a ping of seven bytes", "data on an idle stream", "an index of nothing"])
def test_calls_of_a_broken_connection_are_called_off(port, eventually, name):
    with Wire(port) as wire:
        wire.send(call("Hang", stream=1), call("TaskHang", stream=3), call("Endless", stream=5))
        wire.settle()
        eventually(lambda: port.echo.hanging == 3)
        wire.send(BROKEN[name][0].replace(b"\0\0\0\1", b"\0\0\0\7"))
        assert wire.end() == next(iter(BROKEN[name][1]))
    eventually(lambda: port.echo.hanging == 0)


@pytest.mark.parametrize(
    "opening",
    [
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + settings(),
        PREFACE + frame(PING, bytes(8)),
        PREFACE + headers("Echo"),
        PREFACE + frame(SETTINGS, flags=ACK),
        PREFACE + frame(SETTINGS, length=1 << 20),
        b"\x00" * 1000,
        b"\n" * 1000,
        b"PRI",
    ],
)
def test_who_does_not_open_as_is_due_is_closed(shared_port, unharmed, opening):
    with Wire(shared_port, opening=opening) as wire:
        if opening == b"PRI":
            wire.socket.shutdown(1)
        assert wire.end() in {None, PROTOCOL_ERROR, FRAME_SIZE_ERROR}


def test_a_later_version_than_http_2_is_told_so_in_a_frame(shared_port, unharmed):
    with Wire(shared_port, opening=b"PRI * HTTP/3.0\r\n\r\nSM\r\n\r\n") as wire:
        assert wire.end() == PROTOCOL_ERROR


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\r\nhost: test\r\n\r\n",
        b"POST /test.Echo/Echo HTTP/1.1\r\ncontent-length: 5\r\n\r\n12345",
        b"GET /\r\n",
    ],
)
def test_http_1_is_told_what_this_port_is(shared_port, unharmed, request_):
    with Wire(shared_port, opening=request_) as wire:
        answer = b""
        while more := wire.read_bytes():
            answer += more
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"gRPC" in answer


def test_tls_on_the_plain_port_is_closed(shared_port, unharmed):
    with Wire(shared_port, opening=b"") as wire, pytest.raises((ssl.SSLError, ConnectionError)):
        ssl.create_default_context().wrap_socket(wire.socket, server_hostname="localhost")


def test_who_does_not_open_a_tls_port_as_is_due_is_closed(open_port, authority, tls):
    port = open_port(certfile=str(tls / "both.pem"), read_timeout_s=2.0)
    channel = port.connect(credentials=grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
    hello = b"\x16\x03\x01\x02\x00\x01"  # the beginning of one
    with contextlib.ExitStack() as stack:
        openings = OPENING + call("Echo"), b"GET / HTTP/1.1\r\n\r\n", bytes(1000), hello, b""
        sockets = [stack.enter_context(Wire(port, opening=opening)).socket for opening in openings]
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        silent = stack.enter_context(Wire(port, opening=b"")).socket
        sockets.append(stack.enter_context(trust.wrap_socket(silent, server_hostname="localhost")))
        for one in sockets:
            with contextlib.suppress(ConnectionError):
                while one.recv(1 << 16):
                    pass
    assert ask(channel, "Echo", b"x") == b"x"


def test_handshakes_that_are_left_half_way_are_connections(open_port, authority, tls, eventually, caplog):
    port = open_port(certfile=str(tls / "both.pem"), max_connections=20)
    with contextlib.ExitStack() as stack:
        halves = [stack.enter_context(Wire(port, opening=b"")) for _ in range(40)]
        for half in halves[::2]:
            half.flood(b"\x16\x03\x01\x02\x00\x01")
        eventually(lambda: sum(is_closed(half.socket) for half in halves) >= 20)
        assert sum(is_closed(half.socket) for half in halves) == 20
        assert any("all 20 connections are taken" in line for line in caplog.messages)
    channel = port.connect(credentials=grpc.ssl_channel_credentials(authority.cert_pem.bytes()))
    assert ask(channel, "Echo", b"x", wait_for_ready=True) == b"x"
    eventually(lambda: any("the TLS handshake failed: the client hung up" in line for line in caplog.messages))


def test_a_client_in_its_handshake_as_the_server_stops_is_told_so_behind_it(open_port, authority, tls, eventually):
    port = open_port(certfile=str(tls / "both.pem"))
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with Wire(port, opening=b"") as wire:
        with Wire(port, opening=b"") as later:  # once it is greeted, the first one was accepted
            later.socket = trust.wrap_socket(later.socket, server_hostname="localhost")
            later.send(OPENING).settle()
        stopping = port.begin(port.listener.stop(PATIENCE_S))
        eventually(lambda: not can_connect(port))
        wire.socket = trust.wrap_socket(wire.socket, server_hostname="localhost")
        assert wire.send(OPENING).end() == 0
        stopping.result(PATIENCE_S)


def can_connect(port):
    try:
        socket.create_connection((port.host, port.number), PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True


def is_closed(connection):
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


@pytest.mark.parametrize("opening", [b"GET / HTTP/1.1\r\nhost: test\r\n\r\n", OPENING + call("Echo")])
def test_who_comes_to_a_tls_port_without_it_is_told_so(open_port, tls, caplog, opening):
    port = open_port(certfile=str(tls / "both.pem"))
    with Wire(port, opening=opening) as wire:
        answer = b"".join(iter(wire.read_bytes, b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"TLS" in answer
    assert any("was refused: it does not speak TLS" in line for line in caplog.messages)


# ---------------------------------------------------------------------------------------------------------------------
# what ends a call: its connection serves the next one


def after(wire, stream=99):
    """Whether a connection still answers."""
    return wire.send(call("Echo", b"next", stream=stream)).answer(stream).message == b"next"


def test_a_second_message_is_refused_before_its_call_ends(shared_port, unharmed):
    with Wire(shared_port) as wire:
        wire.send(headers("Echo"), data(prefixed(b"one") + prefixed(b"two")))
        assert wire.answer().status == UNIMPLEMENTED
        assert after(wire)


MALFORMED = {
    "an upper-case name": [*header_list("Echo"), ("Upper", "x")],
    "a pseudo-header after others": [*header_list("Echo", **{":scheme": None}), (":scheme", "http")],
    "a path twice": [(":path", "/test.Echo/Echo"), *header_list("Echo")],
    "no path": header_list("Echo", **{":path": None}),
    "an empty path": header_list("Echo", **{":path": ""}),
    "no method": header_list("Echo", **{":method": None}),
    "no scheme": header_list("Echo", **{":scheme": None}),
    "an unknown pseudo-header": [(":other", "x"), *header_list("Echo")],
    "a status": [(":status", "200"), *header_list("Echo")],
    "a header of the connection": [*header_list("Echo"), ("connection", "close")],
    "chunks": [*header_list("Echo"), ("transfer-encoding", "chunked")],
    "te with more than trailers": header_list("Echo", te="gzip"),
    # F13
    "two lengths": [*header_list("Echo"), ("content-length", "6"), ("content-length", "7")],
    "two lengths of a refused call": [*header_list("None"), ("content-length", "6"), ("content-length", "7")],
    "a length that is none": [*header_list("None"), ("content-length", "x")],
    "a space before a path": header_list("Echo", **{":path": " /test.Echo/Echo"}),
    "a tab behind a method": header_list("Echo", **{":method": "POST\t"}),
    "a line end behind a value": [*header_list("Echo"), ("name", "value\n")],
    "a path without a slash": header_list("Echo", **{":path": "test.Echo/Echo"}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_requests_are_reset(shared_port, unharmed, name):  # 8.1.1
    with Wire(shared_port) as wire:
        wire.send(frame(HEADERS, packed(MALFORMED[name]), flags=END_HEADERS, stream=1))
        wire.send(data(prefixed(b"x"), flags=END_STREAM))
        answer = wire.answer()
        assert answer.reset == PROTOCOL_ERROR or answer.headers.get(":status") == "400"
        assert after(wire)


@pytest.mark.parametrize(
    "more,status",
    [
        ({":method": "GET"}, "405"),
        ({"content_type": "text/plain"}, "415"),
        ({"content_type": None}, "415"),
        ({"content_type": "application/grpcx"}, "415"),
    ],
)
def test_what_is_no_grpc_gets_a_status_of_http(shared_port, unharmed, more, status):
    with Wire(shared_port) as wire:
        wire.send(call("Echo", b"x", **more))
        assert wire.answer().headers[":status"] == status
        assert after(wire)


@pytest.mark.parametrize("content_type", ["application/grpc+json", "Application/GRPC+JSON ;charset=utf-8"])
def test_messages_of_json_are_refused(shared_port, unharmed, content_type):
    with Wire(shared_port) as wire:
        answer = wire.send(call("Echo", b"{}", content_type=content_type)).answer()
        assert answer.status == UNIMPLEMENTED
        assert "JSON" in answer.trailers["grpc-message"]
        assert after(wire)


@pytest.mark.parametrize("content_type", ["application/grpc", "application/grpc+proto", "application/grpc;charset=x"])
def test_kinds_of_content(shared_port, content_type):
    with Wire(shared_port) as wire:
        answer = wire.send(call("Echo", b"x", content_type=content_type)).answer()
        assert answer.message == b"x"
        assert answer.headers[":status"] == "200"
        assert answer.headers["content-type"].startswith("application/grpc")


@pytest.mark.parametrize(
    "frames,codes",
    [
        (WHOLE + data(b"more"), {STREAM_CLOSED}),
        (WHOLE + headers("Hang"), {STREAM_CLOSED, PROTOCOL_ERROR}),
        (OPEN + headers("Hang"), {PROTOCOL_ERROR}),
        (OPEN + frame(WINDOW_UPDATE, number(0), stream=1), {PROTOCOL_ERROR}),
        (OPEN + frame(WINDOW_UPDATE, number((1 << 31) - 1), stream=1), {FLOW_CONTROL_ERROR}),
        (OPEN + frame(PRIORITY, bytes(4), stream=1), {FRAME_SIZE_ERROR}),
    ],
    ids=[
        "data after the end",
        "a call twice",
        "trailers that do not end",
        "no more window",
        "overflow",
        "short priority",
    ],
)
def test_what_breaks_a_call_resets_it(port, frames, codes):
    with Wire(port) as wire:
        wire.settle()
        wire.send(frames)
        while (found := wire.read()) is not None:
            if found.kind in {RST_STREAM, GOAWAY}:
                break
        assert found is not None
        if found.kind == RST_STREAM:
            assert wire.answers[1].reset in codes
            assert after(wire)
        else:
            assert wire.goaway in codes


def test_a_call_that_depends_on_itself_harms_nobody(shared_port, unharmed):  # 5.3: priorities are ignored
    with Wire(shared_port) as wire:
        wire.send(frame(PRIORITY, number(1) + b"\x01", stream=1))
        block = number(1) + b"\xff" + packed(header_list("Echo"))
        wire.send(
            frame(HEADERS, block, flags=END_HEADERS | WITH_PRIORITY, stream=1), data(prefixed(b"x"), flags=END_STREAM)
        )
        assert wire.answer().message == b"x" or wire.answer().reset == PROTOCOL_ERROR
        assert after(wire)


BAD_BODIES = {
    "no message": (b"", {}, None),
    "two messages": (prefixed(b"1") + prefixed(b"2"), {}, None),
    "half a prefix": (b"\0\0", {}, None),
    "half a message": (prefixed(b"12345")[:-1], {}, None),
    "more than a message": (prefixed(b"12345") + b"x", {}, None),
    "an unknown flag": (prefixed(b"1", flag=2), {}, None),
    "packed without saying how": (prefixed(gzip.compress(b"1"), flag=1), {}, {INTERNAL, UNIMPLEMENTED}),
    "packed as nobody does": (prefixed(b"1", flag=1), {"grpc_encoding": "other"}, {UNIMPLEMENTED}),
    "packed and broken": (prefixed(b"no gzip", flag=1), {"grpc_encoding": "gzip"}, None),
    "packed and cut off": (prefixed(gzip.compress(bytes(1000))[:-9], flag=1), {"grpc_encoding": "gzip"}, None),
    "packed with more behind": (prefixed(zlib.compress(b"1") + b"more", flag=1), {"grpc_encoding": "deflate"}, None),
    "4 GiB announced": (struct.pack(">BL", 0, (1 << 32) - 1) + b"x", {}, {RESOURCE_EXHAUSTED}),
}


@pytest.mark.parametrize("method", ["Echo", "TaskEcho"])
@pytest.mark.parametrize("name", BAD_BODIES)
def test_bodies_that_are_no_message_are_refused(shared_port, unharmed, method, name):
    body, more, statuses = BAD_BODIES[name]
    with Wire(shared_port) as wire:
        wire.send(headers(method, **more), data(body, flags=END_STREAM))
        answer = wire.answer()
        assert answer.reset is None
        assert answer.headers[":status"] == "200"
        assert answer.status in statuses if statuses else answer.status != 0
        assert answer.body == b""
        if name == "an unknown flag":
            assert "compressed, and the call" not in answer.trailers["grpc-message"]
        if name == "packed as nobody does":
            assert {"identity", "gzip", "deflate"} <= set(
                answer.trailers["grpc-accept-encoding"].replace(" ", "").split(",")
            )
        assert after(wire)


def test_a_call_without_a_message_gets_the_same_however_it_ends(shared_port):
    with Wire(shared_port) as wire:
        wire.send(headers("Echo", flags=END_HEADERS | END_STREAM))
        wire.send(headers("Echo", stream=3), data(b"", stream=3, flags=END_STREAM))
        assert wire.answer(1).trailers == wire.answer(3).trailers
        assert wire.answer(1).status == UNIMPLEMENTED


@pytest.mark.parametrize("name", ["half a prefix", "half a message", "an unknown flag", "packed and broken"])
def test_bad_messages_end_a_stream_of_messages(shared_port, unharmed, name):
    body, more, _ = BAD_BODIES[name]
    with Wire(shared_port) as wire:
        wire.send(headers("Chat", **more), data(prefixed(b"good")), data(body, flags=END_STREAM))
        assert wire.answer().status != 0
        assert after(wire)


@pytest.mark.parametrize("value", ["50m", "50000u", "9999999n", "0S"])
def test_deadlines_are_the_servers_too(port, value):
    with Wire(port) as wire:
        for stream, method in ((1, "Hang"), (3, "TaskHang"), (5, "Deaf"), (7, "Endless")):
            wire.send(call(method, stream=stream, grpc_timeout=value))
            assert wire.answer(stream).status == DEADLINE_EXCEEDED
        wire.settle()
        assert port.echo.hanging == 0


@pytest.mark.parametrize("value", ["", "1", "S", "-1S", "1.5S", "123456789S", "1x", "1 S", "٣S", "99999999H"])
def test_deadlines_that_make_no_sense(shared_port, unharmed, value):
    with Wire(shared_port) as wire:
        answer = wire.send(call("Echo", b"x", grpc_timeout=value)).answer()
        assert answer.is_over
        assert after(wire)


@pytest.mark.parametrize(
    "pair",
    [
        ("name-bin", "no base64!"),
        ("name-bin", "eA"),
        ("name-bin", "eA=="),
        ("name", "\xff\x80"),
        ("name", "ü"),
        ("x" * 1000, "y" * 1000),
        ("grpc-encoding", ""),
    ],
)
def test_odd_metadata(shared_port, unharmed, pair):
    with Wire(shared_port) as wire:
        wire.send(frame(HEADERS, packed([*header_list("Look"), pair]), flags=END_HEADERS, stream=1))
        wire.send(data(prefixed(b""), flags=END_STREAM))
        assert wire.answer().is_over
        if pair[1] in {"eA", "eA=="}:  # the padding may be left out
            assert b'["name-bin","eA=="]' in wire.answer().message
        assert after(wire)


def test_more_metadata_than_allowed_is_refused(open_port):
    port = open_port(max_metadata_bytes=4096)
    with Wire(port) as wire:
        block = packed([*header_list("Echo"), ("long", "x" * 5000)])
        wire.send(frame(HEADERS, block, flags=END_HEADERS, stream=1), data(prefixed(b""), flags=END_STREAM))
        answer = wire.answer()
        assert answer.reset is not None or answer.headers.get(":status") == "431" or answer.status == RESOURCE_EXHAUSTED
        assert after(wire)


def test_more_streams_than_allowed_are_refused(open_port, eventually):
    port = open_port(max_streams=3)
    with Wire(port) as wire:
        wire.settle()
        assert wire.settings[MAX_STREAMS] == 3
        for stream in (1, 3, 5, 7, 9):
            wire.send(call("Hang", stream=stream))
        for stream in (7, 9):
            assert wire.answer(stream).reset == REFUSED_STREAM
        wire.settle()
        eventually(lambda: port.echo.hanging == 3)
        wire.send(frame(RST_STREAM, number(CANCEL), stream=3))
        assert after(wire)


def test_more_bytes_than_all_clients_may_have_waiting_are_refused(open_port):
    port = open_port(max_buffered_bytes=1_000_000)
    with Wire(port) as first, Wire(port) as second:
        for wire in (first, second):
            wire.settle()
            wire.send(headers("Echo"))
        first.send(*_in_frames(prefixed(bytes(400_000))[:-1]))
        first.settle()
        second.send(*_in_frames(prefixed(bytes(700_000))[:-1]))  # it has the most when they are too many together
        assert second.answer().status == RESOURCE_EXHAUSTED
        first.send(
            data(b"\0", flags=END_STREAM),
            frame(WINDOW_UPDATE, number(1 << 20)),
            frame(WINDOW_UPDATE, number(1 << 20), stream=1),
        )
        assert len(first.answer().message) == 400_000
        second.send(call("Echo", b"x", stream=3))
        assert second.answer(3).message == b"x"


def _in_frames(payload, stream=1):
    return [data(payload[at : at + 16_000], stream=stream) for at in range(0, len(payload), 16_000)]


def test_data_beyond_its_window_is_an_error(port):
    with Wire(port) as wire:
        wire.settle()
        window = wire.settings.get(INITIAL_WINDOW_SIZE, 65_535)
        wire.send(headers("Deaf"))
        part = b"".join(_in_frames(prefixed(bytes(15_995)) * 10))
        count = (window + 65_535 + wire.windows.get(0, 0)) // 160_000 + 2
        wire.flood(part * count)
        code = None
        while (found := wire.read()) is not None:
            if found.kind in {RST_STREAM, GOAWAY}:
                code = int.from_bytes(found.payload[-4:] if found.kind == RST_STREAM else found.payload[4:8])
                break
        assert code in {FLOW_CONTROL_ERROR, None}
    assert port.echo.cancelled.wait(PATIENCE_S)


# ---------------------------------------------------------------------------------------------------------------------
# clients that take their time


def test_who_keeps_the_server_waiting_is_cut_off(open_port, eventually):
    port = open_port(read_timeout_s=PATIENCE_S, write_timeout_s=PATIENCE_S)
    channel = port.connect()
    waiting = channel.unary_unary(path("Hang")).future(b"", timeout=PATIENCE_S)
    assert port.echo.entered.wait(PATIENCE_S)
    with contextlib.ExitStack() as stack:

        def wire(*frames, opening=OPENING, **more):
            return stack.enter_context(Wire(port, opening=opening, **more)).send(*frames)

        quiet = wire().settle()
        half_a_ping = frame(PING, bytes(8))[:-1]
        cut_off = {
            "says nothing": wire(opening=b""),
            "half a preface": wire(opening=PREFACE[:10]),
            "a preface alone": wire(opening=PREFACE),
            "half a frame": wire(half_a_ping),
            "half a head of a frame": wire(half_a_ping[:3]),
            "half a header block": wire(headers("Echo", flags=0)),
        }
        ended = {
            "half a message": wire(headers("Echo"), data(prefixed(bytes(10))[:-1])),
            "no message": wire(headers("Echo")),
            "opens no window": wire(call("Echo", b"x"), opening=PREFACE + settings((INITIAL_WINDOW_SIZE, 0))),
        }
        wide = PREFACE + settings((INITIAL_WINDOW_SIZE, (1 << 31) - 1)) + frame(WINDOW_UPDATE, number(1 << 30))
        deaf = wire(call("Large", b"20000000"), opening=wide, receive_bytes=4096)
        eventually(lambda: len(port.listener._port.connections) == 2 + len(cut_off) + len(ended) + 1)
        ask(channel, "Echo")  # what came before was read
        # Before that its call is in the middle of being written, which no time passes in.
        eventually(lambda: any(one._intake.holds & FULL_BUFFER for one in port.listener._port.connections))
        eventually(lambda: port.forward(PATIENCE_S) or is_cut_off(deaf))
        for name, one in cut_off.items():
            assert one.end() in {None, NO_ERROR, PROTOCOL_ERROR, ENHANCE_YOUR_CALM}, name
        for one in ended.values():  # its call or all of it
            while (found := one.read()) is not None and not one.answers[found.stream].is_over:
                pass
        assert after(quiet), "who says nothing between two calls may stay"
    assert not waiting.done(), "who waits for an answer is not slow"
    assert ask(channel, "Echo", b"x") == b"x"
    waiting.cancel()


def a_while_later(port, eventually, wire, data):
    """Sends something and lets more than half of the time of a frame pass; tells whether that was taken."""
    (connection,) = port.listener._port.connections
    before = connection._seen
    wire.send(data)
    eventually(lambda: connection._seen > before)
    port.forward(PATIENCE_S // 2 + 1)
    return connection.state.reads


@pytest.mark.parametrize(
    "begun, more",
    [
        (frame(HEADERS, bytes(10), flags=END_HEADERS, stream=1)[:-8], b"\0"),
        (data(bytes(1000))[:9], b"\0"),
        (headers("Echo", flags=0), frame(CONTINUATION, b"\0", stream=1)),
    ],
)
def test_a_frame_that_comes_bit_by_bit_has_no_more_time_than_another(open_port, eventually, begun, more):
    port = open_port(read_timeout_s=PATIENCE_S)
    with Wire(port) as wire:
        wire.settle()
        port.forward(1)
        assert a_while_later(port, eventually, wire, begun)
        assert not a_while_later(port, eventually, wire, more)
        assert wire.end() == PROTOCOL_ERROR


def test_who_is_always_in_the_middle_of_a_frame_but_of_another_one_may_stay(open_port, eventually):
    port = open_port(read_timeout_s=PATIENCE_S)
    ping = frame(PING, bytes(8))
    with Wire(port) as wire:
        wire.settle()
        port.forward(1)
        assert a_while_later(port, eventually, wire, ping[:9])
        for _ in range(3):
            assert a_while_later(port, eventually, wire, ping[9:] + ping[:9])
        assert after(wire.send(ping[9:]))


def wide_open():
    """What a client says that takes any amount of answers."""
    return OPENING + settings((INITIAL_WINDOW_SIZE, (1 << 31) - 1)) + frame(WINDOW_UPDATE, number(1 << 30))


def test_who_takes_nothing_of_what_the_kernel_holds_is_cut_off(open_port, eventually):
    """Its window is smaller than what the kernel takes for it, so that nothing is left for the server to write."""
    port = open_port(write_timeout_s=PATIENCE_S)
    with Wire(port, receive_bytes=4096) as deaf:
        deaf.send(call("Large", b"200000"))
        eventually(lambda: any(one._written >= 60_000 for one in port.listener._port.connections))
        assert not any(one._transport.get_write_buffer_size() for one in port.listener._port.connections)
        eventually(lambda: port.forward(PATIENCE_S) or is_cut_off(deaf))


@pytest.mark.parametrize("room", [0, 1 << 24])
def test_who_takes_many_long_answers_slowly_gets_all_of_them(open_port, room):
    port = open_port(write_timeout_s=5)
    streams = range(1, 41, 2)
    opening = OPENING + (frame(WINDOW_UPDATE, number(room)) if room else b"")
    with Wire(port, opening=opening, receive_bytes=4096) as wire:
        wire.send(*(call("Large", b"200000", stream=stream) for stream in streams))
        taken = 0
        while not all(stream in wire.answers and wire.answers[stream].is_over for stream in streams):
            found = wire.read()
            assert found is not None, "the connection was cut off"
            if found.kind == DATA and found.payload:
                more = number(len(found.payload))
                wire.flood(frame(WINDOW_UPDATE, more), frame(WINDOW_UPDATE, more, stream=found.stream))
                taken += len(found.payload)
                if taken >= 16_384:  # more than the kernel had for it, so that some was acknowledged
                    taken = 0
                    port.forward(0)
        assert [wire.answers[stream].reset for stream in streams] == [None] * len(streams)


def test_who_broke_the_rules_and_reads_nothing_is_not_kept(open_port, eventually):
    """Sizes differ so that, whatever the kernel takes, some answers are not quite written."""
    sizes = range(200_000, 5_000_000, 200_000)
    port = open_port(max_connections=len(sizes), write_timeout_s=PATIENCE_S)

    def is_free():
        """Whether as many others find room."""
        with contextlib.ExitStack() as stack:
            wires = [stack.enter_context(Wire(port)) for _ in sizes]
            try:
                return all(after(wire, stream=1) for wire in wires)
            except (AssertionError, ConnectionError):
                return False

    with contextlib.ExitStack() as stack:
        deaf = [stack.enter_context(Wire(port, opening=wide_open(), receive_bytes=4096)) for _ in sizes]
        for wire, size in zip(deaf, sizes, strict=True):
            wire.send(call("Large", b"%d" % size))
        time.sleep(0.3)  # until the kernel takes no more
        for wire in deaf:
            wire.flood(frame(PING, bytes(7)))
        assert not is_free()
        eventually(lambda: port.forward(PATIENCE_S) or is_free())


def is_cut_off(wire):
    """Whether sending fails; says so without reading."""
    try:
        wire.send(frame(PING, bytes(8)))
    except ConnectionError:
        return True
    return False


# ---------------------------------------------------------------------------------------------------------------------
# floods, against a server in a process of its own


@pytest.fixture
def besieged(apart):
    """A server under attack: others are answered meanwhile, and it does not grow."""
    apart.forget_peak()
    with Bystander(apart):
        yield apart
    assert apart.grown_mib() < 48


def resets(count, *, whole):
    """Calls that are called off at once."""
    encoder = hpack.Encoder()
    first, block = (encoder.encode(header_list("Hang")) for _ in range(2))
    frames = []
    for index in range(count):
        stream = 2 * index + 1
        frames.append(frame(HEADERS, block if index else first, flags=END_HEADERS, stream=stream))
        if whole:
            frames.append(data(prefixed(b""), stream=stream, flags=END_STREAM))
        frames.append(frame(RST_STREAM, number(CANCEL), stream=stream))
    return b"".join(frames)


def bomb():
    """One long field that is referred to ten thousand times in one block."""
    return packed(header_list("Echo")) + hpack.Encoder().encode([("x", "y" * 4000)]) + b"\xbe" * 10_000


FLOODS = {
    "pings": lambda: frame(PING, bytes(8)) * 100_000,
    "settings": lambda: settings((HEADER_TABLE_SIZE, 4096)) * 100_000,
    "empty settings": lambda: settings() * 100_000,
    "continuations": lambda: headers("Echo", flags=0) + frame(CONTINUATION, b"", stream=1) * 100_000,
    "long continuations": lambda: headers("Echo", flags=0) + frame(CONTINUATION, b"\0\1x\x01y" * 3000, stream=1) * 300,
    "calls that are called off": lambda: resets(50_000, whole=True),
    "openings that are called off": lambda: resets(50_000, whole=False),
    "empty data": lambda: headers("Chat") + data(b"") * 100_000,
    "long field often": lambda: frame(HEADERS, bomb(), flags=END_HEADERS, stream=1),
}


@pytest.mark.parametrize("name", FLOODS)
def test_floods_end_the_connection(besieged, name):
    with Wire(besieged) as wire:
        wire.settle()
        wire.flood(FLOODS[name]())
        if name == "long field often":  # one block is no flood: refusing the call is enough
            answer = None
            while not (answer and answer.is_over) and wire.read() is not None:
                answer = wire.answers.get(1)
            assert (
                answer is None
                or answer.reset is not None
                or answer.headers.get(":status") == "431"
                or answer.status == RESOURCE_EXHAUSTED
            )
        else:
            assert wire.end() in {ENHANCE_YOUR_CALM, None}


@pytest.mark.parametrize(
    "unit",
    [
        frame(PRIORITY, number(0) + b"\1", stream=3),
        frame(WINDOW_UPDATE, number(1)),
        frame(0xFA, b"something", stream=1),
        frame(PING, bytes(8), flags=ACK),
    ],
    ids=["priorities", "windows", "unknown frames", "answers to pings"],
)
def test_floods_of_little_weight_harm_nobody(besieged, unit):
    with Wire(besieged) as wire:
        wire.settle()
        wire.flood(unit * 100_000)
        try:
            assert after(wire)
        except (AssertionError, ConnectionError):
            assert wire.end() in {ENHANCE_YOUR_CALM, None}


def test_nothing_is_left_of_calls_that_were_called_off(besieged):
    for _ in range(5):
        with Wire(besieged) as wire:
            wire.flood(resets(2000, whole=True))
    with grpc.insecure_channel(besieged.endpoint, ALONE) as channel:
        deadline = time.monotonic() + PATIENCE_S
        while b'"hanging":0' not in ask(channel, "Look"):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_asking_for_many_answers_and_reading_nothing_costs_little(besieged):
    """Streams that would never end, and 2 GB in long ones and in short ones: nothing of it is held ready."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            wire = stack.enter_context(Wire(besieged, opening=wide_open(), receive_bytes=4096))
            wire.flood(*(call("Endless", stream=2 * index + 1) for index in range(100)))
            wire.flood(*(call("Repeat", b"1000 10000", stream=2 * index + 1) for index in range(100, 160)))
        for _ in range(3):
            wire = stack.enter_context(Wire(besieged, opening=wide_open(), receive_bytes=4096))
            wire.socket.settimeout(0.5)
            with contextlib.suppress(TimeoutError):
                wire.flood(*(call("Large", b"16000", stream=2 * index + 1) for index in range(15_000)))
        time.sleep(0.3)  # the server goes on with what it has read


def test_answers_that_may_not_leave_are_forgotten_with_their_calls(besieged):
    """The window of the connection is used up, so that everything has to wait for ever."""
    with Wire(besieged, opening=OPENING + settings((INITIAL_WINDOW_SIZE, 1 << 20))) as wire:
        wire.send(call("Large", b"100000"))
        while len(wire.answers.setdefault(1, Answer()).body) < 65_535:
            wire.read()
        for begin in range(3, 10_003, 400):
            if begin == 2003:
                besieged.forget_peak()
            streams = range(begin, begin + 400, 2)
            wire.send(*(call("Endless", stream=stream, grpc_timeout="20m") for stream in streams))
            for stream in streams:
                assert wire.answer(stream).status == DEADLINE_EXCEEDED
    assert besieged.grown_mib() < 5


def test_settings_that_change_all_windows_all_the_time_stop_nobody(besieged):
    """Each of the values in a frame concerns every open call."""
    with Wire(besieged) as wire:
        wire.send(*(call("Hang", stream=2 * index + 1) for index in range(1000))).settle()
        pairs = [(INITIAL_WINDOW_SIZE, 1000 + index % 2) for index in range(2700)]
        wire.flood(settings(*pairs) * 50, *(settings(pair) for pair in pairs * 3))
        began = time.monotonic()
        wire.flood(frame(PING, b"finished"))
        while (found := wire.read()) is not None and found.payload != b"finished":
            pass
    assert time.monotonic() - began < PATIENCE_S


def test_a_client_that_says_something_about_each_frame_is_no_flood(besieged):
    with Wire(besieged) as wire:
        wire.send(call("Repeat", b"20000 10"))
        while not (answer := wire.answers.setdefault(1, Answer())).is_over:
            found = wire.read()
            assert found is not None, f"cut off with {wire.goaway} after {len(answer.body)} bytes"
            if found.kind == DATA and found.payload:
                size = number(len(found.payload))
                wire.send(frame(WINDOW_UPDATE, size), frame(WINDOW_UPDATE, size, stream=1), frame(PING, bytes(8)))
        assert answer.trailers["grpc-status"] == "0"
        assert len(answer.body) == 20_000 * 15


# ---------------------------------------------------------------------------------------------------------------------
# anything at all


@hypothesis_settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes(shared_port, bystander, noise, is_polite):
    with Wire(shared_port, opening=PREFACE + settings() if is_polite else b"") as wire:
        wire.flood(noise)
        wire.socket.shutdown(1)
        wire.end()
    assert bystander._error is None


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            frame,
            st.integers(0, 10),
            st.one_of(
                st.binary(max_size=40), st.just(packed(header_list("Echo"))), st.integers(0, 1 << 31).map(number)
            ),
            flags=st.integers(0, 63),
            stream=st.sampled_from([0, 1, 1, 2, 3, 5, (1 << 31) - 1]),
        ),
        max_size=8,
    )
)
def test_random_frames(shared_port, bystander, frames):
    with Wire(shared_port) as wire:
        wire.flood(*frames)
        wire.socket.shutdown(1)
        wire.end()
    assert bystander._error is None


@st.composite
def exchanges(draw):
    """Calls whose headers share a table of compression; gives the bytes of each, and its metadata if it is answered."""
    encoder = hpack.Encoder()
    names = st.sampled_from(["a", "b", "long-name-of-a-field"])
    values = st.one_of(st.sampled_from(["1", "2", "x" * 1500]), st.text("abcxyz019 -", max_size=20).map(str.strip))
    found = []
    for index in range(draw(st.integers(1, 12))):
        stream = 2 * index + 1
        metadata = draw(st.lists(st.tuples(names, values), max_size=3))
        fields = [*header_list(draw(st.sampled_from(["Look", "Look", "Nothing"]))), *metadata]
        kind = draw(st.sampled_from(["answered", "answered", "answered", "malformed", "with trailers", "resized"]))
        if kind == "malformed":
            fields.append(("Upper", "case"))
        if kind == "resized":
            encoder.header_table_size = draw(st.integers(0, 4096))
        frames = frame(HEADERS, encoder.encode(fields), flags=END_HEADERS, stream=stream)
        frames += data(prefixed(b""), stream=stream, flags=0 if kind == "with trailers" else END_STREAM)
        if kind == "with trailers":
            trailers = encoder.encode(draw(st.lists(st.tuples(names, values), max_size=2)))
            frames += frame(HEADERS, trailers, flags=END_HEADERS | END_STREAM, stream=stream)
        found.append((frames, [list(pair) for pair in metadata] if kind != "malformed" else None))
    return found


@pytest.mark.parametrize("where", ["call", "refused call", "malformed call", "trailers", "call that is reset"])
def test_the_same_block_means_another_thing_once_the_table_has_changed(shared_port, where):
    def learn(value):
        return b"\x40\x01v" + bytes([len(value)]) + value

    def look(wire, stream, block):
        wire.send(frame(HEADERS, packed(header_list("Look")) + block, flags=END_HEADERS, stream=stream))
        wire.send(data(prefixed(b""), stream=stream, flags=END_STREAM))
        return msgspec.json.decode(wire.answer(stream).message)["metadata"]

    with Wire(shared_port) as wire:
        assert look(wire, 1, learn(b"one")) == [["v", "one"]]
        for stream in (3, 5):
            assert look(wire, stream, b"\xbe") == [["v", "one"]]
        method = "Nothing" if where == "refused call" else "Echo"
        block = packed(header_list(method))
        if where != "trailers":
            block += learn(b"two")
        if where == "malformed call":
            block += packed([("Upper", "case")])
        wire.send(frame(HEADERS, block, flags=END_HEADERS, stream=7))
        if where == "call that is reset":
            wire.send(frame(RST_STREAM, number(CANCEL), stream=7))
        elif where == "trailers":
            wire.send(data(prefixed(b""), stream=7))
            wire.send(frame(HEADERS, learn(b"two"), flags=END_HEADERS | END_STREAM, stream=7))
        for stream in (9, 11):
            assert look(wire, stream, b"\xbe") == [["v", "two"]]


@hypothesis_settings(max_examples=40, deadline=None)
@given(exchanges())
def test_compressed_headers_mean_what_they_say(shared_port, exchange):
    with Wire(shared_port) as wire:
        wire.send(*(frames for frames, _ in exchange))
        for index, (_, metadata) in enumerate(exchange):
            answer = wire.answer(2 * index + 1)
            if metadata is None:
                assert answer.reset == PROTOCOL_ERROR
            elif answer.status != UNIMPLEMENTED:
                assert msgspec.json.decode(answer.message)["metadata"] == metadata


def padded(payload, stream, pad, *, is_last):
    flags = (END_STREAM if is_last else 0) | (PADDED if pad is not None else 0)
    return data(payload if pad is None else bytes([pad]) + payload + bytes(pad), stream=stream, flags=flags)


@st.composite
def conversations(draw):
    """Calls as correct as can be, in frames and in pieces of any size; gives the pieces and the messages."""
    encoder = hpack.Encoder()
    messages = draw(st.lists(st.binary(max_size=60), min_size=1, max_size=5))
    queues = []
    for index, message in enumerate(messages):
        stream = 2 * index + 1
        payload, parts = prefixed(message), []
        for cut in sorted(draw(st.lists(st.integers(0, len(payload)), max_size=3))):
            parts.append(payload[len(b"".join(parts)) : cut])
        parts.append(payload[len(b"".join(parts)) :])
        last = len(parts) - 1
        pads = draw(st.lists(st.none() | st.integers(0, 20), min_size=len(parts), max_size=len(parts)))
        queues.append([padded(part, stream, pads[at], is_last=at == last) for at, part in enumerate(parts)])
    between = st.sampled_from(
        [
            b"",
            b"",
            frame(PING, bytes(8)),
            frame(WINDOW_UPDATE, number(9)),
            frame(0xFA, b"?"),
            settings((MAX_STREAMS, 7)),
        ]
    )
    frames = []
    for index in range(len(queues)):  # streams open in order, and their data is mixed
        method = draw(st.sampled_from(["Echo", "TaskEcho", "Join"]))
        block = encoder.encode(header_list(method))
        cut = draw(st.integers(0, len(block)))
        stream = 2 * index + 1
        frames.append(frame(HEADERS, block[:cut], stream=stream))
        frames.append(frame(CONTINUATION, block[cut:], flags=END_HEADERS, stream=stream))
        for _ in range(draw(st.integers(0, 3))):
            queue = queues[draw(st.integers(0, index))]
            frames += [draw(between), queue.pop(0)] if queue else []
    frames += [part for queue in queues for part in queue]
    whole = PREFACE + settings() + b"".join(frames)
    cuts = [0, *sorted(draw(st.lists(st.integers(0, len(whole)), max_size=12))), len(whole)]
    return [whole[begin:end] for begin, end in itertools.pairwise(cuts)], messages


@hypothesis_settings(max_examples=40, deadline=None)
@given(conversations())
def test_how_calls_are_cut_to_pieces_changes_nothing(shared_port, conversation):
    pieces, messages = conversation
    with Wire(shared_port, opening=b"") as wire:
        for piece in pieces:
            wire.send(piece)
            time.sleep(0.0003)  # so that most pieces arrive alone
        assert [wire.answer(2 * index + 1).message for index in range(len(messages))] == messages
