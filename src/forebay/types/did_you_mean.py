# SPDX-License-Identifier: Apache-2.0
"""Which known word was probably meant by one that is not known."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any, Final

_MANY: Final = 256
"""Words that are compared with what somebody has written."""
_SLIP: Final = 0.8
"""How much a word with a wrong letter or two is like the right one."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, for 'did you mean' sentences; of very many only what begins alike.

    What is mistyped comes first, then what was not written whole (`--poll-s` of `--repository-poll-s`).
    """
    words = list(known)
    if len(words) > _MANY:
        words = [one for one in words if one[:2].lower() == word[:2].lower()][:_MANY]
    word = word.lower()
    parts = _parts(word)
    longer = [one for one in words if parts in _parts(one)] if len(parts) > 4 else []
    for among, likeness in ((words, _SLIP), (longer, 0.0), (words, 0.5)):
        found = difflib.get_close_matches(word, among, n=1, cutoff=likeness)
        if found:
            return found[0]
    return None


def meant(found: Any, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the nearest right spelling, if there is one."""
    word = nearest(str(found), known)
    return f"; did you mean '{word}'?" if word else ""


def _parts(name: str) -> str:
    """Return what a name is made of, with one sign before, between and after."""
    return f"-{re.sub('[-_. ]+', '-', name.lower()).strip('-')}-"
