# SPDX-License-Identifier: Apache-2.0
"""Moments for clients that were refused: one after the other, at the rate at which what they lack comes back.

Theory of operation. A ticket is the moment given to the client that was refused last. The next one is told a moment
later, by as much as what it asks for takes to come back. So what is refused in a burst does not return in one. A
ticket never goes back, and is at most two capacities ahead. Clients that get no further place in that time share the
second half of it, by the golden ratio: such moments lie apart however many there are.

More clients than that would return too early, and ask again and again. So the range doubles when more is refused than
is answered. If as much is refused after that, those are not clients that wait until they are told to: they would only
keep the others away for longer, and the range is two capacities again.

Sans-I/O: no clock, no loop. `batching/tickets.py` has it for a queue, `token_bucket.py` for a limit.
"""

from __future__ import annotations

from typing import Final

MOST_S: Final = 30.0
"""No ticket is further ahead."""

CAPACITIES: Final = 2.0
"""A ticket is at most so many capacities ahead, as long as no further range has proved its worth."""

IDLE: Final = 0.1
"""It is halved where less is refused, beside what is answered."""

WORTH: Final = 0.8
"""A range does that where at most so much of what was refused before is refused."""

GOLDEN: Final = 0.6180339887498949

_NEVER: Final = float("inf")


class RetryTickets:
    """Gives tickets."""

    __slots__ = ("_before", "_beyond", "_capacities", "_capacity", "_since", "_units")

    def __init__(self, capacity: float) -> None:
        """Begin without having refused anything; `capacity` is what can be had at once after a quiet time."""
        self._capacity = capacity
        self._beyond = 0.0
        self._capacities = CAPACITIES
        self._units = 0.0
        """What was refused since then."""
        self._since = 0.0
        self._before = _NEVER
        """What was refused beside what was answered, before the range was doubled."""

    def next(
        self, last: float, size: float, unit_s: float, now: float, *, after_s: float = 0.0, share: float = 1.0
    ) -> tuple[float, float]:
        """Return a ticket, and the moment that the client is told: mostly the same.

        Args:
            last: The ticket before it.
            size: Units that the client asked for.
            unit_s: Seconds in which a unit comes back.
            now: The time.
            after_s: How long the client would be refused in any case.
            share: What comes back for it, of all.
        """
        range_s = self._range(size, now, unit_s)
        latest = now + range_s
        ticket = max(last, min(max(last, now + after_s) + size * unit_s / share, latest))
        if last < ticket < latest:
            return ticket, ticket
        self._beyond = (self._beyond + GOLDEN) % 1.0
        return ticket, latest - self._beyond * range_s / 2

    def _range(self, size: float, now: float, unit_s: float) -> float:
        """Return how many seconds ahead a ticket may be, now that so many units more are refused."""
        range_s = min(self._capacities * self._capacity * unit_s, MOST_S)
        self._units += size
        spent_s = now - self._since
        if spent_s < 2 * range_s:
            return range_s
        refused = self._units * unit_s / spent_s
        self._units, self._since = 0.0, now
        before, self._before = self._before, _NEVER
        if refused < IDLE or refused > WORTH * before:
            self._capacities = max(self._capacities / 2, CAPACITIES) if refused < IDLE else CAPACITIES
        elif refused > 1.0 and range_s < MOST_S:
            self._capacities *= 2
            self._before = refused
        return min(self._capacities * self._capacity * unit_s, MOST_S)
