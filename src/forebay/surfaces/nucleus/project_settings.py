# SPDX-License-Identifier: Apache-2.0
"""What a Nucleus project says of itself, as values."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forebay.repository.repository_address import SCHEMES
from forebay.types.did_you_mean import either, meant
from forebay.types.settings import Checked, Count, Line, Workers, Written, one_line

WRONG_TYPE = "'type' must be set to 'python' or 'tensorflow'"
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


MAX_NAME_BYTES = 255
"""How long the name of a folder may be."""


def _log_level(text: str) -> str:
    if text.lower() not in LOG_LEVELS:
        raise ValueError(f"expected {either(map(repr, LOG_LEVELS))}{meant(text, LOG_LEVELS)}")
    return text.lower()


def _folder_name(name: str) -> str:
    if not name or name.startswith(".") or "/" in one_line(name) or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise ValueError(f"expected the name of a folder: no '/', no dot in front, at most {MAX_NAME_BYTES} bytes")
    return name


def _folder_of_models(place: str) -> str:
    scheme, colon, rest = one_line(place).partition("://")
    if colon and scheme not in SCHEMES:
        raise ValueError(f"expected {either([*(f'{one}://' for one in SCHEMES), 'the path of a folder'])}")
    if colon and scheme != "file" and not rest.partition("/")[0]:
        raise ValueError(f"expected {scheme}://BUCKET/PREFIX")
    return place


def _model_place(place: str) -> str:
    scheme, colon, rest = _folder_of_models(place).partition("://")
    if colon and scheme != "file" and not rest.partition("/")[2].strip("/"):
        raise ValueError(f"expected {scheme}://BUCKET/PREFIX")
    return place


def _batch_size(size: int) -> int:
    if size < 1:
        raise ValueError("'max_batch_size' must be at least 1")
    return size


def _interval(seconds: Any) -> float:
    if type(seconds) not in {int, float}:
        raise ValueError("'batch_interval_seconds' field isn't of type 'float'")
    if not 0 < seconds < math.inf:
        raise ValueError("'batch_interval_seconds' must be more than 0")
    return seconds


_VERSION = Checked(one_line, "expected a version such as '3.9'")
Version = Annotated[str, _VERSION, Written(is_verbatim=True)]
"""A version is a text, even where somebody has left out the quotes."""


class GpuVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The image a GPU project is built on; versions are texts, as written."""

    cuda: Annotated[str, _VERSION, Written(is_verbatim=True, missing="'cuda' field must be specified")]
    cudnn: Annotated[str, _VERSION, Written(is_verbatim=True, missing="'cudnn' field must be specified")]
    development_image: bool = False


class Dependencies(msgspec.Struct, frozen=True, kw_only=True):
    """The files that say what to install, relative to the project folder; any of them may be missing there."""

    pip: Line = "requirements.txt"
    conda: Line = "conda-packages.txt"
    shell: Line = "dependencies.sh"


class ModelPath(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of `paths`."""

    name: Annotated[str, Checked(_folder_name), Written(missing="name field required")]
    path: Annotated[str, Checked(_model_place), Written(missing="path field required")]
    signature_key: Line | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True):
    """`multi_model_reloading`, or `models`: exactly one of `path`, `paths` and `dir` is set."""

    path: Annotated[str, Checked(_model_place)] | None = None
    paths: tuple[ModelPath, ...] | None = None
    dir: Annotated[str, Checked(_folder_of_models)] | None = None
    signature_key: Line | None = None
    cache_size: Count | None = None
    disk_cache_size: Count | None = None


class ServerSideBatching(msgspec.Struct, frozen=True, kw_only=True):
    """`server_side_batching`."""

    max_batch_size: Annotated[
        int,
        Checked(_batch_size, "'max_batch_size' field isn't of type 'int'"),
        Written(missing="missing 'max_batch_size' field"),
    ]
    batch_interval_seconds: Annotated[
        int | float, Checked(_interval), Written(missing="missing 'batch_interval_seconds' field")
    ]


class NucleusFile(msgspec.Struct, frozen=True, kw_only=True):
    """What a file says, with its defaults; the names are those of its keys."""

    type: Annotated[Literal["python", "tensorflow"], Checked(needed=WRONG_TYPE), Written(missing=WRONG_TYPE)]
    path: Annotated[Line, Written(missing="'path' field missing: it names the file with the Handler class")]
    py_version: Version = DEFAULT_PYTHON
    tfs_version: Version | None = None
    tfs_container_dns: Line | None = None
    gpu: bool = False
    gpu_version: GpuVersion | None = None
    dependencies: Dependencies = Dependencies()
    serve_port: Annotated[int, Meta(ge=1, le=65_535)] = DEFAULT_PORT
    env: dict[str, str] = {}
    config: dict[Any, Any] = {}
    python_path: Line = "."
    protobuf_path: Line | None = None
    multi_model_reloading: Models | None = None
    models: Models | None = None
    server_side_batching: ServerSideBatching | None = None
    processes: Workers = 1
    threads_per_process: Workers = 1
    max_concurrency: Annotated[int, Meta(ge=0)] = 0
    log_level: Annotated[str, Checked(_log_level)] = "info"
    use_local_cortex_libs: bool = False


class NucleusConfig(NucleusFile, frozen=True, kw_only=True):
    """A project's configuration.

    Attributes:
        file: The configuration file, absolute.
        project_dir: The folder it lies in.
        given: The top-level keys the file sets, for where a default and the same value given mean different things.
    """

    file: Path
    project_dir: Path
    given: frozenset[str]

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


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}  # pyright: ignore[reportUnknownVariableType]
    if isinstance(value, list | tuple):
        return [_without_nulls(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return value
