# SPDX-License-Identifier: Apache-2.0
"""`nucleus.yaml`: read, checked and filled with its defaults.

Where the original has a text for a mistake, that text stands in the message, so that whoever searches for it finds it;
the place, what was found and what is allowed stand around it.
"""

from __future__ import annotations

import ast
import math
import os
import re
import sys
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any, Final, NoReturn

from forebay.errors import ConfigError
from forebay.repository.address import SCHEMES
from forebay.server import yaml
from forebay.server.walker import Walker, boolean, dotted, line, shown, whole
from forebay.surfaces.nucleus.settings import (
    DEFAULT_MODEL,
    DEFAULT_PORT,
    DEFAULT_PYTHON,
    DEFAULT_TENSORFLOW,
    DEFAULT_TFS_HOST,
    KEYS,
    LOG_LEVELS,
    NO_PYTHON_CLIENT,
    TYPES,
    Dependencies,
    GpuVersion,
    ModelPath,
    Models,
    NucleusConfig,
    ServerSideBatching,
)
from forebay.types.did_you_mean import listed, meant
from forebay.types.settings import MAX_WORKERS

Section = dict[Any, Any]

MAX_NAME_BYTES: Final = 255
"""How long the name of a folder may be."""


def read_config(path: Path, *, serving: bool = True) -> tuple[NucleusConfig, list[str]]:
    """Read a configuration file.

    Args:
        path: The file, of any name.
        serving: Whether the project is to be served here; else it is to be packed, which asks for less (the handler may
            still be missing) and in places for more (as the original's generator does).

    Returns:
        The configuration, and what is odd about the file but does not stop it.

    Raises:
        ConfigError: With the place in the file, what was found and what is allowed.
    """
    document = yaml.load(_content(path), str(path))
    if not isinstance(document.data, dict):
        found = "the file is empty" if document.data is None else f"found {shown(document.data)} instead"
        raise document.error((), f"a mapping with at least 'type' and 'path' is needed, {found}")
    return _Reader(document, serving=serving).read(Path(os.path.abspath(path)))  # noqa: PTH100 - links stay as they are


