# SPDX-License-Identifier: Apache-2.0
"""Makes a process end with the server it was started for, however the server ends and whatever the process is doing.

It does so in two ways, because each has a gap. The kernel's parent-death signal kills a process even while it holds the
interpreter's lock or computes without it. But the signal follows whoever started the process, and that is not the
server where the interpreter is a script around another one. A thread that watches the server itself covers that case,
as soon as it gets the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from typing import Final

from forebay.workers.processes.process_life import open_end

_PR_SET_PDEATHSIG: Final = 1


def end_with(server: int) -> bool:
    """End this process when the server with this id does.

    Returns:
        Whether the server was seen. If not, it is gone already, or its processes have other ids here; the next attempt
        to dial it will tell.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux has the thread only
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        alive = open_end(server)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    _end_after(alive, select.POLLIN)
    return True


def end_with_reader(pipe: int) -> None:
    """End this process when nobody can read this pipe any more: its server had ended before `end_with` saw it."""
    _end_after(pipe, 0)


def _end_after(descriptor: int, event: int) -> None:
    threading.Thread(target=_watch, args=(descriptor, event), name="forebay-leash", daemon=True).start()


def _watch(descriptor: int, event: int) -> None:
    poll = select.poll()
    poll.register(descriptor, event)
    poll.poll()
    os._exit(1)
