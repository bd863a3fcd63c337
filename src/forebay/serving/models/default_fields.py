# SPDX-License-Identifier: Apache-2.0
"""Fields of dataclasses that a client left out, and whose defaults are attributes of their class.

msgspec leaves these to the class. They can be read there, but its encoders send what an object itself has: in a sample
that a model gives back, or puts into its result, they would be missing.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias, cast

import msgspec

Defaults: TypeAlias = Mapping[type, Mapping[str, Any]]

_PLAIN: Final = frozenset({bool, bytes, float, int, str, type(None)})


def defaults_in(nodes: Iterable[Any]) -> Defaults:
    """Return such fields of each class, with their defaults; `nodes` are the types inside of an annotation."""
    classes = [node.cls for node in nodes if isinstance(node, msgspec.inspect.DataclassType)]
    found = {kind: _defaults_of(kind) for kind in (typing.get_origin(one) or one for one in classes)}
    return {kind: defaults for kind, defaults in found.items() if defaults}


def _defaults_of(kind: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(kind):  # of attrs
        return {}
    fields = [field for field in dataclasses.fields(kind) if field.init and field.default is not dataclasses.MISSING]
    return {field.name: field.default for field in fields if getattr(kind, field.name, None) is field.default}


def reader(read: Callable[[Any], Any], defaults: Defaults) -> Callable[[Any], Any]:
    """Return what reads the same and sets these fields, also of objects inside."""

    def read_all(body: Any) -> Any:
        sample = read(body)
        todo: list[Any] = [sample]
        seen: set[int] = set()  # a `__post_init__` may link objects in circles
        while todo:
            one = todo.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            missing = defaults.get(one.__class__)
            if missing is not None:
                held: dict[str, Any] = one.__dict__
                held.update({name: default for name, default in missing.items() if name not in held})
            inside = _inside(one)
            if not _PLAIN.issuperset(map(type, inside)):
                todo += inside
        return sample

    return read_all


def _inside(one: Any) -> Collection[Any]:
    if isinstance(one, list | tuple | set | frozenset):
        return cast("Collection[Any]", one)
    if isinstance(one, dict):
        return cast("dict[Any, Any]", one).values()
    if isinstance(one, msgspec.Struct):
        return [getattr(one, name) for name in one.__struct_fields__]
    if dataclasses.is_dataclass(one):
        return [getattr(one, field.name, None) for field in dataclasses.fields(one)]
    return ()
