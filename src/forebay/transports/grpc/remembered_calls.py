# SPDX-License-Identifier: Apache-2.0
"""How calls of one client came, so that the next that comes the same way begins without its frames being read.

A call is like one before if the bytes of its frames are the same but for its stream and its message. That says the same
only as long as the client's header blocks mean what they meant: all is forgotten with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from forebay.transports.grpc import frames
from forebay.transports.grpc.messages import PREFIX_BYTES

if TYPE_CHECKING:
    from forebay.transports.grpc.heads import CallHead

MAX_HEADS: Final = 32
"""Header blocks that are remembered; when there are more, all are forgotten and learned anew."""
MAX_WHOLE: Final = 8
"""Lengths of calls that came as one segment which are remembered."""

_PLAIN_HEADERS: Final = bytes([frames.HEADERS, frames.END_HEADERS])


class WholeCall(NamedTuple):
    """How a call came that was all of a segment: a HEADERS frame and a DATA frame.

    Attributes:
        begin: The bytes before its stream.
        middle: Those between the stream and the second time it is named.
        prefix: What stands before its message.
        at: Where that begins.
        head: What the header block means.
    """

    begin: bytes
    middle: bytes
    prefix: bytes
    at: int
    head: CallHead

    def is_like(self, data: bytes, stream: int) -> bool:
        """Tell whether a segment of the same length is such a call, on this stream."""
        at = self.at
        return (
            data.startswith(self.begin)
            and int.from_bytes(data[5:9]) == stream
            and data.startswith(self.middle, frames.HEAD_BYTES)
            and data[5:9] == data[at - 9 : at - 5]
            and data.startswith(self.prefix, at - 5)
        )


class LongCall(NamedTuple):
    """How a call began whose message is longer than a segment: a HEADERS frame, and a part of a DATA frame.

    Attributes:
        begin: The bytes before its stream.
        block: The header block.
        start: Where the data begins.
        head: What the header block means.
    """

    begin: bytes
    block: bytes
    start: int
    head: CallHead

    def frame_of(self, data: bytes, stream: int) -> tuple[int, int] | None:
        """Return how long the DATA frame is and its flags, if a segment is the beginning of such a call; else None."""
        size = len(data) - self.start
        if (
            size < 0
            or not data.startswith(self.begin)
            or int.from_bytes(data[5:9]) != stream
            or not data.startswith(self.block, frames.HEAD_BYTES)
        ):
            return None
        length, kind, flags, named = frames.head_at(data, self.start - frames.HEAD_BYTES)
        is_long = max(size, frames.VIEWED_BYTES - 1) < length <= frames.LONG_FRAME_BYTES
        if kind != frames.DATA or flags & ~frames.END_STREAM or named != stream or not is_long:
            return None
        return length, flags


class UsualCalls:
    """What is remembered of one client's calls.

    Attributes:
        heads: What header blocks mean.
        whole: Calls that came as one segment, by its length.
        long: The last call that was longer, if its message can be as long as it likes.
    """

    def __init__(self) -> None:
        self.heads: dict[bytes, CallHead] = {}
        self.whole: dict[int, WholeCall] = {}
        self.long: LongCall | None = None

    def learn(self, data: bytes, head: CallHead, stream: int, size: int) -> None:
        """Remember how a call came if it was all of a segment; `size` is that of its only DATA frame."""
        block = self._block_of(data, head, stream)
        at = 2 * frames.HEAD_BYTES + len(block) + PREFIX_BYTES
        if block and len(data) == at - PREFIX_BYTES + size:
            if len(self.whole) >= MAX_WHOLE:
                self.whole.clear()
            middle = data[frames.HEAD_BYTES : at - PREFIX_BYTES - 4]
            self.whole[len(data)] = WholeCall(data[:5], middle, data[at - PREFIX_BYTES : at], at, head)

    def learn_long(self, data: bytes, head: CallHead, stream: int) -> None:
        """Remember how a call came if the segment began with it and ended within its data."""
        block = self._block_of(data, head, stream)
        if block and not head.is_stream:
            self.long = LongCall(data[:5], block, 2 * frames.HEAD_BYTES + len(block), head)

    def forget(self) -> None:
        """Forget everything: header blocks may mean something else now."""
        self.heads.clear()
        self.whole.clear()
        self.long = None

    def _block_of(self, data: bytes, head: CallHead, stream: int) -> bytes:
        """Return the header block that a segment begins with if it is this call's, and remembered; else nothing."""
        block = data[frames.HEAD_BYTES : frames.HEAD_BYTES + (data[1] << 8 | data[2])]
        is_its_own = (
            data[0] == 0
            and data[3:5] == _PLAIN_HEADERS
            and int.from_bytes(data[5:9]) == stream
            and self.heads.get(block) is head
            and not head.is_public
        )
        return block if is_its_own else b""
