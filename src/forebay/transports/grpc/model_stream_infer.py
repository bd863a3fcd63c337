# SPDX-License-Identifier: Apache-2.0
"""One call of `ModelStreamInfer`: a reader, which begins requests, and what is ready to be sent.

Answers leave in the order of their requests, as Triton's do, so that a client need not look at ids; an answer that
is ready sooner waits. The parts of a model that streams leave as they come. A part is done with when the client has
room for more, so nobody computes ahead of a client that takes nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, InvalidRequest, Unavailable
from forebay.protocols.kserve import response_bytes
from forebay.protocols.kserve.infer_calls import InferRequest, InferResponse, timeout_of
from forebay.protocols.kserve.request_layouts import RequestLayout, id_of
from forebay.transports.grpc.model_infer import BegunInfer, InferMethods
from forebay.transports.grpc.statuses import of_error
from forebay.types.call import EMPTY, Failure, Outcome, Request, nothing

if TYPE_CHECKING:
    from forebay.protocols.kserve.response_bytes import Written
    from forebay.server.served import Served, Session
    from forebay.transports.grpc.service import Call
    from forebay.types.tensor import Data, Tensor

MAX_IN_FLIGHT: Final = 256
"""Requests of one stream that may be inside at a time, and answers that may wait; nothing is read of it meanwhile.

