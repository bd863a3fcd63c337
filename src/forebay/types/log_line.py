# SPDX-License-Identifier: Apache-2.0
"""A line of the log, as it travels from a worker to its server."""

from __future__ import annotations

from typing import Any

import msgspec


class LogLine(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A record as it travels.

    Attributes:
        created: When it was made, in seconds of the epoch.
        text: Its message.
        trace: Of the exception that came with it.
        extra: Its further fields.
    """

    logger: str
    level: int
    created: float
    text: str
    trace: str = ""
    extra: dict[str, Any] = {}
