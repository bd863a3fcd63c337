# SPDX-License-Identifier: Apache-2.0
"""The versions of one model: which of them answer, in which shares, and where each is in its life. Nothing waits here.

A version is an endpoint of its own, with its own queue and workers. What is asked for without a version goes to those
that have a weight, in turns as even as their weights allow: of 90 and 10 every tenth goes to the second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from forebay.errors import ConfigError, InvalidRequest, NotFound
from forebay.types.did_you_mean import nearest

if TYPE_CHECKING:
    from forebay.server.served import Served


TWO_ALIKE: Final = "two models are named '{}'; give one of them another `name`, or another `version`"


class Version(msgspec.Struct, eq=False):
    """A version, or an attempt to load one.

    Attributes:
        name: What it is called.
        served: What answers for it; None while it is built.
        weight: Its part of what is asked for without a version.
        state: Where it is: what is ready may be asked, what is leaving answers what it has accepted.
        credit: What it is owed of the turns so far.
    """

    name: str
    served: Served | None = None
    weight: int = 0
    state: Literal["loading", "ready", "leaving", "failed"] = "loading"
    error: str = ""
    credit: int = 0

    def describe(self) -> dict[str, Any]:
        """Return what `/models/NAME` tells of it."""
        is_up = self.state != "ready" or (self.served is not None and self.served.endpoint.accepting)
        told = {"version": self.name, "state": self.state if is_up else "loading", "weight": self.weight}
        return {**told, "error": self.error} if self.error else told


class Versions:
    """All versions of one name, in the order in which they came."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.all: list[Version] = []
        self.is_stocked = False
        """Whether a `Stock` says who answers what names no version, so that it may be nobody for a while."""

    @property
    def ready(self) -> dict[str, Served]:
        """Versions that may be asked, by name."""
        return {one.name: one.served for one in self.all if one.state == "ready" and one.served is not None}

    @property
    def why_none(self) -> str:
        """Why none of them answers, though one should; empty if that was asked for."""
        last = self.all[-1] if self.all and not self.ready and not self.is_stocked else None
        if last is None or last.state not in {"loading", "failed"}:
            return ""
        why = f"is not available: {last.error}" if last.state == "failed" else "is still being loaded; try again later"
        return f"the model '{self.model}' {why}"

    @property
    def weights(self) -> dict[str, int]:
        """The weights of the versions that have one."""
        return {one.name: one.weight for one in self.all if one.state == "ready" and one.weight}

    @property
    def default(self) -> Served | None:
        """The version with most weight, which stands for the model where that is described; None if none has any."""
        ready, weights = self.ready, self.weights
        return ready[max(weights, key=weights.__getitem__)] if weights else None

    def add(self, served: Served) -> None:
        """Add one that answers from the start; raises a `ConfigError` if there is one of that name and version."""
        version = served.endpoint.config.version
        if version in self.ready:
            raise ConfigError(TWO_ALIKE.format(self.model))
        self.all.append(Version(version, served, served.weight or 0, "ready"))

    def begin(self, name: str) -> Version:
        """Note that a version is being loaded; what failed before it is forgotten."""
        self.all = [one for one in self.all if one.name != name or one.state != "failed"]
        attempt = Version(name)
        self.all.append(attempt)
        return attempt

    def take(self, attempt: Version) -> Version | None:
        """Let a version that was loaded answer; returns the one of the same name whose place and weight it takes."""
        before = next((one for one in self.all if one.name == attempt.name and one.state == "ready"), None)
        if before is not None:
            before.state, attempt.weight = "leaving", before.weight
            self.all.remove(attempt)
            self.all.insert(self.all.index(before), attempt)
        elif not self.ready and not self.is_stocked:
            attempt.weight = 1
        attempt.state = "ready"
        return before

    def dismiss(self, name: str) -> Version:
        """Let a version go.

        Raises:
            NotFound: If there is none of that name.
            InvalidRequest: If it has weight and others are left that would have none.
        """
        leaving = self._ready(name)
        if len(self.ready) > 1 and list(self.weights) == [name] and not self.is_stocked:
            msg = f"version '{name}' of '{self.model}' answers what names no version; give another one weight first"
            raise InvalidRequest(msg)
        leaving.state, leaving.weight = "leaving", 0
        return leaving

    def share(self, weights: Mapping[str, int]) -> None:
        """Give versions their weights; those that are not named get none.

        Raises:
            NotFound: If one of them is not there.
            InvalidRequest: If none of them has any.
        """
        named = [(self._ready(name), weight) for name, weight in weights.items()]
        if not any(weight > 0 for _, weight in named) or any(weight < 0 for _, weight in named):
            msg = f"weights of '{self.model}' are whole numbers >= 0, at least one of them > 0; got {dict(weights)}"
            raise InvalidRequest(msg)
        for one in self.all:
            one.weight = one.credit = 0
        for one, weight in named:
            one.weight = weight

    def settle(self) -> None:
        """Make sure that requests without a version are answered: by the first one, if nobody said otherwise."""
        ready = [one for one in self.all if one.state == "ready"]
        if ready and not self.weights:
            ready[0].weight = 1

    def turn(self, among: Collection[Served] | None = None) -> Served:
        """Return the version that is asked next, among these or all.

        Raises:
            NotFound: If none of them answers what names none.
        """
        sharing = [one for one in self.all if one.state == "ready" and one.weight]
        if among is not None:
            sharing = [one for one in sharing if one.served in among]
        if not sharing:
            raise NotFound(f"no version of the model '{self.model}' that is loaded answers what names none")
        for one in sharing:
            one.credit += one.weight
        chosen = max(sharing, key=lambda one: one.credit)
        chosen.credit -= sum(one.weight for one in sharing)
        assert chosen.served is not None
        return chosen.served

    def _ready(self, name: str) -> Version:
        for one in self.all:
            if one.name == name and one.state == "ready":
                return one
        raise self.unknown(name)

    def named(self, version: str) -> Served:
        """Return what answers a request that names a version; what has none answers whatever is named.

        Raises:
            NotFound: If there is none of that name.
        """
        found = self.ready.get(version)
        if found is not None:
            return found
        default = self.default
        if default is None or (default.has_versions and version != default.any_version):
            raise self.unknown(version)
        return default

    def unknown(self, name: str) -> NotFound:
        """Return the error for a version that is not there."""
        ready = self.ready
        hint = nearest(name, ready)
        told = f"did you mean '{hint}'?" if hint else f"there is {', '.join(map(repr, list(ready)[:10])) or 'none'}"
        return NotFound(f"the model '{self.model}' has no version '{name[:100]}'; {told}")
