# SPDX-License-Identifier: Apache-2.0
"""What the fast lane and Starlette share: from headers to a request, and from an outcome to an answer.

No bytes are moved here; `connection.py` and `asgi.py` do that, each in its own way, and one contract suite holds
both to the same answers.
"""

from __future__ import annotations

import hmac
import re
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ForebayError, InvalidRequest, QueueFull, TooLarge, Unavailable
from forebay.protocols import native
from forebay.serving.endpoint import next_id
from forebay.types.call import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from forebay.server.app import Served
    from forebay.types.call import Origin, Reply

_REQUEST_ID: Final = re.compile(rb"[!-~]{1,128}")
_MAX_CACHED: Final = 64

NEVER: Final = float("inf")


class Unauthorized(InvalidRequest):
    """No API key, or one that is not known (401)."""


class MethodNotAllowed(InvalidRequest):
    """The path is known, the method is not possible there (405)."""


class HeadTooLarge(InvalidRequest):
    """Request line and headers are too long (431)."""


class TooSlow(InvalidRequest):
    """The rest of the request did not come in time (408)."""


class NotHttp(InvalidRequest):
    """The bytes are not a request (400)."""


_STATUS: Final[dict[type[ForebayError], int]] = {
    Unauthorized: 401,
    MethodNotAllowed: 405,
    TooSlow: 408,
    HeadTooLarge: 431,
}


def status_of(error: ForebayError) -> int:
    """Return the status of an error, HTTP's own included."""
    return _STATUS.get(type(error)) or native.status_of(error)


