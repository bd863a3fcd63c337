# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models, as the original keeps them beside its model files: names, aliases, types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from forebay.errors import ConfigError
from forebay.runtimes.signature import Signature, Var
from forebay.surfaces.pipeline.predictors import prototxt
from forebay.types.datatypes import BY_PADDLE

DESCRIPTIONS: Final = ("serving_server_conf.prototxt", "serving_client_conf.prototxt")
"""What describes the model in a folder, the first of them that is there."""

TYPES: Final[Mapping[int, str]] = {number: row.numpy for number, row in sorted(BY_PADDLE.items())}
"""NumPy's names of the types that descriptions number."""


def describe(path: Path) -> Signature | None:
    """Read the description in a folder, or beside a file, or in that very file; None if there is none.

    Raises:
        ConfigError: If it describes no model.
    """
    if path.suffix == ".prototxt":
        return read_signature(path)
    folder = path if path.is_dir() else path.parent
    found = next((folder / name for name in DESCRIPTIONS if (folder / name).is_file()), None)
    return None if found is None else read_signature(found)


def read_signature(path: Path) -> Signature:
    """Read the description of a model.

    Args:
        path: The `.prototxt` file.

    Raises:
        ConfigError: If it cannot be read or describes no model.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is no text"
        msg = f"the description {path} cannot be read: {reason}"
        raise ConfigError(msg) from problem
    fields = prototxt.parse(text, str(path))
    feeds = [_var(one, "feed_type", f"{path}: feed_var {at}") for at, one in enumerate(fields.get("feed_var", []))]
    fetches = [_var(one, "fetch_type", f"{path}: fetch_var {at}") for at, one in enumerate(fields.get("fetch_var", []))]
    if not feeds or not fetches:
        msg = f"{path} has {len(feeds)} feed_var and {len(fetches)} fetch_var; at least one of each is needed"
        raise ConfigError(msg)
    for side in (feeds, fetches):
        aliases = [var.alias for var in side]
        twice = next((alias for alias in aliases if aliases.count(alias) > 1), None)
        if twice is not None:
            msg = f"{path}: the alias '{twice}' stands there twice; each needs one of its own"
            raise ConfigError(msg)
    return Signature(tuple(feeds), tuple(fetches))


def _var(fields: Any, type_field: str, where: str) -> Var:
    if not isinstance(fields, dict):
        msg = f"{where} is {fields!r}; a message with a name is needed"
        raise ConfigError(msg)
    known = cast("prototxt.Fields", fields)
    name, number = known.get("name", [None])[-1], known.get(type_field, [1])[-1]
    if not isinstance(name, str) or not name:
        msg = f"{where} has no name"
        raise ConfigError(msg)
    datatype = BY_PADDLE.get(number) if type(number) is int else None
    if datatype is None:
        allowed = ", ".join(f"{number} ({name})" for number, name in TYPES.items())
        msg = f"{where}: {type_field} is {number}; {allowed} are allowed"
        raise ConfigError(msg)
    shape = known.get("shape", [])
    if not all(type(axis) is int for axis in shape):
        msg = f"{where}: the shape is {shape}; whole numbers are needed"
        raise ConfigError(msg)
    alias = str(known.get("alias_name", [name])[-1])
    is_lod = known.get("is_lod_tensor", [False])[-1] is True
    return Var(name, alias, datatype.name, tuple(shape), is_lod)
