# SPDX-License-Identifier: Apache-2.0
"""The three kinds of methods, as what begins a call."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from forebay.errors import QueueFull
from forebay.transports.grpc.heads import Method
from forebay.transports.grpc.statuses import Status

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from forebay.errors import ForebayError
    from forebay.serving.endpoint import Endpoint
    from forebay.transports.grpc.calls import OpenCall
    from forebay.transports.grpc.service import Direct, GrpcService, Stream, Unary

    Own = Mapping[type[ForebayError], Status]

log = logging.getLogger("forebay.requests")


def by_path(services: Sequence[GrpcService]) -> dict[bytes, Method]:
    """Return the methods of services by path."""
    found: dict[bytes, Method] = {}
    for service in services:
        prefix, own = f"/{service.full_name}/", service.statuses
        for name, direct in service.direct.items():
            queue = service.queues.get(name)
            found[(prefix + name).encode()] = _direct(name, direct, queue, own, is_public=name in service.public)
        for name, unary in service.unary.items():
            found[(prefix + name).encode()] = _unary(name, unary, own, is_public=name in service.public)
        for name, stream in service.streams.items():
            found[(prefix + name).encode()] = _stream(name, stream, own, is_public=name in service.public)
        for name, places_of in service.lands.items():
            found[(prefix + name).encode()].lands = places_of
    return found


def _direct(name: str, method: Direct, queue: Endpoint | None, own: Own, *, is_public: bool) -> Method:
    full = None if queue is None else QueueFull(f"the queue of '{queue.name}' is full; try again later")

    def begin(call: OpenCall, message: Any) -> None:
        if queue is not None and full is not None and queue.is_full():
            queue.reject(full)  # now, for its client may leave before it is told
            call.fail(full, own)
            return
        try:
            method(message, call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)

    return Method(begin, is_public=is_public)


def _unary(name: str, method: Unary, own: Own, *, is_public: bool) -> Method:
    async def run(call: OpenCall, message: Any) -> None:
        try:
            call.reply(await method(message, call))
        except asyncio.CancelledError:
            call.end(Status.CANCELLED, "the call was called off")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)

    def begin(call: OpenCall, message: Any) -> None:
        call.run(run(call, message))

    return Method(begin, is_public=is_public)


def _stream(name: str, method: Stream, own: Own, *, is_public: bool) -> Method:
    async def run(call: OpenCall) -> None:
        answers: Any = None
        try:
            answers = method(_Messages(call), call)
            async for message in answers:
                await call.send(message)
            call.end(Status.OK)
        except asyncio.CancelledError:
            call.end(Status.CANCELLED, "the call was called off")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)
        finally:
            await _close(answers, name)

    def begin(call: OpenCall) -> None:
        call.run(run(call))

    return Method(begin, is_stream=True, is_public=is_public)


async def _close(answers: Any, name: str) -> None:
    close = getattr(answers, "aclose", None)
    if close is not None:
        try:
            await close()
        except Exception:
            log.exception("%s failed while it was closed", name)


class _Messages:
    """The messages of a client, as a method sees them."""

    def __init__(self, call: OpenCall) -> None:
        self._call = call

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes | memoryview:
        message = await self._call.next_message()
        if message is None:
            raise StopAsyncIteration
        return message
