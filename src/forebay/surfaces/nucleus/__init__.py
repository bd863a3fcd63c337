# SPDX-License-Identifier: Apache-2.0
"""Projects written for the Nucleus model server: a `nucleus.yaml` and a `Handler` class, served unchanged."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import yaml

from forebay.batching.queue import BUNDLE_S, BatchConfig
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import Overrides, grpc_like
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.contract import Project
from forebay.surfaces.nucleus.readiness import DEFAULT_FOLDER, Readiness
from forebay.surfaces.nucleus.worker_requests import Desk
from forebay.transports.server import Listener
from forebay.types.call import ALONE
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import RunnerSpec
from forebay.workers.wire.frames import MAX_FRAME_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import ASGIApp

    from forebay.server.config import HttpConfig
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options
    from forebay.surfaces.nucleus.model_store import ModelStore
    from forebay.surfaces.nucleus.project_settings import Models, NucleusConfig
    from forebay.surfaces.nucleus.proto import UserService
    from forebay.transports.grpc.listener import GrpcListener
    from forebay.transports.http.route import Route

log = logging.getLogger("forebay")

CONFIG_FILE: Final = "nucleus.yaml"
_TELLING_KEYS: Final = frozenset({"path", "type", "python_path", "py_version", "tfs_version", "server_side_batching"})

_OF_STORES: Final = ("AWS_", "GOOGLE_", "AZURE_")
"""How variables begin that say how to reach stores."""

_NO_BATCHES: Final = "it has no server_side_batching of its posts"
_INSTEAD: Final = {
    "max_batch_size": _NO_BATCHES,
    "max_wait_ms": _NO_BATCHES,
    "threads": "threads_per_process of its file says that",
    "worker_kind": "it always runs in processes of its own",
}
"""Why an option does nothing for a project."""

NEVER_S: Final = 24 * 3600.0
"""Time a request has: the original sets none, and nothing may wait for ever."""
CAPACITY: Final = 65_536
"""Requests that may wait; the original takes any number."""


class NucleusSurface:
    """Serves Nucleus projects."""

    name = "nucleus"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a folder with a nucleus.yaml, or a YAML file that reads like one."""
        path = Path(target)
        if path.is_dir():
            return (path / CONFIG_FILE).is_file()
        if path.suffix not in {".yaml", ".yml"} or not path.is_file():
            return False
        if path.name == CONFIG_FILE:
            return True
        try:
            found: Any = yaml.safe_load(path.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            return False
        return isinstance(found, dict) and bool(_TELLING_KEYS & found.keys())  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]

    def build(self, target: str, options: Options) -> Project:
        """Read the config and build the project's one endpoint; none of its code is run here.

        Raises:
            ConfigError: If the config is wrong.
        """
        from forebay.surfaces.nucleus import logs
        from forebay.surfaces.nucleus.config import read_config

        path = Path(target)
        config, warnings = read_config(path / CONFIG_FILE if path.is_dir() else path)
        warnings = [*warnings, *_ignored(config, options)]
        http = options.http
        told_port = _told_port(config, options)
        http = msgspec.structs.replace(http, port=config.serve_port if told_port is None else told_port)
        log_level = options.log_level or config.log_level
        logs.configure_logger(level=log_level)
        deaths = _Deaths()
        service = None
        if config.protobuf_path:
            from forebay.surfaces.nucleus.proto import compiled

            service = compiled(config)
        spec = _spec(config, service)
        pool = _pool(spec, config, options, http.port, deaths)
        endpoint = _endpoint(config, options, pool)
        app = _App(endpoint, spec)
        port_source = f"{config.file}: serve_port" if told_port is None else ""
        if (models := config.served_models) is not None:
            app.store = _store(models, config, options, app.desk)
        asgi: ASGIApp | None = None
        routes: Mapping[bytes, Route] = {}
        listeners: list[Listener] = []
        if service is None:
            asgi, routes = _http(app, config, options, http)
        else:
            listeners.append(_grpc(app, config, options, http, service, port_source))
        readiness = Readiness(options.state_dir)

        def connect(fail: Callable[[int], None]) -> None:
            readiness.prepare()
            deaths.fail = fail

        return Project(
            app=app,
            http=http,
            port_source=port_source,
            asgi=asgi,
            routes=routes,
            listeners=listeners,
            summary=_summary(config, endpoint, service),
            warnings=warnings,
            log_level=log_level,
            on_ready=lambda: readiness.announce(pool.pids()),
            on_stop=readiness.clear,
            connect=connect,
        )

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs; its handler may still be missing."""
        from forebay.surfaces.container.recipe import tls_of
        from forebay.surfaces.nucleus.config import read_config
        from forebay.surfaces.nucleus.handler_image import recipe

        path = Path(target)
        config, warnings = read_config(path / CONFIG_FILE if path.is_dir() else path, serving=False)
        told_port = _told_port(config, options)
        config = msgspec.structs.replace(config, serve_port=config.serve_port if told_port is None else told_port)
        found = recipe(config, options.state_dir or DEFAULT_FOLDER)
        return msgspec.structs.replace(
            found,
            has_keys=bool(options.http.api_keys),
            tls=tls_of(options.http),
            workers=_processes(config, options),
            drain_s=options.drain_s,
            warnings=(*warnings, *found.warnings),
        )


class _App(App):
    """An app that, once it is up, asks its handler what it can do, and answers what its workers ask.

    Attributes:
        desk: Where its workers ask.
        store: The models of the project, if it has any.
        learn: Called with what the handler can do.
    """

    def __init__(self, endpoint: Endpoint, spec: RunnerSpec) -> None:
        super().__init__([Served(endpoint, Contract(raw_input=True, raw_output=True, batchable=False, streams=True))])
        self.desk = Desk()
        self.store: ModelStore | None = None
        self.learn: Callable[[Any], None] = lambda _about: None
        self.endpoint = endpoint
        self._spec = spec
        self._has_learned = False

    async def start(self) -> None:
        """Bring up the workers and learn what their handler can do."""
        if "desk" in self._spec.kwargs:
            cast("dict[str, Any]", self._spec.kwargs)["desk"] = await self.desk.open()
        if self.store is not None:
            await self.store.start()
        await super().start()
        self.learn(await self.endpoint.call(b"", params={"verb": "about", "rpc": ""}, key=ALONE))
        self._has_learned = True

    async def drain(self, grace_s: float) -> None:
        """Stop the workers, and then what they ask."""
        await super().drain(grace_s)
        self.desk.close()
        if self.store is not None:
            self.store.stop()

    def problems(self) -> list[str]:
        """Return why the server is not ready; a handler whose verbs are not known yet is not."""
        found = super().problems()
        return found or ([] if self._has_learned else ["the handler is loading"])


def _told_port(config: NucleusConfig, options: Options) -> int | None:
    """Return the port that a flag says; a project speaks gRPC or HTTP, so the flag of either is understood for gRPC."""
    if config.protobuf_path and options.grpc.port is not None:
        return options.grpc.port
    return options.http.port if "port" in options.given else None


class _Deaths:
    """What happens when a worker dies: the server ends with the worker's status, as the original's container does."""

    def __init__(self) -> None:
        self.fail: Callable[[int], None] = lambda _status: None

    def __call__(self, status: int) -> None:
        status = 128 - status if status < 0 else status or 1
        log.error("a worker of the project ended, and so does the server, with status %d", status)
        self.fail(status)


def _http(
    app: _App, config: NucleusConfig, options: Options, http: HttpConfig
) -> tuple[ASGIApp, Mapping[bytes, Route]]:
    from forebay.surfaces.nucleus import kserve
    from forebay.surfaces.nucleus.http import POST_KEY, NucleusHttp
    from forebay.surfaces.nucleus.in_flight import InFlight
    from forebay.transports.http.asgi import beside_dashboard
    from forebay.transports.http.asgi_inference import Predict
    from forebay.transports.http.kserve_pages import InferencePages
    from forebay.transports.http.management import Management
    from forebay.transports.http.pages import ServerPages

    is_batched = config.post_batching is not None
    served = app.served[app.endpoint.name]
    in_flight = InFlight(config.max_concurrency)
    kserve.let_in(served, POST_KEY if is_batched else ALONE, in_flight)
    pages: ServerPages | None = None
    protocol: InferencePages | None = None
    routes: Mapping[bytes, Route] = {}
    if options.extra_routes:
        pages = ServerPages(app, http)
        routes = kserve.routes_of(served, http, lambda: app.shared_regions)
        protocol = InferencePages(app, routes, Management(app, http), Predict)
    face = NucleusHttp(
        app.endpoint,
        batched=is_batched,
        in_flight=in_flight,
        max_body_bytes=http.max_body_bytes if "max_body_bytes" in options.given else None,
        http=http,
        pages=pages,
        protocol=protocol,
    )
    app.learn = face.learn
    if app.store is not None:
        face.info = _info(config, app.store)
    return beside_dashboard(face, pages, http), routes


def _grpc(
    app: _App, config: NucleusConfig, options: Options, http: HttpConfig, service: UserService, source: str
) -> GrpcListener:
    from forebay.surfaces.nucleus.inflow import Inflows
    from forebay.surfaces.nucleus.rpc import NucleusRpc
    from forebay.transports.grpc.listener import GrpcListener

    face = NucleusRpc(app.endpoint, service, Inflows(app.desk), max_concurrency=config.max_concurrency)
    app.learn = face.learn
    max_message_bytes = http.max_body_bytes if "max_body_bytes" in options.given else MAX_FRAME_BYTES
    grpc = msgspec.structs.replace(
        grpc_like(http, options.grpc),
        port=http.port,
        max_message_bytes=max_message_bytes,
        max_buffered_bytes=max(http.max_buffered_bytes, 2 * max_message_bytes),
    )
    return GrpcListener(grpc, [face.service()], lambda: not app.problems(), source, byte_budget=app.byte_budget)


def _store(models: Models, config: NucleusConfig, options: Options, desk: Desk) -> ModelStore:
    from forebay.repository.bucket_listing import ListingLimits
    from forebay.surfaces.nucleus.environment import handler_environment
    from forebay.surfaces.nucleus.model_store import ModelStore, source_for

    # What the project says of stores holds for who reads them as well, and that is this process.
    for name, value in handler_environment(config, options.http.port, os.environ).items():
        if name.startswith(_OF_STORES):
            os.environ[name] = value
    looks = options.repository
    source = source_for(models, config.project_dir, ListingLimits(looks.timeout_s, looks.max_files))
    size = models.disk_cache_size
    store = partial(ModelStore, source, _model_dir(options), desk, disk_cache_size=size, looks=looks)
    if config.type == "python":
        return store()
    from forebay.repository.tree_rules import TreeRules
    from forebay.runtimes.saved_model import files_problem

    rules, tfs = TreeRules(kind="models", holds=files_problem), None
    if address := _tfs_address(config):
        from forebay.remote_servers.servers import ServerAddress
        from forebay.surfaces.nucleus.tfs_models import TfsModels

        where = ServerAddress.parse(address, "grpc", "tfs_container_dns")
        tfs = TfsModels(where, _model_dir(options).absolute() / "tfs")
    return store(rules=rules, tfs=tfs)


def _tfs_address(config: NucleusConfig) -> str:
    """Return where TensorFlow Serving is, if the project says that it runs its models."""
    from forebay.surfaces.nucleus.environment import TFS_PORT

    if config.type != "tensorflow" or "tfs_container_dns" not in config.given or not config.tfs_container_dns:
        return ""
    host = config.tfs_container_dns
    return host if ":" in host else f"{host}:{TFS_PORT}"


def _signature_keys(models: Models) -> dict[str, Any]:
    of = {one.name: one.signature_key for one in models.paths or () if one.signature_key}
    return {"default": models.signature_key, "of": of}


def _info(config: NucleusConfig, store: ModelStore) -> Callable[[], dict[str, Any]]:
    """Return what tells of the models at `/info`."""
    models = config.served_models
    if config.type == "python" or models is None or models.cache_size is not None:
        return store.info
    from forebay.surfaces.nucleus.tensorflow_signatures import told
    from forebay.workers.user_calls.user_code import caught

    keys = msgspec.json.encode(_signature_keys(models))

    def info() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for revision, folder in store.folders():
            about, problem = caught(told, str(folder), keys, revision.model, revision.version)
            if problem is None:  # what cannot be loaded is none, and was logged
                stamp = {"timestamp": int(revision.modified_s)}
                found[f"{revision.model}-{revision.version}"] = {**about, **stamp}
        return {"model_metadata": found}

    return info


def _model_dir(options: Options) -> Path:
    from forebay.surfaces.nucleus.environment import MODEL_DIR

    return MODEL_DIR if options.state_dir is None else options.state_dir / "models"


def _spec(config: NucleusConfig, service: UserService | None) -> RunnerSpec:
    kwargs: dict[str, Any] = {
        "handler": str(config.handler_file),
        "config": yaml.safe_dump(config.config),
        "requirements": config.dependencies.pip,
    }
    if (models := config.served_models) is not None:
        kind = next(kind for kind in ("path", "paths", "dir") if getattr(models, kind) is not None)
        names = tuple(one.name for one in models.paths or ())
        rules = {"kind": kind, "names": names, "cache_size": models.cache_size}
        key = "models" if config.multi_model_reloading is None else "multi_model_reloading"
        kwargs |= {"models": {"key": key, "rules": rules}, "desk": ""}
        if config.type == "tensorflow":
            batching = config.server_side_batching
            from forebay.surfaces.nucleus.config import has_accelerator

            kwargs["models"]["tensorflow"] = {
                "keys": _signature_keys(models),
                "address": _tfs_address(config),
                "is_on_gpu": config.gpu and has_accelerator(),
                "max_batch_size": batching and batching.max_batch_size,
                "batch_interval_s": batching.batch_interval_seconds if batching else 0.0,
                "threads": config.threads_per_process,
            }
    if service is None:
        batched = config.post_batching is not None
        return RunnerSpec(factory="forebay.surfaces.nucleus.runner:build", kwargs={**kwargs, "batched": batched})
    told = msgspec.to_builtins(service, builtin_types=(bytes,))
    return RunnerSpec(
        factory="forebay.surfaces.nucleus.rpc_runner:build", kwargs={**kwargs, "service": told, "desk": ""}
    )


def _pool(
    spec: RunnerSpec, config: NucleusConfig, options: Options, port: int, on_death: Callable[[int], None]
) -> ProcessPool:
    from forebay.surfaces.nucleus.environment import import_path, worker_environment

    # What a handler prints is to be seen at once, as it was in the original's image.
    model_dir, log_level = _model_dir(options), options.log_level
    told = worker_environment(config, port, os.environ, model_dir=model_dir, log_level=log_level)
    env = {"PYTHONUNBUFFERED": "TRUE", **told}
    return ProcessPool(
        spec,
        workers=_processes(config, options),
        threads=config.threads_per_process,
        env=env,
        path=import_path(config),
        cwd=str(config.project_dir),
        stagger=True,
        stuck_s=None,
        hands_on=False,  # a handler may have had effects
        on_death=on_death,
        captures=False,  # its logger writes the lines of the original
    )


def _endpoint(config: NucleusConfig, options: Options, pool: ProcessPool) -> Endpoint:
    overrides = options.overrides
    batching = config.post_batching
    # Calls that a single thread answers one by one anyway leave together as far as they are quick.
    shares_way = bool(config.protobuf_path) and _processes(config, options) * config.threads_per_process == 1
    max_size, max_wait_s = 1, 0.0
    if batching is not None:
        max_size = overrides.max_batch_size or batching.max_batch_size
        max_wait_s = batching.batch_interval_seconds
        if overrides.max_wait_ms is not None:
            max_wait_s = overrides.max_wait_ms / 1000
    timeout_s = NEVER_S if overrides.timeout_ms is None else overrides.timeout_ms / 1000
    return Endpoint(
        EndpointConfig(
            name=config.project_dir.name or "nucleus",
            timeout_s=timeout_s,
            max_timeout_s=timeout_s,
            deadline_ms=overrides.deadline_ms,
            streams=True,
        ),
        BatchConfig(
            max_size=max_size,
            max_wait_s=max_wait_s,
            capacity=overrides.max_queue or CAPACITY,
            idle="go" if config.protobuf_path else "wait",
            max_running=None if config.protobuf_path else _processes(config, options),
            bundle_s=BUNDLE_S if shares_way else 0.0,
        ),
        pool,
    )


def _ignored(config: NucleusConfig, options: Options) -> list[str]:
    """Say which of the given options do nothing here."""
    follows = {"workers", "timeout_ms", "deadline_ms", "max_queue"}
    if config.post_batching is not None:
        follows |= {"max_batch_size", "max_wait_ms"}
    if options.overrides.worker_kind == "process":
        follows.add("worker_kind")
    given = options.given & set(Overrides.__struct_fields__) - follows
    return [
        f"a Nucleus project ignores --{name.replace('_', '-')}: {_INSTEAD.get(name, 'it has no use for that')}"
        for name in sorted(given)
    ]


def _processes(config: NucleusConfig, options: Options) -> int:
    return options.overrides.fixed_workers or config.processes


def _summary(config: NucleusConfig, endpoint: Endpoint, service: UserService | None) -> list[str]:
    pool = endpoint.pool.statistics()
    threads = config.threads_per_process
    workers = (
        f"{_count(pool.slots // threads, 'process', 'processes')} with {_count(threads, 'thread', 'threads')} each"
    )
    if service is not None:
        methods = ", ".join(rpc.name for rpc in service.rpcs)
        return [f"{service.full_name}  {config.path}: class Handler in {workers}, over gRPC: {methods}"]
    lines = [f"/  {config.path}: class Handler in {workers}"]
    if config.post_batching is not None:
        batching = endpoint.batching
        lines.append(
            f"/  POST in batches of up to {batching.max_size}, {batching.max_wait_s:g} s after the first at the latest"
        )
    return lines


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
