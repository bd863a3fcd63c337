# SPDX-License-Identifier: Apache-2.0
"""What a `type X = ...` statement names, what a generic class was made of, and annotations without such names."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from forebay.errors import ConfigError
from forebay.types.failures import text_of
from forebay.types.user_exceptions import caught


def named_by(annotation: Any) -> Any | None:
    """Return what an alias names, with its arguments put in; None if the annotation is not an alias.

    Raises:
        ConfigError: It names what is not there, which Python tells when somebody looks.
    """
    arguments = typing.get_args(annotation)
    alias: Any = typing.get_origin(annotation) if arguments else annotation
    if type(alias).__name__ != "TypeAliasType":  # Python's own, or that of typing_extensions
        return None
    value, error = caught(getattr, alias, "__value__")
    if error is not None:
        raise ConfigError(f"the type `{alias.__name__}` cannot be resolved: {text_of(error)}") from error
    given = dict(zip(alias.__type_params__, arguments, strict=False))
    if isinstance(value, typing.TypeVar):
        return given.get(value, value)
    parameters = getattr(value, "__parameters__", ())
    return value[tuple(given.get(one, one) for one in parameters)] if given and parameters else value


def bound_in(cls: type, owner: type) -> Mapping[Any, Any]:
    """Return what the parameters of a generic class are in one that inherits from it, as `T` in `Ints(Base[int])`."""
    for base in vars(cls).get("__orig_bases__", cls.__bases__):
        origin: Any = typing.get_origin(base) or base
        if isinstance(origin, type) and origin is not cls and issubclass(origin, owner):
            here = dict(zip(getattr(origin, "__parameters__", ()), typing.get_args(base), strict=False))
            if origin is owner:
                return here
            return {parameter: expanded(one, here) for parameter, one in bound_in(origin, owner).items()}
    return {}


def expanded(annotation: Any, bound: Mapping[Any, Any] = MappingProxyType({})) -> Any:
    """Return an annotation with what its names stand for in their places; an alias of itself stays within itself.

    The fields of classes are left as they are.

    Args:
        annotation: Any.
        bound: What its type variables are.

    Raises:
        ConfigError: An alias names what is not there.
    """
    return _expanded(annotation, bound, ())


def _expanded(annotation: Any, bound: Mapping[Any, Any], within: tuple[Any, ...]) -> Any:
    if isinstance(annotation, typing.TypeVar):
        return _expanded(bound[annotation], {}, within) if annotation in bound else annotation
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if (value := named_by(annotation)) is not None:
        alias = origin if arguments else annotation
        if alias in within:
            return annotation
        if arguments:  # first, or an alias of its own would look like one that names itself
            value = named_by(alias[tuple(_expanded(one, bound, within) for one in arguments)])
        return _expanded(value, bound, (*within, alias))
    if not arguments or origin is Literal or any(isinstance(one, list) for one in arguments):  # those of a callable
        return annotation
    if origin is Annotated:
        found = _expanded(annotation.__origin__, bound, within), *annotation.__metadata__
        return annotation if found[0] is annotation.__origin__ else Annotated[found]
    found = tuple(_expanded(one, bound, within) for one in arguments)
    if all(one is before for one, before in zip(found, arguments, strict=True)):
        return annotation
    if origin in (typing.Union, types.UnionType):
        return typing.Union[found]  # noqa: UP007
    return origin[found]
