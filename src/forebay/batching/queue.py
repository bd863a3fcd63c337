# SPDX-License-Identifier: Apache-2.0
"""Decide which queued requests travel together.

Theory of operation. Entries wait in one line per key, in arrival order. Nothing is bound to a batch
before a slot asks for one (`take`), so a batch keeps growing while every slot is busy. A line is
eligible when it holds a full batch, or when its first entry is due:

* `idle="go"`: at once; the driver calls `take` at the end of a loop turn, so what arrived together leaves together;
* `idle="gather"`: at once, unless `gather.py` (`shares.py`, for several slots) waits for clients just answered;
* `idle="wait"`: `max_wait_s` after the first entry arrived.

With a latency objective, `auto.py` says how long a line waits and how much of it leaves, whatever `idle` is.

Eligible lines are served in the order in which they became eligible. An entry marked `ALONE` is a
batch of its own and always eligible. Cancelled and expired entries never leave the queue in a batch.
An entry that does not fit any more waits for the next batch, unless the driver can `divide` it.

However many keys wait, a step costs no more than their logarithm: `_order` is a heap of the lines by the moment from
which on they are eligible. If the heap has several notes about a line, only the last one counts. A note may be too
early, because the first entries of the line have left; that is corrected when it reaches the top. A line that becomes
eligible sooner gets a new note. A line that may not run now has no note until one of its batches is answered. A single
line needs no order.

Sans-I/O: no clock, no loop, no payload. `batcher.py` drives it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from forebay.batching.auto import Auto
from forebay.batching.gather import Curve, Gather
from forebay.batching.shares import Shares
from forebay.errors import QueueFull, TooLarge
from forebay.types.batch import EntryBatch
from forebay.types.call import ALONE

if TYPE_CHECKING:
    from forebay.types.batch import Entry

NEVER: Final = float("inf")
"""`taken` of an entry that has left the queue without running."""

MIN_ROW_S: Final = 1e-6
"""No row is taken to be quicker."""

LOOKED_AT: Final = 64
"""Lines of which it is noted at a time that they wait beside a free slot: the oldest, which are due next."""

BUNDLE: Final = 64
BUNDLE_S: Final = 0.001
"""Usual size of a bundle: so many rows, or so many as are expected to need this long."""

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


class Line:
    """The entries that wait under one key."""

    __slots__ = ("dead", "entries", "full_since", "key", "note", "rows")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.entries: deque[Entry] = deque()
        self.rows = 0
        self.dead = 0
        self.full_since = 0.0
        self.note = 0
        """Number of the note in the order that counts; 0 for none."""


class Nobody:
    """Stands for all clients that cannot be told apart."""

    def __init__(self) -> None:
        self.release = 0


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
        self.config = config
        self._divide = divide
        self.waiting = 0
        """Samples that wait."""
        self._max_size = config.max_rows
        self._capacity = config.capacity
        self._lines: dict[Hashable, Line] = {}
        self._full = 0
        self._order: list[tuple[float, int, Line]] = []
        self._ages: list[tuple[float, int, Line]] = []
        self._numbers = itertools.count(1)
        self._alone: deque[Entry] = deque()
        self._running: dict[Hashable, int] = {}
        self._slots = 1
        self.curve = Curve()
        """What a batch costs by its size, as the rules that wait for clients see it."""
        self._gather: Gather | None = None
        self._shares: Shares | None = None
        self.auto = None if config.objective_s is None else Auto(config.objective_s, config.max_size)
        if config.idle == "gather":
            self._gather = Gather(config.max_size, self.curve)
            self._shares = Shares(config.max_size, self.curve)
            if self.auto is not None:
                # There is time to wait, so it need not be certain who comes back.
                self._gather.nobody = self._shares.nobody = Nobody()
        self.gather: Gather | Shares | None = self._gather
        """The rule that waits for returning clients: one for a single slot, another for several."""
        self._counts: Shares | None = None
        self._is_ranked = config.ranked
        self._bundle_s = config.bundle_s
        self._row_s = NEVER
        self._waits = config.idle == "wait" or self.auto is not None
        self._goes = not self._waits and config.max_running is None
        """Whether every line is eligible at once."""

    @property
    def slots(self) -> int:
        """Batches that can run at a time; the driver keeps it up to date."""
        return self._slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._slots = slots
        if self._shares is not None:
            self._shares.slots = slots
            self._counts = self._shares if slots > 1 else None
            self.gather = self._counts or self._gather

    def offer(self, entry: Entry, now: float) -> None:
        """Add an entry.

        Raises:
            QueueFull: If `capacity` samples wait already; nothing was queued.
            TooLarge: If the entry alone exceeds `max_rows`.
        """
        size = entry.size
        if self.waiting + size > self._capacity:
            raise QueueFull(f"{self.waiting} samples wait already, the queue takes {self._capacity}; try again later")
        if size > self._max_size and self._divide is None:
            raise TooLarge(f"the request has {size} samples, a batch takes {self._max_size}")
        self.waiting += size
        entry.arrived = now
        if self._counts is not None:
            self._counts.arrived(entry)
        key = entry.key
        if key is ALONE:
            self._alone.append(entry)
            return
        line = self._lines.get(key)
        is_new = line is None
        if line is None:
            line = self._lines[key] = Line(key)
        if self._is_ranked and line.entries and entry.rank < line.entries[-1].rank:
            _insert(line.entries, entry)
        else:
            line.entries.append(entry)
        rows = line.rows
        line.rows = rows + size
        if is_new or rows < self._max_size <= rows + size or self.auto is not None:
            self._grown(line, rows, now, is_new=is_new)

    def offer_all(self, entries: Sequence[Entry], now: float) -> None:
        """Add entries of one sample each, without key or rank, that arrived now; there are some, and room for all."""
        size = len(entries)
        self.waiting += size
        if self._counts is not None:
            for entry in entries:
                self._counts.arrived(entry)
        line = self._lines.get(None)
        is_new = line is None
        if line is None:
            line = self._lines[None] = Line(None)
        line.entries += entries
        line.rows += size
        self._grown(line, line.rows - size, now, is_new=is_new)

    def _grown(self, line: Line, rows: int, now: float, *, is_new: bool) -> None:
        """Take note that a line has got longer; it had so many rows."""
        if rows < self._max_size <= line.rows:
            line.full_since = now
            self._full += 1
            self._note(line)
        elif is_new or (
            self.auto is not None and len(self._lines) > 1 and self.auto.reaches_goal(line.key, rows, line.rows)
        ):
            self._note(line)
        if self.auto is not None and is_new:
            heapq.heappush(self._ages, (now, next(self._numbers), line))
            if len(self._ages) > 2 * len(self._lines) + 64:
                self._ages = [age for age in self._ages if self._lines.get(age[2].key) is age[2]]
                heapq.heapify(self._ages)

    def cancel(self, entry: Entry) -> None:
        """Forget an entry that still waits; does nothing for one that has left. The caller marks it `done`."""
        if entry.taken:
            return
        entry.taken = NEVER
        self.waiting -= entry.size
        if entry.key is ALONE:
            self._alone.remove(entry)
            return
        line = self._lines[entry.key]
        if line.rows >= self._max_size > line.rows - entry.size:
            self._full -= 1
        line.rows -= entry.size
        line.dead += 1
        if line.rows == 0:
            del self._lines[entry.key]
        elif line.dead > 32 and line.dead * 2 > len(line.entries):
            line.entries = deque(entry for entry in line.entries if not entry.taken)
            line.dead = 0

    def hasten(self) -> None:
        """Let nothing wait for a fuller batch from now on: nothing more will come."""
        self.config = msgspec.structs.replace(self.config, max_wait_s=0.0)

    def take(self, now: float, limit: int | None = None) -> EntryBatch | None:
        """Hand the next batch to a free slot, or None if nothing is eligible yet.

        Args:
            limit: Rows for which the slot has room beside what runs there. It waits for nothing then: the first line
                is eligible at once, and where its first entry does not fit, none overtakes it.
        """
        while True:
            line = self._eligible(now) if limit is None else self._first()
            if self._alone and (line is None or self._alone[0].arrived <= self._since(line)):
                if limit is not None and self._alone[0].size > limit:
                    return None
                batch = self._take_alone(now)
            elif line is None or (limit is not None and self._head(line).size > limit):
                return None
            else:
                batch = self._fill(line, now, limit)
            if batch is not None:  # else all of it had expired
                break
        if self._shares is not None:
            self._shares.took(batch.rows)
        key = batch.key
        if self.config.max_running is not None:
            self._running[key] = self._running.get(key, 0) + 1
        if self.auto is not None and key is not ALONE:
            left = self._lines.get(key)
            self.auto.took(key, batch.rows, 0 if left is None else left.rows, now)
        return batch

    def answered(self, batch: EntryBatch, now: float) -> None:
        """Tell that a batch has run and its answers are written."""
        key = batch.key
        if self._bundle_s:
            # One slow row counts at once, a quick one little by little: a row bundled with a slow one has to wait.
            row_s = batch.model_s / batch.rows
            self._row_s = max(row_s, 0.8 * self._row_s + 0.2 * row_s if self._row_s < NEVER else row_s, MIN_ROW_S)
        gather = self.gather
        if gather is not None:
            assert self._shares is not None
            self._shares.ended(batch.rows)
            if key is not ALONE and not batch.has_streamed:
                # The whole way there and back counts, not only the model: it is what one more batch would cost.
                self.curve.learn(batch.rows, now - batch.entries[0].taken)
                gather.answered(batch.entries, self.waiting, now)
        if self.auto is not None and key is not ALONE:
            is_closed = gather is not None and gather.is_closed
            self.auto.answered(batch, now, slots=self._slots, is_closed=is_closed)
            if gather is not None:
                gather.max_size = self.auto.size(key)
        if self.config.max_running is not None:
            left = self._running[key] - 1
            if left:
                self._running[key] = left
            else:
                del self._running[key]
        if self.auto is not None or self.config.max_running is not None:
            line = self._lines.get(key)
            if line is not None:
                self._note(line)

    def is_full(self) -> bool:
        """Tell whether a whole batch waits, so that waiting any longer gains nothing."""
        if self.auto is not None:
            line = self._first()
            return line is not None and line.rows >= self.auto.size(line.key)
        return self._full > 0

    def may_grow(self) -> bool:
        """Tell whether the next batch, or bundle, has room and nobody has asked that it leave at once."""
        shares = self.config.idle == "gather" or self._bundle_s > self._row_s
        return shares and not self._alone and not self.is_full()

    def next_due(self) -> float | None:
        """Return when `take` should be asked again if nothing arrives before; None if only an arrival can help."""
        gather = self.gather
        if gather is not None and gather.until is not None:
            if self.auto is not None and self._lines:
                return min(gather.until, self._oldest() + self.auto.patience_s)
            return gather.until
        if self._waits:
            # A line that may not run now becomes due when one of its batches is answered, which wakes the driver.
            line = self._first()
            return None if line is None else self._since(line)
        return None

    def _eligible(self, now: float) -> Line | None:
        gather = self.gather
        is_asked = self._counts is not None or (gather is not None and gather.until is not None)
        if is_asked and gather is not None and not self._alone and self._holds(gather, now):
            return None
        if not self._lines:
            return None
        if self._goes and len(self._lines) == 1:
            return next(iter(self._lines.values()))
        line = self._first()
        if line is None or self._since(line) <= now:
            return line
        if self.auto is not None:
            for held in itertools.islice(self._lines.values(), LOOKED_AT):
                self.auto.holds(held.key, held.rows, now)
        return None

    def _holds(self, gather: Gather | Shares, now: float) -> bool:
        """Tell whether a slot that is free waits for clients to return."""
        if not self._lines and self._counts is not None:
            gather.until = None
            return False
        if self.auto is not None and self._lines and self._oldest() + self.auto.patience_s <= now:
            gather.until = None
            return False
        # At most as many as a batch takes waited when a wait began, so few are looked at when it ends.
        waiting = (entry for line in self._lines.values() for entry in line.entries if not entry.taken)
        return gather.holds(self.waiting, now, waiting)

    def _note(self, line: Line) -> None:
        """Note when a line becomes eligible: it is new, or that may be sooner than before."""
        count = len(self._lines)
        if count < 2:
            return
        if len(self._order) > 2 * count + 64:  # most of it does not count any more
            self._order = [note for note in self._order if note[1] == note[2].note and note[2].rows]
            heapq.heapify(self._order)
        for one in self._lines.values() if count == 2 else (line,):
            one.note = next(self._numbers)
            heapq.heappush(self._order, (self._since(one), one.note, one))

    def _first(self) -> Line | None:
        """Of the lines that may run, return the one that is eligible first."""
        lines = self._lines
        if len(lines) == 1:
            self._order.clear()
            line = next(iter(lines.values()))
            return line if self._may_run(line) else None
        order = self._order
        while order and lines:
            noted, number, line = order[0]
            if line.note != number or lines.get(line.key) is not line:
                heapq.heappop(order)
            elif not self._may_run(line):
                heapq.heappop(order)
                line.note = 0
            elif (since := self._since(line)) > noted:
                heapq.heapreplace(order, (since, number, line))
            else:
                return line
        return None

    def _oldest(self) -> float:
        """Return when the oldest entry that waits in a line arrived; there must be one."""
        while True:
            noted, number, line = self._ages[0]
            if self._lines.get(line.key) is not line:
                heapq.heappop(self._ages)
            elif (arrived := self._head(line).arrived) > noted:
                heapq.heapreplace(self._ages, (arrived, number, line))
            else:
                return arrived

    def _since(self, line: Line) -> float:
        due = self._head(line).arrived
        if self._is_ranked:
            due = min(entry.arrived for entry in line.entries if not entry.taken)
        if self.auto is not None:
            return self.auto.due(line.key, line.rows, due)
        if self.config.idle == "wait":
            due += self.config.max_wait_s
        return min(line.full_since, due) if line.rows >= self._max_size else due

    def _may_run(self, line: Line) -> bool:
        limit = self.config.max_running
        return limit is None or self._running.get(line.key, 0) < limit

    @staticmethod
    def _head(line: Line) -> Entry:
        """Return the first entry that still waits; a line in `_lines` always has one."""
        entries = line.entries
        while entries[0].taken:
            entries.popleft()
            line.dead -= 1
        return entries[0]

    def _take_alone(self, now: float) -> EntryBatch | None:
        entry = self._alone.popleft()
        self.waiting -= entry.size
        if entry.deadline <= now:
            entry.taken = NEVER
            return None
        entry.taken = now
        return EntryBatch([entry], ALONE, entry.size)

    def _fill(self, line: Line, now: float, limit: int | None = None) -> EntryBatch | None:
        room = self._max_size
        if room == 1 and self._divide is None:
            return self._take_one(line, now)
        if limit is not None:
            room = min(room, limit)
        if self.config.size_of is not None:
            room = min(room, self.config.size_of(line.key))
        if self._bundle_s:
            room = max(min(room, int(self._bundle_s / self._row_s)), self._head(line).size)
        if self.auto is not None or self._counts is not None:
            head = self._head(line)
            if self._counts is not None:
                room = min(room, self._counts.room(self.waiting))
            if self.auto is not None:
                room = min(room, self.auto.room(line.key, min(line.rows, room), now - head.arrived))
            room = min(max(room, head.size), self._max_size)  # never so small that the first would not fit
        if line.rows <= room and not line.dead:  # the common case: all of it
            rows = line.rows
            taken = list(line.entries)
            expired = False
            for entry in taken:
                entry.taken = now
                if entry.deadline <= now:
                    expired = True
            self.waiting -= rows
            self._full -= rows >= self._max_size
            del self._lines[line.key]
            if not expired:
                return EntryBatch(taken, line.key, rows)
        else:
            taken = self._cut(line, room, now)
        # A late entry is answered by its owner; it must not run.
        alive: list[Entry] = []
        for entry in taken:
            if entry.deadline > now:
                alive.append(entry)
            else:
                entry.taken = NEVER
        return EntryBatch(alive, line.key, sum(entry.size for entry in alive)) if alive else None

    def _take_one(self, line: Line, now: float) -> EntryBatch | None:
        """Take the first entry of a line; all there is to do where nothing is batched."""
        entry = self._head(line)
        line.entries.popleft()
        line.rows -= 1
        self.waiting -= 1
        if line.rows == 0:
            del self._lines[line.key]
            self._full -= 1
        else:
            line.full_since = now
            self._note(line)
        if entry.deadline <= now:
            entry.taken = NEVER
            return None
        entry.taken = now
        return EntryBatch([entry], line.key, 1)

    def _cut(self, line: Line, room: int, now: float) -> list[Entry]:
        """Take as many entries off the front of a line as fit."""
        taken: list[Entry] = []
        self._full -= line.rows >= self._max_size
        queued = line.entries
        while queued:
            entry = queued[0]
            if entry.taken:
                queued.popleft()
                line.dead -= 1
                continue
            if entry.size > room:
                head = self._divide(entry, room) if self._divide is not None and room else None
                if head is not None:
                    line.rows -= room
                    self.waiting -= room
                    head.taken = now
                    taken.append(head)
                break
            queued.popleft()
            room -= entry.size
            line.rows -= entry.size
            self.waiting -= entry.size
            entry.taken = now
            taken.append(entry)
        if line.rows == 0:
            del self._lines[line.key]
        elif line.rows >= self._max_size:
            line.full_since = now
            self._full += 1
            self._note(line)
        return taken


def _insert(entries: deque[Entry], entry: Entry) -> None:
    """Put an entry behind those of its rank and below; it belongs near the end, as late ranks come late."""
    place = len(entries)
    while place and entries[place - 1].rank > entry.rank:
        place -= 1
    entries.insert(place, entry)
