# SPDX-License-Identifier: Apache-2.0
"""The fast lane: inference requests are answered inside uvicorn's own protocol class, without ASGI.

Theory of operation. A `Connection` is uvicorn's httptools protocol. When the head of a request is complete, the
target decides: a POST to a model takes the fast lane (no task, no future, no scope), everything else is handed to
uvicorn's unchanged code and so to the ASGI application. Answers of both lanes leave in the order in which their
requests came: at most one is being worked on, later ones of a pipelining client wait in `pipeline`, and reading is
paused while any does.

A client mostly sends the same head again and again. Once the parser has read one, the `Lane` remembers its bytes: a
request that arrives whole, between two others, with a remembered head is not parsed at all. Only heads are remembered
that say all there is to say about the message (a length, nothing unusual), so the same bytes mean the same again.

Limits are kept here for both lanes: length of the head, idle time, slow readers and writers. One sweep a second looks
at all connections; no request sets a timer.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forebay.errors import ForebayError, InternalError, Unavailable
from forebay.protocols import native
from forebay.serving.endpoint import next_id
from forebay.transports.http.exchange import Head, HeadTooLarge, NotHttp, TooSlow, error_answer
from forebay.types.call import Failure, Request

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from forebay.server.config import HttpConfig
    from forebay.transports.http.exchange import Route
    from forebay.types.call import Outcome

log = logging.getLogger("forebay.access")

SWEEP_S: Final = 1.0
"""How often connections are looked at."""
LINGER_S: Final = 1.0
"""How long a refused client may go on sending before it is cut off; without it the refusal could be lost."""
SEPARATE_BYTES: Final = 32 * 1024
"""Answers of this size and more are written after their head instead of being joined with it."""
MAX_HEADS: Final = 1024
"""Heads that are remembered; when there are more, all are forgotten and learned anew."""
MAX_HEAD_BYTES: Final = 2048
"""Longest head that is remembered."""

_answers = itertools.count(1)


class Lane:
    """What all connections of a listener share.

    Attributes:
        routes: Models by the target of their POST requests.
        heads: Remembered heads by their bytes, without the empty line.
        is_draining: Set when the server stops: every answer then closes its connection.
        is_plain: Whether there is nothing to do for an answer but to write it.
        date: The value of the Date header.
        epoch: Sweeps so far; connections note it instead of asking for the time.
    """

    def __init__(self, config: HttpConfig, routes: Mapping[bytes, Route]) -> None:
        self.config = config
        self.routes = routes
        self.heads: dict[bytes, Head] = {}
        self.is_draining = False
        self.is_plain = not config.access_log
        self.date = b""
        self.epoch = 0
        self.connections: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._ids = os.urandom(4).hex().encode()

    def start(self, loop: asyncio.AbstractEventLoop, state: ServerState) -> None:
        """Begin to sweep."""
        self.epoch += 1
        self.date = formatdate(usegmt=True).encode()
        state.default_headers = [(b"date", self.date)]
        for connection in list(self.connections):
            connection.sweep(self.epoch)
        self._timer = loop.call_later(SWEEP_S, self.start, loop, state)

    def stop(self) -> None:
        """End sweeping."""
        if self._timer is not None:
            self._timer.cancel()

    def drain(self) -> None:
        """Let every answer from now on close its connection."""
        self.is_draining = True
        self.is_plain = False

    def remember(self, raw: bytes, head: Head) -> None:
        """Take these bytes for this head from now on."""
        if len(self.heads) >= MAX_HEADS:
            self.heads.clear()
        self.heads[raw] = head

    def forget(self) -> None:
        """Read every head anew: the routes have changed."""
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


class Connection(HttpToolsProtocol):
    """One client connection, both lanes."""

    __slots__ = (
        "_active",
        "_chunk_bytes",
        "_has_started",
        "_head_bytes",
        "_in_head",
        "_in_message",
        "_is_advancing",
        "_is_chunked",
        "_is_deaf",
        "_is_free",
        "_lane",
        "_max_head_bytes",
        "_parser",
        "_pieces",
        "_reading",
        "_received",
        "_reply_method",
        "_request",
        "_request_id",
        "_seen",
        "_send",
        "_stalled",
        "_stuck_since",
        "_usual",
        "_usual_bytes",
        "_usual_head_bytes",
        "_usual_raw",
        "release",
    )

    def __init__(
        self,
        lane: Lane,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.release = 0
        self._lane = lane
        self._parser: Any = self.parser
        self._max_head_bytes = lane.config.max_head_bytes
        self._reply_method = self._reply
        self._send: Callable[[bytes], None] = _nowhere
        # What is being read.
        self._reading: Head | None = None
        self._pieces: list[bytes] = []
        self._received = 0
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0
        self._chunk_bytes = 0
        self._is_deaf = False
        # What is being answered.
        self._active: Head | None = None
        self._request: Request | None = None
        self._request_id = ""
        self._has_started = False
        self._is_chunked = True
        self._is_advancing = False
        self._is_free = True
        """Whether the next byte begins a request and nothing is being answered."""
        # The head this client sent last.
        self._usual = Head()
        self._usual_raw = b""
        self._usual_head_bytes = 0
        self._usual_bytes = 0
        # Limits.
        self._seen = lane.epoch
        self._stuck_since: int | None = None
        self._stalled: list[Callable[[], object]] = []

    # Bytes in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it if there are too many."""
        lane = self._lane
        super().connection_made(transport)
        self._send = transport.write
        lane.connections.add(self)
        if len(lane.connections) > lane.config.max_connections:
            self._refuse(Unavailable(f"all {lane.config.max_connections} connections are taken; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is being answered: nobody waits for it any more."""
        self._lane.connections.discard(self)
        super().connection_lost(exc)
        self._abandon()
        self._send = _nowhere
        del self._reply_method, self._parser  # they refer to the connection: without them it is freed at once

    def _abandon(self) -> None:
        """Nobody reads answers here any more: cancel what is being answered and forget what waits."""
        self._is_deaf = True
        self._is_free = False
        active, request = self._active, self._request
        self._active = self._request = None
        self.pipeline.clear()
        if active is not None and active.route is not None and request is not None:
            active.route.endpoint.cancel(request)
        self._let_go()

    def forget(self) -> None:
        """Read the next head anew."""
        self._usual, self._usual_raw, self._usual_head_bytes, self._usual_bytes = Head(), b"", 0, 0

    def abort(self) -> None:
        """End the connection now."""
        self._abandon()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a remembered request as it is; let the parser read everything else."""
        if self._is_free:
            if len(data) == self._usual_bytes and data.startswith(self._usual_raw):
                head = self._usual
                body = data[self._usual_head_bytes :]
            else:
                end = data.find(b"\r\n\r\n") + 4
                raw = data[:end]
                head = self._lane.heads.get(raw)
                if head is None or len(data) != end + head.length:
                    self._reading = None
                    self._parse(data)
                    self._learn(data, raw)
                    return
                body = data[end:]
                self._usual, self._usual_raw, self._usual_head_bytes, self._usual_bytes = head, raw, end, len(data)
            self._seen = self._lane.epoch
            self._is_free = False
            if head.is_simple:
                self._active = head
                request = self._request = Request(body, self._reply_method, head.params, self)
                head.submit(request)
            else:
                self._answer(head, body)
        elif not self._is_deaf:
            self._parse(data)

    def _learn(self, data: bytes, raw: bytes) -> None:
        """Remember the head that was just read if the same bytes will always mean the same."""
        head = self._reading
        if (
            head is not None
            and head.is_usual
            and head.problem is None
            and head.chunked
            and 0 <= head.length == len(data) - len(raw)
            and len(raw) <= MAX_HEAD_BYTES
            and raw.startswith(b"POST ")
            and raw.count(b"\n") == len(self.headers) + 2  # nothing before the line, nothing folded, no bare line feeds
        ):
            self._lane.remember(raw, head)

    def _parse(self, data: bytes) -> None:
        self._seen = self._lane.epoch
        self._chunk_bytes = len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no protocol is offered: the request was answered as if it had not asked
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._refuse(_refusal(error))
            return
        if self._in_head:
            self._head_bytes += self._chunk_bytes
            if self._head_bytes > self._max_head_bytes and not self._is_deaf:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        """Begin a request; the parser calls this and the methods below."""
        self.url = b""
        self.headers = []
        self._in_head = self._in_message = True
        self._is_free = False
        self._head_bytes = 0
        self._reading = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Choose the lane, and refuse what need not be read to its end."""
        self._in_head = False
        if self._is_deaf:
            return
        headers = self.headers
        if (
            self._head_bytes + self._chunk_bytes > self._max_head_bytes
            and len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers) > self._max_head_bytes
        ):
            self._refuse(self._head_too_large())
            return
        parser = self._parser
        target, _, query = self.url.partition(b"?")
        route = self._lane.routes.get(target)
        if (
            route is None
            or parser.get_method() != b"POST"
            or parser.should_upgrade()
            or (self._lane.config.cors_origins and any(name == b"origin" for name, _ in headers))
        ):
            self._take_slow_lane()
            return
        head = self._reading = route.read_head(headers, query)
        head.keep_alive = parser.should_keep_alive()
        head.is_simple = head.is_simple and head.keep_alive
        head.chunked = parser.get_http_version() == "1.1"
        self._pieces = []
        self._received = 0
        if head.length > route.max_body_bytes:
            self._refuse(route.too_large(head.length), head)
        elif head.expects_continue:
            if head.problem is not None:
                self._refuse(head.problem, head)
            elif head.chunked and not self._is_busy:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, or drop it if the request is refused anyhow."""
        if self._is_deaf:
            return
        head = self._reading
        if head is None:
            super().on_body(body)
            return
        self._received += len(body)
        assert head.route is not None
        if self._received > head.route.max_body_bytes:
            self._refuse(head.route.too_large(), head)
        elif head.problem is None:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        """Answer the request, or put it off if another one's turn is before."""
        self._in_message = False
        if self._is_deaf:
            return
        head = self._reading
        if head is None:
            super().on_message_complete()
            return
        pieces = self._pieces
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._pieces = []
        if self._is_busy:
            self._put_off((head, body), None)
        else:
            self._answer(head, body)

    # The slow lane

    def _take_slow_lane(self) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers = self.scope["headers"] = headers
        self.expect_100_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers)
        super().on_headers_complete()
        if self._lane.is_draining:
            self.cycle.keep_alive = False

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._active is not None or self.pipeline:
            self._put_off(cycle, app)
        else:
            super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with what waits; uvicorn's cycle calls this."""
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self._advance()

    # One after the other

    @property
    def _is_busy(self) -> bool:
        """Whether an answer must leave before another request may be started."""
        if self._active is not None or self.pipeline:
            return True
        cycle = cast("RequestResponseCycle | None", self.cycle)
        return cycle is not None and not cycle.response_complete

    def _put_off(self, what: Any, app: Any) -> None:
        self.flow.pause_reading()
        self.pipeline.appendleft((what, app))

    def _advance(self) -> None:
        """Start what waits, unless an answer is still due; a loop, for refusals answer at once."""
        if self._is_advancing:
            return
        self._is_advancing = True
        try:
            while self.pipeline and self._active is None and not self.transport.is_closing():
                if self.flow.write_paused:
                    return
                cycle = cast("RequestResponseCycle | None", self.cycle)
                what, app = self.pipeline[-1]
                if cycle is not None and cycle is not what and self._runs(cycle):
                    return
                self.pipeline.pop()
                if not self.pipeline:
                    self.flow.resume_reading()
                if app is None:
                    self._answer(*cast("tuple[Head, bytes]", what))
                else:
                    super()._start_asgi_task(what, app)
                    return
        finally:
            self._is_advancing = False
        if not self._is_busy:
            self._is_free = not self._in_message and not self._is_deaf
            if not self.flow.write_paused:
                self.flow.resume_reading()

    def _runs(self, cycle: RequestResponseCycle) -> bool:
        """Whether this cycle was started and has not answered."""
        return not cycle.response_complete and all(waiting is not cycle for waiting, _ in self.pipeline)

    # The fast lane

    def _answer(self, head: Head, body: bytes) -> None:
        self._active = head
        route = head.route
        if head.problem is not None or route is None:
            problem = head.problem or NotHttp("the request could not be read")
            if route is not None:
                route.endpoint.reject(problem)
            self._fail(head, problem)
            return
        try:
            request = self._request = route.request(head, body, self._reply_method, self)
        except ForebayError as error:
            route.endpoint.reject(error)
            self._fail(head, error)
            return
        if route.contract.streams:
            request.on_part = self._part
        route.endpoint.submit(request)

    def _reply(self, request: Request, outcome: Outcome) -> None:
        head = self._active
        if request is not self._request or head is None:
            return
        self._request = None
        lane = self._lane
        if type(outcome) is not bytes or not lane.is_plain:
            self._reply_in_full(head, request, outcome)
            return
        prefix = head.prefix if head.stamp == lane.epoch else lane.write_prefix(head)
        size = len(outcome)
        if head.is_simple and size < SEPARATE_BYTES:
            number = next(_answers)
            self._send(b"%b%x\r\ncontent-length: %d\r\n\r\n%b" % (prefix, number, size, outcome))
            self._active = None
            if self.pipeline:
                self._advance()
            else:
                self._is_free = not self._in_message
            return
        number = b"" if head.id else b"%x" % next(_answers)
        self.transport.write(b"%b%b\r\ncontent-length: %d\r\n\r\n" % (prefix, number, size))
        self.transport.write(outcome)
        self._active = None
        if not head.keep_alive:
            self._hang_up()
        elif self.pipeline:
            self._advance()
        else:
            self._is_free = not self._in_message

    def _reply_in_full(self, head: Head, request: Request, outcome: Outcome) -> None:
        """Answer in one of the ways that are not the common one."""
        route = head.route
        assert route is not None
        if type(outcome) is Failure:
            self._request_id = request.id
            self._fail(head, outcome.error, request)
        elif route.contract.streams:
            self._end_stream(head, b"")
            self._answered(head, 200, request)
        else:
            media, body = route.answer(head.params, outcome)
            self._request_id = head.id or next_id()
            self._write(200, [(b"content-type", media), (b"x-request-id", self._request_id.encode())], body, head)
            self._answered(head, 200, request)

    def _fail(self, head: Head, error: ForebayError, request: Request | None = None) -> None:
        self._request_id = self._request_id or head.id or next_id()
        status = 200
        if self._has_started:
            self._end_stream(head, native.error_event(native.error_body(error, self._request_id)))
        else:
            tell = error_answer if head.route is None else head.route.fault
            status, headers, body = tell(error, self._request_id)
            self._write(status, headers, body, head)
        self._answered(head, status, request)

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, head: Head) -> None:
        lines = [STATUS_LINE[status], b"date: ", self._lane.date, b"\r\n"]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if not self._keeps_alive(head):
            lines.append(b"connection: close\r\n")
        lines += [b"content-length: ", str(len(body)).encode(), b"\r\n\r\n", body]
        self.transport.write(b"".join(lines))

    def _answered(self, head: Head, status: int, request: Request | None) -> None:
        keep_alive = self._keeps_alive(head) and (self._is_chunked or not self._has_started)
        if self._lane.config.access_log:
            self._log(head, status, request)
        self._active = self._request = None
        self._request_id = ""
        self._has_started = False
        self._is_chunked = True
        if not keep_alive:
            self._hang_up()
        else:
            self._advance()

    def _keeps_alive(self, head: Head) -> bool:
        return head.keep_alive and not self._lane.is_draining and not self._is_deaf

    # Streamed answers

    def _part(self, part: bytes, release: Callable[[], object]) -> None:
        """Send one part of a streamed answer; `release` is called once the client has room for more."""
        head = self._active
        if head is None:  # the connection was given up in this very step
            release()
            return
        assert head.route is not None
        raw = head.route.contract.raw_output
        self._begin_stream(head, raw=raw)
        self._write_chunk(part if raw else native.event(part))
        if self.flow.write_paused:
            self._stalled.append(release)
        else:
            release()

    def _begin_stream(self, head: Head, *, raw: bool) -> None:
        if self._has_started:
            return
        self._has_started = True
        self._is_chunked = head.chunked
        self._request_id = head.id or next_id()
        lines = [
            STATUS_LINE[200] + b"content-type: " + (native.RAW_TYPE if raw else native.STREAM_TYPE).encode(),
            b"cache-control: no-store",
            b"date: " + self._lane.date,
            b"x-request-id: " + self._request_id.encode(),
            b"transfer-encoding: chunked" if self._is_chunked else b"connection: close",
        ]
        if self._is_chunked and not self._keeps_alive(head):
            lines.append(b"connection: close")
        self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n")

    def _end_stream(self, head: Head, last: bytes) -> None:
        self._begin_stream(head, raw=False)
        if last:
            self._write_chunk(last)
        if self._is_chunked:
            self.transport.write(b"0\r\n\r\n")

    def _write_chunk(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    # Limits

    def sweep(self, epoch: int) -> None:
        """Close what is idle, slow or stuck; called once a second."""
        config = self._lane.config
        quiet_s = (epoch - self._seen) * SWEEP_S
        if self._stuck_since is not None:
            if (epoch - self._stuck_since) * SWEEP_S > config.write_timeout_s:
                self.abort()
        elif self._in_message and not self._is_deaf and not self.flow.read_paused:
            if quiet_s > config.read_timeout_s:
                self._refuse(TooSlow(f"the rest of the request did not come within {config.read_timeout_s:g} seconds"))
        elif not self._is_busy and (quiet_s > config.keep_alive_s or self._is_deaf):
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once nothing is being answered on it."""
        if not self._is_busy and not self._in_message:
            self.transport.close()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None:
            cycle.keep_alive = False

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        super().pause_writing()
        self.flow.pause_reading()  # who does not read answers may not ask for more of them
        self._stuck_since = self._lane.epoch

    def resume_writing(self) -> None:
        """The client has room again."""
        super().resume_writing()
        self._stuck_since = None
        self._let_go()
        self._advance()

    def _let_go(self) -> None:
        stalled, self._stalled = self._stalled, []
        for release in stalled:
            release()

    def _head_too_large(self) -> HeadTooLarge:
        return HeadTooLarge(f"the request's line and headers are longer than {self._max_head_bytes} bytes")

    def _refuse(self, error: ForebayError, head: Head | None = None) -> None:
        """Answer with an error in turn, read nothing more, and close."""
        self._is_deaf = True
        self._is_free = False
        head = head or Head()
        head.problem = error
        head.keep_alive = False
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete and cycle.more_body and self._active is None:
            self.abort()  # the body of a request that the slow lane is working on broke off
        elif self._is_busy:
            self._put_off((head, b""), None)
        else:
            self._answer(head, b"")

    def _hang_up(self) -> None:
        if self._is_deaf and self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _log(self, head: Head, status: int, request: Request | None) -> None:
        name = head.route.endpoint.name if head.route is not None else None
        client = ":".join(map(str, self.client)) if self.client else None
        milliseconds = round((time.monotonic() - request.arrived) * 1000, 3) if request is not None else None
        extra = {"request_id": self._request_id, "model": name, "status": status, "client": client, "ms": milliseconds}
        log.info("answered", extra=extra)


def _nowhere(_data: bytes) -> None:
    """Stand in for a transport until there is one."""


def _refusal(error: httptools.HttpParserError) -> ForebayError:
    """Tell bytes that are no request from a defect of ours in one of the parser's callbacks."""
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    if isinstance(cause, httptools.HttpParserError | UnicodeError):
        return NotHttp(f"this is not a request this server can read: {str(cause)[:200]}")
    logging.getLogger("forebay").error("a request could not be read", exc_info=cause)
    return InternalError("the server failed to read the request; this is a defect of forebay")
