# SPDX-License-Identifier: Apache-2.0
"""One thread of a pool: what the loop knows of it, and its way to the loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from forebay.workers.pools.seating import Seating, Sitting
from forebay.workers.pools.seats import Round, Seats, follow
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.phases import lap

if TYPE_CHECKING:
    from forebay.observe.logs.model_log import LocalOrigin
    from forebay.observe.metrics.tenant_accounts import Accounts
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.runner import Runner


_STOP: Final = ("stop",)


class ThreadSlot:
    """A `Link` between one thread and the loop; `submit`, `stop` and `give_up` are the loop's, the rest the thread's.

    Attributes:
        seating: Who sits, as the loop knows it.
        is_given_up: Whether the thread was left behind.
        in_hand: What the thread runs, where it has no seats.
    """

    def __init__(
        self,
        seats: int,
        say: Callable[..., None],
        freed: Callable[[ThreadSlot, int], object],
        called_off: Callable[[ThreadSlot, int], object],
        accounts: Accounts | None,
    ) -> None:
        """Make a slot without a thread.

        Args:
            seats: Rows that may be open at a time; 0 where one batch runs alone.
            say: Has the loop call something.
            freed: Called on the loop with this when so many seats became free.
            called_off: Called on the loop with this and the name of a batch that nobody waits for any more.
        """
        self.seating = Seating(seats, self._allow, self._leave, time.monotonic, accounts)
        self.is_given_up = False
        self.in_hand: Sequence[Any] | None = None
        self._say = say
        self._freed = freed
        self._called_off = called_off
        self._inbox: SimpleQueue[Sequence[Any]] = SimpleQueue()
        self._open: dict[Any, EntryBatch] = {}
        self._tell: Callable[[], object] | None = None

    # The loop's side

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Seat a batch."""
        sitting = self.seating.join(batch, done)
        if batch.noted is not None and self.seating.seats:
            batch.noted.started = time.monotonic()
        self.put(sitting)

    def put(self, sitting: Sitting) -> None:
        """Give a batch that sits to the thread."""
        self._put("join", sitting.name, sitting.batch, sitting.batch.key)

    def stop(self) -> None:
        """Have the thread end once all that was submitted has."""
        self._put(*_STOP)

    def give_up(self) -> list[Sitting]:
        """Leave the thread behind; returns who sat there."""
        self.is_given_up = True
        self._put(*(("end",) if self.seating.seats else _STOP))
        return self.seating.clear()

    def _put(self, *what: Any) -> None:
        self._inbox.put(what)
        tell = self._tell
        if tell is not None:  # it waits for async generators
            with contextlib.suppress(RuntimeError):  # its loop is closed: the thread has ended
                tell()

    def _allow(self, sitting: Sitting, steps: int) -> None:
        self._put("allow", sitting.name, steps)

    def _leave(self, sitting: Sitting) -> None:
        if self.seating.seats:
            self._put("leave", sitting.name)
        self._called_off(self, sitting.name)

    def _hear(self, number: int, told: Round) -> None:
        if self.is_given_up:
            return
        freed = functools.partial(self._freed, self)
        self.seating.hear(told.parts, told.ended, freed, lambda: self._put("heard", number))

    # The thread's side

    def batches(self) -> Iterator[Sequence[Any]]:
        """Wait for one batch after the other, until the pool stops."""
        return iter(self._inbox.get, _STOP)

    def serve(self, runner: Runner, speaker: LocalOrigin | None) -> None:
        """Be a thread with seats."""

        def enter(name: Any) -> None:
            batch = None if name is None else self._open.get(name)
            probe.set(self._is_deserted if batch is None else lambda: batch.cancelled)
            if speaker is not None:
                speaker.batch = batch

        lap.set(None)
        follow(Seats(runner.run, time.monotonic, enter, self._watch, seats=self.seating.seats), self)

    def _watch(self, tell: Callable[[], object]) -> Callable[[], object]:
        self._tell = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, tell)
        if not self._inbox.empty():
            tell()
        return self._forget

    def _forget(self) -> None:
        self._tell = None

    def receive(self, *, wait: bool) -> Iterator[Sequence[Any]]:
        """Return what the loop has said; see `Link`."""
        inbox = self._inbox
        try:
            while True:
                kind, *what = inbox.get() if wait else inbox.get_nowait()
                wait = False
                if kind == "join":
                    name, batch, key = what
                    self._open[name] = batch
                    what = [name, batch.entries, key]
                yield kind, *what
        except Empty:
            return

    def tell(self, number: int, told: Round) -> None:
        """Hand a round to the loop; see `Link`."""
        for name, _, _ in told.ended:
            self._open.pop(name, None)
        if self.is_given_up:
            return
        try:
            self._say(self._hear, number, told)
        except RuntimeError:  # the loop is closed: nobody is left to answer
            self._put("end")

    def _is_deserted(self) -> bool:
        return all(batch.cancelled for batch in self._open.values())
