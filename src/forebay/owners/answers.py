# SPDX-License-Identifier: Apache-2.0
"""What has become known in a turn of an owner's loop, as frames: one, or as many as keep each of them short."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from forebay.errors import TooLarge
from forebay.owners.apart import FOLLOWING_BYTES, FRAME_BYTES, HEAD_BYTES, Laying, set_apart
from forebay.owners.wire import EndedSeat, ModelAnswers, bytes_of
from forebay.workers import frames

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class DeskNotes(Protocol):
    """What is new about the requests of one front to one model; see `ModelAnswers`.

    Attributes:
        parts: Seats of streamed answers, and their parts.
        results: Those of `ended`.
    """

    heard: int
    parts: list[tuple[int, list[Any]]]
    ended: list[EndedSeat]
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

    def add(self, number: int, noted: DeskNotes, room: int) -> None:
        """Add what is new of a model; frames that are long enough are sent."""
        model = self._begin(number, noted.heard, room)
        for seat, parts in noted.parts:
            for part in parts:
                model = self._result(model, part)
                if model.parts and model.parts[-1][0] == seat:
                    model.parts[-1] = seat, model.parts[-1][1] + 1
                else:
                    model.parts.append((seat, 1))
        for ended, result in zip(noted.ended, noted.results, strict=True):
            if type(result) is not bytes or len(result) > frames.LONG_BYTES:
                ended, result = _sendable(ended, result)  # noqa: PLW2901
            model = self._result(model, result, _size(ended))
            model.ended.append(ended)
        for seat in noted.returned:
            model = self._room(model, HEAD_BYTES)
            model.returned.append(seat)

    def send(self) -> None:
        """Send what is left."""
        if self._models:
            self._write(frames.encode(("answers", self._models, self._results)), *self._following)
        self._models, self._results, self._following = [], [], []
        self._size = self._following_bytes = 0

    def _begin(self, number: int, heard: int, room: int) -> ModelAnswers:
        model = ModelAnswers(number, heard, room, [], [], [])
        self._models.append(model)
        self._size += HEAD_BYTES
        return model

    def _room(self, model: ModelAnswers, size: int) -> ModelAnswers:
        """Make room for some bytes more in the frame; returns what they are added to."""
        if self._size + size > FRAME_BYTES or self._following_bytes >= FOLLOWING_BYTES:
            self.send()
            model = self._begin(model.model, model.heard, model.room)
        self._size += size
        return model

    def _result(self, model: ModelAnswers, result: Any, size: int = 0) -> ModelAnswers:
        if type(result) is bytes and len(result) < frames.LONG_BYTES:
            pieces: Sequence[Any] = ()
            size += len(result)
        else:
            whole = bytes_of(result)
            result, pieces = set_apart(result, self._place)
            size += min(whole, frames.LONG_BYTES)
        model = self._room(model, size + HEAD_BYTES)
        self._results.append(result)
        if pieces:
            self._following += pieces
            self._following_bytes += sum(map(len, pieces))
        return model


def _sendable(ended: EndedSeat, result: Any) -> tuple[EndedSeat, Any]:
    """Return an end and its result; a failure where the front would not read that."""
    size = bytes_of(result)
    if size <= frames.MAX_FRAME_BYTES:
        return ended, result
    error = TooLarge(f"the answer has {size} bytes, at most {frames.MAX_FRAME_BYTES} can be sent to a front")
    return EndedSeat(ended.seat, None, (error.kind, error.message, None)), None


def _size(ended: EndedSeat) -> int:
    """Return about how long the words of an end are."""
    if ended.failure is None:
        return 0
    _, message, detail = ended.failure
    return 4 * len(message) + (0 if detail is None else len(msgspec.msgpack.encode(detail)))
