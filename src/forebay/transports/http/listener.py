# SPDX-License-Identifier: Apache-2.0
"""Owns the HTTP port: binds it, hands each connection to the fast lane, and closes without losing a request."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from forebay.errors import ConfigError
from forebay.transports.acceptor import Acceptor, adopting
from forebay.transports.binding import OWN, ListeningPlace, why_not
from forebay.transports.http.connection import HttpConnection
from forebay.transports.http.port import HttpPort
from forebay.transports.tls_door import TlsDoor
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from forebay.server.byte_budget import ByteBudget
    from forebay.server.config import HttpConfig
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
        self._config = config
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
        config = self._config
        if not 0 <= config.port < 1 << 16:
            raise ConfigError(f"expected a port from 0 to 65535, got {config.port}")

        connect = partial(HttpConnection, self._lane)
        try:
            if self._tls is not None:
                self._door = TlsDoor(self._lane, self._tls, connect)
            else:
                self._door = Acceptor(adopting(connect))
            host, port = await self._door.open(config.host, config.port, config.backlog, self._place)
        except (OSError, UnicodeError) as error:
            raise ConfigError(why_not(config.host, config.port, error, self._source)) from error
        self._lane.start(asyncio.get_running_loop())
        return host, port

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
        await self._wait_closed(min(IDLE_GRACE_S, grace_s))
        if isinstance(self._door, TlsDoor):
            self._door.abandon()
        for connection in list(lane.connections):
            connection.shutdown()
        await self._wait_closed(max(grace_s - (time.monotonic() - started), 0.0))
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

    async def _wait_closed(self, timeout_s: float) -> None:
        """Wait until no connection is left; not on the data path, so looking now and then is good enough."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._lane.connections or self._lane.greeted:  # noqa: ASYNC110 - a connection closes in six ways
                    await asyncio.sleep(0.02)


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
