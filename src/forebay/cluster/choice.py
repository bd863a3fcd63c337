# SPDX-License-Identifier: Apache-2.0
"""Which member a call goes to: at random by weight, and at most three, each another one. Sans-I/O."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from forebay.cluster.directory import PROTOCOL, Directory, Member
from forebay.errors import ServingNotFound
from forebay.types.plurals import counted

MAX_TRIES: Final = 3


class Tries:
    """The members that one call is sent to, one after the other, until one of them takes it."""

    def __init__(
        self, name: str, directory: Directory, chance: Callable[[], float], avoided: Collection[str] = ()
    ) -> None:
        """Begin.

        Args:
            chance: Returns a number from 0 up to 1, each as likely as the next.
            avoided: Ids of members that could not be reached a moment ago; they come after all others.
        """
        self._name = name
        listed = directory.members.get(name, ())
        self._left = [one for one in listed if one.protocol == PROTOCOL]
        self._others = sorted({one.protocol for one in listed} - {PROTOCOL})
        self._chance = chance
        self._avoided = avoided
        self._problems: list[str] = []

    def next(self) -> Member | None:
        """Return the next member; None if there is no further one, or three have been tried."""
        if len(self._problems) >= MAX_TRIES:
            return None
        able = [one for one in self._left if one.id not in self._avoided] or self._left
        if not able:
            return None
        point = self._chance() * sum(one.weight for one in able)
        chosen = able[-1]
        for one in able:
            point -= one.weight
            if point < 0:
                chosen = one
                break
        self._left = [one for one in self._left if one.id != chosen.id]
        return chosen

    def failed(self, problem: str) -> None:
        """Note why the last member did not take the call, as a sentence about it."""
        self._problems.append(problem)

    def error(self) -> ServingNotFound:
        """Return why no member took it."""
        if self._problems:
            tried = counted(len(self._problems), "member")
            return ServingNotFound(
                f"no member took the call of {self._name!r}; tried {tried}: {'; '.join(self._problems)}"
            )
        if self._others:
            spoken = ", ".join(map(str, self._others))
            return ServingNotFound(
                f"{self._name!r} runs only on members that speak version {spoken} of the protocol of members, and this "
                f"program speaks version {PROTOCOL}; run the same major version of forebay on both"
            )
        return ServingNotFound(
            f"could not find a serving named {self._name!r} in the cluster. Make sure that a program which has joined "
            f"it started one, with serving.start(name={self._name!r}), and did not stop it"
        )
