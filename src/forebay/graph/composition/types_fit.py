# SPDX-License-Identifier: Apache-2.0
"""Whether what one function returns is what the next one takes, as far as their annotations tell.

`fits` refuses only what certainly does not fit: whatever is not annotated, or not understood, passes.
"""

from __future__ import annotations

import collections.abc
import inspect
import types
import typing
from typing import Any, Final, Literal, TypeVar, cast

from forebay.serving.models.schema import unwrap
from forebay.types.call_signature import as_written

_UNION: Final = (typing.Union, types.UnionType)

_PROMOTIONS: Final[dict[Any, tuple[type, ...]]] = {float: (int,), complex: (int, float)}
"""What may stand for another type without being a subclass of it."""

_ELEMENTWISE: Final = (list, tuple, set, frozenset, collections.abc.Collection)
"""Kinds whose only type argument is that of their elements."""


def fits(given: Any, wanted: Any) -> bool:
    """Tell whether a value annotated `given` may go where `wanted` is annotated."""
    given, wanted = _bare(given), _bare(wanted)
    if _is_open(given) or _is_open(wanted) or given == wanted:
        return True
    if typing.get_origin(given) in _UNION:
        return all(fits(member, wanted) for member in typing.get_args(given))
    if typing.get_origin(wanted) in _UNION:
        return any(fits(given, member) for member in typing.get_args(wanted))
    if hasattr(wanted, "__supertype__"):
        return hasattr(given, "__supertype__") and fits(given.__supertype__, wanted)
    if hasattr(given, "__supertype__"):
        return fits(given.__supertype__, wanted)
    if typing.get_origin(wanted) is Literal:
        return typing.get_origin(given) is Literal and set(typing.get_args(given)) <= set(typing.get_args(wanted))
    if typing.get_origin(given) is Literal:
        return all(fits(type(value), wanted) for value in typing.get_args(given))
    return _kinds_fit(given, wanted) and _arguments_fit(given, wanted)


def element_of(annotation: Any) -> tuple[bool, Any]:
    """Return whether an annotation can be one of a list, and that of its elements."""
    bare = _bare(annotation)
    if _is_open(bare):
        return True, Any
    if typing.get_origin(bare) in _UNION:
        found = [element_of(member) for member in typing.get_args(bare) if _bare(member) is not types.NoneType]
        return any(is_list for is_list, _ in found), found[0][1] if len(found) == 1 else Any
    kind, arguments = typing.get_origin(bare) or bare, typing.get_args(bare)
    if kind is tuple:
        return True, arguments[0] if len(arguments) == 2 and arguments[1] is Ellipsis else Any
    if not isinstance(kind, type):
        return True, Any
    if hasattr(kind, "tolist"):
        return True, Any  # an array: what one of its rows is, its annotation does not say
    if issubclass(kind, collections.abc.Iterable) and not issubclass(kind, str | bytes | collections.abc.Mapping):
        return True, arguments[0] if len(arguments) == 1 else Any
    return False, Any


def spell(annotation: Any) -> str:
    """Write an annotation as its author wrote it, without the names of modules."""
    if annotation is None or annotation is types.NoneType:
        return "None"
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__.rpartition("<locals>.")[2]
    kind, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if kind in _UNION:
        return " | ".join(spell(member) for member in arguments)
    if isinstance(kind, type) and arguments:
        inner = ", ".join("..." if argument is Ellipsis else spell(argument) for argument in arguments)
        return f"{kind.__qualname__}[{inner}]"
    return as_written(inspect.formatannotation(annotation)).removeprefix("typing.")


def _bare(annotation: Any) -> Any:
    """Strip what says nothing about the kind of value: `Annotated`, aliases, None instead of its type."""
    bare = unwrap(annotation)
    return types.NoneType if bare is None else bare


def _is_open(annotation: Any) -> bool:
    is_unsaid = annotation is Any or annotation is object or annotation is inspect.Parameter.empty
    return is_unsaid or isinstance(annotation, TypeVar | str)


def _kinds_fit(given: Any, wanted: Any) -> bool:
    """Compare the classes without their arguments."""
    kind, target = typing.get_origin(given) or given, typing.get_origin(wanted) or wanted
    if not isinstance(kind, type) or not isinstance(target, type):
        return True
    if issubclass(kind, _PROMOTIONS.get(target, ())):
        return True
    if typing.is_typeddict(target):
        return issubclass(kind, dict)
    try:
        return issubclass(kind, target)
    except TypeError:
        return True  # a protocol with fields: only an object could tell


def _arguments_fit(given: Any, wanted: Any) -> bool:
    ours, theirs = typing.get_args(given), typing.get_args(wanted)
    if not ours or not theirs:
        return True
    kind, target = cast("type", typing.get_origin(given)), cast("type", typing.get_origin(wanted))
    if kind is tuple:
        return _tuple_fits(ours, theirs, target)
    if kind is target or ({len(ours), len(theirs)} == {1} and issubclass(target, _ELEMENTWISE)):
        return len(ours) != len(theirs) or all(map(_argument_fits, ours, theirs))
    if issubclass(kind, collections.abc.Mapping) and issubclass(target, collections.abc.Mapping):
        return len(ours) != len(theirs) or all(map(_argument_fits, ours, theirs))
    return True


def _tuple_fits(ours: tuple[Any, ...], theirs: tuple[Any, ...], target: type) -> bool:
    is_open = len(ours) == 2 and ours[1] is Ellipsis
    members = ours[:1] if is_open else ours
    if target is not tuple:
        return len(theirs) != 1 or all(fits(member, theirs[0]) for member in members)
    if len(theirs) == 2 and theirs[1] is Ellipsis:
        return all(fits(member, theirs[0]) for member in members)
    if is_open:
        return all(fits(ours[0], member) for member in theirs)
    return len(ours) == len(theirs) and all(map(fits, ours, theirs))


def _argument_fits(given: Any, wanted: Any) -> bool:
    # The parameters of a Callable stand in a list, and other arguments need not be types at all.
    return True if isinstance(given, list) or isinstance(wanted, list) else fits(given, wanted)
