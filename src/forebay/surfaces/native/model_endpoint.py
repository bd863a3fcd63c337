# SPDX-License-Identifier: Apache-2.0
"""Endpoint of a model class or a model file: its settings, its queue and the pool that runs it."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from forebay.errors import ConfigError
from forebay.server.served import Served
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.serving.models.annotations import io_types
from forebay.serving.models.batch_keys import MethodKeys, SampleKeys
from forebay.serving.models.model import Model, ModelSettings, settings_of
from forebay.serving.models.model_runner import runner_for
from forebay.serving.models.tensor_codec import codec_for
from forebay.surfaces.native.attached_models import project_pool
from forebay.surfaces.native.describe import describe, faces_of
from forebay.surfaces.native.model_files import read_model_file
from forebay.surfaces.native.model_options import (
    batching_of,
    devices_of,
    isolates,
    named,
    seats_of,
    single_flight_of,
    stream_idle_of,
    times_of,
    workers_of,
)
from forebay.surfaces.native.pools import Workers, pool_of
from forebay.surfaces.native.target_file import package_in, root_of
from forebay.workers.runner import RunnerSpec

if TYPE_CHECKING:
    from forebay.runtimes.library import OpenVinoOptions
    from forebay.runtimes.trial import SharedFile
    from forebay.server.config import Overrides
    from forebay.serving.models.schema import WireType
    from forebay.workers.pool import Pool

log = logging.getLogger("forebay")


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
    typed = [(one, io_types(model, one)) for one in settings.methods]
    for one, read in ((settings, given), *((one, types[0]) for one, types in typed)):
        kinds = ("thread", "inline") if one.is_async else ("thread",)
        if read.in_pieces and overrides.worker_kind not in kinds:
            msg = f"{where} takes bodies as they arrive, which workers of kind {overrides.worker_kind} cannot"
            raise ConfigError(f"{msg}; use worker_kind {' or '.join(kinds)} (--worker-kind thread)")
    pool = _pool(model, settings, overrides, spec, files)
    batched = msgspec.structs.replace(settings, max_batch_size=1) if given.in_pieces and not typed else settings
    endpoint = endpoint_of(where, batched, pool, overrides, keys)
    codecs = [(one, types, codec_for(model, *types, one.name)) for one, types in typed]
    methods = [(one, types, None if types[0].in_pieces else codec.face) for one, types, codec in codecs]
    face, further = faces_of(settings, (given, answer), methods, shares_disk=not overrides.dials_in)
    tensors = None if given.in_pieces else codec_for(model, given, answer).face
    return Served(endpoint, face.contract, face.described, methods=further, tensors=tensors)


def endpoint_of(
    where: str, settings: ModelSettings, pool: Pool, overrides: Overrides, keys: SampleKeys | None = None
) -> Endpoint:
    """Put a pool behind the queue that a model asks for.

    Args:
        where: The model, as messages name it.

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
        stream_idle_s=stream_idle_of(settings, overrides),
        single_flight=single_flight_of(where, settings, overrides),
    )
    keys_of = MethodKeys(keys) if settings.methods else keys
    return Endpoint(config, batching_of(where, settings, overrides), pool, keys_of)


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
        spec = spec_of(file, model.__name__, isolate_errors=is_isolating, package=package_in(model.__module__))
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
        has_health=settings.has_health,
        path=root_of(model.__module__),
        local=lambda: runner_for(model, isolate_errors=is_isolating, files=loaded),
    )
    return pool_of(spec, wanted, overrides)


def spec_of(file: Path, name: str, *, isolate_errors: bool, package: str = "") -> RunnerSpec:
    """Return how a worker builds the runner of a class in a file."""
    kwargs = {"path": str(file.absolute()), "name": name, "isolate_errors": isolate_errors, "package": package}
    return RunnerSpec(factory="forebay.serving.models.model_runner:from_file", kwargs=kwargs)
