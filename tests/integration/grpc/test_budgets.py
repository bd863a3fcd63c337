# SPDX-License-Identifier: Apache-2.0
"""Work that is refused counts like work, and what is unpacked or watched has a budget while it grows."""

import functools
import gzip
import logging
import threading
import zlib
from typing import Any

import pytest
from tests.integration.grpc.served import NAME, PATIENCE_S, ask
from tests.integration.grpc.wire import (
    CANCEL,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    OPENING,
    PRIORITY,
    RST_STREAM,
    WINDOW_UPDATE,
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
)

from forebay.transports.grpc import messages

RESOURCE_EXHAUSTED, UNAUTHENTICATED, OK = 8, 16, 0
CHECK, LIST, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
KEYED: dict[str, Any] = {"x_api_key": "secret"}
MIB = 1 << 20


def in_frames(payload, stream=1):
    parts = [payload[at : at + 16_000] for at in range(0, len(payload), 16_000)]
    return b"".join(
        data(part, stream=stream, flags=END_STREAM if at == len(parts) - 1 else 0) for at, part in enumerate(parts)
    )


@functools.lru_cache(maxsize=4)
def _packed(message):
    return gzip.compress(message, 9)


def squeezed(message, *, stream=1, method="Count"):
    """A call with one message that is packed."""
    payload = prefixed(_packed(message), flag=1)
    return headers(method, stream=stream, grpc_encoding="gzip") + in_frames(payload, stream)


# ---------------------------------------------------------------------------------------------------------------------
# heads


@pytest.mark.parametrize("method", ["Echo", "Nothing"])
def test_a_block_that_says_far_too_much_ends_the_connection(port, method):  # F10
    with Wire(port) as wire:
        wire.settle()
        bomb = packed(header_list(method)) + b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000 + b"\xbe" * 10_000
        wire.send(frame(HEADERS, bomb, flags=END_HEADERS, stream=1))
        assert wire.end() == ENHANCE_YOUR_CALM


def test_a_block_of_bytes_that_take_four_when_they_are_packed_is_not_unpacked(port):
    rare = bytes.fromhex("fffffe2fffffe2") * 8000  # 16,000 bytes, of 28 bits each
    block = packed(header_list("Echo")) + b"\x00\x01x\xff\xc1\xb4\x03" + rare
    assert len(block) < 4 * port.config.max_metadata_bytes
    with Wire(port) as wire:
        wire.settle()
        wire.send(frame(HEADERS, block, flags=END_HEADERS, stream=1))
        assert wire.end() == ENHANCE_YOUR_CALM


REFUSED = {
    "no key": (headers("Echo", stream=1), headers("Echo", stream=1)),
    "no such method": (b"", headers("Nothing", stream=1, **KEYED)),
    "malformed": (b"", frame(HEADERS, packed([*header_list("Echo"), ("Upper", "x")]), flags=END_HEADERS, stream=1)),
}


def numbered(frames, stream):
    """The same frames on another stream, whose number is the last four bytes of the head of each."""
    return frames[:5] + number(stream) + frames[9:]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_heads_are_counted(open_port, name):  # F10
    port = open_port(api_keys=("secret",))
    unit = REFUSED[name][1]
    with Wire(port) as wire:
        wire.settle()
        wire.flood(*(numbered(unit, 2 * index + 1) for index in range(6000)))
        assert wire.end() == ENHANCE_YOUR_CALM


def test_trailers_of_a_refused_call_are_counted(open_port):  # F10
    port = open_port(api_keys=("secret",))
    wordy = frame(HEADERS, b"\x95" * 300, flags=END_HEADERS | END_STREAM, stream=1)  # fields of the static table
    with Wire(port) as wire:
        wire.send(headers("Echo")).settle()
        wire.flood(wordy * 6000)
        assert wire.end() == ENHANCE_YOUR_CALM


def test_streams_that_are_passed_over_explain_nothing(port):  # F10
    """A ping costs little, and each call allows for some; numbers that no call has do not."""
    with Wire(port) as wire:
        wire.settle()
        wire.send(call("Echo", b"x", stream=(1 << 31) - 1))
        wire.flood(frame(6, bytes(8)) * 30_000)
        assert wire.end() == ENHANCE_YOUR_CALM


FAULTS = {
    "no more window": lambda stream: frame(WINDOW_UPDATE, number(0), stream=stream),
    "a window that overflows": lambda stream: frame(WINDOW_UPDATE, number((1 << 31) - 1), stream=stream),
    "a short priority": lambda stream: frame(PRIORITY, bytes(4), stream=stream),
    "data after the end": lambda stream: data(b"x", stream=stream),
}


