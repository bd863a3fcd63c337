# SPDX-License-Identifier: Apache-2.0
"""Named fields of samples and results, whatever the user made these of: mappings, structs, dataclasses, models."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, Final, cast, get_origin

import msgspec

BARE: Final = ""
"""Name of the only field of a value that is an array itself."""


def field_of(value: Any, name: str) -> Any:
    """Return a field; raises a `LookupError` that says what was found if there is none of that name."""
    if not name:
        return value
    if isinstance(value, Mapping):
        found = cast("Mapping[str, Any]", value)
        if name in found:
            return found[name]
    elif hasattr(value, name):
        return getattr(value, name)
    raise LookupError(f"{kind_of(value)} was found that has no field '{name}'")


def with_fields(value: Any, fields: Mapping[str, Any]) -> Any:
    """Return a value like this one with other contents in some fields; what is there is not checked or converted.

    Raises:
        TypeError: If nothing is known of how such a value is copied.
    """
    if BARE in fields:
        return fields[BARE]
    if isinstance(value, Mapping):
        return {**cast("Mapping[str, Any]", value), **fields}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **fields)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **fields)
    replaced: Callable[..., Any] | None = getattr(value, "_replace", None)  # named tuples
    if replaced is not None:
        return replaced(**fields)
    copied: Callable[..., Any] | None = getattr(value, "model_copy", None)  # pydantic
    if copied is not None:
        return copied(update=fields)
    msg = f"the fields of {kind_of(value)} cannot be replaced; take a mapping, a struct, a dataclass or a model"
    raise TypeError(msg)


def fields_of_type(annotation: Any) -> Sequence[str] | None:
    """Return the fields that values of a type have: none for lists and plain values, None if the type does not tell."""
    kind: Any = get_origin(annotation) or annotation
    if not isinstance(kind, type):
        return None
    for attribute in ("__struct_fields__", "__dataclass_fields__", "model_fields", "_fields"):
        if hasattr(kind, attribute):
            return list(getattr(kind, attribute))
    if hasattr(kind, "__total__"):  # a typed dict
        return list(kind.__annotations__)
    return [BARE] if issubclass(kind, list | tuple | str | bytes | float | int) else None


def kind_of(value: Any) -> str:
    """Name the type of a value in a sentence."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiou" else f"a {name}"
