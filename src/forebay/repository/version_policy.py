# SPDX-License-Identifier: Apache-2.0
"""Which versions of a model are served, of those that are there. Nothing is read here."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

_TEXT = re.compile(r"latest(?:[: ](\d{1,9}))?|(all)|(\d+(?:\s*,\s*\d+)*)", re.ASCII)


class VersionPolicy(msgspec.Struct, frozen=True):
    """Which versions are served.

    Attributes:
        latest: So many of the highest; 0 for all.
        only: These and no others, if there are any.
    """

    latest: int = 1
    only: frozenset[int] = frozenset()

    @classmethod
    def of(cls, text: str) -> VersionPolicy:
        """Read `latest`, `latest:2`, `all`, or `1,3`; raises a `ValueError` with what is needed instead."""
        found = _TEXT.fullmatch(text.strip())
        if found is None or found[1] == "0":
            raise ValueError("expected latest, latest:N, all, or versions such as 1,3")
        if found[3]:
            return cls(only=frozenset(int(one) for one in found[3].split(",")))
        return cls(latest=0 if found[2] else int(found[1] or 1))

    def chosen(self, versions: Collection[int]) -> list[int]:
        """Return which of these are served, the highest first."""
        there = sorted(versions, reverse=True)
        if self.only:
            return [version for version in there if version in self.only]
        return there[: self.latest] if self.latest else there
