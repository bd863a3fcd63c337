# SPDX-License-Identifier: Apache-2.0
"""A front's HTTP beside the models that it hands on: the owner answers, over a Unix socket, as if it had been asked.

Theory of operation. What a model is asked by POST goes to its queue by the front's own routes. All else, from the pages
to requests for models that the front does not know, is forwarded as it came: head, body and answer, a piece at a time.
So API keys, hosts and origins are checked by the owner, which has the same settings. While the owner is away, requests
wait for it before their first byte is sent; once it was, a request that is lost has an error for an answer, since it
may have changed something. An owner may take its time to answer; one that says nothing for `grace_s` is asked whether
it is alive; if it is not, the request is lost. Each request has a connection of its own: these are pages and probes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import httptools

from forebay.errors import Unavailable
from forebay.observe.logs.noted_refusals import LastRefusals
from forebay.transports.http.asgi_calls import failed, id_of, path_of
from forebay.transports.http.asgi_inference import send_answer
from forebay.transports.http.error_answers import error_answer
from forebay.types.server_state import here

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

FIRST_PAUSE_S: Final = 0.02
MAX_PAUSE_S: Final = 0.5
"""Longest pause between two attempts to reach the owner."""
READ_BYTES: Final = 1 << 16
REFUSALS: Final = "/refusals/"
AWAY: Final = "the process that has the server's models is being started, or does not answer; try again later"
READY_S: Final = 3.0
"""How long an owner may take to say whether it is ready, or alive; one that hangs is neither."""
_PROBE: Final = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"

_ALIVE: Final = frozenset({"/healthz", "/v2/health/live"})
"""What a front answers itself: nobody is asked for it."""
_READY: Final = frozenset({"/readyz", "/v2/health/ready"})
"""What it answers itself while the owner is away: that the server is not ready, and why."""
_OF_CONNECTIONS: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
"""Headers that are about one connection only."""


_CHUNKED: Final = _OF_CONNECTIONS | {b"content-length"}
"""The same where the body comes in chunks, which say how long it is."""


class HttpForwarding:
    """An ASGI application that has the owner answer what the models of a front do not."""

    def __init__(self, own: ASGIApp, targets: Collection[bytes], path: str, grace_s: float) -> None:
        """Describe it.

        Args:
            own: Answers for the models.
            targets: Where they are asked.
            grace_s: How long requests wait for an owner that is away.
        """
        self._own = own
        self._targets = targets
        self._path = path
        self._grace_s = grace_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = path_of(scope) if scope["type"] == "http" else ""
        if not path or path in _ALIVE or self._is_own(scope, path):
            await self._own(scope, receive, send)
            return
        try:
            reader, writer = await self._connected(0.0 if path in _READY else self._grace_s)
        except OSError:
            if path in _READY:
                await self._own(scope, receive, send)
            else:
                await _refuse(scope, send)
            return
        exchange = _Exchange(scope, receive, send, reader, writer, self._wait)
        try:
            async with asyncio.timeout(READY_S if path in _READY else None):  # what it raises is an OSError
                await exchange.run()
        except (OSError, httptools.HttpParserError):
            if not exchange.has_begun:
                await _refuse(scope, send)
        finally:
            writer.transport.abort()

    async def _wait(self, *events: asyncio.Future[Any]) -> None:
        """Wait for one of these as long as the owner is alive; raises OSError if it is not."""
        while not any(one.done() for one in events):
            await asyncio.wait(events, timeout=max(self._grace_s, READY_S), return_when=asyncio.FIRST_COMPLETED)
            if not any(one.done() for one in events):
                await self._probe()

    async def _probe(self) -> None:
        """Have the owner say that it is alive; raises OSError if it does not."""
        async with asyncio.timeout(READY_S):
            reader, writer = await self._connected(0.0)
            try:
                writer.write(_PROBE)
                await reader.read(1)
            finally:
                writer.transport.abort()

    def _is_own(self, scope: Scope, path: str) -> bool:
        if path.startswith(REFUSALS):  # of requests that came here
            return here(LastRefusals).find(path.removeprefix(REFUSALS)) is not None
        return scope["method"] == "POST" and quote(path, safe="/:").encode() in self._targets

    async def _connected(self, patience_s: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the owner as soon as it is there; raises OSError if it is not, for all this time."""
        until, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while True:
            try:
                return await asyncio.open_unix_connection(self._path)
            except OSError:
                if time.monotonic() + pause_s > until:
                    raise
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


