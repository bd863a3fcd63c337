# SPDX-License-Identifier: Apache-2.0
"""Requests and responses as the JSON of the REST gateway: names as in the protocol, every field in every answer."""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec
from google.protobuf import json_format

from forebay.errors import Code, ForebayError, InvalidRequest
from forebay.surfaces.pipeline.protocol.messages import Request, Response
from forebay.surfaces.pipeline.protocol.tensors import MAX_TENSORS
from forebay.types.first_use import known

CODES: Final[dict[Code, tuple[int, int]]] = {
    Code.INVALID_ARGUMENT: (3, 400),
    Code.NOT_FOUND: (5, 404),
    Code.FAILED_PRECONDITION: (9, 412),
    Code.RESOURCE_EXHAUSTED: (8, 429),
    Code.DEADLINE_EXCEEDED: (4, 504),
    Code.UNAVAILABLE: (14, 503),
    Code.CANCELLED: (1, 499),
    Code.INTERNAL: (13, 500),
}
"""The number of a transport's fault and the HTTP status it is told with."""

_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


SMALL_BYTES: Final = 64 * 1024
"""Longer bodies are read beside the loop."""
SMALL_ODD_BYTES: Final = 4 * 1024
"""Those with tensors, or of a message of the user's own, take much longer."""
MAX_TEXTS: Final = 100_000
"""Keys, and values, of a request."""


class _Usual(msgspec.Struct):
    """A request as nearly all are: without tensors."""

    key: list[str | None] = []
    value: list[str | None] = []
    name: str = ""
    method: str = ""
    logid: _INT64 = 0
    clientip: str = ""
    tensors: tuple[()] = ()


class _Parts(msgspec.Struct):
    """The parts of a request of which there may be many, not read yet."""

    key: msgspec.Raw = msgspec.Raw()
    value: msgspec.Raw = msgspec.Raw()
    tensors: msgspec.Raw = msgspec.Raw()


_usual: Final = msgspec.json.Decoder(known(_Usual), strict=False)
_parts: Final = msgspec.json.Decoder(known(_Parts))
_raws: Final = msgspec.json.Decoder(list[msgspec.Raw])


def is_quick(body: bytes, kind: Any = Request) -> bool:
    """Tell whether reading a body takes a moment only."""
    size = len(body)
    return size <= SMALL_ODD_BYTES or (size <= SMALL_BYTES and kind is Request and b'"tensors"' not in body)


def request_of(body: bytes, kind: Any = Request) -> Any:
    """Read a request; an empty body or `null` is an empty request, and unknown fields are skipped.

    Raises:
        InvalidRequest: If it is no such JSON, or has too many values.
    """
    first = body.lstrip()[:1]
    if not first:
        return kind()
    if body.strip() == b"null":
        return kind()
    if first != b"{":
        raise InvalidRequest(f"body: expected a {kind.DESCRIPTOR.name} as a JSON object")
    if kind is Request:
        if len(body) > SMALL_BYTES:
            _count(body)
        try:
            usual = _usual.decode(body)
            return Request(
                key=_texts(usual.key),
                value=_texts(usual.value),
                name=usual.name,
                method=usual.method,
                logid=usual.logid,
                clientip=usual.clientip,
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            _count(body)  # it has tensors or null, or is wrong: the slower reader knows, and says what is wrong
    try:
        return json_format.Parse(body, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeError, RecursionError, ValueError) as error:
        raise InvalidRequest(f"body: expected a {kind.DESCRIPTOR.name} in JSON: {str(error)[:300]}") from error


def _texts(found: list[str | None]) -> list[str]:
    """Return texts; the gateway takes `null` for an empty one."""
    return [text or "" for text in found] if None in found else cast("list[str]", found)


def _count(body: bytes) -> None:
    """Count the parts of which there may be many, before anything is made of them.

    Raises:
        InvalidRequest: If it is too many.
    """
    try:
        parts = _parts.decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return  # whoever reads it says what is wrong
    if max(_texts_in(bytes(parts.key)), _texts_in(bytes(parts.value))) > MAX_TEXTS:
        raise InvalidRequest(f"the request has too many keys or values; at most {MAX_TEXTS} are read")
    tensors = bytes(parts.tensors)
    # Every tensor has a brace; so may texts, but where there are very many braces nobody looks whose they are.
    braces = tensors.count(b"{")
    if braces > MAX_TENSORS and (braces > MAX_TEXTS or len(_raws.decode(tensors)) > MAX_TENSORS):
        raise InvalidRequest(f"the request has too many tensors; at most {MAX_TENSORS} are read")


def _texts_in(data: bytes) -> int:
    """Return how many texts there are at most in a list in JSON."""
    quotes = data.count(b'"')
    if quotes > 2 * MAX_TEXTS:  # some may stand in texts
        data = data.replace(b"\\\\", b"")
        quotes = data.count(b'"') - data.count(b'\\"')
    return quotes // 2


def response_json(response: Any) -> bytes:
    """Write a response."""
    if type(response) is Response and not response.tensors:
        return msgspec.json.encode(
            {
                "err_no": response.err_no,
                "err_msg": response.err_msg,
                "key": list(response.key),
                "value": list(response.value),
                "tensors": (),
            }
        )
    return json_format.MessageToJson(
        response, preserving_proto_field_name=True, always_print_fields_with_no_presence=True, indent=None
    ).encode()


def fault_json(code: int, message: str) -> bytes:
    """Write a fault of the transport."""
    return msgspec.json.encode({"error": message, "code": code, "message": message, "details": ()})


def fault_of(error: ForebayError) -> tuple[int, bytes]:
    """Return HTTP status and body of a fault."""
    code, status = CODES[error.code]
    return status, fault_json(code, error.message)
