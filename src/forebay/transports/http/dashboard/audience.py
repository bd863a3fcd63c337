# SPDX-License-Identifier: Apache-2.0
"""Viewers of the dashboard: each event is made once for all of them, and none while there are none.

Theory of operation. One task makes an event a second from when the first viewer comes until the last one has left.
Every viewer has a short row of events that wait for its connection. A viewer whose row fills up is dropped at once and
does not hold up the others; its connection ends when the client reads on or when the time for writing is over.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from forebay.errors import QueueFull
from forebay.protocols.native import STREAM_TYPE
from forebay.transports.http.bodies import left

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

log = logging.getLogger("forebay")

MAX_VIEWERS: Final = 8
MAX_WAITING: Final = 4
"""Events that wait for a viewer, beside what its connection holds."""
PERIOD_S: Final = 1.0
_LOOK_S: Final = 0.2
"""How soon the streams end whose server stops."""


class Audience:
    """The viewers of one server."""

    def __init__(
        self,
        make: Callable[[], Awaitable[DashboardEvent]],
        stopped: Callable[[], object],
        is_ending: Callable[[], bool],
    ) -> None:
        """Wait for viewers.

        Args:
            stopped: Called when the last viewer has left.
            is_ending: Tells whether the server stops.
        """
        self._make = make
        self._stopped = stopped
        self._is_ending = is_ending
        self._viewers: dict[Viewer, None] = {}
        self._task: asyncio.Task[None] | None = None

    def join(self, first: bytes, *, is_trusted: bool) -> Viewer:
        """Let a viewer in.

        Args:
            first: What it gets at once.
            is_trusted: Whether it may see what strangers may not.

        Raises:
            QueueFull: If there is no room for another viewer.
        """
        if len(self._viewers) >= MAX_VIEWERS:
            raise QueueFull(f"{MAX_VIEWERS} are looking at this dashboard, which is as many as may; try again later")
        viewer = Viewer(first, self._leave, is_trusted=is_trusted)
        self._viewers[viewer] = None
        if self._task is None:
            self._task = asyncio.create_task(self._tell())
        return viewer

    def _leave(self, viewer: Viewer) -> None:
        self._viewers.pop(viewer, None)

    async def _tell(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        try:
            while self._viewers and not self._is_ending():
                if (wait_s := due - loop.time()) > 0:
                    await asyncio.sleep(min(wait_s, _LOOK_S))
                    continue
                due = loop.time() + PERIOD_S
                event = await self._make()
                for viewer in list(self._viewers):
                    viewer.tell(event.all if viewer.is_trusted else event.public)
        except Exception:
            log.exception("failed to send events to the dashboard")
        finally:
            for viewer in list(self._viewers):
                viewer.end()
            self._task = None
            self._stopped()


class DashboardEvent:
    """One event; a second form, without what strangers may not see, is made only if strangers look."""

    def __init__(self, write: Callable[[bool], bytes]) -> None:
        """Make one; `write` writes it, and is told whether the reader is trusted."""
        self._write = write
        self._written: dict[bool, bytes] = {}

    @property
    def all(self) -> bytes:
        """The whole."""
        return self._of(is_trusted=True)

    @property
    def public(self) -> bytes:
        """What strangers may see."""
        return self._of(is_trusted=False)

    def _of(self, *, is_trusted: bool) -> bytes:
        if is_trusted not in self._written:
            self._written[is_trusted] = self._write(is_trusted)
        return self._written[is_trusted]


class Viewer(Response):
    """The answer to one viewer."""

    media_type = STREAM_TYPE

    def __init__(self, first: bytes, leave: Callable[[Viewer], object], *, is_trusted: bool) -> None:
        super().__init__(headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self.is_trusted = is_trusted
        self._leave = leave
        self._events = deque([first])
        self._woken = asyncio.Event()
        self._is_over = False

    def tell(self, event: bytes) -> None:
        """Send an event, or drop the viewer if too many wait for it."""
        if len(self._events) >= MAX_WAITING:
            self._events.clear()
            self.end()
        else:
            self._events.append(event)
            self._woken.set()

    def end(self) -> None:
        """Let the answer end once its client has taken what is under way."""
        self._is_over = True
        self._woken.set()
        self._leave(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the server stops, the client leaves or is too slow."""
        gone = asyncio.ensure_future(left(receive))
        gone.add_done_callback(lambda _gone: self.end())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while True:
                while self._events:
                    await send({"type": "http.response.body", "body": self._events.popleft(), "more_body": True})
                if self._is_over:
                    break
                self._woken.clear()
                await self._woken.wait()
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()
            self.end()
