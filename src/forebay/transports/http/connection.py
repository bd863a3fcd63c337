# SPDX-License-Identifier: Apache-2.0
"""The fast lane: inference requests are answered inside uvicorn's own protocol class, without ASGI.

Theory of operation. A `HttpConnection` is uvicorn's httptools protocol, and one of the two drivers of a
`ConnectionState`, whose states say what may happen; the parser is the other one. When the head of a request is
complete, the target
decides: a POST to a model takes the fast lane (no task, no future, no scope), everything else is handed to uvicorn's
unchanged code and so to the ASGI application. Answers of both lanes leave in the order in which their requests came: at
most one is being worked on, later ones of a pipelining client wait, and reading is paused while any does.

A client mostly sends the same head again and again. Once the parser has read one, the `HttpPort` remembers its bytes: a
request that arrives between two others with a remembered head is not parsed at all, whether it is whole or its body
comes bit by bit. Only heads are remembered that say all there is to say about the message (a length, nothing unusual),
so the same bytes mean the same again.

Limits are kept here for both lanes: length of the head, bodies that are arriving, idle time, slow readers and writers.
One sweep a second looks at all connections; no request sets a timer.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from forebay.errors import ForebayError, QueueFull, Unavailable
from forebay.observe.access_log import CALLED_OFF, EndedCall
from forebay.serving.endpoint import next_id
from forebay.transports.body_reader import read_bodies
from forebay.transports.http.arriving_body import ArrivingBody
from forebay.transports.http.asgi_calls import TOLD
from forebay.transports.http.connection_state import (
    ASKED,
    BODY,
    DUE,
    END,
    IDLE,
    LEAVE,
    LINGER,
    LOSE,
    MAX_AWAITED_BYTES,
    MAX_DROPPED_BYTES,
    OWE,
    READ,
    REFUSE,
    SETTLED,
    SHUT,
    ConnectionState,
    check_framing,
)
from forebay.transports.http.errors import NotHttp, TooSlow, error_answer
from forebay.transports.http.parsers import (
    new_parser,
    parser_of_rest,
    refusal_of,
    stop_parsing,
    with_known_method,
)
from forebay.transports.http.port import SWEEP_S
from forebay.transports.http.route import UNREAD, Head
from forebay.transports.http.streamed_answer import StreamedAnswer
from forebay.types.call import Failure, Request

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from uvicorn.config import Config
    from uvicorn.server import ServerState

    from forebay.transports.http.port import HttpPort
    from forebay.types.call import Outcome
    from forebay.types.tensor import Data

SEPARATE_BYTES: Final = 32 * 1024
"""Answers of this size and more are written after their head instead of being joined with it."""
LARGE_READ_BYTES: Final = 64 * 1024
"""A client of whom so much has arrived at once has its next turn after the others."""
MAX_HEAD_BYTES: Final = 2048
"""Longest head that is remembered."""

_answers = itertools.count(1)


class HttpConnection(HttpToolsProtocol):
    """One client connection, both lanes."""

    __slots__ = (
        "_active",
        "_body",
        "_detour",
        "_is_advancing",
        "_is_staged",
        "_is_unparsed",
        "_lands",
        "_lane",
        "_parser",
        "_reading",
        "_refusal",
        "_reply_method",
        "_request",
        "_request_id",
        "_seen",
        "_send",
        "_sent_bytes",
        "_stream",
        "_stuck_since",
        "_talk",
        "_usual",
        "_working",
        "release",
        "stalled",
    )

    def __init__(
        self,
        lane: HttpPort,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.release = 0
        self.url = b""  # a connection may be refused before it has asked for anything
        self._lane = lane
        talk = self._talk = ConnectionState(lane.config.max_head_bytes)
        self.pipeline = talk.waiting
        self._parser: Any = self.parser
        self._reply_method = self._reply
        self._send: Callable[[bytes], None] = _nowhere
        # What is being read.
        self._reading: Head | None = None
        self._body = ArrivingBody(lane)
        self._lands = False
        self._is_unparsed = False
        self._detour = b""
        # What is being answered: by the fast lane, or by the slow one.
        self._active: Head | None = None
        self._working: RequestResponseCycle | None = None
        self._request: Request | None = None
        self._request_id = ""
        self._refusal: ForebayError | None = None
        self._stream: StreamedAnswer | None = None
        self._sent_bytes = 0
        self._is_advancing = False
        self._is_staged = False
        # The head this client sent last.
        self._usual = UNREAD
        # Limits.
        self._seen = lane.epoch
        self._stuck_since: int | None = None
        self.stalled: list[Callable[[], object]] = []
        """What to call once the client has room again."""

    # Bytes in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or refuse it if there are too many."""
        lane = self._lane
        super().connection_made(transport)
        self._send = transport.write
        lane.connections.add(self)
        if len(lane.connections) > lane.config.max_connections:
            self._refuse(Unavailable(f"all {lane.config.max_connections} connections are taken; try again later"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel what is being answered: nobody waits for it any more."""
        self._lane.connections.discard(self)
        super().connection_lost(exc)
        self._abandon()
        self._send = _nowhere
        del self._reply_method, self._parser  # they refer to the connection: without them it is freed at once

    def _abandon(self) -> None:
        """Nobody reads answers here any more: cancel what is being answered and forget what waits."""
        self._talk.on(LOSE)
        self._talk.waiting.clear()
        self._body.drop()
        active, request, stream = self._active, self._request, self._stream
        if active is not None and self._lane.tells:
            has_started = self._has_started()
            self._request_id = request.id if has_started and request is not None else self._request_id
            self._tell(active, 200 if has_started else CALLED_OFF, request, "cancelled")
        if stream is not None:
            stream.give_up()
        self._active = self._request = self._stream = None
        if active is not None and active.route is not None and request is not None:
            active.route.endpoint.cancel(request)
        self._let_go()

    def forget(self) -> None:
        """Read the next head anew."""
        self._usual = UNREAD

    def abort(self) -> None:
        """End the connection now."""
        self._abandon()
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a remembered request as it is; let the parser read everything else."""
        talk = self._talk
        if talk.state is IDLE:
            head: Head | None = self._usual
            if len(data) != head.whole_bytes or not data.startswith(head.raw):
                raw = data[: data.find(b"\r\n\r\n") + 4]
                head = self._lane.heads.get(raw)
                if head is None or len(data) != head.whole_bytes:
                    if head is not None and len(data) < head.whole_bytes:
                        self._begin_remembered(head, data)
                        return
                    self._parse(data)
                    if talk.may_be_remembered:
                        self._learn(data, raw)
                    return
                self._usual = head
            self._seen = self._lane.epoch
            talk.state = DUE  # WHOLE
            is_full = head.is_full  # what is called as an attribute of an object takes Python far longer to find
            if is_full():
                self._active = head
                self._lane.refusals.refuse(self)
            elif head.is_simple:
                self._active = head
                body = data[head.raw_bytes :]
                request = self._request = Request(body, self._reply_method, head.params, self)
                submit = head.submit
                submit(request)
            else:
                self._answer(head, data[head.raw_bytes :])
        elif talk.state.reads:
            if self._is_unparsed:
                self._go_on(data)
            else:
                self._parse(data)
            if len(data) >= LARGE_READ_BYTES:
                self.give_way()
        else:
            self._drop(len(data))

    def _drop(self, size: int) -> None:
        """Let go of what nobody reads any more; a client may send so much of it, and then it is cut off."""
        self._seen = self._lane.epoch
        if self._talk.drop(size):
            self.transport.close()
        elif size >= LARGE_READ_BYTES:
            self.give_way()

    def room(self) -> memoryview | None:
        """Return where the rest of the body that is being read is to be put; None if the parser must read it."""
        head, talk = self._reading, self._talk
        if talk.state is not BODY or head is None or self._detour or head.length <= 0:
            return None
        return self._body.room(head.length - talk.body_bytes)

    def advance(self, size: int) -> None:
        """Take note of how much of the body was put there."""
        talk = self._talk
        self._seen = self._lane.epoch
        self._body.placed(size)
        talk.begin_segment()
        talk.body_bytes += size
        self._body.hold(size)
        self._came(size)

    def _came(self, size: int) -> None:
        """Count what came of a body and was not parsed, and answer if it was the rest."""
        talk, head = self._talk, self._reading
        assert head is not None
        if not talk.state.reads:
            return
        talk.end_segment(size, self._lane.epoch)
        if talk.body_bytes == head.length:
            if not self._is_unparsed:
                self._parser = self.parser = new_parser(self)  # the other one waits for the body
            self._is_unparsed = False
            self.on_message_complete()

    def _begin_remembered(self, head: Head, data: bytes) -> None:
        """Begin to read a message that has a remembered head, and of whose body something is missing."""
        talk = self._talk
        self._seen = self._lane.epoch
        talk.begin_segment()
        talk.begin()
        talk.on(READ)
        self._reading, self.headers, self.url = head, head.headers, head.url
        self._is_staged, self._is_unparsed = False, True
        self._body.begin()
        if head.length > MAX_AWAITED_BYTES and head.is_full():
            assert head.route is not None
            self._refuse(head.route.is_full_error, head)
            return
        self._take_unparsed(data[head.raw_bytes :], len(data))
        self._land()

    def _go_on(self, data: bytes) -> None:
        """Take what comes of a body whose head was remembered; the parser reads what follows."""
        talk, head = self._talk, self._reading
        assert head is not None
        self._seen = self._lane.epoch
        talk.begin_segment()
        missing = head.length - talk.body_bytes
        piece, rest = data[:missing], data[missing:]
        self._take_unparsed(piece, len(piece))
        if rest:
            self.data_received(rest)

    def _take_unparsed(self, piece: bytes, size: int) -> None:
        talk, head = self._talk, self._reading
        assert head is not None
        talk.body_bytes += len(piece)
        if piece:
            self._body.take(piece, head, talk.body_bytes)
        self._came(size)

    def _land(self) -> None:
        """From the first body on that lands, have the kernel put them there."""
        if not self._lands and self.room() is not None:
            self._lands = True
            read_bodies(self.transport, self)

    @property
    def held_bytes(self) -> int:
        """What is kept of a body that is arriving."""
        return self._body.held_bytes

    def give_way(self) -> None:
        """Read no more in this turn: a client that sends quickly would be read for megabytes before anybody else."""
        if not self.flow.read_paused and not self.transport.is_closing():
            self.flow.pause_reading()
            self._lane.turns.wait(self._read_on)

    def _read_on(self) -> None:
        if not self._talk.waiting and not self.flow.write_paused and not self.transport.is_closing():
            self.flow.resume_reading()

    def _learn(self, data: bytes, raw: bytes) -> None:
        """Remember the head of the one message in this segment if the same bytes will always mean the same."""
        head, talk = self._reading, self._talk
        if (
            head is not None
            and head.is_usual
            and head.problem is None
            and head.chunked
            and talk.body_bytes == len(data) - len(raw)
            and (head.length > talk.body_bytes if talk.state is BODY else head.length == talk.body_bytes)
            and len(raw) <= MAX_HEAD_BYTES
            and raw.startswith(b"POST ")
            and raw.count(b"\n") == len(self.headers) + 2  # nothing before the line, nothing folded, no bare line feeds
        ):
            head.headers, head.url = self.headers, self.url
            self._lane.remember(raw, head)

    def _parse(self, data: bytes) -> None:
        talk, lane = self._talk, self._lane
        self._seen = lane.epoch
        if lane.is_any_method and not talk.state.is_inside:
            data = with_known_method(data)
        talk.begin_segment()
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if self._detour:
                    self._change_parser(data[upgrade.args[0] :])
            talk.end_segment(len(data), lane.epoch)
            self._land()
        except httptools.HttpParserError as error:
            if talk.state.reads:
                self._refuse(refusal_of(error), self._reading)
        except ForebayError as error:
            self._refuse(error, self._reading)

    def _change_parser(self, rest: bytes) -> None:
        """Have another parser read the body: one that was asked for another protocol stops before it."""
        frame, self._detour = self._detour, b""
        self._parser = self.parser = parser_of_rest(self, frame)
        self._parser.feed_data(rest)

    def on_message_begin(self) -> None:
        """Begin a request; the parser calls this and the methods below."""
        talk = self._talk
        if not talk.state.reads:
            stop_parsing()
        talk.begin()
        self.url = b""
        self.headers = []
        self._reading = None
        self._is_staged = False
        self._body.begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header; what comes as a trailer says nothing here."""
        talk = self._talk
        if not talk.state.is_head:
            return
        talk.head_bytes += len(name) + len(value) + 4
        if talk.head_bytes > talk.max_head_bytes:
            raise talk.head_too_large()
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Choose the lane, and refuse what need not be read to its end."""
        talk, lane, parser, headers = self._talk, self._lane, self._parser, self.headers
        talk.head_bytes += len(self.url)
        if talk.head_bytes > talk.max_head_bytes:
            raise talk.head_too_large()
        talk.on(READ)
        method, version, upgrades = parser.get_method(), parser.get_http_version(), parser.should_upgrade()
        host, self._detour = check_framing(method, version, headers, upgrades=upgrades)
        problem = lane.hosts.problem(host)
        if b"#" in self.url:
            msg = "the target of a request has no fragment"
            raise NotHttp(msg)
        target, _, query = self.url.partition(b"?")
        route = lane.routes.get(target)
        if (
            route is None
            or method != b"POST"
            or (lane.config.cors_origins and any(name == b"origin" for name, _ in headers))
        ):
            if problem is not None:
                raise problem
            self._take_slow_lane(upgrades=upgrades)
            return
        if problem is None and route.is_staged(headers):
            self._is_staged = True
            self._take_slow_lane(upgrades=upgrades)
            return
        head = self._reading = route.turn().read_head(headers, query)
        head.target = target
        if problem is not None:
            raise problem
        head.keep_alive = parser.should_keep_alive() and not upgrades
        head.is_simple = head.is_simple and head.keep_alive
        head.chunked = version == "1.1"
        route = head.route
        assert route is not None
        if head.length > route.max_body_bytes:
            raise route.too_large(head.length)
        if head.problem is not None:
            if head.expects_continue or head.length > MAX_DROPPED_BYTES:
                raise head.problem
        elif not talk.state.owes:  # else another one's turn is before, and there may be room by then
            if (head.length > MAX_AWAITED_BYTES or head.expects_continue) and head.is_full():
                raise route.is_full_error
            if head.expects_continue and head.chunked:
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, or drop it if the request is refused anyhow."""
        talk = self._talk
        received = talk.body_bytes = talk.body_bytes + len(body)
        head = self._reading
        if head is None:
            if received > self._lane.config.max_body_bytes and not self.cycle.response_started:
                self._announce_end()
            if not self.cycle.response_complete:
                super().on_body(body)
                # What is read in steps has left the cycle by then, to where it is counted.
                self._hold(len(self.cycle.body) - self._body.held_bytes if self._is_staged else len(body))
            elif received > self._lane.config.max_body_bytes:  # its answer did not say that the connection closes
                raise NotHttp("the request was answered, and its body goes on")
            return
        assert head.route is not None
        if received > head.route.max_body_bytes:
            raise head.route.too_large()
        if head.problem is not None:
            if received > MAX_DROPPED_BYTES:
                raise head.problem
        else:
            self._body.take(body, head, received)
            if not talk.state.reads:
                stop_parsing()

    def _hold(self, size: int) -> None:
        """Count what the slow lane keeps of a body that is arriving."""
        self._body.hold(size)
        if not self._talk.state.reads:
            stop_parsing()

    def on_message_complete(self) -> None:
        """Answer the request, or put it off if another one comes first."""
        if self._detour:
            return  # the body comes yet: it is only this parser that will not read it
        talk = self._talk
        head = self._reading
        body = self._body.taken()
        if head is None:
            cycle = self.cycle
            super().on_message_complete()
            cycle.more_body = False
            talk.on(END)
            if not cycle.keep_alive and talk.state is DUE:
                talk.on(SHUT)
            return
        is_next = not talk.state.owes
        talk.on(ASKED)
        if not head.keep_alive:
            talk.on(SHUT)
        if is_next:
            self._answer(head, body, self.headers, self.url)
        else:
            self._put_off((head, body, self.headers, self.url), None)

    # The slow lane

    def _take_slow_lane(self, *, upgrades: bool) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = url
        self.headers = self.scope["headers"] = headers
        self.expect_100_continue = any(n == b"expect" and v.lower() == b"100-continue" for n, v in headers)
        super().on_headers_complete()
        self._talk.on(OWE)
        if upgrades or self._lane.is_draining:
            self.cycle.keep_alive = False
        elif any(
            name == b"content-length" and int(value) > self._lane.config.max_body_bytes for name, value in headers
        ):
            self._announce_end()

    def _announce_end(self) -> None:
        """Have the answer say that the connection closes: it may come before the body's end, which nobody will read."""
        self.cycle.keep_alive = False
        self.cycle.transport = cast("asyncio.Transport", _LastWords(self))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._talk.state.owes:
            self._put_off(cycle, app)
        else:
            self._work_on(cycle, app)

    def _work_on(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._working = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Go on with what waits; uvicorn's cycle calls this."""
        self.server_state.total_requests += 1
        self._working = None
        if self.transport.is_closing():
            if self._talk.state.reads or self._talk.state.owes:
                self._talk.on(LEAVE)
        else:
            self._advance()

    # One after the other

    def _put_off(self, what: Any, app: Any) -> None:
        self.flow.pause_reading()
        self._talk.waiting.appendleft((what, app))

    def _advance(self) -> None:
        """Start what waits, unless an answer is still due; a loop, for refusals answer at once."""
        if self._is_advancing:
            return
        talk = self._talk
        self._is_advancing = True
        try:
            while talk.state.owes and self._active is None and self._working is None:
                if not talk.waiting:
                    talk.on(SETTLED)
                    break
                if self.flow.write_paused or self.transport.is_closing():
                    return
                what, app = talk.waiting.pop()
                if app is None:
                    self._answer(*what)
                else:
                    self._work_on(what, app)
        finally:
            self._is_advancing = False
        if not talk.waiting and not self.flow.write_paused:
            self.flow.resume_reading()

    # The fast lane

    def _answer(
        self, head: Head, body: bytes | memoryview, headers: Sequence[tuple[bytes, bytes]] = (), url: bytes = b""
    ) -> None:
        route = head.route
        if route is not None and route.is_retired and head.problem is None:
            head = route.now(head, headers, url.partition(b"?")[2])
            route = head.route
            if type(body) is memoryview:
                body = bytes(body)  # it landed for the workers of a version that has left
        self._active = head
        is_refused = head.is_full() if head.problem is None else isinstance(head.problem, QueueFull)
        if is_refused:
            self._lane.refusals.refuse(self)
            return
        if head.problem is not None or route is None:
            problem = head.problem or NotHttp("the request could not be read")
            self._lane.tell(problem, self.client)
            if route is not None:
                route.endpoint.reject(problem)
            self._fail(head, problem)
            return
        try:
            request = self._request = route.request(head, body, self._reply_method, self)
        except ForebayError as error:
            route.endpoint.reject(error)
            self._fail(head, error)
            return
        if route.contract.streams:
            stream = self._stream = StreamedAnswer(self, self._lane, head, request)
            request.on_part = stream.part
            request.on_bundle = stream.bundle
        route.endpoint.submit(request)

    def _reply(self, request: Request, outcome: Outcome) -> None:
        head = self._active
        if request is not self._request or head is None:
            return
        lane = self._lane
        # A request has an id if its client named one, or if a line of the log had to name it.
        if type(outcome) is not bytes or not lane.is_plain or request.id != head.id:
            self._reply_in_full(head, request, outcome)  # if it raises, the request can still be told of that
            return
        self._request = None
        prefix = head.prefix if head.stamp == lane.epoch else lane.write_prefix(head)
        size = len(outcome)
        if head.is_simple and size < SEPARATE_BYTES:
            send = self._send
            send(b"%b%x\r\ncontent-length: %d\r\n\r\n%b" % (prefix, next(_answers), size, outcome))
            self._active = None
            talk = self._talk
            if talk.state is DUE and not talk.waiting:
                talk.state = IDLE  # SETTLED
            else:
                self._advance()
            return
        if request.id and not head.id:  # the model was told another one than the next
            self._reply_in_full(head, request, outcome)
            return
        number = b"" if head.id else b"%x" % next(_answers)
        self.transport.write(b"%b%b\r\ncontent-length: %d\r\n\r\n" % (prefix, number, size))
        self.transport.write(outcome)
        self._active = self._stream = None
        if head.keep_alive:
            self._advance()
        else:
            self._hang_up()

    def tell_refused(self) -> None:
        """Answer a request that came to a full queue; `RefusalLine` decides when."""
        head, lane = self._active, self._lane
        if head is None:  # the client has left
            return
        route = head.route
        assert route is not None
        error, self._refusal = self._refusal, None
        has_own = error is not None
        if error is None:
            error = route.is_full_error
            route.endpoint.reject(error)
        lane.tell(error, self.client)
        if has_own or head.id or not head.keep_alive or not lane.is_plain:
            self._fail(head, error)
            return
        pieces = head.refusal if head.refusal_stamp == lane.epoch else lane.write_refusal(head)
        self._send((b"%08x" % next(_answers)).join(pieces))
        self._active = None
        talk = self._talk
        if talk.state is DUE and not talk.waiting:
            talk.on(SETTLED)
        else:
            self._advance()

    def _reply_in_full(self, head: Head, request: Request, outcome: Outcome) -> None:
        """Answer in one of the ways that are not the common one."""
        route = head.route
        assert route is not None
        if type(outcome) is Failure:
            self._request_id = request.id
            if isinstance(outcome.error, QueueFull) and not self._has_started():
                self._refusal = outcome.error
                self._lane.refusals.refuse(self)
            else:
                self._fail(head, outcome.error, request)
        elif outcome is None and route.contract.streams:
            assert self._stream is not None
            self._stream.end(b"")
            self._request_id = request.id
            self._answered(head, 200, request)
        else:
            try:
                headers, pieces = route.answer(request, outcome)
            except Exception:
                self._request = request  # the endpoint replies with an error in its place
                raise
            self._request_id = request.id or next_id()
            self._write(200, [*headers, (b"x-request-id", self._request_id.encode())], pieces, head)
            self._answered(head, 200, request)

    def _fail(self, head: Head, error: ForebayError, request: Request | None = None) -> None:
        self._request_id = self._request_id or head.id or next_id()
        status = 200
        if self._has_started():
            assert self._stream is not None
            assert head.route is not None
            self._stream.end(head.route.last_part(error, self._request_id))
        else:
            tell = error_answer if head.route is None else head.route.fault
            status, headers, body = tell(error, self._request_id)
            self._write(status, headers, [body], head)
        self._answered(head, status, request, error.kind)

    def _write(self, status: int, headers: list[tuple[bytes, bytes]], pieces: Sequence[Data], head: Head) -> None:
        size = self._sent_bytes = sum(map(len, pieces))
        first = self._lane.write_head(status, headers, size, keep_alive=self.keeps_alive(head))
        if size < SEPARATE_BYTES:
            self.transport.write(b"".join([first, *pieces]))
        else:
            self.transport.writelines([first, *pieces])

    def _answered(self, head: Head, status: int, request: Request | None, code: str = "ok") -> None:
        stream = self._stream
        keep_alive = self.keeps_alive(head) and (stream is None or stream.is_chunked or not stream.has_started)
        if self._lane.tells:
            self._tell(head, status, request, code)
        self._active = self._request = self._stream = None
        self._request_id = ""
        self._sent_bytes = 0
        if not keep_alive:
            self._hang_up()
        else:
            self._advance()

    def _has_started(self) -> bool:
        return self._stream is not None and self._stream.has_started

    def keeps_alive(self, head: Head) -> bool:
        """Tell whether the connection goes on after an answer."""
        return head.keep_alive and not (self._lane.is_draining and not self._talk.waiting)

    # Limits

    def sweep(self, epoch: int) -> None:
        """Close what is idle, slow or stuck; called once a second."""
        config, talk = self._lane.config, self._talk
        quiet_s = (epoch - self._seen) * SWEEP_S
        if self._stuck_since is not None:
            if (epoch - self._stuck_since) * SWEEP_S > config.write_timeout_s:
                self.abort()
        elif talk.state.is_inside:
            if self.flow.read_paused:
                talk.wait(epoch)
            elif quiet_s > config.read_timeout_s or talk.is_too_slow(
                epoch, config.read_timeout_s, config.min_bytes_per_s
            ):
                late = f"the rest of the request did not come within {config.read_timeout_s:g} seconds"
                self._refuse(TooSlow(late if quiet_s > config.read_timeout_s else "the request comes too slowly"))
        elif talk.has_lingered(epoch, quiet_s) or (talk.state is IDLE and quiet_s > config.keep_alive_s):
            self.transport.close()

    def shutdown(self) -> None:
        """Close the connection once nothing is being answered on it."""
        if self._talk.state is IDLE:
            self.transport.close()
            return
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if cycle is not None:
            cycle.keep_alive = False

    def pause_writing(self) -> None:
        """The client does not take its answer as fast as it comes."""
        super().pause_writing()
        self.flow.pause_reading()  # who does not read answers may not ask for more of them
        self._stuck_since = self._lane.epoch

    def resume_writing(self) -> None:
        """The client has room again."""
        super().resume_writing()
        self._stuck_since = None
        self._let_go()
        self._advance()

    def _let_go(self) -> None:
        stalled, self.stalled = self.stalled, []
        for release in stalled:
            release()

    def give_up(self, error: ForebayError) -> None:
        """Refuse the body that is arriving."""
        self._refuse(error, self._reading)

    def _refuse(self, error: ForebayError, head: Head | None = None) -> None:
        """Answer with an error in turn, read nothing more, and close."""
        talk = self._talk
        if not self._takes_back(error):
            return
        talk.on(REFUSE)
        self._body.drop()
        if head is None:
            head = Head(target=self.url.partition(b"?")[0])
            head.method = self._parser.get_method() if self.url else b""
        else:
            head = copy.copy(head)  # it may be remembered, and others may send the same
        head.problem = error
        head.keep_alive = head.is_simple = False
        if self._active is not None or self._working is not None or talk.waiting:
            self._put_off((head, b""), None)
        else:
            self._answer(head, b"")

    def _takes_back(self, error: ForebayError) -> bool:
        """Take the message that is being read back from the slow lane, to refuse it here; False if it is too late."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if not self._talk.state.is_inside or self._reading is not None or cycle is None or not cycle.more_body:
            return True
        if cycle.response_started:
            self._lane.tell(error, self.client)
            if cycle.response_complete and not self._talk.state.owes:
                self._talk.on(REFUSE)
                self._hang_up()
            else:
                self.abort()  # half of an answer must not look like the whole
            return False
        cycle.scope.pop(TOLD, None)
        cycle.disconnected = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if cycle is self._working:
            self._working = None
        elif self._talk.waiting and self._talk.waiting[0][0] is cycle:
            self._talk.waiting.popleft()
        return True

    def hang_up_early(self) -> None:
        """Close after an answer whose request may still be on its way."""
        if self._talk.state.is_inside:
            self._talk.on(REFUSE)
        self._hang_up()

    def _hang_up(self) -> None:
        talk = self._talk
        self._body.drop()
        talk.on(LEAVE)
        if talk.state is LINGER and self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
            self._seen = self._lane.epoch
            talk.wait(self._seen)
            self.flow.resume_reading()
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


def _nowhere(_data: bytes) -> None:
    """Stand in for a transport until there is one."""


class _LastWords:
    """Stands in for the transport under the last answer, so that its client has a moment to read it."""

    def __init__(self, connection: HttpConnection) -> None:
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing
        self.close = connection.hang_up_early
