# SPDX-License-Identifier: Apache-2.0
"""`forebay.yaml`, or a file of any name behind `--config`: what is served, and the settings of the server.

    models:
      - target: iris.py:Iris
        workers: 2
      - target: language.py
        python: old-environment/bin/python
        max_batch_size: 16
    workers: 4
    http:
      port: 9000
    attach: unix:workers.socket

The keys are those that the settings have which the command line has flags for; what holds for models may stand beside a
target or, for all of them, at the top. Paths are relative to the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from forebay.errors import ConfigError
from forebay.repository.address import is_address
from forebay.server.config import AttachConfig, GrpcConfig, HttpConfig, Overrides, ProcessConfig, RepositoryConfig
from forebay.server.setting_sources import Told
from forebay.server.walker import Check, Walker, checked, variables
from forebay.surfaces.contract import TargetEntry
from forebay.types.did_you_mean import nearest
from forebay.types.settings import Setting, declared
from forebay.workers.address import UnixAddress, parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.server import yaml

FILE: Final = "forebay.yaml"
_SHOWN: Final = 200
"""Characters of a target that are shown."""

_SECTIONS: Final[dict[str, type[msgspec.Struct]]] = {
    "http": HttpConfig,
    "attach": AttachConfig,
    "repository": RepositoryConfig,
    "grpc": GrpcConfig,
}


class ConfigFile(NamedTuple):
    """What a file tells.

    Attributes:
        told: The settings of the server and of all models.
        targets: What is to be served, each with the settings of its own and its place.
        document: The file, for messages.
    """

    told: Told
    targets: list[tuple[str, dict[str, Any], str]]
    document: yaml.Document


def find_config(target: str | None) -> Path | None:
    """Return the configuration a target names, itself or by its folder.

    Raises:
        ConfigError: If nobody could tell what the target is.
    """
    if target is None:
        return None
    if not target:
        raise ConfigError("TARGET is an empty text; a file or a folder is needed, and . is the one you are in")
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

    try:
        document = yaml.load(path.read_bytes(), str(path))
    except OSError as error:
        hint = None
        if isinstance(error, FileNotFoundError):  # where a path is wrong otherwise, nobody can look beside it
            hint = nearest(path.name, [one.name for end in ("*.yaml", "*.yml") for one in path.parent.glob(end)])
        reason = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(reason + (f"; did you mean {hint}?" if hint else "")) from error
    walker = _Walker(document)
    folder = path.parent
    found = walker.section((), document.data, _top(folder))
    targets: list[tuple[str, dict[str, Any], str]] = found.pop("models", [])
    if "target" in found:
        if targets:
            walker.fail(("target",), "target: there are models as well; put it among them")
        targets = [(found.pop("target"), {}, document.where(("target",)))]
    if "name" in found and len(targets) > 1:
        walker.fail(("name",), f"name: it holds for one model, and there are {len(targets)}; put it beside each target")
    told: Told = {
        **{struct: found.pop(key, {}) for key, struct in _SECTIONS.items()},
        ProcessConfig: found.pop("log", {}),
        Overrides: {name: found.pop(name) for name in declared(Overrides) if name in found},
    }
    told[ProcessConfig] |= {name: found[one.key] for name, one in declared(ProcessConfig).items() if one.key in found}
    return ConfigFile(told, targets, document)


def entries_of(file: ConfigFile, target: str | None, told: Mapping[str, Any], *, attaches: bool) -> list[TargetEntry]:
    """Return what of a file is served.

    Args:
        target: What the command line names beside it.
        told: What person and environment tell about all models.
        attaches: Whether workers may attach, so that there need not be anything else.

    Raises:
        ConfigError: If both name something, or the file has nothing to serve.
    """
    if target is not None:
        if file.targets:
            message = f"models: the file says what is served, and {target} was given as well; leave one of them out"
            raise file.document.error(("models",), message)
        return []
    if not file.targets and not attaches:
        message = "models: a list with at least one model is needed, each with a target"
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


class _Walker(Walker):
    """Names keys without the model they stand in, which the line tells; knows in which section a key belongs."""

    @property
    def elsewhere(self) -> dict[str, str]:
        keys = [(name, key) for name, struct in _SECTIONS.items() for key in _keys(struct)]
        keys += [("log", "level"), ("log", "format")]
        return {f"{name}.{key}": f"{name}: {{{key}: ...}}" for name, key in keys}

    def dotted(self, path: yaml.Path) -> str:
        is_in_model = path[:1] == ("models",) and len(path) > 2
        return super().dotted(path[2:] if is_in_model else path)


def _keys(struct: type[msgspec.Struct]) -> dict[str, Setting]:
    return {one.key: one for one in declared(struct).values() if one.written.flag is not None}


def _top(folder: Path) -> dict[str, Check]:
    model = {one.key: _check(one, folder) for one in declared(Overrides).values()}
    process = {name: one for name, one in declared(ProcessConfig).items() if name != "config"}
    logs = {one.key: _check(one, folder) for name, one in process.items() if name.startswith("log_")}

    def section(struct: type[msgspec.Struct]) -> Check:
        settings = _keys(struct)
        keys = {key: _check(one, folder) for key, one in settings.items()}

        def check(walker: Walker, path: yaml.Path, value: Any) -> dict[str, Any]:
            for key, given in walker.mapping(path, value).items():
                if given is None and key in settings and settings[key].written.is_secret:
                    walker.wrong((*path, key), given, "a key is needed; is the variable set that it comes from?")
            return walker.section(path, value, keys)

        return check

    def attach(walker: Walker, path: yaml.Path, value: Any) -> dict[str, Any]:
        return section(AttachConfig)(walker, path, {"address": value} if not isinstance(value, dict) else value)

    def log(walker: Walker, path: yaml.Path, value: Any) -> dict[str, Any]:
        return {f"log_{key}": one for key, one in walker.section(path, value, logs).items()}

    return {
        "models": _models({**model, "target": _target(folder)}),
        "target": _target(folder),
        **{name: section(struct) for name, struct in _SECTIONS.items()},
        "attach": attach,
        "log": log,
        **{one.key: _check(one, folder) for name, one in process.items() if not name.startswith("log_")},
        **model,
    }


def _models(keys: Mapping[str, Check]) -> Check:
    def check(walker: Walker, path: yaml.Path, value: Any) -> list[tuple[str, dict[str, Any], str]]:
        if not isinstance(value, list) or not value:
            walker.wrong(path, value, "a list with at least one model is needed, each with a target")
        found: list[tuple[str, dict[str, Any], str]] = []
        for index, given in enumerate(cast("list[Any]", value)):
            one = walker.section((*path, index), {"target": given} if isinstance(given, str) else given, keys)
            if "target" not in one:
                keys["target"](walker, (*path, index, "target"), None)
            found.append((one.pop("target"), one, walker.where((*path, index))))
        return found

    return check


def _target(folder: Path) -> Check:
    def check(walker: Walker, path: yaml.Path, value: Any) -> str:
        if not isinstance(value, str) or not value:
            walker.fail(path, "target: a Python file is needed, or file.py:Name")
        return value if is_address(value) else _below(folder, value)

    return check


def _check(setting: Setting, folder: Path) -> Check:
    """Return the check of a setting's value in a file that lies in `folder`."""

    def check(walker: Walker, path: yaml.Path, value: Any) -> Any:
        if setting.name == "env":
            return variables(walker, path, value)
        if setting.name == "version":  # 1.10 is not 1.1
            value = walker.document.text(path) or value
        found = checked(setting)(walker, path, value)
        if setting.name == "address":
            return _address(walker, path, found, folder)
        if setting.name == "python" and "/" not in found:  # it is looked up in PATH
            return found
        if setting.written.is_path:
            return _below(folder, found)
        if setting.name == "api_keys":
            return tuple("@" + _below(folder, key[1:]) if key.startswith("@") else key for key in found)
        if setting.name == "secret" and found.startswith("@"):
            return "@" + _below(folder, found[1:])
        return found

    return check


def _address(walker: Walker, path: yaml.Path, address: str, folder: Path) -> str:
    try:
        found = parse_address(address)
    except ConfigError as error:
        walker.fail(path, f"attach: {error.message}")
    return str(UnixAddress(_below(folder, found.path))) if isinstance(found, UnixAddress) else address


def _below(folder: Path, path: str) -> str:
    return os.path.join(folder, path)  # noqa: PTH118 - a Path would resolve nothing either, but drop what `./` says
