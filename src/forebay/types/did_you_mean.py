# SPDX-License-Identifier: Apache-2.0
"""Which known word was probably meant by one that is not known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Final

_MANY: Final = 256
"""Words that are compared with what somebody has written."""
_LONGEST: Final = 200
"""Characters of what somebody has written; nobody mistypes more."""
_LETTERS_OF_A_SLIP: Final = 3
"""For so many letters one may be wrong, missing, too many, or at its neighbour's place."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, for 'did you mean' sentences; of very many only what begins alike.

    What is mistyped comes first, then what was not written whole (`--poll-s` of `--repository-poll-s`, `cert` of
    `certfile`), then what has a word or some letters too many (`--num-workers`, `configuration`). Anything else is
    rather not guessed.
    """
    if len(word) > _LONGEST:
        return None
    words = list(known)
    if len(words) > _MANY:
        words = [one for one in words if one[:2].lower() == word[:2].lower()][:_MANY]
    parts = {one: _parts(one) for one in words}
    written = _parts(word)
    alike = _closest(written, parts, 8, 0.6)
    slips = sorted((distance(written, parts[one]), place) for place, one in enumerate(alike))
    for count, place in slips:
        if count <= (max(len(written), len(parts[alike[place]])) - 2) // _LETTERS_OF_A_SLIP:
            return alike[place]
    if len(written) > 4:  # three letters, and a sign before and after
        joined = written.replace("-", "")
        whole = {
            one: its
            for one, its in parts.items()
            if written[:-1] in its or (len(joined) > 5 and joined in its.replace("-", ""))
        }
        within = {one: its for one, its in parts.items() if len(its) > 4 and its[:-1] in written}
        for among in (whole, within):
            if found := _closest(written, among, 1, 0.0):
                return found[0]
    return None


def meant(found: Any, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest right spelling, if there is one."""
    word = nearest(str(found), known)
    return f"; did you mean '{word}'?" if word else ""


def _parts(name: str) -> str:
    """Return what a name is made of, with one sign before, between and after."""
    return f"-{re.sub('[-_. /:]+', '-', name.lower()).strip('-')}-"


def _closest(written: str, parts: dict[str, str], many: int, likeness: float) -> list[str]:
    by_parts: dict[str, str] = {}
    for one, its in parts.items():
        by_parts.setdefault(its, one)
    return [by_parts[its] for its in difflib.get_close_matches(written, by_parts, n=many, cutoff=likeness)]


def distance(one: str, other: str) -> int:
    """Return how many letters have to be put in, left out, replaced or exchanged with the next."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one):
        before, last, row = row, before, [i + 1]
        for j, its in enumerate(other):
            least = min(before[j] + (letter != its), before[j + 1] + 1, row[j] + 1)
            if i and j and letter == other[j - 1] and one[i - 1] == its:
                least = min(least, last[j - 1] + 1)
            row.append(least)
    return row[-1]
