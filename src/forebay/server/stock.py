# SPDX-License-Identifier: Apache-2.0
"""Models of repositories in an app: what is loaded, for whom, and what leaves for it. All of it happens on the loop.

Theory of operation. A repository says which versions there are, a policy which of them are served, and a `StockMemory`
for which there is room. A version is loaded because somebody asks for it (`lend`), because all are to be there (not
lazy), or because it takes the place of one that is there. The version that answers what names none is the highest one
that is served and could be loaded, or the one that somebody has swapped in, until a version comes that was not there
then. A successor is loaded beside the one in use, so that for a moment there is one more than there is room for; only
then do requests go to it, and the one before leaves with its last request. Until then it counts, in memory and on the
disk: what is to be loaded waits for what is leaving.

What could not be loaded is tried again after a pause that doubles, or at once when its files are other ones; until
then the files of this version that are in memory go on, or the next lower version answers, or the reason is the
answer. What somebody has unloaded by hand stays away until somebody loads it, or its files are other ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from forebay.errors import ConfigError, ForebayError, ModelError, NotFound, Unavailable
from forebay.repository.look_thread import SECOND_LOOK_S
from forebay.repository.shelf import Full
from forebay.repository.source import SourceChanged
from forebay.repository.tree_rules import number_of
from forebay.server.stock_memory import Key, StockMemory, StockStatistics
from forebay.server.stock_offer import Stocked, StockOffer
from forebay.server.version_loading import beside
from forebay.types.failures import failure_of

if TYPE_CHECKING:
    from forebay.repository.cache import Lease
    from forebay.repository.listing import Revision
    from forebay.repository.repository import Repository
    from forebay.repository.version_policy import VersionPolicy
    from forebay.server.app import App
    from forebay.server.served import Served

log = logging.getLogger("forebay.repository")

LOADS: Final = 4
"""Versions that are loaded at a time."""
IN_USE_S: Final = 1.0
"""How long a load waits for requests that others had their models loaded for: most are over soon."""
TRIES: Final = 4
"""How often a version is loaded for a request that finds it gone again."""
MAX_WAITING: Final = 4096
"""Requests that may wait for versions that are being loaded."""
LOOK_S: Final = 15.0
"""Time in which a model or version that somebody names must have been found in its repository."""
PAUSE_S: Final = 0.05
"""Pause between two questions whether it has been."""
_LOADING: Final = "the models of the repository are loading"


class Stock:
    """Keeps in an app what repositories have.

    Attributes:
        stocked: The repositories.
        offer: What is to be served of them.
        is_lazy: Whether a version is loaded only when somebody asks for it.
        is_ready: Whether it has looked, and what is to be there from the start is there.
        one_says: Held by who says of all models which are loaded: of two at a time, each would unload what the other
            one wants.
    """

    def __init__(
        self,
        app: App,
        stocked: Sequence[Stocked],
        policy: VersionPolicy,
        *,
        is_lazy: bool = True,
        max_models: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        """Describe it; `App.start` starts it.

        Args:
            stocked: The repositories; each has been looked at.
            policy: Which versions are served.
            max_models: Versions in memory.
            max_bytes: Bytes of their files together.
        """
        self._app = app
        self.stocked = stocked
        self.is_lazy = is_lazy
        self._memory = StockMemory(self._ready, max_models, max_bytes)
        self.offer = StockOffer(stocked, policy, self._memory.loaded)
        self._loading: dict[Key, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._there: dict[Served, Revision] = {}  # what was built and is not gone
        self._held: set[Served] = set()  # what of it is leaving, and has a lease until it is gone
        self._admitted: set[Key] = set()  # what is being loaded, and has room
        self._lent = 0
        self._departure = asyncio.Event()
        self._found: WeakKeyDictionary[Served, Revision] = WeakKeyDictionary()  # perhaps never loaded
        self._best: dict[str, int] = {}  # which of a model was given all requests, unless it or another has left since
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._tend_again: set[str] = set()
        self._waiting = 0
        self._failures = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(LOADS)
        self._is_over = False
        self.is_ready = self._had_models = False
        self.one_says = asyncio.Lock()
        app.stock = self
        app.watch(self._look_at_app)

    # What is there

    def problems(self) -> list[str]:
        """Return why the models are not there yet; empty if they are."""
        failures = [] if self.is_lazy else self.offer.failures
        if self.is_ready and not self._had_models:
            self._had_models = bool(self._app.served or (self.offer.names and not failures))
        if self.is_ready and self._had_models:
            return []
        if self.is_ready and failures:
            return failures
        if self.is_ready:
            places = ", ".join(one.repository.place for one in self.stocked)
            return [f"no model is served yet: {places} has none, if it is called so"]
        return [one.repository.problem for one in self.stocked if one.repository.problem] or [_LOADING]

    def statistics(self) -> StockStatistics:
        """Return a snapshot."""
        return self._memory.statistics(self._failures, self._waiting)

    def may_be_asked(self, name: str, version: str) -> bool:
        """Tell whether a version that is not in memory is loaded for who asks; without one, the one that answers."""
        served = [str(one.number) for one in self.offer.served(name)]
        return self.is_ready and self.is_lazy and (version in served if version else bool(served))

    def describe_versions(self, name: str) -> list[dict[str, Any]]:
        """Return the versions of a model that could be loaded, or are being copied, or failed."""
        return self.offer.describe(name, self._loading)

    # Loading

    @contextlib.asynccontextmanager
    async def lend(self, name: str, version: str | None) -> AsyncGenerator[Served]:
        """Have a version there, loaded if need be, as long as the block runs.

        Args:
            version: Its version; None is the one that answers what names none.

        Raises:
            NotFound: If there is none.
            ForebayError: Why it cannot be loaded.
        """
        number = None if version is None else number_of(version)
        if version is not None and number is None:
            raise NotFound(f"the model '{name[:100]}' has no version '{version[:100]}': versions are whole numbers")
        if not self._app.is_stocked(name):
            raise ConfigError(f"the model '{name}' of a repository has the name of another one that is served")
        if not self.is_ready and not self.offer.has(name):
            raise Unavailable(self.problems()[0])
        if self._waiting >= MAX_WAITING:
            raise Unavailable(f"{MAX_WAITING} requests wait for models that are being loaded; try again later")
        self._waiting += 1
        try:
            for _ in range(TRIES):  # what was loaded may have to leave before whoever waited for it has its turn
                key, has_waited = await self._bring(name, number)
                served, revision = self._ready(key), self._memory.loaded.get(key)
                if served is not None and revision is not None and self._memory.take(revision):
                    break
            else:
                raise Unavailable(f"the model '{name}' is just leaving; try again")
        finally:
            self._waiting -= 1
        self._lent += 1
        try:
            yield served
        finally:
            self._lent -= 1
            self._memory.give_back(key, revision, has_waited=has_waited)
            self._departure.set()

    async def wait_for(self, name: str, version: str | None = None) -> None:
        """Wait until what was just written to a repository, of any version if None, counts, or none has it."""
        number = None if version is None else number_of(version)
        if (version is not None and number is None) or not self._app.is_stocked(name):
            return

        until = time.monotonic() + LOOK_S
        looks: dict[Repository, int] = {}
        while not (self.offer.has(name) if number is None else number in self.offer.there(name)):
            if not looks:
                looks = {one.repository: one.repository.looks for one in self.stocked}
                self.look_soon()
            may_come = any(one.may_have(name, number, since) for one, since in looks.items())
            if not may_come or self._app.is_draining or time.monotonic() > until:
                return
            await asyncio.sleep(PAUSE_S)

    def find(self, name: str, version: str) -> Served:
        """Build a version as it is in its repository now; called in a thread, by who loads it by hand.

        Raises:
            NotFound: If there is none.
            ForebayError: If it cannot be built.
        """
        owner = self.offer.owner(name)
        number = number_of(version)
        if owner is None or number is None:
            raise NotFound(f"no repository has a version '{version[:100]}' of a model '{name[:100]}'")
        revision = owner.repository.find(name, number)
        if version != str(number):
            raise NotFound(f"the model '{name}' has no version '{version}'; did you mean '{number}'?")
        served = self._made(owner, revision, [one for key, one in [*self._memory.loaded.items()] if key[0] == name])
        self._found[served] = revision
        return served

    async def start(self) -> None:
        """Begin to look, and load what is to be there from the start."""
        self._loop = asyncio.get_running_loop()
        for one in self.stocked:
            await opened(one.repository, one.repository.poll_s or SECOND_LOOK_S, self._app.load_timeout_s)
            one.repository.watch(self._changed)
            one.repository.start()
        if not self.is_lazy:
            for name in self.offer.names:
                self._tend_soon(name)
            while self._tending:
                await asyncio.wait(self._tending.values())
        self.is_ready = True

    def stop(self) -> None:
        """Load nothing more."""
        self._is_over = True
        for task in (*self._tending.values(), *self._loading.values()):
            task.cancel()
        for one in self.stocked:
            one.repository.stop()

    def look_soon(self) -> None:
        """Have the repositories looked at now."""
        for one in self.stocked:
            one.repository.look_soon()

    def settle(self, name: str) -> None:
        """Say which version answers what names none, and let those leave that are not served.

        Weights that somebody has given hold until another version is the best one, or one of the model has left.
        """
        served = [one.number for one in self.offer.served(name)]
        best = served[0] if served and (name, served[0]) in self._memory.loaded else None
        there = self.offer.there(name)
        for key in self._memory.versions_of(name):
            number = key[1]
            if number in served:
                continue
            # Who answers goes on until another one can, unless the model is gone.
            if best is not None or not there or not self._app.versions(name).weights.get(str(number)):
                self._unload(key)
        if best is not None and self._best.get(name) != best:
            self._app.share(name, {str(best): 1})
            self._best[name] = best

    # Inside

    async def _bring(self, name: str, number: int | None) -> tuple[Key, bool]:
        """Load a version if it is not there; returns which one it is, and whether it was not."""
        has_waited = False
        while True:
            answering = self._app.served.get(name) if number is None else None
            if answering is not None:  # a successor may be on its way, or have failed
                return (name, int(answering.endpoint.config.version)), has_waited
            revision = self.offer.asked(name, number)
            key = (name, revision.number)
            if key in self._memory.loaded:
                if number is None:
                    self.settle(name)
                return key, has_waited
            failed = self.offer.refusal(revision)
            if failed is not None and time.monotonic() < failed.again_s:
                raise failed.error.with_traceback(None)
            has_waited = True
            try:
                await self._load(revision)
            except ForebayError:
                if key in self._memory.loaded:  # somebody has loaded it by hand meanwhile
                    continue
                # The next lower version may answer; what was asked for by its number may not.
                if number is not None or self.offer.refusal(revision) is None or not self.offer.served(name):
                    raise

    async def _load(self, revision: Revision) -> None:
        """Load a revision, once for all who want it."""
        key = (revision.model, revision.number)
        task = self._loading.get(key)
        if task is None:
            if self._is_over:
                raise Unavailable("the server is draining")
            task = self._loading[key] = asyncio.get_running_loop().create_task(self._load_now(key, revision))
            task.add_done_callback(lambda task: self._ended(key, task))
        await asyncio.shield(task)

    def _ended(self, key: Key, task: asyncio.Task[None]) -> None:
        self._loading.pop(key, None)
        self._admitted.discard(key)
        # Whoever waited for this load has its turn before those that wait for its room.
        task.get_loop().call_soon(self._departure.set)
        if not task.cancelled() and task.exception() is not None:  # whoever waited has it
            self._look_at_app(key[0])  # what came by hand was left to this load

    async def _load_now(self, key: Key, revision: Revision) -> None:
        name, version = revision.model, str(revision.number)
        owner = self.offer.owner(name)
        assert owner is not None
        async with self._turns:
            instead_of = await self._make_room(key, revision)
            try:
                limit_s = self._app.load_timeout_s
                make = functools.partial(self._made, owner, revision, instead_of)
                await self._app.load(name, version, make, timeout_s=limit_s, is_for_requests=True)
            except BaseException as error:
                self._memory.failed(revision)
                if not isinstance(error, ForebayError):
                    raise
                raise self._fail(key, revision, error) from error
            self._arrived(key, revision)
            self.settle(name)

    def _made(self, owner: Stocked, revision: Revision, instead_of: Sequence[Revision]) -> Served:
        """Copy a revision if need be and build its endpoint; called in a thread."""
        lease = owner.repository.fetch(revision, instead_of)

        def check() -> None:
            if not owner.repository.is_current(revision):
                msg = f"version '{revision.version}' of '{revision.model}' has changed while it was loaded"
                raise SourceChanged(msg)

        try:
            served = owner.make(revision, lease.value)
        except BaseException:
            lease.release()
            raise
        self._there[served] = revision
        served.check, served.gone = check, functools.partial(self._gone, served, lease)
        return served

    def _gone(self, served: Served, lease: Lease[Path]) -> None:
        """Note that an endpoint is no more."""
        lease.release()
        revision = self._there.pop(served)
        if served in self._held:
            self._held.discard(served)
            self._memory.left(revision)
        self._departure.set()

    async def _make_room(self, key: Key, revision: Revision) -> list[Revision]:
        """Let leave what has to for a revision, wait for it, and take a lease of the revision.

        Returns:
            What leaves once the revision is loaded.

        Raises:
            Unavailable: If all that is there is in use.
        """
        until = time.monotonic() + self._app.load_timeout_s
        in_use_until = time.monotonic() + IN_USE_S
        while True:
            name, served = revision.model, {one.number for one in self.offer.served(revision.model)}
            others = [other for other in self._memory.versions_of(name) if other[1] not in served]
            may_exceed = key in self._memory.loaded or (revision.number in served and bool(others))
            try:
                leaving = self._memory.admit(revision, may_exceed=may_exceed)
                break
            except Full:
                will_end = until if self._held or self._admitted else in_use_until if self._lent else 0.0
                if not await self._departed(will_end):
                    msg = f"there is no room for '{name}': all that is in memory is in use; try again later"
                    raise Unavailable(msg) from None
        self._admitted.add(key)
        waited = [self._ready(other) for other in leaving]
        for other in leaving:
            self._unload(other)
        try:
            while any(one in self._there for one in waited) and await self._departed(until):
                pass
        except BaseException:
            self._memory.failed(revision)
            raise
        return [self._memory.loaded[other] for other in {*others, key} if other in self._memory.loaded]

    async def _departed(self, until: float) -> bool:
        """Wait until an endpoint is gone, or a load or a request that was lent one is over; False if it is too late."""
        self._departure.clear()
        try:
            async with asyncio.timeout(until - time.monotonic()):
                await self._departure.wait()
        except TimeoutError:
            return False
        return True

    def _ready(self, key: Key) -> Served | None:
        versions = self._app.versions_of(key[0])
        return None if versions is None else versions.ready.get(str(key[1]))

    def _arrived(self, key: Key, revision: Revision) -> None:
        before = self._memory.loaded.get(key)
        if before is not None and before != revision:
            self._forget(key)
        self._memory.arrived(key, revision)
        self.offer.refusals.forget(key)
        self.offer.dismissed.pop(key, None)

    def _fail(self, key: Key, revision: Revision, error: ForebayError) -> ForebayError:
        """Note why a revision could not be loaded; returns what is told to who has asked for it."""
        self._failures += 1
        told = f"version '{revision.number}' of '{revision.model}' cannot be loaded: {failure_of(error).error.message}"
        found = Unavailable(told) if isinstance(error, Unavailable) else ModelError(told)
        refusal = self.offer.refusals.refuse(key, revision, found, time.monotonic())
        others = self._memory.versions_of(revision.model)
        then = "the served version stays" if others else "no version of it is served"
        log.log(logging.WARNING if refusal.is_new else logging.DEBUG, "%s; %s", told, then)
        is_wanted = not self.is_lazy or others
        if self._loop is not None and is_wanted:
            self._tend_at(refusal.again_s, revision.model)
        if revision.number not in self.offer.there(revision.model):  # it was removed while it was loaded
            self._forget_gone()
        return found

    def _tend_at(self, when_s: float, name: str) -> None:
        """Look after a model at a time and not before it: a timer may be early, by the age of the loop's own clock."""
        assert self._loop is not None
        left_s = when_s - time.monotonic()
        if left_s > 0:
            self._loop.call_later(left_s, self._tend_at, when_s, name)
        else:
            self._tend_soon(name)

    def _unload(self, key: Key) -> None:
        served = self._ready(key)
        self._best.pop(key[0], None)
        self._forget(key)

        async def leave() -> None:
            with contextlib.suppress(NotFound, Unavailable):  # it has left already, or all of it ends
                await self._app.unload(key[0], str(key[1]), served)

        task = asyncio.get_running_loop().create_task(leave())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _forget(self, key: Key) -> Revision:
        """Give a version to nobody any more; its endpoint counts until it is gone."""
        revision = self._memory.loaded[key]
        there = list(self._there.items())  # threads that build others add them meanwhile
        leaving = [served for served, one in there if one.id == revision.id and served not in self._held]
        self._held.update(served for served in leaving if self._memory.take(revision))
        return self._memory.forget(key)

    def _changed(self) -> None:
        """Hear of a look that has changed something, in the thread of a repository."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
            self._loop.call_soon_threadsafe(self._tend_all)

    def _forget_gone(self) -> None:
        self.offer.keep_only_what_is_there()
        self._app.forget_failed(lambda name: [str(one) for one in self.offer.there(name)], is_stocked=True)

    def _tend_all(self) -> None:
        self._forget_gone()
        names = [name for name, _ in self._memory.loaded]
        for name in dict.fromkeys(names if self.is_lazy else [*names, *self.offer.names]):
            self._tend_soon(name)

    def _tend_soon(self, name: str) -> None:
        if self._is_over:
            return
        if name in self._tending:
            self._tend_again.add(name)
            return
        assert self._loop is not None
        task = self._tending[name] = self._loop.create_task(self._tend(name))
        task.add_done_callback(lambda task: self._tended(name, task))

    def _tended(self, name: str, task: asyncio.Task[None]) -> None:
        self._tending.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cannot update model '%s'", name, exc_info=error)
        if name in self._tend_again:
            self._tend_again.discard(name)
            self._tend_soon(name)

    async def _tend(self, name: str) -> None:
        """Bring what is loaded of a model to what is there."""
        for revision in self._missing(name):
            with contextlib.suppress(ForebayError):  # it is told where it happens
                await self._load(revision)
        self.settle(name)

    def _missing(self, name: str) -> Iterator[Revision]:
        """Return what is to be loaded of a model, one after the other, until nothing is."""
        tried: set[str] = set()
        while True:
            chosen = self.offer.served(name, tries=True)
            is_there = bool(self._memory.versions_of(name))
            for revision in chosen:
                loaded = self._memory.loaded.get((name, revision.number))
                if revision.id in tried or loaded == revision or self.offer.is_resting(revision):
                    continue
                if not self.is_lazy or loaded is not None or (is_there and revision is chosen[0]):
                    tried.add(revision.id)
                    yield revision
                    break
            else:
                return

    def _look_at_app(self, name: str) -> None:
        """Take up which versions of a model were loaded or unloaded by hand."""
        for key in self._memory.versions_of(name):
            if self._ready(key) is None:
                self._best.pop(name, None)
                self.offer.dismissed[key] = self._forget(key)
        versions = self._app.versions_of(name)
        for served in () if versions is None else versions.ready.values():
            revision = self._found.get(served)
            if revision is None or (key := (name, revision.number)) in self._loading:
                continue
            del self._found[served]
            if self._memory.loaded.get(key) != revision:
                self.offer.recall(*key)
                for other in self._memory.admit(revision, may_exceed=True):
                    self._unload(other)
                self._arrived(key, revision)
                asyncio.get_running_loop().call_soon(self.settle, name)


async def opened(repository: Repository, pause_s: float, timeout_s: float) -> None:
    """Look at a source that could not be asked before, until it can be; a look may take so long."""
    while not repository.is_open:
        log.warning("%s; retrying in %g s, no model is served until then", repository.problem, pause_s)
        await asyncio.sleep(pause_s)
        with contextlib.suppress(ForebayError):  # it is the repository's problem
            await beside(repository.open, time.monotonic() + timeout_s, repository.place)