@pytest.mark.parametrize("name", FAULTS)
def test_who_has_the_server_reset_calls_is_counted(port, eventually, name):  # F11
    """The client breaks a rule instead of calling off: CVE-2025-8671."""
    with Wire(port) as wire:
        wire.settle()
        streams = range(1, 12_001, 2)
        wire.flood(*(call("Hang", stream=stream) + FAULTS[name](stream) for stream in streams))
        assert wire.end() == ENHANCE_YOUR_CALM
    eventually(lambda: port.echo.hanging == 0)


def test_a_client_that_errs_now_and_then_is_served(port):
    with Wire(port) as wire:
        for stream in range(1, 401, 4):
            wire.send(call("Hang", stream=stream), FAULTS["no more window"](stream), call("Echo", stream=stream + 2))
            assert wire.answer(stream + 2).message == b""


# ---------------------------------------------------------------------------------------------------------------------
# messages


class Spy:
    """Stands in for zlib, and notes which thread unpacked how much at a time."""

    error = zlib.error

    def __init__(self):
        self.seen = []

    def decompressobj(self, wbits):
        return _Spied(zlib.decompressobj(wbits), self.seen)


class _Spied:
    def __init__(self, inner, seen):
        self._inner = inner
        self._seen = seen

    def decompress(self, given, max_length=0):
        found = self._inner.decompress(given, max_length)
        self._seen.append((threading.current_thread(), len(found)))
        return found

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.fixture
def spy(monkeypatch):
    found = Spy()
    monkeypatch.setattr(messages, "zlib", found)
    return found


@pytest.mark.parametrize("method", ["Echo", "TaskEcho", "Count"])
def test_large_messages_are_unpacked_beside_the_loop(port, spy, method):  # F12
    with Wire(port, opening=OPENING + frame(WINDOW_UPDATE, number(1 << 30))) as wire:
        wire.send(squeezed(bytes(8 * MIB), method=method))
        if method == "Count":
            assert wire.answer().message == b"%d" % (8 * MIB)
        else:
            while not wire.answers.get(1) or len(wire.answers[1].body) < 65_535:
                assert wire.read() is not None
    on_loop = [size for thread, size in spy.seen if thread is port._thread]
    assert sum(size for _, size in spy.seen) == 8 * MIB
    assert sum(on_loop) <= 64 * 1024
    assert max(size for _, size in spy.seen) <= MIB


def test_small_messages_are_unpacked_where_they_are(port, spy):
    with Wire(port) as wire:
        assert wire.send(squeezed(b"x" * 5000, method="Echo")).answer().message == b"x" * 5000
    assert {thread for thread, _ in spy.seen} == {port._thread}


@pytest.mark.parametrize("method", ["Hang", "TaskHang", "Deaf"])
def test_what_is_unpacked_counts_while_it_is_held(open_port, eventually, method):  # F12
    port = open_port(max_buffered_bytes=20 * MIB)
    shared = port.listener._port
    if method == "Deaf":  # it takes no message, so nothing is unpacked for it
        with Wire(port) as wire:
            wire.send(squeezed(bytes(12 * MIB), method=method)).settle()
            assert shared.byte_budget.held_bytes < MIB
        eventually(lambda: shared.byte_budget.held_bytes == 0)
        return
    with Wire(port) as wire:
        wire.send(squeezed(bytes(12 * MIB), method=method))
        eventually(lambda: port.echo.hanging == 1)
        assert shared.byte_budget.held_bytes == 12 * MIB
        wire.send(squeezed(bytes(12 * MIB), stream=3, method=method))
        assert wire.answer(3).status == RESOURCE_EXHAUSTED
        wire.send(frame(RST_STREAM, number(CANCEL), stream=1))
        eventually(lambda: port.echo.hanging == 0)
        assert shared.byte_budget.held_bytes == 0
        wire.send(squeezed(bytes(12 * MIB), stream=5, method=method))
        eventually(lambda: port.echo.hanging == 1)
    eventually(lambda: shared.byte_budget.held_bytes == 0)


def test_a_message_that_would_be_too_long_is_never_unpacked_that_far(open_port, spy):  # F12
    port = open_port(max_message_bytes=4 * MIB)
    with Wire(port) as wire:
        wire.send(squeezed(bytes(100 * MIB), method="Echo"))
        assert wire.answer().status == RESOURCE_EXHAUSTED
    assert sum(size for _, size in spy.seen) <= 5 * MIB


