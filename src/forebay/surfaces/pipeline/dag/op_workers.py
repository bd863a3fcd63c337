# SPDX-License-Identifier: Apache-2.0
"""The workers of one op: threads, or processes that execute the script again and take their op from it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.errors import ConfigError
from forebay.surfaces.pipeline import logs
from forebay.surfaces.pipeline import script as scripts
from forebay.surfaces.pipeline.dag.wiring import Dag, wire
from forebay.surfaces.pipeline.ops.op_store import OpStore
from forebay.surfaces.pipeline.ops.runner import OpInstances, OpRun, OpRunner
from forebay.surfaces.pipeline.predictors.client_watching import watch_of
from forebay.surfaces.pipeline.predictors.model_settings import PredictorSettings
from forebay.surfaces.pipeline.store.store import StoreConfig
from forebay.types.first_use import known

if TYPE_CHECKING:
    from forebay.surfaces.pipeline.config import PipelineConfig
    from forebay.surfaces.pipeline.prepared_server import PreparedServer


def instances_of(
    dag: Dag, name: str, config: PipelineConfig, store: Mapping[str, Any], *, own_process: bool
) -> OpInstances:
    """Make an op ready to be run.

    Args:
        store: The fields of the store's `StoreConfig`; if empty, the op has no store.
    """
    op, settings = dag.ops[name], dag.settings[name]
    before = [one.name for one in op.get_input_ops()]
    place = msgspec.convert(store, known(StoreConfig)) if store else None
    predictor = PredictorSettings.of_op(name, settings, pack_tensors=op.is_tensor_format)
    watch = watch_of(f"op '{name}'", predictor.local_service_conf)

    def client_for(index: int | None) -> Any:
        from forebay.surfaces.pipeline import predictors

        return predictors.client_for(predictor, concurrency_idx=index, process=own_process, watch=watch)

    return OpInstances(
        op,
        OpRun(
            timeout_ms=settings["timeout"],
            retry=settings["retry"],
            run_process=settings["run_process"],
            batch_style=settings["batch_style"],
            share_instance=settings["share_instance"],
            isolate_failures=settings["isolate_failures"],
            fetch_list=tuple(predictor.wanted),
            # What comes to another process is a copy already.
            shared_inputs=frozenset(one for one in before if dag.is_shared(one) and not own_process),
            debug_errors=config.debug_errors,
            one_by_one=settings["batch_size"] == 1,
        ),
        client_for=None if predictor.kind is None else client_for,
        store=None if place is None else OpStore(place),
        offloads_to=None if config.dag.external_store is None else place,
        own_process=own_process,
        located=functools.partial(config.located, name),
    )


def thread_runners(dag: Dag, name: str, config: PipelineConfig, store: Mapping[str, Any]) -> Callable[[], OpRunner]:
    """Return what makes the runner of each thread of this process; they share what `init_op` has made.

    See `instances_of`; `store` may be filled in until the first runner is made.
    """
    instances = functools.cache(lambda: instances_of(dag, name, config, store, own_process=False))
    return lambda: instances().runner()


def op_runner(script: Mapping[str, Any], name: str, store: Mapping[str, Any]) -> OpRunner:
    """Execute a script in this process and take one of its ops; the factory of process workers.

    Args:
        script: The fields of the `Script`.
    """
    dag, config = built(captured(script))
    return instances_of(dag, name, config, store, own_process=True).runner()


def built(server: PreparedServer) -> tuple[Dag, PipelineConfig]:
    """Return the graph of a prepared server, and its configuration."""
    config, end = server.config, server.response_op
    if config is None or end is None:
        missing = "set_response_op()" if end is None else "prepare_server()"
        raise ConfigError(f"the server runs without {missing}; call it before")
    return wire(server.name or "pipeline", end, config), config


def captured(script: Mapping[str, Any]) -> PreparedServer:
    """Execute a script in a process that was started for a worker, and return the server it was about to run."""
    server = scripts.capture(msgspec.convert(script, known(scripts.Script)))
    logs.to_stderr("info" if server.config is None else server.config.log_level or "info")
    return server
