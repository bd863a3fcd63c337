# SPDX-License-Identifier: Apache-2.0
"""Bounds what an owner sends of streamed answers before there is room for it. Sans-I/O.

An owner goes on beyond the room that a front has told while little of a stream is on its way, and has to send what is
made already. So the bound is generous, and who exceeds it does not keep to the protocol.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from forebay.errors import InvalidRequest
from forebay.owners.wire import bytes_of

MAX_PARTS: Final = 8192
"""Parts of one answer for which there was no room yet."""
FEW_PARTS: Final = 64
"""So many may be of any length."""
MAX_BYTES: Final = 1 << 26
"""More of them have no more bytes together."""


class PartsAhead:
    """What has come of the streams of a link for which no room was told."""

    def __init__(self) -> None:
        """Begin without a stream."""
        self._sizes: dict[int, deque[int]] = {}
        self._bytes: dict[int, int] = {}

    @property
    def is_any(self) -> bool:
        """Whether there is a stream."""
        return bool(self._sizes)

    def come(self, seat: int, parts: Sequence[Any]) -> None:
        """Count parts; raises an `InvalidRequest` if there are more than the protocol lets an owner send."""
        sizes = self._sizes.setdefault(seat, deque())
        for part in parts:
            sizes.append(size := bytes_of(part))
            self._bytes[seat] = self._bytes.get(seat, 0) + size
        if len(sizes) > MAX_PARTS or (len(sizes) > FEW_PARTS and self._bytes[seat] > MAX_BYTES):
            raise InvalidRequest(f"it sends {len(sizes)} parts of an answer for which there was no room")

    def allow(self, seat: int, count: int) -> None:
        """Note that there is room for so many more."""
        sizes = self._sizes.get(seat)
        if sizes is None:
            return
        for _ in range(min(count, len(sizes))):
            self._bytes[seat] -= sizes.popleft()

    def end(self, seat: int) -> None:
        """Forget a stream."""
        self._sizes.pop(seat, None)
        self._bytes.pop(seat, None)
