# SPDX-License-Identifier: Apache-2.0
"""Wakes the threads and tasks that wait for calls of a started serving."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from forebay.serving.nx_serving.dispatch import Submission


def wake(calls: Iterable[Submission]) -> None:
    """Wake the waiters of these calls: each thread by its lock, each loop once for all of its tasks."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] | None = None
    for call in calls:
        waiter = call.waiter
        if isinstance(waiter, asyncio.Future):
            future = cast("asyncio.Future[None]", waiter)
            if loops is None:
                loops = defaultdict(list)
            loops[future.get_loop()].append(future)
        else:
            waiter.release()
    if loops is not None:
        for loop, futures in loops.items():
            try:
                loop.call_soon_threadsafe(_resolve, futures)
            except RuntimeError:  # the loop is closed: its tasks are gone
                pass


def _resolve(futures: list[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
