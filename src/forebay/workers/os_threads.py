# SPDX-License-Identifier: Apache-2.0
"""Tells whether threads are the operating system's; gevent and eventlet can replace them by tasks of one thread."""

from __future__ import annotations

import sys
import threading

from forebay.errors import ConfigError


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
