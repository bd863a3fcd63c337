# SPDX-License-Identifier: Apache-2.0
"""Templates filled with values, and values as YAML."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any, Final

import yaml

_TEMPLATES: Final = Path(__file__).with_name("templates")


def filled(template: str, *values: Mapping[str, str | Sequence[str]]) -> str:
    """Fill a template: `$$name` alone in its line is any number of lines there, and anywhere else a text."""
    known: dict[str, str | Sequence[str]] = {}
    for one in values:
        known |= one
    lines: list[str] = []
    for line in (_TEMPLATES / template).read_text(encoding="utf-8").splitlines():
        bare = line.strip()
        value = known.get(bare[1:]) if bare.startswith("$") else None
        if value is not None and not isinstance(value, str):
            indent = line[: len(line) - len(line.lstrip())]
            lines += [(indent + one).rstrip() for one in value]
        else:
            lines.append(Template(line).substitute(known))
    return "\n".join(lines) + "\n"


def block(data: Any) -> list[str]:
    """Return data as lines of YAML; none for nothing."""
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=1000).splitlines() if data else []


def flow(data: Mapping[str, Any]) -> str:
    """Return an item of a list as one line of YAML."""
    return f"- {inline(data)}"


def inline(data: Mapping[str, Any] | Sequence[Any]) -> str:
    """Return data as one line of YAML."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10_000).strip()


def scalar(text: str) -> str:
    """Return a text as it is written in YAML: in quotes if it would be a number, such as the image 12:30."""
    return text if isinstance(yaml.safe_load(text), str) else f'"{text}"'


def shown(path: Path) -> str:
    """Return a path as it is called from where the person is, for a shell."""
    return shlex.quote(Path(os.path.relpath(path)).as_posix())
