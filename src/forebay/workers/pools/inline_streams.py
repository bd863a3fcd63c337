# SPDX-License-Identifier: Apache-2.0
"""The streams that a loop steps itself, between all else that it does."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import Unavailable
from forebay.observe.logs.model_log import LocalOrigin, Voice, origin
from forebay.types.call import Failure
from forebay.workers.pools.seating import Seating, Sitting
from forebay.workers.pools.seats import Round, Seats
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.phases import lap

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import Accounts
    from forebay.types.batch import Done, EntryBatch

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
        self,
        seats: int,
        run: Callable[[Any], Any],
        voice: Voice | None,
        freed: Callable[[int], object],
        accounts: Accounts | None,
    ) -> None:
        """Begin with all seats free.

        Args:
            seats: Rows that may be open at a time.
            voice: Writes what the model logs.
            freed: Called when so many seats became free.
        """
        self.seating = Seating(seats, self._allow, self._leave, time.monotonic, accounts)
        self._run = run
        self._voice = voice
        self._freed = freed
        self._said: deque[tuple[Any, ...]] = deque()
        self._arrival = asyncio.Event()
        self._tell: Callable[[], object] = _nothing
        self._task: asyncio.Task[None] | None = None
        self._seats: Seats | None = None
        self._left: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._section = 0
        self._seen = 0
        self._look_timer: asyncio.TimerHandle | None = None

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Seat a batch; its stream begins in a later turn of the loop."""
        sitting = self.seating.join(batch, done)
        if batch.noted is not None:
            batch.noted.started = time.monotonic()
        self._say("join", sitting.name, batch.entries, batch.key)
        self._begin()

    async def stop(self, grace_s: float) -> None:
        """Wait for the streams, end those that are late."""
        task = self._task
        if task is not None:
            await asyncio.wait([task], timeout=grace_s)
        self._is_stopping = True
        if self._look_timer is not None:
            self._look_timer.cancel()
        if task is not None and not task.done():
            task.cancel()
            await asyncio.wait([task], timeout=CANCEL_S)
        self._answer(self.seating.clear(), "the server stopped before the model answered")

    def _begin(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._follow())

    def _say(self, *what: Any) -> None:
        self._said.append(what)
        self._arrival.set()
        self._tell()

    def _watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        if self._arrival.is_set():
            tell()
            return _nothing
        self._tell = tell
        return lambda: self._forget(tell)

    def _forget(self, tell: Callable[[], object]) -> None:
        if self._tell is tell:
            self._tell = _nothing

    def _allow(self, sitting: Sitting, steps: int) -> None:
        self._say("allow", sitting.name, steps)

    def _leave(self, sitting: Sitting) -> None:
        self._say("leave", sitting.name)
        self._call_off()
        if self._look_timer is None:
            self._look_timer = asyncio.get_running_loop().call_later(CANCEL_S / 2, self._look)

    def _call_off(self) -> None:
        """Cancel what user code makes for nobody: it may wait for a long time, or for ever."""
        is_ending = self._seats is not None and self._seats.is_ending
        if self._task is not None and has_begun(self._task) and not is_ending and self._have_all_left():
            self._task.cancel()

    def _look(self) -> None:
        """Leave behind a task in whose user code nothing has moved since the last look, although it was cancelled."""
        self._look_timer = None
        task = self._task
        if task is None or self._is_stopping or not any(one.is_leaving for one in self.seating.open.values()):
            return
        hangs = self._have_all_left() and self._seen == self._section
        if hangs and len(self._left) < MAX_LEFT:
            self._leave_behind(task)
            return
        self._seen = self._section
        self._call_off()
        self._look_timer = task.get_loop().call_later(CANCEL_S / 2, self._look)

    def _leave_behind(self, task: asyncio.Task[None]) -> None:
        log.warning("a coroutine did not stop %g s after it was cancelled; abandoning it", CANCEL_S)
        self._left.add(task)
        task.add_done_callback(self._left.discard)
        self._task = None
        coming = self._coming()
        self._said = deque(what for what in self._said if what[0] == "join" and what[1] in coming)
        self._answer(self.seating.clear(coming), "the worker that held the request hangs")
        if self._said:
            self._begin()

    def _answer(self, left: Sequence[Sitting], why: str) -> None:
        self._freed(sum(one.batch.rows for one in left))
        for one in left:
            told = "the request was cancelled" if one.is_leaving else why
            one.done(one.batch, [Failure(Unavailable(told))] * len(one.batch.entries))

    def _coming(self) -> set[int]:
        """The names of those who have not been taken in yet, and want to be."""
        open_ = self.seating.open
        return {what[1] for what in self._said if what[0] == "join" and not open_[what[1]].is_leaving}

    def _enter(self, me: asyncio.Task[None], name: Any) -> None:
        """User code runs for this batch, or for several."""
        sitting = None if name is None else self.seating.open.get(name)
        if me is self._task:
            self._section += 1
        batch = None if sitting is None else sitting.batch
        probe.set(self._have_all_left if batch is None else lambda: batch.cancelled)
        if self._voice is not None:
            origin.set(LocalOrigin(self._voice, batch))

    def _have_all_left(self) -> bool:
        """Return whether nobody waits for any stream that has begun."""
        coming = self._coming()
        return all(one.is_leaving or one.name in coming for one in self.seating.open.values())

    async def _follow(self) -> None:
        lap.set(None)
        me = asyncio.current_task()
        assert me is not None
        seats = self._seats = Seats(self._run, time.monotonic, functools.partial(self._enter, me), self._watch)
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
        self._section += 1
        while self._said and self._task is me:
            kind, *what = self._said.popleft()
            if kind == "join":
                seats.join(*what)
            elif kind == "leave":
                await seats.leave(*what)
            else:
                seats.allow(*what)
        self._hear(seats.told(), me)  # who has left does not wait until the others have made something
        if seats.can_step:
            self._hear(await seats.step(), me)
            await asyncio.sleep(0)  # the loop reads and writes between two rounds
        elif self.seating.open:
            await self._arrival.wait()

    def _hear(self, told: Round, me: asyncio.Task[None]) -> None:
        if self._task is me and (told.parts or told.ended):
            self.seating.hear(told.parts, told.ended, self._freed, lambda: None)


def has_begun(task: asyncio.Task[Any]) -> bool:
    """Return whether the code of a task has run: one that is cancelled before never runs its handlers either."""
    coroutine = task.get_coro()
    return not inspect.iscoroutine(coroutine) or inspect.getcoroutinestate(coroutine) != inspect.CORO_CREATED


def _nothing() -> None:
    """Do nothing: no word is waited for."""
