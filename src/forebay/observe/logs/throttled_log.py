# SPDX-License-Identifier: Apache-2.0
"""Lines of repeated failures: one a second, with the number of those that were left out before it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import logging

QUIET_S: Final = 1.0
"""Time after a line in which others are only counted."""


class ThrottledLog:
    """What is logged of one kind of failure."""

    def __init__(self, log: logging.Logger) -> None:
        """Begin without any."""
        self._log = log
        self._silent_until = 0.0
        self._silent = 0

    def warning(self, text: str, *arguments: object, error: BaseException | None = None) -> None:
        """Log a failure, with the traceback of `error`, or count it if one was logged within the last second."""
        now = time.monotonic()
        if now < self._silent_until:
            self._silent += 1
            return
        silent, self._silent, self._silent_until = self._silent, 0, now + QUIET_S
        more = f" ({silent} more were not logged)" if silent else ""
        self._log.warning(text + "%s", *arguments, more, exc_info=error)
