# SPDX-License-Identifier: Apache-2.0
"""What calls are told that came to a full queue: the same for many of them, so it is written and counted once for all.

When they are told is up to `refusal_pacing.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from forebay.errors import QueueFull
from forebay.transports.grpc import statuses

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.serving.endpoint import Endpoint
    from forebay.transports.grpc.statuses import Status


def _nothing(_times: int) -> None:
    """Count nothing: whoever refused has counted."""


class CallRefusal:
    """Why calls are refused.

    Attributes:
        count: Counts calls once they are told.
        status: How they end.
        text: The reason in words.
        trailers: The header block that says so.
    """

    __slots__ = ("count", "status", "text", "trailers")

    def __init__(self, status: Status, text: str, count: Callable[[int], object] = _nothing) -> None:
        self.status, self.text, self.count = status, text, count
        self.trailers = statuses.trailers(status, text)


def of_full(queue: Endpoint) -> CallRefusal:
    """Return what calls are told that come to this queue while it is full."""
    error = QueueFull(f"the queue of '{queue.name}' is full; try again later")
    return CallRefusal(*statuses.of_error(error), lambda times: queue.reject(error, times))


same: Callable[[Status, str], CallRefusal] = functools.lru_cache(16)(CallRefusal)
"""Return one refusal for all calls that are told the same."""
