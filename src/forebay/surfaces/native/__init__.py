# SPDX-License-Identifier: Apache-2.0
"""Python files with models or compositions of them: `file.py` serves all that are in it, `file.py:Name` one of them.

Model files as well: `net.onnx`, `net.xml`; and folders or buckets of them.
"""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from forebay.errors import ConfigError
from forebay.server import stock_report
from forebay.server.app import App
from forebay.server.config import RepositoryConfig
from forebay.server.served import Served
from forebay.server.versions import TWO_ALIKE
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.annotations import io_types
from forebay.serving.models.batch_keys import MethodKeys, SampleKeys
from forebay.serving.models.model import models_in, settings_of
from forebay.serving.models.model_runner import runner_for
from forebay.serving.models.tensor_codec import codec_for
from forebay.surfaces.contract import Project, TargetEntry
from forebay.surfaces.native.attached_models import Lobby, project_pool
from forebay.surfaces.native.check_line import summary
from forebay.surfaces.native.compositions import GraphTarget, compositions_of, drawable, serve_composition, unserved
from forebay.surfaces.native.describe import describe, describe_in, faces_of, served_by
from forebay.surfaces.native.model_files import is_model_file, read_model_file
from forebay.surfaces.native.model_options import (
    batching_of,
    devices_of,
    isolates,
    named,
    seats_of,
    single_flight_of,
    times_of,
    workers_of,
)
from forebay.surfaces.native.owned import expected_models, serve_owners, wanted_owners
from forebay.surfaces.native.pools import Workers, pool_of
from forebay.surfaces.native.reloading import Reloading
from forebay.surfaces.native.repositories import RepositoryTarget, is_repository, model_files, name_of, stock
from forebay.surfaces.native.servings import serve_serving, serving_in
from forebay.surfaces.native.target_file import import_file, package_in, root_of, split_target
from forebay.types.devices import read_devices
from forebay.workers.processes.device_binding import doubtful
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from forebay.cluster.deployment import Deployment
    from forebay.graph.drawing.draw import Drawable
    from forebay.runtimes.library import OpenVinoOptions
    from forebay.runtimes.trial import SharedFile
    from forebay.server.config import HttpConfig, Overrides
    from forebay.serving.models.model import Model, ModelSettings
    from forebay.serving.models.schema import WireType
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options
    from forebay.workers.pool import Pool

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
            options: What the person says.

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
        overrides: What the person says about every model.
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
        spec = _spec(file, class_name, isolate_errors=is_isolating)
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


def serve_model_file(
    path: Path,
    overrides: Overrides,
    shared: SharedFile | None = None,
    openvino: OpenVinoOptions | None = None,
) -> Served:
    """Build the endpoint of a model file; see `read_model_file`. What is odd about the file is logged."""
    found = read_model_file(path, overrides, shared, openvino)
    for warning in found.warnings:
        log.warning("%s", warning)
    return serve_model(found.model, overrides, found.spec)


def serve_model(
    model: type[Model], overrides: Overrides, spec: RunnerSpec | None = None, files: Path | None = None
) -> Served:
    """Build the endpoint of a model class.

    Args:
        overrides: What the person says.
        spec: How a worker builds its runner; None finds the class in the file it was imported from.
        files: The folder that it loads, if it has a repository.

    Raises:
        ConfigError: If the class is not well-formed.
    """
    settings = named(settings_of(model), overrides)
    given, answer = io_types(model)
    where = model.__qualname__
    if settings.pad is not None and not hasattr(model, "preprocess"):
        settings.pad.require_fields(f"{where}.pad", given.annotation)
    keys = _keys_of(where, settings, given)
    endpoint = endpoint_of(where, settings, _pool(model, settings, overrides, spec, files), overrides, keys)
    typed = [(one, io_types(model, one)) for one in settings.methods]
    methods = [(one, types, codec_for(model, *types, one.name).face) for one, types in typed]
    face, further = faces_of(settings, (given, answer), methods, shares_disk=not overrides.dials_in)
    tensors = codec_for(model, given, answer).face
    return Served(endpoint, face.contract, face.described, methods=further, tensors=tensors)


