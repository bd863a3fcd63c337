# SPDX-License-Identifier: Apache-2.0
"""The ports of a node: that of its front, and those that its owners may have."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
from collections.abc import Generator
from typing import Final

from forebay.cluster.node_folder import NodeFolder, folders
from forebay.transports.binding import require_free

_FILE: Final = "http-port"
_FIRST: Final = 20_000
_COUNT: Final = 12_000
"""Ports for owners: below those that the kernel gives to connections, and beside those of Ray."""
_ATTEMPTS: Final = 200

_chance: Final = secrets.SystemRandom()


def take_port(folder: NodeFolder, host: str, wanted: int) -> int:
    """Return the port of a node's front: the wanted one, or a free one if another node on this machine has that.

    Raises:
        ConfigError: A program that is not a node of the deployment has it.
        OSError: The folder cannot be used.
    """
    with _alone(folder):
        others = {_port_of(one) for one in folders(folder.deployment) if one.path != folder.path and one.identity}
        if wanted == 0 or wanted in others:
            wanted = free_port(host)
        else:
            require_free(host, wanted)
        folder.write(_FILE, str(wanted).encode())
        return wanted


def free_port(host: str) -> int:
    """Return a port that no program listens at; raises an `OSError` if none was found."""
    for _ in range(_ATTEMPTS):
        port = _FIRST + _chance.randrange(_COUNT)
        with contextlib.suppress(OSError), socket.create_server((host, port)):
            return port
    raise OSError(f"no free port was found at {host}")


def _port_of(folder: NodeFolder) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int((folder.path / _FILE).read_text())
    return None


@contextlib.contextmanager
def _alone(folder: NodeFolder) -> Generator[None]:
    """Keep other nodes of the deployment on this machine waiting."""
    descriptor = os.open(folder.path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
