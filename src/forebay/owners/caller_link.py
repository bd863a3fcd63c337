# SPDX-License-Identifier: Apache-2.0
"""The owner's end of a link with a front: requests that are handed on are submitted like those of its own clients.

Theory of operation. A bundle is submitted request by request to the endpoints of the models, so requests of all fronts
and of clients of the owner meet in one queue. What becomes known of them in a turn of the loop leaves at its end, in
one frame or few. With the answers of a model goes the room in its queue, and how much of this link it has counted by
then.

What a front has sent counts against the budget of the server, as what clients send does: if a body does not fit in, its
request is refused and the rest of the body dropped as it comes. So does what a front has not read. One that reads
nothing of it for `UNREAD_S` is hung up on; after `STALL_S` that may happen for others who need the memory. Clients have
less time then, but behind a front there are many.

A front that is gone waits for nothing: its requests are cancelled. While the owner drains, requests that are still on
their way are handed back untouched, and the front keeps them for the owner's successor.
"""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol, cast

import msgspec

from forebay.errors import CapacityError, ForebayError, InvalidRequest, TooLarge, Unavailable
from forebay.observe.logs.noted_refusals import LastRefusals
from forebay.observe.logs.refusal_log import RefusalLog
from forebay.observe.logs.request_ids import id_of
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.owners.answer_frames import Answers
from forebay.owners.caller_conversation import MAX_KEPT_BYTES, MAX_PARAMS, CallerConversation
from forebay.owners.detached_bodies import Apart, refused
from forebay.owners.shared_files import SharedFiles
from forebay.owners.states import CALL_OFF, END, PARTS, RUNNING, SEATS
from forebay.owners.stepwise_reader import InSteps, send
from forebay.owners.wire import EndedSeat, HandedOn, HandedRequests, MemberServings, ModelRequests, bytes_of
from forebay.server.byte_budget import SMALL_BYTES, ByteBudget
from forebay.serving.tensor_face import TENSORS, TensorRequest
from forebay.types.call import Failure, Media, Outcome, ReplyToAll, Request, told_of
from forebay.types.server_state import here
from forebay.types.tenant import Tenant, Tenants
from forebay.workers.memory.landing import Joining, Landing, Places, landed_in, placed
from forebay.workers.pool import CREDIT
from forebay.workers.wire import frames
from forebay.workers.wire.address import peer_of
from forebay.workers.wire.loop_heartbeat import BEAT_FRAME, SILENCE, LoopHeartbeat
from forebay.workers.wire.unsent_bytes import untaken_bytes

if TYPE_CHECKING:
    from forebay.transports.state_table import State


TOGETHER: Final = 64
"""Requests that are queued at once."""
MAX_CLIENTS: Final = 16_384
"""Connections of a front that are told apart; beyond that all are forgotten."""
UNREAD_BYTES: Final = 1 << 24
"""What may be on its way to a front; beyond that nothing more is read of it, and no stream goes on."""
LENT_BYTES: Final = 1 << 26
"""Results that may lie in memory until the front has read them; beyond that they go through the socket."""
MAX_DETAIL_BYTES: Final = 1 << 16
"""Longest detail of an error; a longer one is left out."""
LOOK_S: Final = 1.0
"""How often it is looked at whether a front reads."""
STALL_S: Final = 5.0
"""How long it may do so before it is like a client that does not read, and hung up on if memory is short."""
UNREAD_S: Final = 30.0
"""How long a front may read nothing of what is there for it; clients have as long (`write_timeout_s`)."""


class Callee(msgspec.Struct, frozen=True, eq=False):
    """What answers the requests to a model, or the calls of a serving.

    Attributes:
        capacity: The most samples of a request.
        streams: Whether answers may be streamed.
        places: Returns where bodies are to land; None if that does not matter.
        submit: Takes requests that arrived now, and calls the `reply` of each once.
        cancel: Notes that nobody waits for a request any more.
        require_form: Given body, samples and params of a request, raises an `InvalidRequest` if they cannot be used.
        charge_tokens: Given a tenant, charges it with tokens of prompts and of answers; None if there can be none.
        tell: Given a request that has ended, its outcome and where its front is, tells of it; None if nobody listens.
    """

    capacity: int
    streams: bool
    places: Callable[[], Places | None]
    submit: Callable[[Sequence[Request], float], object]
    cancel: Callable[[Request], object]
    require_form: Callable[[Any, int, Mapping[str, Any]], object]
    charge_tokens: Callable[[Tenant | None, int, int], object] | None = None
    tell: Callable[[Request, Outcome, str], object] | None = None


