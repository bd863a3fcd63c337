# SPDX-License-Identifier: Apache-2.0
"""Long JSON, read in steps: cut at commas, and in long texts, into segments that msgspec checks one by one.

Theory of operation. A decoder reads 60 MB in one call of 40 ms, in which an event loop serves no one else. A segment
ends at a comma outside of texts, or inside of a text that is long. The brackets that are open there are known, since
those of a segment are counted; a text that is open counts as one. So each segment can be completed: the open brackets
before it, a value, the segment itself, a value, and the brackets that close the rest. All of JSON is well-formed if
and only if all of its completed segments are, and msgspec says so of each. Nothing is parsed here.

JSON that cannot be cut for `UNCUT_BYTES` is refused: it has thousands of brackets in one another, or more blanks or
longer numbers and names than anybody writes.

`elements` and `members` return what is in an array or an object unread. Whoever needs more calls them again with that.
What is short is decoded by them in one call, so whoever reads JSON need not ask how long it is.
"""

from __future__ import annotations

import io
import re
import secrets
from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec

from forebay.types.element_limits import Data, Steps

T = TypeVar("T")

LONG_BYTES: Final = 512 * 1024
"""Shorter JSON is decoded in one call, unless it has more than `MANY` elements."""
MANY: Final = 32_768
"""Elements of which all may be made, and then be counted."""
SEGMENT_BYTES: Final = 16 * 1024
UNCUT_BYTES: Final = 256 * 1024
"""What must have a place to be cut at."""
STEP_BYTES: Final = 256 * 1024
"""What is copied or looked through in one step."""
_ELEMENT_BYTES: Final = 64
"""What an element costs beside its length, as an object."""
_MARK_BYTES: Final = 16
"""What a bracket does."""
MAX_DEPTH: Final = 64
"""Brackets that may be open at the end of a segment."""

_PIECE_BYTES: Final = 256
"""What a piece costs beside its length, as a step of Python."""
_MARK: Final = secrets.token_hex(8).encode()
"""What nobody else can have written: it completes segments, and is told from what stands in them."""
_BEFORE: Final = b'"<%b"' % _MARK
_BEHIND: Final = b'">%b"' % _MARK
_LAST_TEXTS: Final = 4 * MAX_DEPTH
"""Texts, and what stands between them, of which one has a comma behind it: other than the names of open objects."""
_BRACKETS: Final = b"[]{}"
_NO_BRACKETS: Final = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_RUNS: Final = re.compile(rb"[\[{]++|[\]}]++")
_ROUNDS: Final = 4
"""How often the innermost brackets are left out before the others are looked at one by one."""
_LIST: Final = ord("[")
_TEXT: Final = b'"'
_CLOSED: Final = bytes.maketrans(b"[{", b"]}")
_BYTE: Final = re.compile(r"\(byte (\d+)\)")
_ESCAPE_BYTES: Final = 12
"""The longest escape, which is a pair of surrogates."""
_BEGUN: Final = re.compile(rb"(?:\\u[dD][89abAB][\s\S]{2})?(?:\\[\s\S]{0,4}|[\xc2-\xf4][\x80-\xbf]{0,2})?\Z")
"""The end of a text that may be the beginning of an escape, or of a character."""
_Decoder = msgspec.json.Decoder[list[msgspec.Raw]] | msgspec.json.Decoder[dict[str, msgspec.Raw]]
_raw: Final = msgspec.json.Decoder(msgspec.Raw)
_rows: Final = msgspec.json.Decoder(list[msgspec.Raw])
_text: Final = msgspec.json.Decoder(str)
_fields: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


class StepPace:
    """Says when to yield in work on many pieces: after each `STEP_BYTES` of them."""

    def __init__(self) -> None:
        self._done = 0

    def is_over(self, piece_bytes: int) -> bool:
        """Count a piece, and tell whether others have their turn."""
        self._done += piece_bytes + _PIECE_BYTES
        if self._done < STEP_BYTES:
            return False
        self._done = 0
        return True


