# SPDX-License-Identifier: Apache-2.0
"""Sends one request again and again, in a closed loop or an open one, and notes how long each answer took.

In a closed loop each client waits for its answer before it asks again: a slow server is asked less. In an open loop
requests come when they are due, whatever became of those before, and their time counts from then on: what a server
makes its clients wait for is not left out.
"""

from __future__ import annotations

import asyncio
import math
import signal
import ssl
import time
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, cast

import httptools
import msgspec

from forebay.cli.request_head import url_of
from forebay.errors import ConfigError

MAX_CONNECTIONS: Final = 2000
"""Of an open loop; a request that is due while all of them wait for an answer is not sent."""
_TURN_S: Final = 0.001
_SWEEP_S: Final = 0.05
_SAYS_ITS_END: Final = frozenset({b"content-length", b"transfer-encoding"})


class Target(msgspec.Struct, frozen=True):
    """What is asked.

    Attributes:
        host: Whom.
        tls: Whether it speaks TLS.
        message: The request, as it is sent.
    """

    host: str
    port: int
    tls: bool
    message: bytes


class Measurement(msgspec.Struct):
    """What was measured.

    Attributes:
        seconds: How long; less than was asked for if it was ended with Ctrl+C.
        took: Seconds each good answer took, in the order of the answers.
        ended: When it came, in seconds from the begin.
        statuses: Answers by their status.
        lost: Requests whose connection ended, or that took too long, by the reason.
        unsent: Requests that were due while all connections were taken.
        busy: Part of the time in which this program itself was working.
    """

    seconds: float = 0.0
    took: array[float] = msgspec.field(default_factory=lambda: array("d"))
    ended: array[float] = msgspec.field(default_factory=lambda: array("d"))
    statuses: Counter[int] = msgspec.field(default_factory=Counter[int])
    lost: Counter[str] = msgspec.field(default_factory=Counter[str])
    unsent: int = 0
    busy: float = 0.0

    @property
    def failed(self) -> int:
        """Requests without a good answer."""
        return sum(count for status, count in self.statuses.items() if status >= 400) + sum(self.lost.values())

    @property
    def per_second(self) -> float:
        """Good answers a second."""
        return len(self.took) / self.seconds if self.seconds else 0.0


def target_of(url: str, body: bytes | None, headers: Mapping[str, str]) -> Target:
    """Write the request; raises a `ConfigError` if the URL is none."""
    parts = url_of(url)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {parts.netloc}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"content-length: {len(body)}")
    message = "\r\n".join([*lines, "", ""]).encode("latin-1") + (body or b"")
    tls = parts.scheme == "https"
    return Target(parts.hostname or "", parts.port or (443 if tls else 80), tls, message)


async def ask_once(target: Target, timeout_s: float) -> tuple[int, bytes]:
    """Send the request once; returns status and body. Raises a `ConfigError` if nobody answers."""
    answered: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def done(connection: LoadConnection, status: int, lost: str) -> None:
        if not answered.done():
            answered.set_result((status, b"".join(connection.body) if status else lost.encode()))

    connection: LoadConnection | None = None
    try:
        connection = await _connect(target, done)
        connection.keeps_body = True
        connection.ask(time.perf_counter())
        status, body = await asyncio.wait_for(answered, timeout_s)
    except TimeoutError as error:
        raise ConfigError(f"no answer came within {timeout_s:g} seconds") from error
    except OSError as error:
        raise ConfigError(f"{target.host}:{target.port} does not answer: {error.strerror or error}") from error
    finally:
        if connection is not None:
            connection.close()
    if not status:
        raise ConfigError(f"{target.host}:{target.port} answers, but not as HTTP does: {body.decode()}")
    return status, body


async def closed_loop(target: Target, clients: int, seconds: float, warmup_s: float, timeout_s: float) -> Measurement:
    """Let some clients ask, each as soon as it has its answer."""
    run = _Run(target, seconds, warmup_s, timeout_s)

    def again(connection: LoadConnection) -> None:
        connection.ask(time.perf_counter())

    run.on_idle = again
    try:
        for _ in range(clients):
            again(await run.connect())
        return await run.result()
    finally:
        await run.close()


