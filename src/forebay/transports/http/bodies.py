# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests over ASGI: read whole, up to a limit."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from forebay.types.element_limits import too_long

if TYPE_CHECKING:
    from starlette.types import Message, Receive

    from forebay.server.byte_budget import ByteBudget


class CountedReceive:
    """Receives for an application under a server that does not count what it holds; `close` it with the answer."""

    def __init__(self, receive: Receive, byte_budget: ByteBudget) -> None:
        self._receive = receive
        self._byte_budget = byte_budget
        self._size = 0

    async def __call__(self) -> Message:
        """Receive the next message; raises Unavailable if its body exceeds the budget."""
        message = await self._receive()
        size = len(message.get("body", b""))
        if size:
            self._byte_budget.take(size)
            self._size += size
        return message

    def close(self) -> None:
        """Count its body no longer."""
        self._byte_budget.give(self._size)
        self._size = 0


async def read_body(receive: Receive, limit: int | None) -> bytes | None:
    """Read a body; None if the client went away before its end.

    Raises:
        TooLarge: As soon as it is longer than `limit`, if there is one; what is left of it was not read.
    """
    joined = io.BytesIO()  # joined piece by piece, since a long body would take long at its end
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        length += len(piece)
        if limit is not None and length > limit:
            raise too_long("body", limit)
        has_more = message.get("more_body", False)
        if not has_more and length == len(piece):
            return piece
        joined.write(piece)
        if not has_more:
            return joined.getvalue()


async def left(receive: Receive) -> None:
    """Wait until the client has gone away, once its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
