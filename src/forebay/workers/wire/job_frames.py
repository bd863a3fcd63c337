# SPDX-License-Identifier: Apache-2.0
"""The original batching protocol's wire format: four bytes of length, then one msgpack map.

Sans-I/O: bytes in, payloads out. The worker dials in and speaks first, with `READY`; the front answers with a map of
job ids to bodies; the worker's map of job ids to results is its answer and asks for the next jobs at once. Results that
are errors are told apart by their ids under the key `error_ids`, all of them written one after the other in one string.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import msgspec

from forebay.errors import InvalidRequest, TooLarge
from forebay.types.element_limits import MAX_ELEMENTS
from forebay.workers.wire.frames import HEADER, FrameReader, require_few

READY: Final = b"\0\0\0\0"
"""A frame without a payload: the worker asks for jobs and has no answer to give."""

MAX_FRAME_BYTES: Final = 256 * 1024 * 1024
"""Longest payload that is read unless told otherwise."""

ERROR_IDS: Final = "error_ids"

_ID = 36
_BESIDE = 64
"""More than there is of a job beside its body."""
_LONGEST = (1 << 31) - 1
"""The original's workers read the length as a signed number."""


class JobFrameReader(FrameReader):
    """Cuts a stream of bytes into payloads; that of a `READY` is empty."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES, max_elements: int = MAX_ELEMENTS) -> None:
        super().__init__(max_bytes=min(max_bytes, _LONGEST))
        self._most = max_elements

    def _decode(self, frame: bytes | memoryview) -> bytes:
        require_few(frame, self._most)
        return bytes(frame)


def cut_jobs(jobs: dict[str, bytes]) -> list[dict[str, bytes]]:
    """Return the same jobs for as few frames as can say how long they are; one that is too long itself stands alone."""
    if sum(map(len, jobs.values())) + (len(jobs) + 1) * _BESIDE <= _LONGEST:
        return [jobs]
    cut: list[dict[str, bytes]] = []
    room = 0
    for job, body in jobs.items():
        needed = len(body) + _BESIDE
        if needed > room:
            cut.append({})
            room = _LONGEST - _BESIDE
        cut[-1][job] = body
        room -= needed
    return cut


def encode_jobs(jobs: Mapping[str, bytes]) -> bytes:
    """Return the frame that hands these bodies to a worker, in their order.

    Raises:
        TooLarge: If they are more bytes than the protocol's length can say.
    """
    return _frame(jobs)


def decode_jobs(payload: bytes) -> dict[str, bytes]:
    """Return the bodies by job id; raises an `InvalidRequest` if the payload is something else."""
    return {key: _bytes(value) for key, value in _map(payload).items()}


def encode_answer(results: Mapping[str, bytes | str], errors: Sequence[str] = ()) -> bytes:
    """Return the frame that answers jobs.

    Args:
        results: What each job's client gets, by job id.
        errors: Ids of those results that are errors.

    Raises:
        TooLarge: If they are more bytes than the protocol's length can say.
    """
    return _frame({**results, ERROR_IDS: "".join(errors)} if errors else results)


def decode_answer(payload: bytes) -> tuple[dict[str, bytes], list[str]]:
    """Return the results by job id, and the ids of those that are errors.

    Workers differ: results and `error_ids` may be text or bytes, a result may be nil (empty), and `error_ids` a list.
    The payload of a `READY` is an answer without results.

    Raises:
        InvalidRequest: If the payload is something else.
    """
    if not payload:
        return {}, []
    results = _map(payload)
    errors = _ids(results.pop(ERROR_IDS, b""))
    return {key: _bytes(value) for key, value in results.items()}, errors


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(dict[Any, Any])


def _frame(message: Mapping[str, bytes | str]) -> bytes:
    payload = _encoder.encode(message)
    if len(payload) > _LONGEST:
        raise TooLarge(f"{len(payload)} bytes were to be sent at once, a frame takes {_LONGEST}")
    return len(payload).to_bytes(HEADER, "big") + payload


def _map(payload: bytes) -> dict[str, Any]:
    try:
        found = _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError) as error:  # TypeError: a map as a key
        raise InvalidRequest(f"a frame is not a msgpack map of job ids to bytes: {error}") from error
    return {_text(key): value for key, value in found.items()}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return _bytes(value).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"a job id is not text: {error}") from error


def _bytes(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    if value is None:
        return b""
    raise InvalidRequest(f"a frame holds {type(value).__name__} where bytes or text are expected")


def _ids(value: Any) -> list[str]:
    if isinstance(value, list):
        return [_text(one) for one in cast("list[Any]", value)]
    text = _text(value)
    return [text[start : start + _ID] for start in range(0, len(text) - _ID + 1, _ID)]
