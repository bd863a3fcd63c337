# SPDX-License-Identifier: Apache-2.0
"""Results as rows of TensorFlow Serving's JSON: bytes as `{"b64": ...}`, numbers as `json_numbers` writes them."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.arrays import json_numbers

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_KEPT: Final = (bytes, bytearray, memoryview, msgspec.Raw)
_BYTES: Final = frozenset({bytes, bytearray, memoryview})
_LISTS: Final = frozenset({list, tuple})
_PLAIN: Final = frozenset({int, str, bool, type(None), msgspec.Raw})


def row_encoder(adapter: TypeAdapter[Any] | None, plain: Callable[[Any], Any]) -> Callable[[Any], bytes]:
    """Return what writes a result.

    Args:
        adapter: What pydantic makes of its type, if that knows it.
        plain: What makes JSON's values of other objects.
    """
    dump = None if adapter is None else partial(adapter.dump_python, by_alias=True, warnings="error", fallback=plain)
    hook = partial(_plain, plain)

    def encode(value: Any) -> bytes:
        dumped = value if dump is None else dump(value)
        built = msgspec.to_builtins(dumped, builtin_types=_KEPT, enc_hook=hook, str_keys=True)
        return msgspec.json.encode(_row(built))

    return encode


def _plain(otherwise: Callable[[Any], Any], value: Any) -> Any:
    """Write numbers of NumPy at once, while their type says how many digits they have."""
    if type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in json_numbers.KINDS:
        import numpy as np

        return msgspec.Raw(json_numbers.written(np.asarray(value)))
    return otherwise(value)


def _row(value: Any) -> Any:
    """Replace what JSON has no form for."""
    kind = type(cast("object", value))
    if kind is float:
        return json_numbers.number(value)
    if kind in _BYTES:
        return {"b64": base64.b64encode(value).decode()}
    if kind is dict:
        return {name: _row(one) for name, one in cast("dict[Any, Any]", value).items()}
    if kind in _LISTS:
        return value if _is_plain(value) else [_row(one) for one in cast("list[Any]", value)]
    return value


def _is_plain(values: list[Any]) -> bool:
    """Tell whether a list can stay as it is, without a look at each of its elements from here."""
    kinds: set[type[Any]] = set(map(type, values))
    if float not in kinds:
        return kinds <= _PLAIN
    return kinds <= {float, int} and all(map(math.isfinite, values))
