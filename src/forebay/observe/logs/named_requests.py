# SPDX-License-Identifier: Apache-2.0
"""The names of requests that are named before they are answered: by a log, or a batch that is recorded."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from forebay.observe.logs.request_ids import next_id

if TYPE_CHECKING:
    from forebay.types.call import Request, Slice

_naming = threading.Lock()


def id_of(entry: Request | Slice) -> str:
    """Return what the answer calls the request that an entry is for; it gets an id if it has none. From any thread."""
    request = entry.root()
    if not request.id:
        with _naming:  # slices of one request may speak of it in several threads
            request.id = request.id or next_id()
    return request.id
