# SPDX-License-Identifier: Apache-2.0
"""What gRPC connections hold: header blocks, messages and unread answers count against one budget."""

import contextlib

import grpc
import pytest
from tests.integration.grpc.served import PATIENCE_S, Apart, ask
from tests.integration.grpc.wire import (
    CANCEL,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    RST_STREAM,
    WINDOW_UPDATE,
    Wire,
    call,
    data,
    frame,
    headers,
    number,
    prefixed,
    settings,
)

RESOURCE_EXHAUSTED = 8
MB = 1_000_000
TAKES_NOTHING = PREFACE + settings((INITIAL_WINDOW_SIZE, 0))


@pytest.fixture
def counted(open_port):
    """Opens a port and returns it with its budget, which must be empty in the end."""
    budgets = []

    def start(**config):
        port = open_port(**config)
        budgets.append(port.listener._port.byte_budget)
        return port, budgets[-1]

    yield start
    for held in budgets:
        assert held.held_bytes >= 0


def in_frames(payload, stream=1):
    return b"".join(data(payload[at : at + 16_000], stream=stream) for at in range(0, len(payload), 16_000))


def test_answers_that_nobody_takes_never_exceed_the_budget(counted, eventually, caplog):  # F78
    port, budget = counted(max_buffered_bytes=4 * MB)
    reader = port.connect().unary_unary("/test.Echo/Large")
    with contextlib.ExitStack() as stack:
        lazy = [stack.enter_context(Wire(port, opening=TAKES_NOTHING)) for _ in range(5)]
        for wire in lazy:
            for stream in range(1, 41, 2):
                wire.send(call("Large", b"100000", stream=stream))
        for wire in lazy:
            wire.settle()
        eventually(lambda: budget.held_bytes <= budget.max_bytes)
        for wire in lazy:
            wire.settle()
        resets = [answer.reset for wire in lazy for answer in wire.answers.values() if answer.reset is not None]
        assert {*resets} == {ENHANCE_YOUR_CALM}
        assert len(resets) >= 60
        for _ in range(5):  # who reads is answered
            assert len(reader(b"1000000")) == MB
        told = [line for line in caplog.messages if "does not read" in line]
        assert len(told) <= 2
        assert "gRPC client 127.0.0.1:" in told[0]
        # What is left is there for those who make room.
        for wire in lazy:
            left = [stream for stream, answer in wire.answers.items() if stream and answer.reset is None]
            for stream in left:
                wire.send(frame(WINDOW_UPDATE, number(1 << 20), stream=stream))
                wire.send(frame(WINDOW_UPDATE, number(1 << 20)))
                answer = wire.answer(stream)
                assert answer.reset == ENHANCE_YOUR_CALM or len(answer.message) == 100_000
    eventually(lambda: budget.held_bytes == 0)


def test_a_connection_with_many_unread_answers_begins_no_further_call(counted, eventually):  # F78
    port, budget = counted(max_connection_bytes=3 * MB + 100, max_message_bytes=2 * MB)
    with Wire(port, opening=TAKES_NOTHING) as wire, Wire(port) as other:
        for stream in range(1, 9, 2):
            wire.send(call("Large", b"1000000", stream=stream))
            wire.settle()
        for stream, method in ((9, "Echo"), (11, "Large")):  # new to the connection, and known
            wire.send(call(method, b"1", stream=stream))
            answer = wire.answer(stream)
            assert answer.status == RESOURCE_EXHAUSTED
            assert "--max-connection-bytes" in answer.trailers["grpc-message"]
        assert other.send(call("Echo", b"x")).answer().message == b"x"
        for stream in range(1, 9, 2):  # all that was computed is delivered
            wire.send(frame(WINDOW_UPDATE, number(MB), stream=stream) + frame(WINDOW_UPDATE, number(MB)))
            wire.send(frame(WINDOW_UPDATE, number(5), stream=stream))
            assert len(wire.answer(stream).message) == MB
        wire.send(call("Large", b"1", stream=13) + frame(WINDOW_UPDATE, number(MB), stream=13))
        assert wire.answer(13).message == b"\0"
    eventually(lambda: budget.held_bytes == 0)


