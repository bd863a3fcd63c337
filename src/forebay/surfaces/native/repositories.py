# SPDX-License-Identifier: Apache-2.0
"""Targets that are repositories: `forebay serve s3://bucket/models`, a folder with models in it, `Model.repository`.

A repository of model files is served with the types that each file declares. Where a class has a `repository`, it is
the class that answers, and `load(path)` is given the folder of a version.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import ConfigError, Unavailable
from forebay.repository.bucket_listing import ListingLimits
from forebay.repository.disk import disk_for
from forebay.repository.repository import FIRST_S, Repository
from forebay.repository.repository_address import is_address, source_of
from forebay.repository.tree_rules import TreeRules
from forebay.repository.version_policy import VersionPolicy
from forebay.runtimes.encoder_folder import is_encoder, is_encoder_folder
from forebay.runtimes.model_file import KINDS
from forebay.runtimes.saved_model import FILE, files_problem
from forebay.server.stock import Stock
from forebay.server.stock_offer import Stocked
from forebay.serving.models.model import Model
from forebay.types.names import undivided_name

if TYPE_CHECKING:
    from forebay.repository.listing import Revision
    from forebay.server.app import App
    from forebay.server.config import Overrides, RepositoryConfig
    from forebay.server.served import Served

Make = Callable[["Overrides", Path], "Served"]
"""Builds the endpoint of a version, named by the overrides, of the folder with its files."""

_NAMES: Final = frozenset(f"{kind.found}{suffix}" for suffix, kind in KINDS.items() if kind.found not in {"", "*"})
"""Names of files that are models only by these names."""
_DEPTH: Final = 3
"""Folders of a target that are searched for a model file: the place, a model, a version."""


class RepositoryTarget(msgspec.Struct, frozen=True, eq=False):
    """A repository that is to be served.

    Attributes:
        address: Where it is.
        below: The folder that a path is meant from.
        name: What the model is called if the place is one model.
        timeout_ms: Time that a request has if neither it nor `overrides` name any.
        is_files: Whether its models are files that a library runs.
    """

    address: str
    below: Path
    name: str
    overrides: Overrides
    make: Make
    timeout_ms: int = Model.timeout_ms
    is_files: bool = False

    def open(self, config: RepositoryConfig) -> Stocked:
        """Look at the repository; raises ConfigError if it is not there, does not let us in, or cannot be kept here."""
        if wrong := _why_not(self.name):
            raise ConfigError(f"{self.address}: '{self.name}' cannot be the name of a folder with a model: {wrong}")
        source = source_of(self.address, self.below, ListingLimits(config.timeout_s, config.max_files))
        rules = TreeRules(
            name=self.name,
            holds=model_problem if self.is_files else lambda _paths: "",
            may_be_called=_why_not,
        )
        disk = disk_for(source, config.folder, config.max_disk_models, config.max_disk_bytes)
        repository = Repository(
            source, rules, poll_s=config.poll_s, timeout_s=config.timeout_s, max_pause_s=config.max_pause_s, disk=disk
        )
        with contextlib.suppress(Unavailable):  # its problem is told, and it is tried again at the start
            repository.open(FIRST_S)
        if self.overrides.version is not None or (self.overrides.name and len(repository.catalog.models) > 1):
            msg = f"{self.address} says itself how its models and versions are called; leave out `name` and `version`"
            raise ConfigError(msg)

        def make(revision: Revision, folder: Path) -> Served:
            named = {"name": revision.model, "version": str(revision.number)}
            return self.make(msgspec.structs.replace(self.overrides, **named), folder)

        timeout_ms = self.overrides.timeout_ms or self.timeout_ms
        return Stocked(repository, make, timeout_ms / 1000, self.overrides.max_timeout_ms / 1000)


def stock(app: App, targets: Sequence[RepositoryTarget], config: RepositoryConfig) -> Stock | None:
    """Have an app serve what repositories have; None if there are none.

    Raises:
        ConfigError: If one of them is wrong, or the settings do not go together.
    """
    if not targets:
        return None
    for memory, disk in (("max_models", "max_disk_models"), ("max_model_bytes", "max_disk_bytes")):
        less, more = getattr(config, memory), getattr(config, disk)
        if more is not None and (less or more + 1) > more:
            told, flag = memory.replace("_", "-"), disk.replace("_", "-")
            msg = f"--{told} is {less or 'not set'}, and --{flag} is {more}; models in memory are on the disk as well"
            raise ConfigError(msg)
    is_limited = bool(config.max_models or config.max_model_bytes)
    return Stock(
        app,
        [target.open(config) for target in targets],
        VersionPolicy.of(config.versions),
        is_lazy=is_limited if config.lazy is None else config.lazy,
        max_models=config.max_models,
        max_bytes=config.max_model_bytes,
    )


def is_repository(target: str) -> bool:
    """Tell whether a target is a repository of model files: an address, or a folder that has any."""
    if is_address(target):
        return True
    folder = Path(target)
    others = ("forebay.yaml", "nucleus.yaml", FILE)
    if not folder.is_dir() or is_encoder_folder(folder) or any((folder / name).exists() for name in others):
        return False
    for at, folders, files in os.walk(folder, followlinks=True):
        if not model_problem([*files, *folders]):
            return True
        folders[:] = [] if len(Path(at).relative_to(folder).parts) >= _DEPTH - 1 else folders
    return False


def model_problem(paths: Collection[str]) -> str:
    """Return why files are not one model that a library runs; empty if they are."""
    found = model_files(paths)
    if len(found) == 1:
        return files_problem(paths) if FILE in found else ""
    if found:
        return f"there are several models in it: {', '.join(sorted(found))}"
    pairs = "no .xml with its .bin, no saved_model.pb and no .pdmodel with its .pdiparams"
    return f"there is no .onnx, no .skops, no .tflite, no .ubj, no model.txt, {pairs} in it"


def model_files(paths: Collection[str]) -> list[str]:
    """Return the files among these that are models a library runs; "" is all of them as one."""
    if is_encoder(paths.__contains__) and any("onnx" in path for path in paths):
        return [""]
    stems = {PurePosixPath(path).stem for path in paths if path.endswith((".bin", ".pdiparams")) and "/" not in path}
    pairs = (".xml", ".pdmodel")
    alone = tuple(suffix for suffix, kind in KINDS.items() if kind.found == "*" and suffix not in pairs)
    found = [
        path
        for path in paths
        if "/" not in path
        and (path == FILE or path.endswith(alone) or (path.endswith(pairs) and PurePosixPath(path).stem in stems))
    ]
    # A file that may be something else is the model only where there is no other.
    return found or [path for path in paths if path in _NAMES]


def name_of(address: str) -> str:
    """Return what a model is called whose folder is all there is of it."""
    path = PurePosixPath(address.rstrip("/"))
    # A folder that is called by its version lies in one that is called like the model.
    last = path.parent.name if path.name.isdigit() and path.parent.name else path.name
    return re.sub(r"^[^A-Za-z0-9]+", "", re.sub(r"[^A-Za-z0-9._-]+", "-", last))[:128] or "model"


def _why_not(name: str) -> str:
    """Return why an endpoint may not be called so; empty if it may."""
    try:
        undivided_name(name)
    except ValueError as error:
        return str(error)
    return ""