async def _refuse(scope: Scope, send: Send) -> None:
    error, request_id = Unavailable(AWAY), id_of(scope)
    failed(scope, error, request_id)
    await send_answer(send, *error_answer(error, request_id))


class _Exchange:
    """One request that is forwarded, and its answer; the parser calls it.

    Attributes:
        has_begun: Whether some of the answer was handed to the client.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        wait: Callable[..., Awaitable[None]],
    ) -> None:
        self.has_begun = False
        self._wait = wait
        self._scope = scope
        self._receive = receive
        self._send = send
        self._reader = reader
        self._writer = writer
        self._parser = httptools.HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._told: list[dict[str, Any]] = []
        self._is_final = self._is_over = False

    async def run(self) -> None:
        """Forward the request and hand back the answer, until either side is gone.

        Raises:
            OSError: The owner is gone before its answer was whole.
            HttpParserError: What came is not an answer.
        """
        asking = asyncio.ensure_future(self._ask())
        try:
            await self._answer(asking)
        finally:
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await asking

    async def _ask(self) -> None:
        """Forward the request, and return once the client has left."""
        scope, writer = self._scope, self._writer
        query = scope["query_string"]
        target = scope.get("raw_path") or quote(scope["path"]).encode()
        target = target.partition(b"?")[0] + (b"?" + query if query else b"")
        names = {name for name, _ in scope["headers"]}
        is_chunked = b"transfer-encoding" in names
        left_out = _CHUNKED if is_chunked else _OF_CONNECTIONS
        headers = [(name, value) for name, value in scope["headers"] if name not in left_out]
        if b"x-request-id" not in names:
            headers.append((b"x-request-id", id_of(scope).encode()))
        if b"host" not in names:  # HTTP/1.0 needs none
            headers.append((b"host", b"localhost"))
        headers += [(b"connection", b"close"), *([(b"transfer-encoding", b"chunked")] if is_chunked else [])]
        lines = [scope["method"].encode() + b" " + target + b" HTTP/1.1"]
        lines += [name + b": " + value for name, value in headers]
        writer.write(b"\r\n".join([*lines, b"", b""]))
        with contextlib.suppress(ConnectionError):  # it may have answered and closed before it read all
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    return
                body, is_last = message.get("body", b""), not message.get("more_body", False)
                if is_chunked:
                    body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
                writer.write(body)
                await writer.drain()
                if is_last:
                    break
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, asking: asyncio.Future[None]) -> None:
        while not self._is_over:
            reading = asyncio.ensure_future(self._reader.read(READ_BYTES))
            try:
                await self._wait(reading, asking)
            finally:
                reading.cancel()  # nothing if it is done
            if not reading.done():  # the client has left
                return
            data = reading.result()
            if not data:
                raise ConnectionResetError
            self._parser.feed_data(data)
            told, self._told = self._told, []
            for message in told:
                self.has_begun = True
                await self._send(message)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        left_out = _OF_CONNECTIONS | {b"date"}
        headers = [(name, value) for name, value in self._headers if name.lower() not in left_out]
        self._headers = []
        self._is_final = status >= 200
        if not self._is_final:
            return
        self._told.append({"type": "http.response.start", "status": status, "headers": headers})
        if self._scope["method"] == "HEAD":
            self._end()

    def on_body(self, body: bytes) -> None:
        self._told.append({"type": "http.response.body", "body": body, "more_body": True})

    def on_message_complete(self) -> None:
        if self._is_final and not self._is_over:
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._told.append({"type": "http.response.body", "body": b""})
