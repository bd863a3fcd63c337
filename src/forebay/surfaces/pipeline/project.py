# SPDX-License-Identifier: Apache-2.0
"""A prepared server as a project: its ports, what is shown of it, and what it leaves in the user's folders."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import ConfigError
from forebay.graph.drawing.draw import Drawable
from forebay.protocols.native import Contract
from forebay.server.app import App
from forebay.server.config import GrpcConfig, HttpConfig, grpc_like
from forebay.server.served import Served
from forebay.surfaces.contract import Options, Project
from forebay.surfaces.pipeline import logs, running_servers
from forebay.surfaces.pipeline import script as scripts
from forebay.surfaces.pipeline.config import LAST_PORT, PipelineConfig, masked
from forebay.surfaces.pipeline.dag import served_graph
from forebay.surfaces.pipeline.dag.each_worker import EachWorker
from forebay.surfaces.pipeline.dag.op_workers import built
from forebay.surfaces.pipeline.fronts.http import Gateway, PipelineHttp
from forebay.surfaces.pipeline.fronts.rpc import services
from forebay.surfaces.pipeline.fronts.tensor_calls import let_in
from forebay.transports.binding import require_free
from forebay.transports.grpc.kserve import KServe
from forebay.transports.grpc.listener import GrpcListener
from forebay.transports.http.kserve_calls import routes_alone
from forebay.types.plurals import counted

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.dag.wiring import Dag
    from forebay.surfaces.pipeline.prepared_server import PreparedServer
    from forebay.surfaces.pipeline.script import Script

log = logging.getLogger("forebay.pipeline")

OPAQUE: Final = Contract(raw_input=True, raw_output=True, batchable=False, streams=False)
LAST_WORD_S: Final = 1.0
"""Time before the end of a drain in which requests that are still open are answered that there is none."""


def project_of(server: PreparedServer, script: Callable[[], Script], options: Options) -> Project:
    """Put the graph of a prepared server on workers, with its two ports in front.

    Raises:
        ConfigError: If the graph, an op or a port is wrong.
    """
    from forebay.transports.http.asgi import beside_dashboard, with_cors
    from forebay.transports.http.asgi_inference import Predict
    from forebay.transports.http.kserve_pages import InferencePages
    from forebay.transports.http.management import Management
    from forebay.transports.http.pages import ServerPages

    dag, config = built(server)
    http, has_http = _http(config, options)
    if config.build_dag_each_worker:
        hosted: served_graph.ServedGraph | EachWorker = EachWorker(server.name, dag, config, script())
    else:
        hosted = served_graph.ServedGraph(server.name, dag, config, script, itertools.count())
    app = _App(hosted, dag, config)
    gateway = Gateway(hosted.service, http)
    pages = ServerPages(app, http) if options.extra_routes else None
    protocol = None
    if options.extra_routes:
        gateway.others = routes_alone(app.served[app.name], http, lambda: app.shared_regions)
    if gateway.others:
        protocol = InferencePages(app, gateway.others, Management(app, http), Predict)
    face = beside_dashboard(PipelineHttp(gateway, http, pages, protocol), pages, http)
    rpc_source = "" if options.grpc.port is not None else _source(config, "rpc_port") or _source(config, "port")
    grpc = _grpc(config, http, options.grpc)
    kserve = KServe(app)
    rpc_services = [*services(hosted.service), kserve.service()]
    rpc = GrpcListener(
        grpc, rpc_services, lambda: not app.problems(), rpc_source, kserve.is_model_ready, app.byte_budget
    )
    service = hosted.service
    presence = _Presence(rpc, http.port if has_http else None)

    def on_stop() -> None:
        presence.end()
        service.is_closing = True
        # A little before the ports close, so that who still waits then is answered and not cut off.
        asyncio.get_running_loop().call_later(options.drain_s - min(LAST_WORD_S, options.drain_s / 5), service.cut)

    return Project(
        app=app,
        http=http,
        port_source="" if "port" in options.given else _source(config, "http_port"),
        asgi=with_cors(face, http) if has_http else None,
        routes=gateway,
        listeners=[rpc],
        summary=_summary(server, dag, config, has_http=has_http),
        warnings=[*server.warnings, *dag.warnings, *_ignored(config, options)],
        log_level=config.log_level,
        look=lambda: _misfits(dag, config),
        graphs=[Drawable(dag.spec, _labels(dag, config))],
        on_ready=presence.announce,
        on_stop=on_stop,
    )


def serve_here(server: PreparedServer) -> int:
    """Serve in the script's own process until a signal says stop; returns the exit status.

    Raises:
        ConfigError, ModelError: If it cannot start.
    """
    from forebay.observe.logs.log import configure
    from forebay.surfaces.project_server import server_of

    options = Options(http=HttpConfig(allowed_hosts=("*",)))  # there is no command line to name any
    project = project_of(server, scripts.running, options)
    configure(project.log_level or "info", "text")
    for warning in project.warnings:
        log.warning("%s", warning)

    def ready(address: str) -> None:
        log.info("ready at %s", address)
        for line in project.summary:
            log.info("%s", line)

    return server_of(project, drain_s=options.drain_s, ready=ready).run()


class _App(App):
    """An app of one graph: its store lives and its logs are written as long as it runs."""

    def __init__(self, hosted: served_graph.ServedGraph | EachWorker, dag: Dag, config: PipelineConfig) -> None:
        runs_in = {op: endpoint.name for op, endpoint in hosted.nodes.items()}
        drawing = Drawable(dag.spec, _labels(dag, config), runs_in) if runs_in else None
        self.name = hosted.endpoint.name
        served = Served(hosted.endpoint, OPAQUE, nodes=hosted.nodes, drawing=drawing)
        let_in(served, hosted.service)
        super().__init__([served])
        self._hosted = hosted
        self._dag = dag
        self._config = config
        self._handlers: list[logging.Handler] = []

    async def start(self) -> None:
        """Tell what will be served, and bring up the ops."""
        base = logs.base_of(self._config.log_path)
        if base is not None:
            self._handlers = logs.write_to(base, self._config.log_level or "info")
        log.info("configuration in force:\n%s", masked(self._config, self._dag.settings))
        for line in self._dag.lines():
            log.info("%s", line)
        try:
            self._hosted.open()
            await super().start()
        except BaseException:
            await self._close()
            raise

    def problems(self) -> list[str]:
        """Return why the server is not ready; empty if it is."""
        problem = self._hosted.service.problem
        return super().problems() or ([f"model '{self.name}': {problem}"] if problem else [])

    async def drain(self, grace_s: float) -> None:
        """Stop, and free what is left."""
        self._hosted.service.cut()
        await super().drain(grace_s)
        await self._close()

    async def _close(self) -> None:
        await self._hosted.close()
        logs.end(self._handlers)
        self._handlers = []


class _Presence:
    """The file that says that this server runs."""

    def __init__(self, rpc: GrpcListener, http_port: int | None) -> None:
        self._rpc = rpc
        self._http_port = http_port
        self._file: Path | None = None

    def announce(self) -> None:
        """Write it, and tell the port of gRPC, which may be any."""
        assert self._rpc.address is not None
        host, rpc_port = self._rpc.address
        log.info("gRPC at %s:%d", f"[{host}]" if ":" in host else host, rpc_port)
        ports = tuple(port for port in (rpc_port, self._http_port) if port)
        try:
            self._file = running_servers.announce(ports, sys.argv[0])
        except (OSError, RuntimeError) as error:  # a user without a home
            log.warning("`forebay pipeline stop` will not find this server: %s", error)

    def end(self) -> None:
        """Remove it."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)


