# SPDX-License-Identifier: Apache-2.0
"""A project as a deployment on a cluster: what of it has an owner of its own, and what its processes are told.

A class of a Python file is a unit with workers that dial in. Everything else (model files, compositions, servings,
repositories) is run by its owner, with worker processes of that owner.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from forebay.cluster import project_files
from forebay.cluster.deployment import PROJECT, TLS_FILES, Deployment, Unit
from forebay.errors import ConfigError
from forebay.repository.repository_address import is_address
from forebay.server.config import AttachConfig, GrpcConfig, HttpConfig, Overrides, ProcessConfig, RepositoryConfig
from forebay.serving.models.file_model import stem_of
from forebay.serving.models.model import models_in, settings_of
from forebay.surfaces.native.compositions import compositions_of
from forebay.surfaces.native.describe import describe_in
from forebay.surfaces.native.model_files import is_model_file
from forebay.surfaces.native.model_options import named
from forebay.surfaces.native.repositories import is_repository, name_of
from forebay.surfaces.native.servings import serving_in
from forebay.surfaces.native.target_file import import_file, split_target
from forebay.types.settings import declared
from forebay.types.tenant import ALL, ApiKeys, TenantConfig
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options, Project, TargetEntry

_OF_TENANTS: Final = declared(TenantConfig)
_OF_OWNERS: Final = (
    *("grace_s", "hang_s", "hello_s", "max_connections", "max_frame_bytes", "max_elements"),
    *TLS_FILES,
)
_OWNER_GRACE_S: Final = 30.0
"""How long requests wait for workers that dial again, if nobody says: they come from other nodes."""
_OF_WORKERS: Final = ("workers", "threads", "worker_kind", "ray")


class _Part(NamedTuple):
    """A part of an entry that can have an owner of its own.

    Attributes:
        target: What serves it alone.
        name: What it is called.
        models: The names that clients ask for.
        worker_flags: What workers that dial in are told; None where its owner runs it.
    """

    target: str
    name: str
    models: tuple[str, ...]
    worker_flags: tuple[str, ...] | None = None


def deployment_of(
    target: str, options: Options, entries: Sequence[TargetEntry], build: Callable[[], Project]
) -> tuple[Deployment, bytes]:
    """Return what is deployed, and the files of the project.

    Args:
        target: What the person names; empty if a file names several targets.
        build: Checks the whole project.

    Raises:
        ConfigError: Something of it cannot be on a cluster.
    """
    _require_possible(options, entries)
    build()
    folder = _folder(target, options)
    code, packed = project_files.pack(folder)

    def movable(value: Any) -> Any:
        return _movable(msgspec.to_builtins(value, enc_hook=str), folder)

    units: list[Unit] = []
    for entry in entries:
        units += [_unit(part, entry, movable) for part in _parts(entry)]
    _require_names(units)
    process = {
        one.key: _value(options, name, one) for name, one in declared(ProcessConfig).items() if _is_told(options, one)
    }
    # Owners write it, and not among the files of the project, of which nodes have copies.
    log_of_costs = {"cost_log": process.pop("cost_log")} if "cost_log" in process else {}
    log = {key: process.pop(key) for key in ("format", "level") if key in process}
    common = {**process, **({"log": log} if log else {})}
    attach = {one.key: _value(options.attach, name, one) for name, one in declared(AttachConfig).items()}
    told = {key: value for key, value in attach.items() if key in _OF_OWNERS and value is not None}
    if options.attach.grace_s == AttachConfig().grace_s:
        told["grace_s"] = _OWNER_GRACE_S
    http, grpc = (_told(one) for one in (options.http, options.grpc))
    if tenants := _named_keys(options, http):
        common["tenants"] = tenants
    front = {**common, "http": http, "attach": {"owner_grace_s": options.attach.owner_grace_s}}
    front |= {"grpc": grpc} if grpc else {}
    repository = _told(options.repository)
    owner = {**common, "attach": told, **({"repository": repository} if repository else {})}
    deployment = Deployment(
        name=options.cluster.deployment,
        code=code,
        front=movable(front),
        owner=movable(owner) | log_of_costs,
        units=tuple(units),
        load_timeout_s=options.load_timeout_s,
        orphan_grace_s=options.cluster.orphan_grace_s,
    )
    return deployment, packed


def _require_possible(options: Options, entries: Sequence[TargetEntry]) -> None:
    """Refuse, with a ConfigError that names it, what the cluster decides itself or cannot do."""
    attach = options.attach
    if attach.address or attach.owners or options.owned:
        raise ConfigError("--cluster opens the doors for workers itself; leave out --attach and --owner")
    if attach.secret is not None:
        raise ConfigError("--cluster makes a secret itself; leave out --attach-secret (FOREBAY_SECRET)")
    if attach.owner_cafile or attach.owner_certfile or attach.owner_keyfile:
        raise ConfigError(
            "--cluster has each node show and check the files of --attach-certfile, --attach-keyfile and "
            "--attach-cafile; leave out those of --owner"
        )
    server_tls(attach.certfile, attach.keyfile, attach.cafile, flag="--attach-")
    if attach.certfile and not attach.cafile:
        raise ConfigError("--cluster needs --attach-cafile beside --attach-certfile: nodes check each other's")
    if options.fronts is not None:
        raise ConfigError("--cluster has one front on each node; leave out --fronts")
    if options.reload:
        raise ConfigError("--reload is for development on one machine; deploy again instead: forebay serve --cluster")
    if not entries:
        raise ConfigError("--cluster needs something to serve: give a TARGET, such as model.py")
    for entry in entries:
        where = f"{entry.place}: " if entry.place else ""
        if entry.overrides.dials_in:
            raise ConfigError(
                f"{where}workers is {entry.overrides.workers}, and a cluster starts the workers itself; leave it out"
            )
        if entry.overrides.devices:
            raise ConfigError(f"{where}devices: on a cluster Ray says which; write ray: {{num_gpus: 1}} instead")


def _parts(entry: TargetEntry) -> Iterator[_Part]:
    """Yield what of an entry can have an owner of its own."""
    overrides, target = entry.overrides, entry.target
    path, name = split_target(target)
    if is_repository(target):
        yield _Part(target, overrides.name or name_of(target), ())
        return
    if is_model_file(target):
        yield _Part(target, name := overrides.name or stem_of(path), (name,))
        return
    if overrides.python is not None:
        for class_name, described in describe_in(overrides.python, target, overrides.env):
            told = named(described, overrides)
            yield _part(f"{path}:{class_name}", told.name, told.version)
        return
    module = import_file(path)
    compositions = compositions_of(module, name)
    if compositions:
        for key in compositions:
            called = overrides.name or key
            yield _Part(f"{path}:{key}", called, (called,))
        return
    if name is not None and serving_in(module, name) is not None:
        yield _Part(target, overrides.name or name, (overrides.name or name,))
        return
    for model in models_in(module, name):
        settings = named(settings_of(model), overrides)
        one = f"{path}:{model.__name__}"
        yield _Part(one, settings.name, ()) if model.repository else _part(one, settings.name, settings.version)


def _part(target: str, name: str, version: str) -> _Part:
    return _Part(target, name, (name,), ("--name", name, "--model-version", version))


def _unit(part: _Part, entry: TargetEntry, movable: Callable[[Any], Any]) -> Unit:
    overrides = entry.overrides
    said = {name: getattr(overrides, name) for name in Overrides.__struct_fields__ if name in entry.given}
    if overrides.env:
        said["env"] = overrides.env
    dials_in = part.worker_flags is not None
    bounds = overrides.bounds if dials_in else None
    if dials_in:
        said = {name: value for name, value in said.items() if name not in _OF_WORKERS}
        said |= {} if bounds is None else {"threads": overrides.threads}
    elif overrides.ray != Overrides().ray:
        where = f"{entry.place}: " if entry.place else ""
        raise ConfigError(f"{where}ray: {part.name} is run by its owner, which reserves nothing; leave it out")
    said.pop("ray", None)
    variables = {name: str(value) for name, value in overrides.ray.runtime_env.get("env_vars", {}).items()}
    flags = (*(part.worker_flags or ()), "--threads", str(overrides.threads)) if dials_in else ()
    return Unit(
        name=part.name,
        target=movable(os.path.abspath(part.target) if not is_address(part.target) else part.target),  # noqa: PTH100
        models=part.models,
        workers=0 if not dials_in else (overrides.fixed_workers or 1) if bounds is None else max(bounds.min, 1),
        bounds=bounds,
        needs=overrides.ray,
        settings=movable(said),
        worker_flags=flags,
        env={**overrides.env, **variables},
        python=movable(overrides.python),
    )


def _require_names(units: Sequence[Unit]) -> None:
    """Refuse two units with one name: each has an owner of its own, and fronts could not share requests between them.

    Raises:
        ConfigError: Naming the model.
    """
    seen: set[str] = set()
    for name in (name for unit in units for name in (unit.models or (unit.name,))):
        if name in seen:
            raise ConfigError(f"'{name}' is served twice, and a cluster serves one version of a model at a time")
        seen.add(name)


def _folder(target: str, options: Options) -> Path | None:
    """Return the folder that is copied to each node; None where nothing is: models in a repository are fetched."""
    if options.source is not None:
        return options.source.absolute().parent
    if is_repository(target):
        return None
    return split_target(target)[0].absolute().parent


def _movable(value: Any, folder: Path | None) -> Any:
    """Return a value in which paths in the project say so, instead of where it lies here."""
    if isinstance(value, dict):
        return {key: _movable(one, folder) for key, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [_movable(one, folder) for one in cast("list[Any]", value)]
    if isinstance(value, str) and folder is not None and value.startswith(f"{folder}/"):
        return PROJECT + value.removeprefix(f"{folder}/")
    return value


def _told(struct: HttpConfig | GrpcConfig | RepositoryConfig) -> dict[str, Any]:
    """Return what a struct says that is not the default, by the keys of files."""
    its = declared(type(struct)).items()
    return {one.key: _value(struct, name, one) for name, one in its if _is_told(struct, one)}


def _named_keys(options: Options, http: dict[str, Any]) -> dict[str, Any]:
    """Give keys of HTTP the names that they have; returns what each tenant may have, which owners must know.

    Raises:
        ConfigError: Some keys have names, and others do not.
    """
    http.pop("api_key_files", None)  # the keys in them are among the others
    keys = options.http.api_keys
    names = keys.names if isinstance(keys, ApiKeys) else ()
    if not any(names):
        return {}
    if not all(names):
        raise ConfigError("some API keys have a name and others have none; with --cluster all or none of them have one")
    named: dict[str, list[str]] = {}
    for name, key in zip(names, keys, strict=True):
        named.setdefault(name, []).append(key)
    http["api_keys"] = named
    told = dict.fromkeys(names, options.tenants.get(ALL, TenantConfig())) | options.tenants
    return {name: {one.key: getattr(its, field) for field, one in _OF_TENANTS.items()} for name, its in told.items()}


def _value(struct: Any, name: str, setting: Any) -> Any:
    """Return the value of a setting; a path as an absolute one, since processes of nodes have other working folders."""
    value = getattr(struct, name)
    return os.path.abspath(value) if setting.written.is_path and value else value  # noqa: PTH100


def _is_told(struct: Any, setting: Any) -> bool:
    return (
        setting.written.flag is not None
        and setting.name != "config"
        and getattr(struct, setting.name) != setting.default
    )
