# SPDX-License-Identifier: Apache-2.0
"""What calls are told that came to a full queue: the same for many of them, so it is written once for all.

When they are told is up to `refusal_pacing.py`.

Clients that speak something else than the port does are sent an answer of HTTP/1, which most can read. A client of gRPC
that gets it gives up at once and says so. A GOAWAY would tell it that the port speaks HTTP/2, and it would connect
again without a pause.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from forebay.errors import milliseconds_until
from forebay.transports.grpc import statuses
from forebay.transports.grpc.hpack import literal

if TYPE_CHECKING:
    from forebay.transports.grpc.statuses import Status


PUSHBACK: Final = "grpc-retry-pushback-ms"
"""The field of trailers that says when to try again."""


class CallRefusal:
    """Why calls are refused.

    Attributes:
        trailers: The header block that says so.
    """

    __slots__ = ("status", "text", "trailers")

    def __init__(self, status: Status, text: str) -> None:
        self.status, self.text = status, text
        self.trailers = statuses.trailers(status, text)


same: Callable[[Status, str], CallRefusal] = functools.lru_cache(16)(CallRefusal)
"""Return one refusal for all calls that are told the same."""


def pushback(retry_at: float, deadline: float, now: float) -> bytes:
    """Return the field of trailers that says in how many milliseconds to try again; -1 if the call were over then."""
    milliseconds = milliseconds_until(retry_at, now) if retry_at < deadline else -1
    return literal(b"grpc-retry-pushback-ms", b"%d" % milliseconds)


def _refusal(sentence: str) -> bytes:
    body = sentence.encode() + b"\n"
    head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    return head % len(body) + body


NEEDS_HTTP_2: Final = _refusal("this port speaks gRPC, which needs HTTP/2")
NEEDS_TLS: Final = _refusal("this port speaks gRPC over TLS, and a client came without TLS")
