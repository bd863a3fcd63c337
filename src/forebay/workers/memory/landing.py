# SPDX-License-Identifier: Apache-2.0
"""Where a body of some length lands: piece by piece, in memory that workers read, in this process or in another.

Theory of operation. A body that is joined when its last piece is there, and copied into the arena of a slot (`shm.py`)
when its batch begins, costs one long turn of the loop if it is long, and two copies in any case. So its pieces go where
workers see them as they arrive: into a place in a file in memory. A transport may also have the kernel put them there
(`Landing.room` and `advance`), and then nothing is copied at all. The batch says where the body is.

New memory costs more than a copy into it, and to give it back costs as much at once. So a place is used again for
another body once nobody in this process refers to the one in it, and stays mapped; here and in the workers that have
seen its file (`LandedFiles`). A worker process may look at a body until its batch is answered. Where its model still
refers to one then, it says so, and the bodies of that batch stay until it ends; it copies those of all others.

A worker has all of a file mapped, and what lay in it before is not cleared. So each pool of processes has `Places` of
its own, in files that no other pool is told of: a model sees what its own clients have sent, and nobody else's. Where a
body lands is chosen when it begins; one that goes to another pool after all is copied for it (`shm.py`).

Places have a power of two of bytes, and those up to 1 MiB share files: a file costs a descriptor, of which connections
need theirs. Of a file there is only as much memory as was reserved for pieces: what is merely announced costs nothing.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import io
import mmap
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Final, Protocol, cast

from forebay.types.server_state import here
from forebay.workers.memory.file_room import take_room
from forebay.workers.memory.memory_file import make_file, open_file

LANDING_BYTES: Final = 1 << 16
"""Bodies of this size land if their length is known before; smaller ones are joined."""
UNKNOWN_BYTES: Final = 1 << 20
"""Those whose length nobody has told land once they have this; then they get sixteen times as much room."""
SHARED_BYTES: Final = 1 << 24
"""Length of files that hold several places."""
LONGEST_SHARED_BYTES: Final = 1 << 20
"""Longest place that shares its file with others."""
STEP_BYTES: Final = 1 << 14
"""Memory is reserved in steps of this, and for a part of a body that is as long as what has come of it, or this."""
KEPT_BYTES: Final = 64 << 20
"""Places of bodies that are gone whose memory is kept for others, in sum."""
MAX_SEEN_BYTES: Final = 128 << 20
"""Files of another process that stay mapped, in sum."""
_REMOVE: Final[int] = getattr(mmap, "MADV_REMOVE", 0)
"""There wherever files in memory are."""


class Sink(Protocol):
    """What takes the pieces of a body."""

    def write(self, piece: bytes, /) -> object:
        """Take the next piece."""
        ...

    def getvalue(self) -> bytes | memoryview:
        """Return the whole body; nothing may be written after that."""
        ...


class Joining(io.BytesIO):
    """A body that is joined as it comes: to join 60 MB at its end takes 45 ms, and `getvalue` copies nothing."""


class _File:
    """A file that is mapped as a whole; it ends with the last place in it."""

    __slots__ = ("address", "descriptor", "inode", "map", "path")

    def __init__(self, size: int) -> None:
        self.descriptor: int = make_file("forebay-body")
        os.ftruncate(self.descriptor, size)
        self.path: str = f"/proc/{os.getpid()}/fd/{self.descriptor}"
        self.inode: int = os.fstat(self.descriptor).st_ino
        self.map: mmap.mmap = mmap.mmap(self.descriptor, size)
        self.address: int = _address_of(memoryview(self.map))

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # modules may be gone before it
        if hasattr(self, "descriptor"):
            close(self.descriptor)


class _Place:
    """Room for one body at a time.

    Attributes:
        file: Where it is.
        offset: Where in there.
        size: How long it is.
        reserved: For how much of it there is memory.
        owner: Whose it is.
    """

    __slots__ = ("file", "offset", "owner", "reserved", "size")

    def __init__(self, file: _File, offset: int, size: int, owner: Places) -> None:
        self.file: _File = file
        self.offset: int = offset
        self.size: int = size
        self.reserved = 0
        self.owner: Places = owner

    def reserve(self, size: int) -> None:
        """Have memory for so many bytes, or some more; raises an `OSError` if there is none."""
        if size > self.reserved:
            end = min(-(-size // STEP_BYTES) * STEP_BYTES, self.size)
            # What is used up must fail here: a write to a map, or a read into it, would end the process or be lost.
            take_room(self.file.descriptor, self.offset + self.reserved, end - self.reserved)
            self.reserved = end

    def leave(self) -> None:
        """Let another body of the same owner have it.

        If that is more memory than is kept, those give some back whose places nobody has used for the longest time.
        """
        self.owner.take_back(self)
        if self.size > KEPT_BYTES or not self.owner.keep(self):
            _thread.start_new_thread(self.give_back, ())
        kept = self.owner.kept
        while sum(map(_memory, list(kept.items()))) > KEPT_BYTES:
            _, places = max(list(kept.items()), key=_memory)
            oldest = next(iter(list(places)), None)
            # Who pops it here owns it: a thread that takes it for a body pops it as well, and one of both gets False.
            if oldest is not None and places.pop(oldest, False):
                oldest.owner.forget(oldest)
                _thread.start_new_thread(oldest.give_back, ())

    def give_back(self) -> None:
        """Give its memory back; beside the loop, for that takes long."""
        if self.size <= LONGEST_SHARED_BYTES:  # else its file ends with it
            self.file.map.madvise(_REMOVE, self.offset, self.size)
            # In this order: as soon as it is offered, another thread may reserve memory in it.
            self.reserved: int = 0
            self.owner.add_empty([self])


class KeptPlaces(dict[int, dict[_Place, bool]]):
    """Places that nobody uses and that have memory, of all owners of a server, by their size; the oldest first."""


def _memory(kept: tuple[int, dict[_Place, bool]]) -> int:
    size, places = kept
    return size * len(places)


class Places:
    """Where the bodies of one pool land; threads may ask at the same time, and leave."""

    def __init__(self) -> None:
        """Begin without any."""
        self.kept: KeptPlaces = here(KeptPlaces)
        self._free: dict[int, list[_Place]] = {}
        self._empty: dict[int, list[_Place]] = {}
        self._parts: list[tuple[_File, int]] = []
        # A walk of the collector that finds a body ends what else only circles hold. The file must not be among it, for
        # its place comes back.
        self._lent: dict[_Place, None] = {}
        self._is_closed = False

    def close(self) -> None:
        """Give all memory back; that of bodies that are still there goes with them."""
        self._is_closed = True
        ending = self.kept, self._free, self._empty, self._parts
        self._free, self._empty, self._parts = {}, {}, []
        _thread.start_new_thread(_end, ending)  # beside the loop, for that takes long

    def lend(self, size: int) -> _Place:
        """Return a place for a body of this size, until it leaves.

        Raises:
            OSError: If there is no more memory for it, or no more files.
        """
        place = self._take(size)
        self._lent[place] = None
        return place

    def _take(self, size: int) -> _Place:
        size = max(1 << (size - 1).bit_length(), LANDING_BYTES)
        try:
            places = self._free[size]
            kept = self.kept[size]
            while not kept.pop(place := places.pop(), False):
                pass  # its memory was given back meanwhile
            return place
        except (KeyError, IndexError):
            pass
        try:
            return self._empty[size].pop()
        except (KeyError, IndexError):
            pass
        if size > LONGEST_SHARED_BYTES:
            return _Place(_File(size), 0, size, self)
        file, begin = self._part()
        first, *others = (
            _Place(file, offset, size, self) for offset in range(begin, begin + LONGEST_SHARED_BYTES, size)
        )
        if others:
            self.add_empty(others[::-1])
        return first

    def _part(self) -> tuple[_File, int]:
        """Return a part of a file for places of one length: a file for each length would cost too many descriptors.

        Raises:
            OSError: If there are no more files.
        """
        try:
            return self._parts.pop()
        except IndexError:
            file = _File(SHARED_BYTES)
            self._parts += [(file, begin) for begin in range(LONGEST_SHARED_BYTES, SHARED_BYTES, LONGEST_SHARED_BYTES)]
            return file, 0

    def room(self, size: int, reserved: int) -> tuple[memoryview, _Place]:
        """Return room for a body, with memory for a part of it, and whose it is.

        Raises:
            OSError: If there is none.
        """
        place = self.lend(size)
        try:
            place.reserve(reserved)
        except OSError:
            place.leave()
            raise
        # It has no memory of its own: it keeps the place, which keeps the file, and so the map that this points into.
        body = _kind(place.size, Landed).from_address(place.file.address + place.offset)
        body.place = place
        return memoryview(body).cast("B"), place

    def has(self, body: memoryview) -> bool:
        """Tell whether a body lies here, so that the workers of this pool may look at it."""
        whole = _whole(body)
        return whole is not None and whole.place.owner is self

    def take_back(self, place: _Place) -> None:
        """Hold a place no longer that a body has left."""
        self._lent.pop(place, None)

    def keep(self, place: _Place) -> bool:
        """Have a place ready for another body; tells whether there may be one."""
        if not self._is_closed:
            # In this order: `_take` drops a place of `_free` that it does not find here.
            self.kept.setdefault(place.size, {})[place] = True
            self._free.setdefault(place.size, []).append(place)
        return not self._is_closed

    def forget(self, place: _Place) -> None:
        """Have it ready no more."""
        with contextlib.suppress(KeyError, ValueError):  # who wanted to take it has found out
            self._free[place.size].remove(place)

    def add_empty(self, places: list[_Place]) -> None:
        """Take places that have no memory."""
        if not self._is_closed:
            self._empty.setdefault(places[0].size, []).extend(places)


def _end(
    kept: KeptPlaces, free: dict[int, list[_Place]], empty: dict[int, list[_Place]], parts: list[tuple[_File, int]]
) -> None:
    """Let go of files that nobody needs any more."""
    for places in free.values():
        for place in places:
            kept[place.size].pop(place, False)
    free.clear()
    empty.clear()
    parts.clear()


HERE: Final = Places()
"""For what runs in this process, or goes nobody knows where."""


class Landed:
    """What a body lies in, as long as it is referred to; the views of the body do so."""

    place: _Place

    def __del__(self) -> None:
        self.place.leave()


@cache
def _kind(size: int, noticed: type[Landed | Lent]) -> Any:
    """Return the type of what lies in places of a size: memory whose end is noticed."""
    return type(noticed.__name__, (noticed, ctypes.Array), {"_type_": ctypes.c_ubyte, "_length_": size})


class Landing:
    """A body that lands once it is long enough. Where there is no such memory, it stays in pieces."""

    __slots__ = ("_at", "_expected", "_pieces", "_place", "_places", "_ready", "_stays", "_view")

    def __init__(self, expected: int = 0, places: Places = HERE) -> None:
        """Wait for a body.

        Args:
            expected: How long it will be; 0 if nobody knows.
            places: Where it lands.
        """
        self._places = places
        self._pieces = Joining()
        self._expected = expected
        self._stays = 0 < expected < LANDING_BYTES
        self._view: memoryview | None = None
        self._place: _Place | None = None
        self._at = self._ready = 0  # of the view, how much is there, and for how much there is memory

    def write(self, piece: bytes | memoryview) -> None:
        """Take the next piece."""
        end = self._at + len(piece)
        if end > self._ready:
            self._make_ready(end)
        if self._view is None:
            self._pieces.write(piece)
        else:
            self._view[self._at : end] = piece
        self._at = end

    def room(self, longest: int) -> memoryview | None:
        """Return memory for the next piece, `longest` bytes at most; None if it has to be written.

        What was put there is told by `advance` before anything else is done with this body. Where more is asked for
        than is missing of it, there may be room for one byte more, of which `byte_after` tells.
        """
        at, end = self._at, min(self._at + longest, self._expected)
        if end > self._ready and self._expected:
            end = min(end, max(2 * at, at + STEP_BYTES, self._ready))
            self._make_ready(end)
        if self._view is None or end <= at:
            return None
        if end - at < longest and end == self._expected < self._ready:
            end += 1
        return self._view[at:end]

    def advance(self, size: int) -> None:
        """Count so much as put where `room` is, without the byte that is not of this body."""
        self._at += size

    def byte_after(self) -> bytes:
        """Return what was put into the room for one byte more."""
        assert self._view is not None
        return bytes(self._view[self._expected : self._expected + 1])

    def getvalue(self) -> bytes | memoryview:
        """Return the whole body."""
        # Only views of the body keep it from here on: its place comes back with the last of them.
        view, self._view, self._place = self._view, None, None
        if view is None:
            return self._pieces.getvalue()
        assert not self._pieces.tell()
        return view[: self._at].toreadonly()

    def _make_ready(self, end: int) -> None:
        """Have memory for so many bytes where it lands; if there is none, what has come stays in pieces."""
        view, place = self._view, self._place
        if self._stays or (view is None and not self._expected and end < UNKNOWN_BYTES):
            return
        try:
            if view is None or place is None:
                self._land(self._expected or 16 * UNKNOWN_BYTES, end, self._pieces.getvalue())
                self._pieces = Joining()
            elif end > len(view):  # nobody knew how long it would be
                self._land(2 * end, end, view[: self._at])
            else:
                place.reserve(end)
                self._ready = place.reserved
        except OSError:  # no more memory for it, or no more files
            if view is not None:
                self._pieces.write(view[: self._at])
            self._view = self._place = None
            self._ready, self._stays = 0, True

    def _land(self, size: int, end: int, there: bytes | memoryview) -> None:
        """Go on in a place of this size with memory for so many bytes, and put there what has come."""
        view, place = self._places.room(size, end)
        if there:
            view[: len(there)] = there
        self._view, self._place, self._ready = view, place, place.reserved


def placed(data: bytes | bytearray | memoryview, places: Places) -> memoryview:
    """Return a copy of bytes that has landed.

    Raises:
        OSError: There is no memory for it, or there are no more files.
    """
    size = memoryview(data).nbytes
    room, _ = places.room(size, size)
    room[:size] = memoryview(data).cast("B")
    return room[:size].toreadonly()


def landed_in(body: memoryview) -> tuple[str, int, int, int] | None:
    """Return path and inode of the file that a body, or a part of one, has landed in, where it begins and its length.

    None if it has not, or if it does not lie in one piece.
    """
    whole = _whole(body)
    if whole is None or not body.c_contiguous or not body.nbytes:
        return None
    file = whole.place.file
    return file.path, file.inode, _address_of(body) - file.address, body.nbytes


def _whole(body: memoryview) -> Landed | None:
    """Return what has landed that this is a view of, also by way of arrays; None if nothing has."""
    seen: Any = body.obj
    while type(seen) is memoryview or _is_array(seen):
        seen = seen.obj if type(seen) is memoryview else seen.base
    return seen if isinstance(seen, Landed) else None


def _is_array(seen: object) -> bool:
    kind = type(seen)
    return kind.__name__ == "ndarray" and kind.__module__ == "numpy"


def own(body: bytes | bytearray | memoryview) -> bytes:
    """Return a body as bytes, itself if it is; a large one is copied while other threads go on."""
    found = landed_in(body) if type(body) is memoryview and len(body) > LONGEST_SHARED_BYTES else None
    if found is not None:
        whole = _whole(cast("memoryview", body))
        assert whole is not None
        copied = os.pread(whole.place.file.descriptor, found[3], found[2])
        if len(copied) == found[3]:
            return copied
    return bytes(body)


_Held: Final = ctypes.c_ssize_t * 16
"""A `Py_buffer`, which has less; its first field is the address."""
# Types that are known before make a call of a function cost half.
_get_buffer: Final = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer: Final = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(("PyBuffer_Release", ctypes.pythonapi))


def _address_of(buffer: memoryview) -> int:
    """Return where the memory of a buffer in one piece begins; Python itself does not tell that of one that is read."""
    held = _Held()
    _get_buffer(buffer, held, 0)
    try:
        return held[0]
    finally:
        _release_buffer(held)


class Lent:
    """What a body of another process lies in, as long as it is referred to."""

    lent: dict[int, mmap.mmap]

    def __del__(self) -> None:
        self.lent.pop(id(self), None)


class LandedFiles:
    """Files of another process that bodies have landed in, mapped once for all bodies in them."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, int], tuple[mmap.mmap, int]] = {}
        self._lent: dict[int, mmap.mmap] = {}

    @property
    def is_lent(self) -> bool:
        """Whether anybody refers to what was lent."""
        return bool(self._lent)

    def lend(self, path: str, inode: int, offset: int, length: int) -> memoryview:
        """Return what has landed there, and note for how long anything refers to it; raises as `view` does."""
        found, address = self._seen(path, inode, offset, length)
        whole = _kind(1 << (length - 1).bit_length(), Lent).from_address(address + offset)
        whole.lent = self._lent
        self._lent[id(whole)] = found  # `from_address` holds nothing: `_seen` would unmap what is looked at
        return memoryview(whole).cast("B")[:length].toreadonly()

    def view(self, path: str, inode: int, offset: int, length: int) -> memoryview:
        """Return what has landed there, for as long as that process leaves it alone.

        Raises:
            OSError: If it is out of reach, or gone.
            ValueError: If there is less than was announced.
        """
        return memoryview(self._seen(path, inode, offset, length)[0])[offset : offset + length]

    def _seen(self, path: str, inode: int, offset: int, length: int) -> tuple[mmap.mmap, int]:
        """Return a file that reaches that far, and where it is mapped; raises as `view` does."""
        name = path, inode
        found = self._maps.pop(name, None)
        if found is not None and offset + length <= len(found[0]):
            self._maps[name] = found  # the last one that was used
            return found
        made = _map(name)
        found = self._maps[name] = made, _address_of(memoryview(made))
        while sum(len(one) for one, _ in self._maps.values()) > MAX_SEEN_BYTES and len(self._maps) > 1:
            del self._maps[next(iter(self._maps))]
        if offset + length > len(made):
            msg = f"bytes {offset} to {offset + length} were announced, the file has {len(made)}"
            raise ValueError(msg)
        return found


def _map(name: tuple[str, int]) -> mmap.mmap:
    """Map a file of another process; raises an `OSError` if it is out of reach, or gone."""
    descriptor = open_file(name, os.O_RDONLY)
    try:
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
    finally:
        os.close(descriptor)
