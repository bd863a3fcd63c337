# SPDX-License-Identifier: Apache-2.0
"""What fronts count of the requests of clients, told to their owner, which shows the sum.

Theory of operation. Each front listens at a Unix socket in the folder of its node process, and writes its counters to
whoever connects. The owner asks all of them once a second, and before it shows metrics. A front that was started again
counts from nothing, so what it last told before that is kept: sums do not fall. What it counted after that is lost
with it. Queues, batches and workers are counted by the owner alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import msgspec

from forebay.observe.metrics.endpoint_metrics import EndpointMetrics, FailureReason
from forebay.observe.metrics.gen_ai_families import BOUNDS, Kind, histogram_of
from forebay.observe.metrics.histograms import SECONDS
from forebay.server.links import Links
from forebay.types.first_use import known
from forebay.workers.wire.address import UnixAddress, bind_unix
from forebay.workers.wire.kept_socket import keep_socket

if TYPE_CHECKING:
    import socket

    from forebay.server.app import App
    from forebay.serving.endpoint import Endpoint

log = logging.getLogger("forebay.owners")

LOOK_S: Final = 1.0
"""How often the owner asks."""
ANSWER_S: Final = 0.5
"""Time in which a front must have told its counters."""
MAX_BYTES: Final = 64 << 20
"""Longest text that is read of a front."""
MAX_CODES: Final = 64
"""Most outcomes of requests that have a name."""

_BUCKETS: Final = len(SECONDS) + 1

Buckets = Annotated[list[int], msgspec.Meta(min_length=_BUCKETS, max_length=_BUCKETS)]
Codes = Annotated[dict[str, int], msgspec.Meta(max_length=MAX_CODES)]
Reasons = Annotated[dict[str, FailureReason], msgspec.Meta(max_length=MAX_CODES)]
Times = Annotated[dict[Kind, tuple[list[int], float]], msgspec.Meta(max_length=MAX_CODES)]


class ClientCounts(msgspec.Struct):
    """What a front has counted of the requests to a version of a model.

    Attributes:
        codes: See `EndpointMetrics`.
        reasons: See `EndpointMetrics`.
        buckets: How many requests took how long, in the buckets of `SECONDS`.
        total_s: How long all took together.
        failed_s: See `EndpointMetrics`.
        gen_ai: The buckets of each histogram, and the sum of its values; see `EndpointMetrics`.
    """

    codes: Codes = msgspec.field(default_factory=dict[str, int])
    reasons: Reasons = msgspec.field(default_factory=dict[str, FailureReason])
    buckets: Buckets = msgspec.field(default_factory=lambda: [0] * _BUCKETS)
    total_s: float = 0.0
    failed_s: float = 0.0
    gen_ai: Times = msgspec.field(default_factory=dict[Kind, tuple[list[int], float]])

    def __post_init__(self) -> None:
        """Check the histograms; raises a ValueError if one has other buckets."""
        for (family, _, _), (buckets, _) in self.gen_ai.items():
            if family not in BOUNDS or len(buckets) != len(BOUNDS[family]) + 1:
                raise ValueError(f"{family:.100} has {len(buckets)} buckets")

    def add_to(self, metrics: EndpointMetrics) -> None:
        """Count all of this there as well."""
        for code, count in self.codes.items():
            metrics.codes[code] = metrics.codes.get(code, 0) + count
        for code, reason in self.reasons.items():
            before = metrics.reasons.get(code)
            if before is None or before.at < reason.at:
                metrics.reasons[code] = reason
        metrics.request_s.add(self.buckets, self.total_s)
        metrics.failed_s += self.failed_s
        for kind, (buckets, total_s) in self.gen_ai.items():
            histogram_of(metrics.gen_ai, kind).add(buckets, total_s)


class FrontCounts(msgspec.Struct, frozen=True):
    """All that a front has counted.

    Attributes:
        pid: Its process; another one counts from nothing.
        models: What it counted, by name and version.
    """

    pid: int
    models: list[tuple[str, str, ClientCounts]]


class CountsTeller(Links):
    """A front's side: tells its counters to each connection."""

    def __init__(self, app: App, path: str) -> None:
        """Tell what the endpoints of an app have counted, at this socket."""
        self._app = app
        self._path = path
        self._server: asyncio.Server | None = None
        self._keeping: asyncio.Task[NoReturn] | None = None

    async def start(self) -> None:
        """Listen; raises a `ConfigError` if the socket cannot be made."""
        await self._listen(bind_unix(UnixAddress(self._path)))
        self._keeping = asyncio.get_running_loop().create_task(keep_socket(self._path, self._listen))

    async def _listen(self, made: socket.socket) -> None:
        before, self._server = self._server, await asyncio.start_unix_server(self._tell, sock=made)
        if before is not None:
            before.close()

    def stop(self) -> None:
        """Listen no more."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._server is not None:
            self._server.close()

    async def _tell(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(msgspec.msgpack.encode(FrontCounts(os.getpid(), [*self._counted()])))
            writer.close()
            await writer.wait_closed()

    def _counted(self) -> Iterable[tuple[str, str, ClientCounts]]:
        for served in self._app.every:
            config, counts = served.endpoint.config, _counts_of(served.endpoint.metrics)
            counts.reasons = dict(list(counts.reasons.items())[-MAX_CODES:])
            counts.codes = dict(list(counts.codes.items())[-MAX_CODES:])
            yield config.name, config.version, counts


class CountsOfFronts(Links):
    """The owner's side: what all fronts have counted, with what it counts itself."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Ask the fronts at these sockets."""
        self._paths = paths
        self._last: dict[str, FrontCounts] = {}
        self._before: dict[tuple[str, str], EndpointMetrics] = {}
        self._sums: dict[tuple[str, str], EndpointMetrics] = {}
        self._asking: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to ask once a second."""
        self._looking = asyncio.get_running_loop().create_task(self._look())

    def stop(self) -> None:
        """Ask no more."""
        if self._looking is not None:
            self._looking.cancel()

    async def refresh(self) -> None:
        """Ask all fronts now; one that does not answer counts as it last told."""
        before = self._asking
        if before is not None and not before.done():
            await asyncio.wait((before,))  # a front may have told before it counted what is to be shown now
        if self._asking is before or self._asking is None:
            self._asking = asyncio.get_running_loop().create_task(self._ask_all())
        await asyncio.shield(self._asking)

    def of(self, endpoint: Endpoint) -> EndpointMetrics:
        """Return the numbers of an endpoint as clients see them: each request counts once."""
        metrics = endpoint.metrics
        if metrics.own is None:
            return metrics
        found = metrics.with_clients(metrics.own)
        key = endpoint.config.name, endpoint.config.version
        for some in (self._before.get(key), self._sums.get(key)):
            if some is not None:
                _counts_of(some).add_to(found)
        return found

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.refresh()

    async def _ask_all(self) -> None:
        for path, told in zip(self._paths, await asyncio.gather(*map(_ask, self._paths)), strict=True):
            if told is None:
                continue
            before = self._last.get(path)
            if before is not None and before.pid != told.pid:
                _add(self._before, before)
            self._last[path] = told
        self._sums = {}
        for one in self._last.values():
            _add(self._sums, one)


def _add(sums: dict[tuple[str, str], EndpointMetrics], told: FrontCounts) -> None:
    for name, version, counts in told.models:
        counts.add_to(sums.setdefault((name, version), EndpointMetrics()))


def _counts_of(metrics: EndpointMetrics) -> ClientCounts:
    times = metrics.request_s
    gen_ai = {kind: (one.counts, one.total) for kind, one in metrics.gen_ai.items()}
    return ClientCounts(metrics.codes, metrics.reasons, times.counts, times.total, metrics.failed_s, gen_ai)


async def _ask(path: str) -> FrontCounts | None:
    """Return what a front has counted; None if it does not say."""
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                told = await reader.read(MAX_BYTES)
                while some := await reader.read(MAX_BYTES - len(told)):
                    told += some
            finally:
                writer.close()
        return msgspec.msgpack.decode(told, type=known(FrontCounts))
    except (OSError, TimeoutError):
        return None  # it is being started
    except msgspec.DecodeError as error:
        log.warning("cannot read the counts of a front: %s", error)
        return None
