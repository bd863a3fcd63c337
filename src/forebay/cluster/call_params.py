# SPDX-License-Identifier: Apache-2.0
"""What members say of a call beside its input. Sans-I/O.

A call whose input is streamed has a number that its caller makes up. Each item of the input is a request of its own,
which is answered with nothing once there is room for the next; so is the end of the input.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, cast

import msgspec

from forebay.cluster.packed_values import KINDS
from forebay.errors import InvalidRequest
from forebay.types.first_use import known

ITEMS_AHEAD: Final = 2
"""Items of an input that may lie with the member that executes it before its caller has to wait."""

OPENING: Final[list[bytes]] = []
"""The first part of an answer that is streamed: it says only that."""

NOT_TAKEN: Final = "not taken"
"""The detail of the error of a call that was not begun and may be sent to another member."""

_Number = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class CallParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The params of a request between members.

    Attributes:
        opens: The number of a call whose input is streamed; 0 where the body is the input.
        feeds: The number of the call that an item is for; 0 where it is a call.
        is_last: Whether the input has ended; there is no item then.
    """

    opens: _Number = 0
    feeds: _Number = 0
    is_last: bool = False


def read_params(params: Any) -> CallParams:
    """Read the params of a request; raises an `InvalidRequest` if they are none."""
    try:
        return msgspec.convert(params, known(CallParams))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the params of a call cannot be used: {error}") from error


def require_call(body: Any, size: int, params: Any) -> None:
    """Check what a member has sent as a call, or as an item of one; raises an `InvalidRequest` if it is none."""
    told = read_params(params)
    if size != 1:
        raise InvalidRequest(f"a call is one request, and says that it is {size}")
    buffers = cast("list[Any]", body) if isinstance(body, list) else [None]
    if set(map(type, buffers)) - KINDS or bool(buffers) == bool(told.opens or told.is_last):
        raise InvalidRequest("expected the input of a call as a list of buffers")
