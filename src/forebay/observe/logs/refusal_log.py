# SPDX-License-Identifier: Apache-2.0
"""Refusals in the log: a line says who was refused and why, at most one line a second for each reason.

Those in between are counted, and the next line of that reason says how many they were. The caller passes the time, as a
number that changes once a second, so a refusal that is not logged costs one look at a dictionary.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Hashable
from typing import Final

log = logging.getLogger("forebay.refusals")

MAX_REASONS: Final = 64
"""Texts that are known; what a client said may be part of one, so beyond that they count as one reason."""
_NUMBER: Final = re.compile("[0-9]+")


class _Told:
    """One reason: when it was last told, the text then, and how often it was not told since."""

    __slots__ = ("second", "silent", "text")

    def __init__(self) -> None:
        self.second: int | None = None
        self.silent = 0
        self.text = ""


class RefusalLog:
    """What is logged of the refusals at one door."""

    def __init__(self, who: str, what: str = "refused") -> None:
        """Describe it.

        Args:
            who: What comes to this door, such as "client".
            what: What is done to them.
        """
        self._who = who
        self._what = what
        self._told: dict[Hashable, _Told] = {}  # a text and the same without its numbers lead to one
        self._others = _Told()
        self._forgot: int | None = None

    def counts(self, second: int, reason: Hashable, times: int = 1) -> bool:
        """Count refusals if their reason was told in this second; otherwise `refused` is to be called."""
        told = self._told.get(reason)
        if told is None or told.second != second:
            return False
        told.silent += times
        return True

    def refused(
        self, second: int, peer: tuple[str, int] | str | None, reason: Hashable, text: str, kind: str = ""
    ) -> None:
        """Log a refusal, or count it.

        Args:
            second: Now, as a number that changes once a second.
            reason: What tells this refusal from others; texts that differ in numbers only are one.
            text: The reason in words.
            kind: The kind of the error, for the line's fields.
        """
        told = self._told.get(reason) or self._find(second, reason)
        if told.second == second:
            told.silent += 1
            return
        told.second, told.text = second, text
        silent, told.silent = told.silent, 0
        address = _written(peer)
        who = f"{self._who} {address}" if address else f"a {self._who}"
        others = f" ({silent} more were {self._what} for this reason and not logged)" if silent else ""
        fields = {"client": address, **({"kind": kind} if kind else {})}
        log.warning("%s was %s: %s%s", who, self._what, text, others, extra=fields)

    def close(self) -> None:
        """Say how many were not told; the door closes."""
        self._forget(None)

    def _find(self, second: int, reason: Hashable) -> _Told:
        """Find what is known of a reason, or begin to know it."""
        plain = _NUMBER.sub("0", reason) if isinstance(reason, str) else reason
        told = self._told.get(plain)
        if len(self._told) > MAX_REASONS - 2 and self._forgot != second:
            self._forgot = second
            self._forget(second)
        if len(self._told) > MAX_REASONS - 2:
            return told or self._others
        told = self._told[plain] = self._told[reason] = told or _Told()
        return told

    def _forget(self, second: int | None) -> None:
        """Forget the reasons that were not told in this second."""
        silent = {id(told): told for told in [*self._told.values(), self._others] if told.silent}
        for told in silent.values():
            if told.second != second:
                log.warning("%d more were %s and not logged: %s", told.silent, self._what, told.text)
                told.silent = 0
        self._told = {reason: told for reason, told in self._told.items() if told.second == second}


def _written(peer: tuple[str, int] | str | None) -> str:
    if not isinstance(peer, tuple):
        return peer or ""
    host, port = peer
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
