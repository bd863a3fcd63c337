# SPDX-License-Identifier: Apache-2.0
"""Reading a project anew while it is served: when its files change, on SIGHUP, when somebody asks.

What changed is loaded beside what is in use and takes its place once it is ready, so nothing is refused meanwhile. What
fails is told in the log and at `/models`, and what was in use goes on. A configuration that cannot be read changes
nothing at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.surfaces.ovms.config import read_target

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.surfaces.ovms.app import OvmsApp
    from forebay.surfaces.ovms.config import GraphEntry, OvmsConfig

log = logging.getLogger("forebay")

LOOK_S: Final = 1.0
"""Pause between two looks at the files; an edit counts once two looks in a row have found the same."""

_Seen = dict[str, tuple[int, int]]


class GraphReloading:
    """Keeps an app as its files say."""

    def __init__(self, app: OvmsApp, target: Path, name: str | None) -> None:
        """Describe it.

        Args:
            app: What is kept.
            target: What was named on the command line.
            name: What a single graph is called.
        """
        self._app = app
        self._target = target
        self._name = name
        self._lock = asyncio.Lock()
        self._used = self._files(app.config)
        self._task: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[bool] | None = None

    def watch(self) -> None:
        """Begin to look at the files; called on the loop once all is ready."""
        self._task = asyncio.get_running_loop().create_task(self._watch())

    def end(self) -> None:
        """Look no more."""
        if self._task is not None:
            self._task.cancel()

    def ask(self) -> None:
        """Have all that changed read anew, soon."""
        self._asking = asyncio.get_running_loop().create_task(self.reload())

    async def reload(self) -> bool:
        """Read what changed anew; returns whether anything had.

        Raises nothing: what fails is told.
        """
        async with self._lock:
            return await self._reload()

    async def _watch(self) -> None:
        before = self._used
        while True:
            await asyncio.sleep(LOOK_S)
            found = await asyncio.to_thread(self._files, self._app.config)
            if found == before != self._used:
                await self.reload()
                found = self._used
            before = found

    async def _reload(self) -> bool:
        app, old = self._app, self._app.config
        try:
            config = await asyncio.to_thread(read_target, self._target, self._name)
        except ConfigError as error:
            self._used = await asyncio.to_thread(self._files, old)
            is_news, app.problem = app.problem != error.message, error.message
            if is_news:
                log.error("the project cannot be read anew, and goes on as it was: %s", error.message)  # noqa: TRY400
            return is_news
        app.problem = ""
        before, self._used = self._used, await asyncio.to_thread(self._files, config)
        app.config = config
        changed = {one for one in before.keys() | self._used.keys() if before.get(one) != self._used.get(one)}
        graphs = {one.name: one for one in old.graphs}
        fresh = [
            one for one in config.graphs if graphs.get(one.name) != one or any(_concerns(file, one) for file in changed)
        ]
        models = {(one.name, one.version): one for one in old.models}
        wanted = {(one.name, one.version) for one in config.models} | {(one.name, "1") for one in config.graphs}
        added = tuple(
            one
            for one in config.models
            if models.get((one.name, one.version)) != one or any(Path(file) == one.path for file in changed)
        )
        if added or old.models != config.models:
            fresh = [*config.graphs]  # their sessions may be others now
        await asyncio.gather(*(app.load_graph(one) for one in fresh), app.load_models(added))
        gone = [
            (one.endpoint.name, one.endpoint.config.version)
            for one in app.every
            if (one.endpoint.name, one.endpoint.config.version) not in wanted
        ]
        for name, version in gone:
            heavy = app.versions(name)
            if list(heavy.weights) == [version] and len(heavy.ready) > 1:
                app.share(name, {next(other for other in heavy.ready if (name, other) not in gone): 1})
            await app.unload(name, version)
        return bool(fresh or added or gone)

    def _files(self, config: OvmsConfig) -> _Seen:
        """Return what is seen of all files that matter."""
        target = self._target
        files = [target / "config.json" if target.is_dir() else target]
        for graph in config.graphs:
            files += _of_graph(graph)
        files += [one.path for one in config.models]
        files += [one.path.with_suffix(".bin") for one in config.models if one.path.suffix == ".xml"]
        seen: _Seen = {}
        for file in files:
            with contextlib.suppress(OSError):
                about = file.stat()
                seen[str(file)] = about.st_size, about.st_mtime_ns
        return seen


def _of_graph(graph: GraphEntry) -> Iterator[Path]:
    """Return the files of a graph: its own, and all Python files in its folder."""
    yield graph.graph_path
    yield graph.subconfig
    with contextlib.suppress(OSError):
        yield from (file for file in graph.base_path.rglob("*.py") if "site-packages" not in file.parts)


def _concerns(file: str, graph: GraphEntry) -> bool:
    path = Path(file)
    return path in {graph.graph_path, graph.subconfig} or (
        path.suffix == ".py" and path.is_relative_to(graph.base_path)
    )
