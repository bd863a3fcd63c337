# SPDX-License-Identifier: Apache-2.0
"""Files with the API keys of tenants: a container finds each where its flags or its forebay.yaml name it."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast


class KeyFile(NamedTuple):
    """A file with the API keys of a tenant.

    Attributes:
        name: Its name in the secret.
        path: The file on this machine.
        target: The file in the container.
    """

    name: str
    path: str
    target: str


def key_files(http: Mapping[str, Any], source: Path | None, folder: Path, home: str) -> tuple[KeyFile, ...]:
    """Return the files with the keys of tenants that a server reads.

    Args:
        http: Its settings of HTTP.
        source: Its configuration, which its paths are relative to, if there is one.
        folder: The project's.
        home: The same folder in the container.
    """
    keys = http.get("api_keys")
    tenants: Mapping[str, Sequence[str]] = {}
    if isinstance(keys, Mapping):
        tenants = cast("Mapping[str, Sequence[str]]", keys)
    named = [(name, text[1:]) for name, texts in tenants.items() for text in texts if text.startswith("@")]
    more: Sequence[str] = http.get("api_key_files", ())
    named += [(name, path) for name, _, path in (one.partition("=") for one in more)]
    beside = folder if source is None else source.parent
    there = posixpath.join(home, os.path.relpath(beside, folder))
    return tuple(
        KeyFile(f"{name}-{number}", path, _target(path, f"{beside}/", there, home))
        for number, (name, path) in enumerate(named, 1)
    )


def _target(path: str, beside: str, there: str, home: str) -> str:
    """Return where a container finds a file: flags name it from the project's folder, a configuration from its own."""
    start = there if path.startswith(beside) else home
    return posixpath.normpath(posixpath.join(start, path.removeprefix(beside)))
