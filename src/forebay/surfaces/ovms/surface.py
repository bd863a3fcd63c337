# SPDX-License-Identifier: Apache-2.0
"""Surface of OpenVINO Model Server: a `graph.pbtxt`, or a configuration that names some."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.surfaces.container.recipe import Recipe
    from forebay.surfaces.contract import Options, Project
    from forebay.surfaces.ovms.app import ServeFile


class OvmsSurface:
    """Serves graphs of OpenVINO Model Server, and the models beside them."""

    name = "ovms"

    def __init__(self, serve_file: ServeFile) -> None:
        """Say how model files are served, which is another surface's to know."""
        self._serve_file = serve_file

    def detect(self, target: str) -> bool:
        """Tell whether the target is a graph.pbtxt, a configuration of graphs and models, or a folder with one."""
        from forebay.surfaces.ovms.config import GRAPH_FILE, looks_like_config

        path = Path(target)
        if path.is_dir():
            return (path / GRAPH_FILE).is_file() or looks_like_config(path / "config.json")
        return path.suffix == ".pbtxt" or (path.suffix == ".json" and looks_like_config(path, takes_empty=True))

    def build(self, target: str, options: Options) -> Project:
        """Read the graphs; none of their code is run here.

        Raises:
            ConfigError: If the configuration is wrong, or the only graph there is.
        """
        from forebay.surfaces.ovms.graph_project import project_of

        return project_of(Path(target), options, self._serve_file)

    def recipe(self, target: str, options: Options) -> Recipe:
        """Return what a container of the project needs."""
        from forebay.surfaces.container.project_recipe import recipe_of
        from forebay.surfaces.ovms.graph_project import uses_buckets

        path = Path(target).absolute()
        folder, inner = (path, ".") if path.is_dir() else (path.parent, path.name)
        project = self.build(target, options)
        extras = ("ovms", "openvino", *(("buckets",) if uses_buckets(project) else ()))
        return recipe_of(project, options, folder=folder, target=(inner,), extras=extras)
