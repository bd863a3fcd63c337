# SPDX-License-Identifier: Apache-2.0
"""Keys and passwords in plain text, in files that an image gets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

from forebay.surfaces.container.context_files import is_ignored, read_small

_MAX_LINE: Final = 2000
"""Letters of a line that are looked at."""
_PYTHON: Final = ".py"
_TEXTS: Final = frozenset(
    {_PYTHON, ".cfg", ".conf", ".env", ".ini", ".json", ".properties", ".sh", ".toml", ".yaml", ".yml"}
)
_KNOWN: Final = re.compile(
    r"\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z0-9]{30}|\bsk-[\w-]{20}|\bgh[opsu]_[A-Za-z0-9]{36}|\bgithub_pat_\w{22}"
    r"|\bglpat-[\w-]{20}|\bxox[abprs]-[\w-]{10}|\bAIza[\w-]{35}|-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
)
"""Keys whose form says what they are."""
_NAMED: Final = re.compile(
    r"(?P<name>api_?key|access_?key|account_?key|secret|passw(?:or)?d|token)"
    r"(?!_(?:env|field|file|header|id|name|path|ref|type|url|var)\b)(?:_\w{1,20})?(?![A-Za-z0-9])"
    r"""["']?\]?(?:\s*:\s*[A-Za-z_][\w\[\]|. ]{0,40}=|\s*[:=])\s*"""
    r"""(?:"(?P<double>[^"\s]{6,})"|'(?P<single>[^'\s]{6,})'|(?P<bare>[^\s"'#,]{6,}))""",
    re.IGNORECASE,
)
_PLACEHOLDER: Final = re.compile(r"[$@{<(/*%]|\.\.\.|x{4}|change|example|your|environ", re.IGNORECASE)


class LiteralKey(NamedTuple):
    """A key in plain text: where it stands, and what it is called there."""

    place: str
    name: str


def literal_keys(folder: Path, names: Sequence[str], ignored: Sequence[str]) -> Iterator[LiteralKey]:
    """Yield keys in the files of a project.

    Args:
        folder: The project's.
        names: Its files.
        ignored: Lines of a `.dockerignore`: what it omits is in no image.
    """
    for name in names:
        path = PurePosixPath(name)
        if path.suffix not in _TEXTS and not path.name.startswith(".env"):
            continue
        text = (read_small(folder / name) or b"").decode(errors="replace")
        found = [
            LiteralKey(f"{name}:{number}", key)
            for number, line in enumerate(text.splitlines(), 1)
            if (key := _key_in(line[:_MAX_LINE], is_python=path.suffix == _PYTHON))
        ]
        if found and not is_ignored(name, ignored):
            yield from found


def _key_in(line: str, *, is_python: bool) -> str:
    """Return what a key in a line is called; empty if there is none."""
    for named in _NAMED.finditer(line):
        value = named["double"] or named["single"] or ("" if is_python else named["bare"]) or ""
        is_password = named["name"].lower().startswith("pass")
        has_digit = any(one.isdigit() for one in value) and any(one.isalpha() for one in value)
        if value and not _PLACEHOLDER.search(value) and (is_password or (has_digit and len(value) >= 8)):
            begin = re.search(r"[\w.-]{0,40}$", line[: named.start()])
            end = re.match(r"\w*", line[named.start("name") :])
            return (begin[0] if begin else "") + (end[0] if end else "")
    return "a key" if _KNOWN.search(line) else ""
