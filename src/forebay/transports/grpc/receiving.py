# SPDX-License-Identifier: Apache-2.0
"""What one client says: acts on its frames, begins its calls, and holds it to the rules of HTTP/2.

What breaks a rule of one stream raises `StreamFault` and ends that stream; what leaves nothing to believe raises
`ConnectionFault`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

from forebay.transports.grpc import frames, statuses
from forebay.transports.grpc.calls import OpenCall, ended
from forebay.transports.grpc.control_frames import ControlFrames
from forebay.transports.grpc.frames import CONNECTION_WINDOW, STREAM_WINDOW, ConnectionFault, Reason, StreamFault
from forebay.transports.grpc.heads import CallHead, Malformed, check_trailers
from forebay.transports.grpc.hpack import BadBlock, Decoder, HeaderBlockTooLarge
from forebay.transports.grpc.messages import PREFIX_BYTES
from forebay.transports.grpc.refusals import NEEDS_HTTP_2
from forebay.transports.grpc.remembered_calls import MAX_HEADS, UsualCalls
from forebay.transports.grpc.states import HALF_CLOSED
from forebay.transports.grpc.statuses import Status

if TYPE_CHECKING:
    from forebay.transports.grpc.abuse_limits import Manners
    from forebay.transports.grpc.connection import GrpcConnection
    from forebay.transports.grpc.frame_guesses import FrameRooms
    from forebay.transports.grpc.sending import Sender

MAX_PIECES: Final = 64
"""Short answers that are gathered before they are written, so that a client that reads none is noticed early."""
MAX_AT_ONCE: Final = 64
"""How many frames of one client are read in a turn of the loop: their calls are a fifth of a millisecond, or ten with
a thousand texts in each. With eight times as many, others wait for longer and the client's own calls are no faster."""
WEIGHED_BYTES: Final = 256
"""A header block that was not seen before counts as one more frame for each of these in it or its list of fields."""
MAX_HEAD_BYTES: Final = 2048
"""Longest list of fields that is remembered."""
MAX_PUBLIC: Final = 16
"""Calls that need no key, at a time."""
MAX_SKIPPED: Final = 64
"""Ranges of streams that were passed over; older ones count as closed."""
MAX_ENDED: Final = 1_024
"""Streams ended by the server whose last frames may still come; older ones are forgotten."""


