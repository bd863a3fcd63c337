# SPDX-License-Identifier: Apache-2.0
"""`file.py:serving`: a `forebay.Serving` object over HTTP."""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from forebay.batching.queue import BatchConfig
from forebay.errors import ConfigError
from forebay.protocols.native import Contract
from forebay.protocols.openapi import Described
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.model import Model, defined_models, kebab
from forebay.serving.models.schema import WireType
from forebay.serving.nx_serving import caller
from forebay.serving.nx_serving.definition import Serving
from forebay.serving.nx_serving.request_runner import RequestRunner, face_of, query_key
from forebay.serving.nx_serving.serving_options import ProcessOptions, options_of, partitions_of
from forebay.surfaces.native.model_options import devices_of, times_of, workers_of
from forebay.surfaces.native.pools import Workers, pool_of
from forebay.types.did_you_mean import nearest
from forebay.types.names import NAME
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.server.config import Overrides
    from forebay.types.call import Request
    from forebay.workers.pool import Pool

STREAMS = 16
"""Streams that take turns on a worker of a serving that streams; a turn is a batch of one of them."""


def serving_in(module: ModuleType, name: str | None) -> Serving[Any, Any] | None:
    """Return the serving of that name, if there is one.

    Raises:
        ConfigError: If nothing has that name, and a serving has one much like it; or there is no name, and there are
            servings but no models.
    """
    names = [other for other, value in vars(module).items() if isinstance(value, Serving)]
    if name is None:
        if names and not defined_models(module):
            raise ConfigError(
                f"{module.__file__} defines no forebay.Model, but servings: {', '.join(names)}; "
                f"say which one is served: {Path(str(module.__file__)).name}:{names[0]}"
            )
        return None
    found = getattr(module, name, None)
    if isinstance(found, Serving):
        return cast("Serving[Any, Any]", found)
    hint = nearest(name, names)
    if found is None and hint is not None:
        raise ConfigError(f"{module.__file__} has no forebay.Serving named {name}; did you mean {hint}?")
    return None


def serve_serving(serving: Serving[Any, Any], path: Path, name: str, overrides: Overrides) -> Served:
    """Build the endpoint of a serving.

    Args:
        name: Its name there, and, in kebab-case, that of the endpoint.

    Raises:
        ConfigError: If person and serving want what does not go together.
    """
    options = options_of(serving.settings, {})
    endpoint_name = overrides.name or kebab(name)
    if re.fullmatch(NAME, endpoint_name) is None:
        msg = f"{path}: expected a serving whose name begins with a letter, as its endpoint's does, got {name!r}"
        raise ConfigError(msg)
    if overrides.policy is not None or overrides.isolate_errors:
        msg = f"{path}:{name} is a Serving, which knows no --policy and no --isolate-errors; a forebay.Model does"
        raise ConfigError(msg)
    if overrides.threads > 1:
        raise ConfigError(
            f"{path}:{name} is a Serving, whose workers run one batch at a time; give it more --workers, not --threads"
        )
    caller.require_blocking(serving.settings, f"{path}:{name}")
    if options.distribution_weight != 1 or serving.settings.distributed_postprocessing is not None:
        said = "distributed_postprocessing" if options.distribution_weight == 1 else "distribution_weight"
        raise ConfigError(
            f"{path}:{name} has {said}, which only programs that join a cluster use (forebay.cluster.join): start the "
            "serving in one, or leave it out"
        )
    streams = serving.settings.streaming is not None
    sharing = overrides.single_flight or "off"
    if streams and sharing != "off":
        raise ConfigError(f"{path}:{name} streams, and equal requests share no stream; leave out --single-flight")
    has_keys = options.batch_keys != ("default",)
    where = f"{path}:{name}"
    idle_ms = overrides.stream_idle_ms
    timeout_s, max_timeout_s = times_of(where, overrides.timeout_ms, Model.timeout_ms, overrides.max_timeout_ms)
    config = EndpointConfig(
        name=endpoint_name,
        version=overrides.version or "1",
        timeout_s=timeout_s,
        max_timeout_s=max_timeout_s,
        deadline_ms=overrides.deadline_ms,
        streams=streams,
        stream_idle_s=(Model.stream_idle_ms if idle_ms is None else idle_ms) / 1000,
        single_flight=sharing,
    )
    keys = _Keys(options.batch_keys) if has_keys else None
    endpoint = Endpoint(
        config, _batching(options, overrides, streams=streams), _pool(serving, path, name, options, overrides), keys
    )
    described = Described(
        name=endpoint_name,
        version=config.version,
        description=_description(serving, options),
        input=WireType(Any),
        output=WireType(Any, "output"),
        streams=streams,
    )
    contract = Contract(streams=streams, query=("key",) if has_keys else ())
    return Served(endpoint, contract, described, tensors=face_of(serving))


class _Keys:
    """Reads the batch key of a request off its query."""

    def __init__(self, batch_keys: Sequence[Hashable]) -> None:
        self._batch_keys = batch_keys

    def __call__(self, request: Request) -> Sequence[Hashable]:
        # Without one, the client preprocessing may give the batch its key; it runs in the worker.
        return [query_key(request.params, self._batch_keys) if "key" in request.params else None]


def _batching(options: ProcessOptions, overrides: Overrides, *, streams: bool) -> BatchConfig:
    wait_ms = options.batch_timeout_ms if overrides.max_wait_ms is None else overrides.max_wait_ms
    return BatchConfig(
        max_size=1 if streams else overrides.max_batch_size or options.batch_size,
        max_wait_s=wait_ms / 1000,
        capacity=overrides.max_queue or options.capacity,
        idle=overrides.idle or "wait",
    )


def _pool(serving: Serving[Any, Any], path: Path, name: str, options: ProcessOptions, overrides: Overrides) -> Pool:
    devices = devices_of(f"{path}:{name}", overrides.devices, overrides.worker_kind)
    workers = workers_of(overrides.fixed_workers, devices)
    if options.partitions is not False:
        workers = max(workers, len(partitions_of(serving.settings, options)))
    batch_size = overrides.max_batch_size or options.batch_size
    spec = RunnerSpec(
        factory="forebay.serving.nx_serving.request_runner:from_file",
        kwargs={
            "path": str(path.absolute()),
            "name": name,
            "workers": workers,
            "batch_size": batch_size,
            "has_device": bool(devices),
        },
    )
    wanted = Workers(
        what=f"{path}:{name}",
        kind=overrides.worker_kind,
        count=workers,
        devices=devices,
        seats=0 if serving.settings.streaming is None else STREAMS,
        local=lambda: RequestRunner(serving, workers, batch_size, has_device=bool(devices)),
    )
    return pool_of(spec, wanted, overrides)


def _description(serving: Serving[Any, Any], options: ProcessOptions) -> str:
    text = repr(serving)
    if options.batch_keys != ("default",):
        text += f". The batch key is named in the query as ?key=, one of {', '.join(map(str, options.batch_keys))}."
    return text
