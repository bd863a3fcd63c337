# SPDX-License-Identifier: Apache-2.0
"""Front doors: each surface reads one kind of project and builds core objects from it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options, Project, Surface


def surfaces() -> list[Surface]:
    """Return all surfaces, in the order in which they are asked."""
    from forebay.surfaces.native import NativeSurface
    from forebay.surfaces.nucleus import NucleusSurface

    return [NativeSurface(), NucleusSurface()]


def build(target: str, options: Options) -> Project:
    """Build the project a target names.

    Raises:
        ConfigError: If no surface knows it, or it is wrong.
    """
    known = surfaces()
    for surface in known:
        if surface.detect(target):
            return surface.build(target, options)
    path = Path(target)
    found = "is a folder without a project file" if path.is_dir() else "is no project file"
    if not path.exists():
        found = "does not exist"
    msg = f"{target} {found}; give a Python file with a forebay.Model, file.py:Name, or a folder with a nucleus.yaml"
    raise ConfigError(msg)
