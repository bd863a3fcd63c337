# SPDX-License-Identifier: Apache-2.0
"""Why a port cannot be had."""

from __future__ import annotations

import errno


def why_not(host: str, port: int, error: OSError) -> str:
    """Return the sentence for an address that cannot be bound, with the cure."""
    where = f"{host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; choose another port, 0 takes a free one"
    if error.errno == errno.EACCES:
        return f"{where} needs privileges this user does not have; choose a port above 1023"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine; choose one with --host, 0.0.0.0 takes all"
    return f"{where} cannot be bound: {error.strerror or error}"
