# SPDX-License-Identifier: Apache-2.0
"""What the sender of an unreadable sample is told, wherever that was noticed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import ForebayError, InvalidRequest, ValidationError
from forebay.serving.models.decode_errors import explain
from forebay.types.failures import failure_of

if TYPE_CHECKING:
    from forebay.serving.models.schema import WireType


ONE_BODY: Final = "a request is one sample here (a model with `batchable = True` takes arrays of them)"
FILE_BODY: Final = (
    "a request is one sample here, with a value for each input of the file (/v1 and /v2 take many at once)"
)


def refusal(
    error: BaseException,
    body: Any,
    number: int | None = None,
    given: WireType | None = None,
    *,
    no_array: str = ONE_BODY,
) -> ForebayError:
    """Turn what was raised while one sample was read into the error of its request.

    Args:
        error: What the decoder, or code of the user's that looked at the sample, raised.
        number: Its place in the request's array of samples; None if the body is one sample.
        given: The type of a sample; None if the body is something else.
        no_array: What is said to who sends an array where a sample is not an array.
    """
    if isinstance(error, ForebayError):
        if number is None or type(error) is not ValidationError:
            return error
        detail = cast("dict[str, Any]", error.detail) if isinstance(error.detail, dict) else {}
        return _invalid(error.message, detail.get("path"), number)
    why = explain(error, body, given)
    if why.kind == "internal":
        return failure_of(error).error
    if why.kind == "invalid":
        message = why.message
        is_whole = why.path == "$" or no_array is FILE_BODY  # an input of a file may have come with an axis of samples
        if number is None and given is not None and is_whole and _IS_ARRAY.search(message):
            message += f"; {no_array}"
        return _invalid(message, why.path, number, why.problems)
    message = why.message if number is None else f"sample {number}: {why.message}"
    return InvalidRequest(message, detail=None if why.position is None else {"position": why.position})


_IS_ARRAY: Final = re.compile(r"got `(array|list)`")


def _invalid(
    message: str, path: str | None, number: int | None, problems: Sequence[Mapping[str, str]] = ()
) -> ValidationError:
    def placed(path: str | None) -> str | None:
        return path if number is None else f"$[{number}]" + (path or "$").removeprefix("$")

    if number is not None:
        message = f"sample {number}: {message}"
    detail: dict[str, Any] = {"path": placed(path)}
    if problems:
        detail["errors"] = [{**one, "path": placed(one["path"])} for one in problems]
    return ValidationError(message, detail=detail)
