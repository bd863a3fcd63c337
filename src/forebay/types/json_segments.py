# SPDX-License-Identifier: Apache-2.0
"""Long JSON, read in steps: cut at commas into segments that msgspec checks one by one.

Theory of operation. A decoder reads 60 MB in one call of 40 ms, in which an event loop serves no one else. A segment
ends at a comma outside of texts. The brackets that are open there are known, since those of a segment are counted. So
each segment can be completed: the open brackets before it, a value, the segment itself, a value, and the brackets that
close the rest. All of JSON is well-formed if and only if all of its completed segments are, and msgspec says so of
each. Nothing is parsed here.

Two readers use segments. `outline` omits what lies inside arrays; the rest is short, and is decoded in one call.
`elements` returns the elements of an array unread.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from forebay.types.element_limits import Data, Steps

LONG_BYTES: Final = 512 * 1024
"""Shorter JSON is decoded in one call."""
SEGMENT_BYTES: Final = 64 * 1024
FINE_BYTES: Final = 4 * 1024
"""Size of segments where an outline must not omit all of a longer one."""
STEP_BYTES: Final = 256 * 1024
"""What is copied or looked through in one step."""
SEGMENTS: Final = 4
"""Segments in one step."""
MAX_DEPTH: Final = 64
"""Brackets that may be open at the end of a segment."""

_PIECE_BYTES: Final = 256
"""What a piece costs beside its length where many are joined."""
_BRACKETS: Final = b"[]{}"
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_REST: Final = re.compile(rb"([\]}]*+)([\[{]*+)")
_LIST: Final = ord("[")
_CLOSED: Final = bytes.maketrans(b"[{", b"]}")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_raw: Final = msgspec.json.Decoder(msgspec.Raw)
_rows: Final = msgspec.json.Decoder(list[msgspec.Raw])


class TooDeep(msgspec.DecodeError):
    """Long JSON has more brackets in one another than segments may have."""


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A part of JSON from behind a comma to the next one.

    Attributes:
        before: The brackets that are open where it begins, the outermost first.
        after: The brackets that are open where it ends.
        kept: How many of these stay open all the time.
        marks: Brackets in it, the slowest part to count.
    """

    start: int
    end: int
    before: bytes
    after: bytes
    kept: int
    marks: int

    def completed(self, text: bytes) -> bytes:
        """Return JSON with this segment, whose text is given, inside its brackets."""
        first = opened(self.before) + self.lead if self.start else b""
        return b"".join((first, text, _behind(self.after), closed(self.after)))

    @property
    def lead(self) -> bytes:
        """What stands before the segment in JSON that completes it, inside its brackets."""
        return b"0," if self.before.endswith(b"[") else b'"":0,'


def opened(brackets: bytes) -> bytes:
    """Return the beginning of JSON with these brackets, each but the last one with a value that is open."""
    return b"".join([b"[" if bracket == _LIST else b'{"":' for bracket in brackets[:-1]]) + brackets[-1:]


def closed(brackets: bytes) -> bytes:
    """Return the end of what these brackets open."""
    return brackets[::-1].translate(_CLOSED)


