# SPDX-License-Identifier: Apache-2.0
"""Let long predictions ask whether anybody still waits for them."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

probe: ContextVar[Callable[[], bool] | None] = ContextVar("forebay_cancelled", default=None)
"""Set by a worker around each batch: tells whether every caller of that batch is gone."""


def is_cancelled() -> bool:
    """Tell whether nobody waits any more for the batch that runs now.

    True once every request of the batch was abandoned by its client or has passed its deadline. Costs about a
    microsecond in a thread and a non-blocking read of the socket in a process; call it now and then in a long
    `predict` and return early (what is returned then is thrown away). Outside of a worker it is always False.
    """
    asked = probe.get()
    return asked is not None and asked()
