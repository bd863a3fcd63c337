# SPDX-License-Identifier: Apache-2.0
"""What each tenant has had of each endpoint: worker time, samples, tokens, time in the queue, refusals.

A server keeps at most `MAX_PAIRS` pairs of endpoint and tenant. Further tenants of an endpoint share the account of
the others there, so that sums stay exact.
"""

from __future__ import annotations

from typing import Final
from weakref import WeakSet

from forebay.observe.metrics.histograms import SECONDS, Histogram
from forebay.types.tenant import OTHER, Tenant

Amounts = tuple[float, int, int, int]
"""Worker seconds, samples, tokens of prompts and of answers."""
NOTHING: Final[Amounts] = (0.0, 0, 0, 0)

MAX_PAIRS: Final = 2000
"""Pairs of endpoint and tenant that a server tells apart."""
MAX_TOKENS: Final = 1 << 40
"""Tokens of one prompt or answer that count: a model may say anything."""


def plus(one: Amounts, other: Amounts, sign: int = 1) -> Amounts:
    """Add amounts; with a sign of -1, return what is more in the first ones."""
    return one[0] + sign * other[0], one[1] + sign * other[1], one[2] + sign * other[2], one[3] + sign * other[3]


class TenantAccount:
    """What one tenant has had of one endpoint.

    Attributes:
        model: The endpoint.
        version: Its version.
        tenant: The tenant.
        worker_s: Seconds that workers were busy for it.
        rows: Samples that ran.
        prompt_tokens: Tokens of its prompts, where the model counts them.
        completion_tokens: Tokens of its answers.
        queue_s: Time of each request, or slice of one, in the queue.
        refused: Requests that were refused, by the reason.
        told: What of the first four the files of costs have.
    """

    __slots__ = (
        "__weakref__",
        "completion_tokens",
        "model",
        "prompt_tokens",
        "queue_s",
        "refused",
        "rows",
        "tenant",
        "told",
        "version",
        "worker_s",
    )

    def __init__(self, model: str, version: str, tenant: str) -> None:
        self.model: str = model
        self.version: str = version
        self.tenant: str = tenant
        self.told: Amounts = NOTHING
        self.worker_s: float = 0.0
        self.rows: int = 0
        self.prompt_tokens: int = 0
        self.completion_tokens: int = 0
        self.queue_s: Histogram = Histogram(SECONDS)
        self.refused: dict[str, int] = {}

    def untold(self) -> Amounts:
        """Return what the files of costs do not have yet, in whole nanoseconds: what is cut off comes the next time."""
        amounts = self.worker_s, self.rows, self.prompt_tokens, self.completion_tokens
        more = plus(amounts, self.told, -1)
        return round(more[0], 9), *more[1:]


class Accounts:
    """The accounts of a server.

    Attributes:
        are_kept: Whether anything asks what batches cost; until then no worker's time is divided.
        is_asked: Whether answers say what they cost, also where nobody tells tenants apart.
        due: Those with costs that the files do not have yet; None where no files are written.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self.are_kept = False
        self.is_asked = False
        self.due: dict[TenantAccount, None] | None = None
        self._all: WeakSet[TenantAccount] = WeakSet()

    def of(self, accounts: dict[str, TenantAccount], endpoint: tuple[str, str], tenant: Tenant | None) -> TenantAccount:
        """Return the account of a tenant at an endpoint, or that of the others there; requests without one have one.

        Args:
            accounts: Those of the endpoint, by the names of tenants.
        """
        name = "" if tenant is None else tenant.name
        found = accounts.get(name)
        if found is None and name and len(self._all) >= MAX_PAIRS:
            name = OTHER
            found = accounts.get(name)
        if found is None:
            found = accounts[name] = TenantAccount(*endpoint, name)
            self._all.add(found)
        return found

    def every(self) -> list[TenantAccount]:
        """Return all accounts that there are."""
        return list(self._all)
