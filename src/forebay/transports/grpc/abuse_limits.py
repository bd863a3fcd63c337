# SPDX-License-Identifier: Apache-2.0
"""What a client may do for nothing: frames that move no call forward, and calls that come to nothing, are counted.

Each call and each frame of an answer explains a few frames that move no call (pings, settings, empty ones), and a
second may have some more. Calls that come to nothing through the client's doing are counted too, whoever ends them:
calls it cancels, calls that are refused, and calls in which it breaks a rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from forebay.transports.grpc.frames import ConnectionFault, Reason

if TYPE_CHECKING:
    from forebay.transports.grpc.sending import Sender

MAX_IDLE_FRAMES: Final = 10_000
"""Frames between two sweeps that move no call forward, and are not explained by what does."""
FRAMES_OF_ONE: Final = 4
"""How many of them a call or a frame of an answer explains: clients make room for it, and some measure the line."""
MAX_WASTED: Final = 2_000
"""Calls between two sweeps that may come to nothing by what the client says, and calls that need no key."""
WASTE_BYTES: Final = 1024
"""A header block that had to be read for one of them counts once more for each of these in its list of fields."""


class Manners:
    """The counts of one client."""

    __slots__ = ("_credited", "_idle", "_sender", "_wasted", "begun")

    def __init__(self, sender: Sender) -> None:
        """Begin to count; the sender says how many frames of answers there were."""
        self.begun = 0
        self._sender = sender
        self._idle = self._wasted = self._credited = 0

    def next_second(self) -> None:
        """Begin to count anew."""
        self._idle = self._wasted = 0
        self._credited = self._progress()

    def idle_frame(self, weight: int = 1) -> None:
        """Count a frame that moves no call forward; raises ConnectionFault if it is one too many."""
        self._idle += weight
        if self._idle > MAX_IDLE_FRAMES:
            progress = self._progress()
            self._idle -= FRAMES_OF_ONE * (progress - self._credited)
            self._credited = progress
            if self._idle > MAX_IDLE_FRAMES:
                msg = f"more than {MAX_IDLE_FRAMES} frames within a second that are about no call"
                raise ConnectionFault(Reason.ENHANCE_YOUR_CALM, msg)

    def waste(self, weight: int = 1) -> None:
        """Count a call that came to nothing through the client's doing.

        Raises:
            ConnectionFault: If it is one too many.
        """
        self._wasted += weight
        if self._wasted > MAX_WASTED:
            msg = f"more than {MAX_WASTED} calls within a second were cancelled, rejected or broke a rule"
            raise ConnectionFault(Reason.ENHANCE_YOUR_CALM, msg)

    def waste_block(self, size: int) -> None:
        """Count what it took to read a header block in vain.

        Args:
            size: Bytes of its list of fields.

        Raises:
            ConnectionFault: If it is too much.
        """
        self.waste(size // WASTE_BYTES)

    def _progress(self) -> int:
        return self.begun + self._sender.sent
