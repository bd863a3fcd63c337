# SPDX-License-Identifier: Apache-2.0
"""Writes results, of which some are an `Answer`: with its head over HTTP, elsewhere as its body or an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from forebay.serving.models.schema import FORMATS, WireType, in_one_line
from forebay.types.call import Failure, Media, media_of
from forebay.types.model_answer import Answer, checked_headers, checked_status, error_of

_ANYTHING: Final = WireType(Any, "output")


def write_result(result: Any, format: str, write: Callable[[Any, str], Any], *, is_alone: bool, is_raw: bool) -> Any:
    """Return a result as it is sent: what `write` makes of it, or a `Media` with the head of an `Answer`.

    Args:
        write: Writes what is not an `Answer`, and is held to the declared type.
        is_alone: Whether an HTTP answer has this result and no other.
        is_raw: Whether results are bytes.

    Raises:
        ValueError: The answer cannot have such a head.
        ForebayError: What the status tells of, where the protocol has errors of its own.
    """
    if type(result) is not Answer:
        return write(result, format)
    status, headers, body = checked_status(result.status), checked_headers(_pairs(result.headers)), result.body
    if not is_alone or format not in FORMATS:  # tensors, rows and the like have no head of their own
        if status >= 400:
            raise error_of(status, _freely(body, "json"))
        return write(body, format)
    is_free = status >= 300 and not isinstance(body, Media | bytes if is_raw else Media)
    written = _freely(body, format) if is_free else write(body, format)
    if isinstance(written, Failure):
        return written
    kind = "application/json" if is_raw and is_free else ""
    body, kind = (written.body, written.type) if isinstance(written, Media) else (written, kind)
    return media_of(body, (kind, status, headers))


def _pairs(headers: Any) -> list[tuple[Any, Any]]:
    if not isinstance(headers, Mapping):
        found = type(headers).__name__
        raise ValueError(f"the headers of an answer: expected a dict of texts by name, got `{found}`")  # noqa: TRY004
    return list(cast("Mapping[Any, Any]", headers).items())


def _freely(body: Any, format: str) -> bytes:
    """Write a body that is held to no type, as that of an error."""
    if isinstance(body, Media):
        return body.body
    written = _ANYTHING.encoder(format)(body)
    return in_one_line(written) if format == "json" else written
