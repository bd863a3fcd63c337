# SPDX-License-Identifier: Apache-2.0
"""What a model forks off the server's process gets none of the server's sockets.

If it did, the port would stay taken as long as the child lives, and clients would never see their connections close. In
the child the sockets are replaced by the null device and not closed: their numbers stay taken, so that what is left of
the server's objects there cannot close something else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

from forebay.workers.processes.process_life import OPEN_FILES

_ports: set[int] = set()


def keep_from_children(port: int) -> None:
    """Let no child keep a socket that listens on this port of this process, nor a connection to it."""
    _ports.add(port)


def give_free(port: int) -> None:
    """The port is no longer this process's."""
    _ports.discard(port)


def _after_fork() -> None:
    if not _ports:
        return
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor in [int(link.name) for link in Path(OPEN_FILES).iterdir()]:
            if _local_port(descriptor) in _ports:
                os.dup2(null, descriptor, inheritable=False)
        os.close(null)
    _ports.clear()


def _local_port(descriptor: int) -> int | None:
    """Return the port at this end of a TCP socket; None for everything else."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        found = socket.socket(fileno=descriptor)
    except OSError:  # it was the listing's own
        return None
    try:
        name = found.getsockname()
        return name[1] if found.family in {socket.AF_INET, socket.AF_INET6} else None
    except OSError:
        return None
    finally:
        found.detach()


os.register_at_fork(after_in_child=_after_fork)
