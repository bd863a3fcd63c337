# SPDX-License-Identifier: Apache-2.0
"""What a gRPC port serves: services by their full name, with methods that take bytes and return bytes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from forebay.errors import ForebayError


class Call(Protocol):
    """One call, as its method sees it.

    Attributes:
        deadline: Monotonic seconds at which the client stops waiting; infinity if it never does.
        on_cancel: Called once if the client goes away, calls it off or its deadline passes before it is answered; a
            method that answers later sets it.
    """

    deadline: float
    on_cancel: Callable[[], object] | None

    @property
    def peer(self) -> str:
        """Who calls, as `ADDRESS:PORT`."""
        ...

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """What the client says beside its message: names in lower case, bytes where the name ends in `-bin`."""
        ...

    def reply(self, message: bytes) -> None:
        """Answer the call with its only message; does nothing if it has ended."""
        ...

    def fail(self, error: ForebayError) -> None:
        """Answer the call with the status of an error; does nothing if it has ended."""
        ...


Direct = Callable[[bytes, Call], None]
"""Answers a call now or later by `reply` or `fail`, without a task; what it raises becomes the status."""

Unary = Callable[[bytes, Call], Awaitable[bytes]]
"""Answers a call with what it returns; it is cancelled with the call."""

Stream = Callable[[AsyncIterator[bytes], Call], AsyncIterator[bytes]]
"""Answers a call with what it yields; it is closed with the call. A client that takes nothing holds it up."""


class GrpcService(msgspec.Struct, frozen=True, kw_only=True):
    """A service. What a method raises becomes the status of the call, a `ForebayError` that of its code.

    Attributes:
        full_name: With its package.
        direct: Methods that answer without a task, by name.
        unary: Methods that are coroutines, by name.
        streams: Methods that take and give any number of messages, by name.
        files: Serialized descriptors of the files it is described in, each after those it imports; without them it
            cannot be looked up by reflection.
    """

    full_name: str
    direct: Mapping[str, Direct] = {}
    unary: Mapping[str, Unary] = {}
    streams: Mapping[str, Stream] = {}
    files: Sequence[bytes] = ()


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A gRPC port.

    Attributes:
        host: Address to bind; other machines reach the server only if this says so.
        port: TCP port; 0 takes a free one.
        max_message_bytes: Longest message, in and out, also once unpacked; longer ones get RESOURCE_EXHAUSTED.
        max_buffered_bytes: Bytes of messages that have not come whole yet, and of those that came packed until their
            calls are over, of all clients together; the call that would exceed it gets RESOURCE_EXHAUSTED. Clients that
            drip a byte now and then can hold them.
        max_metadata_bytes: Longest metadata of a call as HTTP/2 counts it: names, values and 32 bytes for each field.
        max_calls: Calls at a time, without health checks; more get RESOURCE_EXHAUSTED.
        max_watches: Clients that watch the health at a time; more get RESOURCE_EXHAUSTED.
        max_streams: Calls at a time on one connection; clients wait with more.
        max_connections: Connections at a time; more are closed.
        read_timeout_s: A client that is in the middle of a frame or of a message and sends nothing for this time is cut
            off.
        write_timeout_s: A client that takes nothing of its answers for this time is cut off.
        certfile: TLS certificate chain in PEM; with it the port speaks TLS.
        keyfile: Its private key; None if `certfile` holds both.
        api_keys: If any, a call needs one of them in its metadata, as `x-api-key` or `authorization: Bearer`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message_bytes: int = 256 * 1024 * 1024
    max_buffered_bytes: int = 1024 * 1024 * 1024
    max_metadata_bytes: int = 16 * 1024
    max_calls: int = 4096
    max_watches: int = 1024
    max_streams: int = 1024
    max_connections: int = 4096
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    certfile: str | None = None
    keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
