# SPDX-License-Identifier: Apache-2.0
"""Messages on their way out of one connection: as much as the client's windows have room for, each call in its turn."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.transports.grpc import frames
from forebay.transports.grpc.messages import PREFIX_BYTES, prefix

if TYPE_CHECKING:
    from forebay.transports.grpc.calls import OpenCall
    from forebay.transports.grpc.service import Piece


class Outgoing:
    """What one call still has to send.

    Attributes:
        unsent_bytes: How much it is.
        moved: The sweep after which something of it was last sent.
        waits_since: The sweep by which the client may not have had that yet.
        trailers: The header block after the last piece; None while that is not known.
    """

    __slots__ = ("moved", "pieces", "trailers", "unsent_bytes", "waits_since")

    def __init__(self, epoch: int) -> None:
        self.pieces: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.trailers: bytes | None = None
        self.moved = self.waits_since = epoch


class Sender:
    """The outward side of a connection.

    Attributes:
        out: Bytes for the transport, in order.
        window: How much the client takes now, of all calls together.
        first_window: How much it takes of a new call.
        max_frame_bytes: Longest frame it is sent.
        ready: Calls that have something to send, in the order of their turns.
        sent: Frames so far, without those of short answers.
        unsent_bytes: What all calls still have to send.
    """

    __slots__ = ("first_window", "max_frame_bytes", "out", "ready", "sent", "unsent_bytes", "window")

    def __init__(self) -> None:
        self.out: list[bytes | memoryview] = []
        self.window = frames.FIRST_WINDOW
        self.first_window = frames.FIRST_WINDOW
        self.max_frame_bytes = frames.MIN_FRAME_BYTES
        self.sent = self.unsent_bytes = 0
        self.ready: OrderedDict[OpenCall, None] = OrderedDict()

    @property
    def can_send(self) -> bool:
        """Whether a call has something that there is room for."""
        return bool(self.ready) and self.window > 0

    def put(self, call: OpenCall, outgoing: Outgoing, pieces: Sequence[Piece], size: int, epoch: int) -> None:
        """Add a message to what a call has to send; `size` is that of all its pieces."""
        if not outgoing.pieces:
            outgoing.moved = epoch
        # The beginning shares a frame with the prefix; the rest is not copied.
        cut = frames.MIN_FRAME_BYTES - PREFIX_BYTES
        first = memoryview(pieces[0])
        outgoing.pieces.append(memoryview(prefix(size) + first[:cut]))
        outgoing.pieces.extend(memoryview(piece) for piece in (first[cut:], *pieces[1:]) if len(piece))
        outgoing.unsent_bytes += PREFIX_BYTES + size
        self.unsent_bytes += PREFIX_BYTES + size
        self.wake(call)

    def wake(self, call: OpenCall) -> None:
        """Give a call its turn if it has something to send and room for it."""
        outgoing = call.outgoing
        if outgoing is not None and outgoing.pieces and call.window > 0:
            self.ready[call] = None

    def drop(self, call: OpenCall) -> None:
        """Forget what a call has to send."""
        outgoing = call.outgoing
        if outgoing is not None:
            self.ready.pop(call, None)
            outgoing.pieces.clear()
            self.unsent_bytes -= outgoing.unsent_bytes
            outgoing.unsent_bytes = 0

    def pump(self, max_bytes: int, epoch: int) -> None:
        """Move up to about `max_bytes` to `out`, a frame of each call in turn."""
        ready, out = self.ready, self.out
        while ready and self.window > 0 and max_bytes > 0:
            call, _ = ready.popitem(last=False)
            outgoing = call.outgoing
            assert outgoing is not None
            if call.window <= 0:  # the client has changed its mind; out of line until its next word about it
                continue
            piece = outgoing.pieces[0]
            # Three of these are the client's: past any of them it would end the stream or the connection.
            size = min(len(piece), self.max_frame_bytes, self.window, call.window)
            out.append(frames.head(size, frames.DATA, 0, call.stream))
            if size == len(piece):
                out.append(piece)
                outgoing.pieces.popleft()
            else:
                out.append(piece[:size])
                outgoing.pieces[0] = piece[size:]
            self.sent += 1
            self.window -= size
            call.window -= size
            max_bytes -= size
            outgoing.unsent_bytes -= size
            self.unsent_bytes -= size
            outgoing.moved = epoch
            # Last, for both change what was looked at: the call goes to the end of the line, or ends.
            if outgoing.pieces:
                ready[call] = None
            else:
                call.drained()
