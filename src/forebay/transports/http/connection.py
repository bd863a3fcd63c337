# SPDX-License-Identifier: Apache-2.0
"""The fast lane: inference requests are answered inside uvicorn's own protocol class, without ASGI.

Theory of operation. A `HttpConnection` is uvicorn's httptools protocol, and one of the two drivers of a
`ConnectionState`, whose states say what may happen; the parser is the other one (`reading.py`). When the head of a
request is complete, the target decides: a POST to a model takes the fast lane (no task, no future, no scope),
everything else is handed to uvicorn's unchanged code and so to the ASGI application. Answers of both lanes leave in the
order in which their requests came (`answering.py`).

A client mostly sends the same head again and again. Once the parser has read one, the `HttpPort` remembers its bytes: a
request that arrives between two others with a remembered head is not parsed at all, whether it is whole or its body
comes bit by bit. Only heads are remembered that say all there is to say about the message (a length, nothing unusual),
so the same bytes mean the same again. A request that is whole, and its body and nothing else, is submitted and answered
together with its like (`same_turn.py`).

Limits are kept here for both lanes: idle time, slow readers and writers. One sweep a second looks at the connections;
no request sets a timer. A connection that says nothing falls asleep, and no sweep looks at it until its time is over:
16,000 of them held the loop for 9 ms in every second. One that sleeps has forgotten its usual head, so that whatever
wakes it goes past the shortcut, which need not ask; and it has no parser, as one that never needed any.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, Final, cast

from forebay.errors import Unavailable
from forebay.server.byte_budget import SMALL_BYTES
from forebay.transports.http.connection_state import BODY, DUE, IDLE, LINGER, SHUT, SOCKET, SOCKET_DUE
from forebay.transports.http.head import UNREAD, HeadMemory
from forebay.transports.http.http_errors import TooSlow
from forebay.transports.http.port import SWEEP_S, HttpPort
from forebay.transports.http.reading import ReadingConnection
from forebay.transports.intake import FULL_BUFFER, LARGE_READ_BYTES
from forebay.transports.tls_writing import TlsWriter
from forebay.types.call import nothing
from forebay.workers.wire.address import HALF_CLOSED
from forebay.workers.wire.unsent_bytes import untaken_bytes

if TYPE_CHECKING:
    import asyncio

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


PROBE_S: Final = 0.02
"""After this time a client nearby has answered a probe; others are looked at with each sweep."""
SILENT_S: Final = 5.0
"""A streamed answer to a client that has closed its side is called off when no part of it came for this time."""
LONGEST_SLEEP: Final = 600
"""For how many sweeps a connection sleeps at most: for each of them there may be a set of those that wake up then."""


class HttpConnection(ReadingConnection):
    """One client connection, both lanes."""

    __slots__ = ("_is_among", "_probed_at", "_probed_bytes", "_stuck_since", "_tls", "_untaken", "_usual")

    def __init__(self, lane: HttpPort) -> None:
        super().__init__(lane)
        # The head this client sent last.
        self._usual = UNREAD
        self._tls: TlsWriter | None = None
        # Since when the client has taken nothing, if it does not take all, and how much was left then.
        self._stuck_since: int | None = None
        self._untaken = 0
        # Since when a client that has closed its side was sent nothing, and how much of a streamed answer before.
        self._probed_at: int | None = None
        self._probed_bytes = 0
        # Those that sweeps look at together with it.
        self._is_among = lane.awake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it if there are too many."""
        lane = self._lane
        if transport.get_extra_info("sslcontext") is not None:
            self._tls = TlsWriter(transport)
            transport = cast("asyncio.Transport", self._tls)
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=SMALL_BYTES)
        self.send = transport.write
        lane.connections.add(self)
        self._is_among.add(self)
        if len(lane.connections) > lane.config.max_connections:
            self._refuse(Unavailable(f"all {lane.config.max_connections} connections are taken; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is being answered: nobody waits for it any more."""
        self._lane.connections.discard(self)
        self._is_among.discard(self)
        super().connection_lost(exc)
        self._abandon()
        self.send = nothing
        self.socket = None
        del self.reply_method, self._parser  # they refer to the connection: without them it is freed at once

    def forget(self) -> None:
        """Read the next head anew."""
        self._usual = UNREAD

    def data_received(self, data: bytes) -> None:
        """Take a remembered request as it is; let the parser read everything else."""
        talk = self.talk
        if talk.state is IDLE:
            memory: HeadMemory | None = self._usual
            # What begins with the head lies between it and the next bytes of its length: quicker than `startswith`.
            if len(data) != memory.whole_bytes or not memory.raw <= data < memory.beyond:
                if self._is_among is not self._lane.awake:
                    self._move_to(self._lane.awake)
                # A head without its end gives three bytes, which are not a head that is remembered.
                raw = data[: data.find(b"\r\n\r\n") + 4]
                memory = self._lane.heads.get(raw)
                if memory is None or len(data) != memory.whole_bytes:
                    if memory is not None and len(data) < memory.whole_bytes:
                        self._begin_remembered(memory, data)
                        return
                    self._parse(data)
                    # Of two messages in a segment the second one's head would be known by the first one's bytes, and
                    # a client that sends these would be let in with its key.
                    if talk.may_be_remembered:
                        self._learn(data, raw)
                    return
                self._usual = memory
            # Before it is answered: a refusal answers in this very call, and settles what is due.
            talk.state = DUE  # WHOLE
            mailbox = memory.mailbox
            if mailbox is None:
                self.seen = self._lane.epoch
                self._answer(memory.head, data[memory.raw_bytes :])
                return
            self.active = memory.head
            self.arrived = data
            if not mailbox:
                expect = mailbox.expect  # what is called as an attribute of an object takes Python far longer to find
                expect(mailbox.submit)
            mailbox.append(self)
            return
        if talk.state.reads:
            if self._is_unparsed:
                self._go_on(data)
            else:
                self._stand_alone()
                self._parse(data)
        else:  # nobody reads it any more
            self.seen = self._lane.epoch
        if len(data) >= LARGE_READ_BYTES:
            self.give_way()

    # A client that sends nothing more

    def eof_received(self) -> bool:  # type: ignore[override]
        """Answer what was asked before the client closed its side; returns whether the connection stays open."""
        talk = self.talk
        if not talk.state.owes or self.socket or self.transport.get_extra_info("sslcontext") is not None:
            return False  # nothing is due; and neither WebSocket nor TLS has half-closed connections
        if self.is_answer_begun():
            return False  # a stream may be quiet for long, and nothing can be put into it that would tell who is gone
        if talk.state.reads:
            if talk.state.is_inside and self._working is not None and self._working.more_body:
                return False  # the body that ends too early belongs to the request that the slow lane is working on
            self._body.drop()
            self._stand_alone()
            talk.on(SHUT)
        self._probe()
        return True

    def _probe(self) -> None:
        """Learn whether the client has only closed its side, or is gone: both look the same until something is sent.

        A client that is gone answers a 100 Continue with a reset, and any other one has to pass over it. Within an
        answer its parts do the same, so a stream that says nothing for a while has lost its client.
        """
        if self._probed_at is not None:
            return
        self._probed_at = self._lane.epoch
        if not self.is_answer_begun() and self._speaks_1_1() and not self.flow.write_paused:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self.loop.call_later(PROBE_S, self._leave_if_gone)

    def _speaks_1_1(self) -> bool:
        if self._working is not None:
            return self._working.scope["http_version"] == "1.1"
        return self.active is not None and self.active.chunked

    def _leave_if_gone(self) -> None:
        """Call off what is due if the client has reset the connection."""
        epoch, stream = self._lane.epoch, self._stream
        if not self.talk.state.owes or self._probed_at is None:
            return
        if stream is None or not stream.has_started or stream.sent_bytes != self._probed_bytes:
            self._probed_at, self._probed_bytes = epoch, 0 if stream is None else stream.sent_bytes
        is_silent = (epoch - self._probed_at) * SWEEP_S > SILENT_S or self.socket is not None
        if is_silent or _events(self.transport) & (select.POLLERR | select.POLLHUP):
            self.abort()

    # Limits

    def sweep(self, epoch: int) -> None:
        """Close what is idle, slow or stuck; called once a second, but not while it sleeps."""
        config, talk = self._lane.config, self.talk
        if talk.state is DUE or talk.state is SOCKET_DUE:
            self.seen = epoch  # the time of an idle client begins with its answer
        quiet_s = (epoch - self.seen) * SWEEP_S
        if self._stuck_since is not None:
            self.count_unread()
            untaken = untaken_bytes(self.transport)
            if untaken != self._untaken:  # slowly, but it does take it
                self._untaken, self._stuck_since = untaken, epoch
            elif (epoch - self._stuck_since) * SWEEP_S > config.write_timeout_s:
                self.abort()
        elif self.transport.is_closing():
            self._stuck_since = epoch  # something is left to be taken: too little for a word from the transport
        elif self._probed_at is not None and talk.state.owes:
            self._leave_if_gone()
        elif talk.waiting and _events(self.transport) & HALF_CLOSED:
            self._probe()  # reading would tell it, which goes on only once what waits has its turn
        elif talk.state.is_inside:
            if self.intake.holds:
                self.seen = epoch  # its client cannot go on; it has its time once it can
                talk.wait(epoch)
            elif quiet_s > config.read_timeout_s or talk.is_too_slow(
                epoch, config.read_timeout_s, config.min_bytes_per_s
            ):
                late = f"the rest of the request did not come within {config.read_timeout_s:g} seconds"
                self._refuse(TooSlow(late if quiet_s > config.read_timeout_s else "the request comes too slowly"))
        elif talk.waiting:
            self.seen = epoch  # what was not parsed yet has its turn
        elif (talk.state is LINGER and self.intake.has_lingered(epoch, quiet_s)) or (
            (talk.state is IDLE or talk.state is SOCKET) and quiet_s > config.keep_alive_s
        ):
            self._move_to(self._lane.awake)
            self.transport.close()
        elif talk.state is SOCKET and self.socket and quiet_s > config.keep_alive_s / 2:
            self.socket.send(b"", "PING")
        elif talk.state is IDLE and quiet_s > SWEEP_S:
            self.forget()
            self.forget_parser()
            left_s = config.keep_alive_s - quiet_s
            self._move_to(self._lane.asleep(epoch + int(min(left_s / SWEEP_S, LONGEST_SLEEP)) + 1))

    def _move_to(self, others: set[HttpConnection]) -> None:
        self._is_among.discard(self)
        others.add(self)
        self._is_among = others

    def drain(self) -> None:
        """Close the connection with the last answer that is due; on the fast lane every answer decides that itself."""
        talk, cycle = self.talk, cast("RequestResponseCycle | None", self.cycle)
        if talk.state is BODY and self._reading is None:
            self.hang_up_early()  # it was answered, and the rest of its body is nobody's
        elif not talk.state.owes:
            self.leave()
        if cycle is None or cycle.response_started or (talk.waiting and talk.waiting[0][0] is not cycle):
            return
        if talk.state is DUE:
            talk.on(SHUT)
        elif not cycle.more_body:
            return  # the next request has begun to arrive, and its answer will be the last
        self.announce_end(cycle)

    def shutdown(self) -> None:
        """Close the connection once nothing is being answered on it."""
        if self.talk.state is IDLE and not self.talk.waiting:
            self.transport.close()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None:
            cycle.keep_alive = False

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        if self._tls is not None:
            self._tls.pause()
        super().pause_writing()
        self.intake.hold(FULL_BUFFER)  # who does not read answers may not ask for more of them
        self._stuck_since = self._lane.epoch
        self.count_unread()

    def resume_writing(self) -> None:
        """The client has room again."""
        if self._tls is not None and not self._tls.resume():
            self._stuck_since = self._lane.epoch  # it has taken something
            self.count_unread()
            return
        super().resume_writing()
        self._stuck_since = None
        self._body.account.set_unread(0)
        self._let_go()
        self.intake.release(FULL_BUFFER, self.advance_answers)


def _events(transport: asyncio.Transport) -> int:
    """Return what the kernel knows of a client, whatever of what it sent is still to be read."""
    closed, sock = select.poll(), transport.get_extra_info("socket")
    if sock is None:  # closed meanwhile, with TLS
        return 0
    try:
        closed.register(sock.fileno(), HALF_CLOSED)
    except ValueError:  # closed meanwhile
        return 0
    return sum(events for _, events in closed.poll(0))
