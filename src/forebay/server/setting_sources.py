# SPDX-License-Identifier: Apache-2.0
"""What a server is told from several sides: flags win over the environment, that over a file, a file over classes.

A side tells some settings and leaves out the others; one that is left out is not the same as one that is told to be
what it is anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.server.config import SECTIONS
from forebay.types.did_you_mean import nearest
from forebay.types.settings import PREFIX, Setting, declared, with_value
from forebay.workers.wire.shared_secret import lines_of

Told = dict[type[Any], dict[str, Any]]
"""Values by the struct that declares them and by name."""

_OWN: Final = "FOREBAY_NUCLEUS_"
_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_(TCP|UDP|SCTP)")
"""Variables that Kubernetes sets in every container beside a service named `forebay` or `forebay-*`."""
_SERVICE_ADDRESS: Final = re.compile(r"(tcp|udp|sctp)://\S+:\d+")
"""What it sets `FOREBAY_PORT` to, or `FOREBAY_HTTP_PORT` where a service is named `forebay-http`."""


def all_settings() -> Iterator[tuple[type, Setting]]:
    """Return every setting of a server, with the struct that declares it."""
    for struct in SECTIONS:
        for setting in declared(struct).values():
            yield struct, setting


def told_by(environment: Mapping[str, str]) -> tuple[Told, list[str]]:
    """Return what the environment tells, and warnings of what is ignored. An empty value tells nothing.

    Raises:
        ConfigError: If a value is not possible, or a key or secret is empty.
    """
    known = {setting.variable: (struct, setting) for struct, setting in all_settings() if setting.variable is not None}
    told: Told = {}
    warnings: list[str] = []
    for name in sorted(environment):
        value = environment[name]
        if name.startswith(PREFIX) and name.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value):
            if name in known:
                what = f"{value!r} is the address of a Kubernetes service, not a port"
                warnings.append(f"ignored the variable {name}: {what}")
        elif name in known and (value or known[name][1].written.is_secret):
            struct, setting = known[name]
            try:
                told.setdefault(struct, {})[setting.name] = setting.read(value)
            except ValueError as error:
                raise ConfigError(f"{name}: {with_value(error, repr(value))}") from error
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


def named_keys(
    given: tuple[str, ...] | Mapping[str, tuple[str, ...]], where: str, files: tuple[str, ...], where_files: str
) -> list[tuple[str, str]]:
    """Return the API keys that are meant, each with the name of its tenant, which is empty if it has none.

    Args:
        given: Keys, or those of each tenant.
        where: What says so.
        files: Files with the keys of a tenant, `NAME=FILE`.
        where_files: What says that.

    Raises:
        ConfigError: If one is empty or has two names, or a file cannot be read or holds none.
    """
    found: list[tuple[str, str]] = []
    if isinstance(given, Mapping):
        for name, keys in given.items():
            found += ((name, key) for key in keys_of(keys, f"{where}.{name}"))
    else:
        found += (("", key) for key in keys_of(given, where))
    for one in files:
        name, _, file = one.partition("=")
        found += ((name, key) for key in keys_of((f"@{file}",), f"{where_files} {name}"))
    names: dict[str, str] = {}
    for name, key in found:
        if names.setdefault(key, name) != name:
            whose = " and ".join(repr(one) if one else "a list without names" for one in (names[key], name))
            raise ConfigError(f"{where}: {whose} share a key; give each tenant keys of its own")
    return found


def keys_of(given: tuple[str, ...], where: str) -> tuple[str, ...]:
    """Return the API keys that are meant: as they are written, or those in a file.

    Raises:
        ConfigError: If one is empty, or a file cannot be read or holds none.
    """
    keys: list[str] = []
    for key in given:
        found = lines_of(key[1:], "the API keys") if key.startswith("@") else [key.strip()]
        if not any(found):
            got = "''; check that the variable it comes from is set"
            if key.startswith("@"):
                got = f"{key[1:]}, which has none"
            raise ConfigError(f"{where}: expected a key, got {got}")
        keys += found
    return tuple(keys)
