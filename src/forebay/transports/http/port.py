# SPDX-License-Identifier: Apache-2.0
"""What all connections of an HTTP port share: remembered heads, one clock, a budget of bodies, a log of refusals."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from email.utils import formatdate
from typing import TYPE_CHECKING, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.server import ServerState

from forebay.errors import CapacityError, ForebayError, InternalError
from forebay.observe.logs.access_log import CallListeners, EndedCall
from forebay.observe.logs.noted_refusals import LastRefusals
from forebay.observe.logs.refusal_log import RefusalLog
from forebay.protocols import native
from forebay.server.byte_budget import ByteBudget
from forebay.transports.api_keys import KeyHolders
from forebay.transports.http.asgi_calls import telling
from forebay.transports.http.error_answers import error_answer
from forebay.transports.http.head import Head, HeadMemory
from forebay.transports.http.host_names import Hosts
from forebay.transports.http.http_errors import NotHttp
from forebay.transports.http.same_turn import Mailbox, SameTurn, TakesMany
from forebay.transports.rate_limit_fields import telling_limits
from forebay.transports.reading_turns import ReadingTurns, turns_of
from forebay.transports.refusal_pacing import RefusalLine
from forebay.types.server_state import here

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp

    from forebay.server.config import HttpConfig
    from forebay.transports.http.connection import HttpConnection
    from forebay.transports.http.route import Route

log = logging.getLogger("forebay.refusals")

SWEEP_S: Final = 1.0
"""How often connections are looked at."""
MAX_HEADS: Final = 1024
"""Heads that are remembered; when there are more, all are forgotten and learned anew."""
_WHEN: Final = {b"retry-after": b"\0s", b"retry-after-ms": b"\0ms"}
"""Stand for the values of these headers; no other has such bytes."""


class HttpPort:
    """What all connections of a listener share.

    Attributes:
        routes: Models by the target of their POST requests.
        heads: Remembered heads by their bytes, with the empty line.
        is_draining: Set when the server stops: every answer then closes its connection.
        is_plain: Whether there is nothing to do for an answer but to write it.
        tells: Whether somebody wants to know of each call that has ended.
        date: The value of the Date header.
        epoch: Sweeps so far; connections note it instead of asking for the time.
        byte_budget: What requests and unsent answers take, of all connections together.
        max_connection_bytes: What they may take of one connection.
        hosts: The names that the server may be called by.
        is_any_method: Whether all methods are one, also those that the parser does not know.
        uvicorn: What its protocol class is told: the ASGI application, which answers all else.
        server_state: The application's tasks, and headers of its answers.
        loop: The event loop, once it is started.
        refusals: Where requests that came to a full queue wait for their answer.
        turns: Where clients that send quickly wait until they are read again.
        greeted: Connections whose TLS handshake is not over; they count as connections.
        connections: All others.
        awake: Those that every sweep looks at.
    """

    loop: asyncio.AbstractEventLoop
    refusals: RefusalLine
    turns: ReadingTurns

    def __init__(
        self,
        config: HttpConfig,
        routes: Mapping[bytes, Route],
        asgi: ASGIApp,
        byte_budget: ByteBudget | None = None,
        *,
        is_any_method: bool = False,
    ) -> None:
        self.config = config
        self.byte_budget = ByteBudget() if byte_budget is None else byte_budget
        self.byte_budget.max_bytes = config.max_buffered_bytes
        self.max_connection_bytes = max(config.max_connection_bytes, config.max_body_bytes)
        self.is_any_method = is_any_method
        self.routes = routes
        self.heads: dict[bytes, HeadMemory] = {}
        self.is_draining = False
        self._call_listeners = here(CallListeners)
        self._refused = here(LastRefusals)
        self.tells = config.access_log or config.answer_cost or bool(self._call_listeners.told)
        self.is_plain = not self.tells
        self.date = b""
        self.epoch = 0
        self.hosts = Hosts(config)
        self.greeted = 0
        self.connections: set[HttpConnection] = set()
        self.awake: set[HttpConnection] = set()
        self._asleep: dict[int, set[HttpConnection]] = {}
        self.same_turn = SameTurn(self)
        self.server_state = ServerState()
        if holders := KeyHolders(config.api_keys):
            asgi = telling_limits(asgi, holders)
        self.uvicorn = Config(
            telling(asgi, self.tell_ended, says_cost=config.answer_cost) if self.tells else asgi,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # who connects is who the socket says, in both lanes
        )
        self.uvicorn.load()
        self._timer: asyncio.TimerHandle | None = None
        self._ids = os.urandom(4).hex().encode()
        self._told = RefusalLog("client")
        self._failed_at = -1

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to sweep, and to refuse."""
        self.loop = loop
        self.refusals = RefusalLine(loop, self.same_turn.tell_refused)
        self.turns = turns_of(loop)
        self.byte_budget.call_soon = loop.call_soon
        self._sweep()

    def _sweep(self) -> None:
        self.epoch += 1
        self.date = formatdate(usegmt=True).encode()
        self.server_state.default_headers = [(b"date", self.date)]
        # First: whatever one connection raises, the others are looked at again.
        self._timer = self.loop.call_later(SWEEP_S, self._sweep)
        self.byte_budget.make_room()
        for connection in [*self.awake, *self._asleep.pop(self.epoch, ())]:
            try:
                connection.sweep(self.epoch)
            except Exception:
                log.exception("failed to check a connection; closing it")
                connection.abort()

    def asleep(self, until: int) -> set[HttpConnection]:
        """Return the connections that no sweep before that one looks at."""
        return self._asleep.setdefault(until, set())

    def stop(self) -> None:
        """End sweeping."""
        if self._timer is not None:
            self._timer.cancel()
        self._told.close()

    def drain(self) -> None:
        """From now on, close each connection with its next answer, and refuse requests without delay."""
        self.is_draining = True
        self.is_plain = False
        self.refusals.stop()
        for connection in self.connections:
            connection.drain()

    def remember(self, raw: bytes, head: Head, headers: list[tuple[bytes, bytes]], url: bytes) -> None:
        """Remember that these bytes are this head, so that they need not be parsed again."""
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        if head.is_simple and head.route is not None and isinstance(head.route.endpoint, TakesMany):
            head.mailbox = Mailbox(head, head.route, head.route.endpoint, slice(len(raw), None), self.same_turn)
        self.heads[raw] = HeadMemory(head, raw, headers, url)

    def forget(self) -> None:
        """Forget every parsed head, because the routes have changed."""
        self.heads.clear()
        for connection in self.connections:
            connection.forget()

    def write_prefix(self, head: Head) -> bytes:
        """Write the constant part of a successful answer's head; it holds for this second."""
        assert head.route is not None
        media = native.content_type_of(head.route.contract, head.params).encode()
        closing = b"" if head.keep_alive and not self.is_draining else b"connection: close\r\n"
        head.prefix = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ndate: %b\r\n%bx-request-id: %b" % (
            media,
            self.date,
            closing,
            head.id.encode() or self._ids + b"-",
        )
        head.stamp = self.epoch
        return head.prefix

    def write_answer(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, keep_alive: bool
    ) -> bytes:
        """Write an answer that is not the common one."""
        return self.write_head(status, headers, len(body), keep_alive=keep_alive) + body

    def write_head(
        self, status: int, headers: Iterable[tuple[bytes, bytes]], size: int | None, *, keep_alive: bool
    ) -> bytes:
        """Write the head of such an answer; `size` is None if its length is not known yet."""
        lines = [STATUS_LINE[status], b"date: ", self.date, b"\r\n"]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        if size is not None:
            lines += [b"content-length: ", str(size).encode(), b"\r\n"]
        lines.append(b"\r\n")
        return b"".join(lines)

    def write_refusal(self, head: Head) -> bytes:
        """Write the answer to a request without an id that came to a full queue, but for what differs among them.

        It is the answer that everybody else would get, with its `number`, and seconds (`s`) and milliseconds (`ms`)
        until the client should try again, as a format; it holds for this second.
        """
        assert head.route is not None
        number = b"%08x" % 0
        request_id = self._ids + b"-" + number
        status, headers, body = head.route.fault(head.route.is_full_error, request_id.decode())
        headers = [(name, _WHEN.get(name, value)) for name, value in headers]
        answer = self.write_answer(status, headers, body, keep_alive=True).replace(b"%", b"%%")
        answer = answer.replace(request_id, self._ids + b"-%(number)08x")
        head.refusal = answer.replace(b"\0ms", b"%(ms)d").replace(b"\0s", b"%(s)d")
        head.refusal_stamp = self.epoch
        return head.refusal

    def refuse_plain(self) -> tuple[str, bytes]:
        """Return why a client is refused that speaks without TLS where that is needed, and what it is sent."""
        error = NotHttp("this port speaks HTTPS, and plain HTTP came; ask for it with https://")
        return error.message, self.write_answer(*error_answer(error, ""), keep_alive=False)

    def tell_ended(self, call: EndedCall) -> None:
        """Tell of a call that has ended."""
        self._call_listeners.ended(call, writes=self.config.access_log)

    def note_refusal(self, error: ForebayError, request_id: str) -> None:
        """Note which request an error answers."""
        if isinstance(error, CapacityError):
            self._refused.note(error, request_id)

    def note_refusals(self, error: CapacityError, first: int, count: int) -> None:
        """Note that an error answers requests with these numbers."""
        self._refused.note(error, f"{self._ids.decode()}-", first, count)

    def defect(self, cause: BaseException) -> InternalError:
        """Return what is told of an error that only a defect of ours raises; the log has a traceback, one a second."""
        if self._failed_at != self.epoch:
            self._failed_at = self.epoch
            log.error("failed to read a request", exc_info=cause)
        return InternalError("the server failed to read the request; this is a defect of forebay")

    def tell_cut_off(self, error: ForebayError, client: tuple[str, int] | None) -> None:
        """Log that a connection was closed because its client does not read; at most once a second."""
        self._told.refused(self.epoch, client, "unread", error.message, error.kind)

    def tell(self, error: ForebayError, client: tuple[str, int] | None, times: int = 1) -> None:
        """Log a refusal, and further ones for the same reason: at most one a second for each kind of error."""
        if not self._told.counts(self.epoch, type(error), times):  # then there is nothing to find the words for
            kind = type(error).__name__ if isinstance(error, native.Refusal) else error.kind
            self._told.refused(self.epoch, client, type(error), error.message, kind)
            self._told.counts(self.epoch, type(error), times - 1)
