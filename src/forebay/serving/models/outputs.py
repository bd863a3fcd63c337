# SPDX-License-Identifier: Apache-2.0
"""Holds results to the type that was declared for them.

It takes two steps, because the first must cost next to nothing. `fits` has msgspec convert all results of a batch at
once, and only learns whether they are certainly right. msgspec accepts objects of classes with fields without looking
inside, so their fields are checked column by column. Any other result (an array, a numpy number, a wrong result) is
then checked by itself: `misfit` reads it back as a client would, and names path and types.
"""

from __future__ import annotations

import dataclasses
import operator
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, TypeAlias, cast

import msgspec

from forebay.errors import ConfigError
from forebay.serving.models.schema import WireType, nodes_of, plain
from forebay.types.call import Media
from forebay.types.first_use import known
from forebay.types.model_answer import Answer
from forebay.workers.user_calls.user_code import caught

Check: TypeAlias = Callable[[list[Any]], bool]
"""Whether all of these values are surely of a type; nothing else is asked of it."""

_BUFFERS: Final = (bytes, bytearray, memoryview)
_WRITTEN: Final = (msgspec.Raw,)
_ARRAYS: Final = {list, Sequence}
_MAPPINGS: Final = {dict, Mapping}
_FIELDED: Final = (msgspec.inspect.StructType, msgspec.inspect.DataclassType, msgspec.inspect.NamedTupleType)


class Declared:
    """A declared type, and whether results are of it."""

    def __init__(self, annotation: Any) -> None:
        """Compile the type, one that msgspec can read."""
        self._type = known(annotation)
        self.fits = _check(annotation, {})

    def misfit(self, value: Any) -> str | None:
        """Return what is wrong with a result, with its path and types; None if it is right.

        Raises:
            Exception: If it cannot be sent at all.
        """
        sent = msgspec.to_builtins(value, builtin_types=_WRITTEN, enc_hook=plain, str_keys=True)
        try:
            msgspec.convert(sent, self._type, str_keys=True)
        except msgspec.ValidationError as error:
            return str(error)
        return None


def declared_of(answer: WireType) -> Declared | None:
    """Return what holds results to a type; None where the encoder does (pydantic, bytes), or nothing can."""
    annotation = answer.annotation
    if answer.raw or answer.is_checked or annotation is Any:
        return None
    is_known, error = caught(_is_known, annotation)  # msgspec asks classes of the user's
    return Declared(annotation) if error is None and is_known else None


def _is_known(annotation: Any) -> bool:
    msgspec.json.Decoder(known(annotation))
    return not any(
        isinstance(node, msgspec.inspect.CustomType) or _is_raw_or_else(node) for node in nodes_of(annotation)
    )


def _is_raw_or_else(node: Any) -> bool:
    """Tell whether this is a union with JSON that is already written: msgspec takes only its other types."""
    return isinstance(node, msgspec.inspect.UnionType) and any(
        isinstance(one, msgspec.inspect.RawType) for one in node.types
    )


class Held:
    """Holds Python values that may go on as they are to a declared type; what msgspec cannot look into passes."""

    def __init__(self, annotation: Any) -> None:
        """Read the type."""
        try:
            answer = WireType(annotation, "output")
        except ConfigError:  # it need not travel in JSON, so nothing is wrong with that
            answer = WireType(Any, "output")
        self._has_media = answer.has_media
        self._raw = (() if answer.annotation is Media else _BUFFERS) if answer.raw else None
        self._declared = declared_of(answer)
        self.fits: Check = _not_known if self._declared is None else self._declared.fits
        """Whether all of several values are surely right."""

    def misfit(self, value: Any) -> str | None:
        """Return what is wrong with a value, with its path and types; None if nothing is known to be."""
        if type(value) is Answer:
            return None if value.status in range(300, 600) else self.misfit(value.body)
        if type(value) is Media:
            is_right = self._has_media or (self._raw is None and self._declared is None)
            return None if is_right else "`forebay.Media` is not declared"
        if self._raw is not None:
            expected = "bytes" if self._raw else "forebay.Media"
            return None if isinstance(value, self._raw) else f"Expected `{expected}`, got `{type(value).__name__}`"
        declared = self._declared
        if declared is None or declared.fits([value]):
            return None
        wrong, _ = caught(declared.misfit, value)
        return wrong


def _not_known(_values: list[Any]) -> bool:
    return False


def _check(annotation: Any, known: dict[int, Check]) -> Check:
    if _has_fields(annotation):
        return known.get(id(annotation)) or _fields(annotation, known)
    if not _holds_fields(annotation):
        return _converts(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _ARRAYS:
        return _array(_check(arguments[0], known))
    if origin in _MAPPINGS and arguments[0] is str:
        return _mapping(_check(arguments[1], known))
    return _never_sure


def _converts(annotation: Any) -> Check:
    column = known(list[annotation])

    def check(values: list[Any]) -> bool:
        try:
            msgspec.convert(values, column)
        except msgspec.ValidationError:
            return False
        return True

    return check


def _array(element: Check) -> Check:
    def check(values: list[Any]) -> bool:
        return {list, tuple}.issuperset(map(type, values)) and element(list(chain.from_iterable(values)))

    return check


def _mapping(value: Check) -> Check:
    def check(values: list[Any]) -> bool:
        return (
            {dict}.issuperset(map(type, values))
            and {str}.issuperset(map(type, chain.from_iterable(values)))
            and value(list(chain.from_iterable(one.values() for one in values)))
        )

    return check


def _fields(annotation: Any, known: dict[int, Check]) -> Check:
    checks: list[tuple[Callable[[Any], Any], Check]] = []

    def check(values: list[Any]) -> bool:
        if not values:
            return True  # or a type that holds itself would be looked at for ever
        is_right: bool = {annotation}.issuperset(map(type, values))
        return is_right and all(one(list(map(field, values))) for field, one in checks)

    known[id(annotation)] = check
    hints = typing.get_type_hints(annotation, include_extras=True)
    checks.extend((operator.attrgetter(name), _check(hints[name], known)) for name in _names_of(annotation))
    return check


def _names_of(annotation: Any) -> Iterable[str]:
    """Return the fields of a class; its annotations may name others, which are none."""
    if issubclass(annotation, msgspec.Struct):
        return annotation.__struct_fields__
    return [one.name for one in dataclasses.fields(annotation)]


def _never_sure(values: list[Any]) -> bool:
    return not values


def _has_fields(annotation: Any) -> bool:
    if not isinstance(annotation, type):
        return False
    return issubclass(annotation, msgspec.Struct) or dataclasses.is_dataclass(cast("type[object]", annotation))


def _holds_fields(annotation: Any) -> bool:
    """Tell whether there is a class with fields inside; msgspec does not look into its objects."""
    return any(isinstance(node, _FIELDED) for node in nodes_of(annotation))
