# SPDX-License-Identifier: Apache-2.0
"""Where models come from: what a source can be asked, and what can go wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from forebay.errors import ConfigError, Unavailable

if TYPE_CHECKING:
    from forebay.repository.listing import StoredFile


class SourceFailed(Unavailable):
    """A source cannot be asked now; trying again may help."""


class SourceChanged(SourceFailed):
    """What was listed is not what is there any more."""


class SourceRefused(ConfigError):
    """A source denies access or is not there: its settings have to change."""


class ModelSource(Protocol):
    """A folder or a bucket, or a part of one.

    Attributes:
        place: What people call it.
        problems: What the last listing could not look at, and why; what was there before was listed again.
    """

    place: str
    problems: Sequence[str]

    def list(self) -> Sequence[StoredFile]:
        """Return all files below the place.

        Raises:
            SourceFailed: If it cannot be asked now, or has lost everything at once.
            SourceRefused: If it does not let us in.
        """
        ...

    def has(self, path: str) -> bool:
        """Tell whether a file is there that the last listing lacked; asked for by itself.

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
