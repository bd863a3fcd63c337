# SPDX-License-Identifier: Apache-2.0
"""One client's connection as a state machine: what may be read, remembered, put off, answered, closed. No I/O.

Theory of operation. At any moment a connection is in one of these states. Two things make a state: where the next bytes
go, and whether an answer is due.

    state      the next bytes belong to    an answer is due   and so
    IDLE       a new message               no                 a remembered message may take the shortcut; may be closed
    HEAD       its line and headers        no                 must go on coming
    BODY       its body                    no                 must go on coming
    DUE        a new message               yes                a further message is read, and put off
    HEAD_DUE   its line and headers        yes                the same, and must go on coming
    BODY_DUE   its body                    yes                the same; the answer may be that to this very message
    FINAL      nobody                      yes                the last message was read; after what is due it is closed
    REFUSED    nobody                      yes                the same, but the client may still be sending
    LINGER     nobody                      no                 all is written; what still comes is dropped for a moment,
                                                              for a close while it comes could take the answer along
    GONE       nobody                      no                 closed, by whichever side

A WebSocket is in four states of its own, like IDLE, BODY, DUE and BODY_DUE, without heads and the shortcut.
`TABLE` says which event leads from which state to which; an event that is not in a state's row is a defect of ours. The
shortcut (`WHOLE`) is one transition out of one state: a segment that is one whole message, read before byte by byte the
same. `HttpConnection` does it and its way back (`SETTLED`) in its own hot path, by assigning the state; a test holds
both against the table. A message whose body is still to come takes the same events whether or not its head was read
before.

`ConnectionState` also counts what arrives, while it arrives: line and headers, what frames a chunked body (extensions,
trailers), and whether all of it comes fast enough. `check_framing` refuses heads whose end could be read in two ways.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forebay.transports.http.http_errors import HeadTooLarge, MethodNotAllowed, NotHttp, NotImplementedHere
from forebay.transports.state_table import Event, State

MAX_DROPPED_BYTES: Final = 64 * 1024
"""A body that nobody wants is read to its end if it is no longer than this, so that the connection can go on."""

MAX_AWAITED_BYTES: Final = 256 * 1024
"""A body for a full queue is read to its end if it is no longer than this, which is what the loop reads at a time."""

LINE_BYTES: Final = 144
"""What a header takes beside its text: a tuple of two bytes objects in a list."""


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class HttpState(State):
    """Where a conversation is.

    Attributes:
        reads: Whether the next bytes go anywhere.
        is_inside: Whether they belong to a message that has begun.
        owes: Whether an answer is due.
        is_head: Whether they belong to the line and headers of a message.
    """

    reads: bool
    is_inside: bool
    owes: bool
    is_head: bool = False


BEGIN: Final = Event("the first byte of a message was read")
READ: Final = Event("its line and headers were read")
OWE: Final = Event("an answer to it is due from now on")
END: Final = Event("its last byte was read")
ASKED: Final = Event("its last byte was read, and an answer to it is due")
SHUT: Final = Event("it was the last one: no other will be read")
WHOLE: Final = Event("a whole remembered message came as one segment")
SETTLED: Final = Event("every answer that was due is written")
SWITCH: Final = Event("the connection is a WebSocket from here on")
REFUSE: Final = Event("nothing more is read; an error is due")
LEAVE: Final = Event("the last answer there will be is written")
LOSE: Final = Event("the connection is closed")

IDLE: Final = HttpState("IDLE", reads=True, is_inside=False, owes=False)
HEAD: Final = HttpState("HEAD", reads=True, is_inside=True, owes=False, is_head=True)
BODY: Final = HttpState("BODY", reads=True, is_inside=True, owes=False)
DUE: Final = HttpState("DUE", reads=True, is_inside=False, owes=True)
HEAD_DUE: Final = HttpState("HEAD_DUE", reads=True, is_inside=True, owes=True, is_head=True)
BODY_DUE: Final = HttpState("BODY_DUE", reads=True, is_inside=True, owes=True)
FINAL: Final = HttpState("FINAL", reads=False, is_inside=False, owes=True)
REFUSED: Final = HttpState("REFUSED", reads=False, is_inside=False, owes=True)
LINGER: Final = HttpState("LINGER", reads=False, is_inside=False, owes=False)
GONE: Final = HttpState("GONE", reads=False, is_inside=False, owes=False)
SOCKET: Final = HttpState("SOCKET", reads=True, is_inside=False, owes=False)
MESSAGE: Final = HttpState("MESSAGE", reads=True, is_inside=True, owes=False)
SOCKET_DUE: Final = HttpState("SOCKET_DUE", reads=True, is_inside=False, owes=True)
MESSAGE_DUE: Final = HttpState("MESSAGE_DUE", reads=True, is_inside=True, owes=True)

_ANY: Final[Mapping[Event, HttpState]] = {LOSE: GONE, LEAVE: GONE}
_READING: Final[Mapping[Event, HttpState]] = {**_ANY, REFUSE: REFUSED}

TABLE: Final[Mapping[HttpState, Mapping[Event, HttpState]]] = {
    IDLE: {**_READING, BEGIN: HEAD, WHOLE: DUE},
    HEAD: {**_READING, READ: BODY},
    BODY: {**_READING, OWE: BODY_DUE, END: IDLE, ASKED: DUE, SWITCH: SOCKET},
    DUE: {**_READING, BEGIN: HEAD_DUE, SETTLED: IDLE, SHUT: FINAL},
    HEAD_DUE: {**_READING, READ: BODY_DUE, SETTLED: HEAD, SHUT: FINAL},
    BODY_DUE: {**_READING, OWE: BODY_DUE, END: DUE, ASKED: DUE, SETTLED: BODY, SHUT: FINAL},
    FINAL: _ANY,
    REFUSED: {LOSE: GONE, LEAVE: LINGER},
    LINGER: {LOSE: GONE},
    GONE: _ANY,
    SOCKET: {**_READING, BEGIN: MESSAGE},
    MESSAGE: {**_READING, END: SOCKET, ASKED: SOCKET_DUE},
    SOCKET_DUE: {**_READING, BEGIN: MESSAGE_DUE, SETTLED: SOCKET},
    MESSAGE_DUE: {**_READING, END: SOCKET_DUE, ASKED: SOCKET_DUE, SETTLED: MESSAGE},
}


class ConnectionState:
    """Where one connection is, what waits for its turn, and what of the limits is used up.

    Attributes:
        state: Where it is.
        waiting: What is put off until the answers before it are written; the next one is the last of them.
        body_bytes: Of the body that is being read, so far.
        head_bytes: Of the line and headers that are being read, as far as they were understood.
        pieces: In how many pieces bodies came in the segment that is being read.
        max_head_lines: How many headers a message may have.
    """

    __slots__ = (
        "_arrived",
        "_begun",
        "_ended",
        "_framing",
        "_raw_head",
        "_seen_body",
        "_started_in",
        "_window_at",
        "_window_from",
        "body_bytes",
        "head_bytes",
        "max_head_bytes",
        "max_head_lines",
        "pieces",
        "state",
        "waiting",
    )

    def __init__(self, max_head_bytes: int, max_head_lines: int) -> None:
        self.state = IDLE
        self.max_head_lines = max_head_lines
        self.waiting: deque[tuple[Any, Any]] = deque()
        self.max_head_bytes = max_head_bytes
        self.body_bytes = 0
        self.head_bytes = 0
        self.pieces = 0
        self._started_in = IDLE
        self._begun = self._ended = 0
        self._raw_head = self._framing = self._seen_body = 0
        self._arrived = 0
        self._window_at = self._window_from = 0.0

    def on(self, event: Event) -> None:
        """Go where this event leads; raises KeyError if it cannot happen in this state: a defect."""
        state = self.state = TABLE[self.state][event]
        if event is ASKED or event is END:
            self._ended += 1
        elif not state.reads and not state.owes:
            self.waiting.clear()

    def begin(self) -> None:
        """Begin to read a message."""
        self.state = TABLE[self.state][BEGIN]
        self._begun += 1
        self._raw_head = self._framing = self.head_bytes = self.body_bytes = self._seen_body = 0

    def begin_segment(self) -> None:
        """Begin to read what came at once."""
        self._started_in = self.state
        self._begun = self._ended = self.pieces = 0

    def end_segment(self, size: int, now: float) -> None:
        """Count a segment that was read; raises HeadTooLarge if a head, or what frames a body, is over its limit."""
        state = self.state
        if not state.is_inside:
            return
        if self._begun:
            self._window_at, self._window_from = now, self._arrived
        self._arrived += size
        if state.is_head:
            # Where in a segment a later message begins is not known; what was understood of it is counted anyhow.
            if not self._begun or (self._begun == 1 and not self._started_in.is_inside):
                self._raw_head += size
            if max(self._raw_head, self.head_bytes) > self.max_head_bytes:
                raise self.head_too_large()
            return
        came, self._seen_body = self.body_bytes - self._seen_body, self.body_bytes
        if not self._begun and not self._started_in.is_head:
            self._framing += size - came
            if self._framing > self.max_head_bytes + self.body_bytes:
                msg = "chunk sizes, extensions and trailers are longer than the body they belong to and the limit of"
                msg += f" {self.max_head_bytes} bytes"
                raise HeadTooLarge(msg)

    @property
    def may_be_remembered(self) -> bool:
        """Whether the segment that was just read held one message from its beginning on, and nothing of another."""
        state = self.state
        is_all = self._ended == 1 and (state is IDLE or state is DUE)
        return self._started_in is IDLE and self._begun == 1 and (is_all or (not self._ended and state is BODY))

    @property
    def begun(self) -> int:
        """How many messages the segment that is being read has begun so far."""
        return self._begun

    def wait(self, now: float) -> None:
        """Note that nothing can arrive now, through no fault of the client's."""
        self._window_at, self._window_from = now, self._arrived

    def is_too_slow(self, now: float, patience_s: float, min_bytes_per_s: int) -> bool:
        """Tell whether a message has come too slowly for the time that was granted; asked now and then."""
        if not self.state.is_inside or now - self._window_at <= patience_s:
            return False
        came = self._arrived - self._window_from
        self.wait(now)
        return came < min_bytes_per_s * patience_s

    def head_held(self, lines: int) -> int:
        """Return what is kept of the head that is being read, which has so many headers so far."""
        return max(self._raw_head, self.head_bytes) + lines * LINE_BYTES

    def too_many_lines(self) -> HeadTooLarge:
        """Return the error for a head with too many headers."""
        return HeadTooLarge(f"the request has more than {self.max_head_lines} headers (--max-head-lines)")

    def head_too_large(self) -> HeadTooLarge:
        """Return the error for a head over the limit."""
        return HeadTooLarge(f"the request's line and headers are longer than {self.max_head_bytes} bytes")


