# SPDX-License-Identifier: Apache-2.0
"""Says which calls wait for a client that takes nothing more of them; no loop, no socket, no clock.

A client makes room for more once it has got what it was sent, and for a slow one megabytes may lie in between. So the
time of a call begins anew until the client has what was sent of it last; and where it has made room, until something is
sent of any call, for the call's own turn comes after those of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.transports.grpc.calls import OpenCall


class Patience:
    """How long one client may take; looked at with every sweep in which it has something to take."""

    __slots__ = ("_arrived", "_mark", "_mark_bytes", "_sent", "_sent_at")

    def __init__(self, epoch: int) -> None:
        # What was written before the sweep `_mark` ends at `_mark_bytes`; before the sweep `_arrived` it has arrived.
        self._mark = self._arrived = self._sent_at = epoch
        self._mark_bytes = 0
        self._sent = 0

    def look(self, epoch: int, sent: int, written: int, taken: int) -> None:
        """Record how many frames were sent, and how many bytes were written and have arrived, by this sweep."""
        if taken >= self._mark_bytes:
            self._arrived = self._mark
            self._mark, self._mark_bytes = epoch, written
        if sent != self._sent:
            self._sent, self._sent_at = sent, epoch - 1

    def is_over(self, call: OpenCall, epoch: int, max_quiet: float) -> bool:
        """Whether the client has taken nothing of a call, whose answer waits, for more sweeps than this."""
        outgoing = call.outgoing
        assert outgoing is not None
        last = outgoing.moved if call.window <= 0 else max(outgoing.moved, self._sent_at)
        if last >= self._arrived:
            outgoing.waits_since = epoch
        return epoch - max(outgoing.moved, outgoing.waits_since) > max_quiet
