# SPDX-License-Identifier: Apache-2.0
"""Divide what a batch has cost among the requests in it.

A part is by rows, weighted with what a row of the tenant costs beside those of others where that is known (`fair.py`).
What an entry needed by itself, as it was run again alone, it pays alone. The parts of a batch add up to the seconds
that workers were busy with it. Whoever is gone by then pays as well: its rows ran. A batch
of streams is charged after each round, for the time since the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.batching.fair import FairShares
    from forebay.types.batch import EntryBatch


def divide(batch: EntryBatch, fair: FairShares | None) -> Sequence[float]:
    """Return the worker seconds that each entry of a batch is to pay now, before the queue hears of them."""
    seconds, entries = batch.worker_s - batch.billed_s, batch.entries
    if len(entries) == 1:
        return [seconds]
    units = [entry.size for entry in entries]
    if fair is not None and len(fair.flows) > 1:
        units = [size * cost for size, cost in zip(units, fair.row_costs(batch), strict=True)]
    if not batch.own_s:
        unit_s = seconds / sum(units)
        return [unit * unit_s for unit in units]
    unit_s = (seconds - sum(batch.own_s)) / sum(units)
    return [unit * unit_s + own for unit, own in zip(units, batch.own_s, strict=True)]
