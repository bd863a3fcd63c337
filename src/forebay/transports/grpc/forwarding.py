# SPDX-License-Identifier: Apache-2.0
"""A front's gRPC beside the models that it hands on: the owner answers, over a Unix socket, as if it had been asked.

Messages and metadata are forwarded unread, and so are the statuses that come back. While the owner is away, calls wait
for it, no longer than their deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from typing import TYPE_CHECKING, Any, Final

import grpc
import msgspec

from forebay.errors import Unavailable
from forebay.transports.grpc.refusals import PUSHBACK
from forebay.transports.grpc.statuses import Status
from forebay.transports.http.forwarding import AWAY

if TYPE_CHECKING:
    from forebay.transports.grpc.service import Call, Direct, GrpcService, Stream, Unary

HANDED_ON: Final = frozenset(
    {"ModelInfer", "ModelStreamInfer", "ServerLive", "Predict", "Classify", "Regress", "MultiInference"}
)
"""Methods that a front answers itself: what models are asked by, and whether it lives."""
LIVE: Final = frozenset({"ServerLive"})
"""The same where models are loaded when they are asked for, which only the owner can do."""
READY: Final = frozenset({"ServerReady", "ModelReady", "Check"})
"""What it answers itself while the owner is away: that nothing is ready."""
AWAY_S: Final = 0.3
"""Once it could not be reached for this time, the owner is away."""

_OPTIONS: Final = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_metadata_size", 1 << 20),
    ("grpc.enable_http_proxy", 0),
    # An owner that comes back is found at once.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
_OF_CONNECTIONS: Final = frozenset({"user-agent", "content-type", "te"})


class GrpcForwarding:
    """Calls to the owner, over one connection."""

    def __init__(self, path: str, grace_s: float, handed_on: Collection[str] = HANDED_ON) -> None:
        """Describe it.

        Args:
            grace_s: How long calls wait for an owner that is away.
            handed_on: Methods that the front answers itself.
        """
        self._path = path
        self._grace_s = grace_s
        self._handed_on = handed_on
        self._channel: Any = None

    def service(self, own: GrpcService) -> GrpcService:
        """Return a service whose methods are forwarded, but for those that a front answers itself."""
        names = [name for name in (*own.direct, *own.unary) if name not in self._handed_on]
        prefix = f"/{own.full_name}/"
        return msgspec.structs.replace(
            own,
            direct={name: one for name, one in own.direct.items() if name in self._handed_on},
            unary={name: self._unary(prefix + name, own.direct[name] if name in READY else None) for name in names},
            streams={
                name: one if name in self._handed_on else self._stream(prefix + name)
                for name, one in own.streams.items()
            },
            lands={name: one for name, one in own.lands.items() if name in self._handed_on},
        )

    async def close(self) -> None:
        """Hang up."""
        if self._channel is not None:
            await self._channel.close(0.0)

    async def _connected(self, patience_s: float) -> Any:
        """Return the channel once the owner is there; raises Unavailable if it is not, for all this time."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(f"unix:{self._path}", options=_OPTIONS)
        try:
            async with asyncio.timeout(patience_s):
                await self._channel.channel_ready()
        except TimeoutError:
            raise Unavailable(AWAY) from None
        return self._channel

    def _unary(self, path: str, instead: Direct | None) -> Unary:
        async def forward(message: bytes, call: Call) -> bytes:
            try:
                channel = await self._connected(self._grace_s if instead is None else AWAY_S)
            except Unavailable:
                if instead is None:
                    raise
                instead(message, call)
                return b""
            try:
                answer: bytes = await channel.unary_unary(path)(bytes(message), **_about(call))
            except grpc.aio.AioRpcError as error:
                _end(call, error)
                return b""
            return answer

        return forward

    def _stream(self, path: str) -> Stream:
        async def forward(messages: AsyncIterator[Any], call: Call) -> AsyncGenerator[bytes]:
            async def copied() -> AsyncGenerator[bytes]:
                async for message in messages:
                    yield bytes(message)

            channel = await self._connected(self._grace_s)
            asked = channel.stream_stream(path)(copied(), **_about(call))
            try:
                async for message in asked:
                    yield message
            except grpc.aio.AioRpcError as error:
                _end(call, error)
            finally:
                asked.cancel()

        return forward


def _about(call: Call) -> dict[str, Any]:
    """Return what a call says beside its messages."""
    left_s = call.deadline - time.monotonic()
    told = [
        (name, value)
        for name, value in call.metadata
        if name not in _OF_CONNECTIONS and not name.startswith(("grpc-", ":"))
    ]
    return {"metadata": told, "timeout": None if left_s == float("inf") else max(left_s, 0.0)}


def _end(call: Call, error: Any) -> None:
    """Give a call the status that the owner gave it."""
    number: int = error.code().value[0]
    told = tuple(
        (name, value)
        for name, value in error.trailing_metadata() or ()
        if name == PUSHBACK or not name.startswith(("grpc-", "ratelimit"))  # the front says itself what is left
    )
    call.end(Status(number), error.details() or "", None, told)
