# SPDX-License-Identifier: Apache-2.0
"""Which addresses only programs on this machine can reach."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Tell whether an address, or the name `localhost`, stands for this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
