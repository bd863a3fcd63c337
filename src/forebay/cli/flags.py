# SPDX-License-Identifier: Apache-2.0
"""Flags, made of the settings that structs declare."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.cli.numbers import reading
from forebay.errors import ConfigError
from forebay.server import config
from forebay.server.config import SECTIONS
from forebay.types.settings import Setting, declared

if TYPE_CHECKING:
    from forebay.server.setting_sources import Told

_TITLES: Final[dict[type, str]] = {
    config.HttpConfig: "HTTP",
    config.Overrides: "workers and batching, for every model of the target",
    config.RepositoryConfig: "models in a folder or a bucket",
    config.AttachConfig: "workers that attach: forebay worker FILE --connect ADDRESS",
    config.GrpcConfig: "gRPC",
    config.ClusterConfig: "a Ray cluster",
    config.ProcessConfig: "process",
}

_FIRST: Final = (
    *("--host", "--http-port", "--grpc-port", "--workers", "--worker-kind", "--devices"),
    *("--max-batch-size", "--timeout-ms", "--reload", "--api-key", "--config", "--log-level"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every setting that has one."""
    first = parser.add_argument_group("most used")
    settings = {one.written.flag: one for struct in SECTIONS for one in declared(struct).values()}
    for flag in _FIRST:
        add_flag(first, settings[flag])
    for struct in SECTIONS:
        group = parser.add_argument_group(_TITLES[struct])
        for setting in declared(struct).values():
            if setting.written.flag is not None and setting.written.flag not in _FIRST:
                add_flag(group, setting)


def told_in(parsed: argparse.Namespace) -> Told:
    """Return what the flags tell; raises a `ConfigError` if one that may be repeated is not possible."""
    told: Told = {}
    for struct in SECTIONS:
        for setting in declared(struct).values():
            value = getattr(parsed, _destination(setting), None)
            if value is not None:
                told.setdefault(struct, {})[setting.name] = _listed(setting, value) if setting.is_list else value
    return told


def shown_by_flags(told: Told) -> list[str]:
    """Return warnings of keys and secrets that flags tell: other users of this machine see them in the process list."""
    shown = {setting.name: setting for setting, text in secrets_in(told) if not text.startswith("@")}
    return [
        f"{one.written.flag} shows its value in the process list; give @FILE or {one.variable}"
        for one in shown.values()
    ]


def secrets_in(told: Told) -> list[tuple[Setting, str]]:
    """Return the keys and secrets that are told, as they are written."""
    return [
        (setting, text)
        for struct, values in told.items()
        for setting in map(declared(struct).__getitem__, values)
        if setting.written.is_secret
        for text in _texts(values[setting.name])
    ]


def flags_for(told: Told, leave_out: Collection[str]) -> list[str]:
    """Return the flags that tell the same, without the settings that are to be left out."""
    flags: list[str] = []
    for struct in SECTIONS:
        for name, value in told.get(struct, {}).items():
            setting = declared(struct)[name]
            assert setting.written.flag is not None
            if name in leave_out:
                continue
            if setting.kind is bool:
                flags.append(setting.written.flag if value else "--no-" + setting.written.flag.removeprefix("--"))
            else:
                flags += [word for one in _listed_values(value) for word in (setting.written.flag, str(one))]
    return flags


def _texts(value: Any) -> Sequence[str]:
    """Return the texts of a setting; a mapping has those of each name."""
    named = cast("Mapping[str, Sequence[str]]", value) if isinstance(value, Mapping) else {"": _listed_values(value)}
    return [text for texts in named.values() for text in texts]


def _listed_values(value: Any) -> Sequence[Any]:
    return cast("Sequence[Any]", value) if isinstance(value, list | tuple) else [value]


def add_flag(
    group: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    setting: Setting,
    *more_names: str,
    **own: Any,
) -> None:
    """Add the flag of one setting.

    Args:
        group: Where it stands in the help.
        more_names: What else it is called.
        own: What argparse is told beside that, or instead.
    """
    flag = setting.written.flag
    assert flag is not None
    usual = f" ({setting.usual})" if setting.usual else ""
    begins_alike = setting.doc[1:2].islower() or setting.doc[1:2] == " "  # an abbreviation stays as it is
    described = setting.doc[:1].lower() + setting.doc[1:] if begins_alike else setting.doc
    more: dict[str, Any] = {"help": (described.rstrip(".") + usual).replace("%", "%%")}
    if setting.is_list:
        more |= {"action": "append", "metavar": setting.written.metavar}
        more["help"] += "; may be repeated"
    elif setting.kind is bool:
        more |= {"action": argparse.BooleanOptionalAction}
    elif setting.choices:
        more |= {"choices": sorted(setting.choices)}
    else:
        more |= {"type": reading(setting), "metavar": setting.written.metavar}
    group.add_argument(*more_names, flag, *setting.written.other_flags, **{**more, **own})


def _listed(setting: Setting, given: list[str]) -> Any:
    try:
        return setting.check(given)
    except ValueError as error:
        raise ConfigError(f"argument {setting.written.flag}: {error}") from error


def _destination(setting: Setting) -> str:
    """Return where argparse puts the value of a setting's flag."""
    return (setting.written.flag or "--").removeprefix("--").replace("-", "_")
