# SPDX-License-Identifier: Apache-2.0
"""Requirements of a project: the names in a `requirements.txt`, what is installed for them, and pins."""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from forebay.surfaces.container.context_files import read_small

MAX_REQUIREMENTS_FILES: Final = 64
"""Files that a requirements.txt may include; more are not read."""
_NAMED: Final = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?:\[([^\]]*)\])?\s*(?=$|[<>=!~;@(])")
_OPTION: Final = re.compile(r"(-[er]|--editable|--requirement)(?:\s+|=|(?<=^-[er]))(.+)")
_EGG: Final = re.compile(r"[#&]egg=([\w.-]+)")
_EXTRA: Final = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")


class Requirements(NamedTuple):
    """What a project wants installed.

    Attributes:
        extras: The distributions that are named, with the extras of each.
        unnamed: Lines that do not say which distribution they install.
    """

    extras: dict[str, frozenset[str]]
    unnamed: list[str]


def canonical(name: str) -> str:
    """Return the name of a distribution as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_requirements(path: Path) -> Requirements:
    """Return what a file requires, with the files that it includes."""
    found = Requirements({}, [])
    files = deque([path])
    seen: set[Path] = set()
    while files and len(seen) < MAX_REQUIREMENTS_FILES:
        file = files.popleft()
        if file in seen:
            continue
        seen.add(file)
        for line in _lines(read_small(file) or b""):
            option = _OPTION.match(line)
            if option is None and line.startswith("-"):
                continue
            if option is not None and option[1] in {"-r", "--requirement"}:
                files.append(Path(os.path.normpath(file.parent / option[2].strip())))
                continue
            required = line if option is None else option[2].strip()
            name, extras = _distribution(required)
            if name:
                found.extras[name] = found.extras.get(name, frozenset()) | extras
            else:
                found.unnamed.append(required)
    return found


def _lines(content: bytes) -> Iterator[str]:
    """Yield the requirements of a file, each in one line and without its hashes; PowerShell writes UTF-16."""
    encoding = "utf-16" if content[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    text = re.sub(r"\\\r?\n", " ", content.decode(encoding, errors="replace"))
    for line in text.splitlines():
        bare = re.sub(r"(^|\s)#.*", "", line).strip()
        bare = re.sub(r"\s--(hash|config-settings|global-option)\b.*", "", bare).strip()
        if bare:
            yield bare


def _distribution(required: str) -> tuple[str, frozenset[str]]:
    """Return the distribution that a requirement names, and its extras; an empty name if it names none."""
    file = PurePosixPath(required.partition("#")[0].replace("\\", "/")).name
    if file.endswith(".whl"):
        return canonical(file.partition("-")[0]), frozenset()
    if named := _NAMED.match(required):
        return canonical(named[1]), frozenset(canonical(one.strip()) for one in (named[2] or "").split(",") if one)
    egg = _EGG.search(required)
    return canonical(egg[1]) if egg else "", frozenset()


def installed_with(required: Mapping[str, Iterable[str]]) -> set[str]:
    """Return the distributions that come with some, among those that are installed here."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    # The empty extra is the distribution itself.
    left = deque((name, extra) for name, extras in required.items() for extra in ("", *extras))
    while left:
        name, extra = left.popleft()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for line in requires:
            wanted_by = _EXTRA.search(line)
            inner, extras = _distribution(line)
            if inner and (canonical(wanted_by[1]) if wanted_by else "") == extra:
                left += [(inner, one) for one in ("", *extras)]
    return found


@functools.cache
def installed_packages() -> Mapping[str, list[str]]:
    """Return for each package that can be imported here the distributions that have it."""
    return metadata.packages_distributions()


def owners_of(module: str) -> list[str]:
    """Return the distributions that have a module: of a namespace that several share, those with its innermost part."""
    parts = module.split(".")
    owners = sorted(set(installed_packages().get(parts[0], [])))
    if len(owners) < 2:
        return owners
    files = {owner: {str(file) for file in metadata.files(owner) or []} for owner in owners}
    for count in range(len(parts), 1, -1):
        inner = "/".join(parts[:count])
        exact = [one for one in owners if any(file.startswith((f"{inner}/", f"{inner}.")) for file in files[one])]
        if exact:
            return exact
    return owners


def pin(owner: str) -> str:
    """Return the requirement of a distribution as it is installed; a local version (`+cpu`) is on no index."""
    distribution = metadata.distribution(owner)
    return f"{distribution.metadata['Name']}=={distribution.version.partition('+')[0]}"