So it is while they hold half of the bytes that its connection may hold: the client is slowed, and not refused.
"""

_WANTS_FINAL: Final = "triton_enable_empty_final_response"
_IS_FINAL: Final = "triton_final_response"


async def infer_stream(inference: InferMethods, messages: AsyncIterator[Data], call: Call) -> AsyncIterator[Written]:
    """Answer `ModelStreamInfer`."""
    stream = InferStream(inference, call)
    reading = asyncio.ensure_future(stream.read(messages))
    try:
        async for message in stream.ready():
            yield message
        await reading  # what it raises is not an error of a request
    finally:
        reading.cancel()
        stream.close()


class InferStream:
    """One call of `ModelStreamInfer`."""

    def __init__(self, inference: InferMethods, call: Call) -> None:
        self._id = ""
        """What the client calls the request that is being read."""
        self._inference = inference
        self._call = call
        self._open: set[BegunInfer] = set()
        self._line: dict[object, Written | None] = {}
        """Requests that are answered in order, with the answers of those that are ready."""
        self._waiting = 0
        """Answers in the line."""
        self._out: deque[tuple[Written, Callable[[], object] | None]] = deque()
        self._has_all = False
        self._has_begun = False
        self._joined: Served | None = None
        """Whose session takes all requests, if the first one was for such a model."""
        self._session: Session | None = None
        self._in_session: deque[int] = deque()
        """What is counted of the messages that the session may still hold."""
        self._has_ended = False
        self._is_leaving = False
        self._failed: ForebayError | None = None
        self._news: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        call.on_leave = self._leave

    async def read(self, messages: AsyncIterator[Data]) -> None:
        """Begin the requests of the client; what is wrong with one is told, and the next is read."""
        is_empty = True
        try:
            async for message in messages:
                is_empty = False
                self._id = ""
                try:
                    asked = await self._begin(message)
                except ForebayError as error:
                    self._put_in_line(object(), _error(error, self._id))
                else:
                    if asked is None:
                        self._in_session.append(self._call.keep_message())
                    elif not asked.done:
                        self._open.add(asked)
                        asked.kept_bytes = self._call.keep_message()
                while self._is_full():
                    self._room = asyncio.get_running_loop().create_future()
                    await self._room
            if is_empty:
                self._failed = InvalidRequest("the stream ended before its first request")
        finally:
            self._has_all = True
            if self._session is not None:
                self._session.close()
            self._wake()

    async def ready(self) -> AsyncIterator[Written]:
        """Yield what is to be sent, until all is answered."""
        while True:
            while self._out:
                message, release = self._out.popleft()
                self._call.queue(-_size(message))
                yield message
                if release is not None:
                    release()
                self._make_room()
            if self._failed is not None:
                try:
                    raise self._failed
                finally:
                    self._failed = None  # its traceback refers to this stream
            if self._has_all and not self._open and (self._session is None or self._has_ended):
                return
            if self._is_leaving and not self._open and (self._session is None or self._session.is_idle):
                raise Unavailable("the server is stopping; open a new stream")
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    def close(self) -> None:
        """Call off what is still inside: nobody waits for it any more."""
        self._has_all = True
        self._call.on_leave = None  # which refers to this stream, and that to the call
        for asked in list(self._open):
            asked.cancel()
        if self._session is not None:
            self._session.cancel()
        for waiting in self._line.values():
            if waiting is not None:
                self._call.queue(-_size(waiting))
        self._line.clear()
        self._waiting = 0
        while self._out:
            message, release = self._out.popleft()
            self._call.queue(-_size(message))
            if release is not None:
                release()

    async def _begin(self, message: Data) -> BegunInfer | None:
        """Begin a request; None if it went to the session of the stream.

        Raises:
            ForebayError: Why it cannot be answered.
        """
        inference, call = self._inference, self._call
        try:
            layout = inference.layouts.of(message)
        except InvalidRequest:
            self._id = id_of(message)
            raise
        self._id = layout.id_in(message)
        tensors = await inference.read(message, layout)
        if inference.lending.may_lend(layout.model, layout.version):
            async with inference.lending.lend(layout.model, layout.version, call, timeout_of(layout.parameters)):
                return inference.begin(call, message, layout, tensors, self._enter)
        if not self._has_begun:
            served = inference.served(layout.model, layout.version)
            self._has_begun = True
            if served.session is not None:
                self._join(served)
        if self._joined is not None:
            self._send(layout, tensors)
            return None
        return inference.begin(call, message, layout, tensors, self._enter)

    def _enter(self, asked: BegunInfer) -> None:
        """Register a request before it can be answered."""
        asked.reply = self._answered
        if asked.plan.served.contract.streams:
            asked.on_part = partial(self._part, asked)
        else:
            self._line[asked] = None

    def _join(self, served: Served) -> None:
        """Let all requests of the stream go to one session."""
        assert served.session is not None
        self._joined = served
        call = self._call
        self._session = served.session(
            self._said, self._ended, self._make_room, deadline=call.deadline, tenant=call.tenant
        )

    def _send(self, layout: RequestLayout, tensors: Sequence[Tensor]) -> None:
        """Send a request to the session; raises the ForebayError that says what is wrong with it."""
        assert self._joined is not None
        assert self._session is not None
        name = self._joined.endpoint.name
        if layout.model != name:
            msg = f"incorrect servable name: '{layout.model[:100]}' on a stream of '{name}'; open another stream for it"
            raise InvalidRequest(msg)
        if layout.version not in {"", "0", self._joined.endpoint.config.version}:
            raise InvalidRequest(f"incorrect servable version: '{layout.version[:100]}' on a stream of '{name}'")
        asked = InferRequest(model=name, inputs=tensors, id=self._id, parameters=layout.parameters)
        self._session.send(asked)

    def _part(self, asked: BegunInfer, outcome: Any, release: Callable[[], object]) -> None:
        """Send a part of an answer; `release` is called when the client has room for another."""
        self._put(self._message(asked, outcome, is_final=False), release)

    def _answered(self, asked: Request, outcome: Outcome) -> None:
        """Send an answer, or the end of one that came in parts."""
        assert type(asked) is BegunInfer
        self._open.discard(asked)
        self._call.answered_by(asked.plan.served.endpoint, asked)
        self._call.release_message(asked.kept_bytes)
        if asked in self._line:
            self._put_in_line(asked, self._answer(asked, outcome))
        elif type(outcome) is Failure:
            self._put(_error(outcome.error, asked.name))
        elif _wants_final(asked):
            config = asked.plan.served.endpoint.config
            told = InferResponse(
                outputs=(), model=config.name, version=config.version, id=asked.name, parameters={_IS_FINAL: True}
            )
            last = response_bytes.response(told)
            self._put(response_bytes.stream_response(last))
        # The collector does not look at requests, and a traceback may hold this one: no circle may go through it.
        asked.reply, asked.call, asked.on_part = nothing, None, None
        self._wake()
        self._make_room()

    def _answer(self, asked: BegunInfer, outcome: Outcome) -> Written:
        """Return the message of a whole answer."""
        if type(outcome) is Failure:
            return _error(outcome.error, asked.name)
        return self._message(asked, outcome, is_final=True)

    def _message(self, asked: BegunInfer, outcome: Any, *, is_final: bool) -> Written:
        """Return an answer or a part of one, and whether it was all if the client wants to know."""
        parameters = {_IS_FINAL: is_final} if _wants_final(asked) else EMPTY
        try:
            message = self._inference.response(asked, outcome, parameters)
        except ForebayError as error:
            return _error(error, asked.name)
        return response_bytes.stream_response(message)

    def _put_in_line(self, place: object, message: Written) -> None:
        """Send an answer behind those of earlier requests, and whatever waited for it."""
        self._line[place] = message
        self._call.queue(_size(message))
        self._waiting += 1
        while self._line:
            first = next(iter(self._line))
            ready = self._line[first]
            if ready is None:
                break
            del self._line[first]
            self._waiting -= 1
            self._out.append((ready, None))
        self._wake()

    def _put(self, message: Written, release: Callable[[], object] | None = None) -> None:
        self._out.append((message, release))
        self._call.queue(_size(message))
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _said(self, answer: InferResponse, release: Callable[[], object]) -> None:
        """Send an answer of the session."""
        message = response_bytes.response(answer)
        self._put(response_bytes.stream_response(message), release)

    def _ended(self, request: Request | None, outcome: Outcome) -> None:
        """Take how the session ended; its error is that of the call."""
        if request is not None and self._joined is not None:
            self._call.answered_by(self._joined.endpoint, request)
        self._has_ended = True
        if type(outcome) is Failure:
            self._failed = outcome.error
        self._wake()
        self._make_room()

    def _leave(self) -> None:
        """End as soon as nothing is inside: the server is about to stop."""
        self._is_leaving = True
        self._wake()

    def _is_full(self) -> bool:
        if self._session is None and self._call.holds_much:  # a session may wait for more before it answers
            return True
        pending = 0 if self._session is None or self._has_ended else self._session.pending
        return len(self._open) + self._waiting + len(self._out) + pending >= MAX_IN_FLIGHT

    def _make_room(self) -> None:
        held = 0 if self._session is None or self._has_ended else self._session.held
        while len(self._in_session) > held:
            self._call.release_message(self._in_session.popleft())
        if self._is_leaving:
            self._wake()
        if self._room is not None and not self._room.done() and not self._is_full():
            self._room.set_result(None)


def _size(message: Written) -> int:
    return len(message) if isinstance(message, bytes) else sum(map(len, message))


def _error(error: ForebayError, id: str) -> bytes:
    """Return what a stream says of an error."""
    _, text = of_error(error)
    return response_bytes.stream_error(text, id)


def _wants_final(asked: BegunInfer) -> bool:
    return asked.plan.layout.parameters.get(_WANTS_FINAL) is True
