# SPDX-License-Identifier: Apache-2.0
"""What a `type X = ...` statement names, and annotations without such names."""

from __future__ import annotations

import types
import typing
from typing import Annotated, Any, Literal

from forebay.errors import ConfigError
from forebay.types.caught import caught
from forebay.types.failures import text_of


def named_by(annotation: Any) -> Any | None:
    """Return what an alias names, with its arguments put in; None if the annotation is no alias.

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


def expanded(annotation: Any) -> Any:
    """Return an annotation with what its aliases name in their places; one that names itself stays within itself.

    The fields of classes are left as they are.

    Raises:
        ConfigError: An alias names what is not there.
    """
    return _expanded(annotation, ())


def _expanded(annotation: Any, within: tuple[Any, ...]) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if (value := named_by(annotation)) is not None:
        alias = origin if arguments else annotation
        if alias in within:
            return annotation
        if arguments:  # first, or an alias of its own would look like one that names itself
            value = named_by(alias[tuple(_expanded(one, within) for one in arguments)])
        return _expanded(value, (*within, alias))
    if not arguments or origin is Literal or any(isinstance(one, list) for one in arguments):  # those of a callable
        return annotation
    if origin is Annotated:
        found = _expanded(annotation.__origin__, within), *annotation.__metadata__
        return annotation if found[0] is annotation.__origin__ else Annotated[found]
    found = tuple(_expanded(one, within) for one in arguments)
    if all(one is before for one, before in zip(found, arguments, strict=True)):
        return annotation
    if origin in (typing.Union, types.UnionType):
        return typing.Union[found]  # noqa: UP007
    return origin[found]
