# SPDX-License-Identifier: Apache-2.0
"""What a program hands over to be served, classes or a path, with settings by name, becomes a project like others."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from forebay.errors import ConfigError
from forebay.graph.composition.compose import Composition
from forebay.server.config import HttpConfig, Overrides
from forebay.serving.models.model import Model
from forebay.surfaces.lookup import build
from forebay.surfaces.native.compositions import GraphTarget, serve_composition
from forebay.surfaces.native.fresh_modules import fresh_modules
from forebay.surfaces.native.target_file import split_target
from forebay.surfaces.native.target_models import Built, built_of, project_of, serve_target
from forebay.surfaces.options import Side, options_of
from forebay.types.did_you_mean import nearest
from forebay.types.settings import declared, with_value

if TYPE_CHECKING:
    from forebay.server.served import Served
    from forebay.server.setting_sources import Told
    from forebay.surfaces.contract import Options, Project

Target: TypeAlias = "type[Model] | Composition | str | Path"

HTTP: tuple[str, ...] = HttpConfig.__struct_fields__
"""Settings of the HTTP front."""


def read_targets(
    caller: str, targets: Sequence[Target], settings: Mapping[str, Any], http: Collection[str] = HTTP
) -> Project:
    """Build a project of what a program hands over.

    Args:
        caller: The function that was called, as messages name it.
        targets: Classes and compositions, or one path of what `forebay serve` takes.
        settings: Options of `forebay serve`, by their names in Python.
        http: Those of the HTTP front that mean something there.

    Raises:
        ConfigError: If one of them is wrong, with what is allowed.
    """
    if not targets:
        raise ConfigError(f"{caller}() has nothing to serve; give it a forebay.Model class or the path of a file")
    is_path = isinstance(targets[0], str | Path)
    if is_path and len(targets) > 1:
        msg = f"{caller}() takes one path, or any number of classes; several files are named in a forebay.yaml"
        raise ConfigError(msg)
    side = Side(_told(caller, settings, http), attrgetter("name"))
    if is_path:
        options = options_of(str(targets[0]), side)
        return build(options.target, options)
    usual = Side({Overrides: {"worker_kind": "thread"}}, attrgetter("name"))
    options = options_of(None, side, usual)
    return project_of([_built(caller, target, options) for target in targets], options.http, options.repository)


def read_one(caller: str, target: Target, settings: Mapping[str, Any]) -> Served:
    """Build one model of what a program hands over; a file is imported anew.

    Raises:
        ConfigError: If it is wrong, or is several models.
    """
    side = Side(_told(caller, settings, ()), attrgetter("name"))
    if isinstance(target, str | Path):
        options = options_of(str(target), side)
        with fresh_modules([split_target(str(target))[0].resolve().parent], options.load_timeout_s):
            built = serve_target(str(target), options.overrides, options.given)
    else:
        usual = Side({Overrides: {"worker_kind": "thread"}}, attrgetter("name"))
        built = _built(caller, target, options_of(None, side, usual))
    if len(built.served) != 1:
        msg = f"{caller}() takes one model at a time, and {target} has {len(built.served)}; name one as {target}:NAME"
        raise ConfigError(msg)
    return built.served[0]


def _built(caller: str, target: Any, options: Options) -> Built:
    if isinstance(target, Composition):
        path = Path(target.function.__code__.co_filename)
        given = GraphTarget(target, path, target.function.__name__, options.overrides, options.given)
        return Built([serve_composition(given)], target.graph.warnings)
    if inspect.isclass(target) and issubclass(target, Model):
        return built_of([target], options.overrides)
    expected = "a forebay.Model class, a function with @forebay.compose, or the path of a file"
    hint = ""
    if isinstance(target, Model):
        hint = f"; pass the class {type(target).__name__}, its workers make the objects"
    raise ConfigError(f"{caller}(): expected {expected}, got {str(target)[:80]!r} ({type(target).__name__}){hint}")


def _told(caller: str, settings: Mapping[str, Any], http: Collection[str]) -> Told:
    known = [*http, *Overrides.__struct_fields__]
    told: Told = {HttpConfig: {}, Overrides: {}}
    for name, value in settings.items():
        if name not in known:
            hint = nearest(name, known)
            did_you_mean = f"did you mean {hint}?" if hint else f"allowed: {', '.join(known)}"
            if name in HTTP:
                did_you_mean = "set it in the server that runs the application"
            raise ConfigError(f"{caller}(): unknown setting {name}; {did_you_mean}")
        struct = HttpConfig if name in http else Overrides
        if value is None:  # not said
            continue
        try:
            told[struct][name] = declared(struct)[name].check(value, in_python=True)
        except ValueError as error:
            raise ConfigError(f"{caller}({name}=...): {with_value(error, repr(value))}") from error
    if told[Overrides].get("workers") == 0:
        raise ConfigError(f"{caller}(workers=...): expected >= 1, got 0; no workers can dial in here")
    return told
