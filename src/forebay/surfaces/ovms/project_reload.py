# SPDX-License-Identifier: Apache-2.0
"""Reading a project anew while it is served: when its files change, on SIGHUP, on request.

What changed is loaded beside what is in use and takes its place once it is ready, so nothing is refused meanwhile. What
fails is told in the log and at `/models`, and what was in use goes on. A configuration that cannot be read changes
nothing at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.repository.look_thread import Looking, pause_after
from forebay.repository.settling import Settling
from forebay.surfaces.ovms.config import GraphEntry, OvmsConfig, read_target
from forebay.surfaces.ovms.linker import handlers_of
from forebay.surfaces.ovms.model_versions import versions_in

if TYPE_CHECKING:
    from forebay.surfaces.ovms.app import OvmsApp

log = logging.getLogger("forebay")

LOOK_S: Final = 1.0
"""Pause between two looks at the files if nobody says; an edit counts once two looks in a row have found the same."""

_Seen = dict[str, tuple[int, int, int]]


class GraphReloading:
    """Keeps an app as its files say."""

    def __init__(self, app: OvmsApp, target: Path, name: str | None, look_s: float = LOOK_S) -> None:
        """Describe it.

        Args:
            target: The `config.json` or the `graph.pbtxt`.
            name: What a single graph is called.
            look_s: Pause between two looks at the files; 0 looks only when somebody asks.
        """
        self._look_s = look_s
        self._app = app
        self._target = target
        self._name = name
        self._lock = asyncio.Lock()
        self._used = self._files(app.config)
        self._settling: Settling[str, tuple[int, int, int]] = Settling(self._used)
        self._looking = Looking(
            "forebay-ovms-watch",
            self._look,
            lambda took_s: pause_after(took_s, look_s, is_moving=self._settling.is_moving),
        )
        self._asking: asyncio.Task[object] | None = None
        self._again: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Begin to look at the files and buckets; called on the loop once all is ready."""
        self._loop = asyncio.get_running_loop()
        if self._look_s:
            self._looking.start()
        self._app.stored.watch(self._ask_from_thread)
        self._try_again()

    def end(self) -> None:
        """Look no more."""
        self._looking.stop()
        if self._again is not None:
            self._again.cancel()

    def ask(self) -> None:
        """Have all that changed read anew, soon; buckets are looked at for that."""
        self._asking = asyncio.get_running_loop().create_task(self.reload_all())

    async def reload_all(self) -> tuple[bool, list[str]]:
        """Read what changed anew; returns whether anything had, and what could not be loaded, which is told as well."""
        await asyncio.to_thread(self._app.stored.look)
        return await self._reload_known()

    async def _reload_known(self) -> tuple[bool, list[str]]:
        """Read what changed anew, of buckets as far as that is known."""
        async with self._lock:
            try:
                return await self._reload()
            finally:
                self._try_again()

    def _ask_known(self) -> None:
        self._asking = asyncio.get_running_loop().create_task(self._reload_known())

    def _ask_from_thread(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._ask_known)

    def _try_again(self) -> None:
        """Have what could not be copied tried again later."""
        if self._again is not None:
            self._again.cancel()
        pauses = () if self._app.is_draining else self._app.refused.values()
        self._again = asyncio.get_running_loop().call_later(min(pauses), self._ask_known) if pauses else None

    def _look(self) -> None:
        """Look at the files, in a thread."""
        if self._settling.look(self._files(self._app.config)):
            self._ask_from_thread()

    async def _reload(self) -> tuple[bool, list[str]]:
        app, old = self._app, self._app.config
        try:
            config = await asyncio.to_thread(read_target, self._target, self._name, app.stored)
            _require_graphs(config, old, app.ready)
        except ConfigError as error:
            self._used = await asyncio.to_thread(self._files, old)
            is_news, app.problem = app.problem != error.message, error.message
            if is_news:
                log.error("cannot reload the project, it stays unchanged: %s", error.message)  # noqa: TRY400
            return is_news, [error.message]
        app.problem = "; ".join(config.problems)
        before, self._used = self._used, await asyncio.to_thread(self._files, config)
        app.config = config
        app.stored.keep_only(config.stored)
        app.refused = {one: pause_s for one, pause_s in app.refused.items() if one in config.models}
        changed = {Path(one) for one in before.keys() | self._used.keys() if before.get(one) != self._used.get(one)}
        models, graphs = {*old.models} - app.refused.keys(), {*old.graphs}
        added = tuple(one for one in config.models if one not in models or any(map(one.holds, changed)))
        others = {one.name for one in (*added, *models.difference(config.models))}
        fresh = [one for one in config.graphs if one not in graphs or _concern(changed, one) or app.uses(one, others)]
        errors = await asyncio.gather(*(app.load_graph(one) for one in fresh), app.load_models(added))
        has_left = await app.leave_unnamed()
        return has_left or bool(fresh or added), [*config.problems, *itertools.chain(*errors)]

    def _files(self, config: OvmsConfig) -> _Seen:
        """Return what is seen of all files that matter."""
        files = [self._target]
        for graph in (*config.graphs, *config.refused):
            files += _of_graph(graph)
        for model in config.models:
            files += (model.folder / one.path for one in model.look())
        seen: _Seen = {}
        for file in files:
            with contextlib.suppress(OSError):
                about = file.stat()
                seen[str(file)] = about.st_size, about.st_mtime_ns, about.st_ctime_ns
        for base in config.bases:
            seen |= {str(path): (0, 0, 0) for path in versions_in(base).values() if str(path) not in seen}
        return seen


def _require_graphs(config: OvmsConfig, old: OvmsConfig, ready: Collection[str]) -> None:
    """Refuse, with a ConfigError, a configuration for which a graph would have to leave that is served."""
    served = {one.name for one in old.graphs if one.name in ready}
    for graph in (*config.graphs, *config.refused):
        if graph.problem and graph.name in served:
            raise ConfigError(graph.problem)


def _of_graph(graph: GraphEntry) -> Iterator[Path]:
    """Return the files of a graph: its own, its handlers, and all Python files in its folder or beside a handler."""
    handlers = handlers_of(graph.graph_path, graph.base_path)
    yield from (graph.graph_path, graph.subconfig, *handlers)
    with contextlib.suppress(OSError):
        yield from (file for file in graph.base_path.rglob("*.py") if "site-packages" not in file.parts)
    for folder in {file.parent for file in handlers}:  # which may lie elsewhere, or be a link
        with contextlib.suppress(OSError):
            yield from folder.glob("*.py")


def _concern(files: Collection[Path], graph: GraphEntry) -> bool:
    """Tell whether one of these files is, or was, of a graph."""
    if not files:
        return False
    handlers = handlers_of(graph.graph_path, graph.base_path)
    folders = {file.parent for file in handlers}
    return not {graph.graph_path, graph.subconfig, *handlers}.isdisjoint(files) or any(
        file.suffix == ".py" and (file.parent in folders or file.is_relative_to(graph.base_path)) for file in files
    )