def endpoint_of(
    where: str, settings: ModelSettings, pool: Pool, overrides: Overrides, keys: SampleKeys | None = None
) -> Endpoint:
    """Put a pool behind the queue that a model asks for.

    Args:
        where: The model, as messages name it.
        settings: What it says about itself.
        pool: Who runs it.
        overrides: What the person says.
        keys: Gives the batch keys of its samples.

    Raises:
        ConfigError: If model and person want what does not go together.
    """
    timeout_s, max_timeout_s = times_of(where, overrides.timeout_ms, settings.timeout_ms, overrides.max_timeout_ms)
    config = EndpointConfig(
        name=settings.name,
        version=settings.version,
        timeout_s=timeout_s,
        max_timeout_s=max_timeout_s,
        deadline_ms=overrides.deadline_ms or settings.deadline_ms,
        split=settings.split,
        streams=settings.streams or any(method.streams for method in settings.methods),
        is_mixed=bool(settings.methods),
        single_flight=single_flight_of(where, settings, overrides),
    )
    keys_of = MethodKeys(keys) if settings.methods else keys
    return Endpoint(config, batching_of(where, settings, overrides), pool, keys_of)


def _check_one(overrides: Overrides, target: str, names: Collection[str]) -> None:
    """Refuse endpoints that share a name."""
    if overrides.name is not None and len(names) > 1:
        msg = f"{target} has several that are served ({', '.join(names)}), and one name; say which: {target}:NAME"
        raise ConfigError(msg)


def _keys_of(where: str, settings: ModelSettings, given: WireType) -> SampleKeys | None:
    if settings.batch_key is None:
        return None
    return SampleKeys(settings.batch_key, f"{where}.batch_key", given)


def _pool(
    model: type[Model], settings: ModelSettings, overrides: Overrides, spec: RunnerSpec | None, files: Path | None
) -> Pool:
    is_isolating = isolates(model.__qualname__, settings, overrides)
    if overrides.dials_in and spec is None and files is None and not model.repository:
        described = named(describe(model), overrides)
        return project_pool(described, overrides, isolates=is_isolating, seats=seats_of(settings, overrides))
    devices = devices_of(model.__qualname__, overrides.devices or settings.devices, overrides.worker_kind)
    if spec is None:
        file = Path(getattr(sys.modules.get(model.__module__), "__file__", None) or "")
        if overrides.worker_kind == "process" and (not file.is_file() or "<locals>" in model.__qualname__):
            raise ConfigError(
                f"{model.__qualname__} cannot run in processes, which import it by its name in a file; "
                "put it there, or use worker_kind='thread'"
            )
        spec = _spec(file, model.__name__, isolate_errors=is_isolating, package=package_in(model.__module__))
        if files is not None:
            spec = msgspec.structs.replace(spec, kwargs={**spec.kwargs, "files": str(files)})
    loaded = None if files is None else str(files)
    wanted = Workers(
        what=model.__qualname__,
        kind=overrides.worker_kind,
        count=workers_of(overrides.workers, devices),
        threads=overrides.threads,
        devices=devices,
        seats=seats_of(settings, overrides),
        isolates=is_isolating,
        is_async=settings.is_async,
        path=root_of(model.__module__),
        local=lambda: runner_for(model, isolate_errors=is_isolating, files=loaded),
    )
    return pool_of(spec, wanted, overrides)


def _spec(file: Path, name: str, *, isolate_errors: bool, package: str = "") -> RunnerSpec:
    kwargs = {"path": str(file.absolute()), "name": name, "isolate_errors": isolate_errors, "package": package}
    return RunnerSpec(factory="forebay.serving.models.model_runner:from_file", kwargs=kwargs)
