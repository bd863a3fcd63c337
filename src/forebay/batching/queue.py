# SPDX-License-Identifier: Apache-2.0
"""Decide which queued requests travel together.

Theory of operation. Entries wait in one line per key, in arrival order. Nothing is bound to a batch
before a slot asks for one (`take`), so a batch keeps growing while every slot is busy. A line is
eligible when it holds a full batch, or when its first entry is due:

* `idle="go"`: at once; the driver calls `take` at the end of a loop turn, so what arrived together leaves together;
* `idle="gather"`: at once, unless `gather.py` (`shares.py`, for several slots) waits for clients just answered;
* `idle="wait"`: `max_wait_s` after the first entry arrived.

With a latency objective, `auto.py` says how long a line waits and how much of it leaves, whatever `idle` is.

Eligible lines are served in the order in which they became eligible (`lines.py`), or, once tenants share the queue,
in the order of `fair.py`, which then also says which entries of a line leave. An entry marked `ALONE` is a
batch of its own and always eligible. Cancelled and expired entries never leave the queue in a batch.
An entry that does not fit any more waits for the next batch, unless the driver can `divide` it.

What a configuration asks for beyond the size of a batch is a `Policy` each; they are put together once, and a queue
without one asks none. A policy says when a line is due, how many rows of it leave, and learns from what is answered;
which entries of a line leave is up to the kind of line.

Sans-I/O: no clock, no loop, no payload. `batcher.py` drives it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from forebay.batching.auto import Auto
from forebay.batching.fair import FairShares
from forebay.batching.fair_lines import FairAlone, FairLine, is_over
from forebay.batching.gather import Curve, Gather, GatherRule
from forebay.batching.lines import NEVER, Line, LineOrder, RankedLine
from forebay.batching.policies import Bundles, LongestWait, MostRunning, Policy, SizeOfKey
from forebay.batching.shares import Shares
from forebay.batching.tickets import Tickets
from forebay.errors import QueueFull, TooLarge
from forebay.types.batch import Entry, EntryBatch
from forebay.types.call import ALONE

if TYPE_CHECKING:
    from forebay.batching.deadlines import Deadlines
    from forebay.types.tenant import Tenant

LOOKED_AT: Final = 64
"""Lines of which it is noted at a time that they wait beside a free slot: the oldest, which are due next."""

BUNDLE: Final = 64
BUNDLE_S: Final = 0.001
"""Usual size of a bundle: so many rows, or so many as are expected to need this long."""

_FINITE: Final = 1e300
"""Later than any moment at which a line may leave, but for `NEVER`."""

Idle = Literal["gather", "go", "wait"]

Divide = Callable[["Entry", int], "Entry | None"]
"""Cuts so many samples off the front of an entry: returns them as an entry of its own and shrinks the one it was given,
which keeps its place. None if it is not to be divided; an entry of more samples than a batch takes always must be."""


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are batched.

    Attributes:
        max_size: Samples in a batch.
        max_wait_s: With `idle="wait"`, the longest wait of a batch's first entry while a slot is free.
        capacity: Samples that may wait in total; there is no unbounded mode.
        idle: What a free slot does with a batch that is not full.
        max_running: Batches of one key that may run at a time; None leaves that to the slots.
        objective_s: The latency that 95 of 100 entries are to hold; the sizes and the waits are then learned, within
            `max_size`. None takes them as they are set.
        bundle_s: For one slot whose runner takes the rows it is given one by one, and `max_size` 1: up to `BUNDLE` of
            them leave together, as many as are expected to need no longer than this, so that quick ones share the way
            to the worker. 0 lets each leave by itself.
        size_of: Samples in a batch of a key, where that is not the same for all; at most `max_size`.
        ranked: Whether entries of one key leave by their rank, lower ones first, instead of in order of arrival.
    """

    max_size: int = 64
    max_wait_s: float = 0.0
    capacity: int = 4096
    idle: Idle = "gather"
    max_running: int | None = None
    objective_s: float | None = None
    bundle_s: float = 0.0
    size_of: Callable[[Hashable], int] | None = None
    ranked: bool = False

    @property
    def max_rows(self) -> int:
        """Samples that leave the queue together, if it takes as many: a batch, or a bundle of those run one by one."""
        return min(BUNDLE if self.bundle_s else self.max_size, self.capacity)


