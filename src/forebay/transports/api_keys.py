# SPDX-License-Identifier: Apache-2.0
"""API keys: whether a call shows one that is known, and whose it is."""

from __future__ import annotations

import hmac
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from forebay.types.tenant import ApiKeys, Tenant

_HEADERS: Final = frozenset({b"x-api-key", b"authorization"})


def lets_in(known: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether the headers of a call, in lower case, show a known key; if there is none, nobody needs one."""
    return not known or any(name in _HEADERS and key_is_known(known, value) for name, value in headers)


def key_is_known(known: Iterable[bytes], given: bytes) -> bool:
    """Compare an API key with all known ones, in time that tells nothing about them."""
    return any(_matches(known, given))


class KeyHolders:
    """Whose keys are shown, where keys have names."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._names = keys.names if isinstance(keys, ApiKeys) and any(keys.names) else ()
        self._tenants = keys.tenants if isinstance(keys, ApiKeys) else None
        self._keys = [key.encode() for key in keys]

    def __bool__(self) -> bool:
        return bool(self._names)

    def of(self, shown: Iterable[bytes]) -> Tenant | None:
        """Return whose the first known key is of those that a call shows; None if it has no name."""
        if self._tenants is not None and self._names:
            for given in shown:
                matches = _matches(self._keys, given)
                if any(matches):
                    name = self._names[matches.index(True)]
                    return self._tenants.of(name) if name else None
        return None

    def in_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Return the same for the headers of a call, in lower case."""
        return self.of(value for name, value in headers if name in _HEADERS) if self._names else None


def _matches(known: Iterable[bytes], given: bytes) -> list[bool]:
    if given[:7].lower() == b"bearer ":
        given = given[7:]
    given = given.strip()
    matches = [hmac.compare_digest(given, key) for key in known]
    return matches if given else []
