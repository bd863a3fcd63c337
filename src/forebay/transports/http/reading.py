# SPDX-License-Identifier: Apache-2.0
"""What the parser makes of the bytes of one connection: messages for the fast lane or the slow one, or refusals."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any, Final, Self, cast

import httptools
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from forebay.errors import ForebayError
from forebay.observe.logs.request_ids import next_id
from forebay.server.byte_budget import SMALL_BYTES
from forebay.transports.http.answering import AnsweringConnection
from forebay.transports.http.asgi_calls import HELD, TOLD
from forebay.transports.http.connection_state import (
    ASKED,
    BODY,
    DUE,
    END,
    MAX_AWAITED_BYTES,
    MAX_DROPPED_BYTES,
    OWE,
    READ,
    REFUSE,
    SHUT,
    SWITCH,
    check_framing,
)
from forebay.transports.http.head import Head, HeadMemory
from forebay.transports.http.http_errors import NotHttp, NotImplementedHere
from forebay.transports.http.parsers import (
    new_parser,
    parser_of_rest,
    refusal_of,
    stop_parsing,
    with_known_method,
    with_path,
)
from forebay.transports.http.route import whole_number
from forebay.types.failures import without_frames

if TYPE_CHECKING:
    from forebay.transports.http.port import HttpPort

MAX_HEAD_BYTES: Final = 2048
"""Longest head that is remembered."""
PIECE_BYTES: Final = 4 * 1024
"""How much is parsed before it is asked whether the rest should wait: what a request becomes is far larger than it."""
MAX_AT_ONCE: Final = 64
"""How many requests of one client are read in a turn of the loop, and those of a piece more."""
MAX_CHUNKS_AT_ONCE: Final = 1024
"""How many chunks of a body: each of one byte costs as much as one of many."""
_SLASH: Final = re.compile(rb"%2[Ff]")


class ReadingConnection(AnsweringConnection):
    """A connection that is read with a parser."""

    __slots__ = ("_detour", "_is_staged", "_is_unparsed", "_parser", "_reading")

    def __init__(self, lane: HttpPort) -> None:
        super().__init__(lane)
        self._parser: Any = None
        self._reading: Head | None = None
        self.forget_parser()
        self._detour = b""
        self._is_staged = self._is_unparsed = False

    def forget_parser(self) -> None:
        """Have none until something must be parsed: it is a third of what a walk of the collector looks at."""
        self._parser = self.parser = None  # type: ignore[assignment]
        self.url = b""  # a connection may be refused before it has asked for anything
        self._reading = None
        self.headers = self.cycle = self.scope = None  # type: ignore[assignment]  # all of them hold the last head

    def room(self) -> memoryview | None:
        """Return where the rest of the body that is being read is to be put; None if the parser must read it."""
        head, talk = self._reading, self.talk
        if talk.state is not BODY or head is None or self._detour or head.length <= 0:
            return None
        return self._body.room(head.length - talk.body_bytes)

    def advance(self, size: int) -> bytes:
        """Count so much of the body as put there, and read what came after it; returns nothing."""
        talk, head = self.talk, self._reading
        assert head is not None
        missing, after = head.length - talk.body_bytes, b""
        if size > missing:
            size, after = missing, self._body.byte_after()
        self.seen = self._lane.epoch
        if not self._is_unparsed:  # the parser misses what lands, so the rest is none of its business either
            self._is_unparsed = True
            self._parser = self.parser = new_parser(self)
        self._body.placed(size)
        talk.begin_segment()
        talk.body_bytes += size
        self._body.hold(size)
        self._came(size)
        if after:  # it may be all that there is, and no beginning of a message
            self.data_received(after)
        return b""

    def _came(self, size: int) -> None:
        """Count what came of a body and was not parsed, and answer if it was the rest."""
        talk, head = self.talk, self._reading
        assert head is not None
        if not talk.state.reads:
            return
        talk.end_segment(size, self._lane.epoch)
        if talk.body_bytes == head.length:
            self._is_unparsed = False
            self.on_message_complete()

    def _begin_remembered(self, memory: HeadMemory, data: bytes) -> None:
        """Begin to read a message that has a remembered head, and of whose body something is missing."""
        talk, head = self.talk, memory.head
        self.seen = self._lane.epoch
        talk.begin_segment()
        talk.begin()
        talk.on(READ)
        self._reading, self.headers, self.url = head, memory.headers, memory.url
        self._is_staged, self._is_unparsed = False, True
        self._body.begin()
        assert head.route is not None
        if head.length > MAX_AWAITED_BYTES and (refusal := head.route.refusal_before_body(head)) is not None:
            self._refuse(refusal, head)
            return
        self._take_unparsed(data[memory.raw_bytes :], len(data))
        self.intake.land(self)

    def _go_on(self, data: bytes) -> None:
        """Take what comes of a body whose head was remembered; the parser reads what follows."""
        talk, head = self.talk, self._reading
        assert head is not None
        self.seen = self._lane.epoch
        talk.begin_segment()
        missing = head.length - talk.body_bytes
        piece, rest = data[:missing], data[missing:]
        self._take_unparsed(piece, len(piece))
        if rest:
            self.data_received(rest)

    def _take_unparsed(self, piece: bytes, size: int) -> None:
        talk, head = self.talk, self._reading
        assert head is not None
        talk.body_bytes += len(piece)
        if piece:
            self._body.take(piece, head, talk.body_bytes)
        self._came(size)

    @property
    def held_bytes(self) -> int:
        """What is kept of a body that is arriving."""
        return self._body.held_bytes

    def _learn(self, data: bytes, raw: bytes) -> None:
        """Remember the head of the one message in this segment if the same bytes will always mean the same."""
        head, talk = self._reading, self.talk
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
            self._lane.remember(raw, head, self.headers, self.url)

    def _parse(self, data: bytes) -> None:
        talk, lane = self.talk, self._lane
        self.seen = lane.epoch
        if talk.waiting:
            data = self.rest_before() + data
        if lane.is_any_method and not talk.state.is_inside:
            data = with_known_method(data)
        talk.begin_segment()
        if self._parser is None:
            self._parser = self.parser = new_parser(self)
        try:
            rest, start, read = None, 0, 0
            try:
                piece = PIECE_BYTES if self.socket is None else PIECE_BYTES // 4  # which may be 170 frames
                while read < len(data) and not (read and self._should_wait()):
                    start, read = read, min(read + piece, len(data))
                    self._parser.feed_data(data[start:read])
            except httptools.HttpParserUpgrade as upgrade:
                rest = data[start + upgrade.args[0] :]
                read = len(data)
            if rest is not None and self._detour:  # outside of the handler, for errors are known by their context
                self._change_parser(rest)
            talk.end_segment(read, lane.epoch)
            if talk.state.is_head:
                self._hold_head()
            if read < len(data) and talk.state.reads:
                self.read_later(data[read:])
            else:
                self.intake.land(self)
        except httptools.HttpParserError as error:
            if talk.state.reads:
                self._refuse(refusal_of(error, data) or lane.defect(error), self._reading)
        except ForebayError as error:
            self._refuse(error, self._reading)

    def _hold_head(self) -> None:
        """Count what is kept of the head that is being read, if it is long."""
        held = self.talk.head_held(len(self.headers))
        if held > max(SMALL_BYTES, self._body.held_bytes):
            self._body.hold(held - self._body.held_bytes)

    def _should_wait(self) -> bool:
        """Tell whether enough was read of what came at once: answers come first, or other clients do."""
        talk = self.talk
        is_much = talk.begun > MAX_AT_ONCE or talk.pieces > MAX_CHUNKS_AT_ONCE
        return talk.state.reads and (is_much or bool(talk.waiting))

    def read_rest(self) -> None:
        """Read more of what came at once, now that it is the client's turn, and start what waits."""
        if self.is_rest_next():
            self._parse(self.rest_before())
        self.advance_answers()

    def _change_parser(self, rest: bytes) -> None:
        """Have another parser read the body: one that was asked for another protocol stops before it."""
        frame, self._detour = self._detour, b""
        if (socket := self.socket) is not None:
            self._parser = socket
            self.talk.on(SWITCH)
            headers = [(b"connection", b"upgrade"), (b"upgrade", b"websocket"), socket.accept]
            self.transport.write(self._lane.write_head(101, headers, None, keep_alive=True))
            if rest:
                self.read_later(rest)
            return
        self._parser = self.parser = parser_of_rest(self, frame)
        self._parser.feed_data(rest)

    def on_message_begin(self) -> None:
        """Begin a request; the parser calls this and the methods below."""
        talk = self.talk
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
        talk = self.talk
        if not talk.state.is_head:
            return
        talk.head_bytes += len(name) + len(value) + 4
        if talk.head_bytes > talk.max_head_bytes:
            raise talk.head_too_large()
        if len(self.headers) >= talk.max_head_lines:
            raise talk.too_many_lines()
        self.headers.append((name.lower(), value.rstrip(b" \t")))  # the parser leaves spaces after a value

    def on_headers_complete(self) -> None:
        """Choose the lane, and refuse what need not be read to its end."""
        talk, lane, parser, headers = self.talk, self._lane, self._parser, self.headers
        talk.head_bytes += len(self.url)
        if talk.head_bytes > talk.max_head_bytes:
            raise talk.head_too_large()
        talk.on(READ)
        method, version, upgrades = parser.get_method(), parser.get_http_version(), parser.should_upgrade()
        host, self._detour = check_framing(method, version, headers, upgrades=upgrades)
        problem = lane.hosts.problem(host)
        if b"#" in self.url:
            raise NotHttp("the target of a request has no fragment")
        target, mark, query = self.url.partition(b"?")
        if b"%2" in target and (plain := _SLASH.sub(b"/", target)) in lane.routes:
            target, self.url = plain, plain + mark + query
        route = lane.routes.get(target)
        is_fast = method == b"POST" and not (lane.config.cors_origins and any(name == b"origin" for name, _ in headers))
        opens = upgrades and version == "1.1" and method == b"GET" and self._asks_for_socket(target)
        if route is None or not (is_fast or opens):
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
        # A client of HTTP/1.0 waits for the close unless its answer says that there is none; the slow lane closes too.
        head.keep_alive = parser.should_keep_alive() and not upgrades and version == "1.1"
        head.is_simple = head.is_simple and head.keep_alive
        head.chunked = version == "1.1"
        route = head.route
        assert route is not None
        if head.length > route.max_body_bytes:
            raise route.too_large(head.length)
        if head.problem is not None:
            if head.expects_continue or head.length > MAX_DROPPED_BYTES:
                raise head.problem
        elif opens:
            self._open_socket()
        elif not talk.state.owes:  # else another one's turn is before, and there may be room by then
            is_awaited = head.length <= MAX_AWAITED_BYTES and not head.expects_continue
            if not is_awaited and (refusal := route.refusal_before_body(head)) is not None:
                raise refusal
            self._call_for_body(head)

    def _asks_for_socket(self, target: bytes) -> bool:
        """Tell whether a GET asks a model for a WebSocket, and this is possible: no body, no answer before this one."""
        is_native = target == b"/" or target.startswith(b"/models/")
        is_free = not (self._detour or self.talk.state.owes or self._lane.is_draining)
        return is_native and is_free and dict(self.headers).get(b"upgrade", b"").lower() == b"websocket"

    def _open_socket(self) -> None:
        """Speak WebSocket after this head; raises ForebayError if that cannot be."""
        try:
            from forebay.transports.http.websocket import WebSocket
        except ImportError as error:
            raise NotImplementedHere("WebSockets need an extra: pip install 'forebay[websockets]'") from error
        self.socket, self._detour = WebSocket(self, self._body, self._lane.config.max_body_bytes), b"websocket"

    def take_message(self, body: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        """Ask the model of a WebSocket."""
        target, _, query = self.url.partition(b"?")
        route = self._lane.routes.get(target, self._reading and self._reading.route)
        assert route is not None
        self.headers = headers
        head = self._reading = route.turn().read_head(headers, query)
        head.id, head.method, head.target, head.chunked, head.length = next_id(), b"GET", target, False, len(body)
        self._body.take(body, head, len(body))
        self.on_message_complete()

    def _call_for_body(self, head: Head) -> None:
        """Tell a client that waits for this word to send the body."""
        if head.expects_continue and head.chunked:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def body_is_next(self) -> None:
        """Say now what was not said before, for another answer was due: that the body is wanted, or not."""
        head = self._reading
        if head is None or head.problem is not None or self.talk.body_bytes:
            return
        assert head.route is not None
        if head.expects_continue and (refusal := head.route.refusal_before_body(head)) is not None:
            self._refuse(refusal, head)
        else:
            self._call_for_body(head)

    def on_body(self, body: bytes) -> None:
        """Keep a piece of the body, or drop it if the request is refused anyhow."""
        talk, head = self.talk, self._reading
        received = talk.body_bytes = talk.body_bytes + len(body)
        talk.pieces += 1
        if head is None:
            if received > self._lane.config.max_body_bytes and not self.cycle.response_started:
                self.announce_end(self.cycle)
            if not self.cycle.response_complete:
                super().on_body(body)
                # What is read in steps has left the cycle by then, to where it is counted.
                self._hold(len(self.cycle.body) - self._body.held_bytes if self._is_staged else len(body))
            elif received > self._lane.config.max_body_bytes:  # its answer did not say that the connection closes
                raise NotHttp("the request was answered before its body was complete")
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
        if not self.talk.state.reads:
            stop_parsing()

    def on_message_complete(self) -> None:
        """Answer the request, or put it off if another one comes first."""
        if self._detour:
            return  # the body comes yet: it is only this parser that will not read it
        talk, head = self.talk, self._reading
        held = self._body.held_bytes
        body = self._body.taken()
        if head is None:
            cycle = self.cycle
            if held and not cycle.response_complete:
                cycle.scope[HELD] = held  # type: ignore[typeddict-unknown-key]
                self._body.account.work(held)
            super().on_message_complete()
            cycle.more_body = False
            talk.on(END)
            if not cycle.keep_alive and talk.state is DUE:
                talk.on(SHUT)
            return
        is_next = not talk.state.owes  # asked before the next line, which makes this one due
        talk.on(ASKED)
        # Before the answer, which may be given at once and hang up: it lingers only where more may come.
        if not head.keep_alive:
            talk.on(SHUT)
        if is_next:
            self._answer(head, body, self.headers, self.url)
        else:
            if len(body) > SMALL_BYTES:
                self._body.account.work(len(body))
            self._put_off((head, body, self.headers, self.url), None)

    # The slow lane

    def _take_slow_lane(self, *, upgrades: bool) -> None:
        url, headers = self.url, self.headers
        super().on_message_begin()
        self.url = with_path(url)
        self.headers = self.scope["headers"] = headers
        self.scope[HELD] = 0  # type: ignore[typeddict-unknown-key]
        self.expect_100_continue = _waits_for_word(headers) and self._parser.get_http_version() == "1.1"
        super().on_headers_complete()
        if self._parser.get_http_version() == "1.0":
            self.cycle.chunked_encoding, self.cycle.expected_content_length = False, _UntilClose()
        self.talk.on(OWE)
        if (
            upgrades
            or self._lane.is_draining
            or not self.cycle.keep_alive
            or any(
                name == b"content-length" and whole_number(value) > self._lane.config.max_body_bytes
                for name, value in headers
            )
        ):
            self.announce_end(self.cycle)
        self._hold_head()
        if not self.talk.state.reads:
            stop_parsing()

    # Refused before it was read

    def refuse_arriving(self, error: ForebayError) -> None:
        """Refuse the request that is arriving."""
        if self.talk.state.reads:
            self._refuse(error, self._reading if self.talk.state.is_inside else None)

    def _refuse(self, error: ForebayError, head: Head | None = None) -> None:
        """Answer with an error in turn, read nothing more, and close."""
        talk = self.talk
        self.leave(error)
        self.rest_before()
        if self.socket is not None or not self._takes_back(error):
            return
        talk.on(REFUSE)
        self._body.drop()
        if head is None:
            head = Head(target=self.url.partition(b"?")[0])
            if not self.url or self._reading is None:  # else it is a POST to a model
                head.method = self._parser.get_method() if self.url else b""
        else:
            head = copy.copy(head)  # it may be remembered, and others may send the same
        head.problem = without_frames(error)  # its frames hold it, and the connection
        head.keep_alive = head.is_simple = False
        if self.active is not None or self._working is not None or talk.waiting:
            self._put_off((head, b""), None)
        else:
            self._answer(head, b"")

    def _takes_back(self, error: ForebayError) -> bool:
        """Take the message that is being read back from the slow lane, to refuse it here; False if it is too late."""
        cycle = cast("RequestResponseCycle | None", self.cycle)
        if not self.talk.state.is_inside or self._reading is not None or cycle is None or not cycle.more_body:
            return True
        if cycle.response_started:
            self._lane.tell(error, self.client)
            if cycle.response_complete and not self.talk.state.owes:
                self.talk.on(REFUSE)
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
        elif self.talk.waiting and self.talk.waiting[0][0] is cycle:
            self.talk.waiting.popleft()
        return True


class _UntilClose(int):
    """The length of an answer that is not known before the connection closes: a client of HTTP/1.0 reads no chunks."""

    def __lt__(self, value: int) -> bool:
        return False

    def __sub__(self, value: int) -> Self:
        return self


def _waits_for_word(headers: list[tuple[bytes, bytes]]) -> bool:
    """Tell whether a client has a body that it will not send before it is told to."""
    has_body = any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0")) for name, value in headers
    )
    return has_body and any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
