# SPDX-License-Identifier: Apache-2.0
"""The three kinds of methods, as what begins a call. The elements of long messages are counted before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, QueueFull, ShareUsed, TooLarge
from forebay.transports.grpc.heads import Method
from forebay.transports.grpc.statuses import Status
from forebay.transports.reading_turns import in_turns
from forebay.types.element_limits import DEFAULT, ElementLimits, Steps
from forebay.types.proto_elements import message_elements

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.transports.grpc.calls import OpenCall
    from forebay.transports.grpc.service import Direct, GrpcService, Stream, Unary

    Own = Mapping[type[ForebayError], Status]

log = logging.getLogger("forebay.requests")


class _Counting:
    """Counts the elements of the messages that a method takes."""

    def __init__(self, descriptor: Any, limits: ElementLimits) -> None:
        self._descriptor = descriptor
        self._limits = limits
        self.passes_bytes = min(limits.tensors, limits.elsewhere) if descriptor is not None else 1 << 62
        """A message of this length cannot have too many."""

    def steps(self, message: Any) -> Steps[None]:
        """Count those of a message; raises TooLarge if there are too many."""
        return message_elements(message, self._descriptor, self._limits)


def by_path(services: Sequence[GrpcService], limits: ElementLimits = DEFAULT) -> dict[bytes, Method]:
    """Return the methods of services by path.

    Args:
        limits: How many elements a message may have, of services that say what their messages are.
    """
    found: dict[bytes, Method] = {}
    for service in services:
        prefix, own = f"/{service.full_name}/", {TooLarge: Status.RESOURCE_EXHAUSTED, **service.statuses}
        takes = _messages_of(service)
        counting = {
            name: _Counting(takes.get(name), limits) for name in (*service.direct, *service.unary, *service.streams)
        }
        for name, direct in service.direct.items():
            queue = service.queues.get(name)
            found[(prefix + name).encode()] = _direct(
                name, direct, queue, own, counting[name], is_public=name in service.public
            )
        for name, unary in service.unary.items():
            found[(prefix + name).encode()] = _unary(name, unary, own, counting[name], is_public=name in service.public)
        for name, stream in service.streams.items():
            found[(prefix + name).encode()] = _stream(
                name, stream, own, counting[name], is_public=name in service.public
            )
        for name, places_of in service.lands.items():
            found[(prefix + name).encode()].lands = places_of
    return found


def _messages_of(service: GrpcService) -> Mapping[str, Any]:
    """Return the descriptors of the messages that the methods of a service take, by the methods' names."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pool: Any = DescriptorPool()
    for file in service.files:
        pool.AddSerializedFile(file)
    try:
        methods = pool.FindServiceByName(service.full_name).methods_by_name
    except KeyError:  # it does not say
        return {}
    return {name: method.input_type for name, method in methods.items()}


def _direct(
    name: str, method: Direct, queue: Endpoint | None, own: Own, counting: _Counting, *, is_public: bool
) -> Method:
    full = None if queue is None else QueueFull(f"the queue of '{queue.name}' is full; try again later")
    share = None if queue is None else ShareUsed(f"the queue of '{queue.name}' is full; try again later")

    def begin(call: OpenCall, message: Any) -> None:
        tenant = call.head.tenant
        if queue is not None and (queue.is_full() if tenant is None else queue.is_full_for(tenant)):
            error = full if tenant is None else share
            assert error is not None
            queue.reject(error, tenant=tenant)  # now, for its client may leave before it is told
            call.fail(error, own)
            return
        if len(message) > counting.passes_bytes:
            call.run(counted(call, message))
            return
        try:
            method(message, call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)

    async def counted(call: OpenCall, message: Any) -> None:
        try:
            await in_turns(counting.steps(message))
            method(message, call)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)

    return Method(begin, is_public=is_public)


def _unary(name: str, method: Unary, own: Own, counting: _Counting, *, is_public: bool) -> Method:
    async def run(call: OpenCall, message: Any) -> None:
        try:
            if len(message) > counting.passes_bytes:
                await in_turns(counting.steps(message))
            call.reply(await method(message, call))
        except asyncio.CancelledError:
            call.end(Status.CANCELLED, "the call was cancelled")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the status of this call
            call.fail_by(error, name, own)

    def begin(call: OpenCall, message: Any) -> None:
        call.run(run(call, message))

    return Method(begin, is_public=is_public)


def _stream(name: str, method: Stream, own: Own, counting: _Counting, *, is_public: bool) -> Method:
    async def run(call: OpenCall) -> None:
        answers: Any = None
        try:
            answers = method(_Messages(call, counting), call)
            async for message in answers:
                await call.send(message)
            call.end(Status.OK)
        except asyncio.CancelledError:
            call.end(Status.CANCELLED, "the call was cancelled")
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
            log.exception("%s failed to close", name)


class _Messages:
    """The messages of a client, as a method sees them."""

    def __init__(self, call: OpenCall, counting: _Counting) -> None:
        self._call = call
        self._counting = counting

    def __aiter__(self) -> AsyncIterator[bytes | memoryview]:
        return self

    async def __anext__(self) -> bytes | memoryview:
        message = await self._call.next_message()
        if message is None:
            raise StopAsyncIteration
        if len(message) <= self._counting.passes_bytes:
            return message
        try:
            await in_turns(self._counting.steps(message))
        except TooLarge as error:  # who reads may be a task of the method's own, which nobody waits for
            self._call.refuse_message(error.message)
        else:
            return message
        await asyncio.sleep(0)  # the method was cancelled: what it does itself ends here
        raise StopAsyncIteration
