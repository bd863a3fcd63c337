# SPDX-License-Identifier: Apache-2.0
"""Servers of the same model, asked in turn: if one is down the next one is asked, all within one deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Final, Generic, TypeVar
from urllib.parse import urlsplit

import msgspec

from forebay.errors import ConfigError, DeadlineExceeded, Unavailable
from forebay.types.did_you_mean import meant

CONNECT_S: Final = 2.0
"""How long a server may take to let us in before the next one is tried."""
PAUSE_S: Final = 1.0
"""How long a server that was down, or did not answer in time, is asked only when no other answers."""
MAX_ANSWER_BYTES: Final = 256 * 1024 * 1024
"""Longest answer."""

PARENT: Final = "traceparent"
"""The header that says which trace a call belongs to, and what it is called among the params of a request."""

parent: ContextVar[str] = ContextVar("forebay_traceparent", default="")
"""The caller's `traceparent` of what runs; whoever is asked for it is told, and so belongs to the same trace."""

SCHEMES: Final = ("http", "https", "grpc", "grpcs")


class ServerAddress(msgspec.Struct, frozen=True):
    """Where a server is.

    Attributes:
        scheme: `http`, `https`, `grpc`, `grpcs`.
        host: Its name or address, IPv6 without brackets.
        path: What stands behind them, without slashes at the ends.
    """

    scheme: str
    host: str
    port: int
    path: str = ""

    @property
    def address(self) -> str:
        """Host and port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, scheme: str, where: str = "") -> ServerAddress:
        """Read `[scheme://]host:port[/path]`.

        Args:
            scheme: What it has if it names none.
            where: Where it was written, for messages.

        Raises:
            ConfigError: If it is none.
        """
        named = f"'{text}' in {where}" if where else f"'{text}'"
        full = text.strip() if "://" in text else f"{scheme}://{text.strip()}"
        try:
            parts = urlsplit(full)
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        if not host or not port or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{named}: expected HOST:PORT, such as 127.0.0.1:9393")
        if parts.scheme not in SCHEMES:
            did_you_mean = meant(parts.scheme, SCHEMES)
            raise ConfigError(f"{named}: expected {', '.join(SCHEMES)} before ://{did_you_mean}")
        return cls(parts.scheme, host, port, parts.path.strip("/"))


class Unreachable(Exception):
    """A server took no connection, or went away before it had answered; another one may answer."""


class Rotation:
    """In which order servers are asked; no I/O and no clock."""

    def __init__(self, count: int) -> None:
        """Begin with the first of `count` servers."""
        self._down_until = [0.0] * count
        self._next = 0

    def order(self, now: float) -> list[int]:
        """Return the servers in the order in which one call asks them: in turn, those that were down last."""
        count = len(self._down_until)
        turn = [(self._next + step) % count for step in range(count)]
        up = [at for at in turn if self._down_until[at] <= now]
        self._next = ((up or turn)[0] + 1) % count
        return up + sorted((at for at in turn if self._down_until[at] > now), key=self._down_until.__getitem__)

    def failed(self, at: int, now: float) -> None:
        """Note that a server was down, or silent."""
        self._down_until[at] = now + PAUSE_S

    def answered(self, at: int) -> None:
        """Note that a server is up."""
        self._down_until[at] = 0.0


_Connection = TypeVar("_Connection")
_Answer = TypeVar("_Answer")


class Servers(Generic[_Connection]):
    """Asks servers in turn; for any number of threads."""

    def __init__(
        self, endpoints: Sequence[ServerAddress], connections: Sequence[_Connection], timeout_s: float
    ) -> None:
        """Describe them.

        Args:
            endpoints: Where they are, for messages.
            connections: What a call is made with, one for each.
            timeout_s: How long a call may take in all.
        """
        self._endpoints = endpoints
        self.connections = connections
        self._timeout_s = timeout_s
        self._rotation = Rotation(len(endpoints))
        self._lock = threading.Lock()

    def ask(self, call: Callable[[_Connection, float], _Answer]) -> _Answer:
        """Make a call at the first server that answers.

        Args:
            call: Makes it with a connection, until a moment of the monotonic clock. `Unreachable` tries the next one,
                `TimeoutError` ends it.

        Raises:
            Unavailable: If no server can be reached.
            DeadlineExceeded: If one does not answer in time.
            ForebayError: What else `call` raises.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._lock:
            order = self._rotation.order(time.monotonic())
        reasons: list[str] = []
        for at in order:
            if reasons and time.monotonic() >= deadline:
                break
            address = self._endpoints[at].address
            try:
                answer = call(self.connections[at], deadline)
            except Unreachable as problem:
                reasons.append(f"{address}: {problem}")
                with self._lock:
                    self._rotation.failed(at, time.monotonic())
            except TimeoutError as problem:
                with self._lock:
                    self._rotation.failed(at, time.monotonic())
                text = f"the model server {address} did not answer within {self._timeout_s:g} s"
                raise DeadlineExceeded(text) from problem
            else:
                with self._lock:
                    self._rotation.answered(at)
                return answer
        raise Unavailable(f"no model server can be reached ({'; '.join(reasons)})")
