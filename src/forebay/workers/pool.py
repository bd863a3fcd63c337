# SPDX-License-Identifier: Apache-2.0
"""What all pools have in common: the contract, the flow of streamed parts, and how a batch fails."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forebay.errors import BadOutcome, ForebayError, RunnerFailed, UserCodeError
from forebay.types.call import After, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.types.batch import Batch, Done
    from forebay.types.call import Outcome

log = logging.getLogger("forebay.workers")

CREDIT = 16
"""Steps of a streamed answer that may be on their way to the clients before the generator has to wait."""


class PoolStatistics(msgspec.Struct, frozen=True):
    """What a pool tells about itself; also the source of its metrics.

    Attributes:
        slots: Batches it could run at a time if every worker were up.
        idle: Slots that could take a batch now.
        restarts: Workers replaced since the start.
        alive: Workers that are up.
        joined: Workers that ever came, where they come by themselves.
        left: Those of them that are gone.
        problem: Why a worker cannot be replaced; empty if all can.
    """

    slots: int
    idle: int
    restarts: int = 0
    alive: int = 0
    joined: int = 0
    left: int = 0
    problem: str = ""


class Pool(Protocol):
    """Workers of one kind that run the batches of one endpoint."""

    @property
    def idle(self) -> int:
        """Slots that could take a batch now."""
        ...

    @property
    def blocks(self) -> bool:
        """Whether `submit` runs the batch before it returns."""
        ...

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this on the loop whenever a slot became idle by itself (a worker came back)."""
        ...

    async def start(self) -> None:
        """Bring up all workers.

        Raises:
            ModelError: If a runner could not be opened.
        """
        ...

    def submit(self, batch: Batch, done: Done) -> None:
        """Give a batch to an idle slot. `done` is called exactly once, on the loop, whatever happens."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Let running batches end within `grace_s` seconds, then end the workers."""
        ...

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        ...


def failure_of(error: BaseException) -> Failure:
    """Wrap what user code raised: forebay's own errors keep their kind, all others become `RunnerFailed`."""
    if isinstance(error, ForebayError):
        if isinstance(error, UserCodeError) and not error.trace:
            error.trace = "".join(traceback.format_exception(error))
        # Its frames hold the batch, whose requests the garbage collector does not look at.
        return Failure(error.with_traceback(None))
    text = "".join(traceback.format_exception(error))
    return Failure(RunnerFailed(f"{type(error).__name__}: {error}", trace=text))


def split_after(outcomes: Sequence[Outcome]) -> tuple[Sequence[Outcome], list[Callable[[], object]]]:
    """Separate the outcomes from the work that follows once they were written."""
    if After not in set(map(type, outcomes)):
        return outcomes, []
    work = [outcome.work for outcome in outcomes if type(outcome) is After]
    return [outcome.outcome if type(outcome) is After else outcome for outcome in outcomes], work


def do_after(work: Sequence[Callable[[], object]]) -> None:
    """Do the work that follows an answer; what it raises is logged, for nobody waits for it."""
    for step in work:
        try:
            step()
        except (Exception, SystemExit):
            log.exception("a callback after an answer failed")


def checked(outcomes: Any, count: int) -> Sequence[Outcome]:
    """Return the outcomes if there is exactly one for each item.

    Raises:
        BadOutcome: Naming both numbers otherwise.
    """
    try:
        found = len(outcomes)
    except TypeError:
        msg = f"the runner returned {type(outcomes).__name__}, expected a list of {count} results"
        raise BadOutcome(msg) from None
    if found != count:
        msg = f"the runner returned {found} results for {count} samples"
        raise BadOutcome(msg)
    return outcomes
