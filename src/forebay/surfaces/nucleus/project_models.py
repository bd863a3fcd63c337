# SPDX-License-Identifier: Apache-2.0
"""Models of a Nucleus project: where they come from, where they lie here, and what `/info` says of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.surfaces.nucleus.environment import MODEL_DIR, TFS_PORT, handler_environment
from forebay.surfaces.nucleus.worker_requests import Desk

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options
    from forebay.surfaces.nucleus.model_store import ModelStore
    from forebay.surfaces.nucleus.project_settings import Models, NucleusConfig

_OF_STORES: Final = ("AWS_", "GOOGLE_", "AZURE_")
"""How variables begin that say how to reach stores."""


def store_of(models: Models, config: NucleusConfig, options: Options, desk: Desk) -> ModelStore:
    """Return what copies the models of a project here and tells its workers."""
    from forebay.repository.bucket_listing import ListingLimits
    from forebay.surfaces.nucleus.model_store import ModelStore, source_for

    # What the project says of stores holds for who reads them as well, and that is this process.
    for name, value in handler_environment(config, options.http.port, os.environ).items():
        if name.startswith(_OF_STORES):
            os.environ[name] = value
    looks = options.repository
    source = source_for(models, config.project_dir, ListingLimits(looks.timeout_s, looks.max_files))
    size = models.disk_cache_size
    store = partial(ModelStore, source, model_dir_of(options), desk, disk_cache_size=size, looks=looks)
    if config.type == "python":
        return store()
    from forebay.repository.tree_rules import TreeRules
    from forebay.runtimes.saved_model import files_problem

    rules, tfs = TreeRules(kind="models", holds=files_problem), None
    if address := tfs_address(config):
        from forebay.remote_servers.servers import ServerAddress
        from forebay.surfaces.nucleus.tfs_models import TfsModels

        where = ServerAddress.parse(address, "grpc", "tfs_container_dns")
        tfs = TfsModels(where, model_dir_of(options).absolute() / "tfs")
    return store(rules=rules, tfs=tfs)


def tfs_address(config: NucleusConfig) -> str:
    """Return where TensorFlow Serving is, if the project says that it runs its models."""
    if config.type != "tensorflow" or "tfs_container_dns" not in config.given or not config.tfs_container_dns:
        return ""
    host = config.tfs_container_dns
    return host if ":" in host else f"{host}:{TFS_PORT}"


def signature_keys(models: Models) -> dict[str, Any]:
    """Return which signature of a TensorFlow model is asked: the default, and those of single models."""
    of = {one.name: one.signature_key for one in models.paths or () if one.signature_key}
    return {"default": models.signature_key, "of": of}


def info_of(config: NucleusConfig, store: ModelStore) -> Callable[[], dict[str, Any]]:
    """Return what tells of the models at `/info`."""
    models = config.served_models
    if config.type == "python" or models is None or models.cache_size is not None:
        return store.info
    from forebay.surfaces.nucleus.tensorflow_signatures import told
    from forebay.workers.user_calls.user_code import caught

    keys = msgspec.json.encode(signature_keys(models))

    def info() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for revision, folder in store.folders():
            about, problem = caught(told, str(folder), keys, revision.model, revision.version)
            if problem is None:  # what cannot be loaded is none, and was logged
                stamp = {"timestamp": int(revision.modified_s)}
                found[f"{revision.model}-{revision.version}"] = {**about, **stamp}
        return {"model_metadata": found}

    return info


def model_dir_of(options: Options) -> Path:
    """Return the folder that models are copied to."""
    return MODEL_DIR if options.state_dir is None else options.state_dir / "models"
