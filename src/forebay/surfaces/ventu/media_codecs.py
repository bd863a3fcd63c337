# SPDX-License-Identifier: Apache-2.0
"""The two serialisations a service may speak. It speaks one of them, in requests and in answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Final, cast

import msgspec

from forebay.errors import TooLarge
from forebay.surfaces.ventu.schema import dump, is_model_object
from forebay.types.element_limits import MAX_ELEMENTS, MAX_TENSOR_ELEMENTS, Steps, at_once
from forebay.types.json_elements import json_elements
from forebay.types.msgpack_elements import msgpack_elements

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


class Unreadable(ValueError):
    """Bytes are not of the serialisation the service speaks."""


class Serialisation(ABC):
    """A serialisation.

    Attributes:
        name: Its media type.
        names: Media types that are read as it.
        label: What error messages call it.
        nothing: An object without fields; what an empty body stands for.
        is_json: Whether it can hold no bytes and no dates.
    """

    name: ClassVar[str]
    names: ClassVar[frozenset[str]]
    label: ClassVar[str]
    nothing: ClassVar[bytes]
    is_json: ClassVar[bool]

    @abstractmethod
    def loads(self, body: bytes) -> Any:
        """Return the data in a body; raises Unreadable with the place of the problem."""

    @abstractmethod
    def dumps(self, value: Any) -> bytes | str:
        """Return data as it is sent; in a job's answer text stays text.

        Raises:
            TypeError, ValueError: If it holds something that cannot be sent.
        """

    def problems(self, errors: list[dict[str, Any]]) -> bytes | str:
        """Return as it is sent what is wrong with data; see `Invalid.errors`."""
        return self.dumps(errors)

    def plain(self, value: Any) -> Any:
        """Return what is sent for a result: the data of a model's object, everything else as it is."""
        return dump(value, for_json=self.is_json) if is_model_object(value) else value

    def convert(self, value: Any) -> Any:
        """Return something that can be sent in place of a value inside a result that cannot.

        Raises:
            TypeError: If there is nothing.
        """
        if is_model_object(value):
            return dump(value, for_json=self.is_json)
        return value.tolist() if hasattr(value, "tolist") else msgspec.to_builtins(value)


class Json(Serialisation):
    """JSON as the standard library writes it: its texts and its spelling of numbers are what clients know."""

    name = JSON
    names = frozenset({JSON})
    label = "JSON"
    nothing = b"{}"
    is_json = True

    def loads(self, body: bytes) -> Any:
        """Return the data in a body; see `Serialisation.loads`."""
        _require_few(json_elements(body, MAX_TENSOR_ELEMENTS, MAX_ELEMENTS))
        try:
            return msgspec.json.decode(body)
        except (ValueError, RecursionError):
            pass  # the standard library takes a little more, and its sentences are the ones to answer with
        try:
            return json.loads(body)
        except (ValueError, RecursionError) as error:
            raise Unreadable(str(error)) from None

    def dumps(self, value: Any) -> str:
        """Return data as text; see `Serialisation.dumps`."""
        return json.dumps(value, default=self.convert)


class MsgPack(Serialisation):
    """msgpack."""

    name = MSGPACK
    names = frozenset({MSGPACK, "application/x-msgpack"})
    label = "MessagePack"
    nothing = b"\x80"
    is_json = False

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder(enc_hook=self.convert).encode

    def loads(self, body: bytes) -> Any:
        """Return the data in a body; see `Serialisation.loads`."""
        _require_few(msgpack_elements(body, MAX_TENSOR_ELEMENTS))
        try:
            found: Any = msgspec.msgpack.decode(body)
        except (ValueError, TypeError, RecursionError) as error:  # TypeError: a map or a list as a key
            raise Unreadable(str(error)) from None
        names: list[object] = list(cast("dict[object, object]", found)) if type(found) is dict else []
        for name in names:
            if not isinstance(name, str):
                raise Unreadable(f"the names of an object are texts; found {name!r:.60}")
        return cast("Any", found)

    def dumps(self, value: Any) -> bytes:
        """Return data as bytes; see `Serialisation.dumps`."""
        return self._encode(value)

    def problems(self, errors: list[dict[str, Any]]) -> bytes:
        """Return as it is sent what is wrong with data, such as a limit of more bits than an integer may have here."""
        try:
            return self.dumps(errors)
        except OverflowError:
            return self.dumps(json.loads(json.dumps(errors), parse_int=_int_or_text))


def _require_few(counting: Steps[Any]) -> None:
    """Count the elements of a body before any is made; raises Unreadable if there are too many."""
    try:
        at_once(counting)
    except TooLarge as error:
        raise Unreadable(error.message) from None


def _int_or_text(digits: str) -> int | str:
    return int(digits) if -(1 << 63) <= int(digits) < 1 << 64 else digits
