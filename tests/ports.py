# SPDX-License-Identifier: Apache-2.0
"""Ports for programs that must be told one."""

import contextlib
import random
import socket

# Below those that the kernel hands to whoever asks for any: one of them may be gone before its program has it.
_PORTS = range(10_000, 32_000)


def free_port(followed_by=0):
    """A port that nobody has, nor those after it."""
    while True:
        first = random.SystemRandom().choice(_PORTS)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + 1 + followed_by):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