class _Reader(Walker):
    """Reads one document, in the words of the original."""

    def __init__(self, document: yaml.Document, *, serving: bool) -> None:
        super().__init__(document)
        self._top: Section = document.data
        self._serving = serving

    def read(self, file: Path) -> tuple[NucleusConfig, list[str]]:
        top = self._top
        self._known((), top, KEYS)
        kind = self._type()
        is_python = kind == "python"
        gpu = self._flag(("gpu",))
        config = NucleusConfig(
            file=file,
            project_dir=file.parent,
            given=frozenset(key for key, value in top.items() if value is not None and key in KEYS),
            type=kind,
            path=self._path(),
            py_version=self._version(("py_version",)) or DEFAULT_PYTHON,
            tfs_version=self._tfs("tfs_version", self._version, DEFAULT_TENSORFLOW, is_python=is_python),
            tfs_container_dns=self._tfs("tfs_container_dns", self._text, DEFAULT_TFS_HOST, is_python=is_python),
            gpu=gpu,
            gpu_version=self._gpu_version(gpu=gpu, is_python=is_python),
            dependencies=self._dependencies(),
            serve_port=self._integer(("serve_port",), DEFAULT_PORT, 1, 65535),
            env=self._env(),
            config=self._section(("config",)) or {},
            python_path=self._text(("python_path",)) or ".",
            protobuf_path=self._text(("protobuf_path",)),
            multi_model_reloading=self._models("multi_model_reloading", refused=not is_python, kind=kind),
            models=self._models("models", refused=is_python, kind=kind),
            server_side_batching=self._batching(),
            processes=self._integer(("processes",), 1, 1, MAX_WORKERS),
            threads_per_process=self._integer(("threads_per_process",), 1, 1, MAX_WORKERS),
            max_concurrency=self._integer(("max_concurrency",), 0, 0),
            log_level=self._log_level(),
            use_local_cortex_libs=self._flag(("use_local_cortex_libs",)),
        )
        self._check(config)
        return config, self.warnings

    # Keys with rules of their own

    def _type(self) -> str:
        found = self._top.get("type")
        if isinstance(found, str) and found in TYPES:
            return found
        text = "'type' must be set to 'python' or 'tensorflow'"
        if found is None:
            raise self._fail(("type",), text)
        raise self._fail(("type",), f"{text}, found {shown(found)}{meant(found, TYPES)}")

    def _path(self) -> str:
        found = self._text(("path",))
        if found is None:
            raise self._fail(("path",), "'path' field missing: it names the file with the Handler class")
        return found

    def _version(self, path: yaml.Path) -> str | None:
        """Read a version as text, even where somebody has left out the quotes: 3.10 is not 3.1."""
        found = self.at(path)
        if found is None:
            return None
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            raise self._fail(path, f"{dotted(path)}: a version such as '3.9' is needed, found {shown(found)}")
        text = self.document.text(path) or str(found)
        if not self._serving and not re.fullmatch(r"[\w.+-]+", text):
            raise self._fail(path, f"{dotted(path)}: a version such as '3.9' is needed, found {shown(text)}")
        return text

    def _tfs(self, key: str, read: Callable[[yaml.Path], str | None], default: str, *, is_python: bool) -> str | None:
        found = read((key,))
        if not is_python:
            return found or default
        if found is not None:
            raise self._fail((key,), f"'{key}' field not supported for 'python' type")
        return None

    def _gpu_version(self, *, gpu: bool, is_python: bool) -> GpuVersion | None:
        path = ("gpu_version",)
        section = self._section(path)
        if section is None:
            if gpu and is_python:
                raise self._fail(("gpu",), "when gpu is enabled, the 'gpu_version' field must be specified too")
            return None
        if not is_python:
            raise self._fail(path, "'gpu_version' field not supported for 'tensorflow' type")
        if not gpu:
            text = "gpu must be enabled (by setting 'gpu: true') in order to specify 'gpu_version' field"
            raise self._fail(path, text)
        self._known(path, section, GpuVersion.__struct_fields__)
        versions = {name: self._version((*path, name)) for name in ("cuda", "cudnn")}
        for name, version in versions.items():
            if not version:
                raise self._fail(path, f"gpu_version: '{name}' field must be specified")
        return GpuVersion(
            cuda=versions["cuda"] or "",
            cudnn=versions["cudnn"] or "",
            development_image=self._flag((*path, "development_image")),
        )

    def _dependencies(self) -> Dependencies:
        path = ("dependencies",)
        section = self._section(path) or {}
        self._known(path, section, Dependencies.__struct_fields__)
        files = {name: self._text((*path, name)) for name in Dependencies.__struct_fields__}
        return Dependencies(**{name: file for name, file in files.items() if file})

    def _env(self) -> dict[str, str]:
        env: dict[str, str] = {}
        for name, value in (self._section(("env",)) or {}).items():
            path = ("env", name)
            if not isinstance(name, str):
                raise self._fail(path, f"env: the name of a variable is a text, found {shown(name)}; put it in quotes")
            if not name or "=" in name or "\0" in name:
                raise self._fail(path, f"env: {name!r} cannot be the name of a variable")
            if value is None:
                continue
            if not isinstance(value, str | int | float | date):
                raise self._fail(path, f"env: {name}: a text, number or boolean is needed, found {shown(value)}")
            text = str(value)
            if "\0" in text:
                raise self._fail(path, f"env: {name}: a variable cannot hold a zero byte")
            env[name] = text
        return env

    def _models(self, key: str, *, refused: bool, kind: str) -> Models | None:
        section = self._section((key,))
        if section is None:
            return None
        if refused and not (self._serving and kind == "python"):
            other = "models" if kind == "tensorflow" else "multi_model_reloading"
            text = f"'{key}' field not supported for '{kind}' type, which has '{other}'"
            raise self._fail((key,), text)
        self._known((key,), section, Models.__struct_fields__)
        places = [name for name in ("path", "paths", "dir") if section.get(name) is not None]
        if len(places) != 1:
            found = " and ".join(f"'{name}'" for name in places) or "none of them"
            raise self._fail(
                (key,), f"{key}: can only specify 'path', 'paths' or 'dir', exactly one of them; found {found}"
            )
        cache_size, disk_cache_size = self._cache(key)
        return Models(
            path=self._address((key, "path")),
            paths=self._model_paths(key),
            dir=self._address((key, "dir"), whole_bucket=True),
            signature_key=self._text((key, "signature_key")),
            cache_size=cache_size,
            disk_cache_size=disk_cache_size,
        )

    def _model_paths(self, key: str) -> tuple[ModelPath, ...] | None:
        path = (key, "paths")
        items = self.at(path)
        if items is None:
            return None
        if not isinstance(items, list):
            raise self._fail(path, f"{key}: paths: a list is needed, found {shown(items)}")
        if not items:
            text = f"{key}: if the 'path' field list is specified, then its length must be at least 1"
            raise self._fail(path, text)
        found: dict[str, ModelPath] = {}
        for index in range(len(items)):  # pyright: ignore[reportUnknownArgumentType]
            item = self._model_path(key, index)
            if item.name in found:
                text = f"{key}: paths: {index}: the name {item.name!r} is taken by an entry above; names are unique"
                raise self._fail((*path, index), text)
            found[item.name] = item
        return tuple(found.values())

    def _model_path(self, key: str, index: int) -> ModelPath:
        path = (key, "paths", index)
        section = self._section(path, f"{key}: paths: {index}") or {}
        self._known(path, section, ModelPath.__struct_fields__)
        name = self._text((*path, "name"))
        if not name:
            raise self._fail(path, f"{key}: paths: {index}: name field required")
        if name.startswith(".") or "/" in name or len(os.fsencode(name)) > MAX_NAME_BYTES:
            needed = f"a name without '/', with no dot in front and of at most {MAX_NAME_BYTES} bytes is needed"
            text = f"{key}: paths: {index}: name: {needed}, for a folder is called so; found {shown(name)}"
            raise self._fail((*path, "name"), text)
        where = self._address((*path, "path"))
        if not where:
            raise self._fail(path, f"{key}: paths: {index}: path field required")
        return ModelPath(name=name, path=where, signature_key=self._text((*path, "signature_key")))

    def _address(self, path: yaml.Path, *, whole_bucket: bool = False) -> str | None:
        """Read where models are: a bucket with a prefix, or a folder."""
        found = self._text(path)
        scheme, colon, rest = (found or "").partition("://")
        if colon and scheme not in SCHEMES:
            listed = ", ".join(f"{one}://" for one in SCHEMES)
            raise self._fail(path, f"{dotted(path)}: {listed} or the path of a folder is needed, found {shown(found)}")
        bucket, _, prefix = rest.partition("/")
        if colon and scheme != "file" and not (bucket and (prefix.strip("/") or whole_bucket)):
            raise self._fail(path, f"{dotted(path)}: {scheme}://BUCKET/PREFIX is needed, found {shown(found)}")
        return found

    def _cache(self, key: str) -> tuple[int | None, int | None]:
        sizes = [
            None if self.at((key, name)) is None else self._integer((key, name), 1, 1)
            for name in ("cache_size", "disk_cache_size")
        ]
        memory, disk = sizes
        if memory is None and disk is None:
            return None, None
        given = (key, "disk_cache_size" if memory is None else "cache_size")
        if memory is None or disk is None:
            text = "when the cache is configured, both 'cache_size' and 'disk_cache_size' fields must be specified"
            raise self._fail(given, f"{key}: {text}")
        if memory > disk:
            text = "when the cache is configured, 'cache_size' cannot be larger than 'disk_cache_size'"
            raise self._fail(given, f"{key}: {text}: {memory} is more than {disk}")
        return memory, disk

    def _batching(self) -> ServerSideBatching | None:
        path = ("server_side_batching",)
        section = self._section(path)
        if section is None:
            return None
        self._known(path, section, ServerSideBatching.__struct_fields__)
        for name in ServerSideBatching.__struct_fields__:
            if section.get(name) is None:
                raise self._fail(path, f"server_side_batching: missing '{name}' field")
        size, interval = section["max_batch_size"], section["batch_interval_seconds"]
        if isinstance(size, bool) or not isinstance(size, int):
            text = f"server_side_batching: 'max_batch_size' field isn't of type 'int', found {shown(size)}"
            raise self._fail((*path, "max_batch_size"), text)
        if size < 1:
            text = f"server_side_batching: 'max_batch_size' must be at least 1, found {size}"
            raise self._fail((*path, "max_batch_size"), text)
        whole = isinstance(interval, int) and not isinstance(interval, bool)
        if not isinstance(interval, float) and not (whole and self._serving):
            hint = f"; write {interval}.0" if whole else ""
            text = (
                f"server_side_batching: 'batch_interval_seconds' field isn't of type 'float', found {shown(interval)}"
            )
            raise self._fail((*path, "batch_interval_seconds"), text + hint)
        if not 0 < interval < math.inf:
            text = f"server_side_batching: 'batch_interval_seconds' must be more than 0, found {interval}"
            raise self._fail((*path, "batch_interval_seconds"), text)
        return ServerSideBatching(max_batch_size=size, batch_interval_seconds=float(interval))

    def _log_level(self) -> str:
        found = self.at(("log_level",))
        if found is None:
            return "info"
        if isinstance(found, str) and found.lower() in LOG_LEVELS:
            return found.lower()
        text = f"log_level: one of {listed(LOG_LEVELS)} is needed, found {shown(found)}{meant(found, LOG_LEVELS)}"
        raise self._fail(("log_level",), text)

    # What hangs on several keys, and on the machine

    def _check(self, config: NucleusConfig) -> None:
        if config.type == "tensorflow" and config.models is None:
            raise self._fail(("type",), "'models' field missing: it is required for 'tensorflow' type")
        for key, models in (("models", config.models), ("multi_model_reloading", config.multi_model_reloading)):
            if models is not None and models.cache_size is not None:
                self._check_cache(key, models, config)
        if config.server_side_batching and config.protobuf_path and config.type == "python":
            self.warn(("server_side_batching",), "server_side_batching: ignored, gRPC (protobuf_path) has no batching")
        if self._serving:
            self._check_here(config)

    def _check_cache(self, key: str, models: Models, config: NucleusConfig) -> None:
        if models.path is not None:
            text = f"{key}: 'cache_size' needs 'dir' or 'paths', found 'path', which is one model"
            raise self._fail((key, "cache_size"), text)
        if config.processes > 1:
            text = f"{key}: 'cache_size' needs 'processes' to be 1, found {config.processes}"
            raise self._fail((key, "cache_size"), text)

    def _check_here(self, config: NucleusConfig) -> None:
        if not config.handler_file.is_file():
            siblings = [str(file.relative_to(config.project_dir)) for file in config.project_dir.glob("*.py")]
            text = f"path: there is no file {config.path} in {config.project_dir}{meant(config.path, siblings)}"
            raise self._fail(("path",), text)
        if config.type == "python" and config.models is not None:
            taken = _constructor_arguments(config.handler_file)
            if taken is not None and "python_client" not in taken:
                raise self._fail(("models",), NO_PYTHON_CLIENT)
        if config.protobuf_path and not (config.project_dir / config.protobuf_path).is_file():
            siblings = [str(file.relative_to(config.project_dir)) for file in config.project_dir.rglob("*.proto")]
            near = meant(config.protobuf_path, siblings)
            text = f"protobuf_path: there is no file {config.protobuf_path} in {config.project_dir}{near}"
            raise self._fail(("protobuf_path",), text)
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

        listed: list[tuple[yaml.Path, ModelPath]] = [
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

    # Values by kind

    def _section(self, path: yaml.Path, name: str | None = None) -> Section | None:
        found = self.at(path)
        if found is None or isinstance(found, dict):
            return found  # pyright: ignore[reportUnknownVariableType]
        raise self._fail(path, f"{name or dotted(path)}: a mapping is needed, found {shown(found)}")

    def _text(self, path: yaml.Path) -> str | None:
        found = self.at(path)
        return None if found is None else line(self, path, found)

    def _flag(self, path: yaml.Path) -> bool:
        found = self.at(path)
        return False if found is None else boolean(self, path, found)

    def _integer(self, path: yaml.Path, default: int, lowest: int, highest: int | None = None) -> int:
        found = self.at(path)
        return default if found is None else whole(lowest, highest)(self, path, found)

    # Messages

    def _known(self, path: yaml.Path, section: Section, keys: Iterable[str]) -> None:
        known = list(keys)
        for key in section:
            if key not in known:
                self.warn((*path, key), f"{dotted((*path, key))}: unknown key, ignored{meant(key, known)}")

    def wrong(self, path: yaml.Path, value: Any, needed: str) -> NoReturn:
        self.fail(path, f"{dotted(path)}: {needed}, found {shown(value)}")

    def _fail(self, path: yaml.Path, text: str) -> ConfigError:
        return self.document.error(path, text)


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


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(yaml.MAX_BYTES + 1)
    except IsADirectoryError as error:
        msg = f"{path}: is a folder, a configuration file is needed; did you mean {path / 'nucleus.yaml'}?"
        raise ConfigError(msg) from error
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):  # where a path is wrong otherwise, nobody can look beside it
            hint = meant(path.name, [file.name for end in ("*.yaml", "*.yml") for file in path.parent.glob(end)])
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"{path}: the configuration cannot be read: {reason}{hint}") from error
    if len(content) > yaml.MAX_BYTES:
        raise ConfigError(f"{path}: the file is too long, at most {yaml.MAX_BYTES} bytes are allowed")
    return content


def has_accelerator() -> bool:
    """Tell whether this machine shows one."""
    device = Path("/dev")
    return any(any(device.glob(pattern)) for pattern in ("nvidia[0-9]*", "kfd", "dxg"))
