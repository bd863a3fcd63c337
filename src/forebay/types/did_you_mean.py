# SPDX-License-Identifier: Apache-2.0
"""Which known word was probably meant by one that is not known, and how the known ones are listed."""

from __future__ import annotations

import difflib
import heapq
import itertools
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

_MANY: Final = 256
"""Words that are compared with what somebody has written."""
_LONGEST: Final = 100
"""Characters of what somebody has written, and of a word that is known; nobody mistypes more."""
_WORK: Final = 10_000
"""Letters of one word times those of the words it is compared with: any client may ask, and the loop waits."""
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
    words = [one for one in known if len(one) <= _LONGEST]
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


def listed(words: Iterable[object]) -> str:
    """List words in a sentence."""
    return ", ".join(f"'{word}'" for word in words)


def either(words: Iterable[str]) -> str:
    """List alternatives in a sentence: `a, b or c`."""
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


@lru_cache(maxsize=4096)
def _parts(name: str) -> str:
    """Return what a name is made of, with one sign before, between and after."""
    return f"-{re.sub('[-_. /:]+', '-', name.lower()).strip('-')}-"


def _pairs(parts: str) -> frozenset[tuple[str, str]]:
    """Return which letters stand beside which."""
    return frozenset(itertools.pairwise(parts))


_pairs_of_known: Final = lru_cache(maxsize=2 * _MANY)(_pairs)


def _closest(written: str, parts: dict[str, str], many: int, likeness: float) -> list[str]:
    """Return the words that are most alike; if all are too much work, among those with the most pairs of letters."""
    by_parts: dict[str, str] = {}
    for one, its in parts.items():
        by_parts.setdefault(its, one)
    room = _WORK // max(len(written) * max(map(len, by_parts), default=1), 1)
    if len(by_parts) > room:
        pairs = _pairs(written)

        def shared(its: str) -> float:
            other = _pairs_of_known(its)
            return len(pairs & other) / len(pairs | other)

        by_parts = {its: by_parts[its] for its in heapq.nlargest(max(room, 1), by_parts, shared)}
    return [by_parts[its] for its in difflib.get_close_matches(written, by_parts, n=many, cutoff=likeness)]


def distance(one: str, other: str) -> int:
    """Return how many letters have to be put in, left out, replaced or exchanged with the next."""
    one, other = _rest(one, other)
    one, other = _rest(one[::-1], other[::-1])
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


def _rest(one: str, other: str) -> tuple[str, str]:
    """Return what is left of two words after the letters that both begin with."""
    same = next((place for place, (its, others) in enumerate(zip(one, other, strict=False)) if its != others), None)
    same = min(len(one), len(other)) if same is None else same
    return one[same:], other[same:]