def outline(data: Data, arrays: int) -> Steps[Outline]:
    """Return JSON without most of what lies in so many arrays in one another, or deeper.

    Raises:
        msgspec.DecodeError: If it is malformed.
    """
    found = Outline(data)
    at, brackets, fine_until, done = 0, b"", 0, 0
    while at < len(data) or not at:
        segment = next_segment(data, at, brackets, FINE_BYTES if at < fine_until else SEGMENT_BYTES)
        base = _base(segment, arrays)
        if not base and segment.before and segment.after and at >= fine_until:
            fine_until = segment.end  # a part of it may lie in such arrays
            continue
        found.add(segment, base)
        at, brackets = segment.end + 1, segment.after
        done += 1 + (segment.marks > SEGMENT_BYTES // 8) * SEGMENTS
        if done >= SEGMENTS:
            done = 0
            yield
    yield
    found.end()
    yield
    return found


class Outline:
    """JSON with marks in the place of long parts.

    Attributes:
        text: What can be decoded.
    """

    def __init__(self, data: Data) -> None:
        self.text = b""
        self._data = memoryview(data)
        self._mark = secrets.token_hex(8).encode()
        """What nobody else can have written."""
        self._pieces: list[bytes] = []
        self._holes: list[tuple[int, int]] = []
        self._hole: tuple[int, bytes, int] | None = None
        """Where the last one begins, with which brackets, and how many of these stay open in all of it."""
        self._last = 0, 0, b""
        """Where the last segment began and ended, and the brackets behind it."""

    def add(self, segment: Segment, base: int) -> None:
        """Add a segment; all of it can be omitted if it has a base: brackets that stay open in it."""
        if self._hole is not None and (not base or base != self._hole[2]):
            self._close_hole()
        if not base:
            self._pieces.append(bytes(self._data[segment.start : segment.end]))
        elif self._hole is None:
            self._hole = segment.start, segment.before, base
        self._last = segment.start, segment.end, segment.after

    def end(self) -> None:
        """Put the text together."""
        if self._hole is not None:
            self._close_hole()
        self.text = b",".join(self._pieces)

    def _close_hole(self) -> None:
        assert self._hole is not None
        start, before, base = self._hole
        _, end, after = self._last
        mark = b'"%b%08x"' % (self._mark, len(self._holes))
        first = mark if before.endswith(b"[") else mark + b":0"
        last = mark if after.endswith(b"[") else mark + b":0"
        self._pieces.append(first + closed(before[base:]))
        inner = opened(after[base - 1 :])[1:]
        self._pieces.append(inner + last)
        self._holes.append((start, end))
        self._hole = None

    def has_omitted(self, part: bytes | memoryview) -> bool:
        """Tell whether something of a part is not in the text."""
        return self._mark in bytes(part)

    def whole(self, part: bytes | memoryview) -> memoryview:
        """Return the original of a part of the text that was cut out of it unread; `part` if it is all there."""
        text = bytes(part)
        first, last = text.find(self._mark), text.rfind(self._mark)
        if first < 0:
            return memoryview(part)
        digits = len(self._mark)
        start = self._holes[int(text[first + digits : first + digits + 8], 16)][0] - (first - 1)
        behind = last + digits + 9
        behind += 2 * (text[behind : behind + 2] == b":0")
        end = self._holes[int(text[last + digits : last + digits + 8], 16)][1] + len(text) - behind
        return self._data[start:end]


def joined(parts: Iterable[Data]) -> Steps[bytes]:
    """Join what may be long, in steps."""
    whole = io.BytesIO()
    copied = 0
    for part in parts:
        piece = memoryview(part)
        for at in range(0, len(piece), STEP_BYTES):
            copied += whole.write(piece[at : at + STEP_BYTES]) + _PIECE_BYTES
            if copied >= STEP_BYTES:
                copied = 0
                yield
    return whole.getvalue()


def elements(data: Data, limit: int) -> Steps[list[memoryview] | None]:
    """Return the elements of an array unread, or None if there are more than the limit.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is no array.
    """
    found: list[memoryview] = []
    for part in elements_in_parts(data):
        found += part
        if len(found) > limit:
            return None
        yield
    return found


def elements_in_parts(data: Data) -> Iterator[list[memoryview]]:
    """Yield the elements of an array, those of a step together; a step may have none.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is no array.
    """
    view = memoryview(data)
    found: list[memoryview] = []
    at, brackets, begun, done = 0, b"", 0, 0
    while at < len(view) or not at:
        segment = next_segment(view, at, brackets, SEGMENT_BYTES)
        at, brackets = segment.end + 1, segment.after
        if segment.kept <= 1:
            rows = _rows.decode(segment.completed(bytes(view[segment.start : segment.end])))
            if segment.start:
                if len(segment.before) > 1:
                    lead = len(opened(segment.before)) - 1 + len(segment.lead)
                    found.append(view[begun : segment.start + len(rows[0]) - lead])
                del rows[0]
            if segment.after:
                if len(segment.after) > 1:
                    added = len(closed(segment.after[1:])) + len(_behind(segment.after))
                    begun = segment.end - (len(rows[-1]) - added)
                del rows[-1]
            found += map(memoryview, rows)
        done += 1 + (segment.kept <= 1 or segment.marks > SEGMENT_BYTES // 8) * SEGMENTS
        if done >= SEGMENTS:
            yield found
            found, done = [], 0
    yield found


def _behind(brackets: bytes) -> bytes:
    """Return what stands behind a segment in JSON that completes it, inside its brackets."""
    return b"" if not brackets else b",0" if brackets.endswith(b"[") else b',"":0'


def next_segment(data: Data, start: int, before: bytes, size: int) -> Segment:
    """Cut off a segment and check it.

    Raises:
        msgspec.DecodeError: If it is malformed.
    """
    end, text, bare = _cut(data, start, size)
    is_last = end == len(data)
    marks = left = bare.translate(None, _NO_BRACKETS)
    rounds = 0
    while b"[]" in left or b"{}" in left:
        left = left.replace(b"[]", b"").replace(b"{}", b"")
        rounds += 1
        if rounds > MAX_DEPTH:
            raise _too_deep()
    ends = _REST.fullmatch(left)
    closing, opening = ends.groups() if ends else (b"", left)
    kept = len(before) - len(closing)
    after = before[: max(kept, 0)] + opening
    is_sound = ends and kept >= 0 and closing == closed(before[kept:]) and bool(after) != is_last
    is_sound = is_sound and bool(before) == bool(start)
    segment = Segment(start, end, before, after if is_sound else b"[", kept, len(marks))
    try:
        _raw.decode(segment.completed(text))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _moved(error, segment) from None
    if not is_sound:
        raise msgspec.DecodeError(f"JSON is malformed: brackets that do not match (before byte {end})")
    if len(after) > MAX_DEPTH:
        raise _too_deep()
    return segment


def _cut(data: Data, start: int, size: int) -> tuple[int, bytes, bytes]:
    """Return where a segment ends, its text, and the same without texts in it."""
    while True:
        text = bytes(data[start : start + size])
        is_last = start + size >= len(data)
        if b'"' not in text:
            end = len(text) if is_last else text.rfind(b",")
            if end >= 0:
                return start + end, text[:end], text[:end]
        else:
            plain = text.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in text else text
            parts = plain.split(b'"')
            if is_last:
                return len(data), text, b"".join(parts[::2])
            at = len(text)
            for number in range(len(parts) - 1, -1, -1):
                at -= len(parts[number])
                comma = -1 if number % 2 else parts[number].rfind(b",")
                if comma >= 0:
                    bare = b"".join(parts[:number:2]) + parts[number][:comma]
                    return start + at + comma, text[: at + comma], bare
                at -= 1
        size *= 2


def _too_deep() -> TooDeep:
    return TooDeep(f"lists and objects of a long body may be nested {MAX_DEPTH} deep, and these are deeper")


def _base(segment: Segment, arrays: int) -> int:
    """Return the number of brackets up to so many arrays if all of a segment lies in them, else 0."""
    at = -1
    for _ in range(arrays):
        at = segment.before.find(b"[", at + 1)
        if at < 0:
            return 0
    return at + 1 if segment.kept > at else 0


def _moved(error: Exception, segment: Segment) -> msgspec.DecodeError:
    """Return an error of a completed segment with the place in the whole."""
    lead = len(opened(segment.before)) + len(segment.lead) if segment.start else 0
    return msgspec.DecodeError(_BYTE.sub(lambda at: f"(byte {segment.start + int(at[1]) - lead})", str(error)))
