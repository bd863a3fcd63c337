# SPDX-License-Identifier: Apache-2.0
"""Lists a bucket within bounds; an object with an odd key costs no more than itself.

Theory of operation. obstore lists flat, page by page, and drops a whole page with one key that is not a path (`a//b`,
`../x`, a control character). Only then the place is walked folder by folder, and the folder with the odd key is listed
from the first name on that a model may have: names begin with a letter or a digit, and both sort after `/` and `.`.
Where that does not help either, the folder stays as it was listed last; the place itself cannot be listed then.

A store decides how long an answer is and how many there are. The number of objects and the time are bounded here, but
only where obstore gives something back: not within a page, whose request has a time of its own, nor over pages without
objects, which the repository stops waiting for. Folders come all at once, so a coroutine asks for them, which can be
cancelled. The rest does without: the threads of obstore that serve coroutines abort a process that ends meanwhile.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import msgspec

from forebay.repository.listing import StoredFile, as_one_line
from forebay.repository.source import SourceFailed

MAX_KEY: Final = 1024
"""Bytes of a key, as S3 and Google Cloud Storage bound it; Azure allows so many characters."""
_PAGE: Final = 1000
_MAX_DEPTH: Final = 32
_MAX_PROBLEMS: Final = 100
_WRITTEN: Final = "written "


class ListingLimits(msgspec.Struct, frozen=True):
    """How much a store may say.

    Attributes:
        time_s: How long a listing may take.
        files: How many objects it may have.
    """

    time_s: float = 120.0
    files: int = 1_000_000


USUAL: Final = ListingLimits()


class BucketListing:
    """One listing.

    Attributes:
        problems: What was ignored, and why.
    """

    def __init__(
        self, obstore: Any, store: Any, prefix: str, limits: ListingLimits, before: Sequence[StoredFile] = ()
    ) -> None:
        """Describe it; nobody is asked yet."""
        self.problems: list[str] = []
        self._obstore = obstore
        self._store = store
        self._prefix = prefix
        self._limits = limits
        self._before = before
        self._until = time.monotonic() + limits.time_s
        self._files: dict[str, StoredFile] = {}

    def run(self) -> list[StoredFile]:
        """List everything; called in a thread without a loop.

        Raises:
            SourceFailed: If there is more than the limits allow, or it takes longer.
            BaseError: What obstore raises.
        """
        from obstore.exceptions import InvalidPathError

        folders = [self._prefix]
        while folders:
            folder = folders.pop()
            try:
                self._flat(folder)
                continue
            except InvalidPathError as error:
                problem = error
            if folder.count("/") > _MAX_DEPTH:
                raise problem
            try:
                folders += self._by_folder(folder)
            except InvalidPathError:
                if folder == self._prefix:
                    raise
                below = f"{self._path(folder)}/"
                self._files.update((file.path, file) for file in self._before if file.path.startswith(below))
                self._ignore(f"{as_one_line(below)} stays as it was listed last: {_words(problem)}")
        return sorted(self._files.values())

    def _by_folder(self, folder: str) -> set[str]:
        """Return the folders in a folder with an odd key somewhere; adds what lies beside them.

        Raises:
            InvalidPathError: If it cannot be listed so either.
        """
        from obstore.exceptions import InvalidPathError

        try:
            found = asyncio.run(self._folders(folder))
        except InvalidPathError as error:
            self._flat(folder, f"{folder}/0" if folder else "0")
            self._ignore(f"an object is ignored: {_words(error)}")
            return set()
        self._add(found["objects"])
        below = f"{folder}/" if folder else ""
        return {one for one in found["common_prefixes"] if one != folder and one.startswith(below)}

    async def _folders(self, folder: str) -> Any:
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                return await self._obstore.list_with_delimiter_async(self._store, prefix=folder or None)
        except TimeoutError:
            self._too_long()

    def _flat(self, folder: str, offset: str | None = None) -> None:
        """Add all objects below a folder, or those after a key."""
        count = 0
        for page in self._obstore.list(self._store, prefix=folder or None, offset=offset, chunk_size=_PAGE):
            count += len(page)
            self._add(page)
            if count > self._limits.files:
                self._too_many()
            if time.monotonic() > self._until:
                self._too_long()

    def _add(self, page: Any) -> None:
        for found in page:
            key: str = found["path"]
            path = self._path(key)
            if key == self._prefix:
                continue  # some programs make an empty object where a folder is
            if path is None or len(key.encode()) > MAX_KEY:
                expected = f"expected a key below {self._prefix!r} of at most {MAX_KEY} bytes"
                self._ignore(f"{as_one_line(key, 100)!r} is ignored: {expected}")
                continue
            self._files[path] = StoredFile(path, found["size"], tag_of(found), found["last_modified"].timestamp())
        if len(self._files) > self._limits.files:
            self._too_many()

    def _path(self, key: str) -> str | None:
        """Return a key as seen from the place; None if it does not lie there."""
        below = f"{self._prefix}/" if self._prefix else ""
        return key.removeprefix(below) if key.startswith(below) else None

    def _too_many(self) -> NoReturn:
        msg = f"expected at most {self._limits.files} files (--repository-max-files), and there are more"
        raise SourceFailed(f"{msg}; name a part of it")

    def _too_long(self) -> NoReturn:
        raise SourceFailed(f"the listing took longer than {self._limits.time_s:g} s (--repository-timeout-s)")

    def _ignore(self, problem: str) -> None:
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)


def _words(error: Exception) -> str:
    return as_one_line(str(error).partition("\n\nDebug source")[0])


def tag_of(found: Any) -> str:
    """Return what tells the content of an object, as the store says it: its ETag, if it has one.

    Azure lists it without the quotes that it has where the object is read. One that cannot stand in a header is none.
    """
    tag = (found["e_tag"] or "").strip().strip('"')
    if tag and tag.isascii() and tag.isprintable() and len(tag) <= MAX_KEY:
        return tag
    return _WRITTEN + found["last_modified"].isoformat()


def is_etag(tag: str) -> bool:
    """Tell whether a tag is one that a store can be asked for."""
    return not tag.startswith(_WRITTEN)
