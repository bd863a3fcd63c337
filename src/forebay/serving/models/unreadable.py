# SPDX-License-Identifier: Apache-2.0
"""A sample that cannot be read: what its sender is told, wherever it was found out."""

from __future__ import annotations

from typing import Any, cast

from forebay.errors import ForebayError, InvalidRequest, ValidationError
from forebay.serving.models.schema import explain
from forebay.types.failures import failure_of


def refusal(error: BaseException, body: Any, number: int | None = None) -> ForebayError:
    """Turn what was raised while one sample was read into the error of its request.

    Args:
        error: What the decoder, or code of the user's that looked at the sample, raised.
        body: The bytes of the sample.
        number: Its place in the request's array of samples; None if the body is one sample.
    """
    if isinstance(error, ForebayError):
        if number is None or type(error) is not ValidationError:
            return error
        detail = cast("dict[str, Any]", error.detail) if isinstance(error.detail, dict) else {}
        return _invalid(error.message, detail.get("path"), number)
    why = explain(error, body)
    if why.kind == "internal":
        return failure_of(error).error
    if why.kind == "invalid":
        return _invalid(why.message, why.path, number)
    message = why.message if number is None else f"sample {number}: {why.message}"
    return InvalidRequest(message, detail=None if why.position is None else {"position": why.position})


def _invalid(message: str, path: str | None, number: int | None) -> ValidationError:
    if number is not None:
        message = f"sample {number}: {message}"
        path = f"$[{number}]" + (path or "$").removeprefix("$")
    return ValidationError(message, detail={"path": path})
