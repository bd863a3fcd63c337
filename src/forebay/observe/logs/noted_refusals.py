# SPDX-License-Identifier: Apache-2.0
"""The requests that were refused last, and why, by the ids of their answers.

Theory of operation. Whoever refuses hangs a `Decision` of numbers on the error; whoever answers knows the id, and notes
both. Many that are answered together have ids that follow each other, and are noted once. Words are found when somebody
asks. Kept are the last `MAX_EACH` notes of each tenant and reason, of `MAX_PAIRS` such pairs.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

if TYPE_CHECKING:
    from forebay.errors import CapacityError

MAX_EACH: Final = 64
MAX_PAIRS: Final = 64
MAX_ID: Final = 128
"""Characters of an id that are kept."""


class Decision(NamedTuple):
    """What was known when a request was refused.

    Attributes:
        at: When, in seconds since 1970.
        called: Name and version of the endpoint.
        waiting: Samples in the queue.
        capacity: Samples that it takes.
        own: Samples of the tenant among them; None where tenants are not told apart.
        due_s: Seconds that the request had left; infinity if it stated no deadline.
        late_s: Seconds by which its answer would have been late; 0 if that was not the reason.
    """

    at: float
    called: tuple[str, str]
    tenant: str
    tier: int | None
    reason: str
    waiting: int
    capacity: int
    own: int | None
    due_s: float
    late_s: float


class RefusalReport(msgspec.Struct, omit_defaults=True):
    """What is told of a refused request.

    Attributes:
        id: The request id of its answer.
        at: When it was refused, in seconds since 1970.
        reason: What metrics call the reason.
        message: What was answered.
        retry_ms: When the client was told to try again, in milliseconds after that; -1 if nothing was said.
        due_ms: Milliseconds that it had left; None if it stated no deadline.
        predicted_ms: After how many milliseconds its answer would have come, where that was the reason.
        together: Refusals of the same moment that the numbers are of, where more were answered together.
    """

    id: str
    at: float
    endpoint: str
    version: str
    tenant: str
    tier: int | None
    reason: str
    message: str
    waiting: int
    capacity: int
    own: int | None = None
    due_ms: float | None = None
    predicted_ms: float | None = None
    retry_ms: int = -1
    together: int = 1


class _Note(NamedTuple):
    decision: tuple[Any, ...]
    message: str
    retry_at: float
    noted: float
    """On the clock of `retry_at`."""
    id: str
    first: int
    """Where several have ids that follow each other: the number of the first, in 8 hexadecimal digits after the id."""
    together: int


class LastRefusals:
    """The last refusals of a server."""

    def __init__(self) -> None:
        """Begin without any."""
        self._notes: dict[tuple[str, str], deque[tuple[Any, ...]]] = {}

    def note(self, error: CapacityError, request_id: str, first: int = 0, count: int = 1) -> None:
        """Note that an error was the answer to a request, or to `count` requests whose ids end in their numbers."""
        decision = error.decision
        if decision is None:
            return
        key = decision[2], decision[4]
        notes = self._notes.get(key)
        if notes is None:
            if len(self._notes) >= MAX_PAIRS:
                del self._notes[next(iter(self._notes))]
            notes = self._notes[key] = deque(maxlen=MAX_EACH)
        now = time.monotonic()
        notes.append((decision, error.message, error.retry_at, now, request_id[:MAX_ID], first, count))

    def find(self, request_id: str) -> RefusalReport | None:
        """Return what is known of a request, the newest if several had this id."""
        every = (_Note._make(one) for notes in self._notes.values() for one in notes)
        found = [one for one in every if _is_of(one, request_id)]
        return _told(request_id, max(found, key=lambda one: one.noted)) if found else None

    def __len__(self) -> int:
        return sum(map(len, self._notes.values()))


def _is_of(note: _Note, request_id: str) -> bool:
    if not note.first:
        return note.id == request_id
    number = request_id.removeprefix(note.id)
    if number == request_id or len(number) > 16 or not number.isalnum() or not number.isascii():
        return False
    try:
        return note.first <= int(number, 16) < note.first + note.together
    except ValueError:
        return False


def _told(request_id: str, note: _Note) -> RefusalReport:
    why = Decision._make(note.decision)
    has_due = why.due_s != float("inf")
    return RefusalReport(
        id=request_id,
        at=why.at,
        endpoint=why.called[0],
        version=why.called[1],
        tenant=why.tenant,
        tier=why.tier,
        reason=why.reason,
        message=note.message,
        waiting=why.waiting,
        capacity=why.capacity,
        own=why.own,
        due_ms=round(why.due_s * 1000, 3) if has_due else None,
        predicted_ms=round((why.due_s + why.late_s) * 1000, 3) if has_due and why.late_s else None,
        retry_ms=max(round((note.retry_at - note.noted) * 1000), 0) if note.retry_at else -1,
        together=note.together,
    )
