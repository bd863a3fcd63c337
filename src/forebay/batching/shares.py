# SPDX-License-Identifier: Apache-2.0
"""Give each of several slots its share of the clients, and wait for clients just answered while that pays.

Theory of operation. One slot waits for its own clients (`gather.py`). Several slots would take clients from each other:
those of one batch would come back to several slots, a few to each. So the rule looks at everybody at once. The time of
a batch of n rows is a + b n. The population is all that run, all that wait, and those answered within the last a that
have not come back. Each slot takes at most its share of that, its target, so that the others get theirs.

A slot with fewer rows than that waits while the next one saves more than waiting for it costs. Of the clients answered
within the last a the share `rho` is back by the end of it, on average `tau` after its answer; m of them are still to
come, so the next is due in tau / m. A batch of n takes a / n for each of its rows beside b: one more of them pays for a
slot that stands idle for as long. So it waits while tau / m <= a / n, at most until the newest release is a old, and
never longer than a.

Arrivals that are not returning clients are not waited for: where `rho` is small, nothing is, and what waits is shared
among the slots that are idle now. (Leaving something behind for slots that are busy costs 3 to 9 % there.)

What was tried and was worse: to wait only for a whole share, as the missing rows may be with other slots (two slots, a
third of the load from strangers: 0.85 of the best by hand instead of 0.94); to wait for 0.6 a whenever those to come
are a tenth of those there, and to count on `rho` of all that are out, however many are back (0.963 instead of 0.976
where clients return within 2 a); a share that may be exceeded by a fifth or a half.

Sans-I/O: no clock, no loop. `queue.py` calls it, every step takes `now` in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from forebay.batching.gather import MIN_FIXED_S, Curve, GatherRule, releases
from forebay.batching.lines import NEVER, Line

if TYPE_CHECKING:
    from forebay.batching.queue import BatchQueue
    from forebay.types.batch import Entry

FORGET: Final = 0.9
"""Weight that the delays of older returns keep with each release."""

RETURNING: Final = 0.2
"""Share of the answered clients that come back in time from which on they are waited for."""


class Release:
    """The clients of one answered batch."""

    __slots__ = ("at", "missing", "moments", "number", "rows")

    def __init__(self, number: int, at: float, rows: int) -> None:
        self.number = number
        self.at = at
        self.rows = rows
        self.missing = rows
        """Rows that have not come back."""
        self.moments = 0.0
        """When the others did, all in all."""


class Shares(GatherRule):
    """Decide how much each of several slots takes, and how long it waits for clients to return."""

    has_plans = True
    closed_from = RETURNING

    def __init__(self, max_size: int, curve: Curve, patience_s: float = NEVER) -> None:
        """Begin without having seen a client."""
        super().__init__(max_size, curve, patience_s)
        self.missing = 0
        """Rows that were answered within the horizon, the last a seconds, and have not come back."""
        self._answered = 0
        """Rows that were answered within the horizon."""
        self._returned = 0.0
        self._delays_s = 0.0
        """Rows that came back, and how long each took, all in all; older ones count less."""
        self._held_since: float | None = None
        self._releases: deque[Release] = deque()
        self._by_number: dict[int, Release] = {}

    def arrived(self, entry: Entry) -> None:
        """Note an arrival, and whether it is a client that was answered lately."""
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
        rows = entry.size
        if rows > release.missing:  # noqa: PLR1730 - a call of `min` costs as much as all the rest
            rows = release.missing
        release.missing -= rows
        release.moments += rows * entry.arrived
        self.missing -= rows

    def released(self, entries: Sequence[Entry], queue: BatchQueue, now: float) -> None:
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
            self._answered += rows
        else:  # nobody who could be recognised
            self.rho -= 0.3 * self.rho
        self._forget(now)

    @property
    def held_since(self) -> float | None:
        """Since when it waits; None if it does not."""
        return self._held_since

    def interrupt(self) -> None:
        """Wait no longer, as if it had waited for as long as it may."""
        super().interrupt()
        if self._held_since is not None:
            self._held_since = -NEVER

    def room(self, line: Line, most: int, queue: BatchQueue, now: float) -> int:
        """Return how many of the rows that wait a slot takes at most."""
        if self.rho < RETURNING:
            return min(most, -(-queue.waiting // max(queue.slots - queue.running, 1)))
        return min(most, self._target(queue))

    def pays(self, queue: BatchQueue, now: float) -> bool:
        """Tell whether a slot that is free should wait although rows are there."""
        self.until = None
        waiting = queue.waiting
        if not waiting:
            return False
        self._forget(now)
        a = self.curve.a
        if self.missing and self.rho >= RETURNING and a >= MIN_FIXED_S:
            coming = self.missing - (1.0 - self.rho) * self._answered
            pays = a * coming * self._returned >= waiting * self._delays_s
            if pays and waiting < min(self._target(queue), waiting + coming) - 0.5:
                if self._held_since is None:
                    self._held_since = now
                until = min(self._releases[-1].at, self._held_since) + a
                if until > now:
                    self.until = until
                    return True
        self._held_since = None
        return False

    def _target(self, queue: BatchQueue) -> int:
        everybody = queue.running_rows + queue.waiting + self.missing
        return max(min(self.max_size, -(-everybody // queue.slots)), 1)

    def _forget(self, now: float) -> None:
        """Close the releases that are older than the horizon, and learn from each how many came back."""
        oldest = now - self.curve.a
        while self._releases and self._releases[0].at <= oldest:
            release = self._releases.popleft()
            del self._by_number[release.number]
            self.missing -= release.missing
            self._answered -= release.rows
            returned = release.rows - release.missing
            self._returned = FORGET * self._returned + returned
            self._delays_s = FORGET * self._delays_s + release.moments - returned * release.at
            share = returned / release.rows
            self.rho += (0.1 if share > self.rho else 0.3) * (share - self.rho)
