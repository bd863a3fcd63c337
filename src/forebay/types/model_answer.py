# SPDX-License-Identifier: Apache-2.0
"""What a model decides about its own HTTP answer: the status and headers around a result."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import msgspec

import forebay.errors as errors  # noqa: PLR0402 - a module does not import from the package that names all

MAX_HEADERS: Final = 32
"""Headers that a model may set on one answer."""
MAX_HEADER_BYTES: Final = 8 * 1024
"""Bytes of their names and values together."""
MAX_TEXT: Final = 8 * 1024
"""Characters of a body that become the message of an error."""

Headers: TypeAlias = tuple[tuple[str, str], ...]

_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_VALUE: Final = re.compile(r"(?:[!-~](?:[\t -~]*[!-~])?)?")
_RESERVED: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "server"}
    | {"content-length", "content-encoding", "date", "x-request-id", "forebay-cost", "ratelimit", "ratelimit-policy"}
    | {"content-type"}
)
"""Headers of the connection, and those that the server sets on each answer."""
_ERRORS: Final[Mapping[int, type[errors.ForebayError]]] = {
    400: errors.InvalidRequest,
    404: errors.NotFound,
    409: errors.NotPrepared,
    412: errors.NotPrepared,
    413: errors.TooLarge,
    422: errors.ValidationError,
    429: errors.QueueFull,
    503: errors.Unavailable,
    504: errors.DeadlineExceeded,
}


@final
class Answer:
    """A result with the status and headers of its HTTP answer; `predict` returns it in place of a result.

        return [forebay.Answer({"error": "no such user"}, 404, {"cache-control": "max-age=60"})]

    A stream may have one as its first part. A protocol with errors of its own answers with one where the status is 400
    or more, and has no place for headers.
    """

    __slots__ = ("body", "headers", "status")

    def __init__(self, body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Put a result and its head together; a wrong status or header fails this request alone.

        Args:
            body: The result, which may be a `Media`. It is held to the declared type if the status is 2xx.
            status: 200 to 599, but for 204, 205 and 304, which have no body.
            headers: Texts in printable ASCII, by name. The server sets those of the connection and `content-type`.
        """
        self.body: Any = body
        self.status: int = status
        self.headers: Mapping[str, str] = {} if headers is None else headers


def checked_status(status: Any) -> int:
    """Return a status that an answer can have; raises a `ValueError` that says why it cannot."""
    if not isinstance(status, int) or not 200 <= status <= 599 or status in {204, 205, 304}:  # true is 1
        allowed = "200 to 599, without 204, 205 and 304, which have no body"
        raise ValueError(f"the status of an answer: expected a whole number of {allowed}, got {status!r:.100}")
    return int(status)


def checked_headers(pairs: Sequence[tuple[Any, Any]]) -> Headers:
    """Return headers that an answer can have; raises a `ValueError` that says why it cannot."""
    size = 0
    for name, value in pairs[:MAX_HEADERS]:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"the headers of an answer: {name!r:.100} cannot be a name; use letters, digits and '-'")
        if name.lower() in _RESERVED:
            msg = f"'{name}' is set by the server; leave it out (a body of forebay.Media has a type of its own)"
            raise ValueError(f"the headers of an answer: {msg}")
        if not isinstance(value, str) or not _VALUE.fullmatch(value):
            msg = f"'{name}' has the value {value!r:.100}; expected a text of printable ASCII without spaces around it"
            raise ValueError(f"the headers of an answer: {msg}")
        size += len(name) + len(value)
    if len(pairs) > MAX_HEADERS or size > MAX_HEADER_BYTES:
        most = f"at most {MAX_HEADERS} with {MAX_HEADER_BYTES} bytes"
        raise ValueError(f"the headers of an answer: expected {most}, got {len(pairs)} with {size} bytes or more")
    return tuple((_exact(name), _exact(value)) for name, value in pairs)


def _exact(text: str) -> str:
    """Return a text of no class of its own, such as `numpy.str_`, which no frame between processes could hold."""
    return str.__str__(text)


def error_of(status: int, body: bytes) -> errors.ForebayError:
    """Return the error that a protocol with errors of its own tells of an answer of this status and JSON."""
    try:
        told = msgspec.json.decode(body)
        text = told if isinstance(told, str) else body.decode()
    except ValueError:
        text = ""
    other = errors.RequestError if status < 500 else errors.RunnerFailed
    return _ERRORS.get(status, other)(text[:MAX_TEXT] or f"the model answered with the status {status}")
