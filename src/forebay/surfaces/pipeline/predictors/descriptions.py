# SPDX-License-Identifier: Apache-2.0
"""Descriptions of models, as the original keeps them beside its model files: names, aliases, types and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.runtimes.signature import Signature, Var
from forebay.types.datatypes import BY_PADDLE
from forebay.types.proto_tables import ProtoTable

DESCRIPTIONS: Final = ("serving_server_conf.prototxt", "serving_client_conf.prototxt")
"""What describes the model in a folder, the first of them that is there."""

TYPES: Final[Mapping[int, str]] = {number: row.numpy for number, row in sorted(BY_PADDLE.items())}
"""NumPy's names of the types that descriptions number."""
MAX_BYTES: Final = 1 << 20

_VAR: Final = "1 string name, 2 string alias_name, 3 bool is_lod_tensor, 5 int32* shape"
_TABLE: Final = ProtoTable(
    file="forebay/general_model_config.proto",
    package="baidu.paddle_serving.configure",
    syntax="proto2",
    messages={
        "FeedVar": f"{_VAR}, 4 int32 feed_type",
        "FetchVar": f"{_VAR}, 4 int32 fetch_type",
        "GeneralModelConfig": "1 FeedVar* feed_var, 2 FetchVar* fetch_var",
    },
)


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
    """Read the description of a model; raises ConfigError if it cannot be read or describes no model."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8"
        raise ConfigError(f"the description {path} cannot be read: {reason}") from problem
    told = _parsed(text, str(path))
    feeds = [_var(one, "feed_type", f"{path}: feed_var {at}") for at, one in enumerate(told.feed_var)]
    fetches = [_var(one, "fetch_type", f"{path}: fetch_var {at}") for at, one in enumerate(told.fetch_var)]
    if not feeds or not fetches:
        msg = f"{path}: expected at least one feed_var and one fetch_var, got {len(feeds)} and {len(fetches)}"
        raise ConfigError(msg)
    for side in (feeds, fetches):
        aliases = [var.alias for var in side]
        twice = next((alias for alias in aliases if aliases.count(alias) > 1), None)
        if twice is not None:
            raise ConfigError(f"{path}: the alias '{twice}' stands there twice; each needs one of its own")
    return Signature(tuple(feeds), tuple(fetches))


def _parsed(text: str, where: str) -> Any:
    from google.protobuf import text_format

    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} is longer than {MAX_BYTES} bytes; is it the description of a model?")
    told = _TABLE.classes().GeneralModelConfig()
    try:
        text_format.Parse(text, told, allow_unknown_field=True)  # pyright: ignore[reportUnknownMemberType]
    except text_format.ParseError as error:
        place, _, said = str(error).partition(" : ")
        raise ConfigError(f"{where}, line {place.partition(':')[0]}: {said}") from None
    except RecursionError:
        raise ConfigError(f"{where}: messages are nested too deep") from None
    return told


def _var(told: Any, type_field: str, where: str) -> Var:
    if not told.name:
        raise ConfigError(f"{where} has no name")
    number = getattr(told, type_field) if told.HasField(type_field) else 1
    datatype = BY_PADDLE.get(number)
    if datatype is None:
        allowed = ", ".join(f"{number} ({name})" for number, name in TYPES.items())
        raise ConfigError(f"{where}: {type_field}: expected {allowed}, got {number}")
    alias = told.alias_name if told.HasField("alias_name") else told.name
    return Var(told.name, alias, datatype.name, tuple(told.shape), told.is_lod_tensor)
