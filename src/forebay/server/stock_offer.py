# SPDX-License-Identifier: Apache-2.0
"""Which versions of repositories are to be served: what is there, what the policy says, what failed or was sent away.

Nothing is loaded here, and nothing waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.errors import NotFound
from forebay.repository.retries import Refusals, Refused
from forebay.repository.tree_rules import number_of
from forebay.server.stock_memory import Key
from forebay.serving.models.model import Model

if TYPE_CHECKING:
    from forebay.repository.listing import Revision
    from forebay.repository.repository import Repository
    from forebay.repository.version_policy import VersionPolicy
    from forebay.server.served import Served

MAX_TIMEOUT_S: Final = 3600.0
"""Longest time that a request may ask for where nothing else is said."""
FIRST_PAUSE_S: Final = 1.0
"""Pause before something that could not be loaded is tried again."""
SHOWN_FAILURES: Final = 5
"""Versions of which `/readyz` says why they could not be loaded."""


class Stocked(msgspec.Struct, frozen=True, eq=False):
    """A repository and what becomes of its models.

    Attributes:
        make: Builds the endpoint of a revision, given the folder with its files; called in a thread.
        timeout_s: Time a request has if it names none itself, the load of its model included.
        max_timeout_s: Longest time that it may ask for.
    """

    repository: Repository
    make: Callable[[Revision, Path], Served]
    timeout_s: float = Model.timeout_ms / 1000
    max_timeout_s: float = MAX_TIMEOUT_S


class Preferred(msgspec.Struct, frozen=True):
    """A version that was swapped in by hand.

    Attributes:
        number: The version.
        instead_of: The one that the policy would have answer; None if there was none.
        there: All versions of the model that were there then.
    """

    number: int
    instead_of: int | None
    there: Mapping[int, Revision]


class StockOffer:
    """What repositories offer, of which a policy serves some.

    Attributes:
        refusals: What could not be loaded.
        dismissed: What somebody has unloaded by hand, or swapped for another version.
        policies: Which versions of a model are served, where somebody has said so; all others follow the policy.
    """

    def __init__(self, stocked: Sequence[Stocked], policy: VersionPolicy, loaded: Collection[Key]) -> None:
        """Begin with what the policy says; `loaded` are the versions in memory, now and later."""
        self.refusals: Refusals[Key, Revision] = Refusals(FIRST_PAUSE_S)
        self.dismissed: dict[Key, Revision] = {}
        self.policies: dict[str, VersionPolicy] = {}
        self._preferred: dict[str, Preferred] = {}
        self._stocked = stocked
        self._policy = policy
        self._loaded = loaded

    @property
    def names(self) -> list[str]:
        """All models that the repositories have."""
        return list(dict.fromkeys(name for one in self._stocked for name in one.repository.catalog.models))

    def has(self, name: str) -> bool:
        """Tell whether a repository has a model."""
        return self.owner(name) is not None

    def has_others(self, name: str) -> bool:
        """Tell whether the repositories have a model beside this one; asked at each change, so no list is made."""
        return sum(len(one.repository.catalog.models) for one in self._stocked) > self.has(name)

    def owner(self, name: str) -> Stocked | None:
        """Return whose a model is."""
        return next((one for one in self._stocked if name in one.repository.catalog.models), None)

    def patience_s(self, name: str, asked_s: float | None = None) -> float:
        """Return how long a request waits for a model that is loaded for it: no longer than for its answer.

        Args:
            asked_s: The time that it names itself.
        """
        owner = self.owner(name)
        if owner is None:
            return Model.timeout_ms / 1000
        return owner.timeout_s if asked_s is None else min(asked_s, owner.max_timeout_s)

    def there(self, name: str) -> Mapping[int, Revision]:
        """Return all versions of a model by their numbers."""
        owner = self.owner(name)
        return {} if owner is None else owner.repository.catalog.models.get(name, {})

    def chosen(self, name: str) -> list[str]:
        """Return which versions of a model are served, who answers first, also those that are not loaded."""
        return [str(number) for number in self._chosen(name, self.there(name))]

    def served(self, name: str, *, tries: bool = False) -> list[Revision]:
        """Return which versions are served, the one that answers what names none first.

        What could not be loaded is none, unless other files of the same version are in memory: these go on.

        Args:
            tries: Whether what could not be loaded, and has rested for long enough, is one.
        """
        versions = self.there(name)
        there = [
            number
            for number, one in versions.items()
            if (name, number) in self._loaded or not (self.is_resting(one) if tries else self.refusal(one))
        ]
        chosen = [versions[number] for number in self._chosen(name, there)]
        return [one for one in chosen if self.dismissed.get((name, one.number)) != one]

    def dismiss(self, name: str, besides: Collection[str]) -> None:
        """Keep requests from loading what is served of a model, until it is loaded by hand.

        Args:
            besides: Versions that are in memory; they are dismissed as they leave.
        """
        there = self.there(name)
        for number in {*self._chosen(name, there), *(one.number for one in self.served(name))}:
            if str(number) not in besides:
                self.dismissed[name, number] = there[number]

    def follow(self, name: str, policy: VersionPolicy | None) -> None:
        """Give a model a policy of its own, or none any more; it holds from now on, whatever was swapped in before."""
        self._preferred.pop(name, None)
        if policy is None:
            del self.policies[name]
        else:
            self.policies[name] = policy

    def prefer(self, name: str, version: str) -> None:
        """Let a version that was swapped in answer what names none, until one comes that is not there now.

        The one that it replaces is loaded by hand only, also if it was not in memory.
        """
        there, number = self.there(name), number_of(version)
        if number is None or number not in there:
            return
        instead_of = next(iter(self._by_policy(name, there)), None)
        if instead_of is not None and instead_of != number:
            self.dismissed[name, instead_of] = there[instead_of]
        self._preferred[name] = Preferred(number, instead_of, there)

    def require_choice(self, name: str, version: str) -> None:
        """Refuse to load by hand what would leave at once, because another version is served in its place.

        Raises:
            NotFound: If the repository has the version and the policy leaves it out.
        """
        there, number = self.there(name), number_of(version)
        if number in there and number not in {*self._by_policy(name, there), *self._chosen(name, there)}:
            raise self._not_served(name, number)

    def _not_served(self, name: str, number: int | None) -> NotFound:
        why = "a client has said which are" if name in self.policies else "see --versions"
        return NotFound(f"version {number} of the model '{name}' exists but is not served; {why}")

    def recall(self, name: str, number: int) -> None:
        """Serve a version again that was loaded by hand, if another one has taken its place."""
        if number not in self._chosen(name, self.there(name)):
            self._preferred.pop(name, None)

    def refusal(self, revision: Revision) -> Refused[Revision] | None:
        """Return why a revision could not be loaded, if it could not."""
        return self.refusals.of((revision.model, revision.number), revision)

    @property
    def failures(self) -> list[str]:
        """Why versions could not be loaded, of the first few."""
        return [refused.error.message for refused in islice(self.refusals, SHOWN_FAILURES)]

    def is_resting(self, revision: Revision) -> bool:
        """Tell whether a revision could not be loaded, and is not to be tried again yet."""
        return self.refusals.is_resting((revision.model, revision.number), revision, time.monotonic())

    def asked(self, name: str, number: int | None) -> Revision:
        """Return what is meant by a name and perhaps a number.

        Raises:
            NotFound: If there is no such version, or it is not served.
        """
        owner = self.owner(name)
        if owner is None:
            return self._stocked[0].repository.find(name)  # says so
        there = owner.repository.catalog.models[name]
        chosen = self._chosen(name, there)
        if number is None:
            served = self.served(name)
            if served:
                return served[0]
            if not chosen:
                raise NotFound(f"no version of the model '{name}' is served; there is {', '.join(map(str, there))}")
            number = chosen[0]
        revision = owner.repository.find(name, number)
        if self.dismissed.get((name, number)) == revision:
            raise NotFound(f"version {number} of the model '{name}' was unloaded by hand, and is loaded by hand again")
        if number not in chosen and (name, number) not in self._loaded:
            raise self._not_served(name, number)
        return revision

    def keep_only_what_is_there(self) -> None:
        """Forget what is said of versions that are gone."""
        for name, number in [*self.refusals.keys, *self.dismissed]:
            if number not in self.there(name):
                self.refusals.forget((name, number))
                self.dismissed.pop((name, number), None)
        for name in [*self._preferred]:
            if self._preferred[name].number not in self.there(name):
                del self._preferred[name]

    def describe(self, name: str, loading: Collection[Key]) -> list[dict[str, Any]]:
        """Return the versions of a model that could be loaded, or are being copied, or failed."""
        owner = self.owner(name)
        if owner is None:
            return []
        found: list[dict[str, Any]] = []
        versions = owner.repository.catalog.models[name]
        served = set(self._chosen(name, versions))
        for number, revision in versions.items():
            key = (name, number)
            failed = self.refusals.of(key, revision)
            progress = owner.repository.progress(revision)
            state = "loading" if key in loading else "available" if number in served else "not served"
            told: dict[str, Any] = {"version": str(number), "state": state, "bytes": revision.size}
            told["modified"] = int(revision.modified_s)
            if failed is not None and key not in loading:
                told["state"], told["error"] = "failed", failed.error.message
            elif self.dismissed.get(key) == revision:
                told["state"] = "unloaded"
            elif progress is not None:
                told["progress"] = str(progress)
            found.append(told)
        return found

    def _chosen(self, name: str, among: Collection[int]) -> list[int]:
        """Return which of these versions are served: those of the policy, but for those that were swapped in."""
        chosen = self._by_policy(name, among)
        said = self._preferred.get(name)
        if said is None or said.number not in among:
            return chosen
        if chosen and self.there(name).get(chosen[0]) != said.there.get(chosen[0]):  # it has come since
            return chosen
        return [said.number, *(number for number in chosen if number not in {said.number, said.instead_of})]

    def _by_policy(self, name: str, among: Collection[int]) -> list[int]:
        return self.policies.get(name, self._policy).chosen(among)
