# SPDX-License-Identifier: Apache-2.0
"""The REST gateway of a pipeline, in the same process: `POST /{name}/{method}` with a request in JSON.

Every path of two segments is a service's. Forebay's own pages have one segment, so that a service may have any name.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, InvalidRequest
from forebay.protocols.pipeline import rest
from forebay.surfaces.pipeline.fronts.inference import answer, read, told
from forebay.transports.http.exchange import key_is_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from forebay.server.config import HttpConfig
    from forebay.surfaces.pipeline.fronts.inference import Inference
    from forebay.transports.http.asgi import Pages

log = logging.getLogger("forebay.requests")

MAX_BODY_BYTES: Final = 256 * 1024 * 1024
"""Longest body unless the person says otherwise, as on the gRPC port."""

_OPEN_PAGES: Final = frozenset({"/healthz", "/readyz"})
_JSON: Final = (b"content-type", b"application/json")
_MAX_DIGITS: Final = 12

_Reply = tuple[int, bytes]


class PipelineHttp:
    """The ASGI application."""

    def __init__(
        self,
        inference: Inference,
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        api_keys: Sequence[str] = (),
        pages: Pages | None = None,
    ) -> None:
        """Describe the face.

        Args:
            inference: What answers.
            max_body_bytes: Longest body.
            api_keys: If any, a request needs one of them.
            pages: Forebay's own pages; None leaves them out.
        """
        self._inference = inference
        self._max_body_bytes = max_body_bytes
        self._api_keys = [key.encode() for key in api_keys]
        self._pages: dict[str, Any] = {}
        if pages is not None:
            self._pages = {
                "/healthz": pages.healthz,
                "/readyz": pages.readyz,
                "/metrics": pages.metrics,
                "/models": pages.models,
                "/trace": pages.trace,
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        path: str = scope["path"]
        if not self._is_allowed(scope, path):
            message = "an API key is needed, as X-API-Key or as Authorization: Bearer"
            await _write(send, (401, rest.fault_json(16, message)), (b"www-authenticate", b"Bearer"))
            return
        segments = path.split("/")
        if len(segments) == 3 and segments[1] and segments[2]:
            if scope["method"] != "POST":
                await _write(send, (405, rest.fault_json(12, "Method Not Allowed")), (b"allow", b"POST"))
                return
            reply = await self._infer(segments[1], segments[2], scope, receive)
            if reply is not None:
                await _write(send, reply)
        elif path not in self._pages:
            await _write(send, (404, rest.fault_json(5, "Not Found")))
        elif scope["method"] not in {"GET", "HEAD"}:
            await _write(send, (405, rest.fault_json(12, "Method Not Allowed")), (b"allow", b"GET, HEAD"))
        else:
            await self._page(path, scope, receive, send)

    async def _page(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import Request

        try:
            response = await self._pages[path](Request(scope, receive))
        except ForebayError as error:
            await _write(send, rest.fault_of(error))
        else:
            await response(scope, receive, send)

    async def _infer(self, name: str, method: str, scope: Scope, receive: Receive) -> _Reply | None:
        """Return the answer, None if the client went away before there was one."""
        try:
            length, timeout_s = _head(scope)
            if length > self._max_body_bytes:
                return self._too_large()
            body = await _read(receive, self._max_body_bytes)
            if body is None:
                return None
            if len(body) > self._max_body_bytes:
                return self._too_large()
            kind = self._inference.request_class
            if rest.is_quick(body, kind):
                request = rest.request_of(body, kind)
            else:
                request = await read(lambda: rest.request_of(body, kind))
            name_request(request, name, method)
            client = scope.get("client")
            peer = f"{client[0]}:{client[1]}" if client else ""
            asked = asyncio.ensure_future(answer(self._inference, request, timeout_s=timeout_s, peer=peer))
            if not await _outlives(asked, receive):
                return None
            return 200, rest.response_json(asked.result())
        except Exception as error:  # noqa: BLE001 - this client is told, and no other hears of it
            return rest.fault_of(told(error))

    def _too_large(self) -> _Reply:
        return 413, rest.fault_json(8, f"the body is too long; at most {self._max_body_bytes} bytes are taken")

    def _is_allowed(self, scope: Scope, path: str) -> bool:
        if not self._api_keys or path in _OPEN_PAGES:
            return True
        given = [value for name, value in scope["headers"] if name in {b"x-api-key", b"authorization"}]
        return any(key_is_known(self._api_keys, value) for value in given)


def with_cors(face: PipelineHttp, http: HttpConfig) -> ASGIApp:
    """Let pages of other origins call, if the person named some."""
    if not http.cors_origins:
        return face
    from starlette.middleware.cors import CORSMiddleware

    return CORSMiddleware(face, allow_origins=http.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])


def _head(scope: Scope) -> tuple[int, float | None]:
    """Return the length of the body as far as it is known, and the time the client gives.

    Raises:
        InvalidRequest: If that is no time.
    """
    length = 0
    timeout_s = None
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value) if value.isdigit() else 0
        elif name == b"x-request-timeout-ms":
            milliseconds = int(value) if value.isdigit() and len(value) <= _MAX_DIGITS else 0
            if milliseconds < 1:
                found = value[:40].decode("latin-1")
                msg = f"X-Request-Timeout-Ms is {found!r}, a whole number of at least 1 is needed"
                raise InvalidRequest(msg)
            timeout_s = milliseconds / 1000
    return length, timeout_s


def name_request(request: Any, name: str, method: str) -> None:
    """Write the service and method of the path into the request; those in its body do not count."""
    fields = request.DESCRIPTOR.fields_by_name
    if "name" in fields:
        request.name = name
    if "method" in fields:
        request.method = method


async def _read(receive: Receive, limit: int) -> bytes | None:
    """Read the body, or a little more than the limit if it is longer; None if the client went away."""
    pieces: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        length += len(pieces[-1])
        if length > limit or not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def _outlives(asked: asyncio.Future[Any], receive: Receive) -> bool:
    """Wait for an answer; False if the client went away before, in which case nobody works on it any more."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([asked, gone], return_when=asyncio.FIRST_COMPLETED)
        return asked.done()
    finally:
        gone.cancel()
        asked.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _write(send: Send, reply: _Reply, *more: tuple[bytes, bytes]) -> None:
    status, body = reply
    headers = [_JSON, (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
