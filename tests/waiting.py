# SPDX-License-Identifier: Apache-2.0
"""Waiting for a state: in a thread, and in a coroutine. The bound is generous; only a failing test waits so long.

A wait that succeeds after more than half of its patience is a failure that nobody sees; `tests/patience.py` lists it.
"""

import asyncio
import time
from time import monotonic  # by its own name: tests put the clock of the module forward

PATIENCE_S = 120.0

LONG_PART = 0.5
"""A wait is long if it succeeds after more than this part of its patience."""

long_waits: list[str] = []
"""Long waits of the current test, in words."""


def timeouts(first_s=0.05):
    """Time-outs to try one after the other: what is to be late may not even have begun within the first."""
    while first_s < PATIENCE_S:
        yield first_s
        first_s *= 4


class _Wait:
    def __init__(self, what, within_s):
        self._what = what
        self._within_s = within_s
        self._began = monotonic()
        self._pause_s = 0.001

    def pause_s(self):
        """Return the time until the next look, which comes soon at first; fail once the patience is over."""
        waited_s = monotonic() - self._began
        assert waited_s < self._within_s, f"{self._what} did not happen within {self._within_s} seconds"
        self._pause_s = min(1.5 * self._pause_s, 0.02)
        return self._pause_s

    def end(self):
        """Note a wait that was long."""
        waited_s = monotonic() - self._began
        if waited_s > LONG_PART * self._within_s:
            long_waits.append(f"{self._what} happened after {waited_s:.1f} of {self._within_s} seconds")


def eventually(check, what="it", within_s=PATIENCE_S):
    """Wait until `check()` is true and return what it returned."""
    wait = _Wait(what, within_s)
    while not (found := check()):
        time.sleep(wait.pause_s())
    wait.end()
    return found


async def reached(check, what="it", within_s=PATIENCE_S):
    """Let the loop turn until `check()` is true and return what it returned."""
    wait = _Wait(what, within_s)
    while not (found := check()):
        pause_s = wait.pause_s()
        await asyncio.sleep(pause_s)
    wait.end()
    return found
