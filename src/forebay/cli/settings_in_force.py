# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, each with its source: a flag, a variable, a file, a default (`forebay check --settings`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from forebay.server import config
from forebay.types.settings import Setting, declared

if TYPE_CHECKING:
    from forebay.surfaces.contract import Options


def lines_of(options: Options) -> list[str]:
    """Return a table of all settings; keys and secrets are not shown."""
    rows = [("setting", "value", "from")]
    for struct, prefix, values in (
        (config.HttpConfig, "http.", options.http),
        (config.Overrides, "", options.overrides),
        (config.RepositoryConfig, "repository.", options.repository),
        (config.AttachConfig, "attach.", options.attach),
        (config.GrpcConfig, "grpc.", options.grpc),
        (config.ClusterConfig, "cluster.", options.cluster),
        (config.ProcessConfig, "", options),
    ):
        for setting in declared(struct).values():
            if setting.written.flag is not None:
                source = options.sources.get((struct, setting.name))
                value = _shown(setting, getattr(values, setting.name), is_told=source is not None)
                key = setting.key if setting.name[:4] != "log_" else f"log.{setting.key}"
                rows.append((prefix + key, value, source or "default"))
    name, shown, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{row[0]:<{name}}  {row[1]:<{shown}}  {row[2]}" for row in rows]


def _shown(setting: Setting, value: Any, *, is_told: bool) -> str:
    if setting.written.is_secret:
        return "(not shown)" if value else "-"
    if not is_told:
        return setting.usual or ("off" if setting.kind is bool else "-")
    return ",".join(map(str, cast("tuple[object, ...]", value))) if isinstance(value, tuple) else str(value)
