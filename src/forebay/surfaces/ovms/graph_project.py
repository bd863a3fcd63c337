# SPDX-License-Identifier: Apache-2.0
"""A project put together: its app, the pages about its configuration, and what reads its files anew."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.surfaces.contract import Options, Project
from forebay.surfaces.ovms.app import OvmsApp, ServeFile
from forebay.surfaces.ovms.config import GraphEntry, file_of, read_target
from forebay.surfaces.ovms.config_pages import ConfigPages
from forebay.surfaces.ovms.graphs import serve_graph
from forebay.surfaces.ovms.model_nodes import SharedModels
from forebay.surfaces.ovms.model_versions import ModelEntry, StoredModels
from forebay.surfaces.ovms.project_reload import LOOK_S, GraphReloading
from forebay.surfaces.ovms.tensor_checks import misfits

if TYPE_CHECKING:
    from forebay.graph.drawing.draw import Drawable
    from forebay.surfaces.ovms.linked_graph import GraphLayout, InferenceNode


def project_of(target: Path, options: Options, serve_file: ServeFile) -> Project:
    """Read a project; raises ConfigError if its configuration is wrong, or the graph if that is all."""
    from forebay.transports.http.asgi import asgi_app
    from forebay.transports.http.model_routes import routes_of

    target = file_of(target)
    stored = StoredModels(options.repository)
    config = read_target(target, options.overrides.name, stored)
    app = OvmsApp(config, options, serve_file, stored)
    look_s = options.repository.poll_s if "poll_s" in options.given else LOOK_S
    reloading = GraphReloading(app, target, options.overrides.name, look_s)
    summary: list[str] = []
    warnings = [*config.warnings]
    drawings: list[Drawable] = []
    problems = [*config.problems]
    sessions: list[tuple[InferenceNode, ModelEntry]] = []
    for entry in config.graphs:
        try:
            made = serve_graph(entry, config.models, SharedModels(stored), options.overrides)
        except ConfigError as error:
            if not entry.where:  # it is all that there is
                raise
            problems.append(error.message)
            continue
        warnings += made.layout.warnings
        sessions += made.sessions
        summary.append(_summary(entry, made.layout))
        if made.served.drawing is not None:
            drawings.append(made.served.drawing)
    summary += [f"{one.name}: version {one.version} of a model, {one.place}" for one in config.models]
    return Project(
        app=app,
        http=options.http,
        asgi=asgi_app(app, options.http, ConfigPages(app, reloading, options.http).routes()),
        routes=routes_of(app, options.http),
        summary=summary,
        warnings=warnings,
        problems=problems,
        look=lambda: misfits(config, sessions, stored),
        graphs=drawings,
        on_ready=reloading.watch,
        on_stop=reloading.end,
        reload=reloading.ask,
    )


def uses_buckets(project: Project) -> bool:
    """Tell whether models of a project are in buckets."""
    return isinstance(project.app, OvmsApp) and bool(project.app.config.stored)


def _summary(entry: GraphEntry, layout: GraphLayout) -> str:
    nodes = ", ".join(node.name for node in layout.spec.nodes) or "none"
    told = (
        f"{entry.name}: a graph of {nodes}; {', '.join(layout.inputs)} -> {', '.join(o.name for o in layout.outputs)}"
    )
    return told + (", generates" if layout.loops else "")
