# SPDX-License-Identifier: Apache-2.0
"""The answer to an error over HTTP."""

from __future__ import annotations

import time

from forebay.errors import ForebayError, QueueFull, Unavailable
from forebay.observe.logs.request_ids import next_id
from forebay.protocols import native
from forebay.transports.http.http_errors import MethodNotAllowed, Unauthorized, UnsupportedEncoding


def error_headers(error: ForebayError) -> list[tuple[bytes, bytes]]:
    """Return the headers that belong to an error."""
    if isinstance(error, Unavailable | QueueFull):
        milliseconds = error.retry_ms(time.monotonic())
        return [(b"retry-after", b"%d" % -(-milliseconds // 1000)), (b"retry-after-ms", b"%d" % milliseconds)]
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if isinstance(error, MethodNotAllowed):
        return [(b"allow", error.allow)]
    if isinstance(error, UnsupportedEncoding):
        return [(b"accept-encoding", error.takes)]
    return []


def error_answer(error: ForebayError, request_id: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Return status, headers and body of an error answer."""
    request_id = request_id or next_id()
    headers = [
        (b"content-type", b"application/json"),
        (b"x-request-id", request_id.encode()),
        *error_headers(error),
    ]
    return native.status_of(error), headers, native.error_body(error, request_id)
