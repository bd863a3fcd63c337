# SPDX-License-Identifier: Apache-2.0
"""The workers that a person asks for: inline, in threads or in processes, for models, nodes and servings alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from forebay.errors import ConfigError
from forebay.surfaces.native.model_options import environment_of
from forebay.workers.pools.health_checks import HealthChecks
from forebay.workers.pools.inline import InlinePool
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.pools.threads import ThreadPool

if TYPE_CHECKING:
    from forebay.server.config import Overrides, WorkerKind
    from forebay.types.devices import Device
    from forebay.workers.pool import Pool
    from forebay.workers.runner import Runner, RunnerSpec


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """Workers, as they are wanted.

    Attributes:
        what: What runs in them, for messages.
        kind: Where they run.
        devices: What they run on.
        seats: Rows of streams that may be open in each.
        isolates: Whether what shares the way to a worker is not to share its end.
        is_async: Whether one loop runs several at a time.
        has_health: Whether what runs says how it is.
        path: Folders that processes import from as well.
        local: Builds what runs, where it need not be imported.
    """

    what: str
    kind: WorkerKind
    count: int
    threads: int = 1
    devices: Sequence[Device] = ()
    seats: int = 0
    isolates: bool = False
    is_async: bool = False
    has_health: bool = False
    path: Sequence[str] = ()
    local: Callable[[], Runner] | None = None


def pool_of(spec: RunnerSpec, workers: Workers, overrides: Overrides) -> Pool:
    """Return a pool of workers.

    Args:
        spec: How a worker that is a process builds what it runs.

    Raises:
        ConfigError: If it does not go together.
    """
    pool = _pool_of(spec, workers, overrides)
    if workers.has_health:
        every_s, max_failures = overrides.health_s, overrides.max_health_failures
        pool.health = HealthChecks(every_s, max_failures, pool.check, pool.replace, pool.wake)
    return pool


def _pool_of(spec: RunnerSpec, workers: Workers, overrides: Overrides) -> Pool:
    if overrides.bounds is not None and workers.kind != "process":
        raise ConfigError(
            f"{workers.what}: workers is a range, {overrides.bounds}, and only processes can be started and ended as "
            f"the load asks; leave out worker_kind, which is {workers.kind}, or give a number"
        )
    if workers.kind == "process":
        return ProcessPool(
            spec,
            workers=workers.count,
            threads=workers.threads,
            python=overrides.python,
            env=environment_of(overrides),
            path=workers.path,
            isolates=workers.isolates,
            stuck_s=overrides.stuck_s,
            devices=workers.devices,
            seats=workers.seats,
            bounds=overrides.bounds,
        )
    spec = msgspec.structs.replace(spec, local=workers.local)
    if workers.kind == "thread":
        return ThreadPool(
            spec,
            workers=workers.count,
            threads=workers.threads,
            stuck_s=overrides.stuck_s,
            devices=workers.devices,
            seats=workers.seats,
        )
    if workers.threads > 1:
        msg = f"{workers.what}: worker kind inline has no threads, found {workers.threads}; use thread or process"
        raise ConfigError(msg)
    return InlinePool(
        spec, slots=workers.count if workers.is_async else 1, devices=workers.devices, seats=workers.seats
    )
