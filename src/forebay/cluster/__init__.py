# SPDX-License-Identifier: Apache-2.0
"""Programs and servers that know of each other: the directory of what runs where, and servings of other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.cluster.membership import Membership

__all__ = ["Membership", "join"]


def join(
    address: str,
    secret: str | None = None,
    *,
    listen: str | None = None,
    cafile: str | None = None,
    certfile: str | None = None,
    keyfile: str | None = None,
) -> Membership:
    """Join a cluster: servings of this program can be called by its other members, and theirs by this program.

    It returns once this program is a member. It waits some seconds for a server that does not answer yet; a program on
    asyncio joins before it runs its loop, or by `asyncio.to_thread`.

    Args:
        address: A server that keeps the directory: `tcp:HOST:PORT` or `unix:PATH`, as of `forebay serve --attach`.
        secret: What all members and the server must know, or `@FILE`; None takes that of the environment variable
            FOREBAY_SECRET, else that of the deployment whose node this machine is.
        listen: Where other members call this program; None for a port of its own on the interface by which the server
            is reached, or a socket of its own if `address` is one.
        cafile: Authorities in PEM that have signed the certificates of the server and of all members. With it and
            `certfile` all connections are encrypted; without them, none is.
        certfile: The certificate chain of this program, in PEM.
        keyfile: Its private key; None if it is in the same file.

    Returns:
        A context manager; its end, or `leave()`, leaves the cluster.

    Raises:
        ConfigError: The server does not answer or does not let this program in, or an argument cannot be used.
    """
    from forebay.cluster.membership import joined, read_options

    return joined(read_options(address, secret, listen, cafile, certfile, keyfile))


def __getattr__(name: str) -> Any:
    if name == "Membership":  # what it needs is loaded by those who join
        from forebay.cluster.membership import Membership

        return Membership
    raise AttributeError(f"module 'forebay.cluster' has no attribute {name!r}")
