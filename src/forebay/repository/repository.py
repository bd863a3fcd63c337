# SPDX-License-Identifier: Apache-2.0
"""A folder or bucket with models: what it has now, and a folder on this machine for what is used of it.

Theory of operation. A thread lists the source from time to time, and what two listings in a row say of a version
counts (`Settling`): half of it may have come when the first one was made. A version is what its files are, so that
another file under the same version is a change as well (`Revision`). Whoever wants one gets a lease of the folder with
its files, which does not change while they have it. A source that cannot be asked changes nothing: what was there
last counts, and the reason is told once.

Not here: models. Who loads and swaps them is told by `watch`, and asks `fetch`.
"""

from __future__ import annotations

import logging
import posixpath
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ForebayError, NotFound
from forebay.repository.cache import Lease
from forebay.repository.disk import DiskCache
from forebay.repository.listing import Catalog, Revision, StoredFile, as_one_line
from forebay.repository.local_source import LocalFolder
from forebay.repository.look_thread import MAX_PAUSE_S, SECOND_LOOK_S, Looking, pause_after
from forebay.repository.settling import Settling
from forebay.repository.source import ModelSource, SourceFailed
from forebay.types.did_you_mean import nearest
from forebay.types.failures import failure_of
from forebay.types.user_exceptions import caught

if TYPE_CHECKING:
    from forebay.repository.fetching import Progress
    from forebay.repository.shelf import ShelfStatistics
    from forebay.repository.tree_rules import TreeRules

log = logging.getLogger("forebay.repository")

TIMEOUT_S: Final = 120.0
"""How long a listing may take."""
FIRST_S: Final = 5.0
"""How long the first listing holds up a server; it is waited for further once the ports are open."""
_SHOWN: Final = 10
"""Problems that are told in the log of one look."""
_KEPT: Final = 1000
"""Problems that are kept of one look."""


class RepositoryStatistics(msgspec.Struct, frozen=True):
    """What a repository tells about itself.

    Attributes:
        models: Models that are there.
        versions: Versions that are there, of all models.
        looks: How often the source was listed.
        failures: How often it could not be.
        look_s: How long the last look took, in seconds.
        looked_s: When it was listed last, in seconds since 1970; 0 if never.
        copied_bytes: Bytes that were copied here, of versions that came whole.
        disk: What is kept on the disk; None where files are used where they lie.
    """

    models: int
    versions: int
    looks: int
    failures: int
    look_s: float
    looked_s: float
    copied_bytes: int
    disk: ShelfStatistics | None


