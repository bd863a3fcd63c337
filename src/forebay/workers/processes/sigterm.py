# SPDX-License-Identifier: Apache-2.0
"""What SIGTERM means to a server or a worker is its own: it ends what a model forks off them, as in any program.

`multiprocessing` relies on that where it terminates a process. SIGINT and SIGHUP stay as they are: a terminal sends
them to all at once, while requests that need such a process are still to be answered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_mask = threading.local()
_own: Callable[[int, FrameType | None], object] | None = None


def keep_from_children(handler: Callable[[int, FrameType | None], object]) -> None:
    """Let no child have this handler of SIGTERM."""
    global _own  # noqa: PLW0603 - a process has one handler
    _own = handler


def _before_fork() -> None:
    _mask.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _after_in_child() -> None:
    if _own is not None and signal.getsignal(signal.SIGTERM) == _own:  # a model may have set another
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _unblock()


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.before)


# It is blocked meanwhile, for a child may be terminated before it has come to that.
os.register_at_fork(before=_before_fork, after_in_child=_after_in_child, after_in_parent=_unblock)
