# SPDX-License-Identifier: Apache-2.0
"""Requests and responses as the JSON of the REST gateway: names as in the protocol, every field in every answer."""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from google.protobuf import json_format

from forebay.errors import Code, ForebayError, InvalidRequest
from forebay.protocols.pipeline.messages import Request, Response

CODES: Final[dict[Code, tuple[int, int]]] = {
    Code.INVALID_ARGUMENT: (3, 400),
    Code.NOT_FOUND: (5, 404),
    Code.RESOURCE_EXHAUSTED: (8, 429),
    Code.DEADLINE_EXCEEDED: (4, 504),
    Code.UNAVAILABLE: (14, 503),
    Code.CANCELLED: (1, 499),
    Code.INTERNAL: (13, 500),
}
"""The number of a transport's fault and the HTTP status it is told with."""

_INT64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Usual(msgspec.Struct):
    """A request as nearly all are: without tensors."""

    key: list[str] = []
    value: list[str] = []
    name: str = ""
    method: str = ""
    logid: _INT64 = 0
    clientip: str = ""
    tensors: tuple[()] = ()


_usual: Final = msgspec.json.Decoder(_Usual, strict=False)


def request_of(body: bytes, kind: Any = Request) -> Any:
    """Read a request; an empty body is an empty request, and unknown fields are skipped.

    Raises:
        InvalidRequest: If it is no such JSON.
    """
    first = body.lstrip()[:1]
    if not first:
        return kind()
    if first != b"{":
        msg = f"the body is no {kind.DESCRIPTOR.name} in JSON: it is no object"
        raise InvalidRequest(msg)
    if kind is Request:
        try:
            usual = _usual.decode(body)
            return Request(
                key=usual.key,
                value=usual.value,
                name=usual.name,
                method=usual.method,
                logid=usual.logid,
                clientip=usual.clientip,
            )
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            pass  # it has tensors or null, or is wrong: the slower reader knows, and says what is wrong
    try:
        return json_format.Parse(body, kind(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeError, RecursionError, ValueError) as error:
        msg = f"the body is no {kind.DESCRIPTOR.name} in JSON: {str(error)[:300]}"
        raise InvalidRequest(msg) from error


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
