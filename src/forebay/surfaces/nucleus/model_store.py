# SPDX-License-Identifier: Apache-2.0
"""The models of a project, on the server's side: looked for from time to time, copied here once, told to all workers.

Without a cache every version is here before workers hear of it, and a changed one takes its place only when it is here
as well. With a cache workers hear of all that the store has, and what they ask for is copied then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError, ForebayError
from forebay.repository.bucket_listing import USUAL, ListingLimits
from forebay.repository.disk import DiskCache
from forebay.repository.repository import Repository
from forebay.repository.repository_address import source_of
from forebay.repository.source import ModelSource, SourceChanged
from forebay.repository.tree_rules import TreeRules
from forebay.server.stock import opened
from forebay.surfaces.nucleus.project_settings import DEFAULT_MODEL, Models
from forebay.types.failures import text_of

if TYPE_CHECKING:
    from forebay.repository.cache import Lease
    from forebay.repository.listing import Revision, StoredFile
    from forebay.server.config import RepositoryConfig
    from forebay.surfaces.nucleus.tfs_models import TfsModels
    from forebay.surfaces.nucleus.worker_requests import Desk, DeskVisitor

log = logging.getLogger("forebay.repository")

AGAIN_S: Final = 10.0
"""Time after which what has failed is tried again, where the store is not looked at more often."""
FETCHERS: Final = 8
"""Models that are copied at a time."""


PYTHON_RULES: Final = TreeRules(kind="models", is_strict=True)


class Joined:
    """Several places as one source: the files of each below the name of its model."""

    def __init__(self, sources: Mapping[str, ModelSource]) -> None:
        self.place = ", ".join(source.place for source in sources.values())
        self.problems: Sequence[str] = ()
        self._sources = sources
        self._listed: dict[str, list[StoredFile]] = {}

    def list(self) -> list[StoredFile]:
        """Return all files; of a place that cannot be asked now, what it said last."""
        for name, source in self._sources.items():
            try:
                self._listed[name] = [file._replace(path=f"{name}/{file.path}") for file in source.list()]
            except ForebayError as error:
                if name not in self._listed or len(self._sources) == 1:
                    raise
                log.warning("%s; its models stay unchanged", error.message)
        self.problems = [f"{name}/{problem}" for name, source in self._sources.items() for problem in source.problems]
        return [file for name in self._sources for file in self._listed[name]]

    def has(self, path: str) -> bool:
        """Tell whether a file is there that the last listing lacked."""
        name, _, rest = path.partition("/")
        return self._sources[name].has(rest)

    def read(self, path: str, file: StoredFile, start: int, end: int) -> bytes | memoryview:
        """Return a part of a file."""
        name, _, rest = path.partition("/")
        return self._sources[name].read(rest, file, start, end)

    def folder(self) -> Path | None:
        """Return None: they do not lie in one folder."""
        return None


def source_for(models: Models, project: Path, limits: ListingLimits = USUAL) -> ModelSource:
    """Return where the models of a project are; raises ConfigError if what reads such places is not installed."""
    if models.dir is not None:
        return source_of(models.dir, project, limits)
    if models.path is not None:
        return Joined({DEFAULT_MODEL: source_of(models.path, project, limits)})
    return Joined({one.name: source_of(one.path, project, limits) for one in models.paths or ()})


class ModelStore:
    """Looks, copies, and answers workers; `start` begins with the first look."""

    def __init__(
        self,
        source: ModelSource,
        folder: Path,
        desk: Desk,
        *,
        disk_cache_size: int | None,
        looks: RepositoryConfig,
        rules: TreeRules = PYTHON_RULES,
        tfs: TfsModels | None = None,
    ) -> None:
        """Describe the store.

        Args:
            disk_cache_size: Versions that are kept here, of those that were asked for; None keeps all that there are.
            looks: How often the place is looked at; 0 seconds look at the start only.
            tfs: Is told what workers use.
        """
        self._rules = rules
        self._tfs = tfs
        self._source = source
        self._folder = folder
        self._desk = desk
        self._disk_cache_size = disk_cache_size
        self._looks = looks
        self._again_s = min(looks.poll_s, AGAIN_S) or AGAIN_S
        self._repository: Repository | None = None
        self._published: dict[str, dict[str, Revision]] = {}
        self._held: dict[str, Lease[Path]] = {}
        self._by_id: dict[str, Revision] = {}
        self._syncing = threading.Lock()
        self._retry: threading.Timer | None = None
        self._is_over = False
        self._fetchers = ThreadPoolExecutor(FETCHERS, thread_name_prefix="forebay-models")
        self._releases: list[Future[None]] = []
        self._leases: dict[DeskVisitor, list[tuple[str, Lease[Path]]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        desk.asked["take"] = self._take
        desk.asked["release"] = self._release
        desk.asked["restore"] = self._restore
        desk.on_visit.append(self._greet)

    async def start(self) -> None:
        """Look for the first time, and copy what is to be here; tries again as long as the store cannot be asked.

        Raises:
            ConfigError: If nothing can be written to the folder.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"models cannot be kept in {self._folder}: {error.strerror}; --state-dir names another folder"
            raise ConfigError(msg) from error
        disk = DiskCache(self._source, self._folder, self._disk_cache_size, may_exceed=True)
        repository = self._repository = Repository(
            self._source,
            self._rules,
            poll_s=self._looks.poll_s,
            timeout_s=self._looks.timeout_s,
            max_pause_s=self._looks.max_pause_s,
            disk=disk,
        )
        with contextlib.suppress(ForebayError):  # it is the repository's problem
            await asyncio.to_thread(repository.open)
        await opened(repository, self._again_s, 2 * self._looks.timeout_s)
        await asyncio.to_thread(self._sync)
        repository.watch(self._sync)
        repository.start()

    def stop(self) -> None:
        """Look no more, and end what is being copied."""
        self._is_over = True
        if self._retry is not None:
            self._retry.cancel()
        if self._repository is not None:
            self._repository.stop()
        self._fetchers.shutdown(wait=False, cancel_futures=True)
        if self._tfs is not None:
            self._tfs.close()

    def info(self) -> dict[str, Any]:
        """Return what `/info` tells."""
        told = {
            name: {
                "versions": list(versions),
                "timestamps": [int(revision.modified_s) for revision in versions.values()],
            }
            for name, versions in self._published.items()
        }
        return {"model_metadata": told}

    def folders(self) -> Iterator[tuple[Revision, Path]]:
        """Yield what is published and here, and where."""
        for versions in [*self._published.values()]:
            for revision in [*versions.values()]:
                lease = self._held.get(revision.id)
                if lease is not None:
                    yield revision, lease.value

    def _sync(self) -> None:
        """Publish what counts now; in the thread that looks."""
        assert self._repository is not None
        with self._syncing:
            found = {
                name: {revision.version: revision for revision in versions.values()}
                for name, versions in self._repository.catalog.models.items()
            }
            if self._disk_cache_size is None:
                found = self._fetched(found)
            self._published = found
            self._by_id = {one.id: one for versions in found.values() for one in versions.values()}
            if not self._is_over:
                self._on_loop(self._tell_all)

    def _fetched(self, found: Mapping[str, Mapping[str, Revision]]) -> dict[str, dict[str, Revision]]:
        """Copy what is not here; of what cannot be copied, the one that is here counts on."""
        published: dict[str, dict[str, Revision]] = {}
        wanted = {revision.id for versions in found.values() for revision in versions.values()}
        held: dict[str, Lease[Path]] = {}
        problems: list[str] = []
        for name, versions in found.items():
            for version, revision in versions.items():
                try:
                    held[revision.id] = self._held.pop(revision.id, None) or self._fetch(revision)
                except ForebayError as error:
                    problems.append(error.message)
                    before = self._published.get(name, {}).get(version)
                    if before is None or before.id not in self._held:
                        continue
                    held[before.id] = self._held.pop(before.id)
                    revision = before  # noqa: PLW2901 - it goes on in its place
                published.setdefault(name, {})[version] = revision
        old, self._held = self._held, held
        for key, lease in old.items():
            assert key not in wanted
            lease.release()
        if problems and not self._is_over:
            log.warning("%s; the served models stay, retrying", problems[0])
            self._retry = threading.Timer(self._again_s, self._sync)
            self._retry.daemon = True
            self._retry.start()
        return published

    def _fetch(self, revision: Revision) -> Lease[Path]:
        assert self._repository is not None
        return self._repository.fetch(revision)

    def _on_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(function, *arguments)

    # At the desk, on the loop

    def _greet(self, visitor: DeskVisitor) -> None:
        self._leases[visitor] = []
        visitor.on_leave.append(lambda: self._leave(visitor))
        visitor.tell("catalog", self._catalog())

    def _leave(self, visitor: DeskVisitor) -> None:
        for key, lease in self._leases.pop(visitor):
            self._let_go(key, lease)

    def _tell_all(self) -> None:
        catalog = self._catalog()
        for visitor in self._desk.visitors:
            visitor.tell("catalog", catalog)

    def _catalog(self) -> dict[str, list[list[Any]]]:
        return {
            name: [[version, one.id, one.size] for version, one in versions.items()]
            for name, versions in self._published.items()
        }

    def _take(self, visitor: DeskVisitor, number: int, key: str) -> None:
        self._releases = [one for one in self._releases if not one.done()]
        waiting, revision = list(self._releases), self._by_id.get(key)

        def work() -> None:
            wait(waiting)  # what was given back before makes room for this
            if revision is None:
                raise SourceChanged("its files have changed")
            lease = self._fetch(revision)
            if self._tfs is not None:
                try:
                    self._tfs.add(revision, lease.value)
                except BaseException:
                    lease.release()
                    raise
            self._on_loop(self._taken, visitor, number, key, lease)

        self._fetchers.submit(self._work_for, visitor, number, work)

    def _work_for(self, visitor: DeskVisitor, number: int, work: Callable[[], None]) -> None:
        """Do what a visitor waits for, in a thread; whatever fails is told, for it would wait on."""
        try:
            work()
        except SourceChanged as error:
            assert self._repository is not None
            self._repository.look_soon()
            self._on_loop(visitor.tell, "changed", number, error.message)
        except ForebayError as error:
            self._on_loop(visitor.tell, "failed", number, error.message)
        except Exception as error:
            log.exception("failed to send a model to a worker")
            told = f"the server could not bring it: {text_of(error)}"
            self._on_loop(visitor.tell, "failed", number, told)

    def _taken(self, visitor: DeskVisitor, number: int, key: str, lease: Lease[Path]) -> None:
        if visitor not in self._leases:
            self._let_go(key, lease)
            return
        self._leases[visitor].append((key, lease))
        visitor.tell("taken", number, str(lease.value))

    def _release(self, visitor: DeskVisitor, key: str) -> None:
        leases = self._leases[visitor]
        index = next(index for index, (held, _) in enumerate(leases) if held == key)
        self._let_go(key, leases.pop(index)[1], self._by_id.get(key))

    def _restore(self, visitor: DeskVisitor, number: int) -> None:
        """Have TensorFlow Serving load again what workers use, for one of them has not found it there."""
        tfs = self._tfs
        assert tfs is not None

        def work() -> None:
            tfs.restore()
            self._on_loop(visitor.tell, "restored", number)

        self._fetchers.submit(self._work_for, visitor, number, work)

    def _let_go(self, key: str, lease: Lease[Path], used: Revision | None = None) -> None:
        """Give a folder back; what was used until now leaves the disk later than what was not."""

        def work() -> None:
            if self._tfs is not None:
                try:
                    self._tfs.drop(key)
                except ForebayError as error:
                    log.warning("%s; an unused model stays loaded there", error.message)
            if used is not None:
                self._fetch(used).release()
            lease.release()

        if not self._is_over:
            self._releases.append(self._fetchers.submit(work))
