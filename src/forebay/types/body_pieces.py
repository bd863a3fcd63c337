# SPDX-License-Identifier: Apache-2.0
"""The body of a request on its way to a model that takes it in pieces, while its client still sends."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Self

from forebay.errors import Cancelled
from forebay.types.call import nothing

ROOM_BYTES: Final = 64 * 1024
"""While the model is behind by this much, no further piece is read."""


class BodyPieces:
    """An iterator of bytes for one reader, in a thread (`for`) or on any loop (`async for`).

    It raises `Cancelled` once its client has left, or its request has an answer.

    Attributes:
        took: Called on the server's loop with the size of what the model took, or will never take.
    """

    def __init__(self) -> None:
        """Begin on the server's loop."""
        self.took: Callable[[int], object] = nothing
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._changed = asyncio.Event()
        self._pieces: deque[bytes] = deque()
        self._held, self._is_whole, self._why_over = 0, False, ""

    def is_awaited(self) -> bool:
        """Tell whether the model has all that came, and its client has not sent all."""
        return not (self._pieces or self._is_whole or self._why_over)

    async def put(self, piece: bytes, *, is_last: bool) -> None:
        """Add a piece, and wait until there is room for the next."""
        if piece:
            self._held += len(piece)
            self._pieces.append(piece)
        self._is_whole = is_last
        self._changed.set()
        await self._wait(lambda: not is_last and self._held >= ROOM_BYTES)

    def close(self, why: str) -> None:
        """Tell a model that still reads why there is no further piece."""
        self._why_over = self._why_over or why
        self._let_go(self._held)
        self.took = nothing  # which may refer to the request

    def __iter__(self) -> Self:
        return self

    __aiter__ = __iter__

    def __next__(self) -> bytes:
        if threading.get_ident() == self._thread:
            raise TypeError("the body was read with `for` in an inline worker, which stops the server; use `async for`")
        asyncio.run_coroutine_threadsafe(self._wait(self.is_awaited), self._loop).result()
        return self._next(StopIteration)

    async def __anext__(self) -> bytes:  # that waits before it takes, so a wait that is cancelled loses nothing
        wait = self._wait(self.is_awaited)
        is_here = asyncio.get_running_loop() is self._loop
        await (wait if is_here else asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait, self._loop)))
        return self._next(StopAsyncIteration)

    def _next(self, end: type[Exception]) -> bytes:
        if self._why_over:
            raise Cancelled(self._why_over)
        if not self._pieces:
            raise end
        piece = self._pieces.popleft()
        self._loop.call_soon_threadsafe(self._let_go, len(piece))
        return piece

    async def _wait(self, is_to_wait: Callable[[], bool]) -> None:
        while is_to_wait():
            self._changed.clear()
            await self._changed.wait()

    def _let_go(self, size: int) -> None:
        size = min(size, self._held)  # none if it was closed meanwhile
        self._held -= size
        self.took(size)
        self._changed.set()
