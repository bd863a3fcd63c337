# SPDX-License-Identifier: Apache-2.0
"""Waiting for a state: in a thread, and in a coroutine. The bound is generous; only a failing test waits so long."""

import asyncio
import time

PATIENCE_S = 120.0


def timeouts(first_s=0.05):
    """Time-outs to try one after the other: what is to be late may not even have begun within the first."""
    while first_s < PATIENCE_S:
        yield first_s
        first_s *= 4


def eventually(check, what="it", within_s=PATIENCE_S):
    """Waits until `check()` is true and returns what it returned."""
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s} seconds"
        time.sleep(0.01)
    return found


async def reached(check, what="it", within_s=PATIENCE_S):
    """Lets the loop turn until `check()` is true and returns what it returned."""
    deadline = time.monotonic() + within_s
    while not (found := check()):
        assert time.monotonic() < deadline, f"{what} did not happen within {within_s} seconds"
        await asyncio.sleep(0.002)
    return found
