# SPDX-License-Identifier: Apache-2.0
"""Shared memory that clients on the same machine make, and that tensors are read from and written to.

A region is a part of a POSIX shared memory object. The client owns the object and may cut it at any time, so nothing is
mapped here: memory that is gone would end the server. Bytes are read and written as those of a file, which tells.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import InvalidRequest, NotFound, QueueFull, TooLarge
from forebay.types.tensor import Tensor

if TYPE_CHECKING:
    from forebay.protocols.kserve.places import Parameter, Place

FOLDER: Final = "/dev/shm"  # noqa: S108 - where the system keeps these objects
MAX_REGIONS: Final = 1024
"""Regions at a time; each holds a file open."""
MAX_NAME: Final = 255
"""Longest name of an object, and of a region."""


class Region(msgspec.Struct, frozen=True):
    """What a client has registered.

    Attributes:
        name: What requests call it.
        key: What the client has called the object, as for `shm_open`.
        offset: Where in the object it begins.
        byte_size: How long it is.
    """

    name: str
    key: str
    offset: int
    byte_size: int


class _Object:
    """An object that stays open while it is referred to: a thread may read it when it is unregistered."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class CudaRegions:
    """The shared memory of CUDA that clients have registered: there is none, as with a Triton without GPUs."""

    @staticmethod
    def register(name: str) -> None:
        """Refuse a region, always with an `InvalidRequest`."""
        msg = f"the shared memory region '{name[:MAX_NAME]}' of CUDA cannot be registered: this server reads only that "
        raise InvalidRequest(msg + "of the system; register that instead (--shared-memory), or send the tensors")

    @staticmethod
    def status(name: str = "") -> Mapping[str, Region]:
        """Return all regions, of which there are none; raises a `NotFound` if one is named."""
        if name:
            raise NotFound(f"there is no shared memory region '{name[:MAX_NAME]}' of CUDA")
        return {}

    @staticmethod
    def unregister(name: str = "") -> None:
        """Forget a region, or all of them; one that is not there is forgotten already."""