class Receiver:
    """The inward side of a connection.

    Attributes:
        is_greeted: Whether the client began as HTTP/2 does.
        last_stream: The last call that it began.
        left: How many more frames might have been read when reading stopped; at none, there may be some that have come.
    """

    def __init__(
        self, connection: GrpcConnection, calls: dict[int, OpenCall], sender: Sender, manners: Manners
    ) -> None:
        port = self._port = connection.port
        self._connection = connection
        self._calls = calls
        self._sender = sender
        self._manners = manners
        self._control = ControlFrames(connection, calls, sender, manners)
        self._reader = frames.Http2FrameReader(4 * port.config.max_metadata_bytes)
        self._segment = b""
        self._untold = 0
        self.left = MAX_AT_ONCE
        # Where the conversation is.
        self.is_greeted = False
        self.last_stream = 0
        self._ended: dict[int, None] = {}
        self._skipped: deque[tuple[int, int]] = deque(maxlen=MAX_SKIPPED)
        # Header blocks.
        self._decoder = Decoder(port.config.max_metadata_bytes)
        self._usual = UsualCalls()
        self._usual_stamp = 0
        self._block: bytearray | None = None
        self._block_stream = 0
        self._block_flags = 0
        self._held_since = port.epoch

    @property
    def is_ready(self) -> bool:
        """Whether the client has said what it must say before its first call."""
        return self._control.has_settings

    @property
    def is_inside(self) -> bool:
        """Whether the client is in the middle of a frame or of a header block."""
        return self._reader.is_inside or self._block is not None

    @property
    def held_since(self) -> int | None:
        """The sweep after which what is kept of a frame or of a header block began to come; None if nothing is."""
        return self._held_since if self._reader.has_unread or self._block is not None else None

    @property
    def kept_bytes(self) -> int:
        """What is kept of frames and of a header block that have not come whole."""
        return self._reader.unread_bytes + (0 if self._block is None else len(self._block))

    def feed(self, data: bytes) -> None:
        """Take what has come."""
        self._reader.feed(data)

    def read(self, data: bytes = b"") -> None:
        """Act on the frames that are complete; stops early at a client that sends many or does not take its answers.

        Raises:
            ConnectionFault: If nothing more of this client can be believed.
        """
        if data:
            if self._reader.is_inside:
                self._segment = b""
            elif self._block is None and self._begin_as_usual(data):
                return
            else:
                self._segment = data
                if self._block is None:
                    self._held_since = self._port.epoch
            self._reader.feed(data)
        if not self.is_greeted and not self._greet():
            return
        connection, out = self._connection, self._sender.out
        self.left = MAX_AT_ONCE
        for kind, flags, stream, payload in self._reader.read():
            if self._block is not None and kind != frames.CONTINUATION:
                msg = "a header block was interrupted"
                raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
            try:
                if kind == frames.DATA:
                    self._take_data(flags, stream, payload)
                elif kind == frames.HEADERS:
                    self._take_headers(flags, stream, payload)
                elif kind == frames.CONTINUATION:
                    self._take_continuation(flags, stream, payload)
                else:
                    self._control.take(kind, flags, stream, payload, self.last_stream)
            except StreamFault as fault:
                self._fault(fault)
            # A client may ask for answers (pings, settings) faster than it takes them: it is read no further then.
            if len(out) > MAX_PIECES and not connection.write_some():
                break
            self.left -= 1
            if self.left <= 0:
                break
        if (self._reader.has_cut or self.left <= 0) and self._block is None:
            self._held_since = self._port.epoch
        self._segment = b""
        if self._reader.has_unread or self._block is not None or connection.kept_bytes:
            connection.keep(self.kept_bytes)

    def room(self) -> memoryview | None:
        """Return where what comes next may be put: the rest of a long frame; None if it has to be read.

        What was put there is told by `advance`, before anything else is read. Where a message ends with the frame there
        may be room for one byte more.
        """
        reader = self._reader
        rest = reader.rest_bytes
        if not rest or reader.has_unread:
            return None
        call = self._calls.get(reader.rest_of[1])
        if call is None:
            return None
        missing = call.missing_bytes
        return call.room(rest + 1 if rest == missing else min(rest, missing))

    def advance(self, size: int) -> bytes:
        """Act on what was put there; returns what came after the frame, which is to be read with what comes next.

        Raises:
            ConnectionFault: If nothing more of this client can be believed.
        """
        reader = self._reader
        rest, (_, stream) = reader.rest_bytes, reader.rest_of
        after = b""
        if size > rest:
            size, after = rest, self._calls[stream].byte_after()  # before `advance`, by which the message may leave
        flags = reader.skip_rest(size)
        self._advance(stream, size, is_last=bool(flags & frames.END_STREAM))
        return after

    def rooms(self, longest: int) -> FrameRooms | None:
        """Return where what comes next may be put if frames go on as they began; None if that is not several places.

        What was put there is told by `placed`, before anything else is read. All rooms together have about `longest`.
        """
        reader = self._reader
        length, stream = reader.long_of
        if length > frames.MIN_FRAME_BYTES:  # long frames have one room each, and are rarely even
            return None
        call = self._calls.get(stream)
        if call is None or call.state.is_half_closed or reader.has_unread or self._block is not None:
            return None
        missing, rest = call.missing_bytes, reader.rest_bytes
        if rest >= missing:
            return None
        room = call.room(min(longest, missing))
        if room is None:
            return None
        rooms = self._port.frame_rooms
        rooms.guess(room, missing, length, rest, reader.rest_of[0] if rest else 0, stream)
        return rooms

    def head_bytes(self) -> int:
        """Return how long the head of the next frame is if a message goes on with it that lands; else 0."""
        reader = self._reader
        call = self._calls.get(reader.long_of[1])
        if call is None or not call.missing_bytes or call.state.is_done or reader.is_inside or self._block is not None:
            return 0
        return frames.HEAD_BYTES

    def placed(self, size: int) -> None:
        """Act on what was put there; raises ConnectionFault if nothing more of this client can be believed."""
        rooms = self._port.frame_rooms
        found = rooms.placed(size)
        self._reader.go_on(found.rest_bytes, found.flags)
        self._advance(rooms.stream, found.size, is_last=bool(found.flags & frames.END_STREAM) and not found.rest_bytes)
        if found.unread:
            self.read(found.unread)

    def _advance(self, stream: int, size: int, *, is_last: bool) -> None:
        self._count_data(size)
        try:
            self._calls[stream].advance(size, is_last=is_last)
        except StreamFault as fault:
            self._fault(fault)

    def _fault(self, fault: StreamFault) -> None:
        connection = self._connection
        connection.reset(fault.stream, fault.reason)
        self._port.refused(connection.peer, str(fault))
        # What makes the server reset counts as if the client had: else faults would be a way round the limit of resets.
        self._manners.waste()

    def end_early(self, stream: int) -> None:
        """Ignore what still comes of a stream that the server has ended before its client."""
        ended = self._ended
        if len(ended) >= MAX_ENDED:
            del ended[next(iter(ended))]
        ended[stream] = None

    def _greet(self) -> bool:
        """Look for the preface; returns whether it is there."""
        found = self._reader.skip(frames.PREFACE)
        if found is None:
            self.is_greeted = True
            self.introduce()
        elif not frames.PREFACE.startswith(found):
            if not found[:1].isalpha() or found.startswith(b"PRI "):
                msg = "the connection does not begin as HTTP/2 does"
                raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
            self._port.refused(self._connection.peer, "it does not speak HTTP/2")
            self._sender.out.append(NEEDS_HTTP_2)
            self._connection.hang_up()
        return self.is_greeted

    def introduce(self) -> None:
        """Tell the client what it may do here."""
        config = self._port.config
        values = [
            (frames.MAX_CONCURRENT_STREAMS, config.max_streams),
            (frames.INITIAL_WINDOW_SIZE, STREAM_WINDOW),
            (frames.MAX_FRAME_SIZE, frames.LONG_FRAME_BYTES),
            (frames.MAX_HEADER_LIST_SIZE, config.max_metadata_bytes),
        ]
        self._sender.out.append(frames.settings(values))
        self._sender.out.append(frames.window_update(0, CONNECTION_WINDOW - frames.FIRST_WINDOW))

    def _begin_as_usual(self, data: bytes) -> bool:
        """Begin a call that came as one before did, byte for byte but for its stream and message."""
        usual, stream = self._usual, self.last_stream + 2
        whole = usual.whole.get(len(data))
        if whole is not None and whole.is_like(data, stream):
            call = self._begin_again(stream, whole.head, len(data) - whole.at + PREFIX_BYTES)
            if call is not None:
                call.state = HALF_CLOSED  # END_STREAM
                call.begin(data[whole.at :])
                return True
        elif usual.long is not None and (frame := usual.long.frame_of(data, stream)) is not None:
            (length, flags), start = frame, usual.long.start
            size = len(data) - start
            call = self._begin_again(stream, usual.long.head, size)
            if call is not None:
                self._reader.begin_inside(length, length - size, flags, stream)
                try:
                    call.receive(memoryview(data)[start:], size, is_last=False)
                except StreamFault as fault:
                    self._fault(fault)
                return True
        return False

    def _begin_again(self, stream: int, head: CallHead, size: int) -> OpenCall | None:
        """Begin a call with a head that is known, and so much data; None if it may not begin as usual."""
        port, connection = self._port, self._connection
        if (
            stream > frames.MAX_STREAM
            or not connection.state.begins
            or len(self._calls) >= port.config.max_streams
            or port.calls >= port.config.max_calls
            or (connection.account.unread and connection.account.is_full())
        ):
            return None
        self._count_data(size)
        self.last_stream = stream
        call = self._calls[stream] = OpenCall(connection, stream, head, self._sender.first_window, port.epoch)
        self._manners.begun += 1
        port.calls += 1
        if head.timeout_s is not None:
            port.expect(call, head.timeout_s)
        return call

    def _forget_heads(self) -> None:
        self._usual.forget()
        self._usual_stamp = self._decoder.changes

    def _count_data(self, size: int) -> None:
        """Give the client room for what has come, now and then."""
        self._untold += size
        if self._untold >= CONNECTION_WINDOW // 2:
            self._sender.out.append(frames.window_update(0, self._untold))
            self._untold = 0

    def _take_data(self, flags: int, stream: int, payload: Any) -> None:
        size = flow_bytes = len(payload)
        self._count_data(size)
        call = self._calls.get(stream)
        if call is None or call.state.is_half_closed:
            self._take_late_data(flags, stream, payload)
            return
        if flags & frames.PADDED:
            payload = frames.unpadded(flags & frames.PADDED, payload)
            size = len(payload)
        if not size:
            self._manners.idle_frame()
        if (
            flags & frames.END_STREAM
            and PREFIX_BYTES <= size <= self._port.max_small_bytes
            and payload[0] == 0
            and int.from_bytes(payload[1:PREFIX_BYTES]) == size - PREFIX_BYTES
            and call.take_whole(size)
        ):
            if flags == frames.END_STREAM and self._segment:
                self._usual.learn(self._segment, call.head, stream, size)
            call.begin(bytes(payload[PREFIX_BYTES:]))
        else:
            if self._segment and self._reader.rest_bytes:
                self._usual.learn_long(self._segment, call.head, stream)
            call.receive(payload, flow_bytes, is_last=bool(flags & frames.END_STREAM))

    def _take_late_data(self, flags: int, stream: int, payload: bytes) -> None:
        if stream == 0 or stream > self.last_stream or not stream & 1:
            msg = f"DATA on stream {stream}, which is not open"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
        frames.unpadded(flags & frames.PADDED, payload)
        self._manners.idle_frame()
        if stream not in self._ended:
            msg = f"DATA on stream {stream}, which is closed"
            raise StreamFault(stream, Reason.STREAM_CLOSED, msg)

    def _take_headers(self, flags: int, stream: int, payload: bytes) -> None:
        self._control.check_settings()
        if not stream & 1:
            msg = f"HEADERS on stream {stream}; clients have odd numbers"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.unpadded(flags, payload)
        if flags & frames.END_HEADERS:
            self._take_block(flags, stream, payload)
        else:
            self._block = bytearray(payload)
            self._block_stream, self._block_flags = stream, flags
            self._held_since = self._port.epoch

    def _take_continuation(self, flags: int, stream: int, payload: bytes) -> None:
        block = self._block
        if block is None or stream != self._block_stream:
            msg = "CONTINUATION of nothing"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
        self._manners.idle_frame()
        if len(block) + len(payload) > 4 * self._port.config.max_metadata_bytes:
            msg = "a header block is far too long"
            raise ConnectionFault(Reason.ENHANCE_YOUR_CALM, msg)
        block += payload
        if flags & frames.END_HEADERS:
            self._block = None
            self._take_block(self._block_flags, stream, bytes(block))

    def _take_block(self, flags: int, stream: int, block: bytes) -> None:
        """Begin a call, or end the client's side of one."""
        is_last = flags & frames.END_STREAM
        if stream <= self.last_stream:
            self._take_trailers(stream, block, is_last=bool(is_last))
            return
        if stream > self.last_stream + 2:
            self._skipped.append((self.last_stream, stream))
        self.last_stream = stream
        head = self._usual.heads.get(block) or self._read_head(stream, block)
        port, calls = self._port, self._calls
        if head.refusal is not None:
            self._turn_away(stream, head.refusal, is_last=bool(is_last))
            port.refused(self._connection.peer, head.reason)
            if port.tells:
                port.tell_ended(ended(head, self._connection.peer, head.status))
            self._manners.waste()
        elif len(calls) >= port.config.max_streams or not self._connection.state.begins:
            if self._connection.state.begins:
                msg = f"more than {port.config.max_streams} calls at a time"
                raise StreamFault(stream, Reason.REFUSED_STREAM, msg)
            self._connection.reset(stream, Reason.REFUSED_STREAM)
        elif port.calls >= port.config.max_calls and not head.is_public:
            text = f"all {port.config.max_calls} calls that may run at a time do; try again later"
            self._turn_away_now(stream, head, text, is_last=bool(is_last))
        elif self._connection.account.is_full() and not head.is_public:
            self._turn_away_now(stream, head, self._connection.account.full().message, is_last=bool(is_last))
        elif head.is_public and (text := self._why_not_public(head)) is not None:
            self._turn_away_now(stream, head, text, is_last=bool(is_last))
        else:
            call = calls[stream] = OpenCall(self._connection, stream, head, self._sender.first_window, port.epoch)
            self._manners.begun += 1
            if not head.is_public:
                port.calls += 1
            else:
                port.public_streams += head.is_stream
            if head.timeout_s is not None:
                port.expect(call, head.timeout_s)
            if head.is_stream:
                head.begin(call)
            if is_last:
                call.close_early()

    def _read_head(self, stream: int, block: bytes) -> CallHead:
        decoder = self._decoder
        fields, size = self._decode(block)
        if decoder.changes != self._usual_stamp or len(self._usual.heads) >= MAX_HEADS:
            self._forget_heads()
            is_same = False
        else:
            is_same = True
        try:
            head = self._port.heads.read(fields, size)
        except Malformed as error:
            self._manners.waste_block(size)
            raise StreamFault(stream, Reason.PROTOCOL_ERROR, str(error)) from None
        if head.refusal is not None or head.is_public:
            self._manners.waste_block(size)
        if is_same and size <= MAX_HEAD_BYTES:
            self._usual.heads[block] = head
        return head

    def _decode(self, block: bytes) -> tuple[list[tuple[bytes, bytes]], int]:
        try:
            fields, size = self._decoder.decode(block)
        except BadBlock as error:
            raise ConnectionFault(Reason.COMPRESSION_ERROR, str(error)) from None
        except HeaderBlockTooLarge:
            msg = f"a header block says more than twice the {self._port.config.max_metadata_bytes} bytes it may"
            raise ConnectionFault(Reason.ENHANCE_YOUR_CALM, msg) from None
        self.left -= max(size, len(block)) // WEIGHED_BYTES
        return fields, size

    def _why_not_public(self, head: CallHead) -> str | None:
        """Return why a call that needs no key may not begin now; None if it may."""
        self._manners.waste()
        max_watches = self._port.config.max_watches
        if head.is_stream and self._port.public_streams >= max_watches:
            return f"all {max_watches} calls that may watch at a time do"
        if sum(call.head.is_public for call in self._calls.values()) >= MAX_PUBLIC:
            return f"{MAX_PUBLIC} calls at a time that need no key are what a connection may have"
        return None

    def _turn_away(self, stream: int, refusal: bytes, *, is_last: bool) -> None:
        self._sender.out.append(frames.frame(frames.HEADERS, frames.END_FLAGS, stream, refusal))
        if not is_last:
            self._connection.reset(stream, Reason.NO_ERROR)

    def _turn_away_now(self, stream: int, head: CallHead, text: str, *, is_last: bool) -> None:
        """Refuse a call that could be taken at another time."""
        refusal = statuses.HEADERS + statuses.trailers(Status.RESOURCE_EXHAUSTED, text)
        self._turn_away(stream, refusal, is_last=is_last)
        self._port.refused(self._connection.peer, text)
        if self._port.tells:
            self._port.tell_ended(ended(head, self._connection.peer, Status.RESOURCE_EXHAUSTED))

    def _take_trailers(self, stream: int, block: bytes, *, is_last: bool) -> None:
        if any(before < stream < after for before, after in self._skipped):
            msg = f"HEADERS on stream {stream}, which was passed over"
            raise ConnectionFault(Reason.PROTOCOL_ERROR, msg)
        fields, size = self._decode(block)
        self._forget_heads()
        call = self._calls.get(stream)
        if call is None:
            self._manners.waste_block(size)
            if stream in self._ended:
                self._manners.idle_frame()
                return
        if call is None or call.state.is_half_closed:
            msg = f"HEADERS on stream {stream}, which is closed"
            raise ConnectionFault(Reason.STREAM_CLOSED, msg)
        if not is_last:
            msg = "HEADERS within a call must end it"
            raise StreamFault(stream, Reason.PROTOCOL_ERROR, msg)
        if size > self._port.config.max_metadata_bytes:
            self._manners.waste_block(size)
            msg = f"trailers of {size} bytes"
            raise StreamFault(stream, Reason.ENHANCE_YOUR_CALM, msg)
        try:
            check_trailers(fields)
        except Malformed as error:
            raise StreamFault(stream, Reason.PROTOCOL_ERROR, str(error)) from None
        call.close_early()
