# SPDX-License-Identifier: Apache-2.0
"""Answers gRPC calls on HTTP/2 connections, without a library between the socket and the method.

Theory of operation. `data_received` cuts what came into frames and acts on each. A header block that was seen before
means the same again as long as the client's compression table has not changed, and is not read again: it stands for a
`CallHead`, which knows the method. A message that comes whole in one DATA frame goes to its method at once; everything
else is collected by `OpenCall.receive`.

What is to be written during one turn of the loop is gathered and leaves in one write at the end of it. A short answer
is written as soon as it is known; one that is longer than a frame, or than the client's windows, waits in the `Sender`.

Limits. The windows that clients have are large and are refilled as their bytes are taken. Nothing more is read from a
client that does not take its answers. Of a client that sends many frames at once the rest waits as bytes for its next
turn, and nothing more is read before. Frames that move no call forward are counted and may not be too many. One sweep
a second looks for slow and stuck clients; no call sets a timer, and all deadlines of the port share one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from struct import Struct
from typing import TYPE_CHECKING, Final, cast

from forebay.server.byte_budget import SMALL_BYTES
from forebay.transports.body_reader import TURN_BYTES as LONG_READ_BYTES
from forebay.transports.grpc import frames, states, statuses
from forebay.transports.grpc.abuse_limits import Manners
from forebay.transports.grpc.calls import OpenCall, too_long
from forebay.transports.grpc.control_frames import GOODBYE
from forebay.transports.grpc.frames import ConnectionFault, Reason
from forebay.transports.grpc.messages import PREFIX_BYTES
from forebay.transports.grpc.receiving import Receiver
from forebay.transports.grpc.sending import Outgoing, Sender
from forebay.transports.grpc.slow_clients import Patience
from forebay.transports.grpc.states import (
    CONNECTIONS,
    DECIDED,
    GONE,
    HALF_CLOSED,
    LEAVING,
    LINGER,
    OPEN,
    WARNED,
    GrpcState,
)
from forebay.transports.grpc.statuses import Status
from forebay.transports.intake import FULL_BUFFER, LARGE_READ_BYTES, Intake
from forebay.transports.rate_limit_fields import is_limited
from forebay.workers.wire.unsent_bytes import untaken_bytes

if TYPE_CHECKING:
    from forebay.errors import Unavailable
    from forebay.transports.grpc.frame_guesses import FrameRooms
    from forebay.transports.grpc.port import GrpcPort
    from forebay.transports.grpc.service import Piece

log = logging.getLogger("forebay")

TURN_BYTES: Final = 256 * 1024
"""How much of long answers is written in one turn of the loop."""

_ANSWER: Final = Struct(f">5sI{len(statuses.HEADERS)}sHBBBIBI")
_ANSWER_HEAD: Final = frames.head(len(statuses.HEADERS), frames.HEADERS, frames.END_HEADERS, 0)[:5]
_END: Final = Struct(f">5sI{len(statuses.OK)}s")
_END_HEAD: Final = frames.head(len(statuses.OK), frames.HEADERS, frames.END_FLAGS, 0)[:5]


class GrpcConnection(asyncio.Protocol):
    """One client connection.

    Attributes:
        port: What it shares with the others.
        peer: Who is there, as `ADDRESS:PORT`.
        account: What it holds.
        kept_bytes: What is kept of frames and header blocks that have not come whole, if that is much.
    """

    _transport: asyncio.Transport
    _intake: Intake

    def __init__(self, port: GrpcPort) -> None:
        self.port = port
        self.account = port.byte_budget.open(self, port.max_connection_bytes)
        self.kept_bytes = 0
        self.peer = ""
        self._calls: dict[int, OpenCall] = {}
        self.state: GrpcState = OPEN
        self._sender = Sender()
        self._manners = Manners(self._sender)
        self._receiver = Receiver(self, self._calls, self._sender, self._manners)
        # Writing.
        self._is_due = False
        self._written = 0
        # Limits: sweeps after which something happened, and what was taken until then.
        self._born = self._seen = self._awake = self._moved = port.epoch
        self._taken: int = 0
        self._patience = Patience(port.epoch)

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, or refuse it if there are too many."""
        port, config = self.port, self.port.config
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=TURN_BYTES)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # nothing else notices idle clients that are gone
        host, number = (transport.get_extra_info("peername") or ("", 0))[:2]
        self.peer = f"[{host}]:{number}" if ":" in host else f"{host}:{number}"
        self._intake = Intake(self._transport, port.turns)
        port.connections.add(self)
        if len(port.connections) > config.max_connections:
            self._refuse(Reason.ENHANCE_YOUR_CALM, f"all {config.max_connections} connections are taken")

    def connection_lost(self, exc: Exception | None) -> None:
        """Let nobody work for this client any more."""
        self.state = CONNECTIONS[self.state][states.LOSE]
        self.port.connections.discard(self)
        self._cancel_all()
        self.account.close()
        del self._receiver  # it refers to the connection: without it that is freed at once

    def pause_writing(self) -> None:
        """Read nothing more from a client that does not take its answers."""
        self._intake.hold(FULL_BUFFER)
        self.count_unread()

    def resume_writing(self) -> None:
        """The client has room again."""
        self.count_unread()
        self._awake = self._seen = self.port.epoch
        self._intake.release(FULL_BUFFER, self._read)

    def data_received(self, data: bytes) -> None:
        """Act on the frames that are complete."""
        self._seen = self.port.epoch
        if (self._intake.holds & FULL_BUFFER or self._receiver.left <= 0) and self.state.reads:
            self._receiver.feed(data)
            self.keep(self._receiver.kept_bytes)
        else:
            self._read(data)
        if len(data) >= LARGE_READ_BYTES:
            self.give_way()

    def room(self) -> memoryview | None:
        """Return where the rest of a long frame is to be put."""
        return None if not self.state.reads or self._intake.holds & FULL_BUFFER else self._receiver.room()

    def advance(self, size: int) -> bytes:
        """Act on what was put there; returns what came after it."""
        return self._act(self._receiver.advance, size) or b""

    def rooms(self) -> FrameRooms | None:
        """Return where the frames of a long message are to be put if they go on as they began."""
        if not self.state.reads or not self._transport.is_reading():
            return None
        return self._receiver.rooms(LONG_READ_BYTES)

    def head_bytes(self) -> int:
        """Return how long the head is that must be read before the rest of a message; 0 if none is to come."""
        return 0 if not self.state.reads or self._intake.holds & FULL_BUFFER else self._receiver.head_bytes()

    def placed(self, size: int) -> None:
        """Act on what was put there."""
        self._act(self._receiver.placed, size)

    def _act(self, action: Callable[[int], bytes | None], size: int) -> bytes | None:
        """Act on what was put where it belongs."""
        self._seen = self.port.epoch
        self._is_due = True
        after = None
        try:
            after = action(size)
        except ConnectionFault as fault:
            self._refuse(fault.reason, str(fault))
        self._flush()
        if self._receiver.left <= 0:
            self._intake.give_way(self._read)
        return after

    def give_way(self) -> None:
        """Read no more before the other clients had their turn, neither what comes nor what has come."""
        self._intake.give_way(self._read)
        self._intake.land(self, self)

    def _read(self, data: bytes = b"") -> None:
        if not self.state.reads:
            return
        self._is_due = True
        try:
            self._receiver.read(data)
        except ConnectionFault as fault:
            self._refuse(fault.reason, str(fault))
        except Exception:
            log.exception("a gRPC connection failed; this is a defect of forebay")
            self._refuse(Reason.INTERNAL_ERROR, "the server failed")
        sender = self._sender
        if sender.out or sender.ready or self.state is LEAVING:
            self._flush()
        else:
            self._is_due = False
        if self._receiver.left <= 0:
            self._intake.give_way(self._read)

    # Writing

    def send(self, data: bytes) -> None:
        """Write together with everything else in this turn."""
        self._sender.out.append(data)
        self._schedule()

    def write_some(self) -> bool:
        """Write what was gathered so far; returns whether the client should be listened to."""
        self._flush()
        self._is_due = True
        return self.state.reads and not self._intake.holds & FULL_BUFFER

    def _schedule(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.port.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_due = False
        sender = self._sender
        out = sender.out
        if not self.state.reads:
            out.clear()
            return
        if sender.ready and sender.can_send and not self._intake.holds & FULL_BUFFER:
            self._is_due = True  # what calls do when they are drained belongs to this turn
            sender.pump(TURN_BYTES, self.port.epoch)
            self._is_due = False
        if out:
            data = b"".join(out)
            out.clear()
            self._written += len(data)
            self._transport.write(data)
        if sender.unsent_bytes or self.account.unread:
            self.count_unread()
        if sender.ready and sender.can_send and not self._intake.holds & FULL_BUFFER:
            self._schedule()
        if self.state is LEAVING and not self._calls:
            self.hang_up()

    def answer(self, call: OpenCall, message: bytes) -> None:
        """Answer a call with its only message, and end it."""
        sender, port = self._sender, self.port
        size = len(message) + PREFIX_BYTES
        if (
            size <= port.max_small_bytes
            and size <= min(call.window, sender.window)
            and call.state is HALF_CLOSED
            and not (self._intake.holds & FULL_BUFFER or call.outgoing or call.cost)
            and not (call.head.tenant is not None and is_limited(call.head.tenant))
        ):
            stream = call.stream
            answer = _ANSWER.pack(
                _ANSWER_HEAD, stream, statuses.HEADERS, size >> 8, size & 0xFF, 0, 0, stream, 0, size - PREFIX_BYTES
            )
            data = answer + message + _END.pack(_END_HEAD, stream, statuses.OK)
            sender.window -= size
            call.state = DECIDED  # DECIDE
            call.on_cancel = None
            if port.tells:
                call.status, call.sent_bytes = Status.OK, len(message)
            del self._calls[stream]
            port.closed(call)
            if self._is_due or self._calls or sender.out or self.state is not OPEN:
                sender.out.append(data)
                self._schedule()
            else:  # nothing else of this client is due soon
                self._written += len(data)
                self._transport.write(data)
            return
        self.answer_at_length(call, (message,))

    def answer_at_length(self, call: OpenCall, pieces: Sequence[Piece]) -> None:
        """Answer a call with its only message as the client has room for it, and end it."""
        size, limit = sum(map(len, pieces)), self.port.config.max_message_bytes
        if size > limit:
            call.end(*too_long(size, limit))
            return
        self.send_message(call, pieces, size)
        call.decide(Status.OK)
        self.end(call, statuses.OK)

    def send_message(self, call: OpenCall, pieces: Sequence[Piece], size: int) -> Outgoing:
        """Send a message as the client has room for it; `size` is that of all its pieces."""
        call.sent_bytes += size
        call.worked()
        outgoing = self.begin_answer(call, b"")
        self._sender.put(call, outgoing, pieces, size, self.port.epoch)
        self._schedule()
        return outgoing

    def begin_answer(self, call: OpenCall, fields: bytes) -> Outgoing:
        """Send the head of an answer with further fields, if it was not sent; returns what follows it."""
        outgoing = call.outgoing
        if outgoing is None:
            outgoing = call.outgoing = Outgoing(self.port.epoch)
            self._sender.out.append(frames.header_block(0, call.stream, statuses.HEADERS + fields))
            self._schedule()
        return outgoing

    def end(self, call: OpenCall, trailers: bytes, *, at_once: bool = False) -> None:
        """Send the status of a call after what it has sent, or instead of what was not sent yet."""
        if self._calls.get(call.stream) is not call:
            return
        if at_once:
            self._sender.drop(call)
        elif call.outgoing is not None and call.outgoing.pieces:
            call.outgoing.trailers = trailers
            return
        if more := call.more_trailers():
            trailers += more
        out, stream = self._sender.out, call.stream
        if call.outgoing is None and trailers is statuses.OK:
            out.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream, statuses.HEADERS))
        elif call.outgoing is None:
            trailers = statuses.HEADERS + trailers
        out.append(frames.header_block(frames.END_STREAM, stream, trailers))
        self._schedule()
        if call.state.is_half_closed:
            del self._calls[stream]
            self.port.closed(call)
        else:
            self.reset(stream, Reason.NO_ERROR)

    def reset(self, stream: int, reason: Reason) -> None:
        """End a stream at once; what the client still sends of it is ignored."""
        call = self._calls.pop(stream, None)
        if call is not None:
            self.drop(call)
        self._receiver.end_early(stream)
        self.send(frames.rst_stream(stream, reason))

    # What it holds

    def keep(self, size: int) -> None:
        """Count what is kept of frames and header blocks that have not come whole."""
        size = size if size > SMALL_BYTES else 0
        more, self.kept_bytes = size - self.kept_bytes, size
        if more > 0:
            self.account.arrive(more)
        elif more:
            self.account.forget_arriving(-more)

    def queue(self, size: int) -> None:
        """Count answers that wait in the method of a call."""
        self._sender.unsent_bytes += size
        self._schedule()

    def count_unread(self, *, dropped: int = 0) -> None:
        """Count what the client has not taken of its answers."""
        if self.state is not GONE:
            buffered = self._transport.get_write_buffer_size()
            size = self._sender.unsent_bytes + (buffered if buffered > SMALL_BYTES else 0)
            self.account.set_unread(size, dropped=dropped)

    def refuse_arriving(self, error: Unavailable) -> None:
        """Refuse the call with the most bytes of messages that were not taken yet."""
        call = max(self._calls.values(), key=lambda call: call.arriving_bytes, default=None)
        if call is not None and call.arriving_bytes:
            call.refuse_message(error.message)
        else:  # a header block that does not end; frames may be being read, which does not end here
            self.keep(0)
            self.port.loop.call_soon(self._refuse, Reason.ENHANCE_YOUR_CALM, error.message)

    def drop_unread(self, error: Unavailable) -> None:
        """Reset the call with the most answers that wait for the longest, or cut off the connection if none waits."""
        epoch = self.port.epoch

        def weight(call: OpenCall) -> int:
            return call.unsent_bytes * (1 if call.outgoing is None else epoch - call.outgoing.moved + 1)

        call = max(self._calls.values(), key=weight, default=None)
        size = 0 if call is None else call.unsent_bytes
        self.port.cut_off(self.peer, error)
        if call is None or not size:
            self.abort()
            self.account.close()
        else:
            self.reset(call.stream, Reason.ENHANCE_YOUR_CALM)
            self.count_unread(dropped=size)

    # Limits

    def sweep(self, epoch: int) -> None:
        """Cut off what is slow or stuck; called once a second."""
        config, receiver = self.port.config, self._receiver
        self._manners.next_second()
        if self.account.unread or self._transport.get_write_buffer_size():
            self.count_unread()
        if self._is_stuck(epoch):
            if epoch - self._moved > config.write_timeout_s:
                self.abort()
            else:
                self._sweep_answers(epoch)
        elif self.state is LINGER:
            if self._intake.has_lingered(epoch, epoch - self._seen):
                self._transport.close()
        elif not receiver.is_ready:
            if epoch - self._born > config.read_timeout_s:
                self._refuse(Reason.PROTOCOL_ERROR, "the connection did not begin as HTTP/2 does")
        elif not self._intake.holds and receiver.is_inside and epoch - self._awaited > config.read_timeout_s:
            self._refuse(Reason.PROTOCOL_ERROR, f"the rest of a frame did not come within {config.read_timeout_s:g} s")
        else:
            self._sweep_messages(epoch)
            self._sweep_answers(epoch)

    @property
    def _awaited(self) -> int:
        """Since when a client in the middle of a frame is waited for: bit by bit it has no more time than another."""
        since = self._receiver.held_since
        return self._seen if since is None else max(since, self._awake)

    def _sweep_messages(self, epoch: int) -> None:
        """End calls whose message does not come."""
        max_quiet_s = self.port.config.read_timeout_s
        if self._intake.holds or epoch - self._awake <= max_quiet_s:
            return
        for call in list(self._calls.values()):
            if call.is_slow(epoch, max_quiet_s):
                text = f"the rest of the message did not come within {max_quiet_s:g} seconds"
                call.abandon(Status.DEADLINE_EXCEEDED, text)

    def _sweep_answers(self, epoch: int) -> None:
        """End calls whose answer is not taken."""
        patience, written = self._patience, self._written
        calls = self._waiting()
        if calls:
            patience.look(epoch, self._sender.sent, written, written - untaken_bytes(self._transport))
        for call in calls:
            if patience.is_over(call, epoch, self.port.config.write_timeout_s):
                self.reset(call.stream, Reason.CANCEL)

    def _waiting(self) -> list[OpenCall]:
        """Return the calls whose answer was not sent yet, all of it."""
        return [call for call in self._calls.values() if call.outgoing is not None and call.outgoing.pieces]

    def _is_stuck(self, epoch: int) -> bool:
        """Whether the client has taken nothing since the last sweep although something is there.

        The kernel may hold all that the client's windows let through, while the rest waits for windows.
        """
        transport, untaken = self._transport, 0
        if transport.get_write_buffer_size() or self._waiting():
            untaken = untaken_bytes(transport)
        if not untaken:
            self._moved = epoch
            return False
        taken = self._written - untaken
        if taken != self._taken:
            self._taken, self._moved = taken, epoch
            return False
        return True

    # Leaving

    def warn(self) -> None:
        """Tell the client that the server is leaving; what it sends before it knows is answered."""
        if not self._receiver.is_greeted:
            self.leave()
        elif self.state is OPEN:
            self.state = CONNECTIONS[self.state][states.WARN]
            self.send(frames.goaway(frames.MAX_STREAM, Reason.NO_ERROR, "the server is stopping"))
            self.send(frames.frame(frames.PING, 0, 0, GOODBYE))

    def understood(self) -> None:
        """Leave, once the client knows that the server is leaving."""
        if self.state is WARNED:
            self.leave()

    def leave(self) -> None:
        """Begin no more calls, and close once those that run are answered."""
        if self.state.begins:
            self.state = CONNECTIONS[self.state][states.LEAVE]
            self._say_goodbye(Reason.NO_ERROR, "the server is stopping")
            for call in list(self._calls.values()):
                if call.on_leave is not None:
                    call.on_leave()

    def give_up(self) -> None:
        """End the calls that still run, and close."""
        for call in list(self._calls.values()):
            call.abandon(Status.UNAVAILABLE, "the server stopped")
        self.leave()
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """End the connection now."""
        self.state = CONNECTIONS[self.state][states.LOSE]
        self._cancel_all()
        self._transport.abort()

    def _cancel_all(self) -> None:
        calls = self._calls
        while calls:  # calling one off may answer others
            self.drop(calls.popitem()[1])

    def wasted(self) -> None:
        """Count a call that came to nothing because of what the client sent."""
        if self.state.reads:
            try:
                self._manners.waste()
            except ConnectionFault as fault:  # frames may be being read, which does not end here
                self.port.loop.call_soon(self._refuse, fault.reason, str(fault))

    def drop(self, call: OpenCall) -> None:
        """Stop all work for a call that its client has given up."""
        self._sender.drop(call)
        call.cancel()
        self.port.closed(call)

    def _refuse(self, reason: Reason, message: str) -> None:
        """Say what the client did wrong, read nothing more, and close."""
        if not self.state.reads:
            return
        self.port.refused(self.peer, message)
        self._cancel_all()
        self._say_goodbye(reason, message)
        self.hang_up()

    def _say_goodbye(self, reason: Reason, message: str) -> None:
        if not self._receiver.is_greeted:
            self._receiver.introduce()
        self.send(frames.goaway(self._receiver.last_stream, reason, message))

    def hang_up(self) -> None:
        """Close once everything is written and the client has had time to read it."""
        transport, out = self._transport, self._sender.out
        self.state = CONNECTIONS[self.state][states.HANG_UP]
        if transport.is_closing():
            return
        if out:
            transport.write(b"".join(out))
            out.clear()
        self._seen = self.port.epoch
        self._intake.linger(self._seen)