def _http(config: PipelineConfig, options: Options) -> tuple[HttpConfig, bool]:
    """Return the HTTP front and whether there is one: the command line overrides the configuration."""
    given = options.given
    changes: dict[str, Any] = {}
    if "host" not in given:
        changes["host"] = config.host
    if "port" not in given and config.http_port is not None:
        changes["port"] = config.http_port
    if "max_body_bytes" not in given:
        changes["max_body_bytes"] = config.max_message_bytes
    return msgspec.structs.replace(options.http, **changes), "port" in given or config.http_port is not None


def _misfits(dag: Dag, config: PipelineConfig) -> list[str]:
    """Return which ops want of their models what these do not give, as far as they are described."""
    from forebay.surfaces.pipeline.predictors import PredictorSettings
    from forebay.surfaces.pipeline.predictors.clients import require_described

    found: list[str] = []
    for name, settings in dag.settings.items():
        try:
            require_described(PredictorSettings.of_op(name, settings))
        except ConfigError as error:
            found.append(config.located(name, f"op '{name}': {error.message}"))
    return found


def _source(config: PipelineConfig, key: str) -> str:
    """Return where the configuration sets a key, and the key; empty if it does not."""
    place = config.places.get(key)
    return "" if place is None else f"{place}: {key}"


def _grpc(config: PipelineConfig, http: HttpConfig, limits: GrpcConfig) -> GrpcConfig:
    """Return the gRPC port: the one given or configured, else the one after HTTP's if it is free, else any."""
    port = config.rpc_port if limits.port is None else limits.port
    if port is None:
        port = http.port + 1 if 0 < http.port < LAST_PORT and _is_free(http.host, http.port + 1) else 0
    return msgspec.structs.replace(grpc_like(http, limits), port=port, max_message_bytes=config.max_message_bytes)


