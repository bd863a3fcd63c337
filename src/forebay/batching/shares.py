# SPDX-License-Identifier: Apache-2.0
"""Give each of several slots its share of the clients, and wait for those that were just answered while that pays.

Theory of operation. Where one slot waits for its clients (`gather.py`), several would take them from each other: the
clients of one batch come back to several slots in crumbs. So the rule looks at everybody at once. The population is
what runs, what waits, and the share `rho` of the clients answered within the last 0.6 a that usually is back by then,
where the time of a batch of n rows is a + b n. Each slot aims at its share of that, its target, and takes no more, so
that the others get theirs. A slot with fewer rows than that waits for those that are coming, unless they are too few to
be worth it; at most until the newest release is 0.6 a old, and never longer than a.

Arrivals that are not returning clients are not waited for: where `rho` is small, nothing is, and what waits is shared
among the slots that are idle now. (Leaving something behind for slots that are busy costs 3 to 9 % there.)

What was tried and was worse: to wait only for a whole share, as the missing rows may be with other slots (two slots, a
third of the load from strangers: 0.85 of the best by hand instead of 0.94); to wait for a few while many are there
(0.93 instead of 0.98 where 4 slots have 256 clients); a share that may be exceeded by a fifth or a half.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Final

from forebay.batching.gather import MIN_FIXED_S, releases

if TYPE_CHECKING:
    from collections.abc import Iterable

    from forebay.batching.gather import Curve
    from forebay.types.batch import Entry
    from forebay.types.call import Origin

HORIZON: Final = 0.6
"""How long answered clients are expected, as a share of a batch's fixed cost a; 0.4 measures alike, 1 loses a tenth."""

LEAST: Final = 0.3
"""Share of the target that must be there or coming for a slot to wait."""

WORTH: Final = 0.1
"""As many must be coming, as a share of those that wait already."""

RETURNING: Final = 0.2
"""Share of the answered clients that come back in time from which on they are waited for."""


class Release:
    """The clients of one answered batch."""

    __slots__ = ("at", "missing", "number", "rows")

    def __init__(self, number: int, at: float, rows: int) -> None:
        self.number = number
        self.at = at
        self.rows = rows
        self.missing = rows
        """Rows that have not come back."""


class Shares:
    """Decide how much each of several slots takes, and how long it waits for clients to return."""

    def __init__(self, max_size: int, curve: Curve) -> None:
        self.max_size = max_size
        """Most rows that a slot aims at."""
        self.curve = curve
        self.slots = 1
        """Batches that can run at a time."""
        self.rho = 1.0
        """Share of the answered rows that come back within the horizon."""
        self.until: float | None = None
        """When the slots that wait are to be asked again; None while nothing is waited for."""
        self.nobody: Origin | None = None
        """Stands for all clients that cannot be told apart; None if they are not waited for."""
        self.rows = 0
        """Rows that run."""
        self.batches = 0
        """Batches that run."""
        self.missing = 0
        """Rows that were answered within the horizon and have not come back."""
        self._held_since: float | None = None
        self._releases: deque[Release] = deque()
        self._by_number: dict[int, Release] = {}

    @property
    def is_closed(self) -> bool:
        """Whether arrivals are clients that come back, and nobody else is due."""
        return self.rho >= RETURNING

    def arrived(self, entry: Entry) -> None:
        """Take note of an arrival: is it a client that was answered lately?"""
        origin = entry.origin or self.nobody
        if origin is None or not self.missing:
            return
        release = self._by_number.get(origin.release)
        if release is None:
            return
        if not release.missing:  # an origin with several requests under way: its last release has all of its rows back
            release = next((one for one in self._releases if one.missing), None)
            if release is None:
                return
        rows = min(entry.size, release.missing)
        release.missing -= rows
        self.missing -= rows

    def took(self, rows: int) -> None:
        """Take note that a batch has left the queue."""
        self.rows += rows
        self.batches += 1

    def ended(self, rows: int) -> None:
        """Take note that a batch has come to its end."""
        self.rows -= rows
        self.batches -= 1

    def answered(self, entries: Iterable[Entry], _queued: int, now: float) -> None:
        """Mark the origins of a batch whose answers were written."""
        number = next(releases)
        nobody = self.nobody
        rows = 0
        for entry in entries:
            origin = entry.origin or nobody
            if origin is not None:
                origin.release = number
                rows += entry.size
        if rows:
            release = self._by_number[number] = Release(number, now, rows)
            self._releases.append(release)
            self.missing += rows
        else:  # nobody who could be recognised
            self.rho -= 0.3 * self.rho
        self._forget(now)

    def room(self, waiting: int) -> int:
        """Return how many of the rows that wait a slot takes at most."""
        if self.rho < RETURNING:
            return -(-waiting // max(self.slots - self.batches, 1))
        return self._target(waiting)

    def holds(self, waiting: int, now: float, _entries: Iterable[Entry] = ()) -> bool:
        """Tell whether a slot that is free should wait although rows are there."""
        self._forget(now)
        self.until = None
        coming = self.rho * self.missing
        a = self.curve.a
        if self.rho >= RETURNING and coming >= WORTH * waiting and a >= MIN_FIXED_S:
            target = self._target(waiting)
            if waiting < min(target, waiting + coming) - 0.5 and waiting + coming >= LEAST * target - 0.5:
                if self._held_since is None:
                    self._held_since = now
                until = min(self._releases[-1].at + HORIZON * a, self._held_since + a)
                if until > now:
                    self.until = until
                    return True
        self._held_since = None
        return False

    def _target(self, waiting: int) -> int:
        everybody = self.rows + waiting + self.rho * self.missing
        return max(min(self.max_size, math.ceil(everybody / self.slots - 1e-9)), 1)

    def _forget(self, now: float) -> None:
        """Close the releases that are older than the horizon, and learn from each how many came back."""
        oldest = now - HORIZON * self.curve.a
        while self._releases and self._releases[0].at <= oldest:
            release = self._releases.popleft()
            del self._by_number[release.number]
            self.missing -= release.missing
            share = 1.0 - release.missing / release.rows
            self.rho += (0.1 if share > self.rho else 0.3) * (share - self.rho)