async def open_loop(target: Target, rate: float, seconds: float, warmup_s: float, timeout_s: float) -> Measurement:
    """Ask so many times a second, at equal intervals, however long the answers take."""
    run = _Run(target, seconds, warmup_s, timeout_s, grace_s=timeout_s)
    idle: list[LoadConnection] = []
    connecting = 0
    waiting: list[float] = []

    def free(connection: LoadConnection) -> None:
        if waiting:
            connection.ask(waiting.pop(0))
        else:
            idle.append(connection)

    async def widen() -> None:
        nonlocal connecting
        try:
            free(await run.connect())
        except OSError as error:
            run.lose(str(error.strerror or error))
            if waiting:
                waiting.pop(0)
        finally:
            connecting -= 1

    run.on_idle = free
    began, sent = time.perf_counter(), 0
    while not run.is_over:
        due_by_now = int((time.perf_counter() - began) * rate) + 1  # the first one is due at once
        for number in range(sent, due_by_now):
            due = began + number / rate
            while idle and not idle[-1].is_open:
                idle.pop()
            if idle:
                idle.pop().ask(due)
            elif len(run.connections) + connecting < MAX_CONNECTIONS:
                waiting.append(due)
                connecting += 1
                run.begin(widen())
            else:
                run.unsent(due)
        sent = max(sent, due_by_now)
        run.sweep()
        await asyncio.sleep(_TURN_S)
    for due in waiting:
        run.unsent(due)
    waiting.clear()
    try:
        return await run.result()
    finally:
        await run.close()


