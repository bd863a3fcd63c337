# SPDX-License-Identifier: Apache-2.0
"""A heartbeat whose seconds an event loop counts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from forebay.workers.wire import frames
from forebay.workers.wire.heartbeat import BEAT, BEAT_S, MISSED, Heartbeat

BEAT_FRAME: Final = frames.encode([BEAT])
SILENCE: Final = f"nothing was heard of it for {MISSED * BEAT_S:g} s"


class LoopHeartbeat(Heartbeat):
    """Ticks each second until it ends."""

    def __init__(self, on_silence: Callable[[], object], beat: Callable[[], object] = lambda: None) -> None:
        """Begin to count.

        Args:
            on_silence: Called once if the other side has ceased to say anything.
            beat: Called each second while it has not.
        """
        super().__init__()
        self._on_silence = on_silence
        self._beat = beat
        self._wait()

    def end(self) -> None:
        """Count no more."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(BEAT_S, self._tick)

    def _tick(self) -> None:
        if self.tick():
            self._beat()
            self._wait()
        else:
            self._on_silence()
