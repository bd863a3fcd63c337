# SPDX-License-Identifier: Apache-2.0
"""What the garbage collector need not walk over: a walk over all that a server has loaded holds up every request.

A server whose models are there from the start is frozen once. Where models come and go, what has been loaded since is
frozen in the collector's own walks: once such a walk took long, all that has survived it is used, and the next one need
not see it again. What has left after it was frozen is never found, if it refers to itself; so a while after versions
have left there is a walk over everything, at a moment in which the server has nothing to do, if there is one.
"""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any, Final

LONG_S: Final = 0.005
"""A walk that took longer is not to be made over the same again."""
LOOK_S: Final = 1.0
"""Versions often leave together; and so long a server must have had nothing to do."""
QUIET: Final = 0.05
"""Part of a processor that a server needs which has nothing to do."""
MAX_WAIT_S: Final = 60.0
"""How long what has left may take memory in a server that always has something to do."""


def freeze() -> None:
    """Free what is unused, and exempt the rest from the walks."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


class LongWalks:
    """Freezes what has survived a long walk, and looks for what has left since."""

    def __init__(self) -> None:
        self._began = 0.0
        self._used_s = 0.0
        self._until = 0.0
        self._has_frozen = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look at the collector from now on."""
        gc.callbacks.append(self._walked)

    def stop(self) -> None:
        """Look at it no more."""
        gc.callbacks.remove(self._walked)
        if self._timer is not None:
            self._timer.cancel()

    def left(self) -> None:
        """Note that something has left that may have been frozen; on the loop."""
        if self._has_frozen and self._timer is None:
            self._until = time.monotonic() + MAX_WAIT_S
            self._look_later()

    def _walked(self, phase: str, info: dict[str, Any]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began = time.perf_counter()
        elif time.perf_counter() - self._began > LONG_S:
            gc.freeze()
            self._has_frozen = True

    def _look_later(self) -> None:
        self._used_s = time.process_time()
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        is_quiet = time.process_time() - self._used_s < QUIET * LOOK_S
        if is_quiet or time.monotonic() > self._until:
            self._timer = None
            freeze()
        else:
            self._look_later()
