# SPDX-License-Identifier: Apache-2.0
"""Comparison of what a project imports with what its image installs; a project without requirements gets some."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import Final

import msgspec

from forebay.surfaces.container.context_files import MAX_FILES, ContextFiles, read_small
from forebay.surfaces.container.project_imports import ProjectImport, read_project
from forebay.surfaces.container.recipe import Recipe
from forebay.surfaces.container.requirements import (
    Requirements,
    canonical,
    installed_with,
    owners_of,
    pin,
    read_requirements,
)
from forebay.surfaces.container.unpickling import LIBRARIES

MAX_WARNINGS: Final = 20
"""Warnings of a kind; more are counted."""
_OURS: Final = frozenset({"forebay", "forebay_target", "cortex_internal", "pyovms", "ventu"})
_OUR_PREFIX: Final = "paddle_serving_"
"""Packages that forebay has itself, or offers to projects that were written for another server."""
_HEAD: Final = "# The packages that this project imports, in the versions installed where `forebay generate` ran.\n"


def checked(recipe: Recipe, files: ContextFiles) -> Recipe:
    """Return a recipe with the requirements that its project lacks, if there are none, and with warnings."""
    if recipe.folder is None or recipe.is_repository:
        return recipe
    found, unpickling, warnings = read_project(recipe.folder, files.names, recipe.serve)
    imports = [one for one in found if not _is_ours(one.top)]
    imports += [ProjectImport("a model", module, is_optional=False) for module in recipe.modules]
    if not files.is_whole:
        warnings.append(f"{recipe.folder} has more than {MAX_FILES:,} files; what the others import is not checked")
    has_any = any((recipe.folder / name).is_file() for name in (*recipe.files, "setup.py"))
    told = _lacking(recipe, imports) if has_any else _uninstalled(imports)
    imported = {canonical(owner) for one in imports for owner in owners_of(one.name)}
    text = "" if has_any else _pinned(imports)
    more = [*warnings, *(_unpinnable(imports) if text else ()), *bounded(told)]
    named = read_requirements(recipe.folder / recipe.files[2]).extras.keys() | imported
    words = _words(recipe)
    if not any(name in named or _has_word(words, name) for name in LIBRARIES):
        add = "unpickles; add the libraries that made the pickle, such as scikit-learn, to requirements.txt"
        more += bounded([f"{place}: {add}" for place in dict.fromkeys(unpickling)])
    return msgspec.structs.replace(recipe, requirements=text, warnings=(*recipe.warnings, *more))


def bounded(warnings: Sequence[str]) -> list[str]:
    """Return the first warnings, and how many more there are."""
    more = len(warnings) - MAX_WARNINGS
    return [*warnings[:MAX_WARNINGS], *([f"and {more} more of this kind"] if more > 0 else [])]


def _is_ours(top: str) -> bool:
    return top in sys.stdlib_module_names or top in _OURS or top.startswith(_OUR_PREFIX)


def _pinned(imports: Iterable[ProjectImport]) -> str:
    pins = {pin(owner) for one in imports for owner in owners_of(one.name)}
    return "".join([_HEAD, *(f"{one}\n" for one in sorted(pins, key=str.lower))]) if pins else ""


def _unpinnable(imports: Iterable[ProjectImport]) -> list[str]:
    """Say which distributions no index has as they are installed here."""
    told: list[str] = []
    for owner in sorted({owner for one in imports for owner in owners_of(one.name)}, key=str.lower):
        distribution = metadata.distribution(owner)
        if distribution.read_text("direct_url.json") is not None:
            told.append(
                f"{pin(owner)} was installed here from a folder or a file: an index may not have it, so put its wheel "
                "into the project's folder wheels/"
            )
        elif "+" in distribution.version:
            told.append(f"{pin(owner)} is {distribution.version} here: name the index of that build in a pip.conf")
    return told


def _uninstalled(imports: Iterable[ProjectImport]) -> list[str]:
    """Say what is imported and not installed here, so that its version is not known."""
    found: dict[str, str] = {}
    for one in imports:
        if not one.is_optional and not owners_of(one.name):
            found.setdefault(one.top, one.place)
    return [
        f"{place}: imports {top}, which is not installed here, nor in the image; name it in a requirements.txt"
        for top, place in found.items()
    ]


def _lacking(recipe: Recipe, imports: Iterable[ProjectImport]) -> list[str]:
    """Say what is imported, and neither required by the project nor brought by forebay."""
    assert recipe.folder is not None
    listed = read_requirements(recipe.folder / recipe.files[2])
    words = _words(recipe)
    ours = listed.extras.get("forebay", frozenset()) | {*recipe.extras}
    brought = installed_with({**listed.extras, "forebay": ours})
    unless = _unless(listed)
    found: dict[str, str] = {}
    for one in imports:
        owners = owners_of(one.name)
        names = {canonical(one.top), *map(canonical, owners)}
        if one.is_optional or names & brought or any(_has_word(words, name) for name in names):
            continue
        first = owners[0] if owners else one.top
        package = one.top if canonical(first) == canonical(one.top) else f"{one.top} ({first})"
        add = f"; add {pin(first)}" if owners else ", and it is not installed here"
        found.setdefault(first, f"{one.place}: imports {package}, which {_sources(recipe)} does not name{add}{unless}")
    return list(found.values())


def _words(recipe: Recipe) -> str:
    """Return what a script or conda installs: it cannot be known, and a name in it is believed."""
    assert recipe.folder is not None
    shell, conda, _ = recipe.files
    texts = [read_small(recipe.folder / name) or b"" for name in (shell, conda, "setup.py")]
    return b" ".join(texts).decode(errors="replace").lower()


def _has_word(words: str, name: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", words) is not None


def _sources(recipe: Recipe) -> str:
    assert recipe.folder is not None
    there = [name for name in recipe.files[::-1] if (recipe.folder / name).is_file()]
    return there[0] if there else "setup.py"


def _unless(listed: Requirements) -> str:
    """Say which requirements may bring anything, because they are not installed here or have no name."""
    unknown = [*(name for name in listed.extras if not _is_installed(name)), *listed.unnamed]
    more = ", ..." if len(unknown) > 3 else ""
    return f" (unless {', '.join(one[:80] for one in unknown[:3])}{more} brings it)" if unknown else ""


def _is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True
