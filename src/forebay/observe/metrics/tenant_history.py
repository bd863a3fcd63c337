# SPDX-License-Identifier: Apache-2.0
"""What each tenant has had in the last minute and in the last quarter of an hour, for people who watch a server.

Theory of operation. Requests count nothing for this. Every `STEP_S` the accounts are read, and each tenant gets a mark
with what it has had so far; a window is the difference between now and a mark. An account that leaves with its version
takes nothing along, as only what came to it since the last reading is added. A tenant whose marks are all the same is
forgotten. Marks of a tenant that does nothing are one object, so the memory is that of those who call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import msgspec

from forebay.types.tenant import OTHER, Tenants

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import Accounts, TenantAccount

STEP_S: Final = 15.0
"""Time between two marks."""
MARKS: Final = 60
"""Marks that are kept: a quarter of an hour."""
LATELY: Final = 4
"""Steps of the last minute."""
LISTED: Final = 32
"""Tenants that are told apart on the page, the busiest."""
TURN: Final = 128
"""Accounts that are read in one turn of the loop."""


class Had(msgspec.Struct, frozen=True):
    """What a tenant has had up to some moment.

    Attributes:
        worker_s: Seconds that workers were busy for it.
        queue_s: Time of its requests in queues.
        queued: How many requests, or slices of them, that was.
        refused: Requests that were refused, by the reason.
    """

    worker_s: float = 0.0
    queue_s: float = 0.0
    queued: int = 0
    refused: Mapping[str, int] = {}

    def plus(self, other: Had, sign: int = 1) -> Had:
        """Return both together; with a sign of -1, what is more here than in the other."""
        refused = dict(self.refused)
        for reason, times in other.refused.items():
            refused[reason] = refused.get(reason, 0) + sign * times
        return Had(
            self.worker_s + sign * other.worker_s,
            self.queue_s + sign * other.queue_s,
            self.queued + sign * other.queued,
            {reason: times for reason, times in refused.items() if times},
        )


class TenantRow(msgspec.Struct, omit_defaults=True):
    """What the page tells of a tenant.

    Attributes:
        name: Its name; `other` for all those that are not listed, empty for requests without a tenant.
        tenants: How many tenants that are.
        tier: Its class.
        weight: Its weight.
        promised: Its part of the workers beside those of its class that called in the last minute; None for several.
        got: Its part of what these had in the last minute; None if that is nothing.
        queue_s: Mean time in the queue in the last minute; None if nothing left it.
        waiting: Samples in queues now.
        refused: Requests that were refused in the last quarter of an hour, by the reason.
        busy: Workers that were busy for it in the last minute, on average.
        worker_s: Seconds that workers were busy for it in the last quarter of an hour.
    """

    name: str
    tenants: int = 1
    tier: int | None = None
    weight: float | None = None
    promised: float | None = None
    got: float | None = None
    queue_s: float | None = None
    waiting: int = 0
    refused: Mapping[str, int] = {}
    busy: float = 0.0
    worker_s: float = 0.0


class _Tenant:
    __slots__ = ("marks", "so_far")

    def __init__(self) -> None:
        self.so_far = Had()
        self.marks = deque([self.so_far] * MARKS, MARKS)


class TenantHistory:
    """The tenants of a server, and what they had of late."""

    def __init__(self, accounts: Accounts) -> None:
        """Begin now."""
        self._accounts = accounts
        self._seen: WeakKeyDictionary[TenantAccount, Had] = WeakKeyDictionary()
        self._tenants: dict[str, _Tenant] = {}
        self._times = deque([time.monotonic()] * MARKS, MARKS)

    def look(self) -> Generator[None, None, None]:
        """Read the accounts, in turns, and mark where they are if that is due."""
        for number, account in enumerate(self._accounts.every(), 1):
            now = Had(account.worker_s, account.queue_s.total, account.queue_s.count, account.refused.copy())
            before = self._seen.get(account, _NOTHING)
            if now != before:
                self._seen[account] = now
                tenant = self._tenants.get(account.tenant)
                if tenant is None:
                    tenant = self._tenants[account.tenant] = _Tenant()
                tenant.so_far = tenant.so_far.plus(now.plus(before, -1))
            if number % TURN == 0:
                yield
        now_s = time.monotonic()
        if now_s - self._times[-1] >= STEP_S:
            self._times.append(now_s)
            for tenant in self._tenants.values():
                tenant.marks.append(tenant.so_far)
            self._tenants = {name: one for name, one in self._tenants.items() if one.marks[0] is not one.so_far}

    def rows(self, tenants: Tenants, waiting: Mapping[str, int]) -> list[TenantRow]:
        """Return the busiest tenants of the last quarter of an hour, then all others together.

        Args:
            tenants: Those of the server, with their weights.
            waiting: Samples in queues, by tenant.
        """
        minute_s = time.monotonic() - self._times[-LATELY]
        found: list[tuple[TenantRow, Had, Had]] = []
        for name in self._tenants.keys() | waiting.keys():
            one = self._tenants.get(name) or _Tenant()
            lately, quarter = (one.so_far.plus(one.marks[at], -1) for at in (-LATELY, 0))
            row = TenantRow(name, waiting=waiting.get(name, 0), refused=quarter.refused, worker_s=quarter.worker_s)
            row.busy = lately.worker_s / minute_s if minute_s > 0.0 else 0.0
            if name and name != OTHER:
                tenant = tenants.of(name)
                row.tier, row.weight = tenant.tier, tenant.weight
            found.append((row, lately, quarter))
        _share([(row, lately) for row, lately, _ in found])
        found.sort(key=lambda one: (one[0].name == OTHER, -one[0].worker_s, -sum(one[0].refused.values()), one[0].name))
        count = min(len(found), LISTED)
        if count and found[count - 1][0].name == OTHER:
            count -= 1
        rest = found[count:]
        return [row for row, _, _ in found[:count]] + ([_together(rest)] if rest else [])


def _share(found: list[tuple[TenantRow, Had]]) -> None:
    """Say what each tenant was promised of its class in the last minute, what it got, and how long it queued."""
    weights: dict[int, float] = {}
    had_s: dict[int, float] = {}
    for row, lately in found:
        if row.tier is not None and row.weight is not None and _was_there(row, lately):
            weights[row.tier] = weights.get(row.tier, 0.0) + row.weight
            had_s[row.tier] = had_s.get(row.tier, 0.0) + lately.worker_s
    for row, lately in found:
        row.queue_s = lately.queue_s / lately.queued if lately.queued else None
        if row.tier is not None and row.weight is not None:
            others = 0.0 if _was_there(row, lately) else row.weight
            row.promised = row.weight / (weights.get(row.tier, 0.0) + others)
            row.got = lately.worker_s / had_s[row.tier] if had_s.get(row.tier) else None


def _was_there(row: TenantRow, lately: Had) -> bool:
    return bool(lately.worker_s or lately.queued or lately.refused or row.waiting)


def _together(rest: list[tuple[TenantRow, Had, Had]]) -> TenantRow:
    lately, quarter = _NOTHING, _NOTHING
    for _, one, other in rest:
        lately, quarter = lately.plus(one), quarter.plus(other)
    return TenantRow(
        OTHER,
        tenants=len(rest),
        queue_s=lately.queue_s / lately.queued if lately.queued else None,
        waiting=sum(row.waiting for row, _, _ in rest),
        refused=quarter.refused,
        busy=sum(row.busy for row, _, _ in rest),
        worker_s=quarter.worker_s,
    )


_NOTHING: Final = Had()
