# SPDX-License-Identifier: Apache-2.0
"""Fields of OpenAI's protocol that say no more than their absence would; clients send them without being asked to.

A type of samples refuses what it does not declare, so that nothing is ignored in silence. A field that is `null`, or
has the value that the protocol gives it where it is left out, asks for nothing that could be ignored. Fields that are
declared reach the model as they were sent, but for a `null` that their type has no place for: that is their default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final

import msgspec

from forebay.types.first_use import known

_DEFAULTS: Final[dict[str, dict[str, Any]]] = {
    "chat/completions": {
        "logprobs": False,
        "modalities": ["text"],
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "tool_choice": "auto",
    },
    "completions": {"best_of": 1, "echo": False},
}
"""By path, what fields mean where they are left out."""
_MAX_BYTES: Final = 64
"""Longest value that is looked at: all of these are shorter."""
_MAX_FIELDS: Final = 256
"""Most fields of a sample that are looked through; the protocol has fewer than fifty."""


def reader(
    decode: Callable[[Any], Any], kind: type[msgspec.Struct], path: str, codec: ModuleType
) -> Callable[[Any], Any]:
    """Return what reads a sample, also where undeclared fields say nothing.

    Args:
        decode: Reads what has no such fields.
        kind: What it makes.
        path: At which it is asked.
        codec: `msgspec.json` or `msgspec.msgpack`.
    """
    declared = {
        field.encode_name: not field.required and _has_no_null(field.type) for field in msgspec.structs.fields(kind)
    }
    defaults = {name: codec.encode(value) for name, value in _DEFAULTS.get(path, {}).items()}
    fields = codec.Decoder(dict[str, msgspec.Raw]).decode

    def read(body: Any) -> Any:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            wrong = str(error)
            if not wrong.startswith("Object contains unknown field") and "got `null`" not in wrong:
                raise
            said = _said(body, fields, declared, defaults, codec)
            if said is None:
                raise
        return decode(said)

    return read


def _said(
    body: Any,
    fields: Callable[[Any], dict[str, msgspec.Raw]],
    declared: Mapping[str, bool],
    defaults: Mapping[str, bytes],
    codec: ModuleType,
) -> bytes | None:
    """Return the body without fields that say nothing; None if there are none, or it cannot be read.

    Args:
        body: Of a sample.
        fields: Reads its fields.
        declared: The fields of its type, and whether a `null` of each is as good as nothing.
        defaults: What undeclared fields say that is as good as nothing.
        codec: `msgspec.json` or `msgspec.msgpack`.
    """
    nothing = codec.encode(None)
    try:
        found = fields(body)
        if len(found) > _MAX_FIELDS:
            return None
        kept = {
            name: value
            for name, value in found.items()
            if len(value) > _MAX_BYTES
            or not declared.get(name, True)
            or codec.encode(codec.decode(value)) not in {nothing, None if name in declared else defaults.get(name)}
        }
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return codec.encode(kept) if len(kept) < len(found) else None


def _has_no_null(type: Any) -> bool:
    try:
        msgspec.convert(None, known(type))
    except msgspec.ValidationError:
        return True
    return False
