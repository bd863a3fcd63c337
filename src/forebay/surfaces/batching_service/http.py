# SPDX-License-Identifier: Apache-2.0
"""The HTTP face of the batching service: every path and every method is the same, a body is a job.

Bodies are opaque. A request without one is answered 200 at once, which is the original's health check.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, QueueFull, TooLarge, Unavailable
from forebay.transports.http.asgi_calls import answered_by, failed
from forebay.transports.http.bodies import left, read_body
from forebay.transports.http.error_answers import error_headers
from forebay.transports.http.http_errors import TooSlow
from forebay.types.call import Failure, Request
from forebay.types.element_limits import too_long
from forebay.workers.pools.job_slot import JobRefused

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from forebay.serving.endpoint import Endpoint

log = logging.getLogger("forebay.requests")

TEXT: Final = b"text/plain; charset=utf-8"
_KEPT: Final = {kind: kind for kind in (b"application/json", b"application/msgpack")}

LINGER_S: Final = 1.0
"""How long a refused client may go on sending before it is cut off; without it the refusal could be lost."""


class BatchingHttp:
    """The ASGI application."""

    def __init__(self, endpoint: Endpoint, *, max_body_bytes: int) -> None:
        """Describe the face.

        Args:
            endpoint: What answers; its time limit is also that for sending a body.
        """
        self._endpoint = endpoint
        self._max_body_bytes = max_body_bytes
        self._read_s = endpoint.config.timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        length, media = _read_headers(scope)
        try:
            body = await self._read(length, receive)
        except (TooLarge, TooSlow) as error:
            self._endpoint.reject(error)
            failed(scope, error)
            await self._refuse(error, receive, send)
            return
        if not body:
            if body is not None:
                await self._write(send, 200, [(b"content-type", TEXT)], b"")
            return
        outcome = await self._job(body, scope, receive)
        if type(outcome) is not Failure:
            await self._write(send, 200, [(b"content-type", media)], outcome)
        elif type(outcome.error) is JobRefused:
            await self._write(send, 422, [(b"content-type", media)], outcome.error.body)
        elif type(outcome.error) is not Cancelled:
            await self._write(send, *self._answer_of(outcome.error))

    async def _read(self, length: int, receive: Receive) -> bytes | None:
        """Read the body; None if the client went away before its end.

        Raises:
            TooLarge: If it is over the limit, before it was read if its length was announced.
            TooSlow: If it does not come in time.
        """
        try:
            async with asyncio.timeout(self._read_s):
                if length <= self._max_body_bytes:
                    return await read_body(receive, self._max_body_bytes)
        except TimeoutError:
            raise TooSlow(f"the body did not come within {self._read_s:g} seconds") from None
        raise too_long("body", self._max_body_bytes, length or None)

    async def _job(self, body: bytes, scope: Scope, receive: Receive) -> Any:
        """Have a worker do the job; a client that goes away meanwhile takes it along."""
        endpoint = self._endpoint
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def reply(request: Request, result: Any) -> None:
            answered_by(scope, endpoint, request)
            if type(result) is Failure:
                failed(scope, result.error)
            if not outcome.done():
                outcome.set_result(result)

        request = Request(body, reply)
        endpoint.submit(request)
        log.debug("a job was added", extra={"bytes": len(body), "waiting": endpoint.waiting})
        watching = asyncio.ensure_future(_cancel_when_gone(endpoint, request, receive))
        try:
            return await outcome
        finally:
            watching.cancel()
            endpoint.cancel(request)
            log.debug(
                "a job has ended",
                extra={"bytes": len(body), "ms": round((time.monotonic() - request.arrived) * 1000, 3)},
            )

    async def _refuse(self, error: ForebayError, receive: Receive, send: Send) -> None:
        """Answer before the body was read, and close, but not while the client may still be sending."""
        status, headers, body = self._answer_of(error)
        length = (b"content-length", str(len(body)).encode())
        headers = [*headers, length, (b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        try:
            async with asyncio.timeout(LINGER_S):
                more = True
                while more:
                    more = (await receive()).get("more_body", False)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b""})

    def _answer_of(self, error: ForebayError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Return status, headers and body of an error of ours."""
        status, text = 500, error.message
        if isinstance(error, DeadlineExceeded | TooSlow):
            status, text = 408, "Timeout!"
        elif isinstance(error, QueueFull):
            status = 429
        elif isinstance(error, TooLarge):
            status = 413
        elif isinstance(error, Unavailable) and not self._endpoint.accepting:
            status = 503
        return status, [(b"content-type", TEXT), *error_headers(error)], text.encode()

    async def _write(self, send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers.append((b"content-length", str(len(body)).encode()))
        if not self._endpoint.accepting:
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _read_headers(scope: Scope) -> tuple[int, bytes]:
    """Return the announced length of the body, 0 if there is none, and the media type its answer has."""
    length, media = 0, TEXT
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = int(value)
        elif name == b"content-type":
            media = _KEPT.get(value.partition(b";")[0].strip().lower(), TEXT)
    return length, media


async def _cancel_when_gone(endpoint: Endpoint, request: Request, receive: Receive) -> None:
    await left(receive)
    endpoint.cancel(request)
