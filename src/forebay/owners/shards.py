# SPDX-License-Identifier: Apache-2.0
"""What is decided about the shards of a model, the owners that one name stands for. Sans-I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Protocol, TypeVar

MAX_SHARDS: Final = 64
"""The most addresses of a name that are dialled."""


class Roomy(Protocol):
    """A way to a shard, as far as the choice among them needs it."""

    @property
    def credit(self) -> int:
        """Samples for which it has room."""
        ...

    @property
    def under_way(self) -> int:
        """Samples that it was sent and has not answered."""
        ...


R = TypeVar("R", bound=Roomy)
D = TypeVar("D")


def roomiest(ways: Iterable[R]) -> R:
    """Return the way with most room; of those with as much, one whose shard was sent less that is not answered."""
    return max(ways, key=lambda way: (way.credit, -way.under_way))


def agreed(current: D | None, told: Sequence[D]) -> D:
    """Return which description holds where shards may differ: the one that is served, while a shard still says it."""
    return current if current is not None and current in told else told[0]


def shard_hosts(found: Iterable[tuple[int, str]]) -> list[str]:
    """Return the addresses of the shards that a name stands for; a single one is not a shard.

    An owner may have an address of each family, so only one family is looked at: that with most addresses.

    Args:
        found: Families and addresses, in the order of the resolver.
    """
    families: dict[int, set[str]] = {}
    for family, host in found:
        families.setdefault(family, set()).add(host)
    return sorted(max(families.values(), key=len, default=()))
