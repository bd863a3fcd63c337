# SPDX-License-Identifier: Apache-2.0
"""Where a large body lands: piece by piece, in a file in memory that workers read, in this process or in another.

Theory of operation. A body of many megabytes that is joined when its last piece is there, and copied into the arena of
a slot (`shm.py`) when its batch begins, costs one long turn of the loop: everybody else waits for it. So its pieces go
into a file of its own as they arrive, each for the price of a copy of that piece, and the batch says where the file is.

New memory costs more than the copy, and to give it back costs as much at once. So a file is used again for another body
once nobody in this process refers to the one in it. A worker process may look at it until its batch is answered.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
from typing import Final, Protocol

from forebay.workers.memory_file import make_file, open_file

LANDING_BYTES: Final = 1 << 20
"""Bodies that grow to this size land; smaller ones are joined."""
KEPT_BYTES: Final = 64 << 20
"""Memory of bodies that are gone which is kept for others."""


class Sink(Protocol):
    """What takes the pieces of a body."""

    def write(self, piece: bytes, /) -> object:
        """Take the next piece."""
        ...

    def getvalue(self) -> bytes | memoryview:
        """Return the whole body; nothing may be written after that."""
        ...


class Joining(list[bytes]):
    """A body that is joined once it is there."""

    __slots__ = ()
    write = list[bytes].append

    def getvalue(self) -> bytes:
        """Return the whole body."""
        return b"".join(self)


class _File:
    """A file for one body at a time."""

    __slots__ = ("descriptor", "inode", "size")

    def __init__(self) -> None:
        self.descriptor = make_file("forebay-body")
        self.inode = os.fstat(self.descriptor).st_ino
        self.size = 0

    def leave(self, used_bytes: int) -> None:
        """Let another body have it, or give its memory back: beside the loop, for that takes milliseconds."""
        self.size = max(self.size, used_bytes)
        if self.size + sum(file.size for file in _free) <= KEPT_BYTES:
            _free.append(self)
        else:
            _thread.start_new_thread(os.close, (self.descriptor,))


_free: list[_File] = []


class Landed(mmap.mmap):
    """A body that has landed, as this process sees it. Its views are read like any others."""

    file: _File
    address: int

    def __del__(self) -> None:
        self.file.leave(len(self))


class Landing:
    """A body that lands once it is large enough. Where there is no such memory, it stays in pieces."""

    __slots__ = ("_file", "_pieces", "_size", "_stays")

    def __init__(self) -> None:
        self._pieces = Joining()
        self._stays = False
        self._file: _File | None = None
        self._size = 0

    def __del__(self) -> None:
        if self._file is not None:
            self._file.leave(self._size)

    def write(self, piece: bytes) -> None:
        """Take the next piece."""
        self._pieces.write(piece)
        self._size += len(piece)
        if self._size >= LANDING_BYTES and not self._stays:
            try:
                self._land()
            except OSError:  # no more memory for it, or no more files
                self._return()

    def getvalue(self) -> bytes | memoryview:
        """Return the whole body."""
        if self._file is None:
            return self._pieces.getvalue()
        assert not self._pieces
        landed = Landed(self._file.descriptor, self._size, prot=mmap.PROT_READ)
        landed.file, self._file = self._file, None
        landed.address = _address_of(landed)
        return memoryview(landed)

    def _land(self) -> None:
        pieces = self._pieces
        if self._file is None:
            self._file = _free.pop() if _free else _File()
        at = self._size - sum(map(len, pieces))
        for piece in pieces:
            done = 0
            while done < len(piece):
                done += os.pwrite(self._file.descriptor, memoryview(piece)[done:], at + done)
            at += done
        pieces.clear()

    def _return(self) -> None:
        """Go on without the file."""
        file, self._file = self._file, None
        if file is not None:
            landed = self._size - sum(map(len, self._pieces))
            self._pieces.insert(0, os.pread(file.descriptor, landed, 0))
            file.leave(landed)
        self._stays = True


def landed_in(body: memoryview) -> tuple[str, int, int, int] | None:
    """Return path and inode of the file that a body, or a part of one, has landed in, where it begins and its length.

    None if it has not, or if it does not lie in one piece.
    """
    whole: object = body.obj
    if not isinstance(whole, Landed) or not body.c_contiguous or not body.nbytes:
        return None
    return (
        f"/proc/{os.getpid()}/fd/{whole.file.descriptor}",
        whole.file.inode,
        _address_of(body) - whole.address,
        body.nbytes,
    )


def own(body: bytes | bytearray | memoryview) -> bytes:
    """Return a body as bytes, itself if it is; a large one is copied while other threads go on."""
    if type(body) is bytes:
        return body
    whole: object = body.obj if type(body) is memoryview else None
    if isinstance(whole, Landed) and len(body) == len(whole):
        copied = os.pread(whole.file.descriptor, len(whole), 0)
        if len(copied) == len(whole):
            return copied
    return bytes(body)


def _address_of(buffer: mmap.mmap | memoryview) -> int:
    """Return where the memory of a buffer in one piece begins; Python itself does not tell that of one that is read."""
    held = (ctypes.c_ssize_t * 16)()  # a `Py_buffer`, which has less; its first field is the address
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(buffer), held, 0)
    try:
        return held[0]
    finally:
        ctypes.pythonapi.PyBuffer_Release(held)


def view_landed(path: str, inode: int, offset: int, length: int) -> memoryview:
    """Return what has landed in another process, for as long as that leaves it alone.

    Raises:
        OSError: If it is out of reach, or gone.
        ValueError: If there is less than was announced.
    """
    descriptor = open_file((path, inode), os.O_RDONLY)
    try:
        return memoryview(mmap.mmap(descriptor, offset + length, prot=mmap.PROT_READ))[offset:]
    finally:
        os.close(descriptor)
