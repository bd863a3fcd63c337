# SPDX-License-Identifier: Apache-2.0
"""What a server has one of, found by whatever is made for it: two servers in one process share none of it.

Theory of operation. A server enters its state before it makes ports and workers. These ask once, when they are made,
for what they need, such as who listens to the timeline; nobody asks while requests run. What is made outside of any
server, such as a `Serving`, belongs to the state of the process.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")


class ServerState:
    """One object of each class that was asked for."""

    def __init__(self) -> None:
        """Begin without any."""
        self._made: dict[type[Any], Any] = {}

    def of(self, kind: type[T]) -> T:
        """Return the only object of a class, made without arguments when it is first asked for, in whatever thread."""
        found = self._made.get(kind)
        return cast("T", self._made.setdefault(kind, kind()) if found is None else found)

    def put(self, made: object) -> None:
        """Have this returned as the only object of its class, of which none was asked for so far."""
        self._made[type(made)] = made

    @contextmanager
    def entered(self) -> Generator[None]:
        """Have it found by what is made in the block."""
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)


PROCESS: Final = ServerState()
"""That of what is made outside of any server."""
_current: Final[ContextVar[ServerState]] = ContextVar("forebay_server_state", default=PROCESS)


def here(kind: type[T]) -> T:
    """Return what the server has of a class for which something is being made."""
    return _current.get().of(kind)
