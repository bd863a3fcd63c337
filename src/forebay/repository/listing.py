# SPDX-License-Identifier: Apache-2.0
"""What a source says of its files, and what a version of a model is made of."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import msgspec


class StoredFile(NamedTuple):
    """A file, as a listing names it.

    Attributes:
        path: Below the place that was listed, with slashes.
        size: In bytes.
        tag: Another one as soon as its content is another: the ETag of an object; time of change and number of a file.
        modified_s: When it was last written, in seconds since 1970.
    """

    path: str
    size: int
    tag: str
    modified_s: float


class Revision(msgspec.Struct, frozen=True, dict=True):
    """What a version of a model consists of at the moment. Other files under the same version are another revision.

    Attributes:
        model: Name of the model.
        version: Its version as the folder is called; `1` if it has none.
        place: Where its files lie below the place that was listed; empty for all of it.
        files: They, with their paths below `place`, in order.
    """

    model: str
    version: str
    place: str
    files: tuple[StoredFile, ...]

    @property
    def number(self) -> int:
        """The version as a number."""
        return int(self.version)

    @functools.cached_property
    def id(self) -> str:
        """Tells it from any other revision; letters and digits."""
        told = [self.model, self.version, self.place, *((file.path, file.size, file.tag) for file in self.files)]
        return hashlib.sha256(msgspec.json.encode(told)).hexdigest()[:32]

    @functools.cached_property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def modified_s(self) -> float:
        """When its newest file was written, in seconds since 1970."""
        return max((file.modified_s for file in self.files), default=0.0)


_MAX_LINE: Final = 500


def as_one_line(text: str, limit: int = _MAX_LINE) -> str:
    """Return a text of a store as it may stand in a log: on one line, bounded, with nothing that steers a terminal."""
    short = " ".join(text[: 2 * limit].split())
    escaped = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in short)
    return escaped if len(text) <= 2 * limit and len(escaped) <= limit else f"{escaped[:limit]}..."


class Catalog(msgspec.Struct, frozen=True):
    """All models that a source has at the moment.

    Attributes:
        models: The revisions of each model by the number of the version, in rising order.
        problems: What is there and is not a model, or a broken one: which path, and which rule.
        kind: What the place was taken for; None if it has no model.
    """

    models: Mapping[str, Mapping[int, Revision]] = {}
    problems: Sequence[str] = ()
    kind: Literal["model", "models"] | None = None
