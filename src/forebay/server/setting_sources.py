# SPDX-License-Identifier: Apache-2.0
"""What a server is told from several sides: flags win over the environment, that over a file, a file over classes.

A side tells some settings and leaves out the others; one that is left out is not the same as one that is told to be
what it is anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.server.config import SECTIONS
from forebay.types.did_you_mean import nearest
from forebay.types.settings import PREFIX, Setting, declared

Told = dict[type[Any], dict[str, Any]]
"""Values by the struct that declares them and by name."""

_OWN: Final = "FOREBAY_NUCLEUS_"
_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT(_\d+_(TCP|UDP|SCTP)|$)")
"""What Kubernetes sets in the containers beside a service that is called forebay."""


def all_settings() -> Iterator[tuple[type, Setting]]:
    """Return every setting of a server, with the struct that declares it."""
    for struct in SECTIONS:
        for setting in declared(struct).values():
            yield struct, setting


def told_by(environment: Mapping[str, str]) -> tuple[Told, list[str]]:
    """Return what the environment tells, and warnings of names that nothing reads. An empty value tells nothing.

    Raises:
        ConfigError: If a value is not possible.
    """
    known = {setting.variable: (struct, setting) for struct, setting in all_settings() if setting.variable is not None}
    told: Told = {}
    warnings: list[str] = []
    for name in sorted(environment):
        if name in known and environment[name]:
            struct, setting = known[name]
            try:
                told.setdefault(struct, {})[setting.name] = setting.read(environment[name])
            except ValueError as error:
                raise ConfigError(f"{name} is {environment[name]!r}; {error}") from error
        elif name.startswith(PREFIX) and name not in known and not name.startswith(_OWN) and not _LINK.search(name):
            shorts = {one.removeprefix(PREFIX).lower(): one for one in known}
            hint = nearest(name.removeprefix(PREFIX), shorts)
            warnings.append(f"nothing reads the variable {name}" + (f"; did you mean {shorts[hint]}?" if hint else ""))
    return told, warnings


def merged(*sides: Told) -> Told:
    """Return what several sides tell together, the strongest first."""
    told: Told = {struct: {} for struct in SECTIONS}
    for side in reversed(sides):
        for struct, values in side.items():
            told[struct] |= values
    return told


def keys_of(given: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the API keys that are meant: as they are written, or those in a file.

    Raises:
        ConfigError: If there is an empty one, or a file cannot be read or holds none.
    """
    keys: list[str] = []
    for key in given:
        if not key.strip():
            msg = f"{where} is empty, and would let everybody in; is the variable set that it comes from?"
            raise ConfigError(msg)
        if not key.startswith("@"):
            keys.append(key.strip())
            continue
        try:
            text = Path(key[1:]).read_text(encoding="utf-8-sig")  # editors may put a mark before the text
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise ConfigError(f"the API keys in {key[1:]} cannot be read: {why}") from error
        keys += [line.strip() for line in text.splitlines() if line.strip()]
    if given and not keys:
        raise ConfigError(f"{where} names no key: the file is empty")
    return tuple(keys)