class Segment(msgspec.Struct, frozen=True, gc=False):
    """A part of JSON from behind a comma to the next one, or to or from a place in a text.

    Attributes:
        before: The brackets that are open where it begins, the outermost first, and the quote of a text.
        after: Those that are open where it ends.
        kept: How many of these stay open all the time.
        marks: How many brackets are in it.
    """

    start: int
    end: int
    before: bytes
    after: bytes
    kept: int
    marks: int

    def completed(self, text: bytes) -> bytes:
        """Return JSON with this segment, whose text is given, inside its brackets."""
        return b"".join((self.first, text, self.last))

    @property
    def next(self) -> int:
        """Where the next one begins."""
        return self.end + (not self.after.endswith(_TEXT))

    @property
    def first(self) -> bytes:
        """What stands before the segment in JSON that completes it."""
        if not self.start:
            return b""
        inside = {b"[": b"0,", b"{": _BEFORE + b":0,"}
        return opened(self.before) + inside.get(self.before[-1:], b"")

    @property
    def last(self) -> bytes:
        """What stands behind it."""
        inside = {b"[": b"," + _BEHIND, b"{": b"," + _BEHIND + b":0", _TEXT: _BEHIND[1:-1]}
        return inside.get(self.after[-1:], b"") + closed(self.after)


def opened(brackets: bytes) -> bytes:
    """Return the beginning of JSON with these brackets, each but the last one with a value that is open."""
    return b"".join([b"[" if bracket == _LIST else b"{" + _BEFORE + b":" for bracket in brackets[:-1]]) + brackets[-1:]


def closed(brackets: bytes) -> bytes:
    """Return the end of what these brackets open."""
    return brackets[::-1].translate(_CLOSED)


def joined(parts: Iterable[Data]) -> Steps[bytes]:
    """Join what may be long, in steps."""
    parts = [*parts]
    if sum(map(len, parts)) <= STEP_BYTES:
        return b"".join(parts)
    whole, pace = io.BytesIO(), StepPace()
    for part in parts:
        piece = memoryview(part)
        for at in range(0, len(piece), STEP_BYTES):
            if pace.is_over(whole.write(piece[at : at + STEP_BYTES])):
                yield
    return whole.getvalue()


def elements(data: Data, limit: int) -> Steps[list[memoryview] | None]:
    """Return the elements of an array unread, or None if there are more than the limit.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is not an array.
    """
    whole = _if_short(data, _rows)
    if whole is not None:
        return [*map(memoryview, whole)] if len(whole) <= limit else None
    found: list[memoryview] = []
    for part in elements_in_parts(data):
        found += part
        if len(found) > limit:
            return None
        yield
    return found


def members(data: Data, limit: int) -> Steps[dict[str, memoryview] | None]:
    """Return the members of an object unread, by their names, or None if there are more than the limit.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is not an object.
    """
    whole = _if_short(data, _fields)
    if whole is not None:
        return {name: memoryview(value) for name, value in whole.items()} if len(whole) <= limit else None
    found: dict[str, memoryview] = {}
    for part in _in_parts(data, _fields):
        found.update(part)
        if len(found) > limit:
            return None
        yield
    return found


def elements_in_parts(data: Data) -> Iterator[list[memoryview]]:
    """Yield the elements of an array, those of a step together; a step may have none.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is not an array.
    """
    whole = _if_short(data, _rows)
    if whole is not None:
        yield [*map(memoryview, whole)]
        return
    for part in _in_parts(data, _rows):
        yield [value for _, value in part]


def text_in_parts(data: Data) -> Iterator[str]:
    """Yield the parts of a long text.

    Raises:
        msgspec.DecodeError: If it is malformed, msgspec.ValidationError if it is not text.
    """
    view = memoryview(data)
    at, brackets = 0, b""
    while at < len(view) or not at:
        is_long = len(view) > LONG_BYTES
        segment = next_segment(view, at, brackets, SEGMENT_BYTES) if is_long else Segment(0, len(view), b"", b"", 0, 0)
        text = bytes(view[segment.start : segment.end])
        try:
            yield _text.decode(_TEXT * (segment.start > 0) + text + _TEXT * (len(segment.after) > 0))
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from None
        at, brackets = segment.next, segment.after


