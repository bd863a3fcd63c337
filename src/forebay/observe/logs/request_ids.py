# SPDX-License-Identifier: Apache-2.0
"""What requests are called: as their clients say, or by a number."""

from __future__ import annotations

import itertools
import os
import re
from typing import Final

_NAME: Final = re.compile(rb"[!-~]{1,128}")
_ids = itertools.count(1)
_prefix = os.urandom(4).hex()


def next_id() -> str:
    """Return a request id that is unique to this process and, very probably, to all others."""
    return f"{_prefix}-{next(_ids):x}"


def request_id_of(value: bytes) -> str:
    """Return the id a client gave its request; empty if it could forge headers or lines of a log."""
    return value.decode("ascii") if _NAME.fullmatch(value) else ""
