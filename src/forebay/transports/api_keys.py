# SPDX-License-Identifier: Apache-2.0
"""API keys: whether a call shows one that is known, and whose it is."""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from forebay.errors import InvalidRequest
from forebay.types.tenant import MAX_CHILD, ApiKeys, Tenant

_HEADERS: Final = frozenset({b"x-api-key", b"authorization"})
_CHILD: Final = re.compile(rb"[ -~]{0,%d}" % MAX_CHILD)


def no_key(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return what is told to a client that shows no known key in its headers, which are in lower case."""
    is_shown = any(name in _HEADERS and value.strip() for name, value in headers)
    return f"API key {'unknown' if is_shown else 'missing'}; send it as X-API-Key or as Authorization: Bearer"


def lets_in(known: Collection[bytes], headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Tell whether the headers of a call, in lower case, show a known key; if there is none, nobody needs one."""
    return not known or any(name in _HEADERS and key_is_known(known, value) for name, value in headers)


def key_is_known(known: Iterable[bytes], given: bytes) -> bool:
    """Compare an API key with all known ones, in time that tells nothing about them."""
    return any(_matches(known, given))


class KeyHolders:
    """Whose keys are shown, where keys have names.

    Attributes:
        has_children: Whether a header names a child of the tenant.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._names = keys.names if isinstance(keys, ApiKeys) and any(keys.names) else ()
        self._tenants = keys.tenants if isinstance(keys, ApiKeys) else None
        self._keys = [key.encode() for key in keys]
        self._child_header = keys.child_header.encode() if isinstance(keys, ApiKeys) else b""
        self.has_children = bool(self._names and self._child_header)

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

    def of_key_in(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Return whose the key is in the headers of a call, in lower case, whatever child of it they name."""
        return self.of(value for name, value in headers if name in _HEADERS) if self._names else None

    def in_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> Tenant | None:
        """Return whose the key is in the headers of a call, or the child of it that they name.

        Raises:
            InvalidRequest: If they name one as they may not.
        """
        if not self._names:
            return None
        headers = list(headers)
        tenant = self.of_key_in(headers)
        return self.child_of(tenant, headers) if self.has_children and tenant is not None else tenant

    def child_of(self, tenant: Tenant, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
        """Return the child of a tenant that headers name; the tenant itself if they name none.

        Raises:
            InvalidRequest: If they name several, or one that is too long or no text.
        """
        found = [value.strip() for name, value in headers if name == self._child_header]
        if not found:
            return tenant
        shown = self._child_header.decode()
        if len(found) > 1:
            raise InvalidRequest(f"the header {shown} is there {len(found)} times; send it once")
        if _CHILD.fullmatch(found[0]) is None:
            what = f"has {len(found[0])} bytes" if len(found[0]) > MAX_CHILD else "has other characters"
            raise InvalidRequest(f"the header {shown} {what}; up to {MAX_CHILD} printable ASCII characters are taken")
        assert self._tenants is not None
        return self._tenants.of(tenant.name, 0, found[0].decode())


def _matches(known: Iterable[bytes], given: bytes) -> list[bool]:
    if given[:7].lower() == b"bearer ":
        given = given[7:]
    given = given.strip()
    matches = [hmac.compare_digest(given, key) for key in known]
    return matches if given else []
