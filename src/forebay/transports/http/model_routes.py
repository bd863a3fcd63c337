# SPDX-License-Identifier: Apache-2.0
"""Which route has which target, kept as the app changes.

A change looks up the targets of its own model anew, and no others: where models come and go a hundred others may be
there. Two kinds of targets are of no single model: those without a name, of the only one there is, and those that the
models which speak OpenAI's protocol share.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from forebay.transports.http import kserve_calls, tfserving
from forebay.transports.http.forms_and_gzip import Staging
from forebay.transports.http.openai import targets_of
from forebay.transports.http.route import Route, SharedRoute

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.config import HttpConfig
    from forebay.server.served import Served
    from forebay.server.versions import Versions

_UNNAMED: Final = ""
_SPOKEN: Final = "/"
"""Whose targets those are that no single model has; no name of a model."""


def routes_of(app: App, config: HttpConfig, verbs: Collection[str] = ("POST",)) -> dict[bytes, Route]:
    """Return the models by the target of their requests, as both lanes know them; kept as the app changes.

    Models that accept none of `verbs` are left out: the fast lane answers every POST to a target named here.
    """
    return ModelRoutes(app, config, verbs).by_target


class ModelRoutes:
    """The routes of an app."""

    def __init__(self, app: App, config: HttpConfig, verbs: Collection[str]) -> None:
        self.by_target: dict[bytes, Route] = {}
        self._app = app
        self._config = config
        self._verbs = frozenset(verbs)
        self._staging = Staging(config, app.byte_budget)
        self._owned: dict[str, dict[bytes, Route]] = {}
        self._speaking: set[str] = set()
        for name in [*app.ready]:
            self._changed(name)
        app.watch(self._changed)

    def _changed(self, name: str) -> None:
        versions = self._app.versions_of(name)
        self._put(name, {} if versions is None else dict(self._routes(versions)))
        only = self._app.only
        is_unnamed = only is not None or _UNNAMED in self._owned
        if is_unnamed:
            self._put(_UNNAMED, {} if only is None else dict(self._below(self._app.versions(only.endpoint.name))))
        speaks = versions is not None and any(
            contract.openai for served in versions.ready.values() for contract in served.contracts.values()
        )
        if speaks or name in self._speaking or (is_unnamed and self._speaking):
            (self._speaking.add if speaks else self._speaking.discard)(name)
            own = self._owned.get(_UNNAMED, {})  # what the only model calls `/score` itself stays that
            spoken = targets_of(self._app, self._config, self._staging)
            self._put(_SPOKEN, {target: route for target, route in spoken.items() if target.encode() not in own})

    def _put(self, owner: str, routes: dict[str, Route]) -> None:
        """Make these the targets of an owner; its targets before take no further request."""
        found: dict[bytes, Route] = {}
        for target, route in routes.items():
            found[f"{target}/".encode()] = route
            if target:
                found[target.encode()] = route
        before = self._owned.pop(owner, {})
        for target, route in before.items():
            if self.by_target.get(target) is route:
                del self.by_target[target]
        self.by_target.update(found)
        if found:
            self._owned[owner] = found
        stock = self._app.stock
        for target, route in before.items():
            may_return = stock is not None and stock.offer.has(route.endpoint.name)
            route.retire(self.by_target.get(target), may_return=may_return)

    def _routes(self, versions: Versions) -> Iterator[tuple[str, Route]]:
        """Return the routes of a model by their targets."""
        ready, weights = versions.ready, versions.weights
        sharing = [ready[version] for version in weights]
        model = f"/models/{quote(versions.model)}"
        inferring = {served: self._inferring(served) for served in sharing}
        for target in dict.fromkeys(target for made in inferring.values() for target in made):
            among = {served: made[target] for served, made in inferring.items() if target in made}
            is_several = len(among) > 1
            each = {served: make(is_one_of_several=is_several) for served, make in among.items()}
            yield target, _shared(versions, each)
        for path, route in self._below(versions):
            yield model + path, route
        for version, served in ready.items():
            for target, make in self._inferring(served, version).items():
                yield target, make(is_one_of_several=False)
            for path in self._paths(served):
                yield f"{model}/versions/{quote(version, safe='')}{path}", self._route(served, path)

    def _inferring(self, served: Served, version: str = "") -> dict[str, Callable[..., Route]]:
        """Return what makes the routes of a version in the protocols that speak tensors."""
        labels = self._app.labels.get(served.endpoint.name)
        return {
            **kserve_calls.routes_for(served, self._config, self._staging, lambda: self._app.shared_regions, version),
            **tfserving.routes_for(served, self._config, self._staging, version, labels),
        }

    def _below(self, versions: Versions) -> Iterator[tuple[str, Route]]:
        """Return the routes that versions share, by what stands behind the name of their model."""
        sharing = [versions.ready[version] for version in versions.weights]
        for path in dict.fromkeys(path for one in sharing for path in self._paths(one)):
            among = [one for one in sharing if path in one.contracts]
            is_several = len(among) > 1
            yield path, _shared(versions, {one: self._route(one, path, is_one_of_several=is_several) for one in among})

    def _route(self, served: Served, path: str, *, is_one_of_several: bool = False) -> Route:
        if path:
            served = msgspec.structs.replace(served, contract=served.contracts[path])
        config = self._config
        limit, keys, origins = config.max_body_bytes, config.api_keys, config.cors_origins
        route = Route(
            served,
            limit,
            keys,
            origins,
            self._staging,
            elements=config.elements,
            is_one_of_several=is_one_of_several,
        )
        route.show_failures = config.show_failures
        return route

    def _paths(self, served: Served) -> list[str]:
        return [path for path, contract in served.contracts.items() if self._verbs & set(contract.verbs)]


def _shared(versions: Versions, each: dict[Served, Route]) -> Route:
    """Return the route of a target that several versions share, or that of the one that has it."""
    if len(each) == 1:
        return next(iter(each.values()))
    return SharedRoute(each, partial(versions.turn, [*each]))
