# SPDX-License-Identifier: Apache-2.0
"""`nucleus.yaml`: read, checked and filled with its defaults.

Where the original has a text for a mistake, that text stands in the message, so that whoever searches for it finds it;
the place, what was found and what is allowed stand around it. What hangs on several keys, or on the machine, is here;
the structs say the rest.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from forebay.server import yaml
from forebay.server.config_document import Document
from forebay.server.config_document import Path as Place
from forebay.server.struct_reader import StructReader, dotted
from forebay.surfaces.nucleus.project_settings import (
    DEFAULT_MODEL,
    DEFAULT_TENSORFLOW,
    DEFAULT_TFS_HOST,
    NO_PYTHON_CLIENT,
    ModelPath,
    Models,
    NucleusConfig,
    NucleusFile,
)
from forebay.types.did_you_mean import meant


def read_config(path: Path, *, serving: bool = True) -> tuple[NucleusConfig, list[str]]:
    """Read a configuration file; returns it, and what is odd about it but does not stop it.

    Args:
        serving: Whether the project is to be served here; else it is to be packed, which asks for less (the handler may
            still be missing) and in places for more (as the original's generator does).

    Raises:
        ConfigError: With the place in the file, what was found and what is allowed.
    """
    reader = _Reader(yaml.load(yaml.read(path), str(path)), serving=serving)
    return reader.config(Path(os.path.abspath(path))), reader.warnings  # noqa: PTH100 - links stay as they are


class _Reader(StructReader):
    is_lenient = True

    def __init__(self, document: Document, *, serving: bool) -> None:
        super().__init__(document)
        self._serving = serving

    def config(self, file: Path) -> NucleusConfig:
        found = self.struct((), self.document.data, NucleusFile)
        given = frozenset(key for key, value in self.mapping((), self.document.data).items() if value is not None)
        values = msgspec.structs.asdict(found)
        if found.type == "tensorflow":
            values["tfs_version"] = found.tfs_version or DEFAULT_TENSORFLOW
            values["tfs_container_dns"] = found.tfs_container_dns or DEFAULT_TFS_HOST
        config = NucleusConfig(**values, file=file, project_dir=file.parent, given=given)
        self._check(config)
        return config

    def variable(self, path: Place, value: Any) -> str:
        """Write it as Python does: that is what the original's handlers see."""
        return str(value)

    # What hangs on several keys, and on the machine

    def _check(self, config: NucleusConfig) -> None:
        if config.type == "tensorflow" and config.models is None:
            self.fail(("type",), "'models' field missing: it is required for 'tensorflow' type")
        if config.type == "python":
            for key in ("tfs_version", "tfs_container_dns"):
                if key in config.given:
                    self.fail((key,), f"'{key}' field not supported for 'python' type")
        self._check_gpu(config)
        for key, models in (("models", config.models), ("multi_model_reloading", config.multi_model_reloading)):
            if models is not None:
                self._check_models(key, models, config)
        if config.server_side_batching and config.protobuf_path and config.type == "python":
            self.warn(("server_side_batching",), "server_side_batching: ignored, gRPC (protobuf_path) has no batching")
        if self._serving:
            self._check_here(config)
        else:
            self._check_packed(config)

    def _check_gpu(self, config: NucleusConfig) -> None:
        if config.gpu_version is None:
            if config.gpu and config.type == "python":
                self.fail(("gpu",), "when gpu is enabled, the 'gpu_version' field must be specified too")
        elif config.type == "tensorflow":
            self.fail(("gpu_version",), "'gpu_version' field not supported for 'tensorflow' type")
        elif not config.gpu:
            text = "gpu must be enabled (by setting 'gpu: true') in order to specify 'gpu_version' field"
            self.fail(("gpu_version",), text)

    def _check_packed(self, config: NucleusConfig) -> None:
        """Check what the original's generator is stricter about."""
        gpu = config.gpu_version
        versions: dict[Place, str | None] = {(key,): getattr(config, key) for key in ("py_version", "tfs_version")}
        versions |= {("gpu_version", key): getattr(gpu, key) for key in ("cuda", "cudnn") if gpu is not None}
        for path, version in versions.items():
            if version is not None and not re.fullmatch(r"[\w.+-]+", version):
                self.wrong(path, version, "expected a version such as '3.9'")
        batching = config.server_side_batching
        if batching is not None and isinstance(batching.batch_interval_seconds, int):
            seconds = batching.batch_interval_seconds
            text = f"'batch_interval_seconds' field isn't of type 'float'; write {seconds}.0"
            self.wrong(("server_side_batching", "batch_interval_seconds"), seconds, text)

    def _check_models(self, key: str, models: Models, config: NucleusConfig) -> None:
        if (key == "models") == (config.type == "python") and not (self._serving and config.type == "python"):
            other = "models" if config.type == "tensorflow" else "multi_model_reloading"
            self.fail((key,), f"'{key}' field not supported for '{config.type}' type, which has '{other}'")
        places = [name for name in ("path", "paths", "dir") if getattr(models, name) is not None]
        if len(places) != 1:
            found = " and ".join(f"'{name}'" for name in places) or "none of them"
            self.fail((key,), f"{key}: can only specify 'path', 'paths' or 'dir', exactly one of them; found {found}")
        if models.paths == ():
            text = "if the 'path' field list is specified, then its length must be at least 1"
            self.fail((key, "paths"), f"{key}: {text}")
        names = [one.name for one in models.paths or ()]
        for index, name in enumerate(names):
            if name in names[:index]:
                text = f"the name {name!r} is taken by an entry above; names are unique"
                self.fail((key, "paths", index), f"{dotted((key, 'paths', index))}: {text}")
        self._check_cache(key, models, config)

    def _check_cache(self, key: str, models: Models, config: NucleusConfig) -> None:
        memory, disk = models.cache_size, models.disk_cache_size
        if memory is None and disk is None:
            return
        given = (key, "disk_cache_size" if memory is None else "cache_size")
        if memory is None or disk is None:
            text = "when the cache is configured, both 'cache_size' and 'disk_cache_size' fields must be specified"
        elif memory > disk:
            text = "when the cache is configured, 'cache_size' cannot be larger than 'disk_cache_size'"
            text += f": {memory} is more than {disk}"
        elif models.path is not None:
            text = "'cache_size' needs 'dir' or 'paths', found 'path', which is one model"
        elif config.processes > 1:
            text = f"'cache_size' needs 'processes' to be 1, found {config.processes}"
        else:
            return
        self.fail(given, f"{key}: {text}")

    def _check_here(self, config: NucleusConfig) -> None:
        if not config.handler_file.is_file():
            siblings = [str(file.relative_to(config.project_dir)) for file in config.project_dir.glob("*.py")]
            text = f"path: there is no file {config.path} in {config.project_dir}{meant(config.path, siblings)}"
            self.fail(("path",), text)
        if config.type == "python" and config.models is not None:
            taken = _constructor_arguments(config.handler_file)
            if taken is not None and "python_client" not in taken:
                self.fail(("models",), NO_PYTHON_CLIENT)
        if config.protobuf_path and not (config.project_dir / config.protobuf_path).is_file():
            siblings = [str(file.relative_to(config.project_dir)) for file in config.project_dir.rglob("*.proto")]
            near = meant(config.protobuf_path, siblings)
            text = f"protobuf_path: there is no file {config.protobuf_path} in {config.project_dir}{near}"
            self.fail(("protobuf_path",), text)
        if not config.python_dir.is_dir():
            self.warn(("python_path",), f"python_path: there is no folder {config.python_dir}")
        here = sys.version_info
        wanted = config.py_version.split(".")[:2]
        if "py_version" in config.given and wanted != [str(here.major), str(here.minor)][: len(wanted)]:
            text = f"py_version: {config.py_version} is asked for, this is Python {here.major}.{here.minor}"
            self.warn(("py_version",), f"{text}; the version counts in the generated image only")
        if config.gpu and not has_accelerator():
            self.warn(("gpu",), "gpu: no accelerator is to be seen on this machine, serving on the CPU")
        if config.type == "tensorflow" and config.models is not None:
            self._check_signatures(config.models, config.project_dir)

    def _check_signatures(self, models: Models, project: Path) -> None:
        """Tell of models in folders here that have not the signature that the project asks for."""
        from forebay.surfaces.nucleus.tensorflow_signatures import misfit

        listed: list[tuple[Place, ModelPath]] = [
            (("models", "paths", place), one) for place, one in enumerate(models.paths or ())
        ]
        if models.path is not None:
            listed.append((("models",), ModelPath(name=DEFAULT_MODEL, path=models.path)))
        for place, one in listed:
            if why := misfit(one.path, project, one.signature_key or models.signature_key or None, one.name):
                if one.signature_key:
                    at = (*place, "signature_key")
                else:
                    at = ("models", "signature_key") if models.signature_key else (*place, "path")
                self.warn(at, f"{dotted(at)}: {why}")


def _constructor_arguments(handler: Path) -> set[str] | None:
    """Return what the constructor of a handler takes, as its file is written; None where only running it would tell."""
    try:
        tree = ast.parse(handler.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError):
        return None
    match _binding(tree, "Handler"):
        case [ast.ClassDef(bases=[], keywords=[], decorator_list=[]) as cls] if cls in tree.body:
            pass
        case _:
            return None
    match _binding(cls, "__init__"):
        case []:
            return set()
        case [ast.FunctionDef(decorator_list=[], args=arguments) as constructor] if constructor in cls.body:
            return {node.arg for node in ast.walk(arguments) if isinstance(node, ast.arg)}
        case _:
            return None


def _binding(tree: ast.AST, name: str) -> list[ast.AST]:
    """Return what gives something a name, anywhere in a tree."""
    return [
        node
        for node in ast.walk(tree)
        if getattr(node, "name", "") == name
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store))
    ]


def has_accelerator() -> bool:
    """Tell whether this machine shows one."""
    device = Path("/dev")
    return any(any(device.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))
