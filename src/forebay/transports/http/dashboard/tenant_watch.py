# SPDX-License-Identifier: Apache-2.0
"""Keeps the history of tenants for the dashboard, as long as the server runs and where it tells tenants apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from forebay.observe.metrics.exposition import finish_in_turns
from forebay.observe.metrics.tenant_accounts import Accounts
from forebay.observe.metrics.tenant_history import STEP_S, TenantHistory, TenantRow
from forebay.types.tenant import Tenants

if TYPE_CHECKING:
    from forebay.server.app import App


class TenantWatch:
    """Reads the accounts of tenants now and then; one of the `Links` of its app."""

    def __init__(self, app: App) -> None:
        """Do nothing yet."""
        self._app = app
        self._history = TenantHistory(app.state.of(Accounts))
        self._task: asyncio.Task[None] | None = None

    @property
    def tenants(self) -> Tenants:
        """The tenants of the server."""
        return self._app.state.of(Tenants)

    async def rows(self, waiting: Mapping[str, int]) -> list[TenantRow]:
        """Return what there is to tell, given the samples of each tenant in queues."""
        await finish_in_turns(self._history.look())
        return self._history.rows(self.tenants, waiting)

    async def start(self) -> None:
        """Begin, if there are tenants."""
        if self.tenants.are_told_apart:
            self._task = asyncio.create_task(self._go_on())

    def leave(self) -> None:
        """Go on: what runs still costs."""

    def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()

    def problems(self) -> list[str]:
        """Return nothing: requests are answered all the same."""
        return []

    async def _go_on(self) -> None:
        while True:
            await asyncio.sleep(STEP_S)
            await finish_in_turns(self._history.look())
