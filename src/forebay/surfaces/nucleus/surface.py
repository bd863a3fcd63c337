# SPDX-License-Identifier: Apache-2.0
"""Surface of Nucleus projects: a project's configuration becomes its one endpoint, with its HTTP or gRPC port."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from forebay.batching.queue import BUNDLE_S, BatchConfig
from forebay.server.config import Overrides
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.contract import Options, Project
from forebay.surfaces.nucleus.app import NucleusApp, grpc_door, http_door
from forebay.surfaces.nucleus.handler_workers import pool_of, processes_of, spec_of
from forebay.surfaces.nucleus.project_models import store_of
from forebay.surfaces.nucleus.readiness import DEFAULT_FOLDER, Readiness
from forebay.transports.server import Listener
from forebay.types.plurals import counted
from forebay.workers.pools.process_pool import ProcessPool

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.nucleus.project_settings import NucleusConfig
    from forebay.surfaces.nucleus.proto import UserService
    from forebay.transports.http.route import Route

log = logging.getLogger("forebay")

CONFIG_FILE: Final = "nucleus.yaml"
_TELLING_KEYS: Final = frozenset({"path", "type", "python_path", "py_version", "tfs_version", "server_side_batching"})

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
        spec = spec_of(config, service)
        pool = pool_of(spec, config, options, http.port, deaths)
        endpoint = _endpoint(config, options, pool)
        app = NucleusApp(endpoint, spec)
        port_source = f"{config.file}: serve_port" if told_port is None else ""
        if (models := config.served_models) is not None:
            app.store = store_of(models, config, options, app.desk)
        asgi: ASGIApp | None = None
        routes: Mapping[bytes, Route] = {}
        listeners: list[Listener] = []
        if service is None:
            asgi, routes = http_door(app, config, options, http)
        else:
            listeners.append(grpc_door(app, config, options, http, service, port_source))
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
            workers=processes_of(config, options),
            drain_s=options.drain_s,
            warnings=(*warnings, *found.warnings),
        )


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
        log.error("a worker of the project exited, so the server exits too, with status %d", status)
        self.fail(status)


def _endpoint(config: NucleusConfig, options: Options, pool: ProcessPool) -> Endpoint:
    overrides = options.overrides
    batching = config.post_batching
    # Calls that a single thread answers one by one anyway leave together as far as they are quick.
    shares_way = bool(config.protobuf_path) and processes_of(config, options) * config.threads_per_process == 1
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
            max_running=None if config.protobuf_path else processes_of(config, options),
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


def _summary(config: NucleusConfig, endpoint: Endpoint, service: UserService | None) -> list[str]:
    pool = endpoint.pool.statistics()
    threads = config.threads_per_process
    workers = f"{counted(pool.slots // threads, 'process', 'processes')} with {counted(threads, 'thread')} each"
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
