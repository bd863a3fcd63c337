# SPDX-License-Identifier: Apache-2.0
"""`forebay.yaml`, or a file of any name behind `--config`: what is served, and the settings of the server.

    models:
      - target: iris.py:Iris
        workers: 2
      - target: language.py
        python: old-environment/bin/python
        max_batch_size: 16
      - owner: tcp:clip:9100
    workers: 4
    http:
      port: 9000
    attach: unix:workers.socket

The keys are those that the settings have which the command line has flags for; what holds for models may stand beside a
target or, for all of them, at the top. Paths are relative to the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, cast

import msgspec

from forebay.errors import ConfigError
from forebay.repository.repository_address import is_address
from forebay.server.config import (
    AttachConfig,
    ClusterConfig,
    GrpcConfig,
    HttpConfig,
    Overrides,
    ProcessConfig,
    RepositoryConfig,
)
from forebay.server.config_document import Document
from forebay.server.config_document import Path as Place
from forebay.server.setting_sources import Told
from forebay.server.struct_reader import StructReader
from forebay.surfaces.contract import TargetEntry
from forebay.types.settings import Checked, Setting, declared
from forebay.types.tenant import ALL, name_of_tenant
from forebay.types.worker_range import WorkerRange
from forebay.workers.wire.address import UnixAddress, parse_address

FILE: Final = "forebay.yaml"
_SHOWN: Final = 200
"""Characters of a target that are shown."""

_SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "http": HttpConfig,
    "attach": AttachConfig,
    "repository": RepositoryConfig,
    "grpc": GrpcConfig,
    "cluster": ClusterConfig,
}


class ConfigFile(NamedTuple):
    """What a file tells.

    Attributes:
        told: The settings of the server and of all models.
        targets: What is to be served, each with the settings of its own and its place.
        owned: Owners whose models are served as well, and which of them; None for all.
        document: The file, for messages.
    """

    told: Told
    targets: list[tuple[str, dict[str, Any], str]]
    document: Document
    owned: list[tuple[str, str | None]]


def find_config(target: str | None) -> Path | None:
    """Return the configuration a target names, itself or by its folder.

    Raises:
        ConfigError: If nobody could tell what the target is.
    """
    if target is None:
        return None
    if not target:
        raise ConfigError("TARGET: expected a file or a folder, got ''; . is the one you are in")
    try:
        os.stat(f"{target}/.")  # noqa: PTH116 - whether one may look into a folder; a Path drops the dot
    except (FileNotFoundError, NotADirectoryError):
        pass  # what it is else, others know
    except OSError as error:
        shown = target if len(target) <= _SHOWN else f"{target[:_SHOWN]}..."
        raise ConfigError(f"{shown} cannot be looked at: {error.strerror}") from error
    path = Path(target)
    if path.is_dir():
        path /= FILE
    return path if path.name == FILE and path.is_file() else None


def read_config(path: Path) -> ConfigFile:
    """Read a configuration.

    Raises:
        ConfigError: With file, line, key, what was found and what is allowed or the nearest right spelling.
    """
    from forebay.server import yaml

    reader = _Reader(yaml.load(yaml.read(path), str(path)), path.parent)
    found = reader.fields((), reader.document.data, _TOP)
    targets: list[tuple[str, dict[str, Any], str]] = found.pop("models", [])
    if "target" in found:
        if targets:
            reader.fail(("target",), "target: there are models as well; put it among them")
        targets = [(found.pop("target"), {}, reader.document.where(("target",)))]
    if "name" in found and len(targets) > 1:
        reader.fail(("name",), f"name: it holds for one model, and there are {len(targets)}; put it beside each target")
    told: Told = {struct: found.pop(key, {}) for key, struct in _SECTIONS.items()}
    told[ProcessConfig] = {**found.pop("log", {}), **{name: found.pop(name) for name in _PROCESS if name in found}}
    owned = [(own["owner"], own.get("name")) for _, own, _ in targets if "owner" in own]
    _require_one_owner(reader, targets)
    targets = [one for one in targets if "owner" not in one[1]]
    return ConfigFile({**told, Overrides: found}, targets, reader.document, owned)


def _require_one_owner(reader: _Reader, targets: list[tuple[str, dict[str, Any], str]]) -> None:
    """Refuse a model that two owners are named for, with both places: one of them would never be asked."""
    seen: dict[str, tuple[str, str]] = {}
    for index, (_, own, where) in enumerate(targets):
        name, owner = own.get("name"), own.get("owner")
        if owner is None or name is None:
            continue
        other, before = seen.setdefault(name, (owner, where))
        if other != owner:
            named = f"the owner of '{name}' is {other} ({before})"
            reader.fail(
                ("models", index, "name"), f"name: {named}, and cannot be {owner} as well; leave one of them out"
            )


def entries_of(file: ConfigFile, target: str | None, told: Mapping[str, Any], *, has_others: bool) -> list[TargetEntry]:
    """Return what of a file is served.

    Args:
        target: What the command line names beside it.
        has_others: Whether workers may attach, or other servers have models, so that there need not be anything else.

    Raises:
        ConfigError: If both name something, or the file has nothing to serve.
    """
    if target is not None:
        if file.targets:
            message = f"models: expected TARGET or models in the file, got both ({target}); remove one"
            raise file.document.error(("models",), message)
        return []
    if not file.targets and not file.owned and not has_others:
        message = "models: expected a list with at least one model, each with a target"
        raise file.document.error(("models",), message)
    entries: list[TargetEntry] = []
    for index, (one, own, place) in enumerate(file.targets):
        settings = {**file.told[Overrides], **own, **told}
        settings["env"] = {**file.told[Overrides].get("env", {}), **own.get("env", {})}
        timeout_ms, max_ms = settings.get("timeout_ms"), settings.get("max_timeout_ms", Overrides().max_timeout_ms)
        if timeout_ms is not None and timeout_ms > max_ms and "timeout_ms" not in told:
            path = ("models", index, "timeout_ms") if "timeout_ms" in own else ("timeout_ms",)
            message = f"timeout_ms is {timeout_ms}, more than max_timeout_ms, which is {max_ms}; raise that as well"
            raise file.document.error(path, message)
        entries.append(TargetEntry(one, Overrides(**settings), frozenset(settings) - {"env"}, place))
    return entries


def _target(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(_TARGET)
    return value


_TARGET: Final = "expected a Python file or file.py:Name"
_MODELS: Final = "expected a list with at least one model, each with a target or an owner"
_OWNED: Final = ("owner", "name")
"""What may be said about models of another server."""


class _File(Overrides, frozen=True, kw_only=True):
    target: Annotated[Any, Checked(_target)] = None
    owner: str | None = None
    models: Any = None
    log: Any = None
    http: Any = None
    attach: Any = None
    repository: Any = None
    grpc: Any = None
    cluster: Any = None


_PROCESS: Final = {
    name: one for name, one in declared(ProcessConfig).items() if name != "config" and name[:4] != "log_"
}
_TOP: Final = {**{name: one for name, one in declared(_File).items() if name != "owner"}, **_PROCESS}
_MODEL: Final = {name: declared(_File)[name] for name in (*Overrides.__struct_fields__, "target", "owner")}
_INNER: Final = {
    "log": {name: one for name, one in declared(ProcessConfig).items() if name[:4] == "log_"},
    **{
        key: {name: one for name, one in declared(struct).items() if one.written.flag is not None}
        for key, struct in _SECTIONS.items()
    },
}


class _Reader(StructReader):
    """Names keys without the model they stand in, which the line tells; knows in which section a key belongs."""

    elsewhere: ClassVar = {
        f"{key}.{one.key}": f"{key}: {{{one.key}: ...}}" for key, inner in _INNER.items() for one in inner.values()
    }

    def __init__(self, document: Document, folder: Path) -> None:
        super().__init__(document)
        self._folder = folder

    def dotted(self, path: Place) -> str:
        is_in_model = path[:1] == ("models",) and len(path) > 2
        return super().dotted(path[2:] if is_in_model else path)

    def fields(self, path: Place, value: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
        found = super().fields(path, value, settings)
        workers = found.get("workers")
        if isinstance(workers, WorkerRange):  # a flag may say otherwise of each
            said = {name: getattr(workers, name) for name in ("target_queue_ms", "scale_down_s")}
            found |= {name: value for name, value in said.items() if value is not None}
        return found

    def value(self, path: Place, value: Any, setting: Setting) -> Any:
        name = setting.name
        if name == "workers" and isinstance(value, dict):
            workers = self.struct(path, value, WorkerRange)
            if workers.min > workers.max:
                self.wrong((*path, "min"), workers.min, f"expected a whole number <= max ({workers.max})")
            return workers
        if name == "models":
            if not isinstance(value, list) or not value:
                self.wrong(path, value, _MODELS)
            return [self._model((*path, index), one) for index, one in enumerate(cast("list[Any]", value))]
        if name in _INNER:
            return self._section(path, value, _INNER[name])
        if name == "api_keys" and isinstance(value, dict):
            given = self.mapping(path, value)
            return {self._tenant(path, one): self._keys((*path, one), key) for one, key in given.items()}
        found = super().value(path, value, setting)
        if name == "tenants":
            return {one if one == ALL else self._tenant(path, one): told for one, told in found.items()}
        if name == "api_key_files":
            return tuple("=".join((one[0], self._below(one[2]))) for one in (file.partition("=") for file in found))
        if name in {"address", "owner"} and path[0] != "cluster":
            return self._address(path, found)
        if name in {"owners", "peers"}:
            return tuple(self._address((*path, index), one) for index, one in enumerate(found))
        if (name == "target" and is_address(found)) or (name == "python" and "/" not in found):
            return found  # a bare interpreter is looked up in PATH
        if setting.written.is_path or name == "target":
            below = self._below(found)
            return Path(below) if isinstance(found, Path) else below
        if name == "api_keys":
            return tuple(map(self._key, found))
        return self._key(found) if name == "secret" else found

    def _model(self, path: Place, given: Any) -> tuple[str, dict[str, Any], str]:
        found = self.fields(path, {"target": given} if isinstance(given, str) else given, _MODEL)
        if "owner" in found:
            for other in (name for name in found if name not in _OWNED):
                self.fail((*path, other), f"{other}: what holds for a model of another server, its owner says")
            return "", found, self.document.where(path)
        if "target" not in found:
            self.fail(path, f"target: {_TARGET}")
        return found.pop("target"), found, self.document.where(path)

    def _section(self, path: Place, value: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
        if path in {("attach",), ("cluster",)} and not isinstance(value, dict):
            value = {"address": value}
        for setting in settings.values():
            if setting.written.is_secret and self.mapping(path, value).get(setting.key, "") is None:
                here = (*path, setting.key)
                self.wrong(here, None, "expected a key; check that the variable it comes from is set")
        return self.fields(path, value, settings)

    def _tenant(self, path: Place, name: Any) -> str:
        try:
            return name_of_tenant(str(name))
        except ValueError as error:
            self.fail((*path, name), f"{self.dotted(path)}: {error}")

    def _keys(self, path: Place, given: Any) -> tuple[str, ...]:
        """Read the keys of a tenant: one, or a list of them."""
        keys = cast("list[Any]", given) if isinstance(given, list) else [given]
        if not keys or not all(isinstance(key, str) and key for key in keys):
            self.wrong(path, given, "expected a key, @FILE with keys, or a list of these")
        return tuple(map(self._key, keys))

    def _address(self, path: Place, address: str) -> str:
        try:
            found = parse_address(address)
        except ConfigError as error:
            self.fail(path, f"{'attach' if path[-1] == 'address' else self.dotted(path)}: {error.message}")
        return str(UnixAddress(self._below(found.path))) if isinstance(found, UnixAddress) else address

    def _key(self, key: str) -> str:
        return "@" + self._below(key[1:]) if key.startswith("@") else key

    def _below(self, path: str) -> str:
        return os.path.join(self._folder, path)  # noqa: PTH118 - a Path would drop what `./` says
