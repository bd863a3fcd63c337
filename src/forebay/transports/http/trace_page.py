# SPDX-License-Identifier: Apache-2.0
"""`GET /trace?seconds=10`: record what the server does and return it for Perfetto and chrome://tracing.

A recording with an id (`&id=NAME`) ends early, with all that it has, on `POST /trace?id=NAME`.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Final

from starlette.responses import Response

from forebay.errors import Cancelled, InvalidRequest, NotFound, QueueFull
from forebay.observe.traces.timeline import Recording, Timeline
from forebay.observe.traces.trace_format import chrome_trace
from forebay.transports.http.foreign_page import refuse_foreign_page

if TYPE_CHECKING:
    from starlette.requests import Request

    from forebay.server.app import App

SHORTEST_S: Final = 0.1
LONGEST_S: Final = 600.0
DEFAULT_S: Final = "10"
RECORDINGS: Final = 4
"""Recordings at a time; each may hold a few hundred thousand events."""
LONGEST_ID: Final = 64
_LOOK_S: Final = 0.2
"""How soon a recording ends whose client has gone or whose server stops."""


class TracePage:
    """Records while a client waits."""

    def __init__(self, app: App) -> None:
        """Make the page; recordings end early when the server stops."""
        self._timeline = app.state.of(Timeline)
        self._app = app
        self._running = 0
        self._ends: dict[str, asyncio.Event] = {}
        """What ends a recording, by its id."""

    async def __call__(self, request: Request) -> Response:
        """Record for `seconds` and return the trace.

        Raises:
            InvalidRequest: If `seconds` is not a possible duration.
            QueueFull: If no further recording may run now.
            ForeignPage: If a page of somebody else asks.
        """
        refuse_foreign_page(request.headers)
        seconds = _seconds(request.query_params.get("seconds", DEFAULT_S))
        if self._running >= RECORDINGS:
            msg = f"{RECORDINGS} recordings are running, which is as many as may; try again when one has ended"
            raise QueueFull(msg)
        name = _id_of(request)
        if name in self._ends:
            raise InvalidRequest(f"a recording with the id {name!r} is running; choose another id")
        self._running += 1
        ended = asyncio.Event()
        if name:
            self._ends[name] = ended
        try:
            with Recording(timeline=self._timeline) as recording:
                await self._wait(request, seconds, ended)
            # In a thread, as much of it takes seconds, and requests must not wait for that.
            trace = await asyncio.to_thread(chrome_trace, recording)
        finally:
            self._running -= 1
            self._ends.pop(name, None)
        return Response(trace, media_type="application/json", headers={"cache-control": "no-store"})

    async def end(self, request: Request) -> Response:
        """End a recording by its id; its waiter gets what there is.

        Raises:
            NotFound: If there is no such recording.
            ForeignPage: If a page of somebody else asks.
        """
        refuse_foreign_page(request.headers)
        name = _id_of(request)
        ended = self._ends.get(name)
        if ended is None:
            raise NotFound(f"no recording with the id {name!r} is running")
        ended.set()
        return Response(status_code=204)

    async def _wait(self, request: Request, seconds: float, ended: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0 and not self._app.is_draining and not ended.is_set():
            if await request.is_disconnected():
                raise Cancelled("the client went away")
            await asyncio.sleep(min(left, _LOOK_S))


def _id_of(request: Request) -> str:
    name = request.query_params.get("id", "")
    if len(name) > LONGEST_ID:
        raise InvalidRequest(f"id: expected at most {LONGEST_ID} characters, got {len(name)}")
    return name


def _seconds(given: str) -> float:
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not SHORTEST_S <= seconds <= LONGEST_S:
        msg = f"seconds: expected a number from {SHORTEST_S:g} to {LONGEST_S:g}, got {given[:40]!r}"
        raise InvalidRequest(msg)
    return seconds