def _in_parts(data: Data, decoder: _Decoder) -> Iterator[list[tuple[Any, memoryview]]]:
    """Yield names and values of what is in an array or an object, those of a step together."""
    view = memoryview(data)
    found: list[tuple[Any, memoryview]] = []
    at, brackets, done = 0, b"", 0
    name, begun = None, 0
    while at < len(view) or not at:
        segment = next_segment(view, at, brackets, SEGMENT_BYTES)
        if segment.kept <= 1:
            values = _read(decoder, segment, bytes(view[segment.start : segment.end]))
            if segment.start:
                first = values.pop(next(iter(values)))
                if len(segment.before) > 1:
                    outside = len(segment.first) - len(opened(segment.before[:1] + b" ")) + 1
                    found.append((name, view[begun : segment.start + len(first) - outside]))
            if segment.after:
                name = _cut_name(values, segment)
                begun = segment.end - (len(values.pop(name)) - len(segment.last) + 1)
            found += [(key, memoryview(value)) for key, value in values.items()]
            done += len(values) * _ELEMENT_BYTES
        done += segment.next - at + segment.marks * _MARK_BYTES
        at, brackets = segment.next, segment.after
        if done >= STEP_BYTES:
            yield found
            found, done = [], 0
    yield found


def _if_short(data: Data, decoder: msgspec.json.Decoder[T]) -> T | None:
    """Return what short JSON holds; None if it is long. Raises a `DecodeError` if it is malformed."""
    size = len(data)
    if size > LONG_BYTES or (size > 2 * MANY and bytes(data).count(b",") >= MANY):
        return None
    try:
        return decoder.decode(data)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None


def _read(decoder: _Decoder, segment: Segment, text: bytes) -> dict[Any, msgspec.Raw]:
    """Return what is in a completed segment by its names, or places."""
    try:
        values = decoder.decode(segment.completed(text))
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"the name of a member is not UTF-8: {error}") from None
    return values if isinstance(values, dict) else dict(enumerate(values))


def _cut_name(values: dict[Any, msgspec.Raw], segment: Segment) -> Any:
    """Return the name of the value that a segment ends in, or of what stands behind it."""
    if len(segment.after) > 1 and not segment.after.startswith(b"["):
        for name, value in reversed(values.items()):
            if bytes(memoryview(value)[-len(segment.last) :]).find(_MARK) >= 0:
                return name  # which may have been said before, so that it is not the last one
    return next(reversed(values))


def next_segment(data: Data, start: int, before: bytes, size: int) -> Segment:
    """Cut off a segment and check it; raises a `DecodeError` if it is malformed."""
    end, text, bare, is_in_text = cut(data, start, size, before)
    is_last = end == len(data)
    is_all_text = is_in_text and len(bare) == 0 and before.endswith(_TEXT)
    marks = bare.translate(None, _NO_BRACKETS)
    brackets = before.removesuffix(_TEXT)
    closes, opening = _open_in(marks, MAX_DEPTH - len(brackets))
    kept = len(brackets) - closes
    after = brackets[: max(kept, 0)] + opening + _TEXT * is_in_text
    is_sound = kept >= 0 and bool(after) != is_last and bool(before) == bool(start)
    kept += is_all_text
    segment = Segment(start, end, before, after if is_sound else b"[", kept, len(marks))
    try:
        _raw.decode(segment.completed(text))
    except (msgspec.DecodeError, RecursionError) as error:
        raise _moved(error, segment) from None
    if not is_sound:
        raise msgspec.DecodeError(f"JSON is malformed: brackets that do not match (before byte {end})")
    return segment


