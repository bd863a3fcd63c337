# SPDX-License-Identifier: Apache-2.0
"""The answers of one connection, of both lanes: one after the other, in the order in which their requests came.

At most one request is being worked on: on the fast lane it is `active`, on the slow one `_working`. Later ones of a
pipelining client wait, and reading is paused while any does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forebay.errors import ForebayError, LimitReached, QueueFull, TooLate
from forebay.observe.logs.access_log import CALLED_OFF, COST, EndedCall, cost_of
from forebay.observe.logs.request_ids import next_id
from forebay.protocols import native
from forebay.server.byte_budget import SMALL_BYTES
from forebay.transports.http.arriving_body import ArrivingBody
from forebay.transports.http.asgi_calls import HELD
from forebay.transports.http.connection_state import (
    BODY,
    FINAL,
    GONE,
    LEAVE,
    LINGER,
    LOSE,
    REFUSE,
    SETTLED,
    ConnectionState,
)
from forebay.transports.http.error_answers import error_answer
from forebay.transports.http.same_turn import SEPARATE_BYTES, answers
from forebay.transports.http.streamed_answer import StreamedAnswer
from forebay.transports.intake import BEHIND, PIPELINE, Intake
from forebay.transports.rate_limit_fields import rate_limit_fields
from forebay.types.call import Failure, Outcome, Request, nothing, status_in

if TYPE_CHECKING:
    import asyncio

    from forebay.transports.http.head import Head
    from forebay.transports.http.port import HttpPort
    from forebay.transports.http.route import Route
    from forebay.transports.http.websocket import WebSocket
    from forebay.types.element_limits import Steps
    from forebay.types.tensor import Data


UNREAD: Final = object()
"""Stands with what waits, in place of an app: it is bytes that were not parsed yet."""


class _Flow(FlowControl):
    """Has uvicorn's cycles use the intake; they ask for more as soon as they run, also behind what waits."""

    def __init__(self, transport: asyncio.Transport, intake: Intake) -> None:
        super().__init__(transport)
        self._intake = intake

    def pause_reading(self) -> None:
        self._intake.hold(BEHIND)

    def resume_reading(self) -> None:
        self._intake.release(BEHIND)


