# SPDX-License-Identifier: Apache-2.0
"""`forebay serve script.py` for scripts that build a pipeline, and `run_server()` in scripts of one's own."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError
from forebay.surfaces.pipeline import script

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options, Project


class PipelineSurface:
    """Serves pipelines."""

    name = "pipeline"

    def detect(self, target: str) -> bool:
        """Tell whether the target is a Python file that imports the names of a pipeline."""
        path = Path(target)
        return path.suffix == ".py" and path.is_file() and script.is_pipeline(path)

    def build(self, target: str, options: Options) -> Project:
        """Execute the script up to its server and put the graph it built on workers.

        Raises:
            ConfigError: If the script runs no server, or what it builds is wrong.
            ModelError: If it raises.
        """
        found = script.Script(str(Path(target).resolve()), options.arguments)
        server = script.capture(found)
        with _told_what_to_install():
            from forebay.surfaces.pipeline.project import project_of
        return project_of(server, lambda: found, options)


def serve(server: Any) -> int:
    """Serve what this script built until a signal says stop; returns the exit status.

    Raises:
        ConfigError, ModelError: If it cannot start.
    """
    with _told_what_to_install():
        from forebay.surfaces.pipeline.project import serve_here
    return serve_here(server)


@contextmanager
def _told_what_to_install() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in {"google", "grpc"}:
            raise
        msg = f"pipelines need {error.name}, which is not installed here; install it with: pip install forebay[grpc]"
        raise ConfigError(msg) from error
