# SPDX-License-Identifier: Apache-2.0
"""Bodies that are not in the frame that announces them: how they are written, and how they are read. Sans-I/O.

Theory of operation. A frame is decoded in one go, so it is short. Long bytes stand in it as an extension: they follow
the frame as they are, or lie in a file in memory of the sender. A list with many short samples follows as well, as
msgpack. The reader cuts what comes into frames and what follows them, and hands a message on when all of it is there.
Before anything of that comes its receiver has heard of it, so that it can say where it belongs, or that it is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Protocol, cast

import msgspec

from forebay.errors import ForebayError, InvalidRequest
from forebay.types.call import Failure
from forebay.types.first_use import known
from forebay.workers.memory.landing import Joining, Sink
from forebay.workers.wire import frames

MAX_FRAME_BYTES: Final = 1 << 22
"""Longest frame, without what follows it."""
MAX_FRAME_ELEMENTS: Final = 100_000
"""The most values in one."""
MAX_SEATS: Final = 2048
"""Requests that a frame may bring or end, bundles and parts included."""
FRAME_BYTES: Final = 1 << 20
"""A frame that would get longer is sent before; what is added to it counts as `HEAD_BYTES` at least."""
HEAD_BYTES: Final = 1 << 10
"""What a request takes in a frame beside its body and its params, at most."""
FOLLOWING_BYTES: Final = 1 << 18
"""A frame that so much follows is sent at once: what is behind it would wait."""
LYING_BYTES: Final = 1 << 24
"""So is one for which so much lies in memory that both sides see."""
_ROWS: Final = 256
"""Values of a list that stand in a frame; longer ones follow it."""
_PLAIN_BYTES: Final = 1 << 10
"""Other values of this length follow their frame."""
VALUE_BYTES: Final = 16
"""What a value counts in a frame, so that it has not too many of them."""
_DEPTH: Final = 2
"""Levels of lists below a body: its samples, and their parts."""
_LENGTH: Final = 8


Laying = Callable[[Any], Any]
"""Puts bytes where the other side sees them; returns what stands for them in a frame, None if they have to be sent."""


def nowhere(_data: Any) -> None:
    """Put nothing anywhere: the sides see no memory of each other."""


def set_apart(body: Any, place: Laying = nowhere, depth: int = _DEPTH) -> tuple[Any, list[Any]]:
    """Return what stands in a frame for a body, and the pieces that follow the frame.

    Raises:
        TypeError: It is not plain data.
    """
    kind = body.__class__
    if kind in _BUFFERS:
        if _size(body) < frames.LONG_BYTES:
            return body, []
        found = place(body)
        return (_announced(frames.FOLLOWS, _size(body)), [_flat(body)]) if found is None else (found, [])
    if kind not in _LISTS or not depth:
        packed = b"" if body is None else frames.encode_part(body)
        return (body, []) if len(packed) < _PLAIN_BYTES else follow(packed)
    size, count = _short(body)
    if size >= frames.LONG_BYTES or count > _ROWS:
        pieces = _laid_out(body)
        return _announced(frames.PACKED, sum(map(len, pieces))), pieces
    parts = [set_apart(one, place, depth - 1) for one in body]
    return [told for told, _ in parts], [piece for _, its in parts for piece in its]


def weight(told: Any) -> int:
    """Return how many bytes a frame has for a body; more where it has many values, which cost more than bytes do."""
    kind = told.__class__
    if kind in _BUFFERS:
        return _size(told)
    if kind in _LISTS:
        return _short(told)[0] + _ROWS * VALUE_BYTES
    return 0 if told is None or kind is msgspec.msgpack.Ext else _PLAIN_BYTES * VALUE_BYTES


def follow(packed: bytes) -> tuple[Any, list[Any]]:
    """Return what stands in a frame for msgpack that follows it, and that as pieces."""
    return _announced(frames.PACKED, len(packed)), [packed]


_BUFFERS: Final = frozenset({bytes, bytearray, memoryview})
_LISTS: Final = frozenset({list, tuple})


def _size(data: Any) -> int:
    return data.nbytes if data.__class__ is memoryview else len(data)


def _flat(data: Any) -> Any:
    return data.cast("B") if data.__class__ is memoryview else data


def _announced(code: int, length: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, length.to_bytes(_LENGTH, "big"))


def _short(values: Any) -> tuple[int, int]:
    """Return how many bytes of a list would stand in a frame, and how many values."""
    size, count = 0, len(values)
    for one in values:
        if one.__class__ in _LISTS:
            more, others = _short(one)
            size, count = size + more, count + others
        elif one.__class__ in _BUFFERS and _size(one) < frames.LONG_BYTES:
            size += _size(one)
    return size, count


def _laid_out(values: Any) -> list[Any]:
    """Return the msgpack of a list in pieces, of which the long ones are the bytes in it as they are."""
    pieces: list[Any] = [bytearray()]

    def add(value: Any) -> None:
        if value.__class__ in _LISTS:
            pieces[-1] += b"\xdd" + len(value).to_bytes(4, "big")
            for one in value:
                add(one)
        elif value.__class__ in _BUFFERS and _size(value) >= frames.LONG_BYTES:
            pieces[-1] += b"\xc6" + _size(value).to_bytes(4, "big")
            pieces.extend((_flat(value), bytearray()))
        else:
            pieces[-1] += frames.encode_part(value)

    add(values)
    return [piece for piece in pieces if piece]


class Apart:
    """A body, or a part of one, that is not in its frame.

    Attributes:
        length: How long it is.
        place: Path and inode of the file that it lies in, and where; None if it follows the frame.
        top: Of which body of the message it is a part.
        sink: What takes it; None if it is dropped.
        received: How much of it has come.
        held_bytes: How much of that is counted.
    """

    __slots__ = ("_at", "_holder", "_is_packed", "held_bytes", "length", "place", "received", "sink", "top")

    def __init__(self, length: int, place: tuple[str, int, int, int] | None = None, *, is_packed: bool = False) -> None:
        self.length = length
        self.place = place
        self.received = self.held_bytes = 0
        self.sink: Sink | None = None
        self.top = -1
        self._is_packed = is_packed
        self._holder: list[Any] = []
        self._at = 0

    def belongs(self, top: int, holder: list[Any], at: int) -> None:
        """Say where in a message it stands.

        Raises:
            InvalidRequest: It is the whole of nothing, or stands there already.
        """
        self.top, self._holder, self._at = top, holder, at

    def put(self, value: Any) -> None:
        """Put it where it stands in its message."""
        self._holder[self._at] = value

    def settle(self, max_elements: int) -> None:
        """Put what has come where it stands; raises an `InvalidRequest` if it is not a list."""
        sink, self.sink = self.sink, None
        if sink is None:
            return
        value = sink.getvalue()
        if self._is_packed:
            frames.require_few(value, max_elements)
            try:
                value = msgspec.msgpack.decode(value)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InvalidRequest(f"what follows a frame is not msgpack: {error}") from error
        self.put(value)


class BodiesTaker(Protocol):
    """What hears of bodies before they come."""

    def expect(self, message: Any, apart: list[Apart]) -> object:
        """Give each one that is wanted a sink; called where there are some."""
        ...

    def arrived(self, body: Apart, size: int) -> object:
        """Count so many bytes more as arrived; their sink may go."""
        ...


class LinkReader:
    """Cuts a stream of bytes into messages, with what follows them.

    Args:
        kind: What a message is made into; its last field has the bodies.
        max_body_bytes: How long the bodies of one message may be together, beyond what its sender waits for.
        max_elements: The most values in a frame, or in what follows it.
        bodies_of: Returns the bodies of a message that may have some; None for others.

    Attributes:
        listener: Hears of bodies before they come; None wants all of them.
    """

    def __init__(
        self,
        kind: Any,
        bodies_of: Callable[[Any], list[Any] | None],
        max_body_bytes: int = frames.MAX_FRAME_BYTES,
        max_elements: int = MAX_FRAME_ELEMENTS,
        max_frame_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.listener: BodiesTaker | None = None
        self._bodies_of = bodies_of
        self._max_body_bytes = max_body_bytes
        self._max_elements = max_elements
        self._most = min(max_elements, MAX_FRAME_ELEMENTS)
        self._max_frame_bytes = max_frame_bytes
        self._decoder = msgspec.msgpack.Decoder(known(kind), ext_hook=self._extension)
        self._buffer = bytearray()
        self._found: list[Apart] = []
        self._message: Any = None
        self._coming: list[Apart] = []  # the next one is the last

    def feed(self, data: bytes | bytearray | memoryview) -> Iterable[Any]:
        """Add bytes and return every message that is complete, each made when it is asked for.

        Raises:
            InvalidRequest: If a frame is too long, has too many values or is not msgpack; the connection is of no use
                after that.
        """
        size = len(data) - frames.HEADER
        is_between = not self._coming and not self._buffer and size <= self._max_frame_bytes
        if is_between and int.from_bytes(data[: frames.HEADER], "big") == size:  # one whole frame, as nearly always
            message = self._decode(memoryview(data)[frames.HEADER :])
            if not self._coming:
                return (message,)
            self._message = message
            return ()
        return self._feed(memoryview(data))

    def _feed(self, view: memoryview) -> Iterator[Any]:
        while view:
            if not self._coming:
                frame, view = self._next_frame(view)
                if frame is None:
                    return
                self._message = self._decode(frame)
            else:
                view = self._fill(view)
            if not self._coming:
                message, self._message = self._message, None
                yield message

    def _next_frame(self, view: memoryview) -> tuple[bytes | memoryview | None, memoryview]:
        """Return the next frame if it is complete, and what is left."""
        buffer = self._buffer
        if not buffer and len(view) >= frames.HEADER:
            end = frames.HEADER + self._length(view)
            if len(view) >= end:
                return view[frames.HEADER : end], view[end:]
        if len(buffer) < frames.HEADER:
            missing = frames.HEADER - len(buffer)
            buffer += view[:missing]
            view = view[missing:]
            if len(buffer) < frames.HEADER:
                return None, view
        missing = frames.HEADER + self._length(buffer) - len(buffer)
        buffer += view[:missing]
        if len(view) < missing:
            return None, view[:0]
        self._buffer = bytearray()
        return memoryview(buffer)[frames.HEADER :], view[missing:]

    def _length(self, data: bytearray | memoryview) -> int:
        length = int.from_bytes(data[: frames.HEADER], "big")
        if length > self._max_frame_bytes:
            raise InvalidRequest(f"a frame of {length} bytes was announced, at most {self._max_frame_bytes} are read")
        return length

    def _decode(self, frame: bytes | memoryview) -> Any:
        if len(frame) > self._most:
            frames.require_few(frame, self._most)
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"a frame is not msgpack: {error}") from error
        if self._found:
            self._expect(message)
        return message

    def _expect(self, message: Any) -> None:
        """Find out where the bodies of a message belong that are not in it."""
        found, self._found = self._found, []
        self._place(self._bodies_of(message), found)
        if self.listener is None:
            for one in found:
                one.sink = Joining()
        else:
            self.listener.expect(message, found)
        self._coming = [one for one in reversed(found) if one.place is None]

    def _extension(self, code: int, data: memoryview) -> Apart:
        if code == frames.LANDED:
            place = frames.read_landed(data)
            found = Apart(place[3], place)
        elif code in {frames.FOLLOWS, frames.PACKED} and len(data) == _LENGTH:
            found = Apart(int.from_bytes(data, "big"), is_packed=code == frames.PACKED)
        else:
            raise InvalidRequest(f"msgpack extension {code} is not part of the protocol")
        if not found.length:
            raise InvalidRequest("a body without a byte is said to be elsewhere")
        self._found.append(found)
        return found

    def _place(self, bodies: list[Any] | None, found: list[Apart]) -> None:
        """Find where in the bodies each one stands.

        Raises:
            InvalidRequest: One stands elsewhere, or they are too long.
        """
        size = sum(one.length for one in found)
        if size > self._max_body_bytes + LYING_BYTES:
            msg = f"the bodies of a frame have {size} bytes together, at most {self._max_body_bytes} are read"
            raise InvalidRequest(msg)
        stood = 0
        for top, body in enumerate(bodies or ()):
            stood += self._find(bodies or [], top, top, body, _DEPTH)
        if stood != len(found):
            raise InvalidRequest("bytes outside of all bodies were announced")

    def _find(self, holder: list[Any], at: int, top: int, value: Any, depth: int) -> int:
        if value.__class__ is Apart:
            value.belongs(top, holder, at)
            return 1
        if value.__class__ is list and depth:
            values = cast("list[Any]", value)
            return sum(self._find(values, index, top, one, depth - 1) for index, one in enumerate(values))
        return 0

    def _fill(self, view: memoryview) -> memoryview:
        """Take what belongs to the next body."""
        body = self._coming[-1]
        piece = view[: body.length - body.received]
        if body.sink is not None:
            body.sink.write(piece)  # pyright: ignore[reportArgumentType] - it copies
        body.received += len(piece)
        if self.listener is not None:
            self.listener.arrived(body, len(piece))
        if body.received == body.length:
            self._coming.pop()
            body.settle(self._max_elements)
        return view[len(piece) :]


def refused(body: Apart, bodies: list[Any], error: ForebayError) -> None:
    """Drop a body, and have its request fail."""
    body.sink = None
    bodies[body.top] = Failure(error)
