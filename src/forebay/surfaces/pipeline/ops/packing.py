# SPDX-License-Identifier: Apache-2.0
"""What the default request and response ops do: messages to dicts of values and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from forebay.surfaces.pipeline.codes import OK, CustomExceptionCode, error, from_v03, to_v03
from forebay.surfaces.pipeline.ops.channel import ChannelData, ChannelDataType, is_texts

RequestParse = Literal["raw", "ndarray", "literal"]
"""How the texts of a request become values: not at all, `array(...)` only, or every Python literal."""

_ALIASES: Final[Mapping[str, str]] = {"ecode": "err_no", "error_info": "err_msg"}


class Response:
    """An answer as scripts make one: the message, whose fields also have the names of v0.3.

    `ecode` uses the numbers of v0.3; `err_no` is what the client gets.
    """

    message: Any

    def __init__(self, **fields: Any) -> None:
        from forebay.surfaces.pipeline.protocol import messages

        object.__setattr__(self, "message", messages.Response())
        for name, value in fields.items():
            if isinstance(value, (list, tuple)):
                getattr(self.message, name).extend(value)
            else:
                setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies are asked for, which have no message yet
            raise AttributeError(name)
        found = getattr(self.message, _ALIASES.get(name, name))
        return to_v03(found) if name == "ecode" else found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.message, _ALIASES.get(name, name), from_v03(value) if name == "ecode" else value)


def message_of(response: Any) -> Any:
    """Return the message itself, ready for the wire."""
    return response.message if isinstance(response, Response) else response


def unpack(request: Any, mode: RequestParse) -> dict[str, Any]:
    """Read the pairs and tensors of a request.

    Raises:
        ForebayError: With 8000 if a key has no value, a tensor cannot be read, or the values would take more than the
            request allows for.
    """
    keys, values = request.key, request.value
    if len(keys) > len(values):
        text = f"the request has {len(keys)} keys and {len(values)} values; each key needs one value"
        raise error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, text)
    found: dict[str, Any] = dict(zip(keys, values, strict=False))  # further values are ignored
    if mode != "raw":
        from forebay.surfaces.pipeline.protocol import literal
        from forebay.surfaces.pipeline.protocol.literal_limits import Budget, LiteralTooLarge

        budget = Budget(sum(map(len, values)))
        try:
            found = {name: literal.parse(text, mode, budget=budget) for name, text in found.items()}
        except LiteralTooLarge as much:
            text = f"the values of the request take too much: {much}"
            raise error(CustomExceptionCode.RPC_PACKAGE_ERROR.value, text) from None
    given = getattr(request, "tensors", ())  # a schema of the project's own may have none
    if given:
        from forebay.surfaces.pipeline.protocol import tensors

        found |= tensors.unpack_all(given)
    return found


def pack(channeldata: ChannelData, response_class: Any = None, *, as_tensors: bool = False) -> Any:
    """Write the pairs of an answer, or the error.

    Args:
        response_class: The message to make; None for the usual one.
        as_tensors: Whether arrays become tensors instead of texts.
    """
    if channeldata.prod_error_code is not None:
        return pack_error(channeldata.prod_error_code, channeldata.prod_error_info, response_class)
    if channeldata.error_code != OK:
        return pack_error(channeldata.error_code, channeldata.error_info, response_class)
    is_arrays = channeldata.datatype == ChannelDataType.CHANNEL_NPDATA.value
    response = _new(response_class)
    response.err_no = OK
    for name, value in channeldata.parse().items():
        if as_tensors and not isinstance(value, str):
            from forebay.surfaces.pipeline.protocol import tensors

            tensors.pack(response.tensors.add(), name, value)
            continue
        if not is_arrays and not isinstance(value, str):
            text = f"@DAGExecutor fetch var type must be str({type(value)})."
            return pack_error(CustomExceptionCode.TYPE_ERROR.value, text, response_class)
        response.key.append(name)
        response.value.append(_text(value))
    return response


def pack_error(err_no: int, text: str, response_class: Any = None) -> Any:
    """Write the answer to a request that failed."""
    response = _new(response_class)
    response.err_no = err_no
    response.err_msg = text
    return response


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if is_texts(value):
        return repr(value)
    from forebay.surfaces.pipeline.protocol.array_texts import array_text

    return array_text(value)


def _new(response_class: Any) -> Any:
    if response_class is None:
        from forebay.surfaces.pipeline.protocol import messages

        return messages.Response()
    return response_class()
