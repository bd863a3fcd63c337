# SPDX-License-Identifier: Apache-2.0
"""Requests that wait for an answer, so that those which are still open at the end of a drain get one as well."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from forebay.errors import Unavailable


class OpenCalls:
    """The tasks that wait.

    Attributes:
        is_closing: Set when the server begins to stop.
        on_cut: Called when nobody is to wait any longer, for calls that wait without a task.
    """

    def __init__(self) -> None:
        self.is_closing = False
        self.on_cut: Callable[[], None] = lambda: None
        self._is_cut = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Wait inside, in a task of one's own.

        Raises:
            Unavailable: If the server's time to stop was over before.
        """
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_cut:
                raise  # the client went away
            task.uncancel()
            msg = "the server stopped before the request was answered"
            raise Unavailable(msg) from None
        finally:
            self._tasks.discard(task)

    def cut(self) -> None:
        """Let nobody wait any longer."""
        self._is_cut = True
        self.on_cut()
        for task in list(self._tasks):
            task.cancel()
