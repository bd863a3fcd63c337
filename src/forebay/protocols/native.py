# SPDX-License-Identifier: Apache-2.0
"""forebay's own protocol over HTTP: formats, statuses, error bodies. Bytes to request and outcome to bytes; no I/O.

A sample or an array of samples is the whole body, in JSON or msgpack. What a format or a status is called stands here
once, for the fast lane and for Starlette alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Final

import msgspec

from forebay.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    ForebayError,
    InvalidRequest,
    ModelError,
    NotFound,
    NotPrepared,
    QueueFull,
    RequestError,
    TooLarge,
    UserCodeError,
    ValidationError,
)
from forebay.types.call import FIELDS
from forebay.types.failures import failure_of
from forebay.types.query import query_parameters

JSON_TYPE: Final = "application/json"
MSGPACK_TYPE: Final = "application/msgpack"
RAW_TYPE: Final = "application/octet-stream"
STREAM_TYPE: Final = "text/event-stream"
FORM_TYPE: Final = "multipart/form-data"

TOO_LARGE: Final = "too_large"
"""Code of a body over a limit."""

_FILES: Final = ("image/", "audio/", "video/", "application/pdf", RAW_TYPE)
"""Types of bodies that are somebody's file."""

_FORMATS: Final = {
    JSON_TYPE: "json",
    "text/json": "json",
    MSGPACK_TYPE: "msgpack",
    "application/x-msgpack": "msgpack",
    "application/vnd.msgpack": "msgpack",
}

_RANGES: Final = {
    "*/*": (0, ["json", "msgpack"]),
    "*": (0, ["json", "msgpack"]),  # as Java's own client has it
    "application/*": (1, ["json", "msgpack"]),
    "text/*": (1, ["json"]),
    STREAM_TYPE: (2, ["json"]),
}
"""Ranges of media types: how closely each names a format, and which."""

_STATUS: Final[list[tuple[type[ForebayError], int]]] = [
    (ValidationError, 422),
    (TooLarge, 413),
    (InvalidRequest, 400),
    (NotFound, 404),
    (NotPrepared, 412),
    (Cancelled, 499),
    (RequestError, 400),
    (QueueFull, 429),
    (DeadlineExceeded, 504),
    (CapacityError, 503),
    (ModelError, 503),
]


class Refusal(InvalidRequest):
    """An error that HTTP has a status for, and a code that says more than that of the core.

    Attributes:
        word: The code in the body.
    """

    status: ClassVar[int] = 400
    word: ClassVar[str] = str(InvalidRequest.code)

    def __init_subclass__(cls, *, status: int | None = None, word: str | None = None, **more: Any) -> None:
        """Take status and code from the class statement; what is left out is inherited."""
        super().__init_subclass__(**more)
        cls.status, cls.word = status or cls.status, word or cls.word


class UnsupportedMedia(Refusal, status=415, word="unsupported_media_type"):
    """The body's media type or its encoding is not one the endpoint reads."""


class NotAcceptable(Refusal, status=406, word="not_acceptable"):
    """The endpoint answers in none of the media types the client takes."""


PARAMS: Final[Mapping[tuple[str, str], Mapping[str, str]]] = {
    (given, wanted): {"in": given, "out": wanted}
    for given in ("json", "msgpack", "form", "query")
    for wanted in ("json", "msgpack")
}
"""The params of a request by the formats of its body and answer; shared, so that a batch of equals is seen at once."""


class Contract(msgspec.Struct, frozen=True):
    """What the front must know of an endpoint to move its bytes.

    Attributes:
        raw_input: The body is one sample of bytes, whatever its media type.
        raw_output: The answer is bytes.
        batchable: The body is an array of samples.
        streams: The answer comes in parts.
        query: Parameters of the query that belong to a request; they stand in its `params`, as texts.
        has_media: There are answers of other media types, so that a client may take these alone.
        is_named: A sample may also be the fields and files of a form, or the parameters of a query.
        shares_disk: Workers see the files of the server.
        has_context: The model asks for headers and the like.
        openai: Where it answers below `/v1` in OpenAI's protocol; empty if it does not speak it.
        call: The method of the model that is asked; empty is `predict`.
        verbs: The methods of HTTP that ask it.
        in_pieces: The model takes the body as it arrives, whatever its media type.
        fields: Those of a sample that the query of a POST may have; they stand in its `params`, as pairs of texts.
    """

    raw_input: bool = False
    raw_output: bool = False
    batchable: bool = False
    streams: bool = False
    query: tuple[str, ...] = ()
    has_media: bool = False
    is_named: bool = False
    shares_disk: bool = True
    has_context: bool = False
    openai: str = ""
    call: str = ""
    verbs: tuple[str, ...] = ("POST",)
    fields: tuple[str, ...] = ()
    in_pieces: bool = False


def status_of(error: ForebayError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Refusal):
        return error.status
    for kind, status in _STATUS:
        if isinstance(error, kind):
            return status
    return 500


def code_of(error: ForebayError) -> str:
    """Return the code of an error as its body tells it."""
    if isinstance(error, Refusal):
        return error.word
    return TOO_LARGE if isinstance(error, TooLarge) else str(error.code)


def error_body(error: ForebayError, request_id: str) -> bytes:
    """Return the JSON body of an error answer; what user code raised stays in the log, only its kind is told."""
    try:
        return _error_body(error, request_id)
    except Exception:  # noqa: BLE001 - texts that cannot be written: what a client sent may stand in them
        return _error_body(failure_of(error).error, request_id)


