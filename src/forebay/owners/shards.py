# SPDX-License-Identifier: Apache-2.0
"""What is decided about the shards of a model, the owners that one name stands for. Sans-I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from forebay.owners.owner_pool import OwnerSlot

MAX_SHARDS: Final = 64
"""The most addresses of a name that are dialled."""

D = TypeVar("D")


def roomiest(ways: Iterable[OwnerSlot]) -> OwnerSlot:
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