class BatchQueue:
    """Queue of entries that leaves in batches.

    Example:
        >>> from forebay.types.call import Request
        >>> queue = BatchQueue(BatchConfig(max_size=4, max_wait_s=0.01, idle="wait"))
        >>> for name in "ab":
        ...     queue.offer(Request(body=name, reply=print, size=2), now=1.0)
        >>> [entry.body for entry in queue.take(now=1.0).entries]  # 2 + 2 = 4: full, leaves at once
        ['a', 'b']
    """

    def __init__(self, config: BatchConfig, divide: Divide | None = None) -> None:
        """Make an empty queue.

        Args:
            config: How requests are batched.
            divide: Cuts entries that do not fit; whoever gives it may offer entries of more than `max_rows` samples.
        """
        self._divide = divide
        self.waiting = 0
        """Samples that wait."""
        self.running = 0
        """Batches that were taken and not answered."""
        self.running_rows = 0
        """Samples in them."""
        self._max_size = config.max_rows
        self._capacity = config.capacity
        self._is_ranked = config.ranked
        self._line_of: Callable[[Hashable], Line] = RankedLine if config.ranked else Line
        self._lines: dict[Hashable, Line] = {}
        self._full = 0
        """Lines with a batch or more."""
        self._order = LineOrder(self._lines, self._since)
        self._ages = LineOrder(self._lines, lambda line: line.oldest())
        self._alone: deque[Entry] | FairAlone = deque()
        self.fair: FairShares | None = None
        """The rule that shares the queue between tenants; None while nobody tells them apart."""
        self.tickets: Tickets | None = None
        """Says when clients that were refused should try again; None while none was."""
        self._slots = 1
        self.auto = None if config.objective_s is None else Auto(config.objective_s, config.max_size)
        self.gather: GatherRule | None = None
        """The rule that waits for returning clients: one for a single slot, another for several."""
        self._gathers: tuple[GatherRule, GatherRule] | None = None
        if config.idle == "gather":
            patience_s = NEVER if self.auto is None else self.auto.patience_s
            curve = Curve()
            self._gathers = Gather(config.max_size, curve, patience_s), Shares(config.max_size, curve, patience_s)
        self._wait = LongestWait(config.max_wait_s) if config.idle == "wait" and self.auto is None else None
        self._bundles = Bundles(config.bundle_s) if config.bundle_s else None
        self._size_of_key = None if config.size_of is None else SizeOfKey(config.size_of)
        self._most_running = None if config.max_running is None else MostRunning(config.max_running)
        self.compose()

    def compose(self) -> None:
        """Put the policies together; each is asked only for what it defines."""
        if self._gathers is not None:
            self.gather = self._gathers[self._slots > 1]
        named = self._size_of_key, self._bundles, self.gather, self._wait, self.auto, self._most_running, self.fair
        if self.fair is not None:
            named = self.deadlines, *named, self.fair.keys  # it refuses before another has noted anything
        elif self.gather is None:  # nothing else learns what batches take
            named = *named, self.tickets
        rules = [rule for rule in named if rule is not None]
        self._arrived = [rule.arrived for rule in rules if type(rule).arrived is not Policy.arrived]
        self._due = [rule.due for rule in rules if type(rule).due is not Policy.due]
        self._waits = [rule.waits for rule in rules if type(rule).waits is not Policy.waits]
        self._room = [rule.room for rule in rules if type(rule).room is not Policy.room]
        self._took = [rule.took for rule in rules if type(rule).took is not Policy.took]
        self._answered = [rule.answered for rule in rules if type(rule).answered is not Policy.answered]

    def share(self) -> FairShares:
        """Share the queue between tenants from now on, also what waits in it."""
        fair = self.fair = FairShares(self, self._capacity, is_ranked=self._is_ranked)
        self._line_of = lambda key: FairLine(key, fair)
        alone, self._alone = self._alone, fair.alone
        for entry in alone:
            self._alone.append(entry)
        for key, line in self._lines.items():
            shared = self._lines[key] = FairLine(key, fair)
            shared.begin(line)
        self._order = LineOrder(self._lines, self._since)
        self._ages = LineOrder(self._lines, lambda line: line.oldest())
        self.compose()
        for line in self._lines.values():  # after `compose`: the moment of a line is what the new rules say
            self._note(line)
        return fair

    def keep_deadlines(self) -> Deadlines:
        """Refuse from now on what would come after its deadline, and have what is due first leave first."""
        fair = self.share() if self.fair is None else self.fair
        deadlines = fair.keep_deadlines()
        self.compose()
        return deadlines

    @property
    def deadlines(self) -> Deadlines | None:
        """The rule that refuses what would be late; None while nobody has stated a deadline."""
        return None if self.fair is None else self.fair.deadlines

    @property
    def most_rows(self) -> int:
        """Samples that leave together, if as many wait."""
        return self._max_size if self._bundles is None else min(self._bundles.rows, self._max_size)

    @property
    def longest_wait_s(self) -> float:
        """How long a batch that is not full waits to be filled."""
        return 0.0 if self._wait is None else self._wait.max_wait_s

    @property
    def lines(self) -> Mapping[Hashable, Line]:
        """What waits, by its key."""
        return self._lines

    @property
    def alone(self) -> deque[Entry] | FairAlone:
        """What waits to run alone."""
        return self._alone

    @property
    def slots(self) -> int:
        """Batches that can run at a time; the driver keeps it up to date."""
        return self._slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._slots = slots
        self.compose()

    def offer(self, entry: Entry, now: float) -> None:
        """Add an entry.

        Raises:
            QueueFull: If `capacity` samples wait already; nothing was queued.
            TooLarge: If the entry alone exceeds `max_rows`.
            TooLate: If it would be answered after the deadline that it states.
        """
        size = entry.size
        if self.waiting + size > self._capacity and (self.fair is None or not self._has_made_room(entry, size, now)):
            raise QueueFull(f"{self.waiting} samples wait already, the queue takes {self._capacity}; try again later")
        if size > self._max_size and self._divide is None:
            raise TooLarge(f"the request has {size} samples, a batch takes {self._max_size}")
        entry.arrived = now
        if self._arrived:  # before anything is counted: a rule may refuse the entry
            for arrived in self._arrived:
                arrived(entry)
        self.waiting += size
        key = entry.key
        if key is ALONE:
            self._alone.append(entry)
            return
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line_of(key)
        line.entries.append(entry)
        rows = line.rows
        line.rows = rows + size
        # Else its moment has not moved forward: `LineOrder` corrects a note that is too early, never one too late.
        if not rows or rows < self._max_size <= rows + size or (self.auto is not None and len(self._lines) > 1):
            self._grown(line, rows, now)

    def admit(self, entry: Entry, now: float) -> None:
        """Refuse an entry, before anything has become of it, by what the rules say of it.

        Raises:
            TooLate: If it would be answered after the deadline that it states.
        """
        if self.deadlines is not None:
            self.deadlines.admit(entry, now)

    def next_ticket(self, tenant: Tenant | None, size: int, now: float, after_s: float = 0.0) -> float:
        """Return the moment at which a client that is refused now should try again; see `Tickets.next`."""
        return self.keep_tickets().next(tenant, size, now, after_s)

    def keep_tickets(self) -> Tickets:
        """Return what says when clients that are refused should try again, from now on."""
        if self.tickets is None:
            self.tickets = Tickets(self, self._capacity)
            self.compose()
        return self.tickets

    def offer_all(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries of one sample each, without key or rank, that arrived now; there are some, and room for all."""
        size = len(entries)
        self.waiting += size
        for arrived in self._arrived:
            for entry in entries:
                arrived(entry)
        line = self._lines.get(None)
        if line is None:
            line = self._lines[None] = self._line_of(None)
        line.entries += entries
        line.rows += size
        self._grown(line, line.rows - size, now)

    def _has_made_room(self, entry: Entry, size: int, now: float) -> bool:
        """Have what holds more of a full queue leave for an entry; tells whether there is room then.

        Raises:
            ShareUsed: If nothing holds more than its tenant would.
            TooLarge: If there would never be room.
            TooLate: If it would be answered after the deadline that it states.
        """
        assert self.fair is not None
        if size > self._max_size and self._divide is None:
            raise TooLarge(f"the request has {size} samples, a batch takes {self._max_size}")
        self.admit(entry, now)  # nobody has to leave for what would be late
        if size <= self._capacity:
            self.fair.eviction.make_room(self.fair.flow_of(entry.tenant), size)
        return self.waiting + size <= self._capacity

    def _grown(self, line: Line, rows: int, now: float) -> None:
        """Note that a line, which had so many rows, has got longer."""
        if rows < self._max_size <= line.rows:
            line.full_since = now
            self._full += 1
        if len(self._lines) > 1:
            self._note(line)

    def _note(self, line: Line) -> None:
        """Note a line that is new, or has got longer, beside others."""
        self._order.note(line)
        if self.auto is not None:
            self._ages.note(line)

    def cancel(self, entry: Entry) -> None:
        """Forget an entry that still waits; does nothing for one that has left. The caller marks it `done`."""
        if entry.taken:
            return
        entry.taken = NEVER  # first: `line.cancel` may sweep out what is marked, and counts this one as gone
        self.waiting -= entry.size
        if entry.key is ALONE:
            self._alone.remove(entry)
            return
        line = self._lines[entry.key]
        line.cancel(entry)
        if line.rows < self._max_size <= line.rows + entry.size:
            line.full_since = NEVER
            self._full -= 1
        if line.rows == 0:  # `head` and `oldest` expect an entry that waits
            del self._lines[entry.key]

    def hasten(self) -> None:
        """Let nothing wait for a fuller batch from now on: nothing more will come."""
        if self._wait is not None:
            self._wait.max_wait_s = 0.0

    def take(self, now: float, limit: int | None = None) -> EntryBatch | None:
        """Hand the next batch to a free slot, or None if nothing is eligible yet.

        Args:
            limit: Rows for which the slot has room beside what runs there. It waits for nothing then: the first line
                is eligible at once, and where its first entry does not fit, none overtakes it.
        """
        while True:
            line = self._eligible(now) if limit is None else self._first()
            if self._alone and (line is None or self._goes_alone(line)):
                if limit is not None and self._alone[0].size > limit:
                    return None
                batch = self._take_alone(now)
            elif line is None or (limit is not None and line.head().size > limit):
                return None
            else:
                batch = self._fill(line, now, limit)
            if batch is not None:  # else all of it had expired
                break
        self.running += 1
        self.running_rows += batch.rows
        if self._took:
            line = self._lines.get(batch.key)
            for took in self._took:
                took(batch, 0 if line is None else line.rows, now)
        return batch

    def answered(self, batch: EntryBatch, now: float) -> None:
        """Tell that a batch has run and its answers are written."""
        self.running -= 1
        self.running_rows -= batch.rows
        for answered in self._answered:
            answered(batch, self, now)
        # The answer may move the moment of its line forward: `MostRunning` held it back.
        if self._due and len(self._lines) > 1 and (line := self._lines.get(batch.key)) is not None:
            self._order.note(line)

    def is_full(self) -> bool:
        """Tell whether a whole batch waits, so that waiting any longer gains nothing."""
        if self.auto is not None:
            line = self._order.first()[1]
            return line is not None and line.rows >= self.auto.size(line.key)
        return self._full > 0

    def may_grow(self) -> bool:
        """Tell whether the next batch, or bundle, has room and nobody has asked that it leave at once."""
        shares = self.gather is not None or (self._bundles is not None and self._bundles.is_open)
        return shares and not self._alone and not self.is_full()

    def next_due(self) -> float | None:
        """Return when `take` should be asked again if nothing arrives before; None if only an arrival can help."""
        if self.gather is not None and (due := self.gather.next_due(self)) is not None:
            return due
        # A line that may not run now becomes due when one of its batches is answered, which wakes the driver.
        due = self._order.first()[0] if self._due else NEVER
        return due if due < NEVER else None

    def oldest(self) -> float:
        """Return when the oldest entry that waits in a line arrived; `NEVER` if none does. Noted with `auto` only."""
        return self._ages.first()[0]

    def entries(self) -> Iterator[Entry]:
        """Go through what waits in lines."""
        return itertools.chain.from_iterable(line.waiting() for line in self._lines.values())

    def check(self) -> None:
        """Assert what holds between any two steps; tests ask after each."""
        waiting = sum(entry.size for entry in itertools.chain(self.entries(), self._alone))
        reserved = 0 if self.fair is None else self.fair.eviction.reserved
        assert self.waiting - reserved == waiting <= self._capacity
        for line in self._lines.values():
            assert 0 < line.rows == sum(entry.size for entry in line.waiting())
            line.check()
            assert (line.full_since < NEVER) == (line.rows >= self._max_size)
        assert self._full == sum(line.full_since < NEVER for line in self._lines.values())
        self._order.check()
        if self.fair is not None:
            self.fair.check([*self.entries(), *self._alone])
        if self.deadlines is not None:
            self.deadlines.check()
        if self.auto is not None:
            self._ages.check()

    def _eligible(self, now: float) -> Line | None:
        gather, fair = self.gather, self.fair
        if fair is not None and gather is not None and fair.has_newcomers(gather.held_since, now):
            gather.interrupt()  # nothing is held back once one comes that was away
        if (
            gather is not None
            and (gather.until is not None or gather.has_plans)
            and not self._alone
            and gather.holds(self, now)
        ):
            return None
        lines = self._lines
        if not self._due and len(lines) == 1:
            return next(iter(lines.values()))
        due, line = self._order.first()
        if due <= now:
            return line if line is None or fair is None else fair.choose(line, self._since, now)
        for waits in self._waits:
            for line in itertools.islice(lines.values(), LOOKED_AT):
                waits(line, now)
        return None

    def _first(self) -> Line | None:
        """Return the line whose turn it is, whether or not it would wait for more."""
        line = self._order.first()[1]
        return line if line is None or self.fair is None else self.fair.choose(line, self._since, _FINITE)

    def _goes_alone(self, line: Line) -> bool:
        """Tell whether the next entry that runs alone goes before a line."""
        alone, since = self._alone[0], self._since(line)
        return alone.arrived <= since if self.fair is None else self.fair.goes_alone(alone, line, since)

    def _since(self, line: Line) -> float:
        """Return from when on a line is eligible."""
        since = line.oldest()
        for due in self._due:
            since = due(line, since)
        return since

    def _take_alone(self, now: float) -> EntryBatch | None:
        entry = self._alone.popleft()
        self.waiting -= entry.size
        if self._is_late(entry, now):
            entry.taken = NEVER
            return None
        entry.taken = now
        return EntryBatch([entry], ALONE, entry.size)

    def _fill(self, line: Line, now: float, limit: int | None) -> EntryBatch | None:
        room = self._max_size if limit is None else min(limit, self._max_size)
        if self._room:
            most = room
            for room_for in self._room:
                room = room_for(line, room, self, now)
            room = max(room, min(line.head().size, most))
        if line.rows <= room and not line.dead:  # the common case: all of it
            rows = line.rows
            taken = list(line.entries)
            is_late = False
            last_due = now if self.deadlines is None else self.deadlines.last_due(now)
            for entry in taken:
                entry.taken = now
                if entry.deadline <= last_due:
                    is_late = True
            self.waiting -= rows
            self._full -= rows >= self._max_size
            del self._lines[line.key]
        else:
            taken, rows, is_late = self._cut(line, room, now)
        if is_late:  # a late entry is answered by its owner; it must not run
            late = [entry for entry in taken if self._is_late(entry, now)]
            if late:
                taken = [entry for entry in taken if not self._is_late(entry, now)]
            for entry in late:
                entry.taken = NEVER
                rows -= entry.size
            if self.fair is not None and not taken:
                self.fair.charged = None  # no batch: the next one would be charged with what the cut has left here
        return EntryBatch(taken, line.key, rows) if taken else None

    def _is_late(self, entry: Entry, now: float) -> bool:
        """Tell whether an entry would be too late if it left now; that is noted."""
        deadlines = self.deadlines
        if deadlines is None:
            return entry.deadline <= now
        if not is_over(entry, now, deadlines.last_due(now)):
            return False
        deadlines.missed(entry, now)
        return True

    def _cut(self, line: Line, room: int, now: float) -> tuple[list[Entry], int, bool]:
        """Take as many entries of a line as fit; return their rows, and whether one is late, as well."""
        taken, left, is_late = line.cut(room, now, self._divide)
        rows = room - left
        self.waiting -= rows
        line.rows -= rows
        if not line.rows:
            del self._lines[line.key]
        if line.full_since < NEVER:
            if line.rows < self._max_size:
                line.full_since = NEVER
                self._full -= 1
            else:
                line.full_since = now  # behind other full lines, or a busy key would keep their turn from them
                if len(self._lines) > 1:
                    self._order.note(line)
        return taken, rows, is_late
