# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a Nucleus project's handler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from forebay.surfaces.nucleus.config import has_accelerator
from forebay.surfaces.nucleus.environment import import_path, worker_environment
from forebay.surfaces.nucleus.project_models import model_dir_of, signature_keys, tfs_address
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options
    from forebay.surfaces.nucleus.project_settings import NucleusConfig
    from forebay.surfaces.nucleus.proto import UserService


def spec_of(config: NucleusConfig, service: UserService | None) -> RunnerSpec:
    """Return how a worker builds the handler; `service` is its gRPC service, None for HTTP."""
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
            kwargs["models"]["tensorflow"] = {
                "keys": signature_keys(models),
                "address": tfs_address(config),
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


def pool_of(
    spec: RunnerSpec, config: NucleusConfig, options: Options, port: int, on_death: Callable[[int], None]
) -> ProcessPool:
    """Return the processes that run the handler; `on_death` is called with the status of one that dies."""
    # What a handler prints is to be seen at once, as it was in the original's image.
    model_dir, log_level = model_dir_of(options), options.log_level
    told = worker_environment(config, port, os.environ, model_dir=model_dir, log_level=log_level)
    env = {"PYTHONUNBUFFERED": "TRUE", **told}
    return ProcessPool(
        spec,
        workers=processes_of(config, options),
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


def processes_of(config: NucleusConfig, options: Options) -> int:
    """Return how many processes run the handler."""
    return options.overrides.fixed_workers or config.processes
