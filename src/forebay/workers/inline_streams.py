# SPDX-License-Identifier: Apache-2.0
"""The streams that a loop steps itself, between all else that it does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Unavailable
from forebay.observe.model_log import LocalOrigin, Voice, origin
from forebay.types.call import Failure
from forebay.workers.cancel import probe
from forebay.workers.phases import lap
from forebay.workers.seating import Seating
from forebay.workers.seats import Seats

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.seating import Sitting

log = logging.getLogger("forebay.workers")

CANCEL_S: Final = 1.0
"""Time a coroutine that was cancelled has to end; one that goes on is left behind, and its slot is free again."""
MAX_LEFT: Final = 64
"""Coroutines that may be left behind; a further one keeps its slot until it ends."""


class InlineStreams:
    """One task for all streams, as long as there are any.

    Attributes:
        seating: Who sits.
    """

    def __init__(
        self, seats: int, run: Callable[[Any], Any], voice: Voice | None, freed: Callable[[int], object]
    ) -> None:
        """Begin with all seats free.

        Args:
            seats: Rows that may be open at a time.
            run: A runner's.
            voice: Writes what the model logs.
            freed: Called when so many seats became free.
        """
        self.seating = Seating(seats, self._allow, self._leave)
        self._run = run
        self._voice = voice
        self._freed = freed
        self._said: deque[tuple[Any, ...]] = deque()
        self._arrival = asyncio.Event()
        self._tell: Callable[[], object] = _nothing
        self._task: asyncio.Task[None] | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._is_stopping = False

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Seat a batch; its stream begins in a later turn of the loop."""
        sitting = self.seating.join(batch, done)
        if batch.noted is not None:
            batch.noted.started = time.monotonic()
        self._say("join", sitting.name, batch.entries, batch.key)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    async def stop(self, grace_s: float) -> None:
        """Wait for the streams, end those that are late."""
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=grace_s)
        self._is_stopping = True
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
        self._answer_all("the server stopped before the model answered")

    def _say(self, *what: Any) -> None:
        self._said.append(what)
        self._arrival.set()
        self._tell()

    def _watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        if self._arrival.is_set():
            tell()
            return _nothing
        self._tell = tell
        return self._forget

    def _forget(self) -> None:
        self._tell = _nothing

    def _allow(self, sitting: Sitting, steps: int) -> None:
        self._say("allow", sitting.name, steps)

    def _leave(self, sitting: Sitting) -> None:
        self._say("leave", sitting.name)
        if self._task is not None and all(one.is_leaving for one in self.seating.open.values()):
            self._task.cancel()  # it may be waiting in user code
            self._task.get_loop().call_later(CANCEL_S, self._has_ended, self._task, sitting.name)

    def _has_ended(self, task: asyncio.Task[None], name: int) -> None:
        """Leave behind a task that goes on although nobody waits for any of its streams."""
        if task is self._task and name in self.seating.open and len(self._left) < MAX_LEFT:
            log.warning("a coroutine did not end within %g s when it was cancelled; it is left behind", CANCEL_S)
            self._left.add(task)
            task.add_done_callback(self._left.discard)
            self._task = None
            self._said.clear()
            self._answer_all("the request was called off")

    def _answer_all(self, why: str) -> None:
        left = self.seating.clear()
        self._freed(sum(one.batch.rows for one in left))
        for one in left:
            one.done(one.batch, [Failure(Unavailable(why))] * len(one.batch.entries))

    def _enter(self, name: Any) -> None:
        """User code runs for this batch, or for several."""
        sitting = None if name is None else self.seating.open.get(name)
        batch = None if sitting is None else sitting.batch
        probe.set(self._is_deserted if batch is None else lambda: batch.cancelled)
        if self._voice is not None:
            origin.set(LocalOrigin(self._voice, batch))

    def _is_deserted(self) -> bool:
        return all(one.is_leaving for one in self.seating.open.values())

    async def _follow(self) -> None:
        lap.set(None)
        me = asyncio.current_task()
        assert me is not None
        seats = Seats(self._run, time.monotonic, self._enter, self._watch)
        try:
            while self._task is me and self.seating.open:
                try:
                    await self._turn(seats, me)
                except asyncio.CancelledError:
                    if self._is_stopping:
                        break
                    me.uncancel()  # what it waited for has no client left, and is told to leave
        finally:
            if self._task is me:
                self._task = None
            await seats.close()

    async def _turn(self, seats: Seats, me: asyncio.Task[None]) -> None:
        self._arrival.clear()
        while self._said and self._task is me:
            kind, *what = self._said.popleft()
            if kind == "join":
                seats.join(*what)
            elif kind == "leave":
                await seats.leave(*what)
            else:
                seats.allow(*what)
        if not seats.can_step:
            await self._arrival.wait()
            return
        told = await seats.step()
        if self._task is me and (told.parts or told.ended):
            self.seating.hear(told.parts, told.ended, self._freed, lambda: None)
        await asyncio.sleep(0)  # the loop reads and writes between two rounds


def _nothing() -> None:
    """Nobody waits for a word."""
