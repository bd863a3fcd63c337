# SPDX-License-Identifier: Apache-2.0
"""Addresses of repositories, as people write them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from forebay.errors import ConfigError
from forebay.repository.bucket import Bucket
from forebay.repository.bucket_listing import USUAL, ListingLimits
from forebay.repository.local_source import LocalFolder

if TYPE_CHECKING:
    from forebay.repository.source import ModelSource

SCHEMES: Final = ("s3", "gs", "az", "file")
"""What addresses of repositories begin with; a path without any is a folder here."""


def is_address(target: str) -> bool:
    """Tell whether a text is the address of a repository by its scheme."""
    return target.partition("://")[0] in SCHEMES and "://" in target


def source_of(address: str, below: Path, limits: ListingLimits = USUAL) -> ModelSource:
    """Return the source that an address means.

    Args:
        address: `s3://`, `gs://` or `az://` with bucket and prefix, `file://`, or a path.
        below: The folder that relative paths are meant from.
        limits: What a listing of it may have.

    Raises:
        ConfigError: If it is not an address of a source, or what reads such sources is not installed.
    """
    scheme, colon, rest = address.partition("://")
    if not colon:
        return LocalFolder(below / address, limits.files)
    if scheme == "file":
        found = urlsplit(address)
        if found.netloc not in {"", "localhost"} or not found.path:
            msg = f"repository: expected file:///ABSOLUTE/PATH or a path without a scheme, got {address!r}"
            raise ConfigError(msg)
        return LocalFolder(below / unquote(found.path), limits.files)
    if scheme not in SCHEMES:
        raise ConfigError(f"repository: expected s3://, gs://, az://, file:// or a path, got {address!r}")
    bucket = rest.partition("/")[0]
    if not bucket:
        raise ConfigError(f"repository: expected {scheme}://BUCKET/PREFIX, got {address!r}")
    return Bucket(address.rstrip("/"), limits=limits)
