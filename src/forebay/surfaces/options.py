# SPDX-License-Identifier: Apache-2.0
"""What is said from several sides, and by a file, becomes the options that surfaces are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from forebay.errors import ConfigError
from forebay.server.config import (
    AttachConfig,
    ClusterConfig,
    GrpcConfig,
    HttpConfig,
    Overrides,
    ProcessConfig,
    RepositoryConfig,
)
from forebay.server.setting_sources import Told, merged, named_keys
from forebay.surfaces.contract import Options, TargetEntry
from forebay.surfaces.native.config import entries_of, find_config, read_config
from forebay.types.did_you_mean import meant
from forebay.types.settings import Setting, declared
from forebay.types.tenant import ALL, ApiKeys, Tenants
from forebay.workers.wire.shared_secret import read_secret


class Side(NamedTuple):
    """A person or program that gives settings.

    Attributes:
        label: What they call a setting, for messages.
    """

    told: Told
    label: Callable[[Setting], str | None]


def options_of(target: str | None, *sides: Side, **more: Any) -> Options:
    """Put together what all sides say, the strongest first, and then the file that they or the target name.

    Args:
        **more: Of `Options`, what is not told by anybody.

    Raises:
        ConfigError: If something of it is not possible.
    """
    person = merged(*(side.told for side in sides))
    found = find_config(target)
    path = person[ProcessConfig].get("config") or found
    if found is not None and path != found:
        raise ConfigError(f"{target} is a configuration, and --config names another one; give one of them")
    file = None if path is None else read_config(path)

    def in_file(setting: Setting) -> str:
        return f"{path}: {setting.key}"

    everybody = [*sides, *([] if file is None else [Side(file.told, in_file)])]
    told = merged(*(side.told for side in everybody))
    given = frozenset(told[HttpConfig]) | frozenset(told[Overrides]) | frozenset(told[RepositoryConfig])

    def teller(struct: type, name: str) -> str:
        labels = (side.label(declared(struct)[name]) for side in everybody if name in side.told.get(struct, {}))
        return next(labels, None) or name

    sources = {(struct, name): teller(struct, name) for struct, values in told.items() for name in values}
    http, attach = told[HttpConfig], told[AttachConfig]
    if http.get("host") == "":
        where = teller(HttpConfig, "host")
        msg = f"{where} is empty, and would let other machines in; is the variable set that it comes from?"
        raise ConfigError(msg)
    keys = named_keys(
        http.get("api_keys", ()),
        teller(HttpConfig, "api_keys"),
        http.get("api_key_files", ()),
        teller(HttpConfig, "api_key_files"),
    )
    tenants = Tenants(told[ProcessConfig].get("tenants"), are_named=any(name for name, _ in keys))
    nameless = _without_key(told[ProcessConfig].get("tenants", {}), keys, teller)
    told_more: dict[str, Any] = more | {"warnings": [*more.get("warnings", ()), *nameless]}
    header = http.get("tenant_header")
    if header and not any(name for name, _ in keys):
        where = teller(HttpConfig, "tenant_header")
        raise ConfigError(f"{where}: a header names children of tenants, and no API key has a name; see --api-key-file")
    http["api_keys"] = ApiKeys(keys, tenants, header or "")
    if told[ProcessConfig].get("reload"):
        http.setdefault("show_failures", True)
    attach["secret"] = read_secret(attach.get("secret"), teller(AttachConfig, "secret"))
    rest = None if found is not None else target
    entries: list[TargetEntry] = []
    if file is not None:
        entries = entries_of(file, rest, person[Overrides], has_others="address" in attach or "owners" in attach)
    return Options(
        target=rest,
        http=HttpConfig(**http),
        grpc=GrpcConfig(**told[GrpcConfig]),
        sources=sources,
        given=given,
        overrides=Overrides(**told[Overrides]),
        repository=RepositoryConfig(**told[RepositoryConfig]),
        attach=AttachConfig(**attach),
        cluster=ClusterConfig(**told[ClusterConfig]),
        entries=entries,
        owned=[] if file is None else file.owned,
        source=path,
        again=lambda: options_of(target, *sides, **more),
        **told[ProcessConfig],
        **told_more,
    )


def _without_key(
    tenants: Collection[str], keys: Sequence[tuple[str, str]], teller: Callable[[type, str], str]
) -> Iterator[str]:
    """Warn of tenants that no key names; without named keys it is another server that knows them."""
    names = sorted({name for name, _ in keys if name})
    for tenant in tenants if names else ():
        if tenant != ALL and tenant not in names:
            yield f"{teller(ProcessConfig, 'tenants')}: no API key has the name '{tenant}'{meant(tenant, names)}"
