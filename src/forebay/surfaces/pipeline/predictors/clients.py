# SPDX-License-Identifier: Apache-2.0
"""Which client an op gets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.remote_servers.kserve import KServeBackend
from forebay.remote_servers.servers import ServerAddress
from forebay.surfaces.pipeline.predictors.chained import ChainedClient
from forebay.surfaces.pipeline.predictors.client_watching import ModelWatch, watched_client
from forebay.surfaces.pipeline.predictors.descriptions import describe
from forebay.surfaces.pipeline.predictors.general_servers import GeneralModelBackend
from forebay.surfaces.pipeline.predictors.local_models import is_reference
from forebay.surfaces.pipeline.predictors.model_client import ModelClient, Predictor, require_wanted
from forebay.surfaces.pipeline.predictors.model_processes import HostedClient

if TYPE_CHECKING:
    from forebay.runtimes.model_file import Backend
    from forebay.runtimes.signature import Signature
    from forebay.surfaces.pipeline.predictors.model_settings import PredictorSettings


def client_for(
    settings: PredictorSettings, *, concurrency_idx: int | None, process: bool, watch: ModelWatch | None = None
) -> Predictor:
    """Make the client of one worker of an op; it is used by one call at a time, remote ones by any number.

    Args:
        concurrency_idx: Number of the worker process, which decides on the device; None in threads.
        process: Whether the worker is a process, which then starts a model service of its own where one is wanted;
            the threads of a server share one.
        watch: Replaces a model in this process when it changes; None keeps what is there now.

    Raises:
        ConfigError: If the settings are wrong, or a library or a file is missing.
        ModelError: If the model cannot be loaded.
    """
    settings = settings.checked()
    conf = settings.local_service_conf
    kind = settings.kind
    if kind is None:
        msg = f"op '{settings.name}' has no model; server_endpoints or local_service_conf.model_config names one"
        raise ConfigError(msg)
    if kind == "local_predictor":
        return watched_client(conf, settings.wanted, concurrency_idx, watch)
    if kind == "pipeline_grpc":
        return ChainedClient(settings)
    if settings.server_endpoints:
        signature = None if settings.client_config is None else _described(settings.client_config)
        return ModelClient(_backend(settings), signature, settings.wanted, is_shared=True)
    return HostedClient(settings, concurrency_idx if process else None)


def require_described(settings: PredictorSettings) -> None:
    """Check what an op wants of its model against a description of it, if there is one; no model is loaded.

    Raises:
        ConfigError: If the description cannot be read, or the model does not give what is wanted.
    """
    model, signature = settings.local_service_conf.model_config, None
    if settings.kind == "pipeline_grpc":
        return
    if settings.server_endpoints:
        signature = None if settings.client_config is None else _described(settings.client_config)
    elif model is not None and not is_reference(model):
        signature = describe(Path(model))
    if signature is not None:
        require_wanted(settings.wanted, signature)


def _backend(settings: PredictorSettings) -> Backend:
    scheme = "grpc" if settings.kind == "grpc" else "http"
    endpoints = [ServerAddress.parse(text, scheme, "server_endpoints") for text in settings.server_endpoints or ()]
    if settings.protocol == "kserve_v2":
        return KServeBackend(endpoints, settings.name, settings.timeout_s)
    return GeneralModelBackend(endpoints, settings.timeout_s)


def _described(client_config: str) -> Signature:
    path = Path(client_config)
    try:
        found = describe(path) if path.is_dir() else describe(path.with_suffix(".prototxt"))
    except ConfigError as error:
        raise ConfigError(f"client_config is '{client_config}', which cannot be used: {error.message}") from error
    if found is None:
        raise ConfigError(f"client_config is '{client_config}', and no serving_client_conf.prototxt is in it")
    return found