class CalleeHost(ABC):
    """What the links of a server, or of a member, have in common.

    Attributes:
        callers_count: Whether callers count the requests of their clients themselves.
        links: All of them.
        is_up: Whether callers may be told what is there.
        budget: What their requests and unread answers may take.
        max_frame_bytes: Longest body that is read from a caller.
        max_elements: The most values in a frame, or in what follows it.
    """

    callers_count: ClassVar[bool]

    def __init__(self, called: str, budget: ByteBudget, max_frame_bytes: int, max_elements: int) -> None:
        """Begin without links; `called` is what the log calls a caller."""
        self.links: set[CallerLink] = set()
        self.is_up = False
        self.budget = budget
        self.max_frame_bytes = max_frame_bytes
        self.max_elements = max_elements
        self._callees: dict[int, Callee] = {}
        self._highest = 0
        self._log = RefusalLog(called, "hung up on")

    @property
    @abstractmethod
    def described_on_wire(self) -> list[Any]:
        """What callers are told of all that is there, as a frame and what follows it."""

    @abstractmethod
    def require_params(self, params: Mapping[str, Any]) -> None:
        """Check what a caller says about a body; raises an `InvalidRequest` if it cannot be used."""

    @abstractmethod
    def room(self, number: int) -> int:
        """Return for how many samples there is room."""

    def row_s(self, number: int) -> float:
        """Return the seconds in which a sample of a caller is answered; 0 while there is room, or it is not told."""
        del number
        return 0.0

    def has_named(self, number: int) -> bool:
        """Tell whether a number ever stood for something."""
        return 1 <= number <= self._highest

    def callee(self, number: int) -> Callee | None:
        """Return what answers for a number; None if nothing does any more."""
        return self._callees.get(number)

    def told(self, peer: tuple[str, int] | None, reason: str) -> None:
        """Log why a caller was hung up on."""
        self._log.refused(int(time.monotonic()), peer, reason, reason)

    def hang_up(self) -> None:
        """End all links."""
        for link in [*self.links]:
            link.stop()
        self._log.close()


class MemberEntry(Protocol):
    """What keeps a member that has dialled in."""

    def begin(self, link: CallerLink) -> None:
        """Note that it is let in."""
        ...

    def heard(self, said: MemberServings) -> None:
        """Note what it runs; raises an `InvalidRequest` if that cannot be."""
        ...

    def end(self) -> None:
        """Note that it is gone."""
        ...


class _Flow(msgspec.Struct, eq=False):
    """How much more of a streamed answer its front has room for.

    Attributes:
        room: Parts that may still be sent.
        held: Called once there is room again.
    """

    room: int = CREDIT
    held: deque[Callable[[], object]] = msgspec.field(default_factory=deque[Any])


class _Seat(Request, gc=False, eq=False):
    """A request of a front; `held_bytes` are counted until its end."""

    seat: int = 0
    is_named: bool = False
    state: State = RUNNING
    flow: _Flow | None = None
    callee: Callee | None = None
    held_bytes: int = 0
    counts_elsewhere: bool = False

    def is_counted_elsewhere(self) -> bool:
        """Tell whether its front counts it."""
        return self.counts_elsewhere


class _TensorSeat(TensorRequest, gc=False, eq=False):
    """A request of a front that asks for tensors."""

    seat: int = 0
    is_named: bool = False
    state: State = RUNNING
    flow: _Flow | None = None
    callee: Callee | None = None
    held_bytes: int = 0
    counts_elsewhere: bool = False

    def is_counted_elsewhere(self) -> bool:
        """Tell whether its front counts it."""
        return self.counts_elsewhere


class _Client:
    """A connection of a front: by it the queue learns who comes back. See `Origin`."""

    __slots__ = ("release",)

    def __init__(self) -> None:
        self.release = 0


