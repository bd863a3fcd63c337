# SPDX-License-Identifier: Apache-2.0
"""All graphs and models of a project, loaded each for itself: what fails is told, and the others answer."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from forebay.errors import ConfigError, ForebayError
from forebay.server.app import App
from forebay.surfaces.contract import Project
from forebay.surfaces.ovms.calls import VERSION, GraphCalls
from forebay.surfaces.ovms.config import read_target
from forebay.surfaces.ovms.graphs import serve_graph
from forebay.surfaces.ovms.inference import SharedModels

if TYPE_CHECKING:
    from pathlib import Path

    from forebay.graph.drawing.draw import Drawable
    from forebay.server.served import Served
    from forebay.surfaces.contract import Options
    from forebay.surfaces.ovms.config import GraphEntry, OvmsConfig

log = logging.getLogger("forebay")


class OvmsApp(App):
    """An app whose graphs are loaded when it starts."""

    def __init__(self, config: OvmsConfig, options: Options) -> None:
        super().__init__([])
        self.config = config
        self.calls: dict[str, GraphCalls] = {}
        self._options = options
        self._sessions = SharedModels()
        self._has_started = False

    async def start(self) -> None:
        """Load every graph; the server is there also if some cannot be."""
        await super().start()
        await asyncio.gather(*(self.load_graph(entry) for entry in self.config.graphs))
        self._has_started = True

    async def load_graph(self, entry: GraphEntry) -> None:
        """Load a graph, or say why it cannot be."""
        try:
            await self.load(entry.name, VERSION, lambda: self.build(entry), timeout_s=self._options.load_timeout_s)
        except ForebayError as error:
            told = {"trace": getattr(error, "trace", "")}
            log.error("graph '%s' is not available: %s", entry.name, error.message, extra=told)  # noqa: TRY400 - as told

    def build(self, entry: GraphEntry) -> Served:
        """Build a graph, in a thread.

        Raises:
            ConfigError: If its file is wrong.
        """
        made = serve_graph(entry, self.config.models, self._sessions, self._options.overrides)
        self.calls[entry.name] = made.calls
        return made.served

    def problems(self) -> list[str]:
        """Return why the server is not ready: once all was tried, it is."""
        if self._has_started and not self.is_draining:
            return []
        return super().problems()


def project_of(target: Path, options: Options) -> Project:
    """Read a project.

    Raises:
        ConfigError: If its configuration is wrong, or the graph if that is all.
    """
    from forebay.transports.http.asgi import asgi_app, routes_of

    config = read_target(target, options.overrides.name)
    app = OvmsApp(config, options)
    summary: list[str] = []
    warnings = [*config.warnings]
    drawings: list[Drawable] = []
    problems: list[str] = []
    for entry in config.graphs:
        try:
            made = serve_graph(entry, config.models, SharedModels(), options.overrides)
        except ConfigError as error:
            if not entry.where:  # it is all that there is
                raise
            problems.append(error.message)
            continue
        layout = made.calls.layout
        warnings += layout.warnings
        summary.append(_summary(entry, made.calls))
        if made.served.drawing is not None:
            drawings.append(made.served.drawing)
    return Project(
        app=app,
        http=options.http,
        asgi=asgi_app(app, options.http),
        routes=routes_of(app, options.http),
        summary=summary,
        warnings=warnings,
        problems=problems,
        graphs=drawings,
    )


def _summary(entry: GraphEntry, calls: GraphCalls) -> str:
    layout = calls.layout
    nodes = ", ".join(node.name for node in layout.spec.nodes) or "none"
    told = (
        f"{entry.name}: a graph of {nodes}; {', '.join(layout.inputs)} -> {', '.join(o.name for o in layout.outputs)}"
    )
    return told + (", generates" if layout.loops else "")