_VERSIONS: Final = frozenset({"1.1", "1.0"})
_FRAMING: Final = frozenset({b"host", b"transfer-encoding", b"content-length"})


def check_framing(
    method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]], *, upgrades: bool
) -> tuple[bytes, bytes]:
    """Refuse a head whose end or target could be read in two ways; does not look for what the parser refuses itself.

    Args:
        version: "1.1" or "1.0".
        headers: Its headers, names in lower case.
        upgrades: Whether the parser will not read its body, for it asks for another protocol.

    Returns:
        The host that is asked for; and what the body is framed by, as a header, if somebody else than the parser must
        read it, else nothing.

    Raises:
        NotHttp: If it must not be taken for a request.
        NotImplementedHere: If its body is coded in a way that is not understood.
        MethodNotAllowed: If it asks for a tunnel.
    """
    if version not in _VERSIONS:
        raise NotHttp("the request's line does not end with HTTP/1.1 or HTTP/1.0")
    hosts = 0
    host = frame = b""
    for name, value in headers:
        if name not in _FRAMING:
            continue
        if name == b"host":
            hosts += 1
            host = value
        elif name == b"transfer-encoding":
            if version != "1.1":
                raise NotHttp(f"an HTTP/{version} request has no Transfer-Encoding")
            if frame or value.strip().lower() != b"chunked":
                msg = f"the Transfer-Encoding is {value[:80].decode('latin-1')!r}, only 'chunked' is understood"
                raise NotImplementedHere(msg)
            frame = b"transfer-encoding: chunked"
        elif value.strip(b"0"):
            frame = b"content-length: " + value
    if hosts > 1 or (not host and version == "1.1"):
        msg = f"expected one Host header, got {hosts}" if host or not hosts else "the Host header is empty"
        raise NotHttp(msg)
    if method == b"CONNECT":
        raise MethodNotAllowed("CONNECT is not allowed; this server is not a proxy")
    return host, frame if upgrades else b""
