# SPDX-License-Identifier: Apache-2.0
"""Catches what user code raises, for layers below the workers too; the rest of that boundary is `workers/user_code`."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from typing import Any


def caught(function: Callable[..., Any], *arguments: Any) -> tuple[Any, BaseException | None]:
    """Call a function of the user's; returns what it returned and what it raised, one of which is None."""
    try:
        return function(*arguments), None
    except BaseException as error:
        if is_ours(error):
            raise
        return None, error


def answered(function: Callable[[], Any], otherwise: Callable[[BaseException], Any]) -> Any:
    """Return what a function of the user's returns, or what another one makes of what it raised.

    What was raised refers to the frame of every caller. One that keeps it, as it must with `caught`, is in a circle
    with it, and so is all that this frame holds, such as the body of a request. Here nobody keeps it.
    """
    try:
        return function()
    except BaseException as error:
        if is_ours(error):
            raise
        return otherwise(error)


def is_ours(error: BaseException) -> bool:
    """Tell whether what came through user code was not raised by it: a real Ctrl-C, or the end of the running task."""
    if isinstance(error, Exception):
        return False
    if isinstance(error, asyncio.CancelledError):
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no loop runs here
            return False
        return task is not None and task.cancelling() > 0
    if isinstance(error, KeyboardInterrupt):
        # Servers and workers have handlers of their own for SIGINT; where one has not, Python raises this.
        is_main = threading.current_thread() is threading.main_thread()
        return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return False
