# SPDX-License-Identifier: Apache-2.0
"""Models of repositories that are not in memory, for calls that name them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Final

from forebay.errors import ForebayError, Unavailable
from forebay.transports.grpc.call_tasks import run_beside

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served
    from forebay.transports.grpc.service import Call, Direct
    from forebay.transports.grpc.statuses import Status
    from forebay.types.tensor import Data

NEVER: Final = float("inf")


class Lending:
    """Has models of an app loaded."""

    def __init__(self, app: App, statuses: Mapping[type[ForebayError], Status]) -> None:
        """Lend for a service, which writes errors so."""
        self._app = app
        self._statuses = statuses

    def may_lend(self, model: str, version: str) -> bool:
        """Tell whether a repository has a model that is not in memory."""
        stock, versions = self._app.stock, self._app.versions_of(model)
        is_there = versions is not None and (version in versions.ready if version else versions.weights)
        return stock is not None and not is_there and stock.offer.has(model)

    @contextlib.asynccontextmanager
    async def lend(
        self, model: str, version: str, call: Call, timeout_s: float = float("inf")
    ) -> AsyncGenerator[Served]:
        """Have a model loaded, and yield the version; it stays until what is begun in the block has an answer.

        Raises:
            ForebayError: If it cannot be, or not in time.
        """
        assert self._app.stock is not None
        asked_s = min(call.deadline - monotonic(), timeout_s)
        patience_s = self._app.stock.offer.patience_s(model, asked_s if asked_s < NEVER else None)
        async with contextlib.AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(patience_s):
                    served = await stack.enter_async_context(self._app.stock.lend(model, version or None))
            except TimeoutError:
                raise Unavailable(f"the model '{model}' is still being loaded; try again later") from None
            yield served

    def again(self, method: Direct, message: Data, call: Call, model: str, version: str) -> bool:
        """Call a method once more, with a model that it did not find; False if that is not there to be loaded."""

        async def work() -> None:
            async with self.lend(model, version, call):
                method(message, call)

        if not self.may_lend(model, version):
            return False
        run_beside(work, call, self._statuses)
        return True
