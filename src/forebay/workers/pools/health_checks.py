# SPDX-License-Identifier: Apache-2.0
"""Asks the workers of a pool how they are, between their batches.

Theory of operation. A check is a batch of one item that no client sent; the pool gives it to an idle slot of the
worker, so that nothing else runs in its thread meanwhile. If there is none, the next slot that becomes idle gets it,
before whatever waits in the queue. Each period every worker is asked once. One whose check is still running after a
period has failed, and fails again each further period. The pool cancels the check like any batch that no client waits
for, and replaces what hangs all the same.

A worker that has failed stays unhealthy until a check passes, also where another process has taken its place.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import msgspec

from forebay.types.batch import EntryBatch
from forebay.types.call import HEALTH, Failure, Request
from forebay.workers.wire.objects import pack

if TYPE_CHECKING:
    from forebay.types.batch import Done
    from forebay.types.call import Outcome

log = logging.getLogger("forebay.workers")


class _Health(msgspec.Struct):
    """How a worker is.

    Attributes:
        is_due: Whether it is to be asked when a slot of it becomes idle.
        batch: The check that runs.
        failures: How often it has failed since a check passed, or since it was replaced.
        reason: Why the last check failed; empty if it passed.
    """

    is_due: bool = False
    batch: EntryBatch | None = None
    asked_at: float = 0.0
    failures: int = 0
    reason: str = ""


class HealthChecks:
    """The checks of one pool, on its loop."""

    def __init__(
        self,
        every_s: float,
        max_failures: int,
        check: Callable[[int, EntryBatch, Done], bool],
        replace: Callable[[int], bool],
        over: Callable[[], object],
    ) -> None:
        """Ask nobody yet; `check`, `replace` and `over` are those of the pool, `over` being its `wake`.

        Args:
            every_s: Seconds between two checks of a worker, and the most that one may take.
            max_failures: So many failures in a row replace a worker.
        """
        self._every_s = every_s
        self._late = f"healthy did not return within {every_s:g} s"
        self._max_failures = max_failures
        self._check, self._replace, self._over = check, replace, over
        self._workers: dict[int, _Health] = {}
        self._timer: asyncio.TimerHandle | None = None

    def ask_all(self, workers: Callable[[], Sequence[int]]) -> None:
        """Ask all workers that there are, now and again each period."""
        self._workers = {worker: self._workers.get(worker) or _Health() for worker in workers()}
        for worker, health in list(self._workers.items()):
            if health.batch is None:
                self._ask(worker, health)
            elif self._is_late(health):
                _cancel(health)
                self._fail(worker, health, self._late)
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self.ask_all, workers)

    def stop(self) -> None:
        """Ask no more; a check that runs is cancelled."""
        if self._timer is not None:
            self._timer.cancel()
        for health in self._workers.values():
            _cancel(health)
        self._workers = {}

    def freed(self, worker: int) -> None:
        """A slot of a worker became idle; if a check is due, the slot gets it."""
        health = self._workers.get(worker)
        if health is not None and health.is_due:
            self._ask(worker, health)

    def replaced(self, worker: int) -> None:
        """Count the failures of a worker from zero; it stays unhealthy until a check passes."""
        self._workers.get(worker, _Health()).failures = 0

    def unhealthy(self, up: Collection[int]) -> list[str]:
        """Return a sentence for each of the workers that are up and not healthy."""
        found = [(worker, health.reason) for worker, health in self._workers.items() if worker in up and health.reason]
        return [f"worker {worker} is not healthy: {reason}" for worker, reason in found]

    def _ask(self, worker: int, health: _Health) -> None:
        # A runner that packs needs a packed body.
        request = Request(body=pack({}), reply=lambda _request, _outcome: None, params={HEALTH: True})
        # Were it handed on, it would ask another worker: as one that was handed on already, it fails with its own.
        batch = health.batch = EntryBatch([request], None, 1, attempts=2)
        health.asked_at = time.monotonic()
        health.is_due = False
        if not self._check(worker, batch, functools.partial(self._answered, worker, health)):
            health.batch, health.is_due = None, True

    def _answered(self, worker: int, health: _Health, batch: EntryBatch, outcomes: Sequence[Outcome]) -> None:
        health.batch = None
        if not batch.cancelled:  # else it was late, and has failed, or the pool stops
            (outcome,) = outcomes
            if self._is_late(health):
                self._fail(worker, health, self._late)
            elif isinstance(outcome, Failure):
                self._fail(worker, health, outcome.error.message)
            else:
                health.failures, health.reason = 0, ""
        self._over()

    def _is_late(self, health: _Health) -> bool:
        return time.monotonic() - health.asked_at >= self._every_s

    def _fail(self, worker: int, health: _Health, reason: str) -> None:
        if reason != health.reason:
            log.warning("worker %d is not healthy: %s", worker, reason)
        health.reason = reason
        health.failures += 1
        if health.failures >= self._max_failures and self._replace(worker):
            log.warning("worker %d is replaced after %d failed checks: %s", worker, health.failures, reason)
            health.failures = 0


def _cancel(health: _Health) -> None:
    batch = health.batch
    if batch is not None and not batch.cancelled:
        batch.cancelled = True
        if batch.on_cancel is not None:
            batch.on_cancel()