class Repository:
    """Models of one source, for all threads.

    Attributes:
        catalog: What counts now.
        problem: Why the last look failed; empty if it did not.
        poll_s: Seconds between two looks; 0 looks only when told to.
        looks: How many have begun.
    """

    def __init__(
        self,
        source: ModelSource,
        rules: TreeRules,
        *,
        poll_s: float = 10.0,
        timeout_s: float = TIMEOUT_S,
        max_pause_s: float = MAX_PAUSE_S,
        disk: DiskCache | None = None,
    ) -> None:
        """Describe it; nothing is asked yet.

        Args:
            rules: How they make models.
            timeout_s: How long a listing may take.
            max_pause_s: The longest pause that a look earns by taking long.
            disk: Where revisions are copied to. None uses the files where they lie, of a source that has them on this
                machine.
        """
        assert disk is not None or isinstance(source, LocalFolder)
        self.catalog = Catalog()
        self.problem = ""
        self._source = source
        self._rules = rules
        self.poll_s = poll_s
        self._timeout_s = timeout_s
        self._max_pause_s = max_pause_s
        self._disk = disk
        self._settling: Settling[tuple[str, int], Revision] = Settling()
        self._listed: Sequence[StoredFile] | None = None
        self._listing: _Listing | None = None
        self._found = Catalog()
        self._watchers: list[Callable[[], None]] = []
        self._one_looks = threading.Lock()
        self._looking = Looking("forebay-repository", self._look_and_tell, self._pause_s)
        self._end = threading.Event()
        self.looks = self._failures = 0
        self._look_s = self._looked_s = 0.0
        self._told: set[str] = set()

    @property
    def place(self) -> str:
        """What people call the source."""
        return self._source.place

    @property
    def is_open(self) -> bool:
        """Whether it was listed once."""
        return self._listed is not None

    def watch(self, on_change: Callable[[], None]) -> None:
        """Call this after each look that has changed `catalog` or `problem`, in the thread that looks."""
        self._watchers.append(on_change)

    def start(self) -> None:
        """Begin to look from time to time."""
        self._looking.start()

    def stop(self) -> None:
        """Look no more, and end what is being copied."""
        self._end.set()
        self._looking.stop()
        if self._disk is not None:
            self._disk.close()

    def look_soon(self) -> None:
        """Have the thread look at once; what moves is looked at again when a second is over anyway, and not before."""
        if not self._is_settling:
            self._looking.soon()

    def may_have(self, model: str, number: int | None, since: int) -> bool:
        """Tell whether something may still come: until a look has ended that began after so many, or two have found it.

        Args:
            number: A version; None is any.
            since: How many looks had begun.
        """
        if self.looks == since or self._one_looks.locked():
            return True
        return not self.problem and _has(self._found, model, number) and not _has(self.catalog, model, number)

    def open(self, within_s: float | None = None) -> None:
        """Look for the first time, and once more if something was written just now.

        Args:
            within_s: How long to wait for the listing; the next look waits for the same one.

        Raises:
            ForebayError: If the source cannot be asked; that is its `problem` then.
        """
        try:
            self.look(within_s)
        except ForebayError as error:
            self.problem = error.message
            raise
        self.problem = ""
        if self._settling.is_moving and not self._end.wait(min(self.poll_s or SECOND_LOOK_S, SECOND_LOOK_S)):
            self.look()

    def look(self, within_s: float | None = None) -> bool:
        """List the source; returns whether `catalog` is another one now.

        Args:
            within_s: How long to wait for the listing, if not as long as it may take.

        Raises:
            ForebayError: If it cannot be asked; nothing has changed then.
        """
        with self._one_looks:
            started = time.monotonic()
            self.looks += 1
            try:
                files = self._list(within_s)
            except ForebayError:
                self._failures += 1
                raise
            finally:
                self._look_s = time.monotonic() - started
            self._looked_s = time.time()
            is_first = self._listed is None
            if files != self._listed:
                # While something counts, the place stays what it was taken for: one model, or several.
                self._found = self._rules.read(files, self._found.kind if self._settling.settled else None)
                self._listed = files
            flat = {
                (name, number): revision
                for name, versions in self._found.models.items()
                for number, revision in versions.items()
            }
            if is_first:
                # What has been there for longer than a poll does not have to be looked at twice.
                old = time.time() - max(self.poll_s, SECOND_LOOK_S)
                self._settling = Settling({key: one for key, one in flat.items() if one.modified_s < old})
            changed = self._settling.look(flat)
            self._look_s = time.monotonic() - started
            problems = self._problems()
            is_new = is_first or bool(changed) or problems != self.catalog.problems
            if is_new:
                models: dict[str, dict[int, Revision]] = {}
                for (name, number), revision in sorted(self._settling.settled.items()):
                    models.setdefault(name, {})[number] = revision
                self.catalog = Catalog(models, problems)
                self._tell_problems()
                if self._disk is not None:
                    self._disk.keep_only([*flat.values(), *self._settling.settled.values()])
            return is_new

    def find(self, model: str, version: int | None = None) -> Revision:
        """Return a version of a model, the highest if none is named. Names are looked up and never made into paths.

        Raises:
            NotFound: If there is none.
        """
        versions = self.catalog.models.get(model)
        if not versions:
            hint = nearest(model, self.catalog.models)
            more = f"; did you mean '{hint}'?" if hint else ""
            raise NotFound(f"there is no model '{model[:100]}' in {self.place}{more}")
        found = versions.get(max(versions) if version is None else version)
        if found is None:
            shown = ", ".join(str(one) for one in list(versions)[-10:])
            raise NotFound(f"the model '{model}' has no version {version} in {self.place}; there is {shown}")
        return found

    def fetch(self, revision: Revision, instead_of: Collection[Revision] = ()) -> Lease[Path]:
        """Return the folder with the files of a revision, copied here if need be; blocks for so long.

        Args:
            instead_of: Revisions in use that leave once this one is loaded; they do not take its room.

        Raises:
            ForebayError: If it cannot be copied, or there is no room for it.
        """
        if self._disk is not None:
            return self._disk.take(revision, instead_of)
        folder = self._source.folder()
        assert folder is not None
        return Lease(folder / revision.place, lambda: None)

    def is_here(self, revision: Revision) -> bool:
        """Tell whether all of a revision is on this machine."""
        return self._disk is None or self._disk.has(revision)

    def is_current(self, revision: Revision) -> bool:
        """Tell whether the files of a revision are still what they were, where they are used in their place."""
        if self._disk is not None or not isinstance(self._source, LocalFolder):
            return True
        found = self._source.files_of(revision.place)
        listed = {file.path: file for file in found or ()}
        return found is not None and all(listed.get(file.path) == file for file in revision.files)

    def progress(self, revision: Revision) -> Progress | None:
        """Return how far a revision has come; None if it is not being copied."""
        return None if self._disk is None else self._disk.progress(revision)

    def statistics(self) -> RepositoryStatistics:
        """Return a snapshot."""
        models = self.catalog.models
        return RepositoryStatistics(
            len(models),
            sum(map(len, models.values())),
            self.looks,
            self._failures,
            self._look_s,
            self._looked_s,
            0 if self._disk is None else self._disk.copied_bytes,
            None if self._disk is None else self._disk.statistics(),
        )

    def _list(self, within_s: float | None) -> Sequence[StoredFile]:
        """Return what the source has; one that does not answer in time is waited for again by the next look.

        Raises:
            ForebayError: If it cannot be asked.
        """
        listing = self._listing = self._listing or _Listing(self._list_whole)
        if not listing.is_over.wait(within_s or self._timeout_s):
            limit = f"{within_s:g} s" if within_s else f"{self._timeout_s:g} s (--repository-timeout-s)"
            raise SourceFailed(f"{self.place} was not listed within {limit}")
        self._listing = None
        problem, listing.problem = listing.problem, None  # its traceback will refer to this frame
        if problem is None:
            return listing.files
        try:
            raise problem
        finally:
            del problem

    def _list_whole(self) -> Sequence[StoredFile]:
        """List the source and ask for what is suddenly missing.

        Raises:
            SourceFailed: If the source has what its listing lacks.
        """
        files = self._source.list()
        if files == self._listed:
            return files
        there = {file.path for file in files}
        for revision in self._settling.settled.values():
            paths = (posixpath.join(revision.place, file.path) for file in revision.files)
            missing = next((path for path in paths if path not in there), None)
            if missing is not None and self._source.has(missing):
                raise SourceFailed(
                    f"{self.place} was listed without {missing}, which is there: the listing is not whole"
                )
        return files

    def _problems(self) -> tuple[str, ...]:
        found = [*self._found.problems, *self._source.problems]
        return tuple(map(as_one_line, found[:_KEPT]))

    def _look_and_tell(self) -> None:
        before = self.problem
        is_new, error = caught(self.look)
        self.problem = "" if error is None else failure_of(error).error.message
        if self.problem and not before:
            log.warning("%s; the served models stay, retrying", self.problem)
        elif before and not self.problem:
            log.info("%s can be listed again", self.place)
        if is_new or self.problem != before:
            for on_change in self._watchers:
                on_change()

    def _pause_s(self, _took_s: float) -> float | None:  # counts the listing alone, whoever waited for it
        if self._listing is not None:  # it goes on, and costs nothing to wait for
            return SECOND_LOOK_S
        poll_s = self.poll_s if self.is_open else self.poll_s or SECOND_LOOK_S
        return pause_after(self._look_s, poll_s, is_moving=self._is_settling, max_pause_s=self._max_pause_s)

    @property
    def _is_settling(self) -> bool:
        """Whether the second look comes by itself; after one that failed it does not."""
        return self._settling.is_moving and not self.problem

    def _tell_problems(self) -> None:
        new = [problem for problem in self.catalog.problems if problem not in self._told]
        for problem in new[:_SHOWN]:
            log.warning("%s: %s", self.place, problem)
        if len(new) > _SHOWN:
            log.warning("%s: and %d more; /models lists all of them", self.place, len(new) - _SHOWN)
        self._told = set(self.catalog.problems)


class _Listing:
    """One listing, in a thread of its own: nothing can end one that hangs."""

    def __init__(self, list_files: Callable[[], Sequence[StoredFile]]) -> None:
        """Begin it."""
        self.is_over = threading.Event()
        self.files: Sequence[StoredFile] = ()
        self.problem: BaseException | None = None
        self._list_files = list_files
        threading.Thread(target=self._run, name="forebay-listing", daemon=True).start()

    def _run(self) -> None:
        files, self.problem = caught(self._list_files)
        self.files = files or ()
        self.is_over.set()


def _has(catalog: Catalog, model: str, number: int | None) -> bool:
    versions = catalog.models.get(model, {})
    return bool(versions) if number is None else number in versions
