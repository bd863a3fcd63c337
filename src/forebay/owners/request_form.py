# SPDX-License-Identifier: Apache-2.0
"""Whether what a front has handed on has the form of a request.

Workers, and what reads a request on the loop, rely on it: a request of another form could fail those that share its
batch. And a form names files of the server's own, which only that server may say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, cast

import msgspec

from forebay.errors import InvalidRequest
from forebay.serving.models.further_methods import CALL
from forebay.serving.models.schema import FORMATS, WRITTEN
from forebay.serving.tensor_face import TENSORS
from forebay.types.call import ROWS
from forebay.types.file import FormPart
from forebay.types.first_use import known


class _Params(msgspec.Struct, frozen=True):
    """What workers read of the params of a request."""

    given_in: str = msgspec.field(name="in")
    wanted_in: str = msgspec.field(name="out")
    call: str = msgspec.field(name=CALL, default="")
    context: tuple[dict[str, str], str, tuple[str, int] | None, float] | None = None
    fields: list[tuple[str, str]] = []


class _TensorParams(_Params, frozen=True, kw_only=True):
    """The params of a request that asks for tensors."""

    wanted_in: Literal["tensors"] = msgspec.field(name="out")
    given: list[tuple[str, str, list[int], bool]]
    wanted: list[tuple[str, bool]]
    is_json: bool


_FORM: Final = msgspec.msgpack.Decoder(known(list[FormPart]))


def require_params(params: Mapping[str, Any]) -> None:
    """Check what a front says about a body; raises an `InvalidRequest` if a worker could not read it."""
    try:
        if params.get("in") == TENSORS:
            msgspec.convert(params, known(_TensorParams))
            return
        told = msgspec.convert(params, known(_Params))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the params of a request cannot be used: {error}") from error
    if told.given_in not in FORMATS or told.wanted_in not in WRITTEN:
        raise InvalidRequest(f"there are no formats {told.given_in[:40]!r} and {told.wanted_in[:40]!r}")


def require_form(body: Any, size: int, params: Mapping[str, Any], takes_lists: Mapping[str, bool]) -> None:
    """Check that a body which a front has sent has the form of one.

    Args:
        size: How many samples it is said to have.
        params: What else is said about it; they were checked.
        takes_lists: The methods of the model, and whether each takes a list of samples.

    Raises:
        InvalidRequest: It has not.
    """
    call = params.get(CALL, "")
    if call not in takes_lists:
        raise InvalidRequest(f"the model has no method {str(call)[:100]!r}")
    rows: list[Any] = [body]
    if params.get("in") == TENSORS or takes_lists[call] or ROWS in params:
        count = len(params["given"]) if params.get("in") == TENSORS else size
        if not isinstance(body, list) or len(cast("list[Any]", body)) != count:
            raise InvalidRequest(f"the body of a request: expected a list of {count}")
        rows = cast("list[Any]", body)
    elif size != 1:
        raise InvalidRequest(f"a request for one sample says that it has {size}")
    if set(map(type, rows)) - {bytes, memoryview}:
        raise InvalidRequest("the body of a request: expected bytes")
    if params.get("in") == "form":
        for row in rows:
            _require_no_paths(row)


def _require_no_paths(body: bytes | memoryview) -> None:
    """Check that a form holds its files, and names none that lie on this machine.

    Raises:
        InvalidRequest: It does, or is not a form.
    """
    try:
        is_here = all(part.size < 0 for part in _FORM.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"a form cannot be read: {error}") from error
    if not is_here:
        raise InvalidRequest("a form names a file of another machine")
