# SPDX-License-Identifier: Apache-2.0
"""A tree of arrays taken apart: its leaves, and what holds them together.

A tree is an array or a number, or a container of trees: dict, list, tuple, NamedTuple, dataclass, `msgspec.Struct`.
None is a container of nothing. Dicts are equal whatever the order of their keys; a subclass of dict, list or tuple
comes back as a plain one unless it is a dataclass or has named fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import NoneType
from typing import Any, Final, cast

import msgspec

from forebay.arrays.lazy import Lazy
from forebay.arrays.libraries import find_kind
from forebay.errors import InvalidRequest

MAX_DEPTH = 64
"""Containers within containers; a tree that contains itself ends here."""


class Structure(msgspec.Struct, frozen=True):
    """A tree without its leaves; hashable where the keys of its dicts are (they always are).

    Attributes:
        type: Class of the container; None for a leaf.
        keys: Names or positions of the children.
        children: What is below, in the order of `keys`.
        size: Leaves in the tree.
    """

    type: type[Any] | None = None
    keys: tuple[Hashable, ...] = ()
    children: tuple[Structure, ...] = ()
    size: int = 1

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Build the tree that has these leaves.

        Raises:
            ValueError: There are more or fewer leaves than the tree has.
        """
        leaves = list(leaves)
        if len(leaves) != self.size:
            raise ValueError(f"the tree has {self.size} leaves, {len(leaves)} were given")
        return _build(self, iter(leaves))

    def paths(self) -> list[str]:
        """Return where each leaf is, such as `$.a[0]`."""
        return list(_paths(self, "$"))

    def difference(self, other: Structure, above: str = "$") -> str | None:
        """Return the path of the first place where the two structures differ; None if they are equal."""
        if (self.type, self.keys) != (other.type, other.keys):
            return above
        for key, left, right in zip(self.keys, self.children, other.children, strict=True):
            path = left.difference(right, above + _step(key))
            if path is not None:
                return path
        return None

    def spell(self, leaves: Iterable[str]) -> str:
        """Return the tree as a text, with a text for each leaf."""
        return _spell(self, iter(leaves))


LEAF = Structure()
_NUMBERS: Final = frozenset({bool, int, float, complex})


def flatten(tree: Any) -> tuple[list[Any], Structure]:
    """Take a tree apart into its leaves and what holds them together.

    Raises:
        InvalidRequest: A leaf is neither an array nor a number, or the tree is deeper than `MAX_DEPTH`; says where.
    """
    leaves: list[Any] = []
    return leaves, _flatten(tree, leaves, ())


def list_of_numbers(structure: Structure, leaves: Sequence[Any]) -> tuple[str, list[Any]] | None:
    """Return the path of a list of nothing but plain numbers, or of such lists, and the list; None if there is none."""
    return _list_of_numbers(structure, leaves, "$") if any(type(leaf) in _NUMBERS for leaf in leaves) else None


def _list_of_numbers(structure: Structure, leaves: Sequence[Any], path: str) -> tuple[str, list[Any]] | None:
    if structure.size and structure.type is list and _is_nested(structure):
        return (path, structure.unflatten(leaves)) if all(type(leaf) in _NUMBERS for leaf in leaves) else None
    first = 0
    for key, child in zip(structure.keys, structure.children, strict=True):
        found = _list_of_numbers(child, leaves[first : first + child.size], path + _step(key))
        if found is not None:
            return found
        first += child.size
    return None


def _is_nested(structure: Structure) -> bool:
    return structure == LEAF or (structure.type is list and all(map(_is_nested, structure.children)))


def _flatten(tree: Any, leaves: list[Any], path: tuple[Hashable, ...]) -> Structure:
    if find_kind(tree) is not None or isinstance(tree, Lazy):
        leaves.append(tree)
        return LEAF
    if len(path) >= MAX_DEPTH:
        raise InvalidRequest(f"a tree of arrays is deeper than {MAX_DEPTH} levels; does it contain itself?")
    keys: tuple[Hashable, ...]
    cls, keys, values = _open(tree, path)
    first = len(leaves)
    children = tuple([_flatten(value, leaves, (*path, key)) for key, value in zip(keys, values, strict=True)])
    return Structure(cls, keys, children, len(leaves) - first)


def _open(tree: Any, path: tuple[Hashable, ...]) -> tuple[type[Any], tuple[Hashable, ...], Iterable[Any]]:
    """Return what kind of container this is, and its keys and values."""
    cls = cast("type[Any]", type(tree))
    if cls is NoneType:
        return NoneType, (), ()
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = tuple(field.name for field in dataclasses.fields(tree) if field.init)
        return cls, names, [getattr(tree, name) for name in names]
    if isinstance(tree, msgspec.Struct):
        return cls, tree.__struct_fields__, [getattr(tree, name) for name in tree.__struct_fields__]
    if isinstance(tree, dict):
        mapping = cast("dict[Hashable, Any]", tree)
        keys = _ordered(mapping)
        return dict, keys, [mapping[key] for key in keys]
    if isinstance(tree, list):
        items = cast("list[Any]", tree)
        return list, tuple(range(len(items))), items
    if isinstance(tree, tuple):
        members = cast("tuple[Any, ...]", tree)
        names = cast("tuple[str, ...] | None", getattr(members, "_fields", None))
        return (tuple, tuple(range(len(members))), members) if names is None else (cls, names, members)
    place = "$" + "".join(map(_step, path))
    raise InvalidRequest(
        f"{place} is a {cls.__name__}: a tree holds arrays of numpy, torch and jax and numbers, in dicts, lists, "
        "tuples, dataclasses and msgspec.Structs"
    )


def _ordered(mapping: dict[Hashable, Any]) -> tuple[Hashable, ...]:
    """Return the keys in an order that does not depend on how the dict was filled."""
    try:
        return tuple(sorted(cast("dict[str, Any]", mapping)))
    except TypeError:  # keys of several types
        return tuple(sorted(mapping, key=lambda key: (type(key).__name__, repr(key))))


def _step(key: Hashable) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def _build(structure: Structure, leaves: Iterator[Any]) -> Any:
    cls = structure.type
    if cls is None:
        return next(leaves)
    values = [_build(child, leaves) for child in structure.children]
    if cls is dict:
        return dict(zip(structure.keys, values, strict=True))
    if cls is list:
        return values
    if cls is tuple:
        return tuple(values)
    if cls is NoneType:
        return None
    return cls(**dict(zip(cast("tuple[str, ...]", structure.keys), values, strict=True)))


def _paths(structure: Structure, above: str) -> Iterator[str]:
    if structure.type is None:
        yield above
    for key, child in zip(structure.keys, structure.children, strict=True):
        yield from _paths(child, above + _step(key))


def _spell(structure: Structure, leaves: Iterator[str]) -> str:
    cls = structure.type
    if cls is None:
        return next(leaves)
    texts = [_spell(child, leaves) for child in structure.children]
    if cls is dict:
        return "{" + ", ".join(f"{key!r}: {text}" for key, text in zip(structure.keys, texts, strict=True)) + "}"
    if cls is list:
        return "[" + ", ".join(texts) + "]"
    if cls is tuple:
        return "(" + ", ".join(texts) + ("," if len(texts) == 1 else "") + ")"
    if cls is NoneType:
        return "None"
    named = ", ".join(f"{key}={text}" for key, text in zip(structure.keys, texts, strict=True))
    return f"{cls.__name__}({named})"


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return the same tree with `fn(leaf)` for each leaf.

    Raises:
        InvalidRequest: See `flatten`.
    """
    leaves, structure = flatten(tree)
    return structure.unflatten(map(fn, leaves))
