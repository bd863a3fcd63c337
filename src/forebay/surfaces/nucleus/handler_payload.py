# SPDX-License-Identifier: Apache-2.0
"""From a request's body to a handler's `payload`, by Content-Type."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl

import msgspec
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from forebay.types.element_limits import ElementLimits, Steps, too_many
from forebay.types.json_elements import json_elements

if TYPE_CHECKING:
    from forebay.workers.user_calls.coroutines import Coroutines

MAX_CHECKED_BYTES: Final = 1 << 20
"""Bodies up to this size are checked before they may join a batch; longer ones would hold up the event loop."""
MAX_READ_BYTES: Final = 1 << 16
"""Bodies up to this size are read for that where only `json` reads them, such as NaN."""

MAX_PARTS: Final = 10_000
"""Files of a form, and as many fields: each takes the parser 15 microseconds."""
_FORM_PIECE_BYTES: Final = 1 << 20
_NO_LIMIT: Final = sys.maxsize


class BadPayload(Exception):
    """The body is not what its Content-Type says: status 400.

    Attributes:
        message: What the decoder said.
        as_json: Whether the client is told in JSON rather than in text.
    """

    def __init__(self, message: str, *, as_json: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.as_json = as_json


def parse(headers: Headers, body: bytes, coroutines: Coroutines) -> Any:
    """Return the payload; raises BadPayload if the body cannot be decoded."""
    content_type = headers.get("content-type", "")
    kind = content_type.lower()
    if kind.startswith("application/json"):
        return _json(body)
    if kind.startswith("multipart/form"):
        return coroutines.run(_form(headers, body))
    if kind.startswith("application/x-www-form-urlencoded"):
        fields: list[tuple[str, str | UploadFile]] = [*parse_qsl(body.decode("latin-1"), keep_blank_values=True)]
        return FormData(fields)
    if kind.startswith("text/plain"):
        return _text(content_type, body)
    return body


def counting(content_type: str, body: bytes, limits: ElementLimits) -> Steps[None]:
    """Count the elements of a body before a worker makes objects of them; raises TooLarge if there are too many."""
    kind = content_type.lower()
    if len(body) <= min(limits.tensors, limits.elsewhere):
        return
    if kind.startswith("application/json"):
        yield from json_elements(body, limits.tensors, limits.elsewhere)
    elif kind.startswith("application/x-www-form-urlencoded"):
        fields = 1
        for at in range(0, len(body), _FORM_PIECE_BYTES):
            fields += body.count(b"&", at, at + _FORM_PIECE_BYTES)
            yield
        if fields > limits.elsewhere:
            raise too_many("the form", "fields", limits.elsewhere)


def check(content_type: str, body: bytes) -> None:
    """Check whether a body can be decoded, without keeping anything; what would be expensive to check passes.

    Raises:
        BadPayload: If it cannot.
    """
    if len(body) > MAX_CHECKED_BYTES:
        return
    kind = content_type.lower()
    if kind.startswith("application/json"):
        try:
            _skim.decode(body)
        except (msgspec.DecodeError, RecursionError):  # also what only `json` reads, such as NaN
            if len(body) <= MAX_READ_BYTES:
                _json(body)
    elif kind.startswith("text/plain"):
        _text(content_type, body)
    elif kind.startswith("multipart/form") and "boundary=" not in kind:
        raise BadPayload(_NO_BOUNDARY)


_skim: Final = msgspec.json.Decoder(msgspec.Raw)
_NO_BOUNDARY: Final = "the multipart Content-Type names no boundary"
_BREAKS_OFF: Final = "the multipart body breaks off before its last boundary"


class _Parts(MultiPartParser):
    """A parser that knows whether the body came to its end."""

    has_ended = False

    def on_end(self) -> None:
        """Note that the last boundary was read."""
        self.has_ended = True
        super().on_end()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadPayload(str(error), as_json=True) from None


def _text(content_type: str, body: bytes) -> str:
    charset = "utf-8"
    for parameter in content_type.split(";")[1:]:
        name, equals, value = parameter.partition("=")
        if equals and name.strip().lower() == "charset":
            charset = value.strip().strip("\"'")
    try:
        return body.decode(charset)
    except (ValueError, LookupError) as error:  # ValueError: bytes that do not fit, or a name no codec can have
        raise BadPayload(str(error)) from None


async def _form(headers: Headers, body: bytes) -> FormData:
    try:
        if "boundary=" not in headers.get("content-type", "").lower():
            raise BadPayload(_NO_BOUNDARY)
        parser = _Parts(headers, _pieces(body), max_files=MAX_PARTS, max_fields=MAX_PARTS, max_part_size=_NO_LIMIT)
        form = await parser.parse()
        if not parser.has_ended:
            await form.close()
            raise BadPayload(_BREAKS_OFF)
        return form
    except MultiPartException as error:
        raise BadPayload(error.message) from None
    except ValueError as error:  # python-multipart's own errors are ValueErrors
        raise BadPayload(str(error)) from None


async def _pieces(body: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(body), _FORM_PIECE_BYTES):
        yield body[start : start + _FORM_PIECE_BYTES]
