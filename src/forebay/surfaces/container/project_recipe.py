# SPDX-License-Identifier: Apache-2.0
"""Recipe of a project that is ready to be served, for surfaces that have nothing of their own to say."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from forebay.errors import ConfigError
from forebay.surfaces.container.recipe import Recipe, called, tls_of
from forebay.surfaces.contract import Options, Project


def recipe_of(
    project: Project | None,
    options: Options,
    *,
    folder: Path | None,
    target: Sequence[str],
    extras: Sequence[str] = (),
    protocol: str = "v2",
    writes: Sequence[str] = (),
) -> Recipe:
    """Return what a container of a project needs.

    Args:
        project: It; None for one that is only looked at where it is served.
        target: What is served, for `forebay serve` in that folder.
        writes: Folders that it writes to.

    Raises:
        ConfigError: If it cannot be served so.
    """
    from forebay.transports.grpc.listener import GrpcListener

    http = options.http if project is None else project.http
    has_http = project is None or project.asgi is not None
    if has_http and not options.extra_routes:
        raise ConfigError("--no-extra-routes: who runs containers asks /readyz whether they are ready; leave it away")
    listeners = [] if project is None else project.listeners
    grpc = next((one.port for one in listeners if isinstance(one, GrpcListener)), options.grpc.port)
    if 0 in {http.port if has_http else None, options.grpc.port}:
        raise ConfigError("port 0 is any that is free, and a container opens one that is known; say which")
    endpoints = [] if project is None else [served.endpoint for served in project.app.served.values()]
    pools = [(endpoint.pool.statistics(), endpoint.batching.max_size) for endpoint in endpoints]
    devices = {device for statistics, _ in pools for device in statistics.devices if not device.startswith("cpu")}
    return Recipe(
        name=called(folder.name if folder is not None else target[0].rstrip("/").rpartition("/")[2]),
        folder=folder,
        serve=tuple(target),
        arguments=options.arguments,
        python=f"{sys.version_info.major}.{sys.version_info.minor}",
        extras=tuple(sorted({*extras, *([] if grpc is None else ["grpc"]), *(["otel"] if options.otel else [])})),
        http_port=http.port if has_http else None,
        grpc_port=http.port + 1 if grpc == 0 else grpc,
        tls=tls_of(http),
        protocol=protocol,
        has_keys=bool(http.api_keys),
        writes=tuple(writes),
        gpus=len(devices),
        workers=max((statistics.slots for statistics, _ in pools), default=options.overrides.fixed_workers or 1),
        capacity=min((statistics.slots * size for statistics, size in pools), default=32),
        drain_s=options.drain_s,
        warnings=() if project is None else tuple(project.warnings),
    )
