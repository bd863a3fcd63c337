# SPDX-License-Identifier: Apache-2.0
"""Errors as OpenAI's clients read them: a status, and a body with message, type, param and code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, cast

import msgspec

from forebay.errors import (
    CapacityError,
    DeadlineExceeded,
    ForebayError,
    ModelError,
    NotFound,
    QueueFull,
    RequestError,
    ValidationError,
)
from forebay.protocols import native
from forebay.types.failures import failure_of

_KINDS: Final[list[tuple[type[ForebayError], str, str | None]]] = [
    (ValidationError, "invalid_request_error", "invalid_value"),
    (NotFound, "invalid_request_error", "model_not_found"),
    (RequestError, "invalid_request_error", None),
    (QueueFull, "rate_limit_error", "rate_limit_exceeded"),
    (DeadlineExceeded, "server_error", "timeout"),
    (CapacityError, "server_error", "unavailable"),
    (ModelError, "server_error", "unavailable"),
]
"""Type and code of each; None leaves the code to forebay's own word."""

_UNAUTHENTICATED: Final = 401
_INVALID: Final = 422
_FIELD: Final = re.compile(r"contains unknown field `([^`]{1,100})`")


def status_of(error: ForebayError) -> int:
    """Return the HTTP status of an error; what does not fit its type is a bad request here."""
    status = native.status_of(error)
    return 400 if status == _INVALID else status


def body_of(
    error: ForebayError, request_id: str = "", write: Callable[[ForebayError, str], bytes] | None = None
) -> bytes:
    """Return the JSON body of an error; what user code raised stays in the log."""
    write = write or _body_of
    try:
        return write(error, request_id)
    except Exception:  # noqa: BLE001 - texts that cannot be written: what a client sent may stand in them
        return write(failure_of(error).error, request_id)


def _body_of(error: ForebayError, _request_id: str) -> bytes:
    kind, code = next(((kind, code) for base, kind, code in _KINDS if isinstance(error, base)), ("server_error", None))
    if native.status_of(error) == _UNAUTHENTICATED:
        code = "invalid_api_key"
    param = "model" if code == "model_not_found" else _param_of(error)
    found = {"message": native.message_of(error), "type": kind, "param": param, "code": code or native.code_of(error)}
    return msgspec.json.encode({"error": found}, enc_hook=str)


def _param_of(error: ForebayError) -> str | None:
    """Return the parameter that is wrong, as `messages[0].role`."""
    detail = error.detail
    path = cast("dict[str, Any]", detail).get("path") if isinstance(detail, dict) else None
    if not isinstance(path, str):
        return None
    field = _FIELD.search(error.message)
    inside = path.removeprefix("$").removeprefix("[0]").removeprefix(".")  # a model of arrays is asked one by one
    return ".".join(part for part in (inside, field[1] if field else "") if part) or None
