# SPDX-License-Identifier: Apache-2.0
"""The fields of answers that say what is left of a tenant's limits.

They follow draft-ietf-httpapi-ratelimit-headers-10 of September 2025: lists of structured fields, whose items are
strings with parameters.

    ratelimit-policy: "requests";q=200;w=2, "rows";q=1000;w=1;qu="rows", "open_streams";q=10;qu="concurrent-requests"
    ratelimit: "requests";r=57;t=1, "rows";r=1000, "open_streams";r=9

Differences: its registry has no unit for samples, so `qu="rows"` is ours; and gRPC has the fields as trailers, which it
does not know of. HTTP has them as headers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from forebay.transports.api_keys import KeyHolders
    from forebay.types.tenant import Tenant


def is_limited(tenant: Tenant) -> bool:
    """Tell whether answers to a tenant say what is left."""
    return tenant.allowance is not None and bool(tenant.allowance.policy)


def rate_limit_fields(tenant: Tenant | None) -> list[tuple[bytes, bytes]]:
    """Return the fields for an answer to a tenant; none if it has no limits."""
    allowance = None if tenant is None else tenant.allowance
    if allowance is None or not allowance.policy:
        return []
    left = allowance.left(time.monotonic())
    return [(b"ratelimit-policy", allowance.policy.encode()), (b"ratelimit", left.encode())]


def telling_limits(app: ASGIApp, holders: KeyHolders) -> ASGIApp:
    """Return an application that answers as this one, and says what is left of the limits of who calls."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        tenant = holders.of_key_in(scope["headers"])  # its children share its limits

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and (fields := rate_limit_fields(tenant)):
                others = [field for field in message["headers"] if not field[0].startswith(b"ratelimit")]
                message = {**message, "headers": [*others, *fields]}  # not what the owner says to its front
            await send(message)

        await app(scope, receive, sending)

    return told
