# SPDX-License-Identifier: Apache-2.0
"""The names a server may be called by, so that no web page reaches one on its visitor's machine by its own name.

A page can let its own name lead to 127.0.0.1 and then talk to a server there as if it came from it (DNS rebinding). So
a server that only its own machine can reach, and that asks for no key, answers to names of that machine and to
addresses only. A server that others can reach cannot know its names: it takes all, unless it is told them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import TYPE_CHECKING, Final

from forebay.transports.http.http_errors import NotHttp, WrongHost
from forebay.types.loopback import is_loopback

if TYPE_CHECKING:
    from forebay.server.config import HttpConfig

_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]+)(:[0-9]*)?")
_MAX_KNOWN: Final = 256
"""Hosts that are remembered as good."""


class Hosts:
    """Decides whether the Host header of a request is one of the server's names."""

    def __init__(self, config: HttpConfig) -> None:
        self._names = {name.lower() for name in config.allowed_hosts}
        self._checks = bool(self._names) or (is_loopback(config.host) and not config.api_keys)
        if "*" in self._names:
            self._checks = False
        self._names |= {config.host.lower(), socket.gethostname().lower()}
        self._known: set[bytes] = {b""}  # HTTP/1.0 may leave it away

    def problem(self, host: bytes) -> WrongHost | NotHttp | None:
        """Return why a request for this host is refused, None if it is not."""
        if host in self._known:
            return None
        if not _HOST.fullmatch(host):
            return NotHttp(f"Host: expected a name or an address, got {host[:80].decode('latin-1')!r}")
        if self._checks and not self._is_ours(host.decode("latin-1").lower()):
            shown = host[:100].decode("latin-1")
            return WrongHost(f"this server is not called '{shown}'; if it is, start it with --allowed-host NAME")
        if len(self._known) >= _MAX_KNOWN:
            self._known = {b""}
        self._known.add(host)
        return None

    def _is_ours(self, name: str) -> bool:
        if ":" in name and not name.endswith("]"):
            name = name.rpartition(":")[0]
        name = name.rstrip(".")
        return name in self._names or name == "localhost" or name.endswith(".localhost") or _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