def _open_in(marks: bytes, depth: int) -> tuple[int, bytes]:
    """Return how many brackets are closed that others have opened, and those that stay open; the decoder matches them.

    Raises:
        msgspec.DecodeError: If more are open than the depth, and those that were closed.
    """
    for _ in range(_ROUNDS):  # which leave few runs
        marks = marks.replace(b"[]", b"").replace(b"{}", b"")
    closes, opening = 0, bytearray()
    for run in _RUNS.finditer(marks):
        brackets = run[0]
        if brackets[:1] in {b"[", b"{"}:
            opening += brackets
            if len(opening) > depth + closes:
                raise _too_deep()
        else:
            left = len(opening) - len(brackets)
            closes -= min(left, 0)
            del opening[max(left, 0) :]
    return closes, bytes(opening)


def cut(data: Data, start: int, size: int, before: bytes) -> tuple[int, bytes, bytes, bool]:
    """Return where a segment ends, its text, the same without texts in it, and whether it ends in a text.

    Args:
        data: What it is cut off; it is not checked.
        start: Where it begins.
        size: Its length, unless there is no place to cut at.
        before: What is open there; see `Segment`.

    Raises:
        msgspec.DecodeError: If there is none for `UNCUT_BYTES`.
    """
    is_in_text = before.endswith(_TEXT)
    while True:
        text = bytes(data[start : start + size])
        is_last = start + size >= len(data)
        plain = text.replace(rb"\\", b"__").replace(rb"\"", b"__") if b"\\" in text else text
        parts = [b""] * is_in_text + plain.split(_TEXT)
        bare = parts[0] if len(parts) == 1 else b"".join(parts[::2])
        if is_last:
            return len(data), text, bare, False
        if b"," in bare:
            at = len(text)
            for number in range(len(parts) - 1, max(len(parts) - _LAST_TEXTS, 0) - 1, -1):
                at -= len(parts[number])
                comma = -1 if number % 2 else parts[number].rfind(b",")
                if comma >= 0:
                    bare = b"".join(parts[:number:2]) + parts[number][:comma]
                    return start + at + comma, text[: at + comma], bare, False
                at -= 1
        elif len(parts) % 2 == 0 and _is_value(bare, before, len(parts)):
            begun = _BEGUN.search(parts[-1], max(len(parts[-1]) - _ESCAPE_BYTES, 0))
            end = len(text) - len(begun[0]) if begun else 0
            if end:
                return start + end, text[:end], bare, True
        if size >= UNCUT_BYTES or len(parts) > _LAST_TEXTS:
            raise _not_cut(Segment(start, start + size, before, b"", 0, 0), text, bare)
        size *= 2


def _is_value(bare: bytes, before: bytes, parts: int) -> bool:
    """Tell whether the text in which a segment ends is one that began before it, or a value: names are not cut."""
    if before.endswith(_TEXT):
        return parts == 2
    return (bare.rstrip()[-1:] or before[-1:]) in {b":", b"[", b""}


def _not_cut(segment: Segment, text: bytes, bare: bytes) -> msgspec.DecodeError:
    """Return the error of what has no place to be cut at."""
    if bare.count(b"[") + bare.count(b"{") > MAX_DEPTH:
        return _too_deep()
    try:
        _raw.decode(segment.completed(text))
    except (msgspec.DecodeError, RecursionError) as error:
        if "truncated" not in str(error):
            return _moved(error, segment)
    return msgspec.DecodeError(f"a long body has {len(text)} bytes behind byte {segment.start} without a comma")


def _too_deep() -> msgspec.DecodeError:
    why = f"lists and objects of a long body may be nested {MAX_DEPTH} deep, and these are deeper"
    return msgspec.DecodeError(why)


def _moved(error: Exception, segment: Segment) -> msgspec.DecodeError:
    """Return an error of a completed segment with the place in the whole."""
    lead = segment.start - len(segment.first)
    return msgspec.DecodeError(_BYTE.sub(lambda at: f"(byte {lead + int(at[1])})", str(error)))