def _is_free(host: str, port: int) -> bool:
    try:
        require_free(host, port)
    except ConfigError:
        return False
    return True


def _summary(server: PreparedServer, dag: Dag, config: PipelineConfig, *, has_http: bool) -> list[str]:
    name = server.name or "any name"
    kind = "a thread" if config.dag.is_thread_op else "a process"
    post = f"POST /{server.name or '{name}'}/prediction, and " if has_http else ""
    lines = [f"{post}gRPC: {counted(len(dag.ops), 'op')}, {name}"]
    if config.build_dag_each_worker:
        lines.append(f"{counted(config.worker_num, 'process', 'processes')} with the whole graph each")
        kind = "a thread"
    else:
        lines.append(f"up to {counted(config.worker_num, 'request')} inside, {config.max_queue} may wait")
    for op, settings in dag.settings.items():
        before = ", ".join(one.name for one in dag.ops[op].get_input_ops())
        size = settings["batch_size"]
        batches = f", batches of up to {size}" if size > 1 else ""
        lines.append(f"{op} <- {before}: {settings['concurrency']} x {kind}{batches}")
    return lines


def _labels(dag: Dag, config: PipelineConfig) -> dict[str, list[str]]:
    """Return the text about each op in a drawing."""
    kind = "thread" if config.dag.is_thread_op or config.build_dag_each_worker else "process"
    labels: dict[str, list[str]] = {}
    for name, settings in dag.settings.items():
        labels[name] = [f"{type(dag.ops[name]).__name__}, {settings['concurrency']} x {kind}"]
        if settings["batch_size"] > 1:
            labels[name].append(f"batches of up to {settings['batch_size']}")
    return labels


def _ignored(config: PipelineConfig, options: Options) -> list[str]:
    """Say which of the given options and settings do nothing here."""
    overrides = {"worker_kind", "workers", "threads", "max_batch_size", "max_wait_ms", "idle", "timeout_ms"}
    overrides |= {"deadline_ms", "max_queue", "policy", "latency_objective_ms", "isolate_errors", "single_flight"}
    overrides |= {"stuck_s", "stream_idle_ms"}
    found = [
        f"--{name.replace('_', '-')}: a pipeline takes this from its configuration; the option is ignored"
        for name in sorted(overrides & options.given)
    ]
    if config.build_dag_each_worker and not config.dag.is_thread_op:
        found.append("dag.is_thread_op: false does nothing with build_dag_each_worker")
    return found
