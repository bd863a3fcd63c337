# SPDX-License-Identifier: Apache-2.0
"""Whether a request that only asks comes from a page of this server, where asking costs something.

A page of another origin cannot read what it asks for, but its browser asks all the same: an `<img>` would start a
recording. It cannot add a header, though, without its browser asking the server beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.transports.http.http_errors import ForeignPage

HEADER: Final = "x-forebay-page"
FORWARDED: Final = (
    *(b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"),
)
"""Headers by which a proxy says that it asks for somebody else."""


def refuse_foreign_page(headers: Mapping[str, str]) -> None:
    """Let programs, people who type an address, and pages of this server pass.

    Raises:
        ForeignPage: If a browser asks for anybody else.
    """
    if HEADER in headers:
        return
    site = headers.get("sec-fetch-site", "")
    if site in {"same-origin", "none"} or not (site or headers.get("user-agent", "").startswith("Mozilla/")):
        return
    msg = f"a web page asks for this, and not with the header {HEADER}, which only a page of this server can add"
    raise ForeignPage(msg)
