# SPDX-License-Identifier: Apache-2.0
"""What tests of forebay, of pools and of models need: a clock that jumps, a pool run by hand, an origin in memory."""

from __future__ import annotations

from forebay.testing.clock import FakeClock, Spinning
from forebay.testing.pool import ManualPool, MemoryOrigin

__all__ = ["FakeClock", "ManualPool", "MemoryOrigin", "Spinning"]