def message_of(error: ForebayError) -> str:
    """Return the message that clients are told of an error."""
    if isinstance(error, UserCodeError):
        return "the model failed; the server's log has the details under this request id"
    return error.message


def _error_body(error: ForebayError, request_id: str) -> bytes:
    body: dict[str, Any] = {"code": code_of(error), "message": message_of(error), "request_id": request_id}
    if error.detail is not None:
        body["detail"] = error.detail
    return msgspec.json.encode({"error": body}, enc_hook=str)


def params_of(contract: Contract, content_type: str, accept: str, *, in_query: bool = False) -> Mapping[str, str]:
    """Choose the formats of a request; its sample is the body, or the query.

    Raises:
        UnsupportedMedia: If the body's media type is not read here.
        NotAcceptable: If the client takes none of the formats there are.
    """
    given = "query" if in_query else "json"
    if content_type and not in_query and contract.is_named and is_form(content_type):
        given = "form"
    elif not contract.raw_input and content_type and not in_query:
        media = _media_of(content_type)
        is_in_json = media.startswith("application/") and media.endswith("+json")  # RFC 6839
        found = "json" if is_in_json else _FORMATS.get(media)
        if found is None:
            named = (JSON_TYPE, MSGPACK_TYPE, FORM_TYPE) if contract.is_named else (JSON_TYPE, MSGPACK_TYPE)
            raise unread_type(content_type, *named)
        given = found
    wanted = "json" if contract.raw_output or contract.streams else _wanted(accept)
    if not wanted:
        if not contract.has_media:
            raise NotAcceptable(f"Accept: expected {JSON_TYPE} or {MSGPACK_TYPE}, got '{accept[:100]}'")
        wanted = "json"
    return _params_of_call(contract.call, given, wanted) if contract.call else PARAMS[given, wanted]


@lru_cache(1024)
def _params_of_call(call: str, given: str, wanted: str) -> Mapping[str, str]:
    return {**PARAMS[given, wanted], "call": call}


def unread_type(content_type: str, *reads: str) -> UnsupportedMedia:
    """Return the error for a body of another media type than those that an endpoint reads."""
    media = _media_of(content_type)
    *others, last = reads
    shown = f"{', '.join(others)} or {last}" if others else last
    msg = f"Content-Type: expected {shown}, got '{media[:100]}'"
    if media == "application/x-www-form-urlencoded":
        msg += " (with curl, add -H 'content-type: application/json')"
    elif FORM_TYPE in reads and media.startswith(_FILES):
        msg += " (a file goes as a field of a form: with curl, -F FIELD=@FILE)"
    return UnsupportedMedia(msg)


def is_form(content_type: str) -> bool:
    """Tell whether a body is a form with files."""
    return _media_of(content_type) == FORM_TYPE


def _media_of(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def params_with_query(contract: Contract, params: Mapping[str, str], query: bytes) -> Mapping[str, Any]:
    """Add what the query says to the formats; what the contract does not name is left out.

    Raises:
        InvalidRequest: If it has too many parameters.
    """
    said = query_parameters(query, "latin-1")
    found: dict[str, Any] = {name: value for name, value in said if value and name in contract.query}
    if params["in"] != "query" and (fields := [pair for pair in said if pair[0] in contract.fields]):
        found[FIELDS] = fields
    return {**params, **found} if found else params


def _wanted(accept: str) -> str:
    """Return the format that the client likes best; empty if it takes none."""
    if not accept or accept == "*/*":
        return "json"
    liked: dict[str, tuple[int, float, int]] = {"json": (-1, 0.0, 0), "msgpack": (-1, 0.0, 0)}
    for place, choice in enumerate(accept.split(",")):
        media, *parameters = [part.strip().lower() for part in choice.split(";")]
        quality = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    quality = float(parameter[2:])
                except ValueError:
                    quality = 0.0
        # The range that names a format most closely says how well it is liked (RFC 9110, 12.5.1).
        closeness, formats = _RANGES.get(media) or (2, [_FORMATS[media]] if media in _FORMATS else [])
        for name in formats:
            liked[name] = max(liked[name], (closeness, quality, -place))
    best, (_, quality, _) = max(liked.items(), key=lambda one: (one[1][1], one[1][0], one[1][2]))
    return best if quality > 0 else ""


def content_type_of(contract: Contract, params: Mapping[str, str]) -> str:
    """Return the media type of an answer."""
    if contract.raw_output:
        return RAW_TYPE
    return MSGPACK_TYPE if params["out"] == "msgpack" else JSON_TYPE


def joined(rows: Sequence[bytes], params: Mapping[str, str]) -> bytes:
    """Write encoded results as one array."""
    if params["out"] == "json":
        return b"[" + b",".join(rows) + b"]"
    count = len(rows)
    if count < 16:
        header = bytes([0x90 | count])
    elif count < 1 << 16:
        header = b"\xdc" + count.to_bytes(2, "big")
    else:
        header = b"\xdd" + count.to_bytes(4, "big")
    return header + b"".join(rows)


def event(part: bytes) -> bytes:
    """Write one part of a streamed answer as a server-sent event."""
    return b"data: " + part + b"\n\n"


def cost_event(cost: bytes) -> bytes:
    """Write what a streamed answer has cost, as a server-sent event at its end."""
    return b"event: cost\ndata: " + cost + b"\n\n"


def error_event(body: bytes) -> bytes:
    """Write an error that ends a stream."""
    return b"event: error\ndata: " + body + b"\n\n"
