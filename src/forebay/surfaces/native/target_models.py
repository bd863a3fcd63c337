# SPDX-License-Identifier: Apache-2.0
"""Endpoints of one target, and the project of several.

A target is `file.py` with all that it serves, `file.py:Name` for one of them, a model file, or a repository of these.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from forebay.errors import ConfigError
from forebay.server import stock_report
from forebay.server.app import App
from forebay.server.config import HttpConfig, Overrides, RepositoryConfig
from forebay.server.served import Served
from forebay.serving.models.model import Model, models_in, settings_of
from forebay.surfaces.contract import Project
from forebay.surfaces.native.attached_models import project_pool
from forebay.surfaces.native.check_line import first_steps, summary
from forebay.surfaces.native.compositions import GraphTarget, compositions_of, drawable, serve_composition, unserved
from forebay.surfaces.native.describe import describe_in, served_by
from forebay.surfaces.native.model_endpoint import endpoint_of, serve_model, serve_model_file, spec_of
from forebay.surfaces.native.model_files import is_model_file, read_model_file
from forebay.surfaces.native.model_options import devices_of, isolates, named, seats_of, workers_of
from forebay.surfaces.native.pools import Workers, pool_of
from forebay.surfaces.native.repositories import RepositoryTarget, is_repository, model_files, name_of, stock
from forebay.surfaces.native.servings import serve_serving, serving_in
from forebay.surfaces.native.target_file import import_file, split_target
from forebay.types.devices import read_devices
from forebay.workers.processes.device_binding import doubtful

if TYPE_CHECKING:
    from forebay.graph.drawing.draw import Drawable
    from forebay.workers.pool import Pool


class Built(NamedTuple):
    """What became of one target."""

    served: list[Served]
    warnings: Sequence[str] = ()
    graphs: Sequence[Drawable] = ()
    repositories: Sequence[RepositoryTarget] = ()


def project_of(built: Sequence[Built], http: HttpConfig, repository: RepositoryConfig) -> Project:
    """Put what was built behind one HTTP front.

    Raises:
        ConfigError: If two endpoints have the same name, or a repository cannot be looked at.
    """
    from forebay.transports.http.asgi import asgi_app
    from forebay.transports.http.model_routes import routes_of

    app = App([served for one in built for served in one.served])
    stocked = stock(app, [target for one in built for target in one.repositories], repository)
    told = [] if stocked is None else stock_report.summary(stocked)
    problems = [] if stocked is None else [one.repository.problem for one in stocked.stocked if one.repository.problem]
    return Project(
        app=app,
        http=http,
        asgi=asgi_app(app, http),
        routes=routes_of(app, http),
        summary=[summary(app, served) for served in app.served] + told,
        first_steps=lambda: first_steps(app, http),
        warnings=[warning for one in built for warning in one.warnings] + _doubts(app) + problems,
        graphs=[graph for one in built for graph in one.graphs],
    )


def _doubts(app: App) -> list[str]:
    """Return warnings about devices that may not be there."""
    endpoints = [endpoint for one in app.served.values() for endpoint in (one.endpoint, *one.nodes.values())]
    said = dict.fromkeys(device for one in endpoints for device in one.pool.statistics().devices)
    doubt = doubtful(read_devices(said))
    return [doubt] if doubt else []


def serve_target(target: str, overrides: Overrides, given: Collection[str] = ()) -> Built:
    """Build the endpoints of a Python file, in this interpreter or described by another one.

    Args:
        target: The file, or a name in it.
        given: Which of that was said and is not a default.

    Raises:
        ConfigError: If the file cannot be imported or a model is not well-formed.
    """
    built = _serve_target(target, overrides, given)
    for served in built.served:
        served.weight = overrides.weight
    return built


def _serve_target(target: str, overrides: Overrides, given: Collection[str]) -> Built:
    path, name = split_target(target)
    file = path.absolute()  # the file may change the working folder
    if overrides.env and overrides.worker_kind != "process":
        raise ConfigError(f"an environment of its own needs worker kind process, found {overrides.worker_kind}")
    if overrides.python is not None and overrides.worker_kind != "process":
        raise ConfigError(f"an interpreter of its own needs worker kind process, found {overrides.worker_kind}")
    if is_repository(target):

        def of_files(named: Overrides, folder: Path) -> Served:
            (file,) = model_files([one.name for one in folder.iterdir()])
            return serve_model_file(folder / file, named)

        name = overrides.name or name_of(target)
        return Built([], repositories=[RepositoryTarget(target, Path(), name, overrides, of_files, is_files=True)])
    if is_model_file(target):
        model = read_model_file(path, overrides)
        return Built([serve_model(model.model, overrides, model.spec)], model.warnings)
    if overrides.python is None:
        module = import_file(path)
        compositions = compositions_of(module, name)
        if compositions:
            _check_one(overrides, target, compositions)
            targets = [GraphTarget(one, file, key, overrides, given) for key, one in compositions.items()]
            warnings = [warning for one in compositions.values() for warning in one.graph.warnings]
            warnings += unserved(module, compositions) if name is None else []
            return Built([serve_composition(one) for one in targets], warnings, [drawable(one) for one in targets])
        serving = serving_in(module, name)
        if serving is not None and name is not None:
            return Built([serve_serving(serving, file, name, overrides)])
        models = models_in(module, name)
        _check_one(overrides, target, [model.__name__ for model in models])
        return built_of(models, overrides)
    return _built_elsewhere(overrides.python, target, file, overrides)


def _built_elsewhere(python: str, target: str, file: Path, overrides: Overrides) -> Built:
    """Build the endpoints of models that only another interpreter imports."""
    served: list[Served] = []
    found = describe_in(python, target, overrides.env)
    _check_one(overrides, target, [class_name for class_name, _ in found])
    for class_name, its_own in found:
        told = named(its_own, overrides)
        is_isolating = isolates(class_name, told.settings, overrides)
        spec = spec_of(file, class_name, isolate_errors=is_isolating)
        seats = seats_of(told.settings, overrides)
        if overrides.dials_in:
            pool: Pool = project_pool(told, overrides, isolates=is_isolating, seats=seats)
            served.append(served_by(told, endpoint_of(class_name, told.settings, pool, overrides)))
            continue
        devices = devices_of(class_name, overrides.devices or told.devices, "process")
        wanted = Workers(
            what=class_name,
            kind="process",
            count=workers_of(overrides.workers, devices),
            threads=overrides.threads,
            devices=devices,
            seats=seats,
            isolates=is_isolating,
            has_health=told.settings.has_health,
        )
        pool = pool_of(spec, wanted, overrides)
        endpoint = endpoint_of(class_name, told.settings, pool, overrides)
        served.append(served_by(told, endpoint))
    return Built(served)


def built_of(models: Sequence[type[Model]], overrides: Overrides) -> Built:
    """Build the endpoints of classes, and say which of them have repositories.

    Raises:
        ConfigError: If a class is not well-formed.
    """
    found = Built([serve_model(model, overrides) for model in models if not model.repository], repositories=[])
    targets = [_repository_of(model, overrides) for model in models if model.repository]
    return found._replace(repositories=targets)


def _repository_of(model: type[Model], overrides: Overrides) -> RepositoryTarget:
    settings = named(settings_of(model), overrides)
    serve_model(model, overrides)  # what is wrong with the class is said before anything is loaded
    assert model.repository is not None
    folder = Path(getattr(sys.modules.get(model.__module__), "__file__", None) or "").absolute().parent

    def of_class(named: Overrides, files: Path) -> Served:
        return serve_model(model, named, files=files)

    return RepositoryTarget(model.repository, folder, settings.name, overrides, of_class, settings.timeout_ms)


def _check_one(overrides: Overrides, target: str, names: Collection[str]) -> None:
    """Refuse endpoints that share a name."""
    if overrides.name is not None and len(names) > 1:
        msg = f"{target} has several that are served ({', '.join(names)}), and one name; say which: {target}:NAME"
        raise ConfigError(msg)
