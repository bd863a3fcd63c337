# SPDX-License-Identifier: Apache-2.0
"""A process that was started for a server ends with it, however that ends and whatever the process is doing.

Two ways, for each has a gap. The kernel's parent-death signal kills also what computes without the interpreter's lock
or holds it, but it tells of the death of whoever started the process, and that is not the server where an interpreter
is a script around another one. A thread that watches the server itself sees that, as soon as it gets the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import threading
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def end_with(server: int) -> None:
    """End this process when the server with this id does.

    A server that is gone already is found by dialling it, which comes next.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux has the thread only, or none
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError, AttributeError):
        alive = os.pidfd_open(server)
        threading.Thread(target=_watch, args=(alive,), name="forebay-leash", daemon=True).start()


def _watch(alive: int) -> None:
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.poll()
    os._exit(1)
