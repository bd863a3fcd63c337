# SPDX-License-Identifier: Apache-2.0
"""Flow control, as a careful client with small windows sees it.

The client is the `h2` package, which refuses frames that are longer than it allows and data beyond its windows.
"""

import socket

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.settings
import pytest
from h2.settings import SettingCodes
from tests.integration.grpc.served import PATIENCE_S
from tests.integration.grpc.wire import Answer, Wire, call, data, header_list, headers, prefixed

CONNECTION_WINDOW = 65_535


class Client:
    """Calls over one connection, sending no WINDOW_UPDATE but those it is told to."""

    def __init__(self, port, *, window=CONNECTION_WINDOW, frame_bytes=16_384):
        self.socket = socket.create_connection((port.host, port.number), timeout=PATIENCE_S)
        self.http = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.http.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                SettingCodes.INITIAL_WINDOW_SIZE: window,
                SettingCodes.MAX_FRAME_SIZE: frame_bytes,
                SettingCodes.ENABLE_PUSH: 0,
            },
        )
        self.http.max_inbound_frame_size = frame_bytes
        self.http.initiate_connection()
        self.answers = {}
        self.updates = {0: 0}
        self.longest = 0
        self.acknowledged = 0
        self.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self.socket.close()

    def flush(self):
        self.socket.sendall(self.http.data_to_send())

    def open(self, method, message=None, *, end=True, **more):
        """Begins a call; returns its stream."""
        stream = self.http.get_next_available_stream_id()
        self.answers[stream] = Answer()
        self.updates[stream] = 0
        self.http.send_headers(stream, header_list(method, **more))
        if message is not None:
            self.send(stream, prefixed(message), end=end)
        self.flush()
        return stream

    def send(self, stream, payload, *, end=False, pad=None):
        """Sends as the server's windows allow."""
        while True:
            allowed = min(self.http.local_flow_control_window(stream), self.http.max_outbound_frame_size)
            allowed = max(allowed if pad is None else allowed - pad - 1, 0)
            part, payload = payload[:allowed], payload[allowed:]
            if part or not payload:
                self.http.send_data(stream, part, end_stream=end and not payload, pad_length=pad)
                self.flush()
            if not payload:
                return
            if not part:
                self.pump()

    def pump(self):
        """Reads once."""
        data = self.socket.recv(1 << 16)
        assert data, "the server closed"
        for event in self.http.receive_data(data):
            self._take(event)
        self.flush()

    def _take(self, event):
        stream: int = getattr(event, "stream_id", 0)
        if isinstance(event, h2.events.ResponseReceived):
            self.answers[stream].headers = dict(event.headers)
            if event.stream_ended:
                self.answers[stream].trailers = dict(event.headers)
        elif isinstance(event, h2.events.DataReceived):
            self.answers[stream].body += event.data
            self.longest = max(self.longest, len(event.data))
        elif isinstance(event, h2.events.TrailersReceived):
            self.answers[stream].trailers = dict(event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            self.answers[stream].is_over = True
        elif isinstance(event, h2.events.StreamReset):
            self.answers[stream].is_over = True
            self.answers[stream].reset = event.error_code
        elif isinstance(event, h2.events.WindowUpdated):
            self.updates[stream] += event.delta
        elif isinstance(event, h2.events.PingAckReceived):
            self.acknowledged += 1
        assert not isinstance(event, h2.events.ConnectionTerminated), event

    def settle(self):
        """Waits until the server has sent all that it may."""
        wanted = self.acknowledged + 1
        self.http.ping(bytes(8))
        self.flush()
        while self.acknowledged < wanted:
            self.pump()

    def allow(self, count, stream=None):
        self.http.increment_flow_control_window(count, stream)
        self.flush()

    def body(self, stream):
        """How much of an answer has come."""
        return len(self.answers[stream].body)

    def comes_to(self, count, *streams):
        """Whether exactly so much comes of some answers together, and no more."""
        while sum(map(self.body, streams)) < count:
            self.pump()
        self.settle()
        return sum(map(self.body, streams)) == count

    def answer(self, stream):
        while not self.answers[stream].is_over:
            self.pump()
        return self.answers[stream]


def test_an_answer_goes_on_as_the_window_of_its_stream_opens(port):
    with Client(port, window=1000) as client:
        stream = client.open("Large", b"20000")
        assert client.comes_to(1000, stream)
        for expected in range(2000, 22_000, 1000):
            client.allow(1000, stream)
            assert client.comes_to(min(expected, 20_005), stream)
        assert len(client.answer(stream).message) == 20_000


def test_an_answer_goes_on_as_the_window_of_the_connection_opens(port):
    with Client(port, window=1 << 20) as client:
        stream = client.open("Large", b"200000")
        assert client.comes_to(CONNECTION_WINDOW, stream)
        client.allow(1)
        assert client.comes_to(CONNECTION_WINDOW + 1, stream)
        client.allow(1 << 20)
        assert len(client.answer(stream).message) == 200_000


def test_a_window_of_one_byte(port):
    with Client(port, window=1) as client:
        stream = client.open("Echo", b"slow")
        for count in range(1, 9):
            assert client.comes_to(count, stream)
            client.allow(1, stream)
        assert client.answer(stream).message == b"slow"


@pytest.mark.parametrize("method", ["Large", "TaskLarge"])
def test_streams_share_the_window_of_the_connection(port, method):
    with Client(port, window=1 << 24) as client:
        first = client.open(method, b"500000")
        assert client.comes_to(CONNECTION_WINDOW, first)  # it has all of it, until the others come
        others = [client.open(method, b"500000") for _ in range(3)]
        client.settle()
        client.settle()  # now all of them wait
        for index in range(20):
            client.allow(40_000)
            assert client.comes_to(CONNECTION_WINDOW + 40_000 * (index + 1), first, *others)
        shares = [client.body(first) - CONNECTION_WINDOW, *map(client.body, others)]
        assert min(shares) > 100_000, shares  # of 200,000 that were fair
        client.allow(1 << 22)
        for stream in (first, *others):
            assert len(client.answer(stream).message) == 500_000


def test_a_stream_without_window_holds_up_no_other(port):
    with Client(port, window=100) as client:
        stuck = client.open("Large", b"50000")
        assert client.comes_to(100, stuck)
        assert client.answer(client.open("Echo", b"passes")).message == b"passes"
        repeated = client.open("Repeat", b"10 10")
        assert client.comes_to(100, repeated)
        client.allow(1000, repeated)
        assert len(client.answer(repeated).body) == 150
        client.allow(50_000, stuck)
        assert len(client.answer(stuck).message) == 50_000


def test_statuses_need_no_window(port):
    with Client(port, window=0) as client:
        assert client.answer(client.open("Fail", b"NOT_FOUND gone")).trailers["grpc-status"] == "5"
        assert client.answer(client.open("Nothing", b"")).trailers["grpc-status"] == "12"


def test_a_call_that_fails_before_its_answer_begins_has_one_block_of_headers(port):
    """The protocol's Trailers-Only: status and headers of HTTP in one block, which ends the stream."""
    with Wire(port) as wire:
        wire.send(call("Fail", b"NOT_FOUND gone"))
        assert wire.answer().status == 5
        assert wire.answer().blocks == 1


def test_a_stream_whose_answers_were_all_taken_may_say_nothing_for_long(open_port):
    port = open_port(write_timeout_s=10.0)
    with Wire(port) as wire:
        wire.send(headers("Chat"))
        for number in (1, 2, 3):
            wire.send(data(prefixed(b"a")))
            while len(wire.answers.setdefault(1, Answer()).body) < number * len(prefixed(b"a")):
                assert wire.read() is not None
                assert not wire.answers[1].is_over
            port.forward(11)
        assert not wire.settle().answers[1].is_over


def test_the_size_of_windows_may_change_while_answers_wait(port):
    with Client(port, window=1000) as client:
        stream = client.open("Large", b"30000")
        assert client.comes_to(1000, stream)
        client.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 5000})
        client.flush()
        assert client.comes_to(5000, stream)
        client.http.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 2000})  # the window is 3000 below nothing
        client.flush()
        client.settle()
        client.allow(3000, stream)
        assert client.comes_to(5000, stream)
        client.allow(1, stream)
        assert client.comes_to(5001, stream)
        later = client.open("Large", b"10000")
        assert client.comes_to(2000, later)
        client.allow(50_000, stream)
        client.allow(50_000, later)
        assert len(client.answer(stream).message) == 30_000
        assert len(client.answer(later).message) == 10_000


