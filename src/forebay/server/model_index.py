# SPDX-License-Identifier: Apache-2.0
"""What models of an app there are, and all versions of one loaded and unloaded at once, as repositories do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, TypeVar

from forebay.errors import NotFound

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.served import Served

T = TypeVar("T")

_TURN: Final = 128
_STATES: Final = {"ready": "READY", "loading": "LOADING", "leaving": "UNLOADING"}
_REASONS: Final = {
    "available": "loaded when it is asked for",
    "not served": "not among the versions that are served",
    "unloaded": "unloaded",
}


async def in_turns(each: Iterable[T]) -> list[T]:
    """Return what is made one by one, with turns of the loop for others: of ten thousand models that takes a while."""
    found: list[T] = []
    for one in each:
        found.append(one)
        if not len(found) % _TURN:
            await asyncio.sleep(0)
    return found


class ModelIndex:
    """What there is, and what may be loaded.

    Attributes:
        unloaded: Versions of models of which all were unloaded.
    """

    def __init__(self, app: App) -> None:
        """Look at an app."""
        self._app = app
        self.unloaded: dict[str, list[str]] = {}

    async def index(self, *, only_ready: bool = False) -> list[dict[str, str]]:
        """Return every version of every model and where it is, also those that were unloaded."""
        found = [
            {
                "name": told["name"],
                "version": one["version"],
                "state": _STATES.get(one["state"], "UNAVAILABLE"),
                "reason": one.get("error") or _REASONS.get(one["state"], ""),
            }
            for told in await in_turns(self._app.describe_each())
            for one in told["versions"]
        ]
        there = {(one["name"], one["version"]) for one in found}
        found += [
            {"name": name, "version": version, "state": "UNAVAILABLE", "reason": "unloaded"}
            for name, versions in self.unloaded.items()
            for version in versions
            if (name, version) not in there
        ]
        return [one for one in found if one["state"] == "READY" or not only_ready]

    async def load(self, name: str) -> None:
        """Load all versions of a model, or load them anew; returns once they are ready.

        A model that has just been written into a repository is waited for.

        Raises:
            ForebayError: Why they cannot be loaded.
        """
        stock = self._app.stock
        if stock is not None and self._app.versions_of(name) is None and name not in self.unloaded:
            await stock.wait_for(name)
        versions = self._app.versions_of(name)
        if versions is not None:
            known = [*versions.ready]
        elif stock is not None and stock.offer.has(name):
            known = stock.offer.chosen(name)
        else:
            known = self.unloaded.get(name, ["1"])
        makers = {version: self.maker(name, version) for version in known}
        await self._app.load_all(name, makers, timeout_s=self._app.load_timeout_s)

    async def unload(self, name: str) -> None:
        """Let all versions of a model answer what they have accepted and leave; of a repository none comes by itself.

        Raises:
            NotFound: If there is no such model.
        """
        versions, stock = self._app.versions_of(name), self._app.stock
        if stock is not None and stock.offer.has(name) and self._app.is_stocked(name):
            stock.offer.dismiss(name, () if versions is None else versions.ready)
            if versions is None:
                return
        await self._app.unload_all(name)

    def maker(self, name: str, version: str) -> Callable[[], Served]:
        """Return what builds a version of a model; raises a `NotFound` if the project cannot be read anew."""
        source = self._app.source
        if source is None:
            raise NotFound("this project cannot be reloaded, so nothing can be loaded")
        return lambda: source(name, version)
