# SPDX-License-Identifier: Apache-2.0
"""What has become known in a turn of an owner's loop, as frames: one, or as many as keep each of them short."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from forebay.errors import TooLarge
from forebay.owners.detached_bodies import (
    FOLLOWING_BYTES,
    FRAME_BYTES,
    HEAD_BYTES,
    VALUE_BYTES,
    Laying,
    set_apart,
    weight,
)
from forebay.owners.wire import EndedSeat, ModelAnswers, bytes_of
from forebay.workers.wire import frames


class DeskNotes(Protocol):
    """What is new about the requests of one front to one model; see `ModelAnswers`.

    Attributes:
        parts: Seats of streamed answers, and their parts.
        results: Those of `ended`.
    """

    heard: int
    parts: list[tuple[int, list[Any]]]
    ended: list[int | EndedSeat]
    results: list[Any]
    returned: list[int]


class Answers:
    """Frames in the making."""

    def __init__(self, write: Callable[..., object], place: Laying) -> None:
        """Begin with none.

        Args:
            write: Sends the pieces of a frame, and what follows it.
            place: Puts long results where the front sees them.
        """
        self._write = write
        self._place = place
        self._models: list[ModelAnswers] = []
        self._results: list[Any] = []
        self._following: list[Any] = []
        self._size = self._following_bytes = 0

    def add(self, number: int, noted: DeskNotes, room: int, row_s: float) -> None:
        """Add what is new of a model; frames that are long enough are sent."""
        model = self._begin(number, noted.heard, room, row_s)
        for seat, parts in noted.parts:
            for part in parts:
                model = self._result(model, part)
                if model.parts and model.parts[-1][0] == seat:
                    model.parts[-1] = seat, model.parts[-1][1] + 1
                else:
                    model.parts.append((seat, 1))
        if self._has_room_for(noted.ended, noted.results):
            model.ended.extend(noted.ended)
            self._results += noted.results
        else:
            model = self._add_each(model, noted)
        for seat in noted.returned:
            model = self._room(model, HEAD_BYTES)
            model.returned.append(seat)

    def _has_room_for(self, ended: list[int | EndedSeat], results: list[Any]) -> bool:
        """Make room for results if they are bytes that stand in this frame, as most do; tells whether they are."""
        if {*map(type, results)} != {bytes} or {*map(type, ended)} != {int}:
            return False
        lengths = [*map(len, results)]
        size = sum(lengths) + len(lengths) * HEAD_BYTES
        is_long = max(lengths) >= frames.LONG_BYTES or self._following_bytes >= FOLLOWING_BYTES
        if is_long or self._size + size > FRAME_BYTES:
            return False
        self._size += size
        return True

    def _add_each(self, model: ModelAnswers, noted: DeskNotes) -> ModelAnswers:
        for ended, result in zip(noted.ended, noted.results, strict=True):
            if type(result) is not bytes or len(result) > frames.LONG_BYTES:
                ended, result = _sendable(ended, result)  # noqa: PLW2901
            model = self._result(model, result, _size(ended) if isinstance(ended, EndedSeat) else 0)
            model.ended.append(ended)
        return model

    def send(self) -> None:
        """Send what is left."""
        if self._models:
            self._write(frames.encode(("answers", self._models, self._results)), *self._following)
        self._models, self._results, self._following = [], [], []
        self._size = self._following_bytes = 0

    def _begin(self, number: int, heard: int, room: int, row_s: float) -> ModelAnswers:
        model = ModelAnswers(number, heard, room, [], [], [], row_s)
        self._models.append(model)
        self._size += HEAD_BYTES
        return model

    def _room(self, model: ModelAnswers, size: int) -> ModelAnswers:
        """Make room for some bytes more in the frame; returns what they are added to."""
        if self._size + size > FRAME_BYTES or self._following_bytes >= FOLLOWING_BYTES:
            self.send()
            model = self._begin(model.model, model.heard, model.room, model.row_s)
        self._size += size
        return model

    def _result(self, model: ModelAnswers, result: Any, size: int = 0) -> ModelAnswers:
        if type(result) is bytes and len(result) < frames.LONG_BYTES:
            pieces: Sequence[Any] = ()
            size += len(result)
        else:
            result, pieces = set_apart(result, self._place)
            size += weight(result)
        model = self._room(model, size + HEAD_BYTES)
        self._results.append(result)
        if pieces:
            self._following += pieces
            self._following_bytes += sum(map(len, pieces))
        return model


def _sendable(ended: int | EndedSeat, result: Any) -> tuple[int | EndedSeat, Any]:
    """Return an end and its result; a failure where the front would not read that."""
    size = bytes_of(result)
    if size <= frames.MAX_FRAME_BYTES:
        return ended, result
    error = TooLarge(f"the answer has {size} bytes, at most {frames.MAX_FRAME_BYTES} can be sent to a front")
    seat = ended.seat if isinstance(ended, EndedSeat) else ended
    return EndedSeat(seat, None, (error.kind, error.message, None)), None


def _size(ended: EndedSeat) -> int:
    """Return about how long the words of an end are."""
    if ended.failure is None:
        return 0
    _, message, detail = ended.failure
    return 4 * len(message) + (0 if detail is None else VALUE_BYTES * len(msgspec.msgpack.encode(detail)))
