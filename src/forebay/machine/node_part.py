# SPDX-License-Identifier: Apache-2.0
"""Which part of one server a process is, where a node process has divided the server among several."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from forebay.types.first_use import known
from forebay.workers.wire.address import UnixAddress

VARIABLE: Final = "FOREBAY_NODE_PART"
"""The variable in which a node process tells its child that."""


class OwnerProcess(UnixAddress, frozen=True):
    """The owner of a front of the same server: nobody need know where that is."""

    def __str__(self) -> str:
        return "process"


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """The owner of a server, or one of its fronts.

    Attributes:
        folder: Where their sockets are; only this user can enter it.
        fronts: How many fronts there are.
        lends: Whether models are loaded when they are asked for, which only the owner can do.
        number: Of this front, from 1; 0 for the owner.
        http_port: The port that the fronts share.
        grpc_port: The same for gRPC; None without one.
    """

    folder: str
    fronts: int
    lends: bool = False
    number: int = 0
    http_port: int
    grpc_port: int | None = None

    @property
    def is_owner(self) -> bool:
        """Whether it is the owner."""
        return self.number == 0

    @property
    def door(self) -> str:
        """The socket at which fronts hand requests on."""
        return f"{self.folder}/owner"

    @property
    def owner(self) -> OwnerProcess:
        """The owner, as fronts dial it and speak of it."""
        return OwnerProcess(self.door)

    @property
    def http(self) -> str:
        """The socket at which the owner speaks HTTP."""
        return f"{self.folder}/http"

    @property
    def grpc(self) -> str:
        """The socket at which the owner speaks gRPC."""
        return f"{self.folder}/grpc"

    @property
    def counts(self) -> list[str]:
        """The sockets at which fronts tell what they have counted."""
        return [f"{self.folder}/counts-{number}" for number in range(1, self.fronts + 1)]

    def told(self) -> dict[str, str]:
        """Return the variables that tell a child which part it is."""
        return {VARIABLE: msgspec.json.encode(self).decode()}


def take_part() -> Part | None:
    """Return which part this process is; None if it is a whole server. Its own children are not told."""
    told = os.environ.pop(VARIABLE, "")
    return msgspec.json.decode(told, type=known(Part)) if told else None
