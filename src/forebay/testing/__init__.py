# SPDX-License-Identifier: Apache-2.0
"""For tests: a client in memory, contracts for models and pools, a clock that jumps, a pool run by hand.

`client` and `check_model` are for whoever writes a model, the rest for whoever writes a pool, a transport or a policy.
"""

from __future__ import annotations

from forebay.testing.answers import Answer, CallFailed
from forebay.testing.clock import FakeClock, Spinning
from forebay.testing.contracts import check_model, check_pool
from forebay.testing.memory_client import AsyncClient, Client, client
from forebay.testing.pool import ManualPool, MemoryOrigin

__all__ = [
    "Answer",
    "AsyncClient",
    "CallFailed",
    "Client",
    "FakeClock",
    "ManualPool",
    "MemoryOrigin",
    "Spinning",
    "check_model",
    "check_pool",
    "client",
]
