# SPDX-License-Identifier: Apache-2.0
"""The messages of a client that sends any number of them, on their way to the method in a worker that takes them.

A worker asks for as many as it has room for, so that a client that sends faster than they are taken has to wait; and
whoever stops taking stops asking.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Cancelled

if TYPE_CHECKING:
    import asyncio

    from forebay.surfaces.nucleus.worker_requests import Desk, DeskClient, DeskVisitor

ROOM: Final = 16
"""Messages that a worker has room for."""


class Inflows:
    """The server's side: all streams of clients that are open."""

    def __init__(self, desk: Desk) -> None:
        self._open: dict[int, _Inflow] = {}
        self._names = itertools.count(1)
        desk.asked["pull"] = self._pull

    def open(self, messages: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> int:
        """Offer messages to whichever worker asks; returns the name to ask by."""
        name = next(self._names)
        self._open[name] = _Inflow(name, messages, loop)
        return name

    def close(self, name: int) -> None:
        """Send no more of it; a handler that still waits for a message is told that the client is gone."""
        self._open.pop(name).close()

    def _pull(self, visitor: DeskVisitor, name: int, count: int) -> None:
        inflow = self._open.get(name)
        if inflow is None:
            visitor.tell("ended", name, True)
        else:
            inflow.pull(visitor, count)


class _Inflow:
    def __init__(self, name: int, messages: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._name = name
        self._messages = messages
        self._loop = loop
        self._visitor: DeskVisitor | None = None
        self._room = 0
        self._task: asyncio.Task[None] | None = None
        self._has_ended = False

    def pull(self, visitor: DeskVisitor, count: int) -> None:
        self._visitor = visitor
        self._room += count
        if self._task is None and not self._has_ended:
            self._task = self._loop.create_task(self._send())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._visitor is not None and not self._has_ended:
            self._has_ended = True
            self._visitor.tell("ended", self._name, True)

    async def _send(self) -> None:
        assert self._visitor is not None
        while self._room > 0:
            message = await anext(self._messages, None)
            if message is None:
                self._has_ended = True
                self._visitor.tell("ended", self._name, False)
                break
            self._room -= 1
            self._visitor.tell("message", self._name, message)
        self._task = None


class InflowClient:
    """The worker's side."""

    def __init__(self, desk: DeskClient) -> None:
        self._desk = desk
        self._open: dict[int, queue.SimpleQueue[Any]] = {}
        self._lock = threading.Lock()
        desk.told["message"] = self._put
        desk.told["ended"] = self._ended
        desk.on_end.append(self._end)

    def messages(self, name: int, decode: Callable[[bytes], Any]) -> Iterator[Any]:
        """Yield the messages of a stream as they come; raises Cancelled if the client is gone."""
        arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with self._lock:
            self._open[name] = arrived
        try:
            self._desk.ask("pull", name, ROOM)
            taken = 0
            while (message := arrived.get()) is not None:
                if message is _GONE:
                    raise Cancelled("the client is gone")
                taken += 1
                if taken == ROOM // 2:
                    self._desk.ask("pull", name, taken)
                    taken = 0
                yield decode(message)
        finally:
            with self._lock:
                del self._open[name]

    def _put(self, name: int, message: Any) -> None:
        with self._lock:
            arrived = self._open.get(name)
        if arrived is not None:
            arrived.put(message)

    def _ended(self, name: int, is_gone: bool) -> None:
        self._put(name, _GONE if is_gone else None)

    def _end(self) -> None:
        with self._lock:
            waiting = list(self._open.values())
        for arrived in waiting:
            arrived.put(_GONE)


_GONE: Final = object()
