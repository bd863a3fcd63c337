# SPDX-License-Identifier: Apache-2.0
"""All graphs and models of a project, loaded each for itself: what fails is told, and the others answer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec

from forebay.errors import ForebayError, NotFound
from forebay.repository.retries import MAX_PAUSE_S
from forebay.runtimes.trial import SharedFile, TrialLimits
from forebay.server.app import App
from forebay.server.served import Served
from forebay.server.stock_offer import FIRST_PAUSE_S
from forebay.surfaces.contract import Options
from forebay.surfaces.ovms.config import GraphEntry, OvmsConfig
from forebay.surfaces.ovms.graph_calls import VERSION
from forebay.surfaces.ovms.graphs import serve_graph
from forebay.surfaces.ovms.model_nodes import SharedModels
from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels

if TYPE_CHECKING:
    from forebay.runtimes.library import OpenVinoOptions
    from forebay.server.config import Overrides

ServeFile: TypeAlias = "Callable[[Path, Overrides, SharedFile | None, OpenVinoOptions], Served]"
"""Serves a model file under the name and version that are said, as one that is in memory, if there is one."""

ANY_VERSION: Final = "0"
"""What the original takes for no version at all."""

log = logging.getLogger("forebay")


class OvmsApp(App):
    """An app whose graphs and models are loaded when it starts, and again when their files change."""

    def __init__(self, config: OvmsConfig, options: Options, serve_file: ServeFile, stored: StoredModels) -> None:
        super().__init__([])
        self.config = config
        self.stored = stored
        """The buckets that models are copied from."""
        self.refused: dict[ModelEntry, float] = {}
        """Versions in buckets that could not be copied, and how many seconds each rests before it is tried again."""
        self.problem = "; ".join(config.problems)
        self.load_timeout_s = options.load_timeout_s
        self._overrides = options.overrides
        self._runs_here = "worker_kind" not in options.given
        self.source = self._built
        self._serve_file = serve_file
        self._in_memory = SharedModels(
            stored, TrialLimits(options.overrides.trial_s, options.overrides.max_trial_bytes)
        )
        self._servables: dict[str, frozenset[str]] = {}
        self._has_started = False
        self.retired: dict[str, dict[str, None]] = {}
        """Versions that the configuration named once, by the names of models."""

    async def start(self) -> None:
        """Load everything; the server answers even if something cannot be loaded."""
        await super().start()
        await asyncio.gather(
            *(self.load_graph(one) for one in self.config.graphs), self.load_models(self.config.models)
        )
        self._has_started = True

    def begin_drain(self) -> None:
        """Say that no more is to come, from buckets either."""
        super().begin_drain()
        self.stored.stop()

    async def load_graph(self, entry: GraphEntry) -> list[str]:
        """Load a graph, or say why it cannot be."""
        return await self._try(f"graph '{entry.name}'", entry.name, VERSION, lambda: self._graph(entry))

    async def load_models(self, entries: tuple[ModelEntry, ...]) -> list[str]:
        """Load models, or say why they cannot be; the newest version answers what names none."""
        errors: list[str] = []
        for entry in sorted(entries, key=lambda one: -int(one.version)):
            what = f"version {entry.version} of model '{entry.name}'"
            failed = await self._try(what, entry.name, entry.version, functools.partial(self._model, entry))
            pause_s = self.refused.pop(entry, 0.0)
            if failed and not self.stored.has(entry):
                self.refused[entry] = min(pause_s * 2, MAX_PAUSE_S) or FIRST_PAUSE_S
            errors += failed
        for name in dict.fromkeys(one.name for one in entries):
            if name in self.ready:
                self.share(name, {max(self.versions(name).ready, key=int): 1})
        return errors

    async def leave_unnamed(self) -> bool:
        """Let go of what the configuration names no longer; returns whether there was any.

        A version stays while none of those that it names instead is ready.
        """
        wanted = {(one.name, one.version) for one in self.config.models} | {
            (one.name, VERSION) for one in self.config.graphs
        }
        names = {name for name, _ in wanted}
        gone: list[tuple[str, str]] = []
        for name, versions in self.ready.items():
            left = [version for version in versions.ready if (name, version) in wanted]
            if left or name not in names:
                gone += [(name, version) for version in versions.ready if version not in left]
            if left and not set(left) & versions.weights.keys():
                self.share(name, {max(left, key=int): 1})
        failed = [
            (model["name"], one["version"])
            for model in self.describe_all()
            for one in model["versions"]
            if one["state"] == "failed" and (model["name"], one["version"]) not in wanted
        ]
        for name, version in gone:
            await self.unload(name, version)
        self.forget_failed(lambda name: [version for one, version in wanted if one == name])
        for name, version in (*gone, *failed):
            self.retired.setdefault(name, {})[version] = None
        return bool(gone or failed)

    def uses(self, graph: GraphEntry, models: Collection[str]) -> bool:
        """Tell whether a graph was built with sessions of one of these models, or wants one that was not there."""
        return not self._servables.get(graph.name, frozenset()).isdisjoint(models)

    def problems(self) -> list[str]:
        """Return why the server is not ready: once all was tried, it is."""
        if self.is_draining:
            return super().problems()
        return [] if self._has_started else ["graphs and models are being loaded"]

    async def _try(self, what: str, name: str, version: str, make: Callable[[], Served]) -> list[str]:
        self.retired.get(name, {}).pop(version, None)
        try:
            await self.load(name, version, make, timeout_s=self.load_timeout_s)
        except ForebayError as error:
            told = {"trace": error.trace}
            goes_on = name in self.ready and version in self.ready[name].ready
            text = f"{what} {'cannot be reloaded, it stays unchanged' if goes_on else 'is not available'}"
            log.error("%s: %s", text, error.message, extra=told)  # noqa: TRY400 - with its own trace
            return [f"{text}: {error.message}"]
        return []

    def _graph(self, entry: GraphEntry) -> Served:
        made = serve_graph(entry, self.config.models, self._in_memory, self._overrides)
        self._servables[entry.name] = frozenset(one.servable for one in made.layout.inference.values())
        return made.served

    def _model(self, entry: ModelEntry) -> Served:
        """Build a version of a model, which is copied here if need be and stays here as long as it is served."""
        here = self.stored.fetch(entry, self.config.models)
        try:
            served = self._model_here(here.value)
        except BaseException:
            here.release()
            raise
        served.gone, served.any_version = here.release, ANY_VERSION
        return served

    def _model_here(self, entry: ModelEntry) -> Served:
        devices = (entry.device,) if entry.device else ()
        overrides = msgspec.structs.replace(
            self._overrides, name=entry.name, version=entry.version, devices=self._overrides.devices or devices
        )
        if not self._runs_here:
            return self._serve_file(entry.path, overrides, None, entry.options)
        threads = max(overrides.threads, entry.options.requests)
        overrides = msgspec.structs.replace(overrides, worker_kind="thread", threads=threads)
        return self._serve_file(entry.path, overrides, self._in_memory.of(entry), entry.options)

    def _built(self, name: str, version: str) -> Served:
        """Build a graph or a version of a model that the configuration names; raises NotFound if it names none."""
        graphs = {one.name: one for one in self.config.graphs}
        models = {(one.name, one.version): one for one in self.config.models}
        if name in graphs:
            return self._graph(graphs[name])
        if (name, version) in models:
            return self._model(models[name, version])
        raise NotFound(f"the configuration names no '{name[:100]}' with a version '{version[:100]}'")
