# SPDX-License-Identifier: Apache-2.0
"""What all connections of a gRPC port share: its limits, its one clock, and the deadlines of all calls."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from forebay.observe.logs.access_log import CallListeners, EndedCall
from forebay.observe.logs.noted_refusals import LastRefusals
from forebay.observe.logs.refusal_log import RefusalLog
from forebay.server.byte_budget import ByteBudget
from forebay.serving.endpoint import EARLY_S
from forebay.transports.grpc.calls import NEVER, OpenCall
from forebay.transports.grpc.frame_guesses import FrameRooms
from forebay.transports.grpc.frames import MIN_FRAME_BYTES
from forebay.transports.grpc.heads import MAX_GUESSES, HeadReader
from forebay.transports.grpc.messages import PREFIX_BYTES
from forebay.transports.grpc.refusals import NEEDS_TLS
from forebay.transports.grpc.statuses import Status
from forebay.transports.reading_turns import turns_of
from forebay.transports.refusal_pacing import RefusalLine
from forebay.types.server_state import here

if TYPE_CHECKING:
    from forebay.errors import ForebayError
    from forebay.server.config import GrpcConfig
    from forebay.transports.grpc.connection import GrpcConnection
    from forebay.transports.grpc.refusals import CallRefusal

log = logging.getLogger("forebay.requests")

UNPACKERS: Final = 2
"""Threads that unpack large messages."""
SWEEP_S: Final = 1.0
"""How often connections are looked at."""
SHORTEST_LOOK_S: Final = 0.005
"""Shortest time between two looks at the deadlines."""


class GrpcPort:
    """What all connections of a listener share.

    Attributes:
        heads: Reads what calls want.
        epoch: Sweeps so far; connections and calls note it instead of asking for the time.
        greeted: Connections whose TLS handshake is not over; they count as connections.
        connections: Those that are open.
        calls: How many are open, without those that need no key.
        public_streams: How many of those without a key are streams.
        byte_budget: What messages and unsent answers take, of all connections together.
        max_connection_bytes: What they may take of one connection.
        frame_rooms: Where the connection that is being read has frames put.
        tasks: Those of methods that run.
        refusals: Where calls that came to a full queue wait for their status.
        turns: Where clients that send quickly wait until they are read again.
        unpacking: Held by those that unpack a step of a large message.
        tells: Whether somebody wants to know of each call that has ended.
        max_small_bytes: Longest answer, with its prefix, that fits in one frame.
    """

    def __init__(
        self,
        config: GrpcConfig,
        heads: HeadReader,
        loop: asyncio.AbstractEventLoop,
        byte_budget: ByteBudget | None = None,
    ) -> None:
        self.config = config
        self.byte_budget = ByteBudget() if byte_budget is None else byte_budget
        self.byte_budget.max_bytes = config.max_buffered_bytes
        self.byte_budget.call_soon = loop.call_soon
        self.max_connection_bytes = max(config.max_connection_bytes, config.max_message_bytes)
        self.heads = heads
        self.loop = loop
        self.epoch = 0
        self.greeted = 0
        self.connections: set[GrpcConnection] = set()
        self._call_listeners = here(CallListeners)
        self.refused_requests = here(LastRefusals)
        self.tells = config.access_log or config.answer_cost or bool(self._call_listeners.told)
        self.calls = 0
        self.public_streams = 0
        self.frame_rooms = FrameRooms()
        self.tasks: set[asyncio.Task[None]] = set()
        self.refusals = RefusalLine(loop, self.tell_refused)
        self.turns = turns_of(loop)
        self.max_small_bytes = min(MIN_FRAME_BYTES, config.max_message_bytes + PREFIX_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._timed: dict[OpenCall, None] = {}
        self._look: asyncio.TimerHandle | None = None
        self._look_due = NEVER
        self._told = RefusalLog("gRPC client")
        self.unpacking = asyncio.Semaphore(UNPACKERS)
        self._unpackers: ThreadPoolExecutor | None = None
        self._landed: list[OpenCall] = []

    def sweep(self) -> None:
        """Look at every connection, now and then once a second."""
        self.epoch += 1
        # First: whatever one connection raises, the others are looked at again.
        self._timer = self.loop.call_later(SWEEP_S, self.sweep)
        self.heads.guesses = MAX_GUESSES
        self.byte_budget.make_room()
        for connection in list(self.connections):
            try:
                connection.sweep(self.epoch)
            except Exception:
                log.exception("failed to check a connection; closing it")
                connection.abort()

    def stop(self) -> None:
        """Look at nothing any more."""
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        self._told.close()
        if self._unpackers is not None:
            self._unpackers.shutdown(wait=False, cancel_futures=True)

    @property
    def unpackers(self) -> ThreadPoolExecutor:
        """Threads that unpack large messages."""
        if self._unpackers is None:
            self._unpackers = ThreadPoolExecutor(UNPACKERS, thread_name_prefix="forebay-grpc-unpack")
        return self._unpackers

    def refused(self, peer: str, text: str) -> None:
        """Write a line of the log about a client that was refused, at most one a second for each reason."""
        self._told.refused(self.epoch, peer, text, text)

    def cut_off(self, peer: str, error: ForebayError) -> None:
        """Write a line of the log about a client that does not read, at most one a second."""
        self._told.refused(self.epoch, peer, "unread", error.message, error.kind)

    def tell(self, error: ForebayError, client: tuple[str, int] | None) -> None:
        """Write such a line about a client that did not become a connection."""
        self._told.refused(self.epoch, client, type(error), error.message, error.kind)

    def refuse_plain(self) -> tuple[str, bytes]:
        """Return why a client is refused that speaks without TLS where that is needed, and what it is sent."""
        return "it does not speak TLS", NEEDS_TLS

    def tell_refused(self, calls: Sequence[OpenCall]) -> None:
        """Tell calls that they came to a full queue; it is logged once for all with the same reason."""
        alike: dict[CallRefusal, list[OpenCall]] = {}
        for call in calls:
            if call.refusal is not None and not call.state.is_done:
                alike.setdefault(call.refusal, []).append(call)
        for refusal, together in alike.items():
            self._told.refused(self.epoch, together[0].peer, refusal.text, refusal.text)
            self._told.counts(self.epoch, refusal.text, len(together) - 1)
            for call in together:
                try:
                    call.tell_refused()
                except Exception:  # of one of them: the others are told all the same
                    log.exception("failed to write a rejection")

    def expect(self, call: OpenCall, timeout_s: float) -> None:
        """End a call after this time."""
        now = time.monotonic()
        call.deadline = now + timeout_s
        self._timed[call] = None
        if call.deadline < self._look_due:
            self._look_at(call.deadline, now)

    def begin_later(self, call: OpenCall) -> None:
        """Begin a call whose message has landed together with the others of this turn of the loop.

        After a long message the core's caches hold little of the server; so the way to the model is gone once for all.
        """
        if not self._landed:
            self.loop.call_soon(self._begin_landed)
        self._landed.append(call)

    def _begin_landed(self) -> None:
        landed, self._landed = self._landed, []
        for call in landed:
            try:
                call.begin_landed()
            except Exception:
                log.exception("failed to begin a call; this is a defect of forebay")
                call.end(Status.INTERNAL, "the server failed")

    def closed(self, call: OpenCall) -> None:
        """Count a call that is over."""
        if call.head.is_public:
            self.public_streams -= call.is_stream
        else:
            self.calls -= 1
        if call.deadline != NEVER:
            self._timed.pop(call, None)
        if self.tells:
            self.tell_ended(call.told())
        call.forget()

    def tell_ended(self, call: EndedCall) -> None:
        """Tell of a call that has ended."""
        self._call_listeners.ended(call, writes=self.config.access_log)

    def _look_at(self, deadline: float, now: float) -> None:
        if self._look is not None:
            self._look.cancel()
        wait_s = max(deadline - now, SHORTEST_LOOK_S)
        self._look_due = now + wait_s
        self._look = self.loop.call_later(wait_s, self._expire)

    def _expire(self) -> None:
        self._look, self._look_due = None, NEVER
        now = time.monotonic()
        for call in [call for call in self._timed if call.deadline <= now + EARLY_S]:
            self._timed.pop(call, None)  # calling one off may answer others
            call.abandon(Status.DEADLINE_EXCEEDED, "Deadline Exceeded")
        earliest = min((call.deadline for call in self._timed), default=NEVER)
        if earliest != NEVER:
            self._look_at(earliest, now)
