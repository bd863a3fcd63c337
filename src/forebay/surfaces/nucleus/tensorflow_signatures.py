# SPDX-License-Identifier: Apache-2.0
"""Which signature of a SavedModel a project means, and what `/info` tells of it."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ForebayError
from forebay.repository.repository_address import source_of
from forebay.repository.tree_rules import TreeRules
from forebay.runtimes.saved_model import chosen, definitions_of, files_problem, signatures_of
from forebay.surfaces.nucleus.shim import UserException
from forebay.types.first_use import known

if TYPE_CHECKING:
    from forebay.runtimes.signature import Signature


class SignatureKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says.

    Attributes:
        default: `signature_key` of all models.
        of: That of single ones, by name.
    """

    default: str | None = None
    of: dict[str, str] = {}


class KeyedSignature(msgspec.Struct, frozen=True):
    """A signature of a SavedModel.

    Attributes:
        shapes: Of its inputs, -1 for any length; None for any shape.
    """

    key: str
    signature: Signature
    shapes: dict[str, list[int] | None]


def signature_of(folder: Path, keys: SignatureKeys, model: str, version: str) -> KeyedSignature:
    """Return the signature that is meant of a version of a model.

    Raises:
        UserException: If there is none of the name, or none is named and there are several.
        ConfigError: If the model cannot be read.
    """
    found = signatures_of(folder)
    wanted = keys.of.get(model) or keys.default or None
    key = chosen(found, wanted)
    if key is None:
        raise UserException(_not_among(found, wanted, model, version))
    inputs = definitions_of(folder)[key].get("inputs", {})
    return KeyedSignature(key, found[key], {name: _shape(info) for name, info in inputs.items()})


def misfit(address: str, project: Path, wanted: str | None, model: str) -> str:
    """Return why the newest version of a model has not the signature that is meant; empty if it has.

    It is empty as well where nothing can be told yet: the model lies in a bucket, is not there, or cannot be read.

    Args:
        address: Where its versions are.
        project: The folder that relative paths are meant from.
        wanted: The `signature_key`.
    """
    if "://" in address and not address.startswith("file://"):
        return ""
    source, rules = source_of(address, project), TreeRules(kind="model", name=model, holds=files_problem)
    try:
        versions = rules.read(source.list()).models.get(model, {})
        newest = versions[max(versions)] if versions else None
        root = source.folder()
        if newest is None or root is None:
            return ""
        found = signatures_of(root / newest.place)
    except ForebayError:
        return ""  # it is told of, with what else keeps the model from being loaded, when it is
    return "" if chosen(found, wanted) is not None else _not_among(found, wanted, model, newest.version)


def _not_among(found: Collection[str], wanted: str | None, model: str, version: str) -> str:
    """Return the original's sentence."""
    there = "', '".join(found)
    if wanted is None:
        return (
            f"signature_key was not configured by user, please specify one the following keys '{there}' for model "
            f"'{model}' of version '{version}' (found in the signature def map)"
        )
    return (
        f"signature_key '{wanted}' was not found in signature def map for model '{model}' of version "
        f"'{version}', but found the following keys: '{there}'"
    )


@lru_cache(maxsize=1024)
def told(folder: str, keys: bytes, model: str, version: str) -> dict[str, Any]:
    """Return what `/info` tells of a version whose files are in a folder; `keys` are `SignatureKeys` in JSON."""
    found = signature_of(Path(folder), msgspec.json.decode(keys, type=known(SignatureKeys)), model, version)
    inputs = {
        var.name: {
            "shape": ["unknown"] if (shape := found.shapes[var.name]) is None else shape or ["scalar"],
            "type": {"str": "string"}.get(str(var.dtype), str(var.dtype)),
        }
        for var in found.signature.feeds
    }
    return {
        "disk_path": folder,
        "signature_def": definitions_of(Path(folder)),
        "signature_key": found.key,
        "input_signatures": inputs,
    }


def _shape(info: dict[str, Any]) -> list[int] | None:
    shape = info.get("tensorShape", {})
    return None if shape.get("unknownRank") else [int(axis["size"]) for axis in shape.get("dim", ())]
