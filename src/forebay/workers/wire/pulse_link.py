# SPDX-License-Identifier: Apache-2.0
"""The server's end of the connection on which a worker's heartbeat comes; `worker_pulse.py` is the other end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, cast

from forebay.errors import InvalidRequest
from forebay.workers.wire import frames
from forebay.workers.wire.heartbeat import BEAT
from forebay.workers.wire.loop_heartbeat import BEAT_FRAME, LoopHeartbeat

_MAX_BYTES: Final = 1 << 20
"""Longest frame: a hello."""


class PulseLink(asyncio.Protocol):
    """Answers each beat, and says when they cease."""

    def __init__(self, on_silence: Callable[[], object]) -> None:
        """Wait for the hello; `on_silence` is called once, on the loop, if beats cease on an open connection."""
        self._on_silence = on_silence
        self._heartbeat: LoopHeartbeat | None = None
        self._reader = frames.FrameReader(max_bytes=_MAX_BYTES)
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to count."""
        self._transport = cast("asyncio.Transport", transport)
        self._heartbeat = LoopHeartbeat(self._cease)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count no more: the worker's other connections say themselves whether they have ended."""
        self._end()

    def data_received(self, data: bytes) -> None:
        """Answer."""
        try:
            for message in self._reader.feed(data):
                self._answer(message)
        except (InvalidRequest, LookupError, TypeError):
            self._end()

    def _answer(self, message: Any) -> None:
        if self._transport is None or self._heartbeat is None:
            return
        self._heartbeat.heard()
        self._transport.write(BEAT_FRAME if message[0] == BEAT else frames.encode(["open", {}]))

    def _cease(self) -> None:
        self._end()
        self._on_silence()

    def _end(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._transport is not None:
            self._transport.abort()
            self._transport = None
