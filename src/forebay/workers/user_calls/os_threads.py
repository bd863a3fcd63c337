# SPDX-License-Identifier: Apache-2.0
"""Tells whether threads and waits are the operating system's; gevent and eventlet can replace both."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Final

from forebay.errors import ConfigError

_GREEN: Final = frozenset({"gevent", "eventlet"})


def require_os_threads(what: str) -> None:
    """Refuse to go on in a program whose threads were replaced: what blocks in one of them stops all of them.

    Args:
        what: What cannot be run then, for the message.

    Raises:
        ConfigError: If the thread that calls this is unknown to the interpreter.
    """
    if threading.get_ident() not in sys._current_frames():  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        raise ConfigError(
            f"{what} needs threads, and this program has replaced them, as monkey patching by gevent and eventlet "
            "does: it would stand still; leave threads as they are (gevent's `monkey.patch_all(thread=False)`), or run "
            "`forebay serve` as a program of its own"
        )


def require_os_waits(what: str, modules: Sequence[str] = ("select", "subprocess", "socket")) -> None:
    """Refuse to go on in a program where what waits for processes and sockets was replaced: it waits in one thread.

    Args:
        what: What cannot be run then, for the message.
        modules: What it waits with.

    Raises:
        ConfigError: If it was.
    """
    waits = {"select": select.select, "subprocess": subprocess.Popen, "socket": socket.socket}
    # Others wrap and subclass them, too, and what they make still waits as it should.
    if replaced := [name for name in modules if waits[name].__module__.partition(".")[0] in _GREEN]:
        raise ConfigError(
            f"{what} cannot run beside monkey patching by gevent or eventlet, which has replaced "
            f"{', '.join(replaced)} of this program: run it in threads (`worker_kind='thread'`), or use "
            "`forebay serve` as a program of its own"
        )
