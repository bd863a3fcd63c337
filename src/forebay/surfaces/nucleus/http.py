# SPDX-License-Identifier: Apache-2.0
"""The HTTP face of a Nucleus project: `/`, `/info`, and forebay's own pages beside them.

Bodies go to the worker as the bytes they came in. The one exception are posts that are to be batched: a body that
cannot be decoded is refused here, for in a batch it would wait for the batch's moment and take somebody's place.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from starlette.requests import Request as HttpRequest

from forebay.errors import (
    DeadlineExceeded,
    ForebayError,
    InvalidRequest,
    QueueFull,
    ShareUsed,
    TooLarge,
    Unavailable,
    WorkerLost,
)
from forebay.surfaces.nucleus import handler_answers
from forebay.surfaces.nucleus.handler_payload import BadPayload, check, counting
from forebay.surfaces.nucleus.in_flight import TOO_MANY, InFlight
from forebay.surfaces.nucleus.logs import log_access
from forebay.surfaces.nucleus.runner import INTERNAL_ERROR
from forebay.transports.api_keys import KeyHolders, lets_in, no_key
from forebay.transports.http.asgi_calls import answered_by, failed
from forebay.transports.http.bodies import left, read_body
from forebay.transports.http.error_answers import error_headers
from forebay.transports.http.kserve_calls import PUBLIC_PATHS, is_inference_path
from forebay.transports.reading_turns import in_turns
from forebay.types.call import ALONE, Failure, Outcome, Request, nothing

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.server.config import HttpConfig
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.nucleus.handler_answers import Answer
    from forebay.transports.http.kserve_pages import InferencePages
    from forebay.transports.http.pages import ServerPages

POST_KEY: Final = "post"
"""Batch key of posts that are batched; whatever else is asked goes alone."""

CLIENT_GONE: Final = 499

_PREFLIGHT: Final = [
    (b"access-control-allow-origin", b"*"),
    (b"access-control-allow-methods", b"POST, GET, PUT, PATCH, DELETE, OPTIONS"),
    (b"access-control-allow-headers", b"*"),
    (b"access-control-allow-credentials", b"true"),
]
CORS: Final = [*_PREFLIGHT, (b"access-control-expose-headers", b"Content-Length,Content-Range")]
PREFLIGHT: Final = [*_PREFLIGHT, (b"access-control-max-age", b"1728000")]

_STATUS: Final[Sequence[tuple[type[ForebayError], int]]] = (
    (ShareUsed, 429),
    (QueueFull, 503),
    (WorkerLost, 502),  # as the original's proxy says it: what was asked for may have begun
    (Unavailable, 503),
    (DeadlineExceeded, 504),
)
_FRAMING: Final = frozenset({b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"})
_OPEN_PAGES: Final = frozenset({"/healthz", "/readyz"})

_PART, _OUTCOME, _GONE = range(3)
_Event = tuple[int, Any, "Callable[[], object]"]


class NucleusHttp:
    """The ASGI application."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        batched: bool,
        in_flight: InFlight,
        max_body_bytes: int | None,
        http: HttpConfig,
        pages: ServerPages | None,
        protocol: InferencePages | None = None,
    ) -> None:
        """Describe the face.

        Args:
            max_body_bytes: Longest body, if the person asked for a limit.
            pages: Forebay's own pages; None leaves them out.
        """
        self._protocol = protocol
        self._endpoint = endpoint
        self._batched = batched
        self._in_flight = in_flight
        self._max_body_bytes = max_body_bytes
        self._elements = http.elements
        self._api_keys = [key.encode() for key in http.api_keys]
        self._holders = KeyHolders(http.api_keys)
        self._pages: dict[str, Any] = {}
        if pages is not None:
            self._pages = {"/healthz": pages.healthz, "/readyz": pages.readyz, "/metrics": pages.metrics}
        self._verbs: tuple[str, ...] = ()
        self._reads_posts = False
        self.info: Callable[[], Mapping[str, Any]] = dict
        """What `/info` tells; called on the loop."""

    def learn(self, about: Mapping[str, Any]) -> None:
        """Note what the handler can do; before that every request is told to come back later."""
        self._verbs = tuple(about["verbs"])
        self._reads_posts = about["reads_posts"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request and log it."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if path in self._pages:
            await self._page(path, scope, receive, send)
            return
        if self._protocol is not None and is_inference_path(path) and (path in PUBLIC_PATHS or self._is_allowed(scope)):
            await self._protocol(scope, receive, send)
            return
        if path == "/":
            status = await self._root(scope, receive, send)
        elif not self._is_allowed(scope):
            status = await _write(send, _unauthorized(scope))
        elif path == "/info":
            status = await self._info(scope, send)
        elif path == "/info/":
            status = await _write(send, [307, [[b"location", b"/info"]], b""])
        else:
            status = await _write(
                send, handler_answers.text(404, f"nothing is served at {path[:100]}; there is / and /info")
            )
        host, port = scope.get("client") or ("-", 0)
        log_access(f"{host}:{port}", scope["method"], path, status)

    async def _page(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path not in _OPEN_PAGES and not self._is_allowed(scope):
            await _write(send, _unauthorized(scope))
        elif scope["method"] not in {"GET", "HEAD"}:
            await _write(send, _not_allowed(["GET", "HEAD"]))
        else:
            response = await self._pages[path](HttpRequest(scope))
            await response(scope, receive, send)

    async def _info(self, scope: Scope, send: Send) -> int:
        if self._in_flight.is_full:
            return await _write(send, _too_many())
        if scope["method"] != "GET":
            return await _write(send, _not_allowed(["GET"]))
        return await _write(send, handler_answers.whole(200, handler_answers.JSON, json.dumps(self.info()).encode()))

    async def _root(self, scope: Scope, receive: Receive, send: Send) -> int:
        if scope["method"] == "OPTIONS":
            return await _write(send, [204, PREFLIGHT, b""])
        if not self._is_allowed(scope):
            return await _write(send, _unauthorized(scope), CORS)
        if self._in_flight.is_full:
            return await _write(send, _too_many(), CORS)
        self._in_flight.begin()
        try:
            return await self._verb(scope, receive, send)
        finally:
            self._in_flight.end()

    async def _verb(self, scope: Scope, receive: Receive, send: Send) -> int:
        verb = scope["method"].lower()
        if not self._verbs:
            return await _write(send, _error(Unavailable("the handler is loading; try again later")), CORS)
        if verb not in self._verbs:
            return await _write(send, _not_allowed([*(name.upper() for name in self._verbs), "OPTIONS"]), CORS)
        try:
            body = await read_body(receive, self._max_body_bytes)
        except TooLarge as error:
            return await _write(send, handler_answers.text(413, error.message), CORS)
        if body is None:
            return CLIENT_GONE
        headers = forwarded(scope)
        try:
            tenant = self._holders.in_headers(scope["headers"])
        except InvalidRequest as error:
            return await _write(send, _error(error), CORS)
        content_type = next((value for name, value in headers if name == b"content-type"), b"").decode("latin-1")
        try:
            await in_turns(counting(content_type, body, self._elements))
        except TooLarge as error:
            return await _write(send, handler_answers.text(413, error.message), CORS)
        batched = self._batched and verb == "post"
        if batched and self._reads_posts:
            try:
                check(content_type, body)
            except BadPayload as error:
                return await _write(send, handler_answers.refusal(error), CORS)
        params = {"verb": verb, "query": scope["query_string"], "headers": headers}
        events: asyncio.Queue[_Event] = asyncio.Queue()

        def reply(request: Request, outcome: Outcome) -> None:
            answered_by(scope, self._endpoint, request)
            if type(outcome) is Failure:
                failed(scope, outcome.error)
            events.put_nowait((_OUTCOME, outcome, nothing))

        request = Request(
            body=body,
            reply=reply,
            params=params,
            key=POST_KEY if batched else ALONE,
            tenant=tenant,
            on_part=lambda part, release: events.put_nowait((_PART, part, release)),
        )
        return await self._submit(request, events, receive, send)

    async def _submit(self, request: Request, events: asyncio.Queue[_Event], receive: Receive, send: Send) -> int:
        """Have a worker answer; returns the status that was sent, or 499 if there was nobody left to send it to."""
        self._endpoint.submit(request)
        watching = asyncio.ensure_future(_watch(receive, events))
        writer = _Writer(send)
        try:
            while not writer.ended:
                kind, value, release = await events.get()
                if kind == _GONE:
                    return CLIENT_GONE
                if kind == _OUTCOME:
                    await writer.outcome(value)
                    break
                try:
                    await writer.part(value)
                finally:
                    release()
            return writer.status
        finally:
            watching.cancel()
            if not writer.ended:  # a stream that has ended may still have a callback to run, which goes on
                self._endpoint.cancel(request)

    def _is_allowed(self, scope: Scope) -> bool:
        return lets_in(self._api_keys, scope["headers"])


class _Writer:
    """Writes one answer, whole or in parts."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.ended = False

    async def outcome(self, outcome: Any) -> None:
        """Write a whole answer, or what an error says; a stream that breaks off is cut, which the client notices."""
        if type(outcome) is Failure:
            if self.status == 0:
                await self._whole(_error(outcome.error))
        elif outcome is not None:
            await self._whole(outcome)

    async def part(self, part: list[Any]) -> None:
        """Write a part; see `answers` for their kinds."""
        kind = part[0]
        if kind == "whole":
            await self._whole(part[1:])
        elif kind == "head":
            self.status = part[1]
            headers = _joined(part[2], CORS)
            await self._send({"type": "http.response.start", "status": self.status, "headers": headers})
        elif kind == "body":
            await self._send({"type": "http.response.body", "body": part[1], "more_body": True})
        else:
            self.ended = True
            await self._send({"type": "http.response.body", "body": b""})

    async def _whole(self, answer: Answer) -> None:
        self.ended = True
        self.status = await _write(self._send, answer, CORS)


async def _watch(receive: Receive, events: asyncio.Queue[_Event]) -> None:
    await left(receive)
    events.put_nowait((_GONE, None, nothing))


async def _write(send: Send, answer: Answer, more: Sequence[tuple[bytes, bytes]] = ()) -> int:
    status, headers, body = answer
    headers = [(name, value) for name, value in _joined(headers, more) if name != b"content-length"]
    if status in {204, 304}:
        body = b""
    else:
        headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return status


def _joined(headers: Sequence[Sequence[bytes]], more: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Add headers, except those the handler has set itself; how the answer is framed is not for the handler to say."""
    own = [(name.lower(), value) for name, value in headers]
    given = {name for name, _ in own}
    return [pair for pair in own if pair[0] not in _FRAMING] + [pair for pair in more if pair[0] not in given]


def forwarded(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return the headers a handler sees: the client's, with what the proxy in front of the original adds."""
    client = scope.get("client")
    address = str(client[0]).encode() if client else b""
    chain = b", ".join([*(value for name, value in scope["headers"] if name == b"x-forwarded-for"), address])
    headers: list[tuple[bytes, bytes]] = []
    for name, value in scope["headers"]:
        if name == b"host":
            headers.append((name, _without_port(value)))
        elif name not in _REPLACED:
            headers.append((name, value))
    headers += [
        (b"x-forwarded-for", chain),
        (b"x-real-ip", address),
        (b"x-forwarded-proto", scope["scheme"].encode()),
    ]
    return headers


_REPLACED: Final = frozenset({b"x-forwarded-for", b"x-real-ip", b"x-forwarded-proto"})


def _without_port(host: bytes) -> bytes:
    name, colon, port = host.rpartition(b":")
    return name if colon and port.isdigit() and (b":" not in name or name.endswith(b"]")) else host


def _error(error: ForebayError) -> Answer:
    status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
    status, headers, body = handler_answers.text(status, INTERNAL_ERROR if status == 500 else error.message)
    return [status, [*headers, *error_headers(error)], body]


def _not_allowed(allowed: Sequence[str]) -> Answer:
    status, headers, body = handler_answers.text(405, "Method Not Allowed")
    return [status, [*headers, [b"allow", ", ".join(allowed).encode()]], body]


def _too_many() -> Answer:
    return _error(Unavailable(TOO_MANY))


def _unauthorized(scope: Scope) -> Answer:
    status, headers, body = handler_answers.text(401, no_key(scope["headers"]))
    return [status, [*headers, [b"www-authenticate", b"Bearer"]], body]
