# SPDX-License-Identifier: Apache-2.0
"""Owns the HTTP port: binds it, hands each connection to the fast lane, and closes without losing a request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from forebay.transports.binding import OWN, ListeningPlace
from forebay.transports.http.connection import HttpConnection
from forebay.transports.http.port import HttpPort
from forebay.transports.tls_door import TlsDoor, open_door, wait_closed
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from forebay.server.byte_budget import ByteBudget
    from forebay.server.config import HttpConfig
    from forebay.transports.acceptor import Acceptor
    from forebay.transports.http.route import Route

log = logging.getLogger("forebay")

IDLE_GRACE_S = 1.0
"""While draining, idle connections stay open this long: a request that is on its way to one of them is answered."""


class HttpListener:
    """An HTTP/1.1 server on one port."""

    def __init__(
        self,
        config: HttpConfig,
        routes: Mapping[bytes, Route],
        asgi: ASGIApp,
        source: str = "",
        byte_budget: ByteBudget | None = None,
        *,
        is_any_method: bool = False,
        place: ListeningPlace = OWN,
    ) -> None:
        """Describe the listener; `start` binds it.

        Args:
            routes: What is answered on the fast lane, by target.
            asgi: Answers everything else.
            source: What has set the port, for messages; see `why_not`.
            byte_budget: What all ports of the server hold together; None if this is the only one.
            is_any_method: All methods are one: those that the parser does not know reach `asgi` as a POST.
            place: Where it listens, if not just at the address of `config`; a Unix socket speaks no TLS.

        Raises:
            ConfigError: If the TLS files cannot be used.
        """
        self._source = source
        self._place = place
        self._tls = None if place.path else server_tls(config.certfile, config.keyfile)
        self._lane = HttpPort(config, routes, _quiet(asgi), byte_budget, is_any_method=is_any_method)
        self._door: TlsDoor | Acceptor | None = None

    async def start(self) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            ConfigError: If the address cannot be bound, with the reason and the cure.
        """
        connect = partial(HttpConnection, self._lane)
        self._door, address = await open_door(self._lane, self._tls, connect, self._place, self._source)
        self._lane.start(asyncio.get_running_loop())
        return address

    def routes_changed(self, _name: str = "") -> None:
        """Look every request up anew."""
        self._lane.forget()

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, answer what was sent, close every connection within `grace_s` seconds."""
        lane = self._lane
        lane.drain()
        if self._door is not None:
            self._door.close()
        started = time.monotonic()
        await wait_closed(lane, min(IDLE_GRACE_S, grace_s))
        if isinstance(self._door, TlsDoor):
            self._door.abandon()
        for connection in list(lane.connections):
            connection.shutdown()
        await wait_closed(lane, max(grace_s - (time.monotonic() - started), 0.0))
        if left := sum(state.owes or state.is_inside for state in (one.talk.state for one in lane.connections)):
            log.warning("the drain time is over; closing connections without their answer: %d", left)
        for connection in list(lane.connections):
            connection.abort()
        tasks = lane.server_state.tasks
        for task in list(tasks):
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=1.0)
        lane.stop()


def _quiet(app: ASGIApp) -> ASGIApp:
    """Let an answer that nobody reads end without a traceback.

    uvloop raises when an answer to a client that has just left is written. At the end of a drain connections are cut,
    and what still works for them is cancelled.
    """

    async def quiet(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            pass
        except RuntimeError as error:
            if "handler is closed" not in str(error):
                raise

    return quiet
