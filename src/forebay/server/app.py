# SPDX-License-Identifier: Apache-2.0
"""Everything one server answers with, and its one lifecycle: start, ready, drain.

Theory of operation. Under a name answer one or more versions, each an endpoint. While the app runs they come and go:
a version is built in a thread, its workers load, and only then, in one step between two turns of the loop, does it
take its place; those who listen (`watch`) look everything up anew in the same step. The one it replaces accepts
nothing from then on and ends with its last request. Whatever goes wrong before that step leaves all as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from forebay.errors import ConfigError, NotFound, Unavailable, UnknownModel
from forebay.server.byte_budget import ByteBudget
from forebay.server.links import Links
from forebay.server.model_facts import facts_of
from forebay.server.model_index import ModelIndex
from forebay.server.version_loading import bring_up
from forebay.server.versions import Version, Versions
from forebay.types.did_you_mean import listed, nearest
from forebay.types.failures import failure_of
from forebay.types.server_state import ServerState

if TYPE_CHECKING:
    from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
    from forebay.server.cost_log import CostLog
    from forebay.server.served import Served
    from forebay.server.shared_regions import SharedRegions
    from forebay.server.stock import Stock
    from forebay.serving.endpoint import Endpoint
    from forebay.workers.wire.worker_listener import WorkerListener

log = logging.getLogger("forebay")

LOADING_TOLD_S: Final = 10.0
LOAD_S: Final = 300.0
"""Time that a version which is loaded while the server runs has to become ready, if nobody says."""

_BELOW: Final = frozenset({"config", "labels", "metadata", "ready", "stats", "trace", "versions", "weights"}) | {
    *("generate", "generate_stream", "infer", "load", "unload")
}
"""What follows the name of a model in the paths of protocols."""


class ClientCounting(Protocol):
    """Counts the requests of clients where other processes take them."""

    async def refresh(self) -> None:
        """Find out how many there were."""
        ...

    def of(self, endpoint: Endpoint) -> EndpointMetrics:
        """Return the numbers of an endpoint with what was found out."""
        ...


class App:
    """The endpoints of a server by name."""

    def __init__(self, served: Sequence[Served]) -> None:
        """Register endpoints.

        Raises:
            ConfigError: If two have the same name and version, or names that clash.
        """
        self._models: dict[str, Versions] = {}
        self._above: set[str] = set()
        """What names with a slash begin with, also those of models that have left."""
        self._served: dict[str, Served] = {}
        self._on_change: list[Callable[[str], None]] = []
        self._changes: set[asyncio.Task[None]] = set()
        self._unneeded: set[asyncio.Task[None]] = set()
        """Changes that end as soon as the server drains: no request to a model waits for them."""
        self._locks: dict[str, asyncio.Lock] = {}
        self.door: WorkerListener | None = None
        """Where workers attach, and with them endpoints; opened and closed with the app."""
        self.links: list[Links] = []
        """Connections with other servers; opened and closed with the app."""
        self.cost_log: CostLog | None = None
        """Where it is written what tenants cost; None if nowhere."""
        self.cluster: Callable[[bool], Awaitable[dict[str, Any]]] | None = None
        """Tells the dashboard of nodes and programs, all of it or what strangers may know; None for a server alone."""
        self.owned: dict[str, str] = {}
        """Names of models that other servers serve, each with the address of that server; no other may take them."""
        self.clients: ClientCounting | None = None
        """Counts the requests that fronts of the same node process take; None if there are no fronts."""
        self.stock: Stock | None = None
        """Models of repositories, which are loaded when they are asked for; started and stopped with the app."""
        self.on_left: Callable[[], None] = lambda: None
        """Called when a version has left, and its memory can be free."""
        self.source: Callable[[str, str], Served] | None = None
        """Builds a version of a model as the project says by now, for who has no other factory; called in a thread."""
        self.load_timeout_s = LOAD_S
        self.model_index = ModelIndex(self)
        """What there is, and what may be loaded and unloaded."""
        self.shared_regions: SharedRegions | None = None
        """Shared memory that clients have named; None if they may not."""
        self.byte_budget = ByteBudget()
        """What requests and their unsent answers may take in memory, of all ports together."""
        self.labels: dict[str, dict[str, str]] = {}
        """Names that whoever manages the server gave to versions, by model; for clients of TensorFlow Serving."""
        self.has_others = False
        """Whether there may be models that only another server knows, which a front forwards requests to."""
        self.problem = ""
        """Why the project could not be read anew, though it should have been."""
        for one in served:
            (self._models.get(one.endpoint.name) or self._begin(one.endpoint.name)).add(one)
        for name, versions in self._models.items():
            versions.settle()
            if (default := versions.default) is not None:
                self._served[name] = default
        self.state = ServerState()
        """What its ports and workers share, and no other server in this process."""
        self.is_live = True
        self.is_draining = False
        self.started_s = 0.0

    @property
    def served(self) -> Mapping[str, Served]:
        """The default version of every model, by name."""
        return self._served

    @property
    def every(self) -> Iterator[Served]:
        """All versions of all models that answer."""
        for versions in self._models.values():
            yield from versions.ready.values()

    @property
    def only(self) -> Served | None:
        """The endpoint, if there is just one model: it also answers without its name."""
        if (
            self.has_others
            or len(self._served) != 1
            or (self.stock is not None and self.stock.offer.has_others(next(iter(self._served))))
        ):
            return None
        return next(iter(self._served.values()))

    @property
    def ready(self) -> Mapping[str, Versions]:
        """The models of which a version answers, by name."""
        return {name: versions for name, versions in self._models.items() if versions.ready}

    def is_shared(self, served: Served) -> bool:
        """Tell whether a version answers requests that name none."""
        config = served.endpoint.config
        return config.version in self._models[config.name].weights

    def versions(self, name: str) -> Versions:
        """Return the versions of a model that is served; raises a `NotFound` naming the nearest name there is."""
        found = self.versions_of(name)
        if found is None:
            self.find(name)  # says so
            raise NotFound(f"no version of the model '{name[:100]}' is loaded")
        return found

    def versions_of(self, name: str) -> Versions | None:
        """Return the versions of a model; None if none of them answers."""
        found = self._models.get(name)
        return found if found is not None and found.ready else None

    def is_stocked(self, name: str) -> bool:
        """Tell whether a name belongs to a repository, or to nobody."""
        found = self._models.get(name)
        return found is None or found.is_stocked

    def is_loading(self, name: str) -> bool:
        """Tell whether a version of a model is being loaded."""
        return name in self._models and any(one.state == "loading" for one in self._models[name].all)

    def split_name(self, path: Sequence[str]) -> tuple[str, list[str]]:
        """Return the model that the segments of a path begin with, and the rest; a name with a slash is two of them."""
        both = "/".join(path[:2])
        is_both = self._is_known(both) or not (self._is_known(path[0]) or _BELOW.issuperset(path[1:2]))
        size = 2 if is_both else 1
        return "/".join(path[:size]), [*path[size:]]

    def clash(self, name: str) -> str:
        """Return why a model may not be called so beside those that are here; empty if it may."""
        above, slash, _ = name.partition("/")
        other = above if slash and above in self._models else None
        if name in self._above:
            other = next((one for one in self._models if one.startswith(f"{name}/")), None)
        if other is None:
            return ""
        both = f"models '{above}' and '{max(name, other, key=len)}' cannot be served together"
        return f"{both}: paths and nodes of '{above}' begin with '{above}/' too; give one of them another `name`"

    def watch(self, on_change: Callable[[str], None]) -> None:
        """Call this with the name whenever an endpoint joins, leaves or is replaced while the app runs."""
        self._on_change.append(on_change)

    def put(self, served: Served) -> Served | None:
        """Let an endpoint join while the app runs; returns the one whose place it takes, if there was one."""
        name = served.endpoint.name
        replaced = self._served.get(name)
        versions = self._begin(name)
        versions.add(served)
        versions.settle()
        self._changed(name)
        return replaced

    def find(self, name: str) -> Served:
        """Return an endpoint: the default version of a model.

        Raises:
            NotFound: Naming the nearest name there is.
            Unavailable: If there is one of that name, which could not be loaded or is being loaded.
        """
        found = self._served.get(name)
        if found is not None:
            return found
        if name in self._models and (why_none := self._models[name].why_none):
            raise Unavailable(why_none)
        model, rest = self.split_name(name.split("/", 2))
        if rest and model in self._served:
            path = "/".join(rest)
            paths = [one for one in self._served[model].contracts if one]
            also = f" and at {', '.join(paths)}" if paths else ""
            raise NotFound(f"the model '{model}' does not answer at /{path[:100]}, but at its own path{also}")
        if self.stock is not None and self.stock.offer.has(name):
            which = "" if self.versions_of(name) is None else " that answers what names none"
            raise NotFound(f"no version of the model '{name}' is loaded{which}")
        names = list(dict.fromkeys([*self._served, *(() if self.stock is None else self.stock.offer.names)]))
        hint = nearest(name, names)
        did_you_mean = f"; did you mean '{hint}'?" if hint else f"; there is {listed(names[:10]) or 'none yet'}"
        raise UnknownModel(f"there is no model '{name[:100]}'{did_you_mean}")

    async def load(
        self,
        name: str,
        version: str,
        make: Callable[[], Served],
        *,
        timeout_s: float = LOAD_S,
        is_for_requests: bool = False,
    ) -> None:
        """Load a version beside those that answer, and let it answer once it is ready.

        One of the same name and version is replaced, and its weight passes on. The first version of a name answers
        requests that name none; a further one has no weight until `share` gives it some. Loading goes on even if the
        caller stops waiting.

        Args:
            make: Builds its endpoint, in a thread; what it raises goes through.
            timeout_s: How long all of it may take.
            is_for_requests: Whether requests wait for it, which a drain lets end.

        Raises:
            ForebayError: Why it could not be loaded; all is as it was, and `/models` tells the reason.
        """
        work = self._load(name, version, make, time.monotonic() + timeout_s)
        await self._change(name, work, is_for_requests=is_for_requests)

    async def load_all(self, name: str, makers: Mapping[str, Callable[[], Served]], *, timeout_s: float) -> None:
        """Load these versions of a model one after the other, with no other change of it between them.

        Args:
            makers: What builds each of them.
            timeout_s: How long each may take.

        Raises:
            ForebayError: As `load`; those before are loaded.
        """

        async def work() -> None:
            for version, make in makers.items():
                await self._load(name, version, make, time.monotonic() + timeout_s)
            self.model_index.unloaded.pop(name, None)

        await self._change(name, work())

    async def unload(self, name: str, version: str, served: Served | None = None) -> None:
        """Let a version answer what it has accepted and leave; returns when it accepts nothing more.

        Args:
            served: Only if it is this that answers; another one may have taken its place meanwhile.

        Raises:
            NotFound: If there is no such version.
            InvalidRequest: If it is the one that answers what names no version, and others are left.
        """
        await self._change(name, self._unload(name, version, served))

    async def unload_all(self, name: str) -> None:
        """Let all versions of a model leave, in one step; the index goes on telling of them.

        Raises:
            NotFound: If none of them answers.
        """

        async def work() -> None:
            versions = self.versions(name)
            self.model_index.unloaded[name] = [*versions.ready]
            heavy = versions.weights
            leaving = [versions.dismiss(one) for one in sorted(versions.ready, key=lambda one: heavy.get(one, 0))]
            self._changed(name)
            for one in leaving:
                self._run(self._leave(versions, one))

        await self._change(name, work())

    async def swap(self, name: str, version: str, make: Callable[[], Served], *, timeout_s: float = LOAD_S) -> None:
        """Load a version; once it is ready it takes the place of those that answer requests without a version.

        Raises:
            ForebayError: As `load`.
        """

        async def work() -> None:
            before = list(self._models[name].weights) if name in self._models else []
            await self._load(name, version, make, time.monotonic() + timeout_s)
            if self.stock is not None:
                self.stock.offer.prefer(name, version)
            self.share(name, {version: 1})
            for other in before:
                if other != version:
                    await self._unload(name, other)

        await self._change(name, work())

    def share(self, name: str, weights: Mapping[str, int]) -> None:
        """Say which versions answer requests that name none, and in which proportions; one alone is the default.

        Raises:
            NotFound: If the model or a version is not there.
            InvalidRequest: If nobody would answer.
        """
        versions = self.versions(name)
        if weights != versions.weights:
            versions.share(weights)
            self._changed(name)

    def label(self, name: str, labels: Mapping[str, str]) -> None:
        """Give versions of a model these labels beside their own names, and remove all others."""
        self.labels[name] = dict(labels)
        if name in self._models:
            self._changed(name)

    def failed(self, name: str, version: str, reason: str) -> None:
        """Note why a version could not even be built, for `/models`."""
        if name in self._models:
            attempt = self._models[name].begin(version)
            attempt.state, attempt.error = "failed", reason

    def forget_failed(self, wanted: Callable[[str], Collection[str]], *, is_stocked: bool = False) -> None:
        """Forget what could not be loaded and is not wanted any more.

        Args:
            wanted: Returns the versions of a model.
            is_stocked: Whether it is about the models of repositories, or about all others.
        """
        for name, versions in list(self._models.items()):
            if versions.is_stocked is is_stocked:
                for one in list(versions.all):
                    if one.state == "failed" and one.name not in wanted(name):
                        self._forget(versions, one)

    async def start(self) -> None:
        """Bring up every endpoint.

        Raises:
            ModelError: If a model could not be loaded; what was started is stopped again.
            ConfigError: If the door for workers cannot be opened.
        """
        started = time.monotonic()
        with self.state.entered():
            await self._start()
        self.started_s = time.monotonic() - started

    async def _start(self) -> None:
        if self.door is not None:
            await self.door.start()
        endpoints = [one.endpoint for one in self.every]
        telling = asyncio.create_task(self._tell_what_loads())
        try:
            async with asyncio.TaskGroup() as group:
                for endpoint in endpoints:
                    group.create_task(endpoint.start())
        except BaseExceptionGroup as errors:
            await self.drain(0.0)
            raise errors.exceptions[0] from None
        finally:
            telling.cancel()
        if self.stock is not None:
            await self.stock.start()
        for links in self.links:
            await links.start()

    async def _tell_what_loads(self) -> None:
        """Say now and then what the start waits for, so that a long load is no silence."""
        while True:
            await asyncio.sleep(LOADING_TOLD_S)
            log.info("not ready yet: %s", ", ".join(self.problems()))

    def begin_drain(self) -> None:
        """Say that no more is to come: the server is not ready any more, and no batch waits for company."""
        self.is_draining = True
        while self._unneeded:  # whoever waits for it holds up the drain
            self._unneeded.pop().cancel()
        for one in self._all():
            for endpoint in (one.endpoint, *one.nodes.values()):
                endpoint.hasten()

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, let open ones end within `grace_s`, stop the workers."""
        self.begin_drain()
        if self.door is not None:
            self.door.close()
        for links in self.links:
            links.leave()
        if self.stock is not None:
            self.stock.stop()
        changes = list(self._changes)
        for change in changes:  # what is being loaded is not wanted any more, and what is leaving is drained below
            if not change.cancelling():  # it is ending its workers
                change.cancel()
        if changes:
            await asyncio.wait(changes)
        ending = list(self._all())
        drains = [one.endpoint.drain(grace_s) for one in ending]
        for one, problem in zip(ending, await asyncio.gather(*drains, return_exceptions=True), strict=True):
            if isinstance(problem, Exception):  # the others are to end all the same
                log.error("model '%s' failed to stop", one.endpoint.name, exc_info=problem)
        for links in self.links:
            links.stop()
        if self.door is not None:
            self.door.stop()

    def problems(self) -> list[str]:
        """Return why the server is not ready; empty if it is: that others are away counts once nothing can answer."""
        if self.is_draining:
            return ["the server is draining"]
        found: list[str] = [] if self.stock is None else self.stock.problems()
        away = [problem for links in self.links for problem in links.problems()]
        if self.stock is None and not self._served and not found and not away:
            found = ["no model is served yet: none of its workers has attached"]
        for name, versions in self._models.items():
            for version, one in versions.ready.items():
                told = away if one.is_elsewhere else found
                called = f"model '{name}'" if len(versions.ready) == 1 else f"version '{version}' of model '{name}'"
                if not one.endpoint.accepting:
                    told.append(f"{called} is loading")
                elif dead := [
                    node for node, endpoint in one.nodes.items() if not endpoint.pool.statistics().can_answer
                ]:
                    told += [f"{called}: its node '{node}' {_lacks(one.nodes[node])}" for node in dead]
                elif not one.endpoint.pool.statistics().can_answer:
                    told.append(f"{called} {_lacks(one.endpoint)}")
        can_answer = any(one.endpoint.accepting and one.endpoint.pool.statistics().can_answer for one in self.every)
        return found if can_answer else found + away

    def describe(self, name: str, version: str | None = None) -> dict[str, Any]:
        """Return what `/models/{name}` tells: settings, the batch sizes that happen, and its versions.

        Raises:
            NotFound: If there is no such model, or no such version of it.
        """
        if version is None and name not in self._served and self.stock is not None and self.stock.offer.has(name):
            return {"name": name, "ready": False, "versions": self.describe_versions(name)}
        versions = self.versions(name)
        one = self.find(name) if version is None else versions.ready.get(version)
        if one is None:
            raise versions.unknown(version or "")
        facts = facts_of(one)
        if version is None:
            facts["versions"] = self.describe_versions(name)
        return facts

    def describe_versions(self, name: str) -> list[dict[str, Any]]:
        """Return where the versions of a model are, also of one that is not served any more."""
        found = [one.describe() for one in self._models[name].all] if name in self._models else []
        if self.stock is None:
            return found
        stocked = {one["version"]: one for one in self.stock.describe_versions(name)}
        for one in found:
            more = stocked.pop(one["version"], {})
            if one["state"] == "loading" and "progress" in more:
                one["progress"] = more["progress"]
        return [*found, *stocked.values()]

    def describe_all(self) -> list[dict[str, Any]]:
        """Return what `/models` tells of every model, also of those of which no version could be loaded."""
        return [*self.describe_each()]

    def describe_each(self) -> Iterator[dict[str, Any]]:
        """Yield the same one by one; models may come and go meanwhile."""
        others = {*self._models, *(() if self.stock is None else self.stock.offer.names)} - self._served.keys()
        for name in self._served:  # another mapping after each change
            if name in self._served:
                yield self.describe(name)
        for name in sorted(others):
            yield {"name": name, "ready": False, "versions": self.describe_versions(name)}

    def _is_known(self, name: str) -> bool:
        is_stocked = self.stock is not None and self.stock.offer.has(name)
        return is_stocked or name in self._models or name in self.model_index.unloaded

    def _all(self) -> Iterator[Served]:
        """Yield everything that has an endpoint, including versions that are being loaded or are leaving."""
        for versions in self._models.values():
            for one in versions.all:
                if one.served is not None:
                    yield one.served

    def _begin(self, name: str) -> Versions:
        """Have a model of which no version is there yet; raises a `ConfigError` if its name clashes."""
        if why := self.clash(name):
            raise ConfigError(why)
        above, slash, _ = name.partition("/")
        self._above.update([above] if slash else ())
        versions = self._models[name] = Versions(name)
        return versions

    def _settle(self, name: str) -> None:
        default = self._models[name].default
        served = {**self._served}  # somebody may be going through the one before
        if default is None:
            served.pop(name, None)
        else:
            served[name] = default
        self._served = served

    def _changed(self, name: str) -> None:
        self._settle(name)
        for on_change in self._on_change:
            on_change(name)

    async def _change(self, name: str, work: Coroutine[Any, Any, None], *, is_for_requests: bool = False) -> None:
        """Change the versions of a name, one change at a time.

        Raises:
            Unavailable: If the server is draining, or begins to meanwhile.
        """

        async def alone() -> None:
            try:
                async with self._locks.setdefault(name, asyncio.Lock()):
                    await work
            finally:
                work.close()

        if self.is_draining:
            work.close()
            raise Unavailable("the server is draining")
        change = self._run(alone())
        if not is_for_requests:
            self._unneeded.add(change)
            change.add_done_callback(self._unneeded.discard)
        await asyncio.wait((change,))  # goes on if the caller is cancelled
        if change.cancelled() and self.is_draining:
            raise Unavailable("the server is draining")
        change.result()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            self._changes.discard(task)
            if not task.cancelled():
                task.exception()  # whoever waited has it

        task = asyncio.get_running_loop().create_task(work)
        self._changes.add(task)
        task.add_done_callback(ended)
        return task

    async def _load(self, name: str, version: str, make: Callable[[], Served], until: float) -> None:
        versions = self._models.get(name) or self._begin(name)
        versions.is_stocked |= self.stock is not None and self.stock.offer.has(name)
        attempt = versions.begin(version)
        try:
            with self.state.entered():
                await bring_up(versions, attempt, make, until, self.owned.get(name))
        except BaseException as error:
            if attempt.served is not None:
                await attempt.served.endpoint.drain(0.0)
                attempt.served.gone()
                attempt.served = None
            attempt.state = "failed"
            attempt.error = failure_of(error).error.message
            if isinstance(error, NotFound) or not isinstance(error, Exception):  # nobody has it, or the server ends
                self._forget(versions, attempt)
            raise
        before = versions.take(attempt)
        self._changed(name)
        log.info("model '%s': version '%s' is ready", name, version)
        if before is not None:
            self._run(self._leave(versions, before))

    async def _unload(self, name: str, version: str, served: Served | None = None) -> None:
        versions = self.versions(name)
        if served is not None and versions.ready.get(version) is not served:
            return
        leaving = versions.dismiss(version)
        self._changed(name)
        self._run(self._leave(versions, leaving))

    async def _leave(self, versions: Versions, leaving: Version) -> None:
        """Answer what was accepted; each request has a deadline."""
        assert leaving.served is not None
        try:
            await leaving.served.endpoint.drain(None)
        except Exception:
            log.exception("version '%s' of '%s' failed to stop", leaving.name, versions.model)
        leaving.served.gone()
        self._forget(versions, leaving)
        self.on_left()

    def _forget(self, versions: Versions, one: Version) -> None:
        versions.all.remove(one)
        if not versions.all and self._models.get(versions.model) is versions:
            del self._models[versions.model]


def _lacks(endpoint: Endpoint) -> str:
    pool = endpoint.pool.statistics()
    return f"has no {'healthy ' if pool.alive else ''}worker{pool.problem and f': {pool.problem}'}"
