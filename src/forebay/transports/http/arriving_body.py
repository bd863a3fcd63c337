# SPDX-License-Identifier: Apache-2.0
"""The body of the message that a connection of the fast lane is reading: whole, joined, or where workers see it.

It also has the account of the connection, which counts the body and all else that the connection holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from forebay.workers.memory.landing import Joining, Landing, Sink

if TYPE_CHECKING:
    from forebay.server.byte_budget import ByteAccount, Holder
    from forebay.transports.http.head import Head
    from forebay.transports.http.port import HttpPort


class ArrivingBody:
    """A body, piece by piece.

    Attributes:
        held_bytes: What is kept of it, and of a long head before it.
    """

    __slots__ = ("_account", "_lane", "_owner", "_sink", "_whole", "held_bytes")

    def __init__(self, lane: HttpPort, owner: Holder) -> None:
        self._lane = lane
        self._owner: Holder | None = owner
        self._account: ByteAccount | None = None
        self._whole: bytes | memoryview = b""
        self._sink: Sink | None = None
        self.held_bytes = 0

    @property
    def account(self) -> ByteAccount:
        """What the connection holds; most hold too little to have an account."""
        if self._account is None:
            self._account = self._lane.byte_budget.open(self._owner, self._lane.max_connection_bytes)
        return self._account

    def begin(self) -> None:
        """Forget what came before."""
        self._whole, self._sink = b"", None

    def hold(self, size: int) -> None:
        """Count what is kept; the largest holder may be refused for it."""
        if self._owner is not None:
            self.held_bytes += size
            self.account.arrive(size)

    def take(self, piece: bytes, head: Head, received: int) -> None:
        """Keep a piece; `received` counts it and all before."""
        if received == head.length and self._sink is None:
            self._whole = piece
            return
        self.hold(len(piece))
        if not self.held_bytes:  # it was the one that was refused
            return
        if self._sink is None:
            assert head.route is not None
            places = head.route.places
            self._sink = Joining() if places is None else Landing(max(head.length, 0), places)
        self._sink.write(piece)

    def room(self, size: int) -> memoryview | None:
        """Return where so much is to be put by the kernel, and maybe a byte more; None if it does not land."""
        return self._sink.room(size + 1) if type(self._sink) is Landing else None

    def byte_after(self) -> bytes:
        """Return what was put there after the body."""
        assert type(self._sink) is Landing
        return self._sink.byte_after()

    def placed(self, size: int) -> None:
        """Count so much as put there."""
        assert type(self._sink) is Landing
        self._sink.advance(size)

    def taken(self) -> bytes | memoryview:
        """Hand over the whole."""
        body = self._whole if self._sink is None else self._sink.getvalue()
        self.drop()
        return body

    def drop(self) -> None:
        """Forget it; it has another owner now, or none."""
        if self.held_bytes:
            self.account.forget_arriving(self.held_bytes)
            self.held_bytes = 0
        self._whole, self._sink = b"", None

    def close(self) -> None:
        """Forget it and all else that the connection holds: it is closed."""
        self.held_bytes = 0
        self._owner = None
        if self._account is not None:
            self._account.close()
        self._whole, self._sink = b"", None
