# SPDX-License-Identifier: Apache-2.0
"""The seats of requests that were handed on: those that left together sit together, and each ends by itself.

No loop here, no socket. Names of one bundle are numbers in a row, so that a name tells which request it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.workers.pools.seating import Seating, Sitting

if TYPE_CHECKING:
    from forebay.types.batch import Done, Entry, EntryBatch
    from forebay.types.call import Outcome

SEATS: Final = 1 << 40
"""Seats of a link: what bounds them is the owner's room."""


_RANGE: Final = 1 << 32
_ranges: Final = itertools.count(0, _RANGE)
"""Where names begin: a model that is asked anew by the same link must not call a request as one that still runs."""


class RequestSeats(Seating):
    """The requests that have a seat at an owner."""

    free: int

    def __init__(self, allow: Callable[[Sitting, int], object], leave: Callable[[int], object]) -> None:
        """Begin with all seats free.

        Args:
            allow: Tells the owner that there is room for so many more parts of a streamed answer.
            leave: Tells it that nobody waits for the request of a name.
        """
        super().__init__(SEATS, allow, lambda _: None)
        self._leave_seat = leave
        self._names: dict[Entry, int] = {}
        self._next = next(_ranges) + 1

    def join(self, batch: EntryBatch, done: Done, name: int | None = None) -> Sitting:
        """Seat the requests of a batch under names in a row, of which the sitting has the first."""
        first = self._next if name is None else name
        entries = batch.entries
        sitting = Sitting(batch, done, self, first)
        names = range(first, first + len(entries))
        self._next = names.stop
        self.open.update(dict.fromkeys(names, sitting))
        self._names.update(zip(entries, names, strict=True))
        self.free -= batch.rows
        batch.attempts += 1
        return sitting

    def identify(self, name: int, request_id: str, cost_s: float = 0.0) -> None:
        """Note what a request has cost at the owner, and what that has called it, if it has no id here.

        The logs of both are to call it alike.
        """
        sitting = self.open[name]
        request = sitting.batch.entries[name - sitting.name].root()
        request.id = request.id or request_id
        request.cost_s += cost_s

    def abandon(self, entry: Entry) -> bool:
        """Have the owner told that nobody waits for a request; tells whether it sits here."""
        name = self._names.get(entry)
        if name is not None:
            self._leave_seat(name)
        return name is not None

    def end_all(
        self, names: Iterable[int], outcomes: Iterable[Outcome]
    ) -> list[tuple[EntryBatch, Done, Sequence[Outcome]]]:
        """Take out requests that have ended; returns them in batches, with their outcomes."""
        ending, opened = [*names], self.open
        sitting = opened.get(ending[0]) if ending else None
        if sitting is not None and ending == [*range(sitting.name, sitting.name + len(sitting.batch.entries))]:
            for name, entry in zip(ending, sitting.batch.entries, strict=True):  # all that left together, as most do
                del opened[name], self._names[entry]
            self.free += sitting.batch.rows
            return [(sitting.batch, sitting.done, [*outcomes])]
        found: dict[Sitting, tuple[list[Entry], list[Outcome]]] = {}
        for name, outcome in zip(ending, outcomes, strict=True):
            sitting = opened.pop(name)
            entry = sitting.batch.entries[name - sitting.name]
            del self._names[entry]
            if sitting not in found:
                found[sitting] = [], []
            group = found[sitting]
            group[0].append(entry)
            group[1].append(outcome)
        ended: list[tuple[EntryBatch, Done, Sequence[Outcome]]] = []
        for sitting, (entries, its) in found.items():
            batch = _made_of(entries, sitting.batch)
            self.free += batch.rows
            ended.append((batch, sitting.done, its))
        return ended

    def clear(self, spared: Container[int] = ()) -> list[Sitting]:
        """Take everybody out; each sitting has those as its batch that have not ended."""
        sittings = {name: sitting for name, sitting in self.open.items() if name not in spared}
        left = self.end_all(sittings, itertools.repeat(None, len(sittings)))
        return [Sitting(batch, done, self, 0) for batch, done, _ in left]


def _made_of(entries: list[Any], batch: EntryBatch) -> EntryBatch:
    """Return a batch of some of the entries of another one; if these are all, that one."""
    if entries == batch.entries:
        return batch
    return msgspec.structs.replace(batch, entries=entries, rows=sum(entry.size for entry in entries))
