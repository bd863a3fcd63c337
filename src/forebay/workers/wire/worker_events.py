# SPDX-License-Identifier: Apache-2.0
"""What a worker has said, as the server's side of its conversation tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from forebay.types.log_line import LogLine

if TYPE_CHECKING:
    from forebay.types.batch import Phase
    from forebay.workers.pools.seating import Sitting


class Hello(msgspec.Struct, frozen=True, gc=False):
    """The worker has said who it is: answer with `open`."""

    about: Mapping[str, Any]


class Ready(msgspec.Struct, frozen=True, gc=False):
    """The worker asks for a batch."""


class Failed(msgspec.Struct, frozen=True, gc=False):
    """The worker could not open its runner."""

    kind: str
    message: str
    detail: Any
    trace: str


class Result(msgspec.Struct, frozen=True, gc=False):
    """A batch is answered, and does not sit any more.

    Attributes:
        sitting: The batch.
        outcomes: One for each entry.
        ran: When it began, and its phases, if the worker was asked.
        is_ready: Whether the worker asks for the next batch; else it waits for `written`.
    """

    sitting: Sitting
    outcomes: list[Any]
    ran: tuple[float, list[Phase]] | None
    is_ready: bool


class Heard(msgspec.Struct, frozen=True, gc=False):
    """One round of a worker: parts of some batches, and which have ended. Answer with `go`, if that gives anything.

    Attributes:
        parts: Names of batches, and a part for each of their entries; or names of batches of one entry each, and a part
            for each of them.
        ended: Names, outcomes for their entries, and how long they sat.
    """

    parts: list[tuple[int | list[int], list[Any]]]
    ended: list[tuple[int, list[Any], float]]


class Kept(msgspec.Struct, frozen=True, gc=False):
    """The worker's model goes on to refer to bodies of the batch that runs: nobody may write there while it lives."""


class Leaving(msgspec.Struct, frozen=True, gc=False):
    """The worker wants no more than what it has."""


class Logged(msgspec.Struct, frozen=True, gc=False):
    """The worker's model has logged or printed a line while this batch ran; the id is 0 if none did."""

    batch_id: int
    line: LogLine


class Counted(msgspec.Struct, frozen=True, gc=False):
    """The worker says how its model's own metrics stand."""

    data: bytes


class Violation(msgspec.Struct, frozen=True, gc=False):
    """The worker does not keep to the protocol: hang up on it."""

    reason: str


Event: TypeAlias = Hello | Ready | Failed | Result | Heard | Kept | Leaving | Logged | Counted | Violation
