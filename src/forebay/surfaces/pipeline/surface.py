# SPDX-License-Identifier: Apache-2.0
"""`forebay serve script.py` for scripts that build a pipeline, and `run_server()` in scripts of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        """Execute the script up to its server and put the graph it built on workers."""
        from forebay.surfaces.pipeline.project import project_of

        found = script.Script(str(Path(target).resolve()), options.arguments)
        return project_of(script.capture(found), lambda: found, options)


def serve(server: Any) -> int:
    """Serve what this script built until a signal says stop; returns the exit status."""
    from forebay.surfaces.pipeline.project import serve_here

    return serve_here(server)
