# SPDX-License-Identifier: Apache-2.0
"""What calls are told that came to a full queue: the same for many of them, so it is written once for all.

When they are told is up to `refusal_pacing.py`.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from forebay.transports.grpc import statuses

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.transports.grpc.statuses import Status


class CallRefusal:
    """Why calls are refused.

    Attributes:
        status: How they end.
        text: The reason in words.
        trailers: The header block that says so.
    """

    __slots__ = ("status", "text", "trailers")

    def __init__(self, status: Status, text: str) -> None:
        self.status, self.text = status, text
        self.trailers = statuses.trailers(status, text)


same: Callable[[Status, str], CallRefusal] = functools.lru_cache(16)(CallRefusal)
"""Return one refusal for all calls that are told the same."""