@pytest.mark.parametrize("frame_bytes", [16_384, 100_000, (1 << 24) - 1])
def test_frames_are_as_long_as_the_client_allows(port, frame_bytes):
    with Client(port, window=1 << 22, frame_bytes=frame_bytes) as client:
        client.allow(1 << 22)
        client.settle()
        assert len(client.answer(client.open("Large", b"3000000")).message) == 3_000_000
        assert client.longest <= frame_bytes


@pytest.mark.parametrize("size", [1 << 14, 50_000])
def test_metadata_of_an_answer_may_be_longer_than_a_frame(port, size):
    with Client(port) as client:
        answer = client.answer(client.open("Tell", b"%d" % size))
        assert answer.message == b"told"
        assert answer.headers["before"] == "b" * size
        assert answer.trailers["after"] == "a" * size


def test_an_answer_that_is_called_off_leaves_the_window_to_others(port):
    with Client(port, window=1 << 20) as client:
        given_up = client.open("Large", b"900000")
        assert client.comes_to(CONNECTION_WINDOW, given_up)
        waiting = client.open("Large", b"100000")
        client.http.reset_stream(given_up, h2.errors.ErrorCodes.CANCEL)
        client.allow(100_005)
        assert len(client.answer(waiting).message) == 100_000


def test_padding_is_not_part_of_the_message(port):
    with Client(port) as client:
        stream = client.open("Echo")
        for byte in prefixed(b"padded"):
            client.send(stream, bytes([byte]), pad=200)
        client.send(stream, b"", end=True, pad=255)
        assert client.answer(stream).message == b"padded"


