# SPDX-License-Identifier: Apache-2.0
"""The fast lane: inference requests are answered inside uvicorn's own protocol class, without ASGI.

Theory of operation. A `Connection` is uvicorn's httptools protocol. When the head of a request is complete, the
target decides: a POST to a model takes the fast lane (`Exchange`, no task, no future, no scope), everything else is
handed to uvicorn's unchanged code and so to the ASGI application. Answers of both lanes leave in the order in which
their requests came: at most one is being worked on, later ones of a pipelining client wait in `pipeline`, and reading
is paused while any does.

Limits are kept here for both lanes: length of the head, idle time, slow readers and writers. One sweep a second looks
at all connections; no request sets a timer.
"""

from __future__ import annotations

import logging
import time
from email.utils import formatdate
from typing import TYPE_CHECKING, Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forebay.errors import ForebayError, Unavailable
from forebay.protocols import native
from forebay.serving.endpoint import next_id
from forebay.transports.http.exchange import Exchange, HeadTooLarge, NotHttp, TooSlow, error_answer
from forebay.types.call import Failure

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from forebay.server.config import HttpConfig
    from forebay.transports.http.exchange import Route
    from forebay.types.call import Outcome, Request

log = logging.getLogger("forebay.access")

SWEEP_S: Final = 1.0
"""How often connections are looked at."""
LINGER_S: Final = 1.0
"""How long a refused client may go on sending before it is cut off; without it the refusal could be lost."""
SEPARATE_BYTES: Final = 32 * 1024
"""Answers of this size and more are written after their head instead of being joined with it."""


class Lane:
    """What all connections of a listener share.

    Attributes:
        routes: Models by the target of their POST requests.
        is_draining: Set when the server stops: every answer then closes its connection.
        date: The value of the Date header.
        epoch: Sweeps so far; connections note it instead of asking for the time.
    """

    def __init__(self, config: HttpConfig, routes: Mapping[bytes, Route]) -> None:
        self.config = config
        self.routes = routes
        self.is_draining = False
        self.date = b""
        self.epoch = 0
        self.connections: set[Connection] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._heads: dict[tuple[str, bool], bytes] = {}

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

    def head(self, content_type: str, *, streams: bool = False) -> bytes:
        """Return the constant part of a successful answer's head."""
        found = self._heads.get((content_type, streams))
        if found is None:
            caching = b"cache-control: no-store\r\n" if streams else b""
            found = b"HTTP/1.1 200 OK\r\ncontent-type: " + content_type.encode() + b"\r\n" + caching
            self._heads[content_type, streams] = found
        return found