class _Run:
    """One measurement, and its connections."""

    def __init__(
        self, target: Target, seconds: float, warmup_s: float, timeout_s: float, *, grace_s: float = 0.0
    ) -> None:
        self._target = target
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._begin = time.perf_counter() + warmup_s
        self._end = self._begin + seconds
        self._cpu: float | None = None
        self._swept = 0.0
        self._result = Measurement(seconds)
        self._connecting: set[asyncio.Task[None]] = set()
        self.connections: set[LoadConnection] = set()
        self.on_idle: Callable[[LoadConnection], None] = lambda _: None
        loop = asyncio.get_running_loop()
        loop.call_later(warmup_s, self._began)
        loop.add_signal_handler(signal.SIGINT, self._end_now)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is asked."""
        return time.perf_counter() >= self._end

    async def connect(self) -> LoadConnection:
        """Open a connection."""
        connection = await _connect(self._target, self._answered)
        self.connections.add(connection)
        return connection

    def unsent(self, due: float) -> None:
        """Count a request that nobody could send."""
        self._result.unsent += due >= self._begin

    def lose(self, why: str) -> None:
        """Count a request that had no answer."""
        if self._begin <= time.perf_counter() < self._end:
            self._result.lost[why] += 1

    async def result(self) -> Measurement:
        """Wait for the end; in an open loop also for the answers to all that was asked before it."""
        while not self.is_over:
            self.sweep()
            await asyncio.sleep(min(_SWEEP_S, max(self._end - time.perf_counter(), 0.0)))
        self._result.busy = (time.process_time() - (self._cpu or 0.0)) / (self._result.seconds or math.inf)
        while time.perf_counter() < self._end + self._grace_s and any(one.due for one in self.connections):
            self.sweep()
            await asyncio.sleep(_TURN_S)
        self._swept = 0.0  # what was sent after the last sweep before the end is lost as well
        self.sweep()
        return self._result

    def begin(self, connecting: Coroutine[Any, Any, None]) -> None:
        """Open a connection beside what else is done."""
        task = asyncio.ensure_future(connecting)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def close(self) -> None:
        """Hang up everywhere, also where a connection is just being opened."""
        self._let_interrupt()
        if connecting := list(self._connecting):
            for task in connecting:
                task.cancel()
            await asyncio.wait(connecting)
        for connection in self.connections:
            connection.close()

    def sweep(self) -> None:
        """Give up what has taken too long."""
        now = time.perf_counter()
        if now < self._swept + _SWEEP_S:
            return
        self._swept = now
        for connection in list(self.connections):
            if connection.due and now - connection.due > self._timeout_s:
                self._result.lost[f"no answer within {self._timeout_s:g} s"] += connection.due >= self._begin
                self.connections.discard(connection)
                connection.close()
                self._replace()

    def _end_now(self) -> None:
        """End the measurement with what there is; the next Ctrl+C ends the program."""
        self._end = min(self._end, time.perf_counter())
        self._result.seconds = max(self._end - self._begin, 0.0)
        self._let_interrupt()

    def _let_interrupt(self) -> None:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _began(self) -> None:
        self._cpu = time.process_time()

    def _answered(self, connection: LoadConnection, status: int, lost: str) -> None:
        now = time.perf_counter()
        if self._begin <= connection.due < self._end and now < self._end + self._grace_s:
            if lost:
                self._result.lost[lost] += 1
            else:
                self._result.statuses[status] += 1
                if status < 400:
                    self._result.took.append(now - connection.due)
                    self._result.ended.append(min(now, self._end) - self._begin)
        connection.due = 0.0
        if now >= self._end:
            return
        if connection.is_open:
            self.on_idle(connection)
        else:
            self.connections.discard(connection)
            self._replace()

    def _replace(self) -> None:
        async def replace() -> None:
            try:
                self.on_idle(await self.connect())
            except OSError as error:
                self.lose(str(error.strerror or error))
                await asyncio.sleep(0.1)
                self._replace()

        if not self.is_over:
            self.begin(replace())


class LoadConnection(asyncio.Protocol):
    """One connection of a client: a request at a time."""

    def __init__(self, message: bytes, done: Callable[[LoadConnection, int, str], None]) -> None:
        self._message = message
        self._done = done
        self._transport: asyncio.Transport | None = None
        self._parser: Any = None
        self._has_length = self._ends_by_close = False
        self.due = 0.0
        self.body: list[bytes] = []
        self.keeps_body = False
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note that the connection is open."""
        self._transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)
        self.is_open = True

    def ask(self, due: float) -> None:
        """Send the request, which was due at this moment."""
        self.due = due
        self.body.clear()
        if self._transport is not None:
            self._transport.write(self._message)

    def data_received(self, data: bytes) -> None:
        """Read what came."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._end("the answer is not HTTP")

    def on_header(self, name: bytes, _value: bytes) -> None:
        """Learn whether the answer says where it ends; the parser calls this."""
        if name.lower() in _SAYS_ITS_END:
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Note that there is an answer; the parser calls this."""
        self._ends_by_close, self._has_length = not self._has_length, False

    def on_body(self, body: bytes) -> None:
        """Take a piece of the answer; the parser calls this."""
        if self.keeps_body:
            self.body.append(body)

    def on_message_complete(self) -> None:
        """Take the end of the answer."""
        self._ends_by_close = False
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.is_open = False
            self.close()
        self._done(self, status, "")

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is closed, which may be how the answer ends."""
        if self.is_open and self._ends_by_close and exc is None:
            self.on_message_complete()
        self._end("the connection was closed without an answer")

    def close(self) -> None:
        """Hang up; nobody is told."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self, why: str) -> None:
        if self.is_open:
            self.close()
            self._done(self, 0, why)


async def _connect(target: Target, done: Callable[[LoadConnection, int, str], None]) -> LoadConnection:
    loop = asyncio.get_running_loop()
    context = ssl.create_default_context() if target.tls else None
    _, connection = await loop.create_connection(
        lambda: LoadConnection(target.message, done), target.host, target.port, ssl=context
    )
    return connection
