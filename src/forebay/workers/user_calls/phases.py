# SPDX-License-Identifier: Apache-2.0
"""Let runners say what a batch's time went into, while the timeline has listeners.

A runner has two ways: it calls what `lap` holds at the end of each phase, or it leaves the phases of its last run in
`Runner.phases`.
"""

from __future__ import annotations

import os
import time
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forebay.types.batch import Noted, Phase
    from forebay.workers.runner import Runner

WHOLE_BATCH: Final = -1
"""The sample number of a phase that is the whole batch's."""


class Laps:
    """Phases one after the other; calling it ends one, which began where the last one ended."""

    def __init__(self, started: float) -> None:
        """Begin the first one when the batch itself began."""
        self.phases: list[Phase] = []
        self._since = started

    def __call__(self, phase: str) -> None:
        """End a phase."""
        now = time.monotonic()
        self.phases.append(("", phase, self._since, now, WHOLE_BATCH))
        self._since = now


lap: ContextVar[Laps | None] = ContextVar("forebay_lap", default=None)
"""Set by a worker around each batch; None while nobody listens."""

needed: ContextVar[list[float] | None] = ContextVar("forebay_needed", default=None)
"""Set by a worker around each batch of which somebody asks what it costs: a runner may leave there the seconds that
each item needed by itself."""


def phases_of(runner: Runner, laps: Laps) -> list[Phase]:
    """Return the phases that the runner reports for the batch it has just run."""
    return laps.phases or list(runner.phases)


def note(noted: Noted, runner: Runner, laps: Laps, started: float, worker: str) -> None:
    """Note that a worker of this process ran a batch.

    Args:
        laps: What `lap` held meanwhile.
        started: When it began.
    """
    noted.started = started
    noted.worker = worker
    noted.pid = os.getpid()
    noted.phases = phases_of(runner, laps)
