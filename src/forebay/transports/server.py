# SPDX-License-Identifier: Apache-2.0
"""Run an app behind its listeners until a signal says stop: load, open the port, answer, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from forebay.transports import forked_sockets, garbage_collection
from forebay.transports.acceptor import ask_for_descriptors
from forebay.transports.signals import LAST_S, Signals

if TYPE_CHECKING:
    from forebay.server.app import App

log = logging.getLogger("forebay")

SWITCH_S: Final = 0.001
"""How long a thread may keep the interpreter from others that want it. Python's own 5 ms are paid anew at each turn of
the loop, so that a model of pure Python in threads would hold up every other request several times."""


class Listener(Protocol):
    """Owns a port."""

    async def start(self) -> tuple[str, int]:
        """Bind and accept; returns the address."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more and answer what was sent."""
        ...


class Server:
    """One app, its listeners, and the signals that end them.

    Attributes:
        is_part: Whether another process has the signals of the whole server, and logs them.
    """

    def __init__(
        self,
        app: App,
        listener: Listener,
        *,
        more: Sequence[Listener] = (),
        drain_s: float,
        ready: Callable[[str, int], None],
        stopping: Callable[[], None] = lambda: None,
        reload: Callable[[], None] | None = None,
    ) -> None:
        """Describe a server; `run` runs it.

        Args:
            drain_s: Time that open requests, and what follows an answer, have to end after SIGTERM or SIGINT; a second
                signal ends it.
            ready: Called with the address of `listener` once every model is loaded and the ports are open.
            stopping: Called before the drain begins.
            reload: What SIGHUP asks for; None has it drain as well, and so has a terminal that was closed.
        """
        self._app = app
        self._listeners = [listener, *more]
        self._ports: list[int] = []
        self._drain_s = drain_s
        self._ready = ready
        self._stopping = stopping
        self._reload = reload
        self.is_part = False
        self._status = 0
        self._stop: asyncio.Event | None = None
        self._is_ready = self._is_over = False
        self._hurry: asyncio.Event | None = None

    def run(self) -> int:
        """Run until stopped; returns the exit status.

        Raises:
            ConfigError, ModelError: If it cannot start.
        """
        import uvloop

        ask_for_descriptors()
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        with (
            Signals(self._signalled, self._patience_s, self._forced_status, self._reload) as signals,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(self.serve(signals))

    def stop(self) -> None:
        """Begin to drain; call it on the loop."""
        if self._stop is not None:
            self._stop.set()

    def fail(self, status: int) -> None:
        """Stop with this exit status; call it on the loop."""
        self._status = self._status or status
        self.stop()

    async def serve(self, signals: Signals | None = None) -> int:
        """Run on the loop that is there; returns the exit status.

        Args:
            signals: What ends it; None leaves that to `stop`, and the process is not the server's own.

        Raises:
            ConfigError, ModelError: If it cannot start.
        """
        with self._app.state.entered():
            return await self._serve(signals)

    async def _serve(self, signals: Signals | None) -> int:
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        if signals is not None:
            signals.attend(asyncio.get_running_loop())
        # The ports are bound before the models are loaded, so that a port in use is found in milliseconds;
        # nothing is lost by it: until then /readyz says what is missing and requests get 503.
        host, port = await self._open()
        walks = None
        if signals is not None and self._app.stock is not None:
            # Models come and go: to let the collector look at everything whenever one has left would hold up all
            # requests for a tenth of a second.
            garbage_collection.freeze()
            walks = garbage_collection.LongWalks()
            walks.start()
            self._app.on_left = walks.left
        try:
            starting = asyncio.ensure_future(self._app.start())
            stopped = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait([starting])
            elif starting.exception() is None:
                if signals is not None and self._app.stock is None:
                    garbage_collection.freeze()
                    self._app.on_left = garbage_collection.freeze
                self._is_ready = True
                self._ready(host, port)
                await self._stop.wait()
            else:
                await starting
        finally:
            self._stopping()
            await self._drain()
            if walks is not None:
                walks.stop()
        return self._status

    async def _open(self) -> tuple[str, int]:
        """Open every port or none; returns the address of the first."""
        addresses: list[tuple[str, int]] = []
        try:
            for listener in self._listeners:
                addresses.append(await listener.start())
                forked_sockets.keep_from_children(addresses[-1][1])
                self._ports.append(addresses[-1][1])
        except BaseException:
            for listener in self._listeners[: len(addresses)]:
                await listener.stop(0.0)
            raise
        return addresses[0]

    async def _drain(self) -> None:
        assert self._hurry is not None
        started = time.monotonic()
        hurried = asyncio.ensure_future(self._hurry.wait())
        closing = [asyncio.ensure_future(listener.stop(self._drain_s)) for listener in self._listeners]
        await asyncio.sleep(0)  # the listeners come first: an answer that says it drains has to close its connection
        self._app.begin_drain()
        await asyncio.wait([asyncio.ensure_future(asyncio.wait(closing)), hurried], return_when=asyncio.FIRST_COMPLETED)
        for stopping in closing:
            stopping.cancel()
        await asyncio.wait(closing)
        # All who asked have their answers, or will not get them; what follows an answer has the rest of the time.
        left_s = max(self._drain_s - (time.monotonic() - started), 0.0)
        draining = asyncio.ensure_future(self._app.drain(left_s))
        await asyncio.wait([draining, hurried], return_when=asyncio.FIRST_COMPLETED)
        if not draining.done():
            draining.cancel()
            await asyncio.wait([draining])
            await self._app.drain(0.0)
        else:
            draining.result()
        hurried.cancel()
        for port in self._ports:
            forked_sockets.give_free(port)
        self._is_over = True

    def _patience_s(self) -> float:
        return LAST_S + (self._drain_s if self._is_ready else 0.0)

    def _forced_status(self) -> int:
        """Return 0 where nothing is lost: all was answered, or nothing was taken yet."""
        return self._status if self._is_over or not self._is_ready else 1

    def _signalled(self, number: int) -> None:
        assert self._stop is not None
        assert self._hurry is not None
        if self._stop.is_set():
            self._hurry.set()
            return
        if not self.is_part:  # its node process has said it
            log.info("%s: draining", signal.Signals(number).name)
        self._stop.set()
