# SPDX-License-Identifier: Apache-2.0
"""Surface of Python files with models, of model files, and of folders and buckets of them."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError
from forebay.server.app import App
from forebay.server.served import Served
from forebay.server.versions import TWO_ALIKE
from forebay.surfaces.contract import Options, Project, TargetEntry
from forebay.surfaces.native.attached_models import Lobby
from forebay.surfaces.native.forwarded_models import expected_models, serve_owners, wanted_owners
from forebay.surfaces.native.model_endpoint import endpoint_of
from forebay.surfaces.native.model_files import is_model_file
from forebay.surfaces.native.model_options import seats_of, times_of
from forebay.surfaces.native.reloading import Reloading
from forebay.surfaces.native.repositories import is_repository
from forebay.surfaces.native.target_file import split_target
from forebay.surfaces.native.target_models import Built, project_of, serve_target

if TYPE_CHECKING:
    from forebay.cluster.deployment import Deployment
    from forebay.surfaces.container.recipe import Recipe

log = logging.getLogger("forebay")


class NativeSurface:
    """Serves `forebay.Model` classes and compositions of them."""

    name = "native"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a Python file, with or without a class name, a model file, or a place of those."""
        return split_target(target)[0].suffix == ".py" or is_model_file(target) or is_repository(target)

    def build(self, target: str, options: Options) -> Project:
        """Build an endpoint for each model of the target, and a door where others may attach.

        Args:
            target: A Python file; an empty one serves what a file names, and what attaches.

        Raises:
            ConfigError: If a file cannot be read or imported or a model is not well-formed.
        """
        entries = _entries(target, options)
        attaches = options.attach.address is not None
        if options.attach.peers and not attaches:
            raise ConfigError(
                "--attach-peer names servers whose programs know of those that join here: --attach ADDRESS"
            )
        built = [_serve_entry(entry, attaches=attaches) for entry in entries]
        _require_names(entries, built)
        wanted = wanted_owners(options)
        expected = [model for one in built for model in expected_models(one.served, wanted, options.attach)]
        project = project_of(built, options.http, options.repository)
        lobby = _lobby(project.app, options) if attaches else None

        def govern(served: list[Served]) -> list[Served]:
            for one in served:
                if lobby is not None:
                    lobby.govern(one.endpoint)
            return served

        reloading = Reloading(
            project.app,
            options,
            entries,
            lambda options: _entries(target, options),
            lambda entry: govern(_warned(_serve_entry(entry, attaches=attaches))),
        )
        for entry, one in zip(entries, built, strict=True):
            reloading.made(entry, govern(one.served))
        project.app.source, project.app.load_timeout_s = _finder(project.app, reloading), options.load_timeout_s
        project.reload, project.on_ready, project.on_stop = reloading.ask, reloading.watch, reloading.end
        reloading.peers = None if lobby is None else lobby.peers
        reloading.owners = serve_owners(project, options.attach, wanted, expected, reloading.take_back)
        if wanted and options.part is None and any(one.limits is not None for one in options.tenants.values()):
            project.warnings.append(_LIMITS_OF_A_FRONT)
        return project

    def deployment(self, target: str, options: Options) -> tuple[Deployment, bytes]:
        """Return what is deployed on a cluster, and the files that go with it.

        Raises:
            ConfigError: If the project is wrong, or cannot be on a cluster.
        """
        from forebay.surfaces.native.clustered import deployment_of

        return deployment_of(target, options, _entries(target, options), lambda: self.build(target, options))

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs; a bucket is only looked at where it is served."""
        from forebay.surfaces.native.project_image import recipe  # reads YAML, which workers elsewhere need not have

        return recipe(target, options, lambda: self.build(target, options))


def _lobby(app: App, options: Options) -> Lobby:
    """Give the app a door where workers attach."""
    return Lobby(
        app,
        options.attach,
        lambda told, pool: endpoint_of(told.name, told.settings, pool, options.overrides),
        lambda told: seats_of(told.settings, options.overrides),
        options.source,
    )


def _warned(built: Built) -> list[Served]:
    """Log what is odd about a target that is read anew; at the start the command line says it."""
    for warning in built.warnings:
        log.warning("%s", warning)
    return built.served


def _finder(app: App, reloading: Reloading) -> Callable[[str, str], Served]:
    """Return what builds a version by its name: of a repository, or of what the project names."""

    def find(name: str, version: str) -> Served:
        if app.stock is not None and app.stock.offer.has(name):
            return app.stock.find(name, version)
        return reloading.find(name, version)

    return find


def _entries(target: str, options: Options) -> list[TargetEntry]:
    return [TargetEntry(target, options.overrides, options.given)] if target else [*options.entries]


def _require_names(entries: Sequence[TargetEntry], built: Sequence[Built]) -> None:
    """Refuse a second model of the same name and version, with its place in the file that names it."""
    seen: set[tuple[str, str]] = set()
    for entry, one in zip(entries, built, strict=True):
        for name, version in [(served.endpoint.name, served.endpoint.config.version) for served in one.served]:
            if (name, version) in seen:
                place = f"{entry.place}: " if entry.place else ""
                raise ConfigError(f"{place}{TWO_ALIKE.format(name)}")
            seen.add((name, version))


def _serve_entry(entry: TargetEntry, *, attaches: bool) -> Built:
    """Serve a target; what is wrong with it and has no place in a file of its own has that where it was named."""
    try:
        if entry.overrides.dials_in and not attaches:
            raise ConfigError(
                f"workers is {entry.overrides.workers}, so workers dial in, and they need a door: --attach ADDRESS"
            )
        if entry.overrides.timeout_ms is not None:  # models of repositories come later
            times_of(entry.target, entry.overrides.timeout_ms, 0, entry.overrides.max_timeout_ms)
        return serve_target(*entry[:3])
    except ConfigError as error:
        if not entry.place or re.match(r"\S+:\d+\b", error.message):
            raise
        raise ConfigError(f"{entry.place}: {error.message}") from error


_LIMITS_OF_A_FRONT: Final = (
    "tenants: this front lets in all of requests_per_s, rows_per_s and open_streams by itself; divide them among the "
    "fronts of an owner. worker_seconds_per_min and waiting_rows hold where the owner's tenants say so"
)
