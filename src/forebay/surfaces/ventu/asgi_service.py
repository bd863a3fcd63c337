# SPDX-License-Identifier: Apache-2.0
"""The HTTP service in front of an endpoint: for `run_http`, and for `forebay serve` with batches in worker processes.

A worker answers an inference with `[status, media type, body]`, so nothing of pydantic is needed here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import DeadlineExceeded, ForebayError, InvalidRequest, LimitReached, QueueFull, Unavailable
from forebay.surfaces.ventu.service_pages import Action, Reply, ServicePages, broken, problem, too_large
from forebay.transports.api_keys import KeyHolders, lets_in, no_key
from forebay.transports.http.asgi_calls import answered_by, failed
from forebay.transports.http.bodies import left, read_body
from forebay.transports.http.error_answers import error_headers
from forebay.types.call import ALONE, EMPTY

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.serving.endpoint import Endpoint

log = logging.getLogger("forebay.requests")

HEALTH: Final[Mapping[str, Any]] = {"verb": "health"}
"""Params of the request that has the worker check its example."""

_TEXT: Final = "text/plain; charset=utf-8"
_CAPACITY: Final[dict[type[ForebayError], tuple[int, str, bytes]]] = {
    DeadlineExceeded: (408, _TEXT, b"Timeout!"),
    QueueFull: (429, _TEXT, b"Too many requests are waiting; try again later."),
    Unavailable: (503, _TEXT, b"The model cannot answer now; try again later."),
}


class VentuHttp:
    """The ASGI application."""

    def __init__(
        self,
        endpoint: Endpoint,
        metrics: Callable[[], Awaitable[tuple[bytes, str]]],
        *,
        max_body_bytes: int,
        api_keys: Sequence[str] = (),
        public: Collection[str] = (),
        more: Mapping[str, Callable[[], Awaitable[Reply]]] | None = None,
    ) -> None:
        """Describe the face; it answers 503 until it is given the service's pages.

        Args:
            metrics: Makes the page for Prometheus, and tells its media type.
            max_body_bytes: Longest body.
            api_keys: If any, a request needs one of them.
            public: Paths that need none all the same.
            more: Further pages, which need no key.
        """
        self.pages: ServicePages | None = None
        self._endpoint = endpoint
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._api_keys = [key.encode() for key in api_keys]
        self._holders = KeyHolders(api_keys)
        self._public = public
        self._more = more or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        reply = await self._reply(scope, receive)
        if reply is None:
            return
        headers = [(name.encode(), value.encode()) for name, value in reply.headers]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, scope: Scope, receive: Receive) -> Reply | None:
        """Return the answer, None if the client went away before there was one."""
        method, path = scope["method"], scope["path"]
        if path in self._more and method in {"GET", "HEAD"}:
            return await self._more[path]()
        if path not in self._public and not lets_in(self._api_keys, scope["headers"]):
            return problem(401, "Unauthorized", f"{no_key(scope['headers'])}.")
        if self.pages is None:
            return problem(503, "Service Unavailable", "The model is loading; try again later.")
        wanted = self.pages.find(method, path)
        if isinstance(wanted, Reply):
            return wanted
        if wanted is Action.METRICS:
            body, media = await self._metrics()
            return Reply(200, media, body)
        if wanted is Action.HEALTH:
            return self.pages.health(await self._is_well())
        return await self._infer(scope, receive, self.pages)

    async def _infer(self, scope: Scope, receive: Receive, pages: ServicePages) -> Reply | None:
        given = dict(scope["headers"])
        length: bytes = given.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        try:
            body = await read_body(receive, self._max_body_bytes)
        except ForebayError:  # it is too long
            return too_large(self._max_body_bytes)
        if body is None:
            return None
        if body:
            refused = pages.unsupported(given.get(b"content-type", b"").decode("latin-1"))
            if refused is not None:
                return refused
        answered = partial(answered_by, scope)
        try:
            tenant = self._holders.in_headers(scope["headers"])
        except InvalidRequest as error:
            failed(scope, error)
            return _failure(error)
        asked = asyncio.ensure_future(self._endpoint.call(body, params=EMPTY, answered=answered, tenant=tenant))
        gone = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
            return Reply(*asked.result()) if asked.done() else None
        except ForebayError as error:
            failed(scope, error)
            return _failure(error)
        finally:
            asked.cancel()
            gone.cancel()

    async def _is_well(self) -> bool:
        try:
            return await self._endpoint.call(b"", params=HEALTH, key=ALONE)
        except ForebayError as error:
            log.warning("the health check failed: %s", error.message)
            return False


def _failure(error: ForebayError) -> Reply:
    known = next((reply for kind, reply in _CAPACITY.items() if isinstance(error, kind)), None)
    if known is None:
        return broken()
    status, media, text = known
    if isinstance(error, LimitReached):
        text = error.message.encode()
    return Reply(status, media, text, more={name.decode(): value.decode() for name, value in error_headers(error)})