def test_trailers_of_the_client_are_ignored(port):
    with Client(port) as client:
        for method in ("Echo", "TaskEcho", "Join"):
            stream = client.open(method, b"message", end=False)
            client.http.send_headers(stream, [("grpc-status", "13"), ("more", "1")], end_stream=True)
            client.flush()
            assert client.answer(stream).message == b"message"


@pytest.mark.parametrize("pad", [None, 255])
def test_windows_are_given_back_for_what_was_read(port, pad):
    with Client(port) as client:
        client.settle()
        given = client.updates[0]
        stream = client.open("Count")
        count = 2 * client.http.outbound_flow_control_window // 16_000 + 10
        count = min(count, 2500)  # 40 MB
        client.send(stream, (count * 16_000).to_bytes(5))
        for _ in range(count):
            client.send(stream, bytes(16_000), pad=pad)
        client.send(stream, b"", end=True)
        assert client.answer(stream).message == b"%d" % (count * 16_000)
        assert client.updates[0] - given <= count * (16_000 + (pad or 0) + 1) + 5, "more was given than was taken"


def test_windows_are_given_back_for_what_was_not_wanted(shared_port):
    """Data for calls that were refused takes nothing from those that come later."""
    with Wire(shared_port) as wire:
        wire.settle()
        sent, stream, part = 0, 1, bytes(16_000)
        limit = min(2 * (CONNECTION_WINDOW + wire.windows.get(0, 0)), 1 << 25)
        while sent < limit:
            while sent + 3 * len(part) > CONNECTION_WINDOW + wire.windows.get(0, 0):
                assert wire.read() is not None
            wire.send(headers("Nothing", stream=stream), *[data(part, stream=stream)] * 3)
            sent += 3 * len(part)
            assert wire.answer(stream).status == 12
            stream += 2
        wire.settle()
        assert wire.windows[0] + CONNECTION_WINDOW - sent > 30_000


def test_windows_are_given_back_by_calls_that_are_called_off(port):
    with Client(port) as client:
        client.settle()
        part, sent, streams = prefixed(bytes(10_000)), 0, []
        while client.http.outbound_flow_control_window > len(part) and sent < 1 << 25:
            streams.append(client.open("Deaf"))
            while client.http.local_flow_control_window(streams[-1]) > len(part) and sent < 1 << 25:
                client.send(streams[-1], part)
                sent += len(part)
            client.settle()
        for stream in streams:
            client.http.reset_stream(stream, h2.errors.ErrorCodes.CANCEL)
        client.flush()
        client.allow(1 << 20)
        stream = client.open("Join")
        client.allow(1 << 20, stream)
        client.send(stream, prefixed(bytes(1_000_000)), end=True)
        assert len(client.answer(stream).message) == 1_000_000
        assert port.echo.cancelled.wait(PATIENCE_S)


def test_no_client_may_send_more_than_a_method_that_takes_nothing_lets_it(port):
    with Client(port) as client:
        stream = client.open("Deaf")
        assert port.echo.entered.wait(PATIENCE_S)
        sent = 0
        part = prefixed(bytes(10_000))
        while client.http.local_flow_control_window(stream) >= len(part):
            client.send(stream, part)
            sent += len(part)
            if client.http.local_flow_control_window(stream) < len(part):
                client.settle()
            assert sent < 1 << 26
        # The calls beside it are answered though nothing of this one is taken.
        client.allow(1 << 20)
        assert client.answer(client.open("Echo", b"beside")).message == b"beside"
        client.http.reset_stream(stream)
        client.flush()
        assert port.echo.cancelled.wait(PATIENCE_S)