@pytest.mark.parametrize("method", ["Hang", "TaskHang"])
def test_messages_count_until_their_calls_are_answered(counted, eventually, method):  # F78
    port, budget = counted(max_buffered_bytes=MB)
    with Wire(port) as wire:
        wire.send(headers(method), in_frames(prefixed(bytes(700_000))), data(b"", flags=END_STREAM))
        eventually(lambda: port.echo.hanging == 1)
        assert budget.held_bytes == 700_000
        wire.send(headers("Echo", stream=3), in_frames(prefixed(bytes(700_000))[:-1], stream=3))
        assert wire.answer(3).status == RESOURCE_EXHAUSTED
        assert wire.send(call("Echo", b"x", stream=5)).answer(5).message == b"x"  # little is not refused
        wire.send(frame(RST_STREAM, number(CANCEL), stream=1))
        eventually(lambda: budget.held_bytes == 0)
        message = prefixed(bytes(300_000))
        wire.send(headers("Count", stream=7), in_frames(message * 4, stream=7), data(b"", stream=7, flags=END_STREAM))
        assert wire.answer(7).message == b"1200000"  # a stream holds one after the other
        eventually(lambda: budget.held_bytes == 0)


def test_header_blocks_that_do_not_end_count(counted, eventually):  # F77
    port, budget = counted(max_buffered_bytes=200_000)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(port)) for _ in range(10)]
        for wire in wires:
            wire.settle()
            wire.flood(frame(HEADERS, bytes(16_000), stream=1) + frame(9, bytes(16_000), stream=1) * 2)
        ended = [wire for wire in wires if _is_cut_off(wire)]
        assert 3 <= len(ended) <= 6
        assert budget.held_bytes <= budget.max_bytes
        with Wire(port) as other:
            assert other.send(call("Echo", b"x")).answer().message == b"x"
    eventually(lambda: budget.held_bytes == 0)


def _is_cut_off(wire):
    """Whether the server has told a client to go."""
    wire.socket.settimeout(0.5)
    with contextlib.suppress(TimeoutError):
        while wire.goaway is None and wire.read() is not None:
            pass
    return wire.goaway == ENHANCE_YOUR_CALM


def test_a_call_with_too_many_fields_is_refused_before_keys_are_checked(counted):  # F77
    port, _ = counted(api_keys=("k1",))
    with Wire(port) as wire:
        for stream, count, more, status in (
            (1, 128 - 6, {}, 16),
            (3, 128 - 5, {}, RESOURCE_EXHAUSTED),
            (5, 10, {"x_bin": "," * 200}, RESOURCE_EXHAUSTED),
        ):
            fields = {f"f{index}": "v" for index in range(count)}
            wire.send(call("Echo", b"x", stream=stream, **fields, **more))
            assert wire.answer(stream).status == status
        assert "metadata: expected at most 128 fields, got 129" in wire.answers[3].trailers["grpc-message"]


def test_memory_is_bounded_whatever_clients_do_not_take(eventually):  # F78: 300 calls held 1.5 GB
    budget = 32 * (1 << 20)
    with Apart(max_buffered_bytes=budget, write_timeout_s=PATIENCE_S) as server, contextlib.ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(server.endpoint))
        server.forget_peak()
        for _ in range(10):
            wire = stack.enter_context(Wire(server, opening=TAKES_NOTHING))
            wire.send(*(call("Full", b"4000000", stream=stream) for stream in range(1, 21, 2)))
            assert len(ask(channel, "Large", b"3000000")) == 3_000_000
        assert server.grown_mib() <= 4 * 32 + 64
        assert ask(channel, "Echo", b"x") == b"x"
    assert "does not read" in server.log
