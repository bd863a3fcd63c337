# SPDX-License-Identifier: Apache-2.0
"""The windows that a gRPC port gives: how much a client may send before it was taken."""

from __future__ import annotations

from typing import Final

STREAM_WINDOW: Final = 4 * 1024 * 1024
"""Of one call."""
CONNECTION_WINDOW: Final = 16 * 1024 * 1024
"""Of all calls of a connection."""
