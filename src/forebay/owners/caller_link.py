# SPDX-License-Identifier: Apache-2.0
"""The owner's end of a link with a front: requests that are handed on are submitted like those of its own clients.

Theory of operation. A bundle is submitted request by request to the endpoints of the models, so requests of all fronts
and of clients of the owner meet in one queue. What becomes known of them in a turn of the loop leaves at its end, in
one frame. With the answers of a model goes the room in its queue, and how much of this link it has counted by then.

A front that is gone waits for nothing: its requests are cancelled. While the owner drains, requests that are still on
their way are handed back untouched, and the front keeps them for the owner's successor.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import ForebayError, InvalidRequest, TooLarge, Unavailable
from forebay.owners.caller_conversation import CallerConversation
from forebay.owners.request_form import require_form, require_params
from forebay.owners.states import CALL_OFF, END, PARTS, RUNNING, SEATS
from forebay.owners.wire import EndedSeat, HandedOn, ModelAnswers
from forebay.serving.tensor_face import TENSORS, TensorRequest
from forebay.types.call import Failure, Media, ReplyToAll, Request
from forebay.types.failures import without_frames
from forebay.workers import frames
from forebay.workers.address import peer_of
from forebay.workers.loop_heartbeat import BEAT_FRAME, SILENCE, LoopHeartbeat
from forebay.workers.pool import CREDIT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.owners.callers import Callers
    from forebay.owners.wire import HandedRequests, ModelRequests
    from forebay.server.served import Served
    from forebay.transports.state_table import State
    from forebay.types.call import Outcome


UNREAD_BYTES: Final = 1 << 24
"""What may be on its way to a front; beyond that nothing more is read of it, and no stream goes on."""


class _Flow(msgspec.Struct, eq=False):
    """How much more of a streamed answer its front has room for.

    Attributes:
        room: Parts that may still be sent.
        held: Called once there is room again.
    """

    room: int = CREDIT
    held: deque[Callable[[], object]] = msgspec.field(default_factory=deque[Any])


class _Seat(Request, gc=False, eq=False):
    """A request of a front."""

    seat: int = 0
    state: State = RUNNING
    flow: _Flow | None = None
    served: Served | None = None


class _TensorSeat(TensorRequest, gc=False, eq=False):
    """The same where tensors are asked."""

    seat: int = 0
    state: State = RUNNING
    flow: _Flow | None = None
    served: Served | None = None


class _Desk(ReplyToAll):
    """The requests of one front to one model."""

    __slots__ = ("_link", "ended", "heard", "is_new", "open", "parts", "results", "returned")

    def __init__(self, link: CallerLink) -> None:
        self._link = link
        self.open: dict[int, _Seat | _TensorSeat] = {}
        self.heard = 0
        self.is_new = False
        self.parts: list[tuple[int, list[Any]]] = []
        self.ended: list[EndedSeat] = []
        self.results: list[Any] = []
        self.returned: list[int] = []

    def __call__(self, request: Request, outcome: Outcome) -> None:
        """Take an outcome."""
        asked = cast("_Seat | _TensorSeat", request)
        asked.state = SEATS[asked.state][END]
        if self.open.pop(asked.seat, None) is None:
            return  # the front is gone
        self.end(asked.seat, outcome)

    def end(self, seat: int, outcome: Outcome) -> None:
        """Note what came of a seat."""
        if type(outcome) is Failure:
            error = outcome.error
            self.ended.append(EndedSeat(seat, None, (error.kind, error.message, _plain(error.detail))))
            self.results.append(None)
        elif type(outcome) is Media:
            self.ended.append(EndedSeat(seat, outcome.type))
            self.results.append(outcome.body)
        else:
            self.ended.append(EndedSeat(seat))
            self.results.append(outcome)
        self._link.speak(self)

    def to_all(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Sequence[tuple[Request, Outcome]]:
        """Take the outcomes of a batch."""
        for request, outcome in zip(requests, outcomes, strict=True):
            self(request, outcome)
        return ()

    def part(self, seat: int, part: Any, release: Callable[[], object]) -> None:
        """Take a part of a streamed answer."""
        self.hand(seat, [part], release)

    def hand(self, seat: int, parts: Sequence[Any], release: Callable[[], object]) -> None:
        """Take parts of a streamed answer."""
        request = self.open.get(seat)
        if request is None or PARTS not in SEATS[request.state]:
            return
        request.state = SEATS[request.state][PARTS]
        flow = request.flow = request.flow or _Flow()
        flow.room -= len(parts)
        flow.held.append(release)
        self.go_on(flow)
        self.parts.append((seat, [*parts]))
        self._link.speak(self)

    def go_on(self, flow: _Flow) -> None:
        """Let a stream go on, if its front has room and reads."""
        while flow.room > 0 and flow.held and not self._link.is_unread:
            flow.held.popleft()()

    def allow(self, seat: int, count: int) -> None:
        """Note that a front has room for more parts."""
        request = self.open.get(seat)
        if request is None or request.flow is None:
            return  # it has ended meanwhile
        request.flow.room += count
        self.go_on(request.flow)

    def leave(self, seat: int) -> None:
        """Cancel a request."""
        request = self.open.get(seat)
        if request is None or CALL_OFF not in SEATS[request.state]:
            return  # it has ended meanwhile
        request.state = SEATS[request.state][CALL_OFF]
        assert request.served is not None
        request.served.endpoint.cancel(request)


class CallerLink(asyncio.Protocol):
    """The connection of one front.

    Attributes:
        is_unread: Whether the front does not read what is written to it.
    """

    def __init__(self, callers: Callers) -> None:
        """Make the owner's end of a connection that the door has let in."""
        self.is_unread = False
        self._callers = callers
        self._transport: asyncio.Transport | None = None
        self._conversation = CallerConversation(callers.max_frame_bytes, callers.max_elements, require_params)
        self._desks: dict[int, _Desk] = {}
        self._new: list[tuple[int, _Desk]] = []
        self._numbers: dict[_Desk, int] = {}
        self._is_speaking = False
        self._heartbeat: LoopHeartbeat | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the front in, and tell it what is served."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        self._callers.links.add(self)
        self.write(frames.encode(["open", {"max_frame": self._callers.max_frame_bytes}]))
        self.describe()
        if peer_of(transport) is not None:  # there is a network between
            self._heartbeat = LoopHeartbeat(lambda: self._give_up(SILENCE), lambda: self.write(BEAT_FRAME))

    def data_received(self, data: bytes) -> None:
        """Act on what the front says."""
        if self._heartbeat is not None:
            self._heartbeat.heard()
        conversation = self._conversation
        for message in conversation.feed(data):
            try:
                self._take(message)
            except InvalidRequest as error:
                conversation.problem = f"it does not speak the protocol: {error.message}"
                conversation.close()
        if conversation.problem:
            self._give_up(conversation.problem)

    def pause_writing(self) -> None:
        """Take nothing more from a front that does not take its answers."""
        self.is_unread = True
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        self.is_unread = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        for desk in self._desks.values():
            for flow in [one.flow for one in desk.open.values() if one.flow is not None]:
                desk.go_on(flow)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what the front had handed on."""
        self._callers.links.discard(self)
        self._conversation.close()
        self._transport = None
        if self._heartbeat is not None:
            self._heartbeat.end()
        for desk in self._desks.values():
            for seat in [*desk.open]:
                desk.leave(seat)
            desk.open.clear()

    def describe(self) -> None:
        """Tell what is served from now on; before the server has started, nothing is said."""
        if self._callers.is_up:
            self.write(frames.encode(["models", self._callers.described]))

    def drain(self) -> None:
        """Take no further requests."""
        if self._conversation.is_taking:
            self._conversation.drain()
            self.write(frames.encode(["leaving"]))

    def stop(self) -> None:
        """Write what is known, and hang up."""
        self._say()
        if self._transport is not None:
            self._transport.close()

    def write(self, *pieces: Any) -> None:
        """Send the pieces of a frame."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if len(pieces) == 1:
            transport.write(pieces[0])
        else:
            transport.writelines(pieces)

    def speak(self, desk: _Desk) -> None:
        """Have what a desk has noted sent at the end of this turn."""
        if not desk.is_new:
            desk.is_new = True
            self._new.append((self._numbers[desk], desk))
            if not self._is_speaking:
                self._is_speaking = True
                asyncio.get_running_loop().call_soon(self._say)

    def _say(self) -> None:
        self._is_speaking = False
        new, self._new = self._new, []
        told: list[ModelAnswers] = []
        results: list[Any] = []
        for number, desk in new:
            counts = [(seat, len(parts)) for seat, parts in desk.parts]
            for _, parts in desk.parts:
                results += parts
            results += desk.results
            room = self._callers.room(number)
            told.append(ModelAnswers(number, desk.heard, room, counts, desk.ended, desk.returned))
            desk.parts, desk.results, desk.ended, desk.returned, desk.is_new = [], [], [], [], False
        if not told or self._transport is None:
            return
        try:
            self.write(*frames.pieces("answers", told, results))
        except TooLarge as error:
            self._give_up(f"what it asked for cannot be sent: {error.message}")

    def _give_up(self, reason: str) -> None:
        self._callers.told(peer_of(self._transport), reason)
        if self._transport is not None:
            self._transport.abort()

    def _take(self, message: HandedRequests) -> None:
        now = time.monotonic()
        bodies = iter(message.bodies)
        for bundle in message.bundles:
            desk = self._desks.get(bundle.model)
            if desk is None:
                if not self._callers.has_named(bundle.model):
                    raise InvalidRequest(f"it asks for the model {bundle.model}, of which it was never told")
                desk = self._desks[bundle.model] = _Desk(self)
                self._numbers[desk] = bundle.model
            self._submit(desk, bundle, bodies, now)
            for seat in bundle.leaves:
                desk.leave(seat)
            for seat, count in bundle.allows:
                desk.allow(seat, count)

    def _submit(self, desk: _Desk, bundle: ModelRequests, bodies: Any, now: float) -> None:
        served = self._callers.model(bundle.model)
        for told in bundle.seats:
            body = next(bodies)
            desk.heard += told.size
            if told.seat in desk.open:
                raise InvalidRequest(f"it hands on two requests as {told.seat}")
            if not self._conversation.is_taking:
                desk.returned.append(told.seat)
                self.speak(desk)
            elif served is None:
                desk.end(told.seat, _REPLACED)
            elif told.size > (most := served.endpoint.batching.capacity):
                desk.end(told.seat, Failure(TooLarge(f"the request has {told.size} samples, the queue takes {most}")))
            else:
                self._seat(desk, served, told, body, now)

    def _seat(self, desk: _Desk, served: Served, told: HandedOn, body: Any, now: float) -> None:
        params = self._conversation.params_of(told.params)
        kind = _TensorSeat if params.get("in") == TENSORS else _Seat
        require_form(body, told.size, params, self._callers.takes_lists(self._numbers[desk]))
        request = kind(
            body=body,
            reply=desk,
            params=params,
            deadline=now + max(told.left_s, 0.0),
            size=told.size,
            id=told.id,
            seat=told.seat,
            served=served,
        )
        if served.endpoint.config.streams:
            request.on_part = functools.partial(desk.part, told.seat)
            request.on_bundle = functools.partial(desk.hand, told.seat)
        desk.open[told.seat] = request
        try:
            served.endpoint.submit(request)
        except ForebayError as error:  # it raises none; a defect must not leave a seat without an end
            desk(request, Failure(without_frames(error)))


_REPLACED: Final = Failure(Unavailable("the model was replaced while the request was on its way; try again"))


def _plain(detail: Any) -> Any:
    """Return the detail of an error as it can be sent: it fits in JSON."""
    return None if detail is None else msgspec.json.decode(msgspec.json.encode(detail, enc_hook=str))
