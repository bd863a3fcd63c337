# SPDX-License-Identifier: Apache-2.0
"""Runs coroutines of handlers and of Starlette in whichever worker thread they turn up in."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Awaitable

T = TypeVar("T")


class HandlerCoroutines:
    """One event loop a thread, made when first needed and kept: what a handler leaves on it stays valid."""

    def __init__(self) -> None:
        self._here = threading.local()

    def run(self, awaitable: Awaitable[T]) -> T:
        """Wait for an awaitable on this thread's loop."""
        # The caller's context goes along, so that `forebay.is_cancelled()` works in coroutines as well.
        return self._runner().run(_result_of(awaitable), context=contextvars.copy_context())

    def close(self) -> None:
        """Close this thread's loop."""
        runner: asyncio.Runner | None = getattr(self._here, "runner", None)
        if runner is not None:
            runner.close()
            del self._here.runner

    def _runner(self) -> asyncio.Runner:
        runner: asyncio.Runner | None = getattr(self._here, "runner", None)
        if runner is None:
            runner = self._here.runner = asyncio.Runner()
        return runner


async def _result_of(awaitable: Awaitable[T]) -> T:
    return await awaitable