def test_messages_of_a_stream_stay_in_order(port):  # F12: large and small, packed and not
    parts = [b"%d|" % index * (1 if index % 3 else 300_000) for index in range(8)]
    with Wire(port, opening=OPENING + frame(WINDOW_UPDATE, number(1 << 30))) as wire:
        wire.send(headers("Count", grpc_encoding="gzip"))
        payload = b"".join(
            prefixed(gzip.compress(part), flag=1) if index % 2 else prefixed(part) for index, part in enumerate(parts)
        )
        wire.send(in_frames(payload))
        assert wire.answer().message == b"%d" % sum(map(len, parts))
    channel = port.connect()
    chat = channel.stream_stream(f"/{NAME}/Chat")
    assert list(chat(iter(parts), timeout=PATIENCE_S, compression=2)) == parts


def test_calls_that_end_while_their_message_is_unpacked_leave_nothing(port, eventually):  # F12
    shared = port.listener._port
    with Wire(port) as wire:
        for stream in range(1, 41, 2):
            wire.send(squeezed(bytes(16 * MIB), stream=stream, method="Hang"))
            wire.send(frame(RST_STREAM, number(CANCEL), stream=stream))
        wire.send(call("Echo", b"x", stream=99))
        assert wire.answer(99).message == b"x"
    eventually(lambda: shared.byte_budget.held_bytes == 0 and port.echo.hanging == 0 and shared.calls == 0)


# ---------------------------------------------------------------------------------------------------------------------
# what needs no key


def test_those_who_watch_take_no_place_of_a_call(open_port, eventually):  # F65
    port = open_port(max_calls=4, api_keys=("secret",))
    shared = port.listener._port
    with Wire(port) as first, Wire(port) as second, Wire(port) as third:
        for wire in (first, second):
            wire.send(*(call(WATCH, stream=2 * index + 1) for index in range(100)))
            wire.settle()
        found = [wire.answers.get(2 * index + 1) for wire in (first, second) for index in range(100)]
        statuses = [answer.status for answer in found if answer is not None and answer.is_over]
        assert set(statuses) == {RESOURCE_EXHAUSTED}
        assert len(statuses) == 200 - 2 * 16
        assert shared.public_streams == 32
        third.send(call("Echo", b"x", **KEYED), call(CHECK, stream=3), call(LIST, stream=5))
        assert third.answer(1).message == b"x"
        assert third.answer(3).status == third.answer(5).status == OK
        assert shared.calls == 0
    eventually(lambda: shared.public_streams == 0)


def test_calls_of_which_none_is_left_do_not_stop_a_check(open_port, eventually):  # F65
    port = open_port(max_calls=1)
    with Wire(port) as wire:
        wire.send(call("Hang"))
        eventually(lambda: port.echo.hanging == 1)
        wire.send(call("Echo", stream=3), call(CHECK, stream=5))
        assert wire.answer(3).status == RESOURCE_EXHAUSTED
        assert wire.answer(5).status == OK


def test_a_check_that_comes_again_is_no_call_either(open_port):  # F65
    port = open_port(max_calls=2)
    shared = port.listener._port
    with Wire(port) as wire:
        for index in range(8):  # the first is read, and the others are known by their bytes
            wire.send(call(CHECK, stream=2 * index + 1))
            assert wire.answer(2 * index + 1).status == OK
        assert shared.calls == 0
        wire.send(call("Echo", b"x", stream=17))
        assert wire.answer(17).message == b"x"
    assert shared.calls == 0


def test_all_who_watch_are_told_by_one(open_port, eventually):  # F65
    port = open_port()
    with Wire(port) as wire:
        streams = range(1, 21, 2)
        wire.send(*(call(WATCH, stream=stream) for stream in streams)).settle()
        health = port.listener._health
        eventually(lambda: health.looks_at_a_time == 1)
        port.is_ready = False
        while any(bytes(wire.answers.setdefault(stream, Answer()).body).count(b"\x08") < 2 for stream in streams):
            assert wire.read() is not None
    eventually(lambda: health.looks_at_a_time == 0)


# ---------------------------------------------------------------------------------------------------------------------
# the log


def test_a_refusal_is_logged_with_its_peer_once_a_second(port, caplog):
    caplog.set_level(logging.WARNING, "forebay.refusals")
    peers = []
    for _ in range(5):
        with Wire(port) as wire:
            peers.append(":".join(map(str, wire.socket.getsockname())))
            wire.settle().send(frame(6, bytes(7)))
            wire.end()
    lines = [record.getMessage() for record in caplog.records if "7 bytes" in record.getMessage()]
    assert 1 <= len(lines) < 5
    assert peers[0] in lines[0]
    assert ask(port.connect(), "Echo", b"x") == b"x"
