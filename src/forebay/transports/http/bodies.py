# SPDX-License-Identifier: Apache-2.0
"""Bodies of requests over ASGI: read whole, up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Receive


class BodyTooLong(Exception):
    """A body is longer than its limit; what is left of it was not read."""


async def read_body(receive: Receive, limit: int | None) -> bytes | None:
    """Read a body; None if the client went away before its end.

    Raises:
        BodyTooLong: As soon as it is longer than `limit`, if there is one.
    """
    pieces: list[bytes] = []
    length = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        piece: bytes = message.get("body", b"")
        length += len(piece)
        if limit is not None and length > limit:
            raise BodyTooLong
        pieces.append(piece)
        if not message.get("more_body", False):
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)


async def left(receive: Receive) -> None:
    """Wait until the client has gone away, once its body was read."""
    while (await receive())["type"] != "http.disconnect":
        pass
