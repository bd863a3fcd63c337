# SPDX-License-Identifier: Apache-2.0
"""The directory: which servers own which models, which programs run which servings, and which nodes exist. Sans-I/O.

Theory of operation. A directory has one writer. It is immutable: `changed` returns another one whose version is one
higher. The writer sends it whole, as bytes; a reader keeps the newest that it was sent, and goes on with it while the
writer cannot be reached. So a directory may name a process that is gone: callers try the next one. Versions of
different writers cannot be compared; a writer that takes over goes on from the highest version that it hears of.

    directory = Directory()
    directory = directory.changed(owners={"iris": ("tcp:10.0.0.7:9100",)})
    heard = read_directory(directory.encode())      # raises InvalidRequest for anything else
    if heard.is_newer_than(kept):
        changes = heard.changes_since(kept)         # names in each table
        kept = heard

What is read is bounded before anything is made of it; see the constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.types.first_use import known
from forebay.workers.wire import frames

PROTOCOL: Final = 1
"""Major version of what members say to each other; those of another one are not called."""
MAX_BYTES: Final = 3 << 20
"""Longest directory, as bytes: it fits into one frame of a link."""
MAX_ELEMENTS: Final = 200_000
"""Values in one."""
MAX_NAMES: Final = 4096
"""Models, servings or nodes."""
MAX_PLACES: Final = 1024
"""Owners of one model, or members that run one serving."""
MAX_NAME: Final = 128
"""Characters of a name."""
MAX_ADDRESS: Final = 256
"""Characters of an address."""
MAX_WEIGHT: Final = 1_000_000
"""Weight x partitions of a member."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
AddressText = Annotated[str, msgspec.Meta(max_length=MAX_ADDRESS, pattern=r"^(tcp:[^\s]+:[0-9]{1,5}|unix:[^\0]+)$")]
"""An address as `workers.address.parse_address` reads it."""
MemberId = Annotated[str, msgspec.Meta(min_length=16, max_length=MAX_NAME)]
Weight = Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)]
Protocol = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]


class Member(msgspec.Struct, frozen=True):
    """A program that runs a serving.

    Attributes:
        id: Made up by the program; two programs never have the same.
        address: Where it takes calls.
        weight: `distribution_weight` x partitions.
        protocol: The `PROTOCOL` that it speaks.
    """

    id: MemberId
    address: AddressText
    weight: Weight = 1
    protocol: Protocol = PROTOCOL


class DirectoryChanges(msgspec.Struct, frozen=True):
    """Names whose entries came, changed or left.

    Attributes:
        owners: Models.
        members: Servings.
        nodes: Nodes.
    """

    owners: frozenset[str]
    members: frozenset[str]
    nodes: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.owners or self.members or self.nodes)


class Directory(msgspec.Struct, frozen=True):
    """One version of the table. Do not change its mappings: `changed` makes another directory.

    Attributes:
        version: How many changes led to it.
        owners: For each model the addresses of the servers that own it: one, or several shards.
        members: For each serving the programs that run it.
        nodes: For each node the address of its server.
    """

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    owners: Annotated[
        Mapping[Name, Annotated[tuple[AddressText, ...], msgspec.Meta(max_length=MAX_PLACES)]],
        msgspec.Meta(max_length=MAX_NAMES),
    ] = {}
    members: Annotated[
        Mapping[Name, Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_PLACES)]],
        msgspec.Meta(max_length=MAX_NAMES),
    ] = {}
    nodes: Annotated[Mapping[Name, AddressText], msgspec.Meta(max_length=MAX_NAMES)] = {}

    def changed(
        self,
        *,
        owners: Mapping[str, tuple[str, ...]] | None = None,
        members: Mapping[str, tuple[Member, ...]] | None = None,
        nodes: Mapping[str, str] | None = None,
    ) -> Directory:
        """Return the next version, in which these tables take the place of the old ones; this one if nothing changes.

        Raises:
            InvalidRequest: Readers would refuse it: see `read_directory`.
        """
        changed = Directory(
            self.version + 1,
            self.owners if owners is None else {**owners},
            self.members if members is None else {**members},
            self.nodes if nodes is None else {**nodes},
        )
        if not changed.changes_since(self):
            return self
        read_directory(changed.encode())
        return changed

    def is_newer_than(self, other: Directory) -> bool:
        """Tell whether it takes the place of another directory of the same writer."""
        return self.version > other.version

    def changes_since(self, other: Directory) -> DirectoryChanges:
        """Return what is different from another directory."""
        return DirectoryChanges(
            _different(self.owners, other.owners),
            _different(self.members, other.members),
            _different(self.nodes, other.nodes),
        )

    def encode(self) -> bytes:
        """Return it as msgpack."""
        return msgspec.msgpack.encode(self)


def read_directory(data: bytes | memoryview) -> Directory:
    """Read what a writer has sent. Fields that a later version has added are ignored.

    Raises:
        InvalidRequest: It is not a directory, or has more of something than the constants allow.
    """
    if len(data) > MAX_BYTES:
        raise InvalidRequest(f"expected a directory of at most {MAX_BYTES} bytes, got {len(data)}")
    try:
        frames.require_few(data, MAX_ELEMENTS)
        return _DIRECTORY.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, InvalidRequest, TooLarge) as error:
        raise InvalidRequest(f"expected a directory: {error}") from error


_DIRECTORY: Final = msgspec.msgpack.Decoder(known(Directory))


def _different(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
