# SPDX-License-Identifier: Apache-2.0
"""What requests are called that came without a name."""

from __future__ import annotations

import itertools
import os

_ids = itertools.count(1)
_prefix = os.urandom(4).hex()


def next_id() -> str:
    """Return a request id that is unique to this process and, very probably, to all others."""
    return f"{_prefix}-{next(_ids):x}"
