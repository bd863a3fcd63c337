# SPDX-License-Identifier: Apache-2.0
"""What a container needs of projects that are forebay's own: a file with models, model files, places with models."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError
from forebay.repository.repository_address import is_address
from forebay.runtimes.encoder_folder import TOKENIZER
from forebay.runtimes.model_file import KINDS
from forebay.serving.models.model import defined_models, settings_of
from forebay.surfaces.container.project_recipe import recipe_of
from forebay.surfaces.container.recipe import Recipe, SplitModel, inside
from forebay.surfaces.native.config import FILE
from forebay.surfaces.native.model_options import named
from forebay.surfaces.native.target_file import import_file, split_target

if TYPE_CHECKING:
    from forebay.server.config import Overrides
    from forebay.surfaces.contract import Options, Project

MODELS: Final = "/models"
"""Where copies of the models of a bucket are kept."""

_EXTRAS: Final = {".py": (), **{suffix: (kind.extra,) for suffix, kind in KINDS.items()}}
"""What runs files of a kind."""
_ANY: Final = ("onnx", "openvino")
"""What a place may need that cannot be looked at."""
_IF_FOUND: Final = {f"{kind.found}{suffix}": kind.extra for suffix, kind in KINDS.items() if kind.found} | {
    TOKENIZER: "tokenizers"
}


def recipe(target: str, options: Options, build: Callable[[], Project]) -> Recipe:
    """Return what a container of a target needs, or of what a configuration names.

    Raises:
        ConfigError: If there is nothing to serve in it, or something lies outside of its folder.
    """
    targets = [target] if target else [entry.target for entry in options.entries]
    if not targets:
        raise ConfigError("a container needs something to serve: give a TARGET, such as model.py")
    extras = {extra for one in targets for extra in _extras_of(one)}
    extras |= {"buckets"} if any(map(is_address, targets)) else set()
    if is_address(target):
        kept = () if options.repository.folder else ("--repository-folder", MODELS)
        return recipe_of(None, options, folder=None, target=(target, *kept), extras=[*extras], writes=(MODELS,))
    project = build()
    stock = project.app.stock
    if stock is not None and any(is_address(one.repository.place) for one in stock.stocked):
        extras.add("buckets")  # of a class with a `repository`
    writes: tuple[str, ...] = ()
    if stock is not None and not options.repository.folder and "buckets" in extras:
        writes = (MODELS,)
    said: tuple[str, ...] = ()
    is_models = False
    if options.source is not None:
        folder = options.source.absolute().parent
        told = options.source.name
        said = (".",) if told == FILE and not target else ("--config", told)
    else:
        path = split_target(targets[0])[0].absolute()
        is_models = path.is_dir()
        folder = path if is_models else path.parent
        said = ("--name", *project.app.served) if is_models and stock is None and not options.overrides.name else ()
    below = [inside(split_target(one)[0].absolute(), folder) for one in targets if not is_address(one)]
    if target:
        _, name = split_target(target)
        said = (f"{below[0]}:{name}" if name else below[0], *said)
    kept = ("--repository-folder", MODELS) if writes else ()
    made = recipe_of(project, options, folder=folder, target=(*said, *kept), extras=[*extras], writes=writes)
    made = msgspec.structs.replace(made, is_repository=is_models)
    is_plain = target.endswith(".py") or ".py:" in target
    if options.source is not None or options.overrides.python is not None or not is_plain:
        return made
    return msgspec.structs.replace(made, models=_split_models(target, below[0], project, options.overrides))


def _extras_of(target: str) -> tuple[str, ...]:
    """Return what runs a target."""
    path = split_target(target)[0]
    if path.suffix in _EXTRAS:
        return _EXTRAS[path.suffix]
    found = (extra for files, extra in _IF_FOUND.items() if any(path.rglob(files)))
    return tuple(dict.fromkeys((*_ANY, *found)))


def _split_models(target: str, file: str, project: Project, overrides: Overrides) -> tuple[SplitModel, ...]:
    """Return the models of a Python file, if it serves nothing else: only they have workers that dial in."""
    path, name = split_target(target)
    classes = defined_models(import_file(path))
    classes = [one for one in classes if name in {None, one.__name__} and not one.repository]
    models = [SplitModel(named(settings_of(one), overrides).name, f"{file}:{one.__name__}") for one in classes]
    served = [one.endpoint.name for one in project.app.served.values()]
    return tuple(models) if sorted(served) == sorted(one.name for one in models) else ()
