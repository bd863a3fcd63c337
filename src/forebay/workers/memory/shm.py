# SPDX-License-Identifier: Apache-2.0
"""Bodies of 64 KiB and more ride in shared memory: one arena a slot and direction, reused for every batch.

A slot runs one batch at a time, so an arena needs no bookkeeping: the writer starts at offset 0 for each batch
and the reader is done with it when it answers. Reusing it costs one copy, a new one each time would cost the page
faults as well.

The server makes both arenas, as files in memory that have no name, and seals them: they grow with the largest batch and
nobody can cut them, so that whoever has mapped a part may read it whatever the other side does. A worker opens them as
files of the server's process. The server itself opens nothing that a worker names. As they have no name, nothing is
left of them, however either side ends.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

from forebay.errors import InvalidRequest
from forebay.workers.memory.file_room import take_room
from forebay.workers.memory.landing import Places, landed_in
from forebay.workers.memory.memory_file import make_file, open_file
from forebay.workers.wire.frames import landed, shared

THRESHOLD_BYTES = 64 * 1024
"""Bodies of this size and more go through the arena; a smaller one is cheaper inside the frame."""

MAX_ARENA_BYTES = 1 << 30
"""No arena grows beyond this."""

_STEP_BYTES = 1 << 20


class Arenas:
    """The two arenas of a slot, at the end that made them: the server's.

    Attributes:
        handle: What a worker is told of them.
    """

    def __init__(self, places: Places | None = None) -> None:
        """Make them.

        Args:
            places: Whose files the worker may see beside them, with the bodies that have landed there.

        Raises:
            OSError: If there are too many open files, or this system has no such memory.
        """
        outgoing = make_file("forebay-arena")
        try:
            incoming = make_file("forebay-arena")
        except OSError:
            os.close(outgoing)
            raise
        self.handle: dict[str, Any] = {"bodies": _told(outgoing), "results": _told(incoming)}
        self._outgoing = ArenaWriter(outgoing, places=places)
        self._incoming = ArenaReader(incoming)
        self.place = self._outgoing.place
        self.view = self._incoming.view

    def close(self) -> None:
        """Give the memory back."""
        self._outgoing.close()
        self._incoming.close()


def make_arenas(places: Places | None = None) -> Arenas | None:
    """Make the arenas of a slot; None where that is not possible, and everything goes inside of frames."""
    try:
        return Arenas(places)
    except OSError:
        return None


def open_arenas(handle: Any, max_bytes: int = MAX_ARENA_BYTES) -> tuple[ArenaReader, ArenaWriter] | None:
    """Open a slot's arenas at the worker's end; None if they are out of reach, as they are in another container.

    Args:
        handle: What the server said of them.
        max_bytes: The most that the server takes as results of one batch.
    """
    try:
        bodies = open_file(handle["bodies"], os.O_RDONLY)
        try:
            results = open_file(handle["results"], os.O_RDWR)
        except BaseException:
            os.close(bodies)
            raise
    except (OSError, LookupError, TypeError, ValueError):
        return None
    return ArenaReader(bodies), ArenaWriter(results, min(max_bytes, MAX_ARENA_BYTES))


def _told(descriptor: int) -> list[Any]:
    return [f"/proc/{os.getpid()}/fd/{descriptor}", os.fstat(descriptor).st_ino]


class ArenaWriter:
    """Puts bytes where the other process can see them.

    Args:
        descriptor: The arena's; belongs to the writer from then on.
        max_bytes: The arena never grows beyond this; what does not fit goes inside the frame.
        places: What has landed there stays where it is; None where the other side is not to see such files.
    """

    def __init__(self, descriptor: int, max_bytes: int = MAX_ARENA_BYTES, places: Places | None = None) -> None:
        self._places = places
        self._fd = descriptor
        self._max_bytes = max_bytes
        self._size = 0
        self._used = 0
        self._map: mmap.mmap | None = None

    def place(self, bodies: list[Any]) -> list[Any]:
        """Return the bodies with each large one replaced by its place in the arena.

        Bodies may be lists of buffers, one a sample, and these lists of buffers again, the parts of one.
        """
        self._used = 0  # the reader has answered the batch before, and so is done with all that lies here
        if list not in set(map(type, bodies)):
            try:
                if max(map(len, bodies)) < THRESHOLD_BYTES:
                    return bodies
            except TypeError:
                pass  # not all are buffers: looked at one by one
        return self._placed(bodies, _DEPTH)

    def _placed(self, bodies: list[Any], depth: int) -> list[Any]:
        """Place what is large, also in lists up to `depth` levels below."""
        kinds = set(map(type, bodies))
        if kinds.isdisjoint(_BUFFERS) and (list not in kinds or not depth):
            return bodies
        placed: list[Any] = []
        places = self._places
        for body in bodies:
            kind = body.__class__
            if kind is list and depth:
                placed.append(self._placed(body, depth - 1))
            elif (
                kind is memoryview
                and places is not None
                and places.has(body)
                and (found := landed_in(body)) is not None
            ):
                placed.append(landed(*found))
            elif kind in _BUFFERS and len(body) >= THRESHOLD_BYTES and self._reserve(self._used + len(body)):
                assert self._map is not None
                start, self._used = self._used, self._used + len(body)
                self._map[start : self._used] = body
                placed.append(shared(start, len(body)))
            else:
                placed.append(body)
        return placed

    def close(self) -> None:
        """Give the memory back."""
        self._map = None
        os.close(self._fd)

    def _reserve(self, size: int) -> bool:
        if size <= self._size:
            return True
        if size > self._max_bytes:
            return False
        wanted = min(-(-size * 2 // _STEP_BYTES) * _STEP_BYTES, self._max_bytes)
        try:
            take_room(self._fd, 0, wanted)  # memory that is used up must fail here, not on the first write
            self._map = mmap.mmap(self._fd, wanted)  # takes a descriptor, as long as it lasts
        except OSError:
            return False
        self._size = wanted
        return True


_BUFFERS = frozenset({bytes, bytearray, memoryview})


_DEPTH = 2
"""Levels of lists below the bodies: the samples of a body, and the parts of a sample."""


class ArenaReader:
    """Sees what the other process placed; the descriptor of the arena is its own from then on."""

    def __init__(self, descriptor: int) -> None:
        self._fd = descriptor
        self._map: mmap.mmap | None = None

    def view(self, offset: int, length: int) -> memoryview:
        """Return a view that is valid until the batch is answered; a copy where it cannot be mapped.

        Raises:
            InvalidRequest: If the arena does not reach that far.
        """
        end = offset + length
        if self._map is None or end > len(self._map):
            size = min(os.fstat(self._fd).st_size, MAX_ARENA_BYTES)
            if end > size:
                raise InvalidRequest(f"bytes {offset} to {end} were announced, the shared arena has {size}")
            try:
                self._map = mmap.mmap(self._fd, size, prot=mmap.PROT_READ)
            except OSError:
                return memoryview(os.pread(self._fd, length, offset))
        return memoryview(self._map)[offset:end]

    def close(self) -> None:
        """Give the memory back once no view is used any more."""
        self._map = None
        os.close(self._fd)
