# SPDX-License-Identifier: Apache-2.0
"""Fields of dataclasses that a body left out, put into the objects that were read of it.

msgspec does not set a field whose default the class has as an attribute, so reading it finds the default all the same.
But `vars` does not have it, nor does msgspec write it: an answer with such a sample inside would lack the field.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MemberDescriptorType
from typing import Any, Final, TypeAlias, cast

import msgspec
from msgspec import inspect

_Fielded: TypeAlias = inspect.DataclassType | inspect.StructType | inspect.NamedTupleType
_FIELDED: Final = typing.get_args(_Fielded)


def completer(nodes: Iterator[Any]) -> Callable[[Any], Any] | None:
    """Return what completes a value of a type and returns it; None if no dataclass of the type needs it.

    Args:
        nodes: The type and what is inside, the type itself first.
    """
    every = list(nodes)
    left_out = {id(node): names for node in every if (names := _left_out(node))}
    if not left_out:
        return None
    leading = set(left_out)
    while found := {id(node) for node in every if id(node) not in leading and _leads(node, leading)}:
        leading |= found
    completion = _Completion(left_out, leading)

    def complete(value: Any) -> Any:
        completion.of(every[0], value)
        return value

    return complete


class _Completion:
    """Walks over a value along its type, and only to where a dataclass is that needs it."""

    def __init__(self, left_out: Mapping[int, tuple[str, ...]], leading: set[int]) -> None:
        self._left_out = left_out
        self._leading = leading

    def of(self, node: Any, value: Any) -> None:
        if id(node) not in self._leading:
            return
        for child, inner in self._inside(node, value):
            self.of(child, inner)
        names = self._left_out.get(id(node), ())
        if names and isinstance(value, _class_of(node)):
            fields = cast("dict[str, Any]", vars(value))
            for name in names:
                fields.setdefault(name, getattr(value, name))

    def _inside(self, node: Any, value: Any) -> Iterator[tuple[Any, Any]]:
        """Yield what may lead on, and what stands there; nothing where a union has another type than this."""
        if isinstance(node, inspect.Metadata):
            yield node.type, value
        elif isinstance(node, inspect.UnionType):
            yield from ((member, value) for member in node.types)
        elif isinstance(node, _FIELDED):
            if isinstance(value, _class_of(node)):
                yield from ((field.type, getattr(value, field.name)) for field in node.fields)
        elif isinstance(value, Mapping):
            values = cast("Mapping[Any, Any]", value)
            if isinstance(node, inspect.TypedDictType):
                yield from ((field.type, values[field.name]) for field in node.fields if field.name in values)
            elif isinstance(node, inspect.DictType):
                yield from ((node.value_type, one) for one in values.values())
        elif isinstance(value, list | tuple | set | frozenset):
            items = cast("list[Any]", value)
            if isinstance(node, inspect.TupleType):
                yield from zip(node.item_types, items, strict=False)
            elif isinstance(node, inspect.CollectionType):
                yield from ((node.item_type, one) for one in items)


def _left_out(node: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass that are an attribute of the class while an object has none of its own."""
    if not isinstance(node, inspect.DataclassType):
        return ()
    kind = _class_of(node)
    of_class = ((field.name, getattr(kind, field.name, msgspec.NODEFAULT)) for field in node.fields)
    # Where there are slots, the attribute of the class is the slot, and msgspec fills it.
    return tuple(
        name
        for name, value in of_class
        if value is not msgspec.NODEFAULT and not isinstance(value, MemberDescriptorType)
    )


def _leads(node: Any, leading: set[int]) -> bool:
    if isinstance(node, inspect.UnionType):
        children: Iterable[Any] = node.types
    elif isinstance(node, inspect.TupleType):
        children = node.item_types
    elif isinstance(node, (*_FIELDED, inspect.TypedDictType)):
        children = [field.type for field in node.fields]
    else:
        children = [getattr(node, name, None) for name in ("type", "item_type", "value_type")]
    return any(id(child) in leading for child in children)


def _class_of(node: _Fielded) -> type:
    return typing.get_origin(node.cls) or node.cls
