# SPDX-License-Identifier: Apache-2.0
"""The trace that a request belongs to, for servers and workers elsewhere that work on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forebay.types.call import Request

MAX_CHARACTERS: Final = 128
"""Longest `traceparent` that is handed on; those of today have 55."""


class TraceContexts:
    """What others are told of the traces of requests; a server has one of them.

    Attributes:
        begin: Given the id by which the timeline knows a request and the `traceparent` that it came with, returns that
            of its span, which is made when it has ended; None while nobody makes spans.
    """

    def __init__(self) -> None:
        """Begin with nobody who makes spans: what a client has said is handed on as it is."""
        self.begin: Callable[[str, str], str] | None = None

    def outgoing(self, request: Request) -> str:
        """Return the `traceparent` to send along when a request is worked on elsewhere; empty if it has none."""
        if self.begin is not None and request.run_id:
            return self.begin(request.run_id, request.trace)
        return request.trace if len(request.trace) <= MAX_CHARACTERS else ""
