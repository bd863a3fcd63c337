# SPDX-License-Identifier: Apache-2.0
"""Projects written for the Nucleus model server: a `nucleus.yaml` and a `Handler` class, served unchanged."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import yaml

from forebay.batching.queue import BatchConfig
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.contract import Project
from forebay.surfaces.nucleus.readiness import Readiness
from forebay.types.call import ALONE
from forebay.workers.processes import ProcessPool
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.surfaces.contract import Options
    from forebay.surfaces.nucleus.config import NucleusConfig
    from forebay.surfaces.nucleus.http import NucleusHttp

log = logging.getLogger("forebay")

CONFIG_FILE: Final = "nucleus.yaml"
_TELLING_KEYS: Final = frozenset({"path", "type", "python_path", "py_version", "tfs_version", "server_side_batching"})

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
        from forebay.surfaces.nucleus.http import NucleusHttp
        from forebay.transports.http.asgi import ServerPages, beside_dashboard

        path = Path(target)
        config, warnings = read_config(path / CONFIG_FILE if path.is_dir() else path)
        if "worker_kind" in options.given and options.overrides.worker_kind != "process":
            warnings = [*warnings, "--worker-kind: a Nucleus project always runs in processes of its own"]
        http = options.http
        if "port" not in options.given:
            http = msgspec.structs.replace(http, port=config.serve_port)
        log_level = options.log_level or config.log_level
        logs.configure_logger(level=log_level)
        deaths = _Deaths()
        pool = _pool(config, options, http.port, deaths)
        endpoint = _endpoint(config, options, pool)
        app = _App(endpoint)
        pages = ServerPages(app, http) if options.extra_routes else None
        app.face = face = NucleusHttp(
            endpoint,
            batched=config.server_side_batching is not None,
            max_concurrency=config.max_concurrency,
            max_body_bytes=http.max_body_bytes if "max_body_bytes" in options.given else None,
            api_keys=http.api_keys,
            pages=pages,
        )
        readiness = Readiness(options.state_dir)

        def connect(fail: Callable[[int], None]) -> None:
            readiness.prepare()
            deaths.fail = fail

        return Project(
            app=app,
            http=http,
            port_source="" if "port" in options.given else f"{config.file}: serve_port",
            asgi=beside_dashboard(face, pages, http),
            summary=_summary(config, endpoint),
            warnings=warnings,
            log_level=log_level,
            on_ready=lambda: readiness.announce(pool.pids()),
            on_stop=readiness.clear,
            connect=connect,
        )


class _App(App):
    """An app that asks its handler, once it is up, which verbs it has."""

    def __init__(self, endpoint: Endpoint) -> None:
        super().__init__([Served(endpoint, Contract(raw_input=True, raw_output=True, batchable=False, streams=True))])
        self.face: NucleusHttp | None = None
        self._endpoint = endpoint
        self._has_learned = False

    async def start(self) -> None:
        """Bring up the workers and learn what their handler can do."""
        await super().start()
        about: dict[str, Any] = await self._endpoint.call(b"", params={"verb": "about"}, key=ALONE)
        if self.face is not None:
            self.face.learn(about["verbs"], reads_posts=about["reads_posts"])
        self._has_learned = True

    def problems(self) -> list[str]:
        """Return why the server is not ready; a handler whose verbs are not known yet is not."""
        found = super().problems()
        return found or ([] if self._has_learned else ["the handler is loading"])


class _Deaths:
    """What happens when a worker dies: the server ends with the worker's status, as the original's container does."""

    def __init__(self) -> None:
        self.fail: Callable[[int], None] = lambda _status: None

    def __call__(self, status: int) -> None:
        status = 128 - status if status < 0 else status or 1
        log.error("a worker of the project ended, and so does the server, with status %d", status)
        self.fail(status)


def _pool(config: NucleusConfig, options: Options, port: int, on_death: Callable[[int], None]) -> ProcessPool:
    from forebay.surfaces.nucleus.environment import import_path, worker_environment

    spec = RunnerSpec(
        factory="forebay.surfaces.nucleus.runner:build",
        kwargs={
            "handler": str(config.handler_file),
            "config": yaml.safe_dump(config.config),
            "batched": config.server_side_batching is not None,
            "requirements": config.dependencies.pip,
        },
    )
    # What a handler prints is to be seen at once, as it was in the original's image.
    env = {"PYTHONUNBUFFERED": "TRUE", **worker_environment(config, port, os.environ, log_level=options.log_level)}
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
    batching = config.server_side_batching
    max_size, max_wait_s = 1, 0.0
    if batching is not None:
        max_size = overrides.max_batch_size or batching.max_batch_size
        max_wait_s = batching.batch_interval_seconds
        if overrides.max_wait_ms is not None:
            max_wait_s = overrides.max_wait_ms / 1000
    timeout_s = NEVER_S if overrides.timeout_ms is None else overrides.timeout_ms / 1000
    return Endpoint(
        EndpointConfig(
            name=config.project_dir.name or "nucleus", timeout_s=timeout_s, max_timeout_s=NEVER_S, streams=True
        ),
        BatchConfig(
            max_size=max_size,
            max_wait_s=max_wait_s,
            capacity=overrides.max_queue or CAPACITY,
            idle="wait",
            max_running=_processes(config, options),
        ),
        pool,
    )


def _processes(config: NucleusConfig, options: Options) -> int:
    return options.overrides.workers or config.processes


def _summary(config: NucleusConfig, endpoint: Endpoint) -> list[str]:
    pool = endpoint.pool.statistics()
    threads = config.threads_per_process
    workers = (
        f"{_count(pool.slots // threads, 'process', 'processes')} with {_count(threads, 'thread', 'threads')} each"
    )
    lines = [f"/  {config.path}: class Handler in {workers}"]
    if config.server_side_batching is not None:
        batching = endpoint.batching
        lines.append(
            f"/  POST in batches of up to {batching.max_size}, {batching.max_wait_s:g} s after the first at the latest"
        )
    return lines


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
