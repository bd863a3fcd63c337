# SPDX-License-Identifier: Apache-2.0
"""Which models of repositories are loaded, said as a whole: what is not named leaves, as in TensorFlow Serving.

A client names models, never places: where it says a path, that has to end in the name of the model, and nobody looks
there. What it has just written into the repository is waited for. Which versions of a model are served stays as it
said, also for those that come later, until it says it anew.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from forebay.errors import ForebayError, InvalidRequest, NotFound
from forebay.repository.tree_rules import number_of
from forebay.repository.version_policy import VersionPolicy
from forebay.server.stock import LOOK_S, PAUSE_S, Stock

if TYPE_CHECKING:
    from forebay.server.app import App


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is to be loaded.

    Attributes:
        name: What it is called.
        place: Where the client thinks it lies.
        policy: Which of its versions.
        labels: Names for versions.
    """

    name: str
    place: str = ""
    policy: VersionPolicy = VersionPolicy()
    labels: dict[str, str] = {}


async def reload(app: App, wanted: Sequence[WantedModel]) -> None:
    """Have these models loaded and no others; returns once they are.

    Raises:
        NotFound: If the repository has no such model or version.
        InvalidRequest: If that is not possible here, or what is wanted contradicts itself.
        ForebayError: Why one cannot be loaded; the others are.
    """
    stock = app.stock
    if stock is None:
        raise InvalidRequest("no repository is served, so clients cannot say which of its models are loaded")
    names = [one.name for one in wanted]
    for one in wanted:
        if names.count(one.name) > 1:
            raise InvalidRequest(f"the model '{one.name[:100]}' is named twice")
        if one.place and posixpath.basename(one.place.rstrip("/")) != one.name:
            msg = f"the model '{one.name[:100]}' names another folder; here a model has the name of its folder"
            raise InvalidRequest(msg)
    problems: list[ForebayError] = []
    async with stock.one_says:
        for one in wanted:
            try:
                await _load(app, stock, one)
            except (InvalidRequest, NotFound):  # the request is wrong, not a model
                raise
            except ForebayError as error:
                problems.append(error)
        for name in stock.offer.policies.keys() - names:
            stock.offer.follow(name, None)
        for name in [*app.ready]:
            if name not in names and stock.offer.has(name):
                await app.model_index.unload(name)
                app.label(name, {})
    if problems:
        raise problems[0]


async def _load(app: App, stock: Stock, one: WantedModel) -> None:
    chosen = await _found(app, one)
    for label, version in one.labels.items():
        if version not in chosen:
            msg = f"the label '{label[:100]}' of '{one.name[:100]}' is for version {version}, which is not loaded"
            raise InvalidRequest(msg)
    stock.offer.follow(one.name, one.policy)
    there = app.versions_of(one.name)
    for version in chosen:
        if there is None or version not in there.ready:
            make = app.model_index.maker(one.name, version)
            await app.load(one.name, version, make, timeout_s=app.load_timeout_s)
    app.share(one.name, {chosen[0]: 1})
    stock.settle(one.name)  # what leaves by its policy may come back by it
    for version, served in app.versions(one.name).ready.items():
        if version not in chosen:
            await app.unload(one.name, version, served)
    app.label(one.name, one.labels)


async def _found(app: App, one: WantedModel) -> list[str]:
    """Return which versions of a model are to be loaded, the highest first, once the repository has them.

    Raises:
        NotFound: If it has none of them.
    """
    assert app.stock is not None
    until = asyncio.get_running_loop().time() + LOOK_S
    while True:
        there = [
            number for told in app.describe_versions(one.name) if (number := number_of(told["version"])) is not None
        ]
        chosen = one.policy.chosen(there)
        if chosen and one.policy.only <= set(chosen):
            return list(map(str, chosen))
        if asyncio.get_running_loop().time() > until:
            shown = ", ".join(map(str, there)) or "none"
            only = ", ".join(map(str, sorted(one.policy.only)))
            asked = f"the versions {only[:200]}" if only else "a version"
            raise NotFound(f"no repository has {asked} of a model '{one.name[:100]}'; there is {shown}")
        app.stock.look_soon()
        await asyncio.sleep(PAUSE_S)
