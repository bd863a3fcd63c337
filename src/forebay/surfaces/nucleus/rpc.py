# SPDX-License-Identifier: Apache-2.0
"""The gRPC face of a Nucleus project: its one service, under the names of its `.proto` file.

Messages go to the worker as the bytes they came in, and so do answers on their way back. A method that takes one
message and gives one needs no task; with one worker that has one thread, calls of the same method share the way there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, InternalError, UserCodeError
from forebay.surfaces.nucleus.in_flight import TOO_MANY
from forebay.transports.grpc.service import Call, Direct, GrpcService, Stream, peer_of
from forebay.transports.grpc.statuses import Status
from forebay.types.call import ALONE, Failure, Outcome, Request

if TYPE_CHECKING:
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.nucleus.inflow import Inflows
    from forebay.surfaces.nucleus.proto import Rpc, UserService

_NEVER: Final = float("inf")

_Event = tuple[Any, "Callable[[], object] | None"]
"""A part and what to call once it was taken; or the outcome, and None."""


class _Asked(Request, gc=False, eq=False):
    """A call that is inside; `call` is how it came."""

    call: Any = None


class NucleusRpc:
    """The service."""

    def __init__(self, endpoint: Endpoint, service: UserService, inflows: Inflows, *, max_concurrency: int) -> None:
        """Describe the face; with a `max_concurrency` of 0 any number of calls may be in flight."""
        self._endpoint = endpoint
        self._service = service
        self._inflows = inflows
        self._max_concurrency = max_concurrency
        self._inside: set[Call] = set()
        self._with_context: Collection[str] = frozenset(rpc.name for rpc in service.rpcs)

    def learn(self, with_context: Collection[str]) -> None:
        """Note which methods ask for a context; the others are told nothing of their calls."""
        self._with_context = frozenset(with_context)

    def service(self) -> GrpcService:
        """Return what a port is given."""
        direct: dict[str, Direct] = {}
        streams: dict[str, Stream] = {}
        for rpc in self._service.rpcs:
            if rpc.is_asked_in_parts or rpc.answers_in_parts:
                streams[rpc.name] = self._stream(rpc)
            else:
                direct[rpc.name] = self._direct(rpc.name)
        return GrpcService(full_name=self._service.full_name, direct=direct, streams=streams, files=self._service.files)

    def _direct(self, name: str) -> Direct:
        endpoint = self._endpoint
        plain = {"rpc": name}
        is_limited = self._max_concurrency > 0

        def reply(request: Request, outcome: Outcome) -> None:
            assert type(request) is _Asked
            call = request.call
            self._inside.discard(call)
            call.answered_by(endpoint, request)
            if type(outcome) is bytes:
                call.reply(outcome)
            elif type(outcome) is Failure:
                _fail(call, outcome.error)
            else:
                _end(call, outcome)

        def run(message: bytes, call: Call) -> None:
            if is_limited and self._is_full():
                call.end(Status.UNAVAILABLE, TOO_MANY)
                return
            params = _told(plain, call) if name in self._with_context else plain
            asked = _Asked(message, reply, params, key=name, deadline=call.deadline, tenant=call.tenant, call=call)
            call.on_cancel = partial(endpoint.cancel, asked)
            self._inside.add(call)
            endpoint.submit(asked)

        return run

    def _stream(self, rpc: Rpc) -> Stream:
        plain = {"rpc": rpc.name}

        async def run(messages: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
            if self._is_full():
                call.end(Status.UNAVAILABLE, TOO_MANY)
                return
            self._inside.add(call)
            inflow = 0
            request: Request | None = None
            try:
                params = _told(plain, call)
                body = b""
                if rpc.is_asked_in_parts:
                    inflow = params["stream"] = self._inflows.open(messages, asyncio.get_running_loop())
                else:
                    found = await anext(messages, None)
                    if found is None:
                        call.end(Status.UNIMPLEMENTED, "the method takes one message, none was sent")
                        return
                    body = found
                events: asyncio.Queue[_Event] = asyncio.Queue()
                request = self._submit(body, params, call, events)
                while True:
                    said, release = await events.get()
                    if release is None:
                        _conclude(call, said)
                        return
                    try:
                        if said[0] == "message":
                            yield said[1]
                        elif said[0] == "begin":
                            call.begin_answer(said[1])
                        else:
                            self._inside.discard(call)  # first: a client that is told so may ask again
                            _end(call, said)
                    finally:
                        release()
            finally:
                self._inside.discard(call)
                if inflow:
                    self._inflows.close(inflow)
                if request is not None:
                    self._endpoint.cancel(request)

        return run

    def _submit(self, body: bytes, params: Mapping[str, Any], call: Call, events: asyncio.Queue[_Event]) -> Request:
        def reply(request: Request, outcome: Outcome) -> None:
            call.answered_by(self._endpoint, request)
            events.put_nowait((outcome, None))

        def on_part(part: Any, release: Callable[[], object]) -> None:
            events.put_nowait((part, release))

        request = Request(body=body, reply=reply, params=params, key=ALONE, deadline=call.deadline, on_part=on_part)
        request.tenant = call.tenant
        self._endpoint.submit(request)
        return request

    def _is_full(self) -> bool:
        return 0 < self._max_concurrency <= len(self._inside)


def _told(plain: Mapping[str, Any], call: Call) -> dict[str, Any]:
    """Return what a method may ask of its call."""
    return {
        **plain,
        "metadata": call.metadata,
        "peer": peer_of(call),
        "deadline": None if call.deadline == _NEVER else call.deadline,
    }


def _conclude(call: Call, outcome: Outcome) -> None:
    """End a stream as its outcome says, unless a part of it has."""
    if type(outcome) is Failure:
        _fail(call, outcome.error)
    elif type(outcome) is bytes:  # one message for many
        call.end(Status.OK, message=outcome)
    elif outcome is not None:
        _end(call, outcome)


def _end(call: Call, said: Any) -> None:
    _, code, details, metadata, message, before = said
    if before or (code == Status.OK and message is None):
        call.begin_answer(before)
    call.end(Status(code), details, message, metadata)


def _fail(call: Call, error: ForebayError) -> None:
    """End a call by an error; what user code raised was logged where it ran."""
    call.fail(InternalError("internal server error") if isinstance(error, UserCodeError) else error)
