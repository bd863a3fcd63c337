# SPDX-License-Identifier: Apache-2.0
"""How many workers a model has: a number, or a range within which their number follows the load."""

from __future__ import annotations

import re
from typing import Any, Final

import msgspec

from forebay.types.first_use import known
from forebay.types.settings import MAX_WORKERS, SomeMilliseconds, SomeSeconds, Workers, WorkersOrNone

TARGET_QUEUE_MS: Final = 50.0
SCALE_DOWN_S: Final = 60.0

WORKERS_NEEDED: Final = (
    f"expected a whole number from 0 to {MAX_WORKERS}, a range such as 1:8, or {{min: 1, max: 8}} in a file"
)


class WorkerRange(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the number of workers.

    Attributes:
        min: The fewest; with 0 the last one stops, too, and requests wait while one starts.
        max: The most.
        target_queue_ms: Mean time in the queue above which workers are added; None takes the setting of this name.
        scale_down_s: Time without need of a worker after which it stops; None takes the setting of this name.
        initial: How many there are at first; None takes `min`, or 1.
        dial_in: Whether somebody else starts them, as many as the server says (`forebay_workers_wanted`), and they dial
            in (`--attach`).
    """

    min: WorkersOrNone = 1
    max: Workers
    target_queue_ms: SomeMilliseconds | None = None
    scale_down_s: SomeSeconds | None = None
    initial: WorkersOrNone | None = None
    dial_in: bool = False

    @property
    def at_first(self) -> int:
        """How many there are at first."""
        return max(self.min, 1) if self.initial is None else min(max(self.initial, self.min), self.max)

    def __str__(self) -> str:
        """Return the range as a flag has it."""
        return f"{self.min}:{self.max}"


def read_workers(value: Any) -> int | WorkerRange:
    """Return the number of workers that a person writes, or its range; raises a `ValueError` if it is neither."""
    if isinstance(value, WorkerRange):
        found = value
    elif isinstance(value, dict):
        try:
            found = msgspec.convert(value, known(WorkerRange))
        except msgspec.ValidationError as error:
            raise ValueError(WORKERS_NEEDED) from error
    elif isinstance(value, str) and (bounds := re.fullmatch(r"(\d{1,9}):(\d{1,9})", value, re.ASCII)):
        least, most = map(int, bounds.groups())
        if not 1 <= most <= MAX_WORKERS:
            raise ValueError(f"expected a range MIN:MAX with MAX from 1 to {MAX_WORKERS}")
        found = WorkerRange(min=least, max=most)
    else:
        return _number(value)
    if found.min > found.max:
        raise ValueError(f"expected a range MIN:MAX with MIN <= MAX; did you mean {found.max}:{found.min}?")
    return found


def _number(value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value, re.ASCII):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_WORKERS:
        raise ValueError(WORKERS_NEEDED)
    return value
