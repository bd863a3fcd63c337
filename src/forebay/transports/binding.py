# SPDX-License-Identifier: Apache-2.0
"""Why a port cannot be had."""

from __future__ import annotations

import errno
import socket

from forebay.errors import ConfigError


def why_not(host: str, port: int, error: OSError | UnicodeError, source: str = "") -> str:
    """Return the sentence for an address that cannot be bound, with the cure.

    Args:
        host: The address.
        error: What the system, or the encoding of the host's name, says.
        source: What has set the port: a file, its line and the key; empty where an option may have.
    """
    where = f"{host}:{port}"
    if isinstance(error, UnicodeError):
        return f"the host '{host}' is no address and no name of one; 127.0.0.1 and 0.0.0.0 are two"
    if error.errno == errno.EADDRINUSE and source:
        return f"{source} is {port}, which another program uses at {host}; choose another port"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; choose another port, 0 takes a free one"
    if error.errno == errno.EACCES:
        return f"{where} needs privileges this user does not have; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose one with --host, 0.0.0.0 takes all"
    return f"{where} cannot be bound: {error.strerror or error}"


def require_free(host: str, port: int) -> None:
    """Check that a port is free, before time goes into what would listen there; what else may be wrong shows later.

    Raises:
        ConfigError: If it is in use.
    """
    if not port:
        return
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(why_not(host, port, error)) from error
    except (UnicodeError, OverflowError):
        pass  # said where the port is opened