def error_headers(error: ForebayError) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to an error."""
    if isinstance(error, QueueFull | Unavailable):
        return [(b"retry-after", b"1")]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    return []


class Exchange(msgspec.Struct, eq=False):
    """One request and its answer on a connection.

    Attributes:
        route: Whom it is for; None for a request that could not be read that far.
        params: Formats of body and answer.
        id: The request's id.
        timeout_s: Time the client gives it; infinity leaves it to the endpoint.
        keep_alive: Whether the connection stays open afterwards.
        problem: Why it is refused, if that is known before its body was read.
        declared_bytes: Content-Length, -1 if not given.
        body: The body's bytes, in the pieces they came in.
        received_bytes: How many bytes of it came.
        request: What was submitted.
        started: Whether the head of a streamed answer was sent.
        chunked: Whether a streamed answer may be sent in chunks (HTTP/1.1).
        expects_continue: Whether the client waits for "100 Continue" before it sends the body.
    """

    route: Route | None
    params: Mapping[str, str] = msgspec.field(default_factory=lambda: native.PARAMS["json", "json"])
    id: str = ""
    timeout_s: float = NEVER
    keep_alive: bool = True
    problem: ForebayError | None = None
    declared_bytes: int = -1
    body: list[bytes] = msgspec.field(default_factory=list[bytes])
    received_bytes: int = 0
    request: Request | None = None
    started: bool = False
    chunked: bool = True
    expects_continue: bool = False


class Route:
    """An endpoint as HTTP sees it."""

    def __init__(self, served: Served, max_body_bytes: int, api_keys: Iterable[str]) -> None:
        self.endpoint = served.endpoint
        self.contract = served.contract
        self.max_body_bytes = max_body_bytes
        self._api_keys = [key.encode() for key in api_keys]
        self._formats: dict[tuple[bytes, bytes], Mapping[str, str]] = {}

    def read_head(self, headers: Iterable[tuple[bytes, bytes]]) -> Exchange:
        """Read the headers of a request; names are in lower case. What is wrong with them becomes its `problem`."""
        exchange = Exchange(self)
        content_type = accept = key = b""
        for name, value in headers:
            wanted = _HEADERS.get(name)
            if wanted is None:
                continue
            if wanted == _CONTENT_TYPE:
                content_type = value
            elif wanted == _CONTENT_LENGTH:
                exchange.declared_bytes = int(value)
            elif wanted == _ACCEPT:
                accept = accept + b"," + value if accept else value
            elif wanted == _REQUEST_ID_HEADER:
                if _REQUEST_ID.fullmatch(value):
                    exchange.id = value.decode("ascii")
            elif wanted == _TIMEOUT:
                self._read_timeout(exchange, value)
            elif wanted == _EXPECT:
                exchange.expects_continue = value.lower() == b"100-continue"
            else:
                key = value
        if self._api_keys and not key_is_known(self._api_keys, key):
            exchange.problem = Unauthorized("an API key is needed, as X-API-Key or as Authorization: Bearer")
        params = self._formats.get((content_type, accept))
        if params is None:
            try:
                params = self._choose_formats(content_type, accept)
            except ForebayError as error:
                exchange.problem = exchange.problem or error
                return exchange
        exchange.params = params
        return exchange

    def too_large(self, size: int | None = None) -> TooLarge:
        """Return the error for a body over the limit."""
        found = f"the body has {size} bytes" if size is not None else "the body is too long"
        return TooLarge(f"{found}, at most {self.max_body_bytes} are taken")

    def submit(self, exchange: Exchange, reply: Reply, origin: Origin | None, on_part: Callable[..., None]) -> None:
        """Make a request of a complete exchange and submit it; `reply` may be called before this returns."""
        pieces = exchange.body
        body: Any = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        exchange.body = []
        size = 1
        if self.contract.batchable:
            body = native.samples_of(body, exchange.params)
            size = len(body)
        request = exchange.request = Request(
            body=body, reply=reply, params=exchange.params, size=size, origin=origin, id=exchange.id
        )
        if exchange.timeout_s != NEVER:
            request.deadline = time.monotonic() + exchange.timeout_s
        if self.contract.streams:
            request.on_part = on_part
        self.endpoint.submit(request)

    def encode(self, exchange: Exchange, outcome: Any) -> bytes:
        """Return the body of a successful answer."""
        return native.joined(outcome, exchange.params) if self.contract.batchable else outcome

    def _choose_formats(self, content_type: bytes, accept: bytes) -> Mapping[str, str]:
        params = native.params_of(self.contract, content_type.decode("latin-1"), accept.decode("latin-1"))
        if len(self._formats) < _MAX_CACHED:
            self._formats[content_type, accept] = params
        return params

    def _read_timeout(self, exchange: Exchange, value: bytes) -> None:
        try:
            milliseconds = int(value) if value.isdigit() else 0
        except ValueError:  # thousands of digits
            milliseconds = 0
        if milliseconds < 1:
            msg = f"X-Request-Timeout-Ms is {value[:40].decode('latin-1')!r}, a whole number of at least 1 is needed"
            exchange.problem = InvalidRequest(msg)
        else:
            exchange.timeout_s = min(milliseconds / 1000, self.endpoint.config.max_timeout_s)


(_CONTENT_TYPE, _CONTENT_LENGTH, _ACCEPT, _REQUEST_ID_HEADER, _TIMEOUT, _EXPECT, _KEY) = range(7)
_HEADERS: Final = {
    b"content-type": _CONTENT_TYPE,
    b"content-length": _CONTENT_LENGTH,
    b"accept": _ACCEPT,
    b"x-request-id": _REQUEST_ID_HEADER,
    b"x-request-timeout-ms": _TIMEOUT,
    b"expect": _EXPECT,
    b"x-api-key": _KEY,
    b"authorization": _KEY,
}


def key_is_known(known: Iterable[bytes], given: bytes) -> bool:
    """Compare an API key with all known ones, in time that tells nothing about them."""
    if given[:7].lower() == b"bearer ":
        given = given[7:]
    matches = [hmac.compare_digest(given.strip(), key) for key in known]
    return any(matches)


def error_answer(error: ForebayError, exchange_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error answer."""
    request_id = exchange_id or next_id()
    headers = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id.encode()),
        *error_headers(error),
    ]
    return status_of(error), headers, native.error_body(error, request_id)
