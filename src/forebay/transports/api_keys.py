# SPDX-License-Identifier: Apache-2.0
"""API keys: whether a call shows one that is known."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable
from typing import Final

_HEADERS: Final = frozenset({b"x-api-key", b"authorization"})


def lets_in(known: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether the headers of a call, in lower case, show a known key; if there is none, nobody needs one."""
    return not known or any(name in _HEADERS and key_is_known(known, value) for name, value in headers)


def key_is_known(known: Iterable[bytes], given: bytes) -> bool:
    """Compare an API key with all known ones, in time that tells nothing about them."""
    if given[:7].lower() == b"bearer ":
        given = given[7:]
    given = given.strip()
    matches = [hmac.compare_digest(given, key) for key in known]
    return any(matches) and bool(given)
