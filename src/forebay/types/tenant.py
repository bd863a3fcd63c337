# SPDX-License-Identifier: Apache-2.0
"""Tenants: the names of API keys, and what each may have of the workers of a model.

A client never names its tenant: the name of its key does, or the front that checked the key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Final, Protocol, Self, final
from weakref import WeakSet, WeakValueDictionary

import msgspec
from msgspec import Meta

from forebay.types.settings import DeadlineMilliseconds, Written
from forebay.types.tenant_limits import Allowance, LimitsConfig

MAX_NAME: Final = 64
"""Characters of a tenant's name."""

MAX_TENANTS: Final = 4096
"""Tenants, in all classes together, that a server tells apart; later ones share a place."""

MAX_CHILD: Final = 128
"""Characters of the name of a child."""

OTHER: Final = "other"
"""Whom those share with that are too many."""

ALL: Final = "*"
"""Stands in a configuration for each tenant that has no entry of its own."""

USUAL_CLASS: Final = 1
LEAST_URGENT: Final = 3


@final
class Tenant:
    """One tenant in one class, or a child of it: the same object for all of its requests, told by its identity.

    Attributes:
        name: Its name; empty for requests without a tenant. A child has that of its key.
        child: The name of a child; empty for the tenant itself.
        parent: The tenant of whose part a child has its own; None for a tenant.
        tier: Its class: 0 is the most urgent. A class is served when those above it wait for nothing.
        weight: Its part of the workers beside others of its class. Both may change while requests wait.
        deadline_s: How long its requests may take that do not say so themselves; infinity if there is no such limit.
        allowance: What is left of its limits, the same in all classes and for its children; None if it has none.
    """

    __slots__ = ("__weakref__", "_all", "allowance", "child", "deadline_s", "name", "parent", "tier", "weight")

    def __init__(
        self,
        name: str,
        tier: int = USUAL_CLASS,
        weight: float = 1.0,
        deadline_s: float = float("inf"),
        tenants: Tenants | None = None,
    ) -> None:
        self.name: str = name
        self.tier: int = tier
        self.weight: float = weight
        self.deadline_s: float = deadline_s
        self.allowance: Allowance | None = None
        self.child: str = ""
        self.parent: Tenant | None = None
        self._all = tenants

    def __repr__(self) -> str:
        """Print what it is called, and its class."""
        return f"Tenant({'/'.join(filter(None, (self.name, self.child)))!r}, {self.tier})"

    def wishing(self, wish: int) -> Tenant:
        """Return the same tenant or child in the class (0 to 3) that a request wishes for, if it is less urgent."""
        return self if wish <= self.tier or self._all is None else self._all.of(self.name, wish, self.child)

    def have_child(self, name: str) -> Tenant:
        """Make a child of a tenant."""
        child = Tenant(self.name, self.tier, self.weight, self.deadline_s, self._all)
        child.child, child.parent, child.allowance = name, self, self.allowance
        return child


NOBODY: Final = Tenant("")
"""Stands for requests without a tenant where others have one."""


class TenantConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have.

    Attributes:
        weight: Its part of a model's workers beside other tenants of its class.
        tier: Its class, 0 to 3; 0 is the most urgent. A class is served when the more urgent ones wait for nothing.
        deadline_ms: How long its requests may take that do not say so themselves. What would take longer is refused.
        limits: What it may use; None without limits.
    """

    weight: Annotated[float, Meta(ge=0.001, le=1000.0)] = 1.0
    tier: Annotated[int, Meta(ge=0, le=LEAST_URGENT), Written(key="class")] = USUAL_CLASS
    deadline_ms: DeadlineMilliseconds | None = None
    limits: LimitsConfig | None = None

    @property
    def deadline_s(self) -> float:
        """`deadline_ms` in seconds; infinity if there is none."""
        return float("inf") if self.deadline_ms is None else self.deadline_ms / 1000


class SharedQueue(Protocol):
    """What is shared between tenants."""

    def renew(self) -> None:
        """Take account of weights and classes that have changed."""
        ...


class Tenants:
    """The tenants of a server.

    Attributes:
        are_told_apart: Whether there are any; without them no queue is shared.
        are_limited: Whether any of them has limits.
    """

    def __init__(self, configs: Mapping[str, TenantConfig] | None = None, *, are_named: bool = False) -> None:
        """Know tenants by what is configured of them; if keys have names, there are others as well."""
        self.are_told_apart: bool = are_named or bool(configs)
        self.are_limited = False
        self._configs: Mapping[str, TenantConfig] = {}
        self._fronts = 1
        self._allowances: dict[str, Allowance] = {}
        self._known: dict[tuple[str, int], Tenant] = {}
        self._children: WeakValueDictionary[tuple[Tenant, str], Tenant] = WeakValueDictionary()
        """Those that a queue or a request still knows; queues forget them when they have too many."""
        self._shared: WeakSet[SharedQueue] = WeakSet()
        self.configure(configs or {})

    def configure(self, configs: Mapping[str, TenantConfig]) -> None:
        """Change what tenants may have, also of what waits already; limits that are the same go on."""
        self._configs = configs
        self.are_limited: bool = any(config.limits is not None for config in configs.values())
        for (name, wish), tenant in self._known.items():
            config = self._config(name)
            tenant.weight, tenant.tier = config.weight, max(config.tier, wish)
            tenant.deadline_s, tenant.allowance = config.deadline_s, self._allowance(name, config)
        for child in list(self._children.values()):
            if (parent := child.parent) is not None:
                child.weight, child.tier, child.deadline_s = parent.weight, parent.tier, parent.deadline_s
                child.allowance = parent.allowance
        for shared in self._shared:
            shared.renew()

    def divide(self, fronts: int) -> None:
        """Have the part of the limits that one of several fronts has; called before there are requests."""
        self._fronts = fronts

    def watch(self, shared: SharedQueue) -> None:
        """Tell what is shared between tenants of such changes."""
        self._shared.add(shared)

    def of(self, name: str, wish: int = 0, child: str = "") -> Tenant:
        """Return a tenant by its name, in its class or in a less urgent one that a request wishes for.

        Args:
            name: Of the tenant.
            wish: A class, 0 to 3.
            child: If not empty, the tenant's child of this name is returned.
        """
        usual = self._known.get((name, 0)) or self._new(name, 0)
        found = usual
        if wish > usual.tier:
            found = self._known.get((name, wish)) or self._new(name, wish)
        if not child:
            return found
        one = self._children.get((found, child))
        if one is None:
            one = self._children[found, child] = found.have_child(child)
        return one

    def classes_of(self, name: str) -> list[Tenant]:
        """Return a tenant in each class in which it has been seen."""
        return [found for wish in range(LEAST_URGENT + 1) if (found := self._known.get((name, wish))) is not None]

    def _new(self, name: str, wish: int) -> Tenant:
        """Make a tenant, or return one of those that share its place."""
        if len(self._known) >= MAX_TENANTS:
            found = self._known.get((name, 0)) or self._known.get((OTHER, 0))
            if found is not None:
                return found
            name, wish = OTHER, 0
        config = self._config(name)
        new = Tenant(name, max(config.tier, wish), config.weight, config.deadline_s, self)
        new.allowance = self._allowance(name, config)
        return self._known.setdefault((name, wish), new)

    def _config(self, name: str) -> TenantConfig:
        return self._configs.get(name) or self._configs.get(ALL, _USUAL)

    def _allowance(self, name: str, config: TenantConfig) -> Allowance | None:
        """Return what is left to a tenant; all of it if its limits are new."""
        if config.limits is None:
            self._allowances.pop(name, None)
            return None
        found = self._allowances.get(name)
        if found is None or found.config != config.limits:
            found = self._allowances[name] = Allowance(name, config.limits, self._fronts)
        return found


class ApiKeys(tuple[str, ...]):  # noqa: SLOT001 - a tuple cannot have slots of its own
    """Keys of clients, and whose they are.

    Attributes:
        names: The tenant of each; empty for a key without a name.
        tenants: All tenants of the server.
        child_header: The header, in lower case, that names a child of the tenant; empty if none does.
    """

    names: tuple[str, ...]
    tenants: Tenants
    child_header: str

    def __new__(
        cls, keys: Iterable[tuple[str, str]] = (), tenants: Tenants | None = None, child_header: str = ""
    ) -> Self:
        """Put together names and keys."""
        pairs = list(keys)
        made = super().__new__(cls, (key for _, key in pairs))
        made.names = tuple(name for name, _ in pairs)
        made.tenants = Tenants(are_named=any(made.names)) if tenants is None else tenants
        made.child_header = child_header
        return made


def name_of_tenant(name: str) -> str:
    """Return a name, if a tenant can have it; raises a `ValueError` if not."""
    if not _NAME.fullmatch(name) or name == OTHER:
        raise ValueError(
            f"expected a tenant name of 1 to {MAX_NAME} letters, digits, '.', '_' or '-', other than '{OTHER}', "
            f"got {name[:80]!r}"
        )
    return name


_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{MAX_NAME}}}", re.ASCII)
_USUAL: Final = TenantConfig()
