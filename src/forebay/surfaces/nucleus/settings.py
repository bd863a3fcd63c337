# SPDX-License-Identifier: Apache-2.0
"""What a Nucleus project says of itself, as values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

TYPES = ("python", "tensorflow")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_PYTHON = "3.6.9"
DEFAULT_TENSORFLOW = "2.3.0"
DEFAULT_TFS_HOST = "localhost"
DEFAULT_PORT = 8080
DEFAULT_MODEL = "_cortex_default"
"""What a model without a name is called."""
NO_PYTHON_CLIENT = (
    "'models' field not supported for 'python' type, which has 'multi_model_reloading'; it is for handlers that ask "
    "for their models by python_client: def __init__(self, config, python_client)"
)
"""Why a Python project cannot have `models`."""


class GpuVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The image a GPU project is built on; versions are texts, as written."""

    cuda: str
    cudnn: str
    development_image: bool = False


class Dependencies(msgspec.Struct, frozen=True, kw_only=True):
    """The files that say what to install, relative to the project folder; any of them may be missing there."""

    pip: str = "requirements.txt"
    conda: str = "conda-packages.txt"
    shell: str = "dependencies.sh"


class ModelPath(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `paths`."""

    name: str
    path: str
    signature_key: str | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """`multi_model_reloading`, or `models`: exactly one of `path`, `paths` and `dir` is set."""

    path: str | None = None
    paths: tuple[ModelPath, ...] | None = None
    dir: str | None = None
    signature_key: str | None = None
    cache_size: int | None = None
    disk_cache_size: int | None = None


class ServerSideBatching(msgspec.Struct, frozen=True, kw_only=True):
    """`server_side_batching`."""

    max_batch_size: int
    batch_interval_seconds: float


class NucleusConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A project's configuration. Its fields have the names of the file's keys, and these besides.

    Attributes:
        file: The configuration file, absolute.
        project_dir: The folder it lies in.
        given: The top-level keys the file sets, for where a default and the same value given mean different things.
    """

    file: Path
    project_dir: Path
    given: frozenset[str]
    type: str
    path: str
    py_version: str = DEFAULT_PYTHON
    tfs_version: str | None = None
    tfs_container_dns: str | None = None
    gpu: bool = False
    gpu_version: GpuVersion | None = None
    dependencies: Dependencies = Dependencies()
    serve_port: int = DEFAULT_PORT
    env: dict[str, str] = {}
    config: dict[Any, Any] = {}
    python_path: str = "."
    protobuf_path: str | None = None
    multi_model_reloading: Models | None = None
    models: Models | None = None
    server_side_batching: ServerSideBatching | None = None
    processes: int = 1
    threads_per_process: int = 1
    max_concurrency: int = 0
    log_level: str = "info"
    use_local_cortex_libs: bool = False

    @property
    def post_batching(self) -> ServerSideBatching | None:
        """How posts are batched for the handler; those of TensorFlow projects are batched below it."""
        return None if self.protobuf_path or self.type == "tensorflow" else self.server_side_batching

    @property
    def served_models(self) -> Models | None:
        """The models of the project, under whichever key they stand."""
        return self.multi_model_reloading or self.models

    @property
    def handler_file(self) -> Path:
        """The file `path` names."""
        return self.project_dir / self.path

    @property
    def python_dir(self) -> Path:
        """The folder `python_path` names."""
        return Path(os.path.normpath(self.project_dir / self.python_path))

    def defaulted(self) -> dict[str, Any]:
        """Return the configuration as plain data with every default filled in."""
        plain: dict[str, Any] = msgspec.to_builtins(
            msgspec.structs.replace(self, config={}, file=None, project_dir=None)
        )
        for name in ("file", "project_dir", "given"):
            del plain[name]
        plain["config"] = self.config
        return {name: _without_nulls(value) for name, value in plain.items() if value is not None}


KEYS = tuple(name for name in NucleusConfig.__struct_fields__ if name not in {"file", "project_dir", "given"})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