class _Desk(ReplyToAll):
    """The requests of one front to one model."""

    __slots__ = ("_link", "clients", "ended", "heard", "is_new", "known", "open", "parts", "results", "returned")

    def __init__(self, link: CallerLink) -> None:
        self._link = link
        self.known: dict[bytes, Mapping[str, Any]] = {}
        self.clients: dict[int, _Client] = {}
        self.open: dict[int, _Seat | _TensorSeat] = {}
        self.heard = 0
        self.is_new = False
        self.parts: list[tuple[int, list[Any]]] = []
        self.ended: list[int | EndedSeat] = []
        self.results: list[Any] = []
        self.returned: list[int] = []

    def __call__(self, request: Request, outcome: Outcome) -> None:
        """Take an outcome."""
        asked = cast("_Seat | _TensorSeat", request)
        asked.state = SEATS[asked.state][END]
        if self.open.pop(asked.seat, None) is None:
            return  # the front is gone
        if asked.held_bytes:
            self._link.account.release(asked.held_bytes)
        if asked.callee is not None and asked.callee.tell is not None:
            asked.callee.tell(asked, outcome, self._link.peer)
        if type(outcome) is Failure and isinstance(outcome.error, CapacityError):
            self._link.refusals.note(outcome.error, id_of(asked))
        self.end(asked.seat, outcome, "" if asked.is_named else asked.id, asked.cost_s)

    def end(self, seat: int, outcome: Outcome, name: str = "", cost_s: float = 0.0) -> None:
        """Note what came of a seat, what this server has called its request, and what that has cost."""
        cost_s = cost_s if self._link.says_cost else 0.0
        if type(outcome) is Failure:
            error = outcome.error
            failure = error.kind, error.message, _plain(error.detail)
            self.ended.append(EndedSeat(seat, None, failure, name, cost_s, _retry_s(error)))
            self.results.append(None)
        elif type(outcome) is Media:
            self.ended.append(EndedSeat(seat, told_of(outcome), cost_s=cost_s))
            self.results.append(outcome.body)
        else:
            self.ended.append(EndedSeat(seat, cost_s=cost_s) if cost_s else seat)
            self.results.append(outcome)
        self._link.speak(self)

    def client(self, number: int) -> _Client | None:
        """Return what stands for a connection of the front."""
        found = self.clients.get(number)
        if found is None and number:
            if len(self.clients) >= MAX_CLIENTS:
                self.clients.clear()
            found = self.clients[number] = _Client()
        return found

    def know(self, packed: bytes, params: Mapping[str, Any]) -> None:
        """Remember params with which any bytes are a request for one sample."""
        if len(self.known) >= MAX_PARAMS:
            self.known.clear()
        self.known[packed] = params

    def forget(self) -> None:
        """Begin anew: what was noted has been sent."""
        self.parts, self.results, self.ended, self.returned, self.is_new = [], [], [], [], False

    def to_all(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Sequence[tuple[Request, Outcome]]:
        """Take the outcomes of a batch."""
        seats: Any = requests
        callee = seats[0].callee
        is_told = callee is not None and callee.tell is not None
        if is_told or self._link.says_cost or {*map(type, outcomes)} != {bytes}:
            return [*zip(requests, outcomes, strict=True)]
        opened, ended, results = self.open, self.ended, self.results
        for request, outcome in zip(seats, outcomes, strict=True):
            request.state = SEATS[request.state][END]
            if opened.pop(request.seat, None) is None:
                continue  # the front is gone
            if request.held_bytes:
                self._link.account.release(request.held_bytes)
            ended.append(request.seat)
            results.append(outcome)
        self._link.speak_now(self)
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
        told = [{"body": one.body, "told": told_of(one)} if type(one) is Media else one for one in parts]
        self.parts.append((seat, told))
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
        assert request.callee is not None
        request.callee.cancel(request)


class CallerLink(asyncio.Protocol):
    """The connection of one front.

    Attributes:
        is_unread: Whether the front does not read what is written to it.
        account: What it holds of the server's memory.
        peer: Where it is.
    """

    def __init__(self, callers: CalleeHost, about: Mapping[str, Any], member: MemberEntry | None = None) -> None:
        """Make the owner's end of a connection that the door has let in.

        Args:
            about: What its hello says.
            member: Keeps what the other side says of its servings; None if it is not a member.
        """
        self._member = member
        self.is_unread = False
        self.peer = ""
        self.account = callers.budget.open(self, sys.maxsize)
        self._callers = callers
        self._about = about
        self._tenants = here(Tenants)
        self.refusals = here(LastRefusals)
        self._are_counted = callers.callers_count and member is None
        self._answers = Answers(self.write, self._place)
        self.says_cost = here(Accounts).is_asked
        self._transport: asyncio.Transport | None = None
        self._conversation = CallerConversation(
            callers.max_frame_bytes, callers.max_elements, callers.require_params, self
        )
        self._desks: dict[int, _Desk] = {}
        self._new: list[tuple[int, _Desk]] = []
        self._numbers: dict[_Desk, int] = {}
        self._is_speaking = False
        self._heartbeat: LoopHeartbeat | None = None
        self._reading: InSteps | None = None
        self._files: SharedFiles | None = None
        self._places: Places | None = None
        self._lent: deque[memoryview] = deque()
        self._lent_bytes = 0
        self._bodies: list[Any] = []
        self._coming: dict[int, list[Apart]] = {}
        self._lying: dict[int, list[Apart]] = {}
        self._watching: asyncio.TimerHandle | None = None
        self._untaken: tuple[int, int] = (0, 0)
        self._moved = 0.0
        self._is_stalled = False
        self._waiting_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Let the front in, and tell it what is served."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(UNREAD_BYTES)
        self.peer = ":".join(map(str, peer_of(transport) or ()))
        self._reading = InSteps(self._transport, self._read)
        self._files = files = SharedFiles(transport)
        self._callers.links.add(self)
        shown = files.shown if files.sees(self._about.get("shares")) else None
        self.write(frames.encode(["open", {"max_body": self._callers.max_frame_bytes, "shares": shown}]))
        self.describe()
        if self._member is not None:
            self._member.begin(self)
        if peer_of(transport) is not None:  # there is a network between
            self._heartbeat = LoopHeartbeat(lambda: self._give_up(SILENCE), lambda: self.write(BEAT_FRAME))

    def data_received(self, data: bytes) -> None:
        """Act on what the front says."""
        if self._heartbeat is not None:
            self._heartbeat.heard()
        if self._reading is not None:
            self._reading.take(data)

    def _read(self, data: bytes) -> Iterator[int]:
        """Act on what has come, in steps."""
        conversation = self._conversation
        for message in conversation.feed(data):
            try:
                if isinstance(message, HandedRequests):
                    yield from self._take(message)
                elif isinstance(message, MemberServings):
                    self._hear(message)
                elif self._files is not None and self._files.shown is not None:
                    self._files.is_seen = True
            except InvalidRequest as error:
                conversation.problem = f"it does not speak the protocol: {error.message}"
                conversation.close()
        if conversation.problem:
            self._give_up(conversation.problem)

    # What bodies hold

    def expect(self, message: Any, apart: list[Apart]) -> None:
        """Say where the bodies of a message belong that follow it."""
        self._bodies, self._coming, self._lying = message.bodies, {}, {}
        models = [bundle.model for bundle in message.bundles for _ in bundle.seats]
        for one in apart:
            if one.place is not None:
                self._lying.setdefault(one.top, []).append(one)
            elif one.top < len(models):
                places = self._places_of(models[one.top])
                one.sink = Joining() if places is None else Landing(one.length, places)
                self._coming.setdefault(one.top, []).append(one)

    def arrived(self, body: Apart, size: int) -> None:
        """Count bytes of a body; some body may be dropped for it."""
        if body.sink is not None:
            body.held_bytes += size
            self.account.arrive(size)

    def refuse_arriving(self, error: Unavailable) -> None:
        """Refuse the request of which most has come, of those that are coming."""
        top = max(self._coming, key=lambda top: sum(one.held_bytes for one in self._coming[top]))
        for one in self._coming[top]:
            refused(one, self._bodies, error)
        self._forget(top)

    def _forget(self, top: int) -> int:
        """Count a body as arriving no longer; returns how much of it was counted."""
        held = 0
        for one in self._coming.get(top, ()):
            held, one.held_bytes = held + one.held_bytes, 0
        if held:
            self.account.forget_arriving(held)
        return held

    def drop_unread(self, error: Unavailable) -> None:
        """Hang up on a front that does not read."""
        self._give_up(error.message)

    def count_unread(self) -> None:
        """Count what the front has not read."""
        size = self._lent_bytes + (0 if self._transport is None else self._transport.get_write_buffer_size())
        unread = size if self._is_stalled else 0
        waiting, self._waiting_bytes = self._waiting_bytes, size - unread
        self.account.work(self._waiting_bytes - waiting)
        self.account.set_unread(unread)

    def _places_of(self, number: int) -> Places | None:
        callee = self._callers.callee(number)
        return None if callee is None else callee.places()

    # What the front does not read

    def pause_writing(self) -> None:
        """Take nothing more from a front that does not take its answers."""
        self.is_unread = True
        if self._reading is not None:
            self._reading.hold()
        self.count_unread()

    def resume_writing(self) -> None:
        """Go on."""
        self.is_unread = self._is_stalled = False
        self.count_unread()
        for desk in self._desks.values():
            for flow in [one.flow for one in desk.open.values() if one.flow is not None]:
                desk.go_on(flow)
        if self._reading is not None:
            self._reading.release()

    def _watch(self) -> None:
        """Look now and then whether the front reads what is there for it, while there is such."""
        self._watching = None
        transport = self._transport
        if transport is None:
            return
        left, now = (untaken_bytes(transport), self._lent_bytes), time.monotonic()
        if left != self._untaken:
            self._untaken, self._moved = left, now
        self._is_stalled = any(left) and now - self._moved > STALL_S
        self.count_unread()
        if any(left) and now - self._moved > UNREAD_S:
            self._give_up(f"it has read nothing of its answers for {UNREAD_S:g} s")
        elif any(left):
            self._watching = asyncio.get_running_loop().call_later(LOOK_S, self._watch)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what the front had handed on."""
        self._callers.links.discard(self)
        if self._member is not None:
            self._member.end()
        self._conversation.close()
        self._transport = None
        if self._heartbeat is not None:
            self._heartbeat.end()
        if self._watching is not None:
            self._watching.cancel()
        if self._reading is not None:
            self._reading.end()
        for desk in self._desks.values():
            for seat in [*desk.open]:
                desk.leave(seat)
            desk.open.clear()
        self.account.close()
        self._lent.clear()
        self._bodies, self._coming, self._lying = [], {}, {}
        if self._files is not None:
            self._files.close()
        if self._places is not None:
            self._places.close()

    def describe(self) -> None:
        """Tell what is served from now on; before the server has started, nothing is said."""
        if self._callers.is_up:
            self.write(*self._callers.described_on_wire)

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
        transport = send(self._transport, pieces)
        if transport is not None and self._watching is None and (self._lent or transport.get_write_buffer_size()):
            self._untaken, self._moved = (0, 0), time.monotonic()
            self._watching = asyncio.get_running_loop().call_later(LOOK_S, self._watch)

    def speak(self, desk: _Desk) -> None:
        """Have what a desk has noted sent at the end of this turn."""
        self._note(desk)
        if not self._is_speaking:
            self._is_speaking = True
            asyncio.get_running_loop().call_soon(self._say)

    def speak_now(self, desk: _Desk) -> None:
        """Send what is known, and what a desk has noted: a batch is over, and little else ends in the same turn."""
        self._note(desk)
        self._say()

    def _note(self, desk: _Desk) -> None:
        if not desk.is_new:
            desk.is_new = True
            self._new.append((self._numbers[desk], desk))

    def _say(self) -> None:
        self._is_speaking = False
        new, self._new = self._new, []
        if not new or self._transport is None:
            return
        answers = self._answers
        for number, desk in new:
            answers.add(number, desk, self._callers.room(number), self._callers.row_s(number))
            desk.forget()
        answers.send()

    def _place(self, data: Any) -> Any:
        """Return what stands in a frame for a result in memory that the front sees; None if it sees none."""
        if self._files is None or not self._files.is_seen or self._lent_bytes + len(data) > LENT_BYTES:
            return None
        if self._places is None:
            self._places = Places()
        try:
            lying = placed(data, self._places)
        except OSError:
            return None
        found = landed_in(lying)
        if found is None:
            return None
        self._lent.append(lying)
        self._lent_bytes += len(lying)
        self.count_unread()
        return frames.landed(*found)

    def _taken(self, count: int) -> None:
        """Let go of results that the front has read; raises an `InvalidRequest` if there are not so many."""
        if count > len(self._lent):
            raise InvalidRequest(f"it has read {count} results in memory, and {len(self._lent)} lie there")
        for _ in range(count):
            self._lent_bytes -= len(self._lent.popleft())
        self._is_stalled = False
        self.count_unread()

    def _give_up(self, reason: str) -> None:
        self._callers.told(peer_of(self._transport), reason)
        if self._transport is not None:
            self._transport.abort()

    def _hear(self, said: MemberServings) -> None:
        if self._member is None:
            raise InvalidRequest("it sent servings, which only a member may do")
        self._member.heard(said)

    def _take(self, message: HandedRequests) -> Iterator[int]:
        """Act on a bundle, in steps."""
        now = time.monotonic()
        if message.taken:
            self._taken(message.taken)
        self._bodies = message.bodies
        top = 0
        for bundle in message.bundles:
            desk = self._desks.get(bundle.model) or self._desk(bundle.model)
            arrived: list[_Seat | _TensorSeat] = []
            ready = self._ready(bundle.model)
            try:
                for told in bundle.seats:
                    known = None if ready is None else self._seat_known(desk, ready, told, self._bodies[top], now)
                    if known is not None:
                        arrived.append(known)
                    else:
                        callee = self._callers.callee(bundle.model)
                        lying = self._lying.pop(top, ()) if self._lying else ()
                        size = self._admit(desk, callee, told, top, lying)
                        if size is not None and lying:
                            _submit(arrived, now)
                            size = yield from self._copied(desk, told, lying, size)
                        if size is not None:
                            assert callee is not None
                            arrived.append(self._seat(desk, callee, told, self._bodies[top], now, size))
                    self._bodies[top] = None
                    top += 1
                    if len(arrived) >= TOGETHER:
                        count = len(arrived)
                        _submit(arrived, now)
                        yield count
                        ready = self._ready(bundle.model)
            finally:  # those before one that violates the protocol are requests like others
                count = len(arrived)
                _submit(arrived, now)
            for seat in bundle.leaves:
                desk.leave(seat)
            for seat, room in bundle.allows:
                desk.allow(seat, room)
            if bundle.tokens:
                self._charge_tokens(bundle)
            yield count + 1 + len(bundle.tokens)
        if self._coming or self._lying:
            self._coming, self._lying = {}, {}

    def _charge_tokens(self, bundle: ModelRequests) -> None:
        callee = self._callers.callee(bundle.model)
        if callee is not None and callee.charge_tokens is not None:
            for name, prompt, completion in bundle.tokens:
                callee.charge_tokens(self._tenants.of(name) if name else None, prompt, completion)

    def _ready(self, number: int) -> Callee | None:
        """Return what answers for a model if there is nothing to be asked but what `_seat_known` looks at."""
        callee = self._callers.callee(number)
        is_usual = self._conversation.is_taking and not self._coming and not self._lying
        return callee if is_usual and callee is not None and not callee.streams else None

    def _seat_known(self, desk: _Desk, callee: Callee, told: HandedOn, body: Any, now: float) -> _Seat | None:
        """Seat a short request with params that came before; None if there is more to be looked at."""
        params = desk.known.get(told.params)
        if params is None or type(body) is not bytes or told.size != 1:
            return None
        seat, opened = told.seat, desk.open
        if len(body) > SMALL_BYTES or seat in opened:
            return None
        desk.heard += 1
        request = opened[seat] = _Seat(
            body,
            desk,
            params,
            desk.clients.get(told.client) or desk.client(told.client),
            now + told.left_s if told.left_s > 0 else now,
            arrived=now,
            seat=seat,
            callee=callee,
            counts_elsewhere=self._are_counted,
        )
        if told.id:
            request.id, request.is_named = told.id, True
        if told.trace:
            request.trace = told.trace
        if told.tenant:
            request.tenant = self._tenants.of(told.tenant, told.tier, told.child)
        if told.is_due:
            request.due = request.deadline
        return request

    def _desk(self, number: int) -> _Desk:
        if not self._callers.has_named(number):
            raise InvalidRequest(f"it asks for the model {number}, which was not announced to it")
        desk = self._desks[number] = _Desk(self)
        self._numbers[desk] = number
        return desk

    def _admit(
        self, desk: _Desk, callee: Callee | None, told: HandedOn, top: int, lying: Sequence[Apart]
    ) -> int | None:
        """Return how long the body of a request is that may be submitted; None of one that is answered already."""
        held = self._forget(top) if self._coming else 0
        desk.heard += told.size
        if told.seat in desk.open:
            raise InvalidRequest(f"it forwards two requests as {told.seat}")
        body = self._bodies[top]
        if not self._conversation.is_taking:
            desk.returned.append(told.seat)
            self.speak(desk)
        elif callee is None:
            desk.end(told.seat, _REPLACED)
        elif told.size > (most := callee.capacity):
            desk.end(told.seat, Failure(TooLarge(f"the request has {told.size} samples, the queue takes {most}")))
        elif type(body) is Failure:
            desk.end(told.seat, body)
        else:
            size = len(body) if type(body) is bytes else bytes_of(body) + sum(one.length for one in lying)
            if size <= SMALL_BYTES or self._has_room(size, size - held):
                return size
            desk.end(told.seat, Failure(self._callers.budget.exceeded()))
        return None

    def _copied(
        self, desk: _Desk, told: HandedOn, lying: Sequence[Apart], size: int
    ) -> Generator[int, None, int | None]:
        """Copy what lies in memory of the front; returns the size, or None for a request that cannot be read."""
        if (yield from self._copy(lying, self._places_of(self._numbers[desk]))):
            return size
        self.account.release(size if size > SMALL_BYTES else 0)
        desk.end(told.seat, _UNREADABLE)
        return None

    def _has_room(self, size: int, more: int) -> bool:
        """Count a body; tells whether the server has room for it, of which `more` bytes were not counted before."""
        budget = self._callers.budget
        self.account.work(size)
        if more and budget.is_exceeded():
            budget.make_room()
            if budget.is_exceeded():
                self.account.release(size)
                return False
        return True

    def _copy(self, lying: Sequence[Apart], places: Places | None) -> Generator[int, None, bool]:
        """Copy what lies in memory of the front, in steps; tells whether all of it could be read."""
        assert self._files is not None
        try:
            for one in lying:
                assert one.place is not None
                one.put((yield from self._files.copy(one.place, places)))
        except OSError:
            return False
        return True

    def _seat(
        self, desk: _Desk, callee: Callee, told: HandedOn, body: Any, now: float, size: int
    ) -> _Seat | _TensorSeat:
        params = self._conversation.params_of(told.params)
        kind = _TensorSeat if params.get("in") == TENSORS else _Seat
        callee.require_form(body, told.size, params)
        if type(body) is bytes and params.get("in") != "form" and len(told.params) <= MAX_KEPT_BYTES:
            desk.know(told.params, params)
        request = kind(
            body=body,
            reply=desk,
            params=params,
            origin=desk.client(told.client),
            deadline=now + max(told.left_s, 0.0),
            arrived=now,
            size=told.size,
            id=told.id,
            trace=told.trace,
            seat=told.seat,
            is_named=bool(told.id),
            callee=callee,
            held_bytes=size if size > SMALL_BYTES else 0,
            counts_elsewhere=self._are_counted,
        )
        if told.tenant:
            request.tenant = self._tenants.of(told.tenant, told.tier, told.child)
        if told.is_due:
            request.due = request.deadline
        if callee.streams:
            request.on_part = functools.partial(desk.part, told.seat)
            request.on_bundle = functools.partial(desk.hand, told.seat)
        desk.open[told.seat] = request
        return request


def _submit(arrived: list[_Seat | _TensorSeat], now: float) -> None:
    """Queue requests to one model, all that have arrived so far; none is left in the list."""
    if arrived:
        requests, callee = arrived[:], arrived[0].callee
        arrived.clear()
        assert callee is not None
        callee.submit(requests, now)


_REPLACED: Final = Failure(Unavailable("the model was replaced while the request was on its way; try again"))
_UNREADABLE: Final = Failure(Unavailable("the request lies in memory that its owner cannot read now; try again"))


def _retry_s(error: ForebayError) -> float:
    """Return the seconds after which the client of a request that failed should try again; 0 if that is not known."""
    retry_at = error.retry_at if isinstance(error, CapacityError) else 0.0
    return max(retry_at - time.monotonic(), 0.001) if retry_at else 0.0


def _plain(detail: Any) -> Any:
    """Return the detail of an error as it can be sent: it fits in JSON."""
    if detail is None:
        return None
    packed = msgspec.json.encode(detail, enc_hook=str)
    return msgspec.json.decode(packed) if len(packed) <= MAX_DETAIL_BYTES else None
