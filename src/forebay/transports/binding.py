# SPDX-License-Identifier: Apache-2.0
"""Sockets of an address that a person names, and why a port cannot be had."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from forebay.errors import ConfigError
from forebay.workers.wire.address import UnixAddress, bind_unix

PASSIVE: Final = {"type": socket.SOCK_STREAM, "flags": socket.AI_PASSIVE}
"""What the addresses of a host to listen on are asked for with."""


_TRIES: Final = 8
"""Times that a port is looked for which is free at each address of a host."""

_ABSENT: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""What is said of an address that this machine has not."""


class ListeningPlace(msgspec.Struct, frozen=True):
    """Where a server listens, if not just at an address of its own.

    Attributes:
        path: A Unix socket that it has instead, which only this user can connect to; empty if it has an address.
        is_shared: Whether other processes of this user listen at the same address: each gets some of the connections.
    """

    path: str = ""
    is_shared: bool = False

    async def bind(self, host: str, port: int) -> list[socket.socket]:
        """Return sockets that have the place and do not listen yet.

        Raises:
            OSError: If it cannot be had.
            ConfigError: The same of a path.
            UnicodeError: If the host cannot be the name of one.
        """
        if self.path:
            return [bind_unix(UnixAddress(self.path))]
        found = await asyncio.get_running_loop().getaddrinfo(host or None, port, **PASSIVE)
        return bound(found, is_shared=self.is_shared)


OWN: Final = ListeningPlace()
"""That of a server that has its address for itself."""


def bound(
    found: Iterable[tuple[int, int, int, str, Any]], *, is_shared: bool = False, is_reused: bool = True
) -> list[socket.socket]:
    """Return sockets that have the addresses of a host and do not listen yet; where any port will do, they share one.

    What this machine has not is left out if it has others: `localhost` often is an address of IPv6 in a container
    without any. All addresses of IPv6 are those of IPv4, too, each with a socket: so clients keep their own address.

    Args:
        is_shared: Whether other processes of this user may listen there as well.
        is_reused: Whether it is no matter that connections of a server before are not over yet. Who asks for that gets
            a port also where another socket that asked for it has it and does not listen.

    Raises:
        OSError: If an address cannot be had, or this machine has none of them.
    """
    addresses = list(dict.fromkeys(found))
    if len(addresses) == 1 and addresses[0][-1][0] == "::":
        _, kind, protocol, name, (_, port, *_) = addresses[0]
        addresses.append((socket.AF_INET, kind, protocol, name, ("0.0.0.0", port)))  # noqa: S104 - it was asked for
    for _ in range(_TRIES - 1):
        try:
            return _together(addresses, is_shared=is_shared, is_reused=is_reused)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or addresses[0][-1][1]:
                raise
    return _together(addresses, is_shared=is_shared, is_reused=is_reused)


def _together(
    addresses: Iterable[tuple[int, int, int, str, Any]], *, is_shared: bool, is_reused: bool
) -> list[socket.socket]:
    sockets: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, kind, protocol, _, address in addresses:
            port = address[1] or (sockets[0].getsockname()[1] if sockets else 0)
            try:
                where = (address[0], port, *address[2:])
                sockets.append(_bound(family, kind, protocol, where, is_shared=is_shared, is_reused=is_reused))
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                absent = error
    except OSError:
        for it in sockets:
            it.close()
        raise
    if absent is not None and not sockets:
        raise absent
    return sockets


def _bound(family: int, kind: int, protocol: int, address: Any, *, is_shared: bool, is_reused: bool) -> socket.socket:
    it = socket.socket(family, kind, protocol)
    try:
        if is_reused:
            it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            it.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            it.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        it.bind(address)
    except BaseException:
        it.close()
        raise
    return it


def why_not(host: str, port: int, error: OSError | UnicodeError, source: str = "") -> str:
    """Return the sentence for an address that cannot be bound, with the cure.

    Args:
        error: What the system, or the encoding of the host's name, says.
        source: What has set the port: a file, its line and the key; empty where an option may have.
    """
    where = f"{host}:{port}"
    if isinstance(error, UnicodeError):
        return f"expected an address or a host name, such as 127.0.0.1 or 0.0.0.0, got '{host}'"
    if isinstance(error, socket.gaierror) and host.startswith("["):
        return f"the host '{host}' has brackets, which belong in URLs only; write {host.strip('[]')}"
    if isinstance(error, socket.gaierror):
        said = (error.strerror or str(error)).lower()
        return f"the host '{host}' leads to no address: {said}; choose one of this machine, 0.0.0.0 takes all"
    if error.errno == errno.EADDRINUSE and source:
        return f"{source} is {port}, which is in use already at {host}; choose another port"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use already; choose another port, 0 takes a free one"
    if error.errno == errno.EACCES:
        return f"{where} needs privileges this user does not have; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"expected an address of this machine, or 0.0.0.0 for all, got {host}"
    return f"{where} cannot be bound: {error.strerror or error}"


def require_free(host: str, port: int) -> None:
    """Check that a port can be had, before time goes into what would listen there.

    Args:
        port: 0 for any, which asks only whether the address is one of this machine.

    Raises:
        ConfigError: If it cannot.
    """
    try:
        for it in bound(socket.getaddrinfo(host or None, port, **PASSIVE)):
            it.close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(why_not(host, port, error)) from error


def reserved(host: str, port: int) -> list[socket.socket]:
    """Return sockets that keep an address for processes of this user, which share it, and from all others.

    Raises:
        ConfigError: If it cannot be had.
    """
    require_free(host, port)
    try:
        found = socket.getaddrinfo(host or None, port, **PASSIVE)
        try:
            return bound(found, is_shared=True, is_reused=False)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return bound(found, is_shared=True)  # connections of a server before are not over yet
    except OSError as error:
        raise ConfigError(why_not(host, port, error)) from error
