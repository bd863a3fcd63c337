# SPDX-License-Identifier: Apache-2.0
"""A small HTTP client for load generators: keep-alive connections with one request in flight each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools

from benchmarks.work import request_body


def post(job: str, path: str, body: bytes | None = None, headers: str = "") -> bytes:
    """Build the bytes of a job's request once, or of another body; further headers end with a line break each."""
    body = request_body(job) if body is None else body
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n{headers}\r\n".encode() + body


class Connection(asyncio.Protocol):
    """One connection.

    Args:
        answered: Called with the connection, the status of each answer and the `at` it was asked with.
        lost: Called with the connection when it is gone; `asked_at` is None if no answer was due.
    """

    def __init__(self, answered: Callable[[Any, int, float], None], lost: Callable[[Any], None]) -> None:
        self.answered = answered
        self.lost = lost
        self.asked_at: float | None = None
        self.parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport

    def ask(self, request: bytes, at: float) -> None:
        """Send a request; `at` is from when its latency counts."""
        self.asked_at = at
        self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_complete(self) -> None:
        at, self.asked_at = self.asked_at, None
        self.answered(self, self.parser.get_status_code(), at)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost(self)
