# SPDX-License-Identifier: Apache-2.0
"""Which versions of repositories are in memory, which of them were used last, and what leaves for another one.

Who asks over the fast lane takes no lease. What was used since the last look is known by the counters of endpoints, and
what has open requests stays, which is looked at only when something has to leave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from forebay.repository.shelf import Shelf

if TYPE_CHECKING:
    from forebay.repository.listing import Revision
    from forebay.server.served import Served

Key = tuple[str, int]
"""A model and the number of its version."""


class StockStatistics(msgspec.Struct, frozen=True):
    """What a stock tells about its memory.

    Attributes:
        loaded: Versions in memory.
        bytes: Bytes of their files.
        hits: Requests whose version was there.
        misses: Requests that waited until theirs was loaded.
        loads: Versions that were let in.
        evictions: Versions that left to make room.
        failures: Versions that could not be loaded.
        waiting: Requests that wait for a load.
    """

    loaded: int
    bytes: int
    hits: int
    misses: int
    loads: int
    evictions: int
    failures: int
    waiting: int


class StockMemory:
    """Knows what is loaded; on the loop.

    Attributes:
        loaded: The revisions in memory.
    """

    def __init__(
        self, ready: Callable[[Key], Served | None], max_models: int | None = None, max_bytes: int | None = None
    ) -> None:
        """Begin with nothing.

        Args:
            ready: Returns what answers for a version.
            max_models: How many there is room for; None for any number.
            max_bytes: How many bytes of files there is room for.
        """
        self.loaded: dict[Key, Revision] = {}
        self._ready = ready
        self._shelf: Shelf[str] = Shelf(max_models, max_bytes)
        self._by_id: dict[str, Key] = {}
        self._counts: dict[str, int] = {}
        self._answered = self._misses = 0

    def statistics(self, failures: int, waiting: int) -> StockStatistics:
        """Return a snapshot, with what only the stock knows."""
        for key, revision in self.loaded.items():
            self._look_at(key, revision)
        kept = self._shelf.statistics()
        hits = max(self._answered - self._misses, 0)
        counts = (kept.count, kept.bytes, hits, self._misses, kept.misses, kept.evictions)
        return StockStatistics(*counts, failures, waiting)

    def versions_of(self, name: str) -> list[Key]:
        """Return which versions of a model are there."""
        return [key for key in self.loaded if key[0] == name]

    def take(self, revision: Revision) -> bool:
        """Take a lease of a revision; False if it is not there, or to leave."""
        return self._shelf.take(revision.id)

    def give_back(self, key: Key, revision: Revision, *, has_waited: bool) -> None:
        """Give a lease back, after a request."""
        self._misses += has_waited
        if revision.id in self._by_id:
            self._look_at(key, revision)
        self._shelf.give_back(revision.id)

    def admit(self, revision: Revision, *, may_exceed: bool) -> list[Key]:
        """Make room for a revision and take a lease of it, which ends with `arrived` or `failed`.

        Returns:
            What leaves for it.

        Raises:
            Full: If all that is there is in use.
        """
        self._shelf.revive(revision.id)  # somebody may still be using it, though it was to leave
        if self._shelf.take(revision.id):
            return []
        busy: set[str] = set()
        for key, one in self.loaded.items():
            served = self._look_at(key, one)
            if served is not None and served.endpoint.in_flight:
                busy.add(one.id)
        leaving = self._shelf.admit(revision.id, revision.size, busy=busy, may_exceed=may_exceed)
        return [self._by_id[one] for one in leaving]

    def failed(self, revision: Revision) -> None:
        """Note that what was admitted could not be loaded."""
        self._shelf.retire(revision.id)
        self._shelf.give_back(revision.id)

    def arrived(self, key: Key, revision: Revision) -> None:
        """Note that what was admitted is there; what was there before has been forgotten."""
        self.loaded[key] = revision
        self._by_id[revision.id] = key
        self._counts[revision.id] = _count(self._ready(key))  # it may go on counting where another one has stopped
        self._shelf.give_back(revision.id)

    def forget(self, key: Key) -> Revision:
        """Withdraw a version; it counts as long as it is leased."""
        revision = self.loaded.pop(key)
        self._look_at(key, revision)
        self._shelf.retire(revision.id)
        del self._by_id[revision.id], self._counts[revision.id]
        return revision

    def left(self, revision: Revision) -> None:
        """Give back the lease of an endpoint that was leaving, and is gone."""
        self._shelf.give_back(revision.id)

    def _look_at(self, key: Key, revision: Revision) -> Served | None:
        """Note whether a version was used since the last look; returns what answers for it."""
        served = self._ready(key)
        used = max(_count(served) - self._counts[revision.id], 0)
        if used:
            self._counts[revision.id] += used
            self._answered += used
            self._shelf.touch(revision.id)
        return served


def _count(served: Served | None) -> int:
    """Return how many requests an endpoint has answered."""
    return 0 if served is None else sum(served.endpoint.metrics.codes.values())
