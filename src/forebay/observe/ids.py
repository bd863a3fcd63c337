# SPDX-License-Identifier: Apache-2.0
"""What requests are called that came without a name."""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.types.call import Request, Slice

_ids = itertools.count(1)
_naming = threading.Lock()
_prefix = os.urandom(4).hex()


def next_id() -> str:
    """Return a request id that is unique to this process and, very probably, to all others."""
    return f"{_prefix}-{next(_ids):x}"


def id_of(entry: Request | Slice) -> str:
    """Return what the answer calls the request that an entry is for; it gets an id if it has none. From any thread."""
    request = entry.root()
    if not request.id:
        with _naming:  # slices of one request may speak of it in several threads
            request.id = request.id or next_id()
    return request.id
