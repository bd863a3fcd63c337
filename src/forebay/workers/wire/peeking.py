# SPDX-License-Identifier: Apache-2.0
"""Looks at what a client says first, and leaves it to the reader of the connection."""

from __future__ import annotations

import asyncio
import socket


async def peek(accepted: socket.socket) -> bytes:
    """Wait for the first bytes of a connection that nobody reads yet; empty if the client has hung up."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(accepted, lambda: readable.done() or readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(accepted)
    return accepted.recv(8, socket.MSG_PEEK)
