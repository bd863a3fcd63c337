# SPDX-License-Identifier: Apache-2.0
"""Things that are loaded when they are asked for, kept while there is room, and never taken from who uses them.

Theory of operation. A `Shelf` says what stays; this adds threads. Who asks first loads, in their own thread and without
a lock that others need; who asks for the same thing meanwhile waits for that, and shares what comes of it, also a
failure. The next one to ask after a failure tries again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Generic, TypeVar

from forebay.errors import Unavailable
from forebay.repository.shelf import Full, Shelf, ShelfStatistics
from forebay.types.user_exceptions import caught

V = TypeVar("V")


class NoRoom(Unavailable):
    """All that is kept is in use."""


class Lease(Generic[V]):
    """The use of something that stays where it is until this is given back; `with` does so.

    Attributes:
        value: What is used.
    """

    def __init__(self, value: V, give_back: Callable[[], None]) -> None:
        self.value = value
        self._give_back: Callable[[], None] | None = give_back

    def __enter__(self) -> V:
        return self.value

    def __exit__(self, *_error: object) -> None:
        self.release()

    def release(self) -> None:
        """Give it back; the second time nothing happens."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _Loading:
    """Something that a thread is loading for all who ask."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_over = threading.Event()
        self.problem: BaseException | None = None


class Cache(Generic[V]):
    """Keeps things by a text that names them, for all threads."""

    def __init__(
        self,
        what: str,
        unload: Callable[[V], None] = lambda _value: None,
        *,
        max_count: int | None = None,
        max_bytes: int | None = None,
        may_exceed: bool = False,
    ) -> None:
        """Make it empty.

        Args:
            what: What its things are called together, for messages.
            unload: Called with what has left, in the thread that made it leave; must not raise.
            max_bytes: How large they may be together.
            may_exceed: Whether something is loaded although all that is there is in use. What is too much then leaves
                as soon as nobody uses it.
        """
        self._what = what
        self._unload = unload
        self._may_exceed = may_exceed
        self._lock = threading.Lock()
        self._shelf: Shelf[str] = Shelf(max_count, max_bytes)
        self._values: dict[str, V] = {}
        self._loading: dict[str, _Loading] = {}

    def statistics(self) -> ShelfStatistics:
        """Return a snapshot."""
        with self._lock:
            return self._shelf.statistics()

    def __contains__(self, key: str) -> bool:
        """Tell whether it is there, loaded."""
        return key in self._values

    def take(
        self,
        key: str,
        size: int,
        load: Callable[[], V],
        *,
        timeout_s: float | None = None,
        beside: Collection[str] = (),
    ) -> Lease[V]:
        """Return the use of a thing, which is loaded if it is not there.

        Args:
            load: Loads it; what it raises goes through, to all who wait.
            timeout_s: How long somebody else's loading is waited for.
            beside: What is in use and does not take its room: what whoever asks uses already, and what it replaces.

        Raises:
            NoRoom: If there is no room for it.
            Unavailable: If it was not loaded in time.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:
                loading = self._loading.get(key)
                if loading is None:
                    self._shelf.revive(key)  # it was to leave, is still in use, and is wanted again
                    if self._shelf.take(key):
                        return Lease(self._values[key], lambda: self._release(key))
                    leaving = self._admit(key, size, beside)
                    mine = self._loading[key] = _Loading()
                    break
            if loading.thread == threading.get_ident():
                raise Unavailable(f"{self._what}: what is being loaded asks for itself")
            if not loading.is_over.wait(None if until is None else max(until - time.monotonic(), 0.0)):
                raise Unavailable(f"{self._what}: another process is still loading this; try again later")
            if loading.problem is not None:
                try:
                    raise loading.problem.with_traceback(None)
                finally:
                    del loading  # what is raised refers to this frame
        while leaving:
            self._unload(leaving.pop())  # nothing here keeps it in memory while its successor is loaded
        value, mine.problem = caught(load)
        with self._lock:
            del self._loading[key]
            if mine.problem is None:
                self._values[key] = value
            else:
                self._shelf.discard(key)
        mine.is_over.set()
        if mine.problem is not None:
            try:
                raise mine.problem
            finally:
                del mine  # as above; the frame of `load` may hold half a model
        return Lease(value, lambda: self._release(key))

    def check(self, key: str, is_good: Callable[[V], bool]) -> None:
        """Evict something that is no good any more, unless it is in use; the next request for it loads it anew."""
        value = self._values.get(key)
        if value is None or is_good(value):
            return
        with self._lock:
            if self._values.get(key) is not value or not self._shelf.retire(key):
                return
            del self._values[key]
        self._unload(value)

    def put(self, key: str, size: int, value: V) -> None:
        """Keep something that is there already."""
        with self._lock:
            self._shelf.admit(key, size, may_exceed=True)
            self._shelf.give_back(key)
            self._values[key] = value

    def keep_only(self, keys: Collection[str]) -> None:
        """Let everything else leave, as soon as nobody uses it; what is being loaded is used by who loads it."""
        self._leave(lambda: [key for key in self._shelf.keys if key not in keys and self._shelf.retire(key)])

    def trim(self) -> None:
        """Let leave what is too much."""
        self._leave(self._shelf.trim)

    def _admit(self, key: str, size: int, beside: Collection[str]) -> list[V]:
        try:
            gone = self._shelf.admit(key, size, beside=beside, may_exceed=self._may_exceed)
        except Full:
            held = self._shelf.statistics()
            msg = f"{self._what}: there is no room, all {held.count} that are kept are in use; try again later"
            raise NoRoom(msg) from None
        return [self._values.pop(one) for one in gone]

    def _release(self, key: str) -> None:
        self._leave(lambda: [*([key] if self._shelf.give_back(key) else ()), *self._shelf.trim()])

    def _leave(self, gone: Callable[[], Iterable[str]]) -> None:
        """Unload what is gone, which is asked under the lock; what unloads may take long, and does not hold it."""
        with self._lock:
            leaving = [self._values.pop(key) for key in gone()]
        for value in leaving:
            self._unload(value)
