# SPDX-License-Identifier: Apache-2.0
"""What could not be loaded, and when it is tried again: after a pause that doubles, at once when it is another thing.

No thread, no clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

import msgspec

from forebay.errors import ForebayError

MAX_PAUSE_S: Final = 60.0
"""Longest pause before something that could not be loaded is tried again."""

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Refused(msgspec.Struct, Generic[V]):
    """Something that was tried and not taken.

    Attributes:
        pause_s: How long it rests.
        again_s: When it may be tried again, on the clock that only goes forward.
        is_new: Whether it was tried for the first time.
    """

    what: V
    error: ForebayError
    pause_s: float
    again_s: float
    is_new: bool = True


class Refusals(Generic[K, V]):
    """What was refused last, of each of several things."""

    def __init__(self, first_pause_s: float) -> None:
        """Say how long something rests that was refused for the first time."""
        self._first_pause_s = first_pause_s
        self._all: dict[K, Refused[V]] = {}

    def refuse(self, key: K, what: V, error: ForebayError, now: float, *, is_final: bool = False) -> Refused[V]:
        """Note that something was not taken; if that `is_final`, trying again cannot help."""
        before = self.of(key, what)
        pause_s = self._first_pause_s if before is None else min(before.pause_s * 2, MAX_PAUSE_S)
        again_s = float("inf") if is_final else now + pause_s
        found = self._all[key] = Refused(what, error, pause_s, again_s, before is None)
        return found

    def of(self, key: K, what: V) -> Refused[V] | None:
        """Return the refusal of this very thing."""
        found = self._all.get(key)
        return found if found is not None and found.what == what else None

    def is_resting(self, key: K, what: V, now: float) -> bool:
        """Tell whether it was refused, and is not to be tried again yet."""
        found = self.of(key, what)
        return found is not None and now < found.again_s

    def forget(self, key: K) -> bool:
        """Forget what was refused; tells whether anything was."""
        return self._all.pop(key, None) is not None

    def __iter__(self) -> Iterator[Refused[V]]:
        return iter(self._all.values())

    @property
    def keys(self) -> list[K]:
        """Of whom something was refused."""
        return [*self._all]
