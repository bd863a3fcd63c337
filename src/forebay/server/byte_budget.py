# SPDX-License-Identifier: Apache-2.0
"""The memory that requests and their unsent answers may take: a budget of the server, and one of each connection.

Theory of operation. Every connection, of whatever protocol, has an account as soon as it holds more than a little. In
it are three kinds of bytes: those of a request that is arriving, those of a request that waits or is being worked on,
and those of an answer that the client has not taken yet. The first and the last wait for the client, and a hostile one
lets them wait for ever. So when all accounts together exceed the budget of the server, room is made in this order:

1. Clients that do not read: connections with unread answers that would need more than `PATIENCE_S` to take the rest at
   the pace at which they have taken some so far. The slowest is cut off.
2. The connection with the most bytes of an arriving request has that request refused. This is also what keeps new
   requests out while the others fill the budget.
3. If unread answers alone exceed the budget, the slowest client is cut off, however short that time is.

A client that reads as it should is therefore not hurt by one that does not, and an answer that was computed is
delivered if its client takes it. What a connection holds below `SMALL_BYTES` is not counted: the number of connections
bounds it, and most requests are so small that counting them would cost more than the budget is worth.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from forebay.errors import Unavailable

SMALL_BYTES: Final = 16 * 1024
"""A request, a head or an answer that is no longer is not counted."""
GRACE_S: Final = 0.25
"""How old an unread answer is before the pace of its client says anything."""
PATIENCE_S: Final = 30.0
"""A client that needs longer than this to take the rest of its answers, at its pace, does not read."""


class Holder(Protocol):
    """A connection that has an account."""

    def refuse_arriving(self, error: Unavailable) -> None:
        """Refuse the request that is arriving, or the one with the most bytes; its bytes are released."""
        ...

    def drop_unread(self, error: Unavailable) -> None:
        """Give up answers that the client does not take; their bytes are released."""
        ...

    def count_unread(self) -> None:
        """Tell the account how much the client has not taken by now."""
        ...


class ByteAccount:
    """What one connection holds.

    Attributes:
        arriving: Bytes of requests that have not arrived whole.
        working: Bytes of requests that wait for a worker or are with one.
        unread: Bytes of answers that the client has not taken.
    """

    __slots__ = ("_budget", "_max_bytes", "_owner", "arriving", "since", "taken", "unread", "working")

    def __init__(self, budget: ByteBudget, owner: Holder | None, max_bytes: int) -> None:
        self._budget = budget
        self._owner = owner
        self._max_bytes = max_bytes
        self.arriving = self.working = self.unread = 0
        self.since = 0.0
        self.taken = 0

    @property
    def size(self) -> int:
        """All that the connection holds."""
        return self.arriving + self.working + self.unread

    def is_full(self) -> bool:
        """Tell whether the connection may begin no further request until it has taken some of its answers."""
        return self.size > self._max_bytes

    def full(self) -> Unavailable:
        """Return the error for a request that comes while this is so."""
        return Unavailable(
            f"expected at most {self._max_bytes} bytes of requests and unread answers on a connection "
            f"(--max-connection-bytes), got {self.size}; read the answers first"
        )

    def arrive(self, size: int) -> None:
        """Count bytes of a request that is arriving; some request may be refused for it, also this one."""
        budget = self._budget
        if not size:
            return
        if not self.arriving:
            budget.arriving[self] = None
        self.arriving += size
        budget.held_bytes += size
        if self.size > self._max_bytes and self._owner is not None:
            self._owner.refuse_arriving(self.full())
        elif budget.is_exceeded():
            budget.make_room(for_arriving=True)

    def forget_arriving(self, size: int) -> None:
        """Release bytes of an arriving request: it was refused, or is complete."""
        self.arriving -= size
        self._budget.held_bytes -= size
        if not self.arriving:
            self._budget.arriving.pop(self, None)

    def work(self, size: int) -> None:
        """Count bytes of a request that is complete, until `release`."""
        self.working += size
        self._budget.held_bytes += size

    def release(self, size: int) -> None:
        """Release bytes of a request that was answered."""
        self.working -= size
        self._budget.held_bytes -= size

    def set_unread(self, size: int, *, dropped: int = 0) -> None:
        """Count the bytes of answers that are unread now; `dropped` is how many were given up since the last time."""
        budget, before = self._budget, self.unread
        if size == before:
            return
        if not before:
            self.since, self.taken = budget.clock(), 0
            budget.unread[self] = None
        self.unread = size
        budget.held_bytes += size - before
        budget.unread_bytes += size - before
        if size < before:
            self.taken += max(before - size - dropped, 0)
            if not size:
                del budget.unread[self]
        elif budget.is_exceeded():
            budget.make_room_soon()

    def rest_s(self, now: float) -> float:
        """Return how long the client needs for the rest of its answers at the pace at which it took some so far."""
        return self.unread * (now - self.since) / max(self.taken, 1)

    def does_not_read(self, now: float) -> bool:
        """Tell whether that is too long, and the answers are old enough to tell."""
        return now - self.since >= GRACE_S and self.rest_s(now) > PATIENCE_S

    def close(self) -> None:
        """Release everything: the connection is closed."""
        self._owner = None
        self.forget_arriving(self.arriving)
        self.release(self.working)
        self.set_unread(0)

    def refuse_arriving(self, error: Unavailable) -> None:
        """Have the connection refuse a request that is arriving."""
        if self._owner is not None:
            self._owner.refuse_arriving(error)

    def drop_unread(self, error: Unavailable) -> None:
        """Have the connection give up answers."""
        if self._owner is not None:
            self._owner.drop_unread(error)

    def count_unread(self) -> None:
        """Have the connection tell how much its client has not taken by now."""
        if self._owner is not None:
            self._owner.count_unread()


class ByteBudget:
    """What all connections of a server hold; lives on its loop, only `take` and `give` are for any thread.

    Attributes:
        max_bytes: The budget.
        held_bytes: What all accounts hold.
        unread_bytes: How much of it is unread answers.
        staged_bytes: What is held beside them: bodies that were unpacked, and those that came over another server.
        arriving: Accounts with requests that are arriving.
        unread: Accounts with unread answers.
        clock: Tells the time, in seconds.
        call_soon: Calls a function in the next turn of the loop. A connection must not be cut off while it writes.
    """

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.clock: Callable[[], float] = time.monotonic
        self.call_soon: Callable[[Callable[[], None]], object] = _never
        self._is_due = False
        self.held_bytes = self.unread_bytes = 0
        self.arriving: dict[ByteAccount, None] = {}
        self.unread: dict[ByteAccount, None] = {}
        self.staged_bytes = 0
        self._lock = threading.Lock()

    def open(self, owner: Holder | None, max_bytes: int) -> ByteAccount:
        """Open the account of a connection, which may hold so much; None if it is closed and holds nothing."""
        return ByteAccount(self, owner, max_bytes)

    def is_exceeded(self) -> bool:
        """Tell whether more is held than the budget allows."""
        return self.held_bytes + self.staged_bytes > self.max_bytes

    def exceeded(self) -> Unavailable:
        """Return the error for a request that exceeds the budget."""
        return Unavailable(
            f"requests and unread answers may have {self.max_bytes} bytes together (--max-buffered-bytes), this one "
            "would exceed them; try again later"
        )

    def make_room_soon(self) -> None:
        """Release bytes in the next turn of the loop."""
        if not self._is_due:
            self._is_due = True
            self.call_soon(self._make_room_now)

    def _make_room_now(self) -> None:
        self._is_due = False
        self.make_room()

    def make_room(self, *, for_arriving: bool = False) -> None:
        """Release bytes if too many are held; with `for_arriving` a request that is arriving may be refused for it."""
        now = self.clock()
        if self.is_exceeded():  # connections tell now and then what was taken, which says nothing of a pace
            for account in list(self.unread):
                account.count_unread()
        while self.is_exceeded():
            lazy = [account for account in self.unread if account.does_not_read(now)]
            if not lazy or not self._drop_slowest(lazy, now):
                break
        if for_arriving and self.arriving and self.is_exceeded():  # who was cut off may have been the only one
            largest = max(self.arriving, key=lambda account: account.arriving)
            largest.refuse_arriving(self.exceeded())
        while self.unread_bytes > self.max_bytes:
            if not self._drop_slowest(self.unread, now):
                break

    def _drop_slowest(self, accounts: Iterable[ByteAccount], now: float) -> bool:
        """Give up answers of the client that needs the longest for them; returns whether that has released any."""
        before = self.held_bytes
        slowest = max(accounts, key=lambda account: (account.rest_s(now), account.unread))
        slowest.drop_unread(
            Unavailable(
                f"the client does not read {slowest.unread} bytes of answers, and the server holds more than "
                f"{self.max_bytes} bytes (--max-buffered-bytes)"
            )
        )
        return self.held_bytes < before

    # Bodies that are read in steps beside the loop

    def take(self, size: int) -> None:
        """Count bytes that a thread has unpacked; raises an `Unavailable` if they exceed the budget."""
        with self._lock:
            if self.held_bytes + self.staged_bytes + size > self.max_bytes:
                raise self.exceeded()
            self.staged_bytes += size

    def give(self, size: int) -> None:
        """Release such bytes."""
        with self._lock:
            self.staged_bytes -= size


def _never(_function: Callable[[], None]) -> None:
    """Stand in for a loop until a port has one; the sweep of that port makes room then."""
