# SPDX-License-Identifier: Apache-2.0
"""Frames of a client that are about its connection, or about what it takes: settings, windows, pings, resets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from forebay.transports.grpc import frames
from forebay.transports.grpc.frames import ConnectionFault, Reason, StreamFault

if TYPE_CHECKING:
    from forebay.transports.grpc.abuse_limits import Manners
    from forebay.transports.grpc.calls import OpenCall
    from forebay.transports.grpc.connection import GrpcConnection
    from forebay.transports.grpc.sending import Sender

LONGEST_FRAME_BYTES: Final = 64 * 1024
"""Longest frame that is written, whatever the client takes: calls take turns."""
SETTINGS_WEIGHT: Final = 100
"""What a SETTINGS frame counts as: it may change the window of every call."""
GOODBYE: Final = b"goodbye?"
"""A PING whose answer says that the client knows that the server is leaving."""


class ControlFrames:
    """Acts on them for one connection.

    Attributes:
        has_settings: Whether the client has said what it must say before anything else.
    """

    def __init__(
        self, connection: GrpcConnection, calls: dict[int, OpenCall], sender: Sender, manners: Manners
    ) -> None:
        self.has_settings = False
        self._connection = connection
        self._calls = calls
        self._sender = sender
        self._manners = manners

    def take(self, kind: int, flags: int, stream: int, payload: bytes, last_stream: int) -> None:
        """Act on a frame; one of a kind that is not known is passed over.

        Args:
            last_stream: The last call that the client began.

        Raises:
            StreamFault: If it breaks a rule of one stream.
            ConnectionFault: If nothing more of this client can be believed.
        """
        if kind != frames.SETTINGS:
            self.check_settings()
        self._manners.idle_frame(SETTINGS_WEIGHT if kind == frames.SETTINGS else 1)
        if kind == frames.WINDOW_UPDATE:
            self._take_window_update(stream, payload, last_stream)
        elif kind == frames.SETTINGS:
            self._take_settings(flags, stream, payload)
        elif kind == frames.PING:
            self._take_ping(flags, stream, payload)
        elif kind == frames.RST_STREAM:
            self._take_rst_stream(stream, payload, last_stream)
        elif kind == frames.PRIORITY:
            _check_priority(stream, payload, last_stream)
        elif kind == frames.GOAWAY:
            if stream:
                _refuse_stream(kind, stream)
            _check_length(kind, payload[:8], 8)
        elif kind == frames.PUSH_PROMISE:
            msg = "clients do not push"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)

    def check_settings(self) -> None:
        """Make sure that the client began with its settings; raises ConnectionFault if it did not."""
        if not self.has_settings:
            msg = "the first frame is not SETTINGS"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)

    def _take_window_update(self, stream: int, payload: bytes, last_stream: int) -> None:
        _check_length(frames.WINDOW_UPDATE, payload, 4)
        more = frames.number(payload) & frames.MAX_WINDOW
        sender = self._sender
        if not stream:
            if not more or sender.window + more > frames.MAX_WINDOW:
                reason = Reason.FLOW_CONTROL_ERROR if more else Reason.PROTOCOL_ERROR
                msg = f"the window of the connection cannot grow by {more}"
                raise ConnectionFault(reason, msg)
            sender.window += more
            return
        call = self._calls.get(stream)
        if call is None:
            if stream > last_stream or not stream & 1:
                _refuse_stream(frames.WINDOW_UPDATE, stream)
            return
        if not more or call.window + more > frames.MAX_WINDOW:
            reason = Reason.FLOW_CONTROL_ERROR if more else Reason.PROTOCOL_ERROR
            msg = f"the window of stream {stream} cannot grow by {more}"
            raise StreamFault(stream, reason, msg)
        call.window += more
        sender.wake(call)

    def _take_settings(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            _refuse_stream(frames.SETTINGS, stream)
        if len(payload) % 6 or (flags & frames.ACK and payload):
            msg = "SETTINGS of a wrong length"
            raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
        if flags & frames.ACK:
            self.check_settings()
            return
        self.has_settings = True
        sender = self._sender
        window = sender.first_window
        for name, value in frames.settings_in(payload):
            if name == frames.INITIAL_WINDOW_SIZE:
                if value > frames.MAX_WINDOW:
                    msg = f"a window cannot have {value} bytes"
                    raise ConnectionFault(Reason.FLOW_CONTROL_ERROR, msg)
                window = value
            elif name == frames.MAX_FRAME_SIZE:
                if not frames.MIN_FRAME_BYTES <= value <= frames.MAX_FRAME_BYTES:
                    msg = f"frames cannot have {value} bytes"
                    raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
                sender.max_frame_bytes = min(value, LONGEST_FRAME_BYTES)
            elif name == frames.ENABLE_PUSH and value > 1:
                msg = "ENABLE_PUSH is neither 0 nor 1"
                raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
        if window != sender.first_window:
            more, sender.first_window = window - sender.first_window, window
            for call in self._calls.values():
                call.window += more
                if call.window > frames.MAX_WINDOW:
                    msg = f"the window of stream {call.stream} cannot grow by {more}"
                    raise ConnectionFault(Reason.FLOW_CONTROL_ERROR, msg)
                sender.wake(call)
        sender.out.append(frames.SETTINGS_ACK)

    def _take_ping(self, flags: int, stream: int, payload: bytes) -> None:
        if stream:
            _refuse_stream(frames.PING, stream)
        _check_length(frames.PING, payload, 8)
        if not flags & frames.ACK:
            self._sender.out.append(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif payload == GOODBYE:
            self._connection.understood()

    def _take_rst_stream(self, stream: int, payload: bytes, last_stream: int) -> None:
        _check_length(frames.RST_STREAM, payload, 4)
        if stream > last_stream or not stream & 1:
            _refuse_stream(frames.RST_STREAM, stream)
        call = self._calls.pop(stream, None)
        if call is None:
            return
        self._connection.drop(call)
        if call.is_young(self._connection.port.epoch):
            self._manners.waste()


def _check_priority(stream: int, payload: bytes, last_stream: int) -> None:
    """Hold PRIORITY to its form; what it says is not heeded."""
    if not stream:
        _refuse_stream(frames.PRIORITY, stream)
    if len(payload) != 5:
        msg = "PRIORITY of a wrong length"
        if stream > last_stream:  # what is not open cannot be reset
            raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
        raise StreamFault(stream, Reason.FRAME_SIZE_ERROR, msg)


def _refuse_stream(kind: int, stream: int) -> NoReturn:
    msg = f"a frame of kind {kind} on stream {stream}"
    raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)


def _check_length(kind: int, payload: bytes, length: int) -> None:
    if len(payload) != length:
        msg = f"a frame of kind {kind} with {len(payload)} bytes instead of {length}"
        raise ConnectionFault(Reason.FRAME_SIZE_ERROR, msg)
