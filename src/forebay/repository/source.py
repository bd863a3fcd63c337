# SPDX-License-Identifier: Apache-2.0
"""Where models come from: what a source can be asked, and what can go wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from forebay.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from forebay.repository.listing import StoredFile

SCHEMES: Final = ("s3", "gs", "az", "file")
"""What addresses of repositories begin with; a path without any is a folder here."""


class SourceFailed(Unavailable):
    """A source cannot be asked now; trying again may help."""


class SourceChanged(SourceFailed):
    """What was listed is not what is there any more."""


class SourceRefused(ConfigError):
    """A source does not let us in, or is not there: somebody has to say something else."""


class ModelSource(Protocol):
    """A folder or a bucket, or a part of one.

    Attributes:
        place: What people call it.
    """

    place: str

    def list(self) -> Sequence[StoredFile]:
        """Return all files below the place.

        Raises:
            SourceFailed: If it cannot be asked now.
            SourceRefused: If it does not let us in.
        """
        ...

    def read(self, path: str, file: StoredFile, start: int, end: int) -> bytes | memoryview:
        """Return a part of a file that was listed; not empty.

        Args:
            path: Its path below the place.
            file: What the listing said of it.
            start: Its first byte.
            end: The byte after its last.

        Raises:
            SourceChanged: If the file is another one by now.
            SourceFailed: If it cannot be read now, also after some tries.
            SourceRefused: If it may not be read.
        """
        ...

    def folder(self) -> Path | None:
        """Return where the files lie on this machine; None if they do not."""
        ...


def is_address(target: str) -> bool:
    """Tell whether a text is the address of a repository by its scheme."""
    return target.partition("://")[0] in SCHEMES and "://" in target


def source_of(address: str, below: Path) -> ModelSource:
    """Return the source that an address means.

    Args:
        address: `s3://`, `gs://` or `az://` with bucket and prefix, `file://`, or a path.
        below: The folder that relative paths are meant from.

    Raises:
        ConfigError: If it is no address of a source, or what reads such sources is not installed.
    """
    from forebay.repository.local import LocalFolder

    scheme, colon, rest = address.partition("://")
    if not colon:
        return LocalFolder(below / address)
    if scheme == "file":
        found = urlsplit(address)
        if found.netloc not in {"", "localhost"} or not found.path:
            msg = f"the repository is {address!r}; file:///ABSOLUTE/PATH is needed, or a path without a scheme"
            raise ConfigError(msg)
        return LocalFolder(below / unquote(found.path))
    if scheme not in SCHEMES:
        msg = f"the repository is {address!r}; s3://, gs://, az://, file:// or a path is needed"
        raise ConfigError(msg)
    bucket = rest.partition("/")[0]
    if not bucket:
        msg = f"the repository is {address!r}; {scheme}://BUCKET/PREFIX is needed"
        raise ConfigError(msg)
    from forebay.repository.bucket import Bucket

    return Bucket(address.rstrip("/"))
