# SPDX-License-Identifier: Apache-2.0
"""Which surface reads a target, and what it builds of it."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.cluster.deployment import Deployment
    from forebay.runtimes.library import OpenVinoOptions
    from forebay.runtimes.trial import SharedFile
    from forebay.server.config import Overrides
    from forebay.server.served import Served
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options, Project, Surface

_DEPTHS_OF_TRITON: Final = ("model.py", "*/model.py", "*/*/model.py")
"""Where a version, a model or a repository of Triton has the Python file of a model."""
_LOOKS: Final = 20
_READ_BYTES: Final = 1 << 20


def surfaces() -> list[Surface]:
    """Return all surfaces, in the order in which they are asked."""
    from forebay.surfaces.native.surface import NativeSurface
    from forebay.surfaces.nucleus.surface import NucleusSurface
    from forebay.surfaces.ovms.surface import OvmsSurface
    from forebay.surfaces.pipeline.surface import PipelineSurface
    from forebay.surfaces.ventu.surface import VentuSurface

    return [VentuSurface(), PipelineSurface(), OvmsSurface(_serve_file), NativeSurface(), NucleusSurface()]


def surface_of(target: str | None) -> Surface | None:
    """Return the surface that knows a target, None if none does; what only attaches is native."""
    from forebay.surfaces.native.surface import NativeSurface

    return NativeSurface() if target is None else next((one for one in surfaces() if one.detect(target)), None)


def _serve_file(path: Path, overrides: Overrides, shared: SharedFile | None, openvino: OpenVinoOptions) -> Served:
    """Serve a model file with OpenVINO, for projects of its server that name some and may have it in memory."""
    from forebay.surfaces.native.model_endpoint import serve_model_file

    return serve_model_file(path, overrides, shared, openvino)


def build(target: str | None, options: Options) -> Project:
    """Build the project a target names, with the ports that were asked for; None is one that has only what attaches.

    Raises:
        ConfigError: If no surface knows it, or it is wrong.
    """
    if options.part is None and options.fronts is not None:
        require_divisible(options)
    surface = _surface_for(target, options)
    project = surface.build(target or "", options)
    if project.http.shared_memory:
        from forebay.server.shared_regions import FOLDER, SharedRegions

        if not os.path.isdir(FOLDER):  # noqa: PTH112
            raise ConfigError(f"--shared-memory needs Linux: there is no {FOLDER} here; leave it out")
        project.app.shared_regions = SharedRegions(project.http.max_body_bytes)
    if options.grpc.port is not None and not project.listeners:
        from forebay.transports.grpc.kserve_port import KServePort

        project.listeners.append(KServePort(project.app, project.http, options.grpc))
    if options.part is not None:
        from forebay.surfaces.server_parts import take_part_in

        take_part_in(project, options, options.part)
    return project


def deployment(target: str | None, options: Options) -> tuple[Deployment, bytes]:
    """Return what is deployed on a cluster when a target is served there, and the files that go with it.

    Raises:
        ConfigError: If no surface knows it, it is wrong, or it cannot be on a cluster.
    """
    from forebay.surfaces.native.surface import NativeSurface

    surface = _surface_for(target, options)
    if not isinstance(surface, NativeSurface):
        raise ConfigError(
            f"{target} is a {surface.name} project, and --cluster divides forebay's own models; "
            "serve it on each machine, behind a port of its own"
        )
    return surface.deployment(target or "", options)


def require_divisible(options: Options) -> None:
    """Check that a server can be divided into fronts and an owner; raises ConfigError if not."""
    surface = surface_of(options.target)
    if surface is not None and surface.name != "native":
        raise ConfigError(
            f"--fronts divides a server of forebay's own models; {options.target} is a {surface.name} project, which "
            "is served whole: leave out --fronts"
        )
    if options.cluster.address is not None:
        raise ConfigError(
            "--fronts divides a server on one machine, and --cluster places its parts on many; leave one out"
        )
    if options.attach.owners or options.owned:
        raise ConfigError(
            "--fronts divides a server that has its models itself, and --owner names another server that has them; "
            "leave one of them out"
        )
    if options.http.shared_memory:
        raise ConfigError(
            "--shared-memory is kept by one process, and with --fronts a request may reach another; leave one out"
        )


def recipe(target: str | None, options: Options) -> Recipe:
    """Return what a container of the project needs that a target names.

    Raises:
        ConfigError: If no surface knows it, it is wrong, or it cannot be moved into a container as it is.
    """
    return _surface_for(target, options).recipe(target or "", options)


def _surface_for(target: str | None, options: Options) -> Surface:
    """Return the surface that knows a target.

    Raises:
        ConfigError: If none does, or something was said that it does not take.
    """
    if options.entries or target is None:
        from forebay.surfaces.native.surface import NativeSurface

        if not (options.entries or options.owned or options.attach.address or options.attach.owners):
            msg = (
                "nothing to serve: give a TARGET, such as model.py, let workers attach with --attach ADDRESS, or name "
                "a server that has models with --owner ADDRESS"
            )
            raise ConfigError(msg)
        return NativeSurface()
    surface = surface_of(target)
    if surface is None:
        raise ConfigError(_why_unknown(target))
    if surface.name != "native":
        theirs = f"for forebay's own models; {target} is a {surface.name} project"
        if options.attach.address or options.attach.owners or options.overrides.python:
            raise ConfigError(f"--attach, --owner and --python are {theirs}")
        if options.overrides.workers == 0:
            raise ConfigError(f"--workers 0 is {theirs}")
        if options.overrides.bounds is not None:
            raise ConfigError(f"--workers {options.overrides.bounds}, a range, is {theirs}; give a number")
        if options.reload:
            raise ConfigError(f"--reload is {theirs}")
        own = {"name", "version", "env", "devices"} - ({"name"} if surface.name == "ovms" else set())
        if named := own & options.given:
            raise ConfigError(f"{min(named)} is {theirs}")
    if surface.name != "pipeline" and options.arguments:
        raise ConfigError(f"{options.arguments[0]!r} follows the target; only scripts of pipelines take arguments")
    return surface


def _why_unknown(target: str) -> str:
    """Return why no surface knows a target, and what to do about it."""
    path = Path(target)
    found = "is not a project file"
    if path.is_dir():
        if any(_is_of_triton(file) for depth in _DEPTHS_OF_TRITON for file in islice(path.glob(depth), _LOOKS)):
            return (
                f"{target} has a model of Triton's Python backend, which is rewritten as a forebay.Model; see "
                "docs/how-to/coming-from/triton.md"
            )
        found = "is a folder without a project file"
        files = [file for file in path.glob("*.py") if not file.name.startswith(("test_", "__", "setup"))]
        if len(files) == 1:
            return f"{target} {found}; did you mean {files[0]}?"
    elif not path.exists():
        if file := _file_of_module(target) or _model_file_of(target):
            return f"{target} does not exist; did you mean {file}?"
        found = "does not exist"
    elif path.suffix in (".yaml", ".yml"):
        return f"{target} {found}; settings in a file of that name are given as --config {target}"
    return (
        f"{target} {found}; give a Python file with a forebay.Model or a Ventu, file.py:Name, "
        "a model.onnx, a graph.pbtxt, or a folder with a forebay.yaml, a nucleus.yaml or a config.json"
    )


def _is_of_triton(file: Path) -> bool:
    if not file.is_file():
        return False
    with suppress(OSError), file.open("rb") as opened:
        return b"TritonPythonModel" in opened.read(_READ_BYTES)
    return False


def _file_of_module(target: str) -> str:
    """Return the target that a module names, as in `pkg.model:Name` or `pkg.model.Name`; empty if there is none.

    `model.py::Name`, as pytest has it, counts as well.
    """
    module, colon, name = target.partition("::" if "::" in target else ":")
    folder, slash, module = module.rpartition("/")
    above, _, last = module.rpartition(".")
    for one, called in ((module, name), (module.removesuffix(".py"), name), *([] if colon else [(above, last)])):
        file = f"{folder}{slash}{one.replace('.', '/')}.py"
        if os.path.isfile(file):  # noqa: PTH113 - a name may be too long for a file
            return f"{file}:{called}" if called else file
    return ""


def _model_file_of(target: str) -> str:
    """Return the model file that a target names but for its suffix; empty if there is none."""
    from forebay.runtimes.model_file import KINDS

    files = ((f"{target}{suffix}", kind) for suffix, kind in KINDS.items())
    return next((file for file, kind in files if os.path.isfile(file) and kind.holds(Path(file))), "")  # noqa: PTH113
