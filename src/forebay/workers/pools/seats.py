# SPDX-License-Identifier: Apache-2.0
"""The streams that are open in one worker, and whose turn it is. No loop here, no thread, no socket; `now` is given.

Theory of operation. A worker that streams has seats. Whatever a runner returned for a batch keeps its seat until it has
ended: outcomes at once, an iterator step by step. `step` is one round: each iterator is advanced once, in the order in
which they came, so a long stream never keeps a short one waiting. `JointStreams` of an equal key are stepped in one
call. One whose clients have no room for more parts is passed over until they have.

Who joins begins before the next round. While others are open that may take as long as a round did, and goes on after
the next one: many that come at once do not keep those from their next parts. A server with nobody else to give its
requests to may send some ahead of their seats; one that has become free is then taken without asking it.

A round may end early, at `ROUND_S`, so that what has been made is sent; the next one goes on with those that are left.
Where all of the last `STEADY` rounds were over quickly, some are made before anything is sent, up to `BUNDLE` of them
within `BUNDLE_S`: the way to the server then costs less than the parts. Generators that are quick and slow in turns
never have a part wait for the next one; of others it is the last parts before a step that is slow for the first time.
The first part of a stream waits for no second one.

Every batch that joins ends exactly once, which is told in a round, and its iterator is closed once.

The code is written as coroutines, for an event loop may run it. Elsewhere nothing in it ever waits, and `at_once` runs
it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeVar, cast

import msgspec

from forebay.types.call import Failure, Outcome
from forebay.workers.pool import CREDIT
from forebay.workers.user_calls.joint_streams import Even, JointStreams, SideBySide, Stepped, Watch
from forebay.workers.user_calls.user_code import aclose, attempt, attempt_async, settled

ROUND_S: Final = 0.001
"""A round in which so much time was spent on generators is told before all of them had their turn."""
BUNDLE: Final = 8
BUNDLE_S: Final = 0.0005
"""Rounds that are told together, and how long they may take in sum."""
STEADY: Final = 64
"""Rounds in a row that took no longer than that, after which some are told together."""

T = TypeVar("T")
_END: Final = object()


class Round(msgspec.Struct, gc=False):
    """What is to be told: parts in the order in which they were made, and batches that have ended after them.

    Attributes:
        parts: Names, and a part for each item; or a list of the names of batches of one item each, and one part for
            each of them.
        ended: Names, outcomes, and how long they sat.
    """

    parts: list[tuple[Any, Sequence[Any]]] = []
    ended: list[tuple[Any, Sequence[Outcome], float]] = []


class _Seated:
    __slots__ = ("count", "group", "has_begun", "name", "room", "rows", "since", "steps")

    def __init__(self, name: Any, count: int, rows: int, steps: Any, group: Hashable, since: float) -> None:
        self.name = name
        self.count = count
        self.rows = rows
        self.steps = steps
        self.group = group  # None for who takes its turn alone
        self.since = since
        self.room = CREDIT  # 0 once it has left
        self.has_begun = False


class _Mates:
    """Streams that make steps together, until one of them ends, has no room, or another one joins.

    Steps in which each got a part are counted once for all, and taken off the room of each when it matters.

    Attributes:
        all: They.
        names: How they are called.
        step: Makes one step.
        left: Such steps until somebody may be out of room.
        has_begun: Whether all have had a part.
    """

    __slots__ = ("_room", "all", "has_begun", "left", "names", "step")

    def __init__(self, mates: list[_Seated]) -> None:
        self.all = mates
        self.names = [mate.name for mate in mates]
        streams = [mate.steps for mate in mates]
        self.step: Callable[[], Any] = streams[0].together(streams)
        self.has_begun = all(mate.has_begun for mate in mates)
        self.left = self._room = min(mate.room for mate in mates)

    def settle(self) -> bool:
        """Take what was counted off the room of each; returns whether all have some left."""
        made = self._room - self.left
        for mate in self.all:
            mate.room -= made
        self.left = self._room = min(mate.room for mate in self.all)
        return self.left > 0


class Seats:
    """What sits in one worker.

    Attributes:
        is_ending: Whether user code runs that ends a stream, which is not called off though nobody waits for it.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        clock: Callable[[], float],
        enter: Callable[[Any], object] = lambda _name: None,
        watch: Watch | None = None,
        *,
        seats: int | None = None,
        ahead: int = 0,
    ) -> None:
        """Begin with all seats free.

        Args:
            run: A runner's.
            clock: Gives the time.
            enter: Called before user code runs: with the name of the batch it runs for, or None if for several.
            watch: Tells who waits for async generators when the server has said something.
            seats: Rows that may be open at a time; None leaves it to the server.
            ahead: Rows that the server sends beyond these, which wait here.
        """
        self._limit = seats
        self._ahead = ahead
        self._rows = 0
        self._freed = self._freed_before = 0  # rows, in this round and the last one
        self._largest = 1
        self._coming: deque[tuple[Any, Sequence[Any], Hashable, int]] = deque()
        self._round_s = 0.0
        self._quick = 0  # rounds in a row
        self._watch = watch
        self._run = run
        self._clock = clock
        self._enter = enter
        self._seated: dict[Any, _Seated] = {}
        self._turns: deque[_Seated] = deque()
        self._groups: Counter[Hashable] = Counter()
        self._mates: _Mates | None = None  # where all who sit and have room step together
        self._told = Round([], [])
        self._is_urgent = False
        self._late: list[SideBySide] = []
        self.is_ending = False

    def __len__(self) -> int:
        """Return how many batches sit, or are to."""
        return len(self._seated) + len(self._coming)

    @property
    def can_step(self) -> bool:
        """Whether there is anything to do, or to tell."""
        return self._is_busy or bool(self._late)

    @property
    def _is_busy(self) -> bool:
        return bool(self._told.ended) or self.has_turns or self._can_begin

    @property
    def asks(self) -> bool:
        """Whether there are free seats, and the server, which had no room for all, may know who wants them."""
        if self._limit is None:
            return False
        taken = self._rows + sum(coming[-1] for coming in self._coming)
        # When the round began it had not heard of what this one and the last have freed.
        room = self._limit + self._ahead - taken - self._freed - self._freed_before
        return taken < self._limit and room < self._largest

    @property
    def has_turns(self) -> bool:
        """Whether anybody can be stepped."""
        return self._mates is not None or any(one.room > 0 for one in self._seated.values())

    def join(self, name: Any, items: Sequence[Any], key: Hashable = None) -> None:
        """Take a batch in: it begins before the next round, or once there are seats for it."""
        rows = sum(item.size for item in items)
        self._largest = max(self._largest, rows)
        self._coming.append((name, items, key, rows))

    @property
    def _can_begin(self) -> bool:
        if not self._coming:
            return False
        return self._limit is None or not self._rows or self._rows + self._coming[0][-1] <= self._limit

    async def _let_in(self) -> None:
        """Begin those who have come, as long as that keeps nobody waiting."""
        if not self._coming:
            return
        began = self._clock()
        while self._can_begin:
            await self._begin(*self._coming.popleft())
            if self._seated and self._clock() - began > max(self._round_s, ROUND_S):
                return

    async def _begin(self, name: Any, items: Sequence[Any], key: Hashable, rows: int) -> None:
        """Begin a batch: its iterator takes part in the next round; what has ended at once is told with it."""
        since = self._clock()
        self._enter(name)
        count = len(items)
        found = attempt(self._run, items)
        if hasattr(found, "__await__"):
            try:
                found = await attempt_async(_awaited, found)
            except BaseException:  # the pool has cancelled it, as nobody waits for it
                self._told.ended.append((name, [None] * count, self._clock() - since))
                raise
        if hasattr(found, "__anext__"):
            found = SideBySide(found, count)
        if type(found) is Failure:
            self._freed += rows
            self._told.ended.append((name, [found] * count, self._clock() - since))
        elif hasattr(found, "__next__") or isinstance(found, JointStreams):
            group = None
            if isinstance(found, JointStreams):
                group = found.mates, key
            if type(found) is SideBySide:
                group, found.watch = (found.mates,), self._watch
            one = self._seated[name] = _Seated(name, count, rows, found, group, since)
            self._rows += rows
            self._groups[group] += 1
            self._part()  # those who step together are found anew, with this one
            self._turns.append(one)
        else:
            outcomes: Any = attempt(settled, found, count)
            outcomes = [outcomes] * count if type(outcomes) is Failure else outcomes[0]
            self._freed += rows
            self._told.ended.append((name, outcomes, self._clock() - since))

    async def leave(self, name: Any, outcome: Any = None) -> None:
        """End a batch that nobody waits for, or that cannot go on; it is told as ended, which frees its seats."""
        one = self._seated.get(name)
        if one is not None:
            await self._end(one, [outcome] * one.count)
            return
        for coming in self._coming:
            if coming[0] == name:
                self._coming.remove(coming)
                self._freed += coming[-1]
                self._told.ended.append((name, [outcome] * len(coming[1]), 0.0))
                return

    def allow(self, name: Any, steps: int) -> None:
        """Note that the clients of a batch have room for further steps."""
        one = self._seated.get(name)
        if one is not None:
            if one.room <= 0:  # it was passed over, and is to step with the others again
                self._part()
            one.room += steps

    async def step(self) -> Round:
        """Advance everything that may, once or some times; returns what is to be told."""
        self._freed_before, self._freed = self._freed, 0
        await self._let_in()
        began = now = self._clock()
        for _ in range(BUNDLE):
            is_whole = await self._round(began)
            now, before = self._clock(), now
            self._quick = self._quick + 1 if now - before <= BUNDLE_S else 0
            if not is_whole:
                break
            self._round_s = now - before
            if self._is_urgent or self._told.ended or self._quick < STEADY:
                break
            if now - began + self._round_s > BUNDLE_S:
                break
        if self._late:
            await self._outlast()
        return self.told()

    def told(self) -> Round:
        """Return what is to be told by now."""
        told, self._told = self._told, Round([], [])
        self._is_urgent = False
        return told

    async def close(self) -> None:
        """End everything that sits; nothing is told any more."""
        self._coming.clear()
        for one in list(self._seated.values()):
            await self._end(one, [])
        self._told = Round([], [])

    async def _round(self, began: float) -> bool:
        """Give each its turn; returns whether all have had it and one of them has another."""
        if len(self._groups) == 1 and None not in self._groups:  # as nearly always where steps are shared
            if self._mates is None and (mates := [one for one in self._turns if one.room > 0]):
                self._mates = _Mates(mates)
            if self._mates is not None:
                await self._advance_together(self._mates)
            return self.has_turns
        turns, self._turns = self._turns, deque()
        try:
            while turns:
                one = turns.popleft()
                self._turns.append(one)
                if one.room <= 0:
                    continue
                if one.group is None:
                    await self._advance(one)
                else:
                    mates = [one, *(mate for mate in turns if mate.group == one.group)]
                    if len(mates) > 1:
                        taken = set(map(id, mates))
                        turns = deque(mate for mate in turns if id(mate) not in taken)
                        self._turns.extend(mates[1:])
                    some = _Mates([mate for mate in mates if mate.room > 0])
                    await self._advance_together(some)
                    some.settle()
                if turns and self._clock() - began > ROUND_S:
                    return False
        finally:
            turns.extend(self._turns)  # those that had no turn are the next
            self._turns = deque(one for one in turns if one.name in self._seated)
        return self.has_turns

    async def _advance(self, one: _Seated) -> None:
        self._enter(one.name)
        step = attempt(next, one.steps, _END)
        if step is _END:
            await self._end(one, [None] * one.count)
            return
        made: Any = step if type(step) is Failure else attempt(settled, step, one.count)
        if type(made) is Failure:
            await self._end(one, [made] * one.count)
            return
        self._tell(one, made[0])

    async def _advance_together(self, mates: _Mates) -> None:
        self._enter(mates.names[0] if len(mates.all) == 1 else None)
        found = attempt(mates.step)
        if hasattr(found, "__await__"):
            found = await attempt_async(_awaited, found)
        if type(found) is Failure:
            for mate in mates.all:
                await self._end(mate, [found] * mate.count)
            return
        if type(found) is Even:  # as nearly always
            self._told.parts.append((mates.names, found.parts))
            mates.left -= 1  # before any of them ends: `_end` settles what was counted, and drops this group
            if not mates.has_begun:
                mates.has_begun = self._is_urgent = True
                for mate in mates.all:
                    mate.has_begun = True
            for place in found.over:
                await self._end(mates.all[place], [None])
            has_room = mates.left > 0 or mates.settle()
        else:
            mates.settle()
            for mate, step in zip(mates.all, cast("Sequence[Stepped]", found), strict=True):
                if step.parts is not None:
                    self._tell(mate, step.parts)
                if step.outcomes is not None:
                    await self._end(mate, step.outcomes)
            has_room = mates.settle()
        if not has_room and self._mates is mates:
            self._mates = None

    async def _outlast(self) -> None:
        """Have those go on that need long to end: the loop of a thread runs only while something is waited for."""
        found = self._late[0].outlast(self._late, wait=not (self._told.parts or self._is_busy))
        if found is not None:
            await found
        self._late = [one for one in self._late if one.is_late]

    def _tell(self, one: _Seated, parts: Sequence[Any]) -> None:
        one.room -= 1
        if not one.has_begun:
            one.has_begun = self._is_urgent = True
        self._told.parts.append((one.name, parts))

    def _part(self) -> None:
        """Have those who step together found anew."""
        mates, self._mates = self._mates, None
        if mates is not None:
            mates.settle()

    async def _end(self, one: _Seated, outcomes: Sequence[Outcome]) -> None:
        if self._seated.get(one.name) is not one:
            return
        del self._seated[one.name]  # first: its end may wait, and `leave` must not end it a second time
        self._part()
        self._rows -= one.rows
        self._freed += one.rows
        one.room = 0
        self._groups[one.group] -= 1
        if not self._groups[one.group]:
            del self._groups[one.group]
        self._turns = deque(other for other in self._turns if other is not one)
        self._enter(one.name)
        self.is_ending = True
        try:
            await aclose(one.steps)
        finally:
            self.is_ending = False
            if type(one.steps) is SideBySide and one.steps.is_late:
                self._late.append(one.steps)
            # Also where its end was cut short: the server holds the seats until it hears of it.
            self._told.ended.append((one.name, outcomes, self._clock() - one.since))


