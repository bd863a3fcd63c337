# SPDX-License-Identifier: Apache-2.0
"""Steps the stream of a runner as a worker does: in a seat."""

from __future__ import annotations

import time

from forebay.types.call import Failure
from forebay.workers.pools.seats import Seats, at_once


def steps_of(runner, items):
    """Returns the parts of each step; raises what the stream fails with."""
    seats = Seats(runner.run, time.monotonic)
    seats.join("batch", items)
    steps, ended = [], []
    while not ended:
        told = at_once(seats.step())
        steps += [parts for _, parts in told.parts]
        seats.allow("batch", len(told.parts))
        ended = told.ended
    ((_, outcomes, _),) = ended
    if type(outcomes[0]) is Failure:
        raise outcomes[0].error
    return steps