class SharedRegions:
    """The regions that clients have registered; for one loop, but threads may read them as well."""

    def __init__(self, max_read_bytes: int) -> None:
        """Have none.

        Args:
            max_read_bytes: How much is read for one request; an object takes no memory for what nobody has written
                into it, and it may be named for many tensors.
        """
        self._max_read_bytes = max_read_bytes
        self._regions: dict[str, tuple[Region, _Object]] = {}

    def register(self, region: Region) -> None:
        """Register a region.

        Raises:
            InvalidRequest: If there is no such object, it is not as large, or the name is taken.
            QueueFull: If there are too many.
        """
        if region.name in self._regions:
            raise InvalidRequest(f"a shared memory region '{region.name}' is registered already; unregister it first")
        if not 0 < len(region.name) <= MAX_NAME:
            raise InvalidRequest(f"a shared memory region needs a name of at most {MAX_NAME} characters")
        if len(self._regions) >= MAX_REGIONS:
            raise QueueFull(f"all {MAX_REGIONS} shared memory regions that may be registered are; unregister some")
        found = _Object(_open(region.key))
        _check(region, found.descriptor)
        self._regions[region.name] = region, found

    def unregister(self, name: str = "") -> None:
        """Forget a region, or all of them; one that is not there is forgotten already."""
        for known in [name] if name else list(self._regions):
            self._regions.pop(known, None)

    def status(self, name: str = "") -> Mapping[str, Region]:
        """Return a region, or all of them, by name; raises a `NotFound` if there is no such region."""
        if name:
            return {name: self._find(name)[0]}
        return {name: region for name, (region, _) in self._regions.items()}

    def read(self, name: str, offset: int, size: int) -> bytearray:
        """Return bytes of a region, beginning at `offset` of it.

        Raises:
            NotFound: If there is no such region.
            InvalidRequest: If it ends before, or the object was cut.
        """
        region, held = self._find(name)
        at = self._place(region, held, offset, size)
        found = bytearray(size)
        left = memoryview(found)
        while left:
            count = os.preadv(held.descriptor, [left], at)
            if not count:
                raise _cut(region)
            left, at = left[count:], at + count
        return found

    def reader(self) -> Callable[[Place], bytearray]:
        """Return what reads the tensors of one request; it raises as `read`, and `TooLarge` for too many bytes."""
        asked = 0

        def read(place: Place) -> bytearray:
            nonlocal asked
            asked += place.size
            if asked > self._max_read_bytes:
                raise TooLarge(f"expected at most {self._max_read_bytes} bytes of shared memory, got {asked}")
            return self.read(place.region, place.offset, place.size)

        return read

    def require(self, place: Place) -> None:
        """Check that a part of a region can be written to.

        Raises:
            NotFound: If there is no such region.
            InvalidRequest: If it ends before, or the object was cut.
        """
        self._place(*self._find(place.region), place.offset, place.size)

    def write(self, name: str, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write into a region, beginning at `offset` of it.

        Raises:
            NotFound: If there is no such region.
            InvalidRequest: If it ends before, the object was cut, or may only be read.
        """
        region, held = self._find(name)
        left = memoryview(data)
        at = self._place(region, held, offset, len(left))
        while left:
            try:
                count = os.pwrite(held.descriptor, left, at)
            except OSError as error:
                raise InvalidRequest(f"shared memory region '{name}' cannot be written to: {error.strerror}") from error
            left, at = left[count:], at + count

    def put(
        self, outputs: Sequence[Tensor], wanted: Mapping[str, Place]
    ) -> tuple[list[Tensor], dict[str, Mapping[str, Parameter]]]:
        """Write outputs where they are wanted; returns them, empty if they are there, and what is said of these.

        Raises:
            NotFound: If there is no such region.
            InvalidRequest: If one does not fit in, or cannot be written.
        """
        left: list[Tensor] = []
        places: dict[str, Mapping[str, Parameter]] = {}
        for one in outputs:
            place = wanted.get(one.name)
            if place is None:
                left.append(one)
                continue
            size = len(one.data)
            if size > place.size:
                msg = f"output '{one.name}' has {size} bytes, and {place.size} are there for it in '{place.region}'"
                raise InvalidRequest(msg)
            self.write(place.region, place.offset, one.data)
            places[one.name] = place.told(size)
            left.append(Tensor(one.name, one.datatype, one.shape, b""))  # the others keep their places
        return left, places

    def _find(self, name: str) -> tuple[Region, _Object]:
        found = self._regions.get(name)
        if found is None:
            raise NotFound(f"there is no shared memory region '{name[:MAX_NAME]}'; register it first")
        return found

    @staticmethod
    def _place(region: Region, held: _Object, offset: int, size: int) -> int:
        """Return where in the object a part of a region begins."""
        if offset < 0 or size < 0 or offset + size > region.byte_size:
            raise InvalidRequest(
                f"bytes {offset} to {offset + size} of shared memory region '{region.name}' are asked for; it has "
                f"{region.byte_size}"
            )
        _check(region, held.descriptor)
        return region.offset + offset


def _open(key: str) -> int:
    """Open an object by the name its maker gave it: a file right in the folder, never anything else.

    Raises:
        InvalidRequest: If there is none.
    """
    name = key.removeprefix("/")
    if not 0 < len(os.fsencode(name)) <= MAX_NAME or "\0" in name or PurePath(name).name != name or name == "..":
        msg = f"expected a name of shared memory such as '/input', got '{key[:MAX_NAME]}'"
        raise InvalidRequest(msg)
    flags = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    path = f"{FOLDER}/{name}"
    try:
        try:
            descriptor = os.open(path, os.O_RDWR | flags)
        except PermissionError:
            descriptor = os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        raise InvalidRequest(f"shared memory '{key}' cannot be opened by the server: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidRequest(f"'{key}' is not shared memory")
    return descriptor


def _check(region: Region, descriptor: int) -> None:
    """Compare a region with the object it is in, which its owner may have cut.

    Raises:
        InvalidRequest: If it does not lie within.
    """
    size = os.fstat(descriptor).st_size
    if region.offset < 0 or region.byte_size <= 0 or region.offset + region.byte_size > size:
        raise InvalidRequest(
            f"shared memory region '{region.name}' is bytes {region.offset} to {region.offset + region.byte_size} of "
            f"'{region.key}', which has {size}"
        )


def _cut(region: Region) -> InvalidRequest:
    return InvalidRequest(f"shared memory '{region.key}' was cut while region '{region.name}' was read")