class Connection(HttpToolsProtocol):
    """One client connection, both lanes."""

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
        self._routes = lane.routes
        self._max_head_bytes = lane.config.max_head_bytes
        self._reply_method = self._reply
        self._part_method = self._part
        self._incoming: Exchange | None = None
        self._active: Exchange | None = None
        self._in_head = False
        self._in_message = False
        self._head_bytes = 0
        self._chunk_bytes = 0
        self._is_deaf = False
        self._is_advancing = False
        self._seen = lane.epoch
        self._stuck_since: int | None = None
        self._stalled: list[Callable[[], object]] = []

    # Bytes in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        lane = self._lane
        super().connection_made(transport)
        lane.connections.add(self)
        if len(lane.connections) > lane.config.max_connections:
            self._refuse(Unavailable(f"all {lane.config.max_connections} connections are taken; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lane.connections.discard(self)
        super().connection_lost(exc)
        self._is_deaf = True
        active, self._active = self._active, None
        self.pipeline.clear()
        if active is not None and active.request is not None and active.route is not None:
            active.route.endpoint.cancel(active.request)
        self._let_go()
        del self._reply_method, self._part_method  # they refer to the connection: without them it is freed at once

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._seen = self._lane.epoch
        self._chunk_bytes = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # no protocol is offered: the request was answered as if it had not asked
        except httptools.HttpParserError as error:
            if not self._is_deaf:
                self._refuse(NotHttp(f"this is not a request this server can read: {_reason(error)}"))
            return
        if self._in_head:
            self._head_bytes += self._chunk_bytes
            if self._head_bytes > self._max_head_bytes and not self._is_deaf:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._in_head = self._in_message = True
        self._head_bytes = 0
        self._incoming = None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._is_deaf:
            return
        headers = self.headers
        if (
            self._chunk_bytes > self._max_head_bytes
            and len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers) > self._max_head_bytes
        ):
            self._refuse(self._head_too_large())
            return
        parser = self.parser
        url = self.url
        route = self._routes.get(url)
        if route is None and b"?" in url:
            route = self._routes.get(url[: url.index(b"?")])
        if (
            route is None
            or parser.get_method() != b"POST"
            or parser.should_upgrade()
            or (self._lane.config.cors_origins and any(name == b"origin" for name, _ in headers))
        ):
            self._take_slow_lane()
            return
        exchange = self._incoming = route.read_head(headers)
        exchange.keep_alive = parser.should_keep_alive()
        exchange.chunked = parser.get_http_version() == "1.1"
        if exchange.declared_bytes > route.max_body_bytes:
            exchange.problem = route.too_large(exchange.declared_bytes)
            self._refuse(exchange.problem, exchange)
        elif exchange.expects_continue:
            if exchange.problem is not None:
                self._refuse(exchange.problem, exchange)
            elif exchange.chunked and self._active is None and not self.pipeline:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        exchange = self._incoming
        if exchange is None:
            if not self._is_deaf:
                super().on_body(body)
            return
        exchange.received_bytes += len(body)
        route = exchange.route
        if route is None or self._is_deaf or exchange.problem is not None:
            return
        if exchange.received_bytes > route.max_body_bytes:
            self._refuse(route.too_large(), exchange)
            return
        exchange.body.append(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if self._is_deaf:
            return
        exchange = self._incoming
        if exchange is None:
            super().on_message_complete()
        elif self._is_busy:
            self._put_off(exchange, None)
        else:
            self._start(exchange)

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
                cycle = cast("RequestResponseCycle | None", self.cycle)
                what, app = self.pipeline[-1]
                if cycle is not None and cycle is not what and self._runs(cycle):
                    return
                self.pipeline.pop()
                if app is None:
                    self._start(cast("Exchange", what))
                else:
                    super()._start_asgi_task(what, app)
                    return
            if not self.pipeline and not self.flow.write_paused:
                self.flow.resume_reading()
        finally:
            self._is_advancing = False

    def _runs(self, cycle: RequestResponseCycle) -> bool:
        """Whether this cycle was started and has not answered."""
        return not cycle.response_complete and all(waiting is not cycle for waiting, _ in self.pipeline)

    # The fast lane

    def _start(self, exchange: Exchange) -> None:
        self._active = exchange
        route = exchange.route
        if exchange.problem is not None or route is None:
            self._fail(exchange, exchange.problem or NotHttp("the request could not be read"))
            return
        try:
            route.submit(exchange, self._reply_method, self, self._part_method)
        except ForebayError as error:
            self._fail(exchange, error)

    def _reply(self, request: Request, outcome: Outcome) -> None:
        exchange = self._active
        if exchange is None or exchange.request is not request:
            return
        if type(outcome) is Failure:
            exchange.id = request.id
            self._fail(exchange, outcome.error)
            return
        route = exchange.route
        assert route is not None
        if route.contract.streams:
            self._end_stream(exchange, b"")
            return
        lane = self._lane
        body = outcome if type(outcome) is bytes else route.encode(exchange, outcome)
        keep_alive = exchange.keep_alive and not lane.is_draining
        head = b"%bx-request-id: %b\r\ndate: %b\r\ncontent-length: %d\r\n%b\r\n" % (
            lane.head(native.content_type_of(route.contract, exchange.params)),
            (exchange.id or next_id()).encode(),
            lane.date,
            len(body),
            b"" if keep_alive else b"connection: close\r\n",
        )
        if len(body) < SEPARATE_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)
        self._answered(exchange, 200, keep_alive=keep_alive)

    def _part(self, part: bytes, release: Callable[[], object]) -> None:
        """Send one part of a streamed answer; `release` is called once the client has room for more."""
        exchange = self._active
        assert exchange is not None
        route = exchange.route
        assert route is not None
        raw = route.contract.raw_output
        if not exchange.started:
            exchange.started = True
            exchange.keep_alive = exchange.keep_alive and exchange.chunked and not self._lane.is_draining
            framing = b"transfer-encoding: chunked\r\n" if exchange.chunked else b""
            head = self._lane.head(native.RAW_TYPE if raw else native.STREAM_TYPE, streams=True)
            closing = b"" if exchange.keep_alive else b"connection: close\r\n"
            request_id = exchange.id = exchange.id or next_id()
            rest = b"x-request-id: %b\r\ndate: %b\r\n%b%b\r\n" % (request_id.encode(), self._lane.date, framing, closing)
            self.transport.write(head + rest)
        self._write_chunk(exchange, part if raw else native.event(part))
        if self.flow.write_paused:
            self._stalled.append(release)
        else:
            release()

    def _end_stream(self, exchange: Exchange, last: bytes) -> None:
        if not exchange.started:
            self._part(b"", lambda: None) if last else self._begin_empty_stream(exchange)
        if last:
            self._write_chunk(exchange, last)
        if exchange.chunked:
            self.transport.write(b"0\r\n\r\n")
        self._answered(exchange, 200, keep_alive=exchange.keep_alive)

    def _begin_empty_stream(self, exchange: Exchange) -> None:
        """Send the head of a stream that has no parts at all."""
        exchange.keep_alive = False
        exchange.chunked = False
        exchange.started = True
        head = self._lane.head(native.STREAM_TYPE, streams=True)
        self.transport.write(head + b"content-length: 0\r\nconnection: close\r\n\r\n")

    def _write_chunk(self, exchange: Exchange, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if exchange.chunked else data)

    def _fail(self, exchange: Exchange, error: ForebayError) -> None:
        exchange.id = exchange.id or next_id()
        if exchange.request is None and exchange.route is not None:
            exchange.route.endpoint.reject(error)
        if exchange.started:
            self._end_stream(exchange, native.error_event(native.error_body(error, exchange.id)))
            return
        keep_alive = exchange.keep_alive and not self._lane.is_draining
        status, headers, body = error_answer(error, exchange.id)
        lines = [STATUS_LINE[status], b"date: ", self._lane.date, b"\r\n"]
        for name, value in headers:
            lines += [name, b": ", value, b"\r\n"]
        if not keep_alive:
            lines.append(b"connection: close\r\n")
        lines += [b"content-length: ", str(len(body)).encode(), b"\r\n\r\n", body]
        self.transport.write(b"".join(lines))
        self._answered(exchange, status, keep_alive=keep_alive)

    def _answered(self, exchange: Exchange, status: int, *, keep_alive: bool) -> None:
        self._active = None
        if self._lane.config.access_log:
            self._log(exchange, status)
        if not keep_alive:
            self._hang_up()
        elif self.pipeline:
            self._advance()

    # Limits

    def sweep(self, epoch: int) -> None:
        """Close what is idle, slow or stuck; called once a second."""
        config = self._lane.config
        quiet_s = (epoch - self._seen) * SWEEP_S
        if self._stuck_since is not None:
            if (epoch - self._stuck_since) * SWEEP_S > config.write_timeout_s:
                self.transport.abort()
        elif self._in_message and not self._is_deaf and not self.flow.read_paused:
            if quiet_s > config.read_timeout_s:
                self._refuse(TooSlow(f"the rest of the request did not come within {config.read_timeout_s:g} seconds"))
        elif not self._is_busy and (quiet_s > config.keep_alive_s or self._is_deaf):
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once nothing is being answered on it."""
        if not self._is_busy and not self._in_message:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.flow.pause_reading()  # who does not read answers may not ask for more of them
        self._stuck_since = self._lane.epoch

    def resume_writing(self) -> None:
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

    def _refuse(self, error: ForebayError, exchange: Exchange | None = None) -> None:
        """Answer with an error in turn, read nothing more, and close."""
        self._is_deaf = True
        exchange = exchange or Exchange(None)
        exchange.problem = error
        exchange.keep_alive = False
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None and not cycle.response_complete and cycle.more_body and self._active is None:
            self.transport.abort()  # the body of a request that the slow lane is working on broke off
        elif self._is_busy:
            self.pipeline.appendleft((cast("Any", exchange), cast("Any", None)))
        else:
            self._start(exchange)

    def _hang_up(self) -> None:
        if self._is_deaf and self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self.loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def _log(self, exchange: Exchange, status: int) -> None:
        name = exchange.route.endpoint.name if exchange.route is not None else None
        client = ":".join(map(str, self.client)) if self.client else None
        request = exchange.request
        milliseconds = round((time.monotonic() - request.arrived) * 1000, 3) if request is not None else None
        extra = {"request_id": exchange.id, "model": name, "status": status, "client": client, "ms": milliseconds}
        log.info("answered", extra=extra)


def _reason(error: httptools.HttpParserError) -> str:
    cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error
    return str(cause or error)[:200]


