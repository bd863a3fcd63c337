# SPDX-License-Identifier: Apache-2.0
"""What a gRPC port serves: services by their full name, with methods that take bytes and return bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import msgspec


class Context(Protocol):
    """What a method may know of its call; part of what `grpc.aio` offers."""

    def time_remaining(self) -> float | None:
        """Return the seconds the client still waits, None if it waits for ever."""
        ...

    def peer(self) -> str:
        """Return who calls, as `ipv4:ADDRESS:PORT`."""
        ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]] | None:
        """Return what the client says beside its message."""
        ...


Handler = Callable[[bytes, Context], Awaitable[bytes]]
"""Answers one call; a `ForebayError` becomes the status of its code, and the coroutine is cancelled with the call."""


class GrpcService(msgspec.Struct, frozen=True, kw_only=True):
    """A service of unary methods.

    Attributes:
        full_name: With its package.
        methods: Handlers by the names of the methods.
        files: Serialized descriptors of the files it is described in, each after those it imports; without them it
            cannot be looked up by reflection.
    """

    full_name: str
    methods: Mapping[str, Handler]
    files: Sequence[bytes] = ()


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A gRPC port.

    Attributes:
        host: Address to bind; other machines reach the server only if this says so.
        port: TCP port; 0 takes a free one.
        max_message_bytes: Longest message, in and out; longer ones get RESOURCE_EXHAUSTED.
        max_calls: Calls at a time, health checks included; more get RESOURCE_EXHAUSTED.
        certfile: TLS certificate chain in PEM; with it the port speaks TLS.
        keyfile: Its private key; None if `certfile` holds both.
        api_keys: If any, a call needs one of them in its metadata, as `x-api-key` or `authorization: Bearer`.
    """

    host: str = "127.0.0.1"
    port: int = 0
    max_message_bytes: int = 256 * 1024 * 1024
    max_calls: int = 4096
    certfile: str | None = None
    keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