class Link(Protocol):
    """The way between one worker and its server, as the worker sees it."""

    def receive(self, *, wait: bool) -> Iterable[Sequence[Any]]:
        """Return what the server has said, as `follow` reads it; wait until there is anything, if told so."""
        ...

    def tell(self, number: int, told: Round) -> None:
        """Send what a round has made."""
        ...


def follow(seats: Seats, link: Link) -> None:
    """Step the streams of one worker until its server says stop, and has heard that all have ended.

    A worker that hung up before that would lose its last round: the server drops what it has not read once it cannot
    write, and it still has to say that it heard the round before.

    The worker is at most one round ahead of what the server has heard, and not ahead at all where seats have become
    free and the server, which had no room for all, may know who wants them: whoever waits is to take part in the next
    round.

    What the server says: `join`, a name, items and a key; `leave`, a name, and an outcome if it has failed; `allow`, a
    name and how many more steps; `heard` and the number of a round; `stop`, and `end` if it waits for nobody.
    """
    sent = heard = needed = 0
    is_stopping = False
    try:
        while len(seats) or seats.can_step or heard < sent or not is_stopping:
            may_step = seats.can_step and heard >= needed
            for kind, *what in link.receive(wait=not may_step):
                match kind:
                    case "heard":
                        (heard,) = what
                    case "join":
                        seats.join(*what)
                    case "leave":
                        at_once(seats.leave(*what))
                    case "allow":
                        seats.allow(*what)
                    case "stop":
                        is_stopping = True
                    case _:
                        return
            if not seats.can_step or heard < needed:
                continue
            told = at_once(seats.step())
            if told.parts or told.ended:
                sent += 1
                needed = sent if told.ended and seats.asks else sent - 1
                link.tell(sent, told)
    finally:
        at_once(seats.close())


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    raise RuntimeError("what runs in a thread of its own has waited")


async def _awaited(awaitable: Any) -> Any:
    return await awaitable
