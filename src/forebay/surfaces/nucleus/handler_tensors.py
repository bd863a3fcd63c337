# SPDX-License-Identifier: Apache-2.0
"""A handler in the Open Inference Protocol: `handle_post` gets the tensors of a call as an object of lists, by name.

What it returns is what it would in JSON: the fields of an object are outputs, anything else is one that is called
`output`. Numbers and texts, and lists of them in lists, are tensors; everything else is BYTES of its JSON text.
"""

from __future__ import annotations

from typing import Any, Final, cast

import msgspec

from forebay.errors import ForebayError, InvalidRequest, RunnerFailed
from forebay.serving.models.tensor_codec import TensorCodec, TensorSide, plain_array
from forebay.serving.tensor_face import TENSORS, tensors_of
from forebay.surfaces.nucleus.handler_payload import BadPayload
from forebay.types.call import After, Failure, Item, Outcome

_codec: Final = TensorCodec(TensorSide(), TensorSide())


def is_call(item: Item) -> bool:
    """Tell whether a request is one of tensors."""
    return item.params.get("in") == TENSORS


def payload_of(item: Item) -> dict[str, Any]:
    """Return what the handler is given; raises BadPayload if it cannot be read."""
    try:
        return {one.name: plain_array(one).tolist() for one in tensors_of(item.params["given"], item.body)}
    except ForebayError as error:
        raise BadPayload(error.message) from None


def outcome_of(result: Any, item: Item) -> Outcome:
    """Return what the handler gave as tensors."""
    try:
        specs, *data = _codec.encode([result], item.params)
    except ForebayError as error:
        return Failure(error)
    return [[[name, datatype, shape[1:], is_json] for name, datatype, shape, is_json in specs], *data]


def settled(outcome: Any) -> Outcome:
    """Return the outcome of a call; what the handler answered without a result is an error."""
    if type(outcome) is After:
        return msgspec.structs.replace(outcome, outcome=settled(outcome.outcome))
    answer = cast("list[Any]", outcome)
    if type(outcome) is Failure or type(answer[0]) is not int:
        return answer
    status, _, body = answer
    text = bytes(body).decode(errors="replace")
    return Failure(InvalidRequest(text) if 400 <= status < 500 else RunnerFailed(text))