class AnsweringConnection(HttpToolsProtocol):
    """A connection that is answered; `connection.py` reads from it.

    Attributes:
        talk: Where it is, and what waits for its turn.
        active: The head of what the fast lane answers; None while it answers nothing.
        request: What was submitted of that; None before, and once it was answered.
        arrived: A remembered request that came as a whole, until it is submitted together with others.
        refusal: Why it is refused, if that is not the common reason.
        retry_at: When the client of what is refused for the common reason should try again.
        send: Writes to the client.
        seen: When something was read last, in sweeps of the port.
        release: See `Origin`.
        socket: What the connection has become; None while it speaks HTTP.
        stalled: What to call once the client has room again.
    """

    __slots__ = (
        "_active_bytes",
        "_body",
        "_counting",
        "_is_advancing",
        "_lane",
        "_request_id",
        "_sent_bytes",
        "_stream",
        "_working",
        "active",
        "arrived",
        "intake",
        "refusal",
        "release",
        "reply_method",
        "request",
        "retry_at",
        "seen",
        "send",
        "socket",
        "stalled",
        "talk",
    )

    def __init__(self, lane: HttpPort) -> None:
        super().__init__(lane.uvicorn, lane.server_state, {}, lane.loop)
        self._lane = lane
        talk = self.talk = ConnectionState(lane.config.max_head_bytes, lane.config.max_head_lines)
        self.pipeline = talk.waiting
        self.send: Callable[[bytes], None] = nothing
        self.reply_method = self.reply
        self.release, self.retry_at = 0, 0.0
        self.seen = lane.epoch
        self.arrived = b""
        self._body = ArrivingBody(lane, self)
        self._active_bytes = self._sent_bytes = 0
        self.active: Head | None = None
        self.request: Request | None = None
        self._working: RequestResponseCycle | None = None
        self._request_id = ""
        self.refusal: ForebayError | None = None
        self._stream: StreamedAnswer | None = None
        self._counting: Steps[Any] | None = None
        self._is_advancing = False
        self.stalled: list[Callable[[], object]] = []
        self.socket: WebSocket | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection."""
        super().connection_made(transport)
        self.intake = Intake(transport, self._lane.turns)
        self.flow = _Flow(transport, self.intake)

    # Called off

    def _stand_alone(self) -> None:
        """Be answered by itself, not together with others: something else comes, or it is called off."""
        if self.arrived:
            assert self.active is not None
            assert self.active.mailbox is not None
            self.active.mailbox.submit(time.monotonic())
        # Only now: it is by being submitted that there is a request.
        if self.request is not None and self.request.reply is self._lane.same_turn:
            self.request.reply = self.reply_method

    def abort(self) -> None:
        """End the connection now."""
        self._abandon()
        self.transport.abort()

    def leave(self, error: ForebayError | None = None) -> None:
        """Close a WebSocket with a word why; what is being answered is cancelled."""
        if self.socket is None or not self.talk.state.reads:
            return
        if error is not None:
            self._lane.tell(error, self.client)
        self.socket.close(error)
        self.talk.on(REFUSE)
        self._abandon(lingers=True)
        self.seen = self._lane.epoch
        self.intake.linger(self.seen)

    def _abandon(self, *, lingers: bool = False) -> None:
        """Cancel what is being answered and forget what waits: the client reads no answers here any more."""
        # First: what is submitted by the next line may be refused at once, and the refusal must find the client gone.
        self.talk.on(LEAVE if lingers else LOSE)
        self._stand_alone()
        self.talk.waiting.clear()
        self._active_bytes = 0
        self.refusal = None  # whose frames hold the request, which the garbage collector does not look at
        self._body.close()
        if self._working is not None:  # uvicorn tells the cycle that was begun last, which may be one that waits
            self._working.disconnected = True
            self._working.message_event.set()
        active, request, stream = self.active, self.request, self._stream
        if active is not None and self._lane.tells:
            has_started = self._has_started()
            self._request_id = request.id if has_started and request is not None else self._request_id
            self._tell(active, self._stream_status if has_started else CALLED_OFF, request, "cancelled")
        if stream is not None:
            stream.give_up()
        self.active = self.request = self._stream = None
        if self._counting is not None:
            self._counting.close()
            self._counting = None
        # After they were forgotten: what the endpoint replies to this must not be written.
        if active is not None and active.route is not None and request is not None:
            active.route.endpoint.cancel(request)
        self._let_go()

    def _let_go(self) -> None:
        stalled, self.stalled = self.stalled, []
        for release in stalled:
            release()

    # One after the other

    def _put_off(self, what: Any, app: Any) -> None:
        self.intake.hold(PIPELINE)
        # New on the left, next on the right: uvicorn shares this deque, and reads it in this order.
        self.talk.waiting.appendleft((what, app))

    def read_later(self, rest: bytes) -> None:
        """Keep what came at once behind requests that are answered first, or of which there were many."""
        self._put_off(rest, UNREAD)
        if len(rest) > SMALL_BYTES:
            self._body.account.arrive(len(rest))
        if self.is_rest_next():
            self.give_way()

    def give_way(self) -> None:
        """Read no more before the other clients had their turn, neither what comes nor what was not parsed yet."""
        self.intake.give_way(self.read_rest)

    def rest_before(self) -> bytes:
        """Take back what was not parsed yet of what came before."""
        waiting = self.talk.waiting
        if not waiting or waiting[0][1] is not UNREAD:
            return b""
        rest: bytes = waiting.popleft()[0]
        if len(rest) > SMALL_BYTES:
            self._body.account.forget_arriving(len(rest))
        return rest

    def is_rest_next(self) -> bool:
        """Tell whether nothing is due before what was not parsed yet, and there is such; a body may go on with it."""
        waiting, working = self.talk.waiting, self._working
        if not waiting or waiting[-1][1] is not UNREAD or self.active is not None:
            return False
        return working is None or working.more_body

    def read_rest(self) -> None:
        """Read what was not parsed yet, or a part of it, and start what waits."""

    def advance_answers(self) -> None:
        """Start what waits, unless an answer is still due; a loop, for refusals answer at once."""
        if self._is_advancing:
            return
        talk = self.talk
        self._is_advancing = True
        try:
            while talk.state.owes and self.active is None and self._working is None:
                if not talk.waiting:
                    if talk.state is FINAL:  # the client has closed its side: nothing can follow
                        self._hang_up()
                        return
                    talk.on(SETTLED)
                    if talk.state is BODY:
                        self.body_is_next()
                    break
                if self.flow.write_paused or self.transport.is_closing():
                    return  # `resume_writing` comes back here; a client that reads nothing gets no more made for it
                if self.is_rest_next():
                    break
                what, app = talk.waiting.pop()
                if app is None:
                    if len(what[1]) > SMALL_BYTES:
                        self._body.account.release(len(what[1]))
                    self._answer(*what)
                else:
                    self._work_on(what, app)
        finally:
            self._is_advancing = False
        if not talk.waiting:
            if self.intake.holds & PIPELINE:
                self.intake.release(PIPELINE)
        elif self.is_rest_next():
            self.give_way()

    def body_is_next(self) -> None:
        """Go on with a message whose turn has come while its body is still to come."""

    # The slow lane

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self.talk.state.owes:
            self._put_off(cycle, app)
        else:
            self._work_on(cycle, app)

    def _work_on(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._working = cycle
        super()._start_asgi_task(cycle, self._closing(cycle, app) if cycle.waiting_for_100_continue else app)

    def _closing(self, cycle: RequestResponseCycle, app: Any) -> Any:
        """Close after an answer that came without a word to the client that its body is wanted.

        It may send it all the same, or keep it and send its next request instead: nobody can tell which.
        """

        async def answering(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                if cycle.waiting_for_100_continue:
                    self.announce_end(cycle)
                await send(message)

            try:
                await app(scope, receive, sending)
            finally:
                if cycle.waiting_for_100_continue:  # it ends without an answer: uvicorn writes one for it
                    self.announce_end(cycle)

        return answering

    def announce_end(self, cycle: RequestResponseCycle) -> None:
        """Have an answer say that the connection closes: it may come before the body's end, which nobody will read."""
        cycle.keep_alive = False
        cycle.transport = cast("asyncio.Transport", _LastWords(self))

    def on_response_complete(self) -> None:
        """Go on with what waits; uvicorn's cycle calls this."""
        self.server_state.total_requests += 1
        self.intake.release(BEHIND)
        scope: dict[str, Any] = {} if self._working is None else cast("dict[str, Any]", self._working.scope)
        if held := scope.pop(HELD, 0):
            self._body.account.release(held)
        self._working = None
        if self.transport.is_closing():
            if self.talk.state.reads or self.talk.state.owes:
                self.talk.on(LEAVE)
        else:
            self.advance_answers()

    # The fast lane

    def _answer(
        self,
        head: Head,
        body: bytes | memoryview,
        headers: Sequence[tuple[bytes, bytes]] = (),
        url: bytes = b"",
        *,
        counted_by: Route | None = None,
        read: Any = None,
    ) -> None:
        route = head.route
        if route is not None and route.is_retired and head.problem is None:
            head = route.now(head, headers, url.partition(b"?")[2])
            route = head.route
            if type(body) is memoryview:
                body = bytes(body)  # it landed for the workers of a version that has left
        self.active = head
        problem = head.problem
        is_refused = head.is_full() if problem is None else isinstance(problem, QueueFull)
        if is_refused:
            assert route is not None
            error = self.refusal = problem if isinstance(problem, LimitReached) else None
            error = error or route.is_full_error
            # Now, for its client may leave before it is told.
            route.endpoint.reject(error, tenant=head.tenant)
            self.retry_at = error.retry_at
            self._lane.refusals.refuse(self)
            return
        if problem is not None:
            self._lane.tell(problem, self.client)
            if route is not None:
                route.endpoint.reject(problem)
            self._fail(head, problem)
            return
        assert route is not None
        if counted_by is not route:
            read = None  # a route reads for itself
            if len(body) > route.passes_bytes and self._count(head, body, headers, url):
                return
        try:
            request = self.request = route.request(head, body, self.reply_method, self, read)
        except Exception as error:  # noqa: BLE001 - whoever waits behind this answer waits for as long as it is due
            if not isinstance(error, ForebayError):
                error = self._lane.defect(error)
                self._lane.tell(error, self.client)
            route.endpoint.reject(error)
            self._fail(head, error)
            return
        if head.parent:
            request.trace = head.parent.decode("latin-1")
        if route.contract.streams:
            stream = self._stream = StreamedAnswer(self, self._lane, head)
            request.on_part = stream.part
            request.on_bundle = stream.bundle if self.socket is None else None
        if len(body) > SMALL_BYTES and not self._active_bytes:
            self.work(len(body))
        try:
            route.endpoint.submit(request)
        except Exception as error:  # noqa: BLE001 - as above
            self.reply(request, Failure(error if isinstance(error, ForebayError) else self._lane.defect(error)))

    def work(self, size: int) -> None:
        """Count the body of what is answered now."""
        self._active_bytes = size
        self._body.account.work(size)

    def worked(self) -> None:
        """Count it no longer."""
        size, self._active_bytes = self._active_bytes, 0
        if size:
            self._body.account.release(size)

    def refuse_arriving(self, error: ForebayError) -> None:
        """Refuse the request that is arriving."""

    def drop_unread(self, error: ForebayError) -> None:
        """Cut off a client that does not read its answers."""
        self._lane.tell_cut_off(error, self.client)
        self.abort()

    def count_unread(self) -> None:
        """Count what the client has not taken of its answers."""
        self._body.account.set_unread(self.transport.get_write_buffer_size())

    def _count(self, head: Head, body: bytes | memoryview, headers: Sequence[tuple[bytes, bytes]], url: bytes) -> bool:
        """Answer once the elements of a long body were counted; returns False if they need not be."""
        route = head.route
        assert route is not None
        counting = self._counting = route.counting(head, body)
        if counting is None:
            return False

        def done(error: Exception | None, read: Any) -> None:
            if self._counting is not counting:  # the client has left
                return
            self._counting = None
            if error is None:
                self._answer(head, body, headers, url, counted_by=route, read=read)
                return
            if not isinstance(error, ForebayError):
                error = self._lane.defect(error)
            self._lane.tell(error, self.client)
            route.endpoint.reject(error)
            self._fail(head, error)

        if not self._active_bytes:  # else another version has counted it, and has left meanwhile
            self.work(len(body))
        self._lane.turns.run(counting, done)
        return True

    def reply(self, request: Request, outcome: Outcome) -> None:
        """Answer what was submitted."""
        head = self.active
        if request is not self.request or head is None:
            return
        lane = self._lane
        # A request has an id if its client named one, or if a line of the log had to name it.
        is_unusual = self.socket is not None or (head.tenant is not None and head.tenant.allowance is not None)
        if type(outcome) is not bytes or not lane.is_plain or request.id != head.id or is_unusual:
            self._reply_in_full(head, request, outcome)  # if it raises, the request can still be told of that
            return
        self.request = None
        if self._active_bytes:
            self.worked()
        prefix = head.prefix if head.stamp == lane.epoch else lane.write_prefix(head)
        number = b"" if head.id else b"%x" % next(answers)
        first = b"%b%b\r\ncontent-length: %d\r\n\r\n" % (prefix, number, len(outcome))
        if len(outcome) < SEPARATE_BYTES:
            self.transport.write(first + outcome)
        else:
            self.transport.write(first)
            self.transport.write(outcome)
        self.active = self._stream = None
        if head.keep_alive:
            self.advance_answers()
        else:
            self._hang_up()

    def tell_refused(self) -> None:
        """Answer a request that came to a full queue; `SameTurn` does so with most of them."""
        head, lane = self.active, self._lane
        if head is None or self.talk.state is GONE:  # the client has left, or leaves before it was submitted
            return
        route = head.route
        assert route is not None
        error, self.refusal = self.refusal, None
        if error is None:
            error = route.is_full_error
            error.retry_at = self.retry_at
        lane.tell(error, self.client)
        self._fail(head, error)

    def _reply_in_full(self, head: Head, request: Request, outcome: Outcome) -> None:
        """Answer in one of the ways that are not the common one."""
        if self.talk.state is GONE:  # it was submitted and refused while its client left
            return
        route = head.route
        assert route is not None
        if type(outcome) is Failure:
            self._request_id = request.id
            if isinstance(outcome.error, QueueFull | TooLate) and not self._has_started():
                self.refusal = outcome.error
                self._lane.refusals.refuse(self)
            else:
                self._fail(head, outcome.error, request)
        elif outcome is None and route.contract.streams:
            self._end_stream(route, request)
            self._request_id = request.id
            self._answered(head, self._stream_status, request)
        else:
            try:
                headers, pieces = route.answer(request, outcome)
            except Exception:
                self.request = request  # the endpoint replies with an error in its place
                raise
            self._request_id = request.id or next_id()
            headers = [*headers, (b"x-request-id", self._request_id.encode()), *self._accounts(head, request)]
            self._write(status_in(outcome), headers, pieces, head)
            self._answered(head, status_in(outcome), request)

    def _fail(self, head: Head, error: ForebayError, request: Request | None = None) -> None:
        self._request_id = self._request_id or head.id or next_id()
        status = self._stream_status
        if self._has_started():
            assert head.route is not None
            last = head.route.last_part(error, self._request_id)
            if not last:  # without the last chunk its client sees that something is missing
                self._abandon()
                self.transport.close()
                return
            self._end_stream(head.route, request, last)
        else:
            if head.route is None:
                status, headers, body = error_answer(error, self._request_id)
            else:
                seen = head.route.seen_by(self.client, error, is_forwarded=head.is_forwarded)
                status, headers, body = head.route.fault(seen, self._request_id)
            self._write(status, [*headers, *self._accounts(head, request)], [body], head)
        self._lane.note_refusal(error, self._request_id)
        self._answered(head, status, request, native.code_of(error))

    def _end_stream(self, route: Route, request: Request | None, last: bytes = b"") -> None:
        """End a streamed answer with what it has cost: in words of its own if it has such, else in a trailer."""
        assert self._stream is not None
        cost = self._cost(request)
        event = route.cost_event(cost)
        self._stream.end(last + event, b"" if event else cost)

    def _cost(self, request: Request | None) -> bytes:
        is_said = self._lane.config.answer_cost and self.socket is None
        return cost_of(request) if request is not None and is_said else b""

    def _accounts(self, head: Head, request: Request | None) -> list[tuple[bytes, bytes]]:
        """Return the headers that say what an answer has cost, and what is left of its tenant's limits."""
        cost = self._cost(request)
        return [*([(COST, cost)] if cost else []), *rate_limit_fields(head.tenant)]

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], pieces: Sequence[Data], head: Head) -> None:
        size = self._sent_bytes = sum(map(len, pieces))
        if (socket := self.socket) is not None:
            is_text = (b"content-type", native.JSON_TYPE.encode()) in headers
            socket.send(b"".join(pieces), "TEXT" if is_text else "BINARY")
            return
        first = self._lane.write_head(status, headers, size, keep_alive=self.keeps_alive(head))
        if size < SEPARATE_BYTES:
            self.transport.write(b"".join([first, *pieces]))
        else:
            self.transport.writelines([first, *pieces])

    def _answered(self, head: Head, status: int, request: Request | None, code: str = "ok") -> None:
        if self.socket is not None and head.route is not None and head.route.contract.streams:
            self.socket.send(b"", "TEXT")
        keep_alive = self.keeps_alive(head)
        if self._lane.tells:
            self._tell(head, status, request, code)
        if self._active_bytes:
            self.worked()
        self.active = self.request = self._stream = None
        self._request_id = ""
        self._sent_bytes = 0
        if not keep_alive:
            self._hang_up()
        else:
            self.advance_answers()

    def _has_started(self) -> bool:
        return self._stream is not None and self._stream.has_started

    @property
    def _stream_status(self) -> int:
        return 200 if self._stream is None else self._stream.status

    def is_answer_begun(self) -> bool:
        """Tell whether the client has received a part of the answer that is due."""
        return self._has_started() or (self._working is not None and self._working.response_started)

    def keeps_alive(self, head: Head) -> bool:
        """Tell whether the connection goes on after an answer."""
        return head.keep_alive and not (self._lane.is_draining and not self.talk.waiting)

    def hang_up_early(self) -> None:
        """Close after an answer whose request may still be on its way, as may be others behind it."""
        if self.talk.state.reads:
            self.talk.on(REFUSE)
        self._hang_up()

    def _hang_up(self) -> None:
        if self.socket is not None:
            self.leave()
            return
        talk = self.talk
        self._body.drop()
        self.rest_before()
        talk.on(LEAVE)
        if talk.state is LINGER:
            self.seen = self._lane.epoch
            self.intake.linger(self.seen)
        else:
            self.transport.close()

    def _tell(self, head: Head, status: int, request: Request | None, code: str = "ok") -> None:
        """Tell of the call that ends here."""
        client = ":".join(map(str, self.client)) if self.client else ""
        call = EndedCall(head.method.decode("latin-1"), head.target.decode("latin-1"), client=client, status=status)
        call.code, call.body_bytes, call.request_id = code, self._sent_bytes, self._request_id
        if self._stream is not None:
            call.body_bytes += self._stream.sent_bytes
        if head.route is not None:
            call.model = head.route.endpoint.name
            call.parent = head.parent.decode("latin-1")
            if request is not None:
                call.answered_by(head.route.endpoint, request)
        self._lane.tell_ended(call)


class _LastWords:
    """Stands in for the transport under the last answer, so that its client has a moment to read it."""

    def __init__(self, connection: AnsweringConnection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.hang_up_early
