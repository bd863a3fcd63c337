# SPDX-License-Identifier: Apache-2.0
"""What is kept, who uses it, and what leaves when there is no room: a policy. No thread, no clock, nothing is loaded.

Theory of operation. What is kept has a key, a size and leases. There is room for so many and for so many bytes. What is
to be added counts from the moment it is admitted, before it is loaded, so that the bounds hold all the time; those who
were least recently used leave for it. What has a lease stays. What nobody shall get any more (`retire`) is handed out
no longer and leaves with its last lease; it counts until then. A lease is taken when something is admitted, and each
time it is used; it is given back once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from typing import Generic, TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)


class Full(Exception):
    """There is no room, and all that is there is in use."""


class _Kept(msgspec.Struct):
    size: int
    leases: int = 1
    is_retired: bool = False


class ShelfStatistics(msgspec.Struct, frozen=True):
    """What a shelf tells about itself.

    Attributes:
        count: What is kept, also what is about to leave.
        bytes: Their sizes together.
        hits: How often something was used that was there.
        misses: How often something was admitted.
        evictions: How much left to make room.
    """

    count: int
    bytes: int
    hits: int
    misses: int
    evictions: int


class Shelf(Generic[K]):
    """Keeps what was used last."""

    def __init__(self, max_count: int | None = None, max_bytes: int | None = None) -> None:
        """Say how much there is room for; None for any number."""
        self.max_count = max_count
        self.max_bytes = max_bytes
        self._kept: dict[K, _Kept] = {}  # in the order of use
        self._bytes = 0
        self._hits = self._misses = self._evictions = 0

    @property
    def keys(self) -> list[K]:
        """All that is kept, the least recently used first."""
        return list(self._kept)

    def statistics(self) -> ShelfStatistics:
        """Return a snapshot."""
        return ShelfStatistics(len(self._kept), self._bytes, self._hits, self._misses, self._evictions)

    def take(self, key: K) -> bool:
        """Take a lease of what is there; False if it is not, or shall not be used any more."""
        found = self._kept.get(key)
        if found is None or found.is_retired:
            return False
        found.leases += 1
        self._hits += 1
        self.touch(key)
        return True

    def touch(self, key: K) -> None:
        """Note that it was used."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._kept[key] = found

    def admit(
        self, key: K, size: int, *, busy: Collection[K] = (), beside: Collection[K] = (), may_exceed: bool = False
    ) -> list[K]:
        """Make room for something that is not there, and take a lease of it.

        Args:
            size: Its size in bytes.
            busy: What is in use without a lease.
            beside: What stands in its way only as far as it can leave.
            may_exceed: Whether it is let in although there is no room.

        Returns:
            What has left for it.

        Raises:
            Full: If there is no room for it; nothing has left then.
        """
        assert key not in self._kept
        leaving = self._victims(1, size, busy)
        gone = {*leaving, *(one for one in beside if one in self._kept)}
        if not may_exceed and self._is_over(1 - len(gone), size - sum(self._kept[one].size for one in gone)):
            raise Full
        self._leave(leaving)
        self._kept[key] = _Kept(size)
        self._bytes += size
        self._misses += 1
        return leaving

    def trim(self) -> list[K]:
        """Return what leaves because there is more than there is room for."""
        leaving = self._victims(0, 0, ())
        self._leave(leaving)
        return leaving

    def give_back(self, key: K) -> bool:
        """Give a lease back; True if it has left with that."""
        found = self._kept[key]
        assert found.leases > 0
        found.leases -= 1
        return self._gone_if_retired(key, found)

    def retire(self, key: K) -> bool:
        """Hand it out no longer; True if it has left with that."""
        found = self._kept.get(key)
        if found is None:
            return False
        found.is_retired = True
        return self._gone_if_retired(key, found)

    def revive(self, key: K) -> None:
        """Hand it out again after all, if it is still there."""
        found = self._kept.get(key)
        if found is not None:
            found.is_retired = False

    def discard(self, key: K) -> None:
        """Forget what could not be loaded, or is gone."""
        found = self._kept.pop(key, None)
        if found is not None:
            self._bytes -= found.size

    def _gone_if_retired(self, key: K, found: _Kept) -> bool:
        if found.is_retired and not found.leases:
            self.discard(key)
            return True
        return False

    def _victims(self, more: int, size: int, busy: Collection[K]) -> list[K]:
        leaving: list[K] = []
        for key, kept in self._kept.items():
            if not self._is_over(more, size):
                break
            if not kept.leases and key not in busy:
                leaving.append(key)
                more -= 1
                size -= kept.size
        return leaving

    def _is_over(self, more: int, size: int) -> bool:
        return (self.max_count is not None and len(self._kept) + more > self.max_count) or (
            self.max_bytes is not None and self._bytes + size > self.max_bytes
        )

    def _leave(self, keys: Iterable[K]) -> None:
        for key in keys:
            self.discard(key)
            self._evictions += 1
