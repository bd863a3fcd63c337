# SPDX-License-Identifier: Apache-2.0
"""The settings that hold, each with its source: a flag, a file, a model, a default (`forebay check --settings`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.server import config
from forebay.serving.models.model import Model
from forebay.types.settings import Setting, declared

if TYPE_CHECKING:
    from forebay.server.served import Served
    from forebay.serving.endpoint import Endpoint
    from forebay.surfaces.contract import Options

_MAX_NAMES: Final = 3
"""Models named in a line."""
_OF_ENDPOINT: Final[Mapping[str, Callable[[Endpoint], float | str | None]]] = {
    "max_batch_size": lambda one: None if one.config.streams else one.batching.max_size,
    "max_wait_ms": lambda one: one.batching.max_wait_s * 1000 if one.batching.idle == "wait" else None,
    "timeout_ms": lambda one: one.config.timeout_s * 1000,
    "deadline_ms": lambda one: one.config.deadline_ms,
    "stream_idle_ms": lambda one: None if one.config.stream_idle_s is None else one.config.stream_idle_s * 1000,
    "max_queue": lambda one: one.batching.capacity,
    "latency_objective_ms": lambda one: None if one.batching.objective_s is None else one.batching.objective_s * 1000,
    "single_flight": lambda one: one.config.single_flight,
}
"""Settings that a model may have of its own, as its endpoint has them; None if the endpoint does not tell."""


def lines_of(options: Options, served: Mapping[str, Served]) -> list[str]:
    """Return a table of all settings, with those of the models that are served; keys and secrets are not shown."""
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
                models = _models_by_value(setting.name, getattr(values, setting.name), served)
                if not served or sum(map(len, models.values())) < len(served):
                    rows.append((prefix + key, value, source or "default"))
                rows += [(prefix + key, own, f"model {_listed(names)}") for own, names in models.items()]
    name, shown, _ = (max(map(len, column)) for column in zip(*rows, strict=True))
    return [f"{row[0]:<{name}}  {row[1]:<{shown}}  {row[2]}" for row in rows]


def _models_by_value(name: str, general: Any, served: Mapping[str, Served]) -> dict[str, list[str]]:
    """Return the models for which another value holds than for all, by that value."""
    models: dict[str, list[str]] = {}
    if name in _OF_ENDPOINT:
        usual = getattr(Model, name) if general is None else general
        for model, one in served.items():
            own = None if one.is_elsewhere or one.nodes else _OF_ENDPOINT[name](one.endpoint)
            if own is not None and own != usual:
                models.setdefault(own if isinstance(own, str) else f"{own:.10g}", []).append(model)
    return models


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shown(setting: Setting, value: Any, *, is_told: bool) -> str:
    if setting.written.is_secret:
        return "(not shown)" if value else "-"
    if not is_told:
        return setting.usual or ("off" if setting.kind is bool else "-")
    return ",".join(map(str, cast("tuple[object, ...]", value))) if isinstance(value, tuple) else str(value)
