# SPDX-License-Identifier: Apache-2.0
"""Room for the frames with which a message goes on, if they are as the last one was.

Many clients cut a message into frames of 16 KiB, whatever a port takes. To be read where the message lands, these need
a guess: that the frames to come are as long as the one before, of the same stream, with nothing in between. Then one
call of the system puts all payloads behind each other, and the heads aside. The heads are looked at afterwards; what
follows one that was not as expected lies in a wrong place, and is taken out of there to be read as everything is.
Longer frames are worth two calls each, one for the head and one for the rest; they are seldom of one length.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from forebay.transports.grpc.frames import DATA, END_STREAM, HEAD_BYTES, head

MAX_FRAMES: Final = 256
"""Frames that are guessed at once; the system takes four times as many rooms."""


class Placed(NamedTuple):
    """What came of a guess.

    Attributes:
        size: How much of the message is where it belongs.
        rest_bytes: What has not come of the frame that is under way.
        flags: Of that frame.
        unread: What has to be read as everything is.
    """

    size: int
    rest_bytes: int
    flags: int
    unread: bytes


class FrameRooms:
    """Guesses for one connection at a time: they share the room for heads.

    Attributes:
        rooms: Where what comes next is to be put, one after the other.
        size: How long these are together.
        stream: Whose frames they are for.
    """

    def __init__(self) -> None:
        self._heads = bytearray(HEAD_BYTES * MAX_FRAMES)
        view = memoryview(self._heads)
        self._head_rooms = [view[at : at + HEAD_BYTES] for at in range(0, len(view), HEAD_BYTES)]
        self._length = 0
        self._cuts: list[slice] = []
        self._expected = b""
        self._rest = self._flags = self._last = self._count = 0
        self.rooms: list[memoryview] = []
        self.size = self.stream = 0

    def guess(self, room: memoryview, missing: int, length: int, rest: int, flags: int, stream: int) -> None:
        """Guess what comes.

        Args:
            room: Where the message goes on; not longer than what is missing of it.
            missing: What is missing of it.
            length: How long its frames are.
            rest: What has not come yet of the frame that is under way.
            flags: Of that frame.
            stream: Whose frames they are.
        """
        if length != self._length:
            self._length = length
            self._cuts = [slice(at * length, at * length + length) for at in range(MAX_FRAMES)]
        self._rest, self._flags, self.stream = rest, flags, stream
        more = 0 if flags & END_STREAM else max(len(room) - rest, 0)
        count = self._count = min(-(-more // length), MAX_FRAMES)
        self.rooms = [room[:rest]] if rest else []
        self.size = min(rest, len(room))
        if not count:
            return
        rooms = self._head_rooms[:count] * 2
        rooms[::2], rooms[1::2] = self._head_rooms[:count], map(room[rest:].__getitem__, self._cuts[:count])
        self.rooms += rooms
        self.size += HEAD_BYTES * count + min(more, count * length)
        # The frame with which a message ends is its stream's last one, for nearly all messages.
        last = self._last = min(missing - rest - (count - 1) * length, length)
        is_end = rest + (count - 1) * length + last == missing
        end = head(last, DATA, END_STREAM if is_end else 0, stream)
        self._expected = head(length, DATA, 0, stream) * (count - 1) + end

    def placed(self, size: int) -> Placed:
        """Return what came of the guess, once so much was put in the rooms, which are free then."""
        rooms, self.rooms = self.rooms, []
        length, rest = self._length, self._rest
        if size <= rest:
            return Placed(size, rest - size, self._flags, b"")
        size -= rest
        step = HEAD_BYTES + length
        begun = (size + length) // step  # frames whose heads are there
        if not begun:
            return Placed(rest, 0, 0, bytes(self._heads[:size]))
        known = HEAD_BYTES * begun
        if not self._heads.startswith(self._expected[:known]):
            at = 0
            while self._heads.startswith(self._expected[HEAD_BYTES * at : HEAD_BYTES * (at + 1)], HEAD_BYTES * at):
                at += 1
            found = b"".join(rooms[bool(rest) + 2 * at :])
            return Placed(rest + at * length, 0, 0, found[: size - at * step])
        is_last = begun == self._count
        own = self._last if is_last else length  # of the frame that began last
        size -= known + length * (begun - 1)
        there = min(size, own)
        flags = self._expected[known - 5] if is_last else 0
        unread = bytes(self._heads[known : known + size - there])
        return Placed(rest + length * (begun - 1) + there, own - there, flags, unread)
