# SPDX-License-Identifier: Apache-2.0
"""What requests are called: as their clients say, or by a number, which a log or a recorded batch may ask for early."""

from __future__ import annotations

import itertools
import os
import re
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from forebay.types.call import Request, Slice

_NAME: Final = re.compile(rb"[!-~]{1,128}")
_ids = itertools.count(1)
_prefix = os.urandom(4).hex()
_naming = threading.Lock()


def next_id() -> str:
    """Return a request id that is unique to this process and, very probably, to all others."""
    return f"{_prefix}-{next(_ids):x}"


def request_id_of(value: bytes) -> str:
    """Return the id a client gave its request; empty if it could forge headers or lines of a log."""
    return value.decode("ascii") if _NAME.fullmatch(value) else ""


def id_of(entry: Request | Slice) -> str:
    """Return what the answer calls the request that an entry is for; it gets an id if it has none. From any thread."""
    request = entry.root()
    if not request.id:
        with _naming:  # slices of one request may speak of it in several threads
            request.id = request.id or next_id()
    return request.id
