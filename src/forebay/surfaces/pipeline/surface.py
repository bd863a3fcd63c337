# SPDX-License-Identifier: Apache-2.0
"""`forebay serve script.py` for scripts that build a pipeline, and `run_server()` in scripts of one's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from forebay.errors import ConfigError
from forebay.server.yaml import load
from forebay.surfaces.pipeline import script

if TYPE_CHECKING:
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options, Project
    from forebay.surfaces.pipeline.prepared_server import PreparedServer

_KEYS: Final = frozenset({"rpc_port", "dag", "op", "build_dag_each_worker"})
"""Any of them tells that a YAML file is the configuration of a pipeline."""


class PipelineSurface:
    """Serves pipelines."""

    name = "pipeline"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a Python file that imports the names of a pipeline, or its configuration."""
        path = Path(target)
        if not path.is_file():
            return False
        return _is_configuration(path) or (path.suffix == ".py" and script.is_pipeline(path))

    def build(self, target: str, options: Options) -> Project:
        """Execute the script up to its server and put the graph it built on workers.

        Raises:
            ConfigError: If the script runs no server, or what it builds is wrong.
            ModelError: If it raises.
        """
        return _project(*_captured(Path(target), options), options)

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs, which the script says."""
        from forebay.surfaces.container.project_recipe import recipe_of
        from forebay.surfaces.pipeline.logs import FOLDER

        path = Path(target).absolute()
        found, server = _captured(path, options)
        project = _project(found, server, options)
        extras, modules = _runtimes_of(server, path.parent)
        writes = (f"/app/{FOLDER}", "/dev/shm")  # noqa: S108 - where large values are kept
        made = recipe_of(project, options, folder=path.parent, target=(path.name,), extras=extras, writes=writes)
        return msgspec.structs.replace(made, modules=modules)


def serve(server: Any) -> int:
    """Serve what this script built until a signal says stop; returns the exit status.

    Raises:
        ConfigError, ModelError: If it cannot start.
    """
    with _told_what_to_install():
        from forebay.surfaces.pipeline.project import serve_here
    return serve_here(server)


def _captured(path: Path, options: Options) -> tuple[script.Script, PreparedServer]:
    """Execute the script up to its server."""
    if path.suffix != ".py":
        scripts = sorted(one for one in path.parent.glob("*.py") if script.is_pipeline(one))
        reading = [one for one in scripts if path.name in one.read_text(errors="replace")]
        named = f": forebay serve {(reading or scripts)[0]}" if scripts else ""
        msg = f"{path} is the configuration of a pipeline; what can be served is the script that reads it{named}"
        raise ConfigError(msg)
    found = script.Script(str(path.resolve()), options.arguments, started_in=script.here())
    return found, script.capture(found)


def _project(found: script.Script, server: PreparedServer, options: Options) -> Project:
    """Put the graph that the script built on workers."""
    with _told_what_to_install():
        from forebay.surfaces.pipeline.project import project_of
    return project_of(server, lambda: found, options)


def _runtimes_of(server: PreparedServer, folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Return what runs the model files of its ops: extras, beside that for pipelines, and modules that none brings."""
    from forebay.runtimes.model_file import KINDS
    from forebay.runtimes.saved_model import FILE
    from forebay.surfaces.pipeline.dag.op_workers import built

    all_settings = built(server)[0].settings.values()
    local: list[dict[str, Any]] = [settings["local_service_conf"] or {} for settings in all_settings]
    places = [folder / conf["model_config"] for conf in local if conf.get("model_config")]
    files = [file for place in places for file in (place, *place.glob("*"))]
    extras = {kind.extra for file in files if (kind := KINDS.get(file.suffix)) is not None and kind.holds(file)}
    if any(file.name == FILE for file in files):
        extras.add("openvino" if find_spec("tensorflow") is None else "tensorflow")
    is_paddle = any(file.name == "__model__" or file.with_suffix(".pdiparams").is_file() for file in files)
    return ["pipeline", *extras], ("paddle", "setuptools") if is_paddle else ()


def _is_configuration(path: Path) -> bool:
    """Tell whether a file is YAML with the keys of a pipeline's configuration."""
    if path.suffix not in {".yml", ".yaml"}:
        return False
    try:
        data = load(path.read_bytes(), path.name).data
    except (OSError, ConfigError):
        return False
    return isinstance(data, dict) and not _KEYS.isdisjoint(cast("dict[object, object]", data))


@contextmanager
def _told_what_to_install() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"google", "grpc"}:
            raise
        from forebay.transports.grpc.listener import not_installed

        raise not_installed(error, "a pipeline", "pipeline") from error
