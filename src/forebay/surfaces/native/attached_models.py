# SPDX-License-Identifier: Apache-2.0
"""Endpoints of workers that attach: each appears when the first worker of its name is ready.

A name belongs to one description at a time. Workers that describe their model alike share its endpoint; one that
describes it otherwise is refused as long as any of the others is here, and takes the name over once they have left.
An endpoint stays without workers, for they come back; but not any number of them, for any name may be said once.
A model of the project that has no workers of its own (`workers: 0`) has its endpoint from the start, with the queue and
the limits that the project says; the door only finds its pool.
Workers that speak the batching protocol cannot say what they serve: they share the endpoint `batching`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import msgspec

from forebay.cluster.keeper import DirectoryKeeper
from forebay.cluster.peer_servers import PeerServers
from forebay.errors import ConfigError, ForebayError, InvalidRequest
from forebay.owners.callers import Callers
from forebay.owners.owner_link import FLAG
from forebay.owners.shard import LinkOptions
from forebay.server.served import Served
from forebay.server.wire_schema import WireSchema
from forebay.serving.models.further_methods import CALL
from forebay.serving.tensor_face import TENSORS, check_outcome
from forebay.surfaces.native.describe import Description, check, require_no_batch_key, served_by
from forebay.transports.acceptor import Acceptor
from forebay.types.call import ROWS, Failure, Media
from forebay.types.first_use import known
from forebay.workers.pool import Pool, PoolStatistics, StartUp
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.job_slot import JobSlot
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.wire import frames
from forebay.workers.wire.address import parse_address
from forebay.workers.wire.loop_heartbeat import SILENCE
from forebay.workers.wire.pulse_link import PulseLink
from forebay.workers.wire.tls_files import client_tls, server_tls
from forebay.workers.wire.worker_listener import EncryptedPort, VisitorLimits, WorkerListener
from forebay.workers.wire.worker_pulse import ROLE as PULSE

if TYPE_CHECKING:
    from forebay.owners.caller_link import CallerLink
    from forebay.protocols.native import Contract
    from forebay.server.app import App
    from forebay.server.config import AttachConfig, Overrides
    from forebay.serving.endpoint import Endpoint
    from forebay.types.batch import EntryBatch
    from forebay.types.worker_range import WorkerRange

log = logging.getLogger("forebay.workers")

MAX_DESERTED: Final = 64
"""Names that are kept for workers to come back to; with one more, those leave whose workers left first."""

_BYTES = WireSchema(raw=True, schema={"type": "string", "format": "binary"}, parts={})
JOBS = Description(
    name="batching",
    version="1",
    description="Jobs for workers that speak the batching protocol: the body is theirs, whatever it is.",
    max_batch_size=32,
    max_wait_ms=None,
    policy=None,
    latency_objective_ms=None,
    timeout_ms=30_000,
    max_queue=4096,
    batchable=False,
    split=False,
    isolate_errors=False,
    streams=False,
    is_async=False,
    input=_BYTES,
    output=_BYTES,
)
"""What workers of the batching protocol serve."""


DECIDED_BY_PROJECT: Final = frozenset(
    {
        *("description", "devices", "has_batch_key", "is_async", "isolate_errors", "latency_objective_ms"),
        *("max_batch_size", "max_queue", "max_wait_ms", "policy", "split", "timeout_ms", "deadline_ms"),
        *("stream_idle_ms", "single_flight", "has_health"),
    }
)
"""What a worker of a model of the project may say as it likes: what the project says holds."""


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says about itself.

    Attributes:
        worker: Its name: equal in all of its connections, and nobody else's.
        model: A `Description`, not yet checked.
    """

    worker: Annotated[str, msgspec.Meta(min_length=16, max_length=128)]
    model: Any


class Guest(msgspec.Struct, frozen=True):
    """A name that belongs to workers that attach."""

    description: Description
    pool: AttachedPool[Any]


class ProjectPool(AttachedPool[WorkerSlot]):
    """Workers that dial in for a model of the project."""

    def __init__(
        self, described: Description, *, isolates: bool, seats: int, threads: int = 1, bounds: WorkerRange | None = None
    ) -> None:
        """Describe the pool; a `Lobby` tells it what holds for workers.

        Args:
            described: What a worker must say of the model.
            seats: Streams that may be open in each slot.
            threads: Slots of each worker, where their number follows the load.
            bounds: Within which that number is; None where nobody asks how many there should be.
        """
        super().__init__(described.name, isolates=isolates, seats=seats)
        self.bounds = bounds
        self._threads = threads
        self._wanted = 0 if bounds is None else bounds.at_first
        self._start_s = 0.0
        self._begun_at = time.monotonic()
        self.described = check(msgspec.to_builtins(described))  # as it arrives from a worker
        self._isolate_errors = isolates

    @property
    def slots_each(self) -> int:
        """Batches, or rows of streams, that one worker runs at a time."""
        return self._threads * (self.seats or 1)

    def resize(self, workers: int) -> None:
        """Ask for so many workers, of the program that starts them."""
        if workers > self._wanted:
            self._begun_at = time.monotonic()
        self._wanted = workers

    def start_up(self, now: float) -> StartUp:
        """Return how far the starts of workers are, as it looks from here."""
        alive = self.alive
        return StartUp(min(alive, self._wanted), max(self._wanted - alive, 0), now - self._begun_at, self._start_s)

    def ready(self, slot: WorkerSlot, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work; if its worker is new, the time that it took to come is learned."""
        before_alive = self.alive
        super().ready(slot, before)
        if self.bounds is not None and before_alive < self.alive <= self._wanted:
            took_s = time.monotonic() - self._begun_at
            self._start_s = max(took_s, (self._start_s + took_s) / 2)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        told = super().statistics()
        if self.bounds is None:
            return told
        # Whether the model loads is known once a worker has come, or by those who were here before this server.
        may_sleep = self.bounds.min == 0 and (self.joined > 0 or self.bounds.initial == 0)
        return msgspec.structs.replace(told, wanted=self._wanted, may_sleep=may_sleep)

    def options(self) -> Mapping[str, Any]:
        """Return also what the project decides of what a worker does."""
        return {**super().options(), "isolate_errors": self._isolate_errors}


def project_pool(described: Description, overrides: Overrides, *, isolates: bool, seats: int) -> ProjectPool:
    """Return the pool of a model of the project whose workers dial in."""
    return ProjectPool(described, isolates=isolates, seats=seats, threads=overrides.threads, bounds=overrides.bounds)


class Lobby:
    """Lets workers in and makes endpoints of them.

    Attributes:
        peers: Servers whose members are known here as well.
    """

    def __init__(
        self,
        app: App,
        config: AttachConfig,
        endpoint_of: Callable[[Description, Pool], Endpoint],
        seats_of: Callable[[Description], int],
        source: Path | None = None,
    ) -> None:
        """Give the app a door.

        Args:
            seats_of: Says how many streams may be open in a slot of it.
            source: The configuration that was read, if there is one: that of a front lies in the folder of its node.

        Raises:
            ConfigError: If the address is none, or lets other machines in without a secret; if TLS files cannot be
                used.
        """
        self._app = app
        self._config = config
        self._endpoint_of = endpoint_of
        self._seats_of = seats_of
        self._guests: dict[str, Guest] = {}
        self._pools: weakref.WeakSet[AttachedPool[Any]] = weakref.WeakSet()
        self._opened: dict[str, Served] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        limits = VisitorLimits(
            hello_s=config.hello_s, connections=config.max_connections, frame_bytes=config.max_frame_bytes
        )
        try:
            address = parse_address(config.address or "")
        except ConfigError as error:  # not one of a file, where it is looked at with its line
            raise ConfigError(f"--attach: {error.message}") from error
        files = server_tls(config.certfile, config.keyfile, config.cafile, flag="--attach-")
        tls = None if files is None else EncryptedPort(files, Acceptor)
        door = WorkerListener(
            address, native=self._receive, jobs=self._receive_jobs, secret=config.secret, tls=tls, limits=limits
        )
        self._door = app.door = door
        self._callers = Callers(app, config.max_frame_bytes, config.max_elements)
        self._keeper = DirectoryKeeper()
        dialling = client_tls(config.owner_cafile, config.owner_certfile, config.owner_keyfile, flag=FLAG)
        self.peers = PeerServers(self._keeper, LinkOptions(self._keeper.id, config.secret, dialling), address)
        self.peers.want(config.peers)
        app.links += [self._callers, self.peers]
        if config.peers and config.members:
            from forebay.cluster.cluster_report import ClusterReport  # what it needs is loaded where there is a cluster

            app.cluster = ClusterReport(self._keeper, self.peers, source).describe

    def govern(self, endpoint: Endpoint) -> None:
        """Say to the pool of an endpoint what holds for workers that dial in, if it has them."""
        config = endpoint.config
        if isinstance(endpoint.pool, AttachedPool):
            pool = cast("AttachedPool[Any]", endpoint.pool)
            pool.labels = {"model": config.name, "version": config.version}
            may_sleep = pool.bounds is not None and pool.bounds.min == 0
            pool.grace_s = None if may_sleep else self._config.grace_s
            pool.hang_s = config.timeout_s / 2 if self._config.hang_s is None else self._config.hang_s
            if config.streams and self._config.hang_s is None:
                pool.more_s = config.stream_idle_s or config.max_timeout_s
            pool.shared = self._door.shared
            self._pools.add(pool)

    def _receive(self, about: Mapping[str, Any]) -> WorkerSlot | CallerLink | PulseLink:
        if about.get("role") == frames.CALLER:
            return self._callers.receive(about)
        if about.get("role") in (frames.MEMBER, frames.PEER):
            if not self._config.members:
                raise ConfigError("programs join elsewhere, see: forebay cluster status")
            return self._callers.receive(about, self._keeper.receive(about))
        if about.get("role") == PULSE:
            return PulseLink(functools.partial(self._silent, about.get("worker")))
        try:
            hello = msgspec.convert(about, known(WorkerDescription))
        except msgspec.ValidationError as error:
            raise ConfigError(f"its hello cannot be used: {error}") from error
        guest = self._guest(check(hello.model))
        config = self._config
        return WorkerSlot(guest.pool, config.max_frame_bytes, fitting(guest.description), config.max_elements)

    def _silent(self, worker: object) -> None:
        """The heartbeat of a worker has ceased: what it runs is handed on."""
        for pool in list(self._pools):
            pool.drop_worker(worker, SILENCE)

    def _receive_jobs(self) -> JobSlot:
        return JobSlot(self._guest(JOBS).pool, self._config.max_frame_bytes, self._config.max_elements)

    def _guest(self, description: Description) -> Guest:
        """Return whose workers share an endpoint with this one; raises ConfigError if the name is taken."""
        name = description.name
        if self._is_own(name):
            return self._expected(description)
        if why := self._app.clash(name):
            raise ConfigError(why)
        require_no_batch_key(name, description)
        guest = self._guests.get(name)
        if guest is not None and guest.description != description:
            if not guest.pool.is_deserted:
                raise ConfigError(
                    f"the name '{name}' is taken by workers that describe their model otherwise "
                    f"({guest.description.differences(description)}); give it another `name`, or stop them first"
                )
            guest = None
        if guest is None:
            self._forget_who_never_came()
            self._forget_who_left_first()
            guest = self._guests[name] = self._invite(description)
        return guest

    def _expected(self, described: Description) -> Guest:
        """Return the pool of a model of the project that waits for such workers.

        Raises:
            ConfigError: If it has workers of its own, or the worker describes it otherwise.
        """
        name = described.name
        versions = self._app.versions_of(name)
        pools = {} if versions is None else {one: served.endpoint.pool for one, served in versions.ready.items()}
        expected = {version: pool for version, pool in pools.items() if isinstance(pool, ProjectPool)}
        if not expected:
            raise ConfigError(
                f"the name '{name}' is taken by a model of the server's own; give the worker's another `name`, or have "
                "the server's start no workers (workers: 0)"
            )
        pool = expected.get(described.version)
        if pool is None:
            there = ", ".join(map(repr, expected))
            raise ConfigError(
                f"the project has workers dial in for version {there} of '{name}', not {described.version!r}"
            )
        if differences := pool.described.differences(described, DECIDED_BY_PROJECT):
            msg = f"the project describes '{name}' otherwise ({differences}); start the worker with the project's file"
            raise ConfigError(msg)
        return Guest(pool.described, pool)

    def _is_own(self, name: str) -> bool:
        """Tell whether a model of the server's own answers by this name, or is about to."""
        served = self._app.served.get(name)
        return self._app.is_loading(name) if served is None else served is not self._opened.get(name)

    def _invite(self, description: Description) -> Guest:
        pool: AttachedPool[Any] = AttachedPool(
            description.name,
            on_first=lambda: self._run(self._open(served)),
            isolates=description.isolate_errors,
            seats=self._seats_of(description),
        )
        served = served_by(description, self._endpoint_of(description, pool))
        self.govern(served.endpoint)
        return Guest(description, pool)

    def _forget_who_never_came(self) -> None:
        """Names whose workers left before they were ready belong to nobody."""
        self._guests = {
            name: guest for name, guest in self._guests.items() if guest.pool.joined or not guest.pool.is_deserted
        }

    def _forget_who_left_first(self) -> None:
        """Serve the names no longer that were deserted first, if there are many of them."""
        deserted = [name for name, guest in self._guests.items() if guest.pool.is_deserted and name in self._opened]
        deserted.sort(key=lambda name: self._guests[name].pool.left_at)
        for name in deserted[:-MAX_DESERTED]:
            del self._guests[name]
            self._run(self._close(self._opened[name]))

    async def _close(self, served: Served) -> None:
        config = served.endpoint.config
        with contextlib.suppress(ForebayError):  # it has left, or the server ends
            await self._app.unload(config.name, config.version, served)
            log.info("stopped serving model '%s': its workers left, and so did those of other models", config.name)
        if self._opened.get(config.name) is served:
            del self._opened[config.name]

    async def _open(self, served: Served) -> None:
        if self._app.is_draining:
            return
        await served.endpoint.start()
        name = served.endpoint.name
        if self._is_own(name) or self._app.clash(name):  # it was loaded while the first worker got ready
            self._guests.pop(name, None)
            await served.endpoint.drain(0.0)  # its workers dial again, and are told
            return
        replaced = self._app.put(served)
        self._opened[name] = served
        log.info("serving model '%s' with attached workers", name)
        if replaced is not None:
            await replaced.endpoint.drain(0.0)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def fitting(description: Description) -> Callable[[EntryBatch, Sequence[Any]], None]:
    """Return what checks that a worker's outcomes can be answers of an endpoint; it raises `InvalidRequest`."""
    face, methods = description.faces()
    predict = _fitting(face.contract)
    if not methods:
        return predict
    others = {one.contract.call: _fitting(one.contract) for one in methods}

    def check_outcomes(batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        others.get(batch.entries[0].params.get(CALL), predict)(batch, outcomes)

    return check_outcomes


def _fitting(contract: Contract) -> Callable[[EntryBatch, Sequence[Any]], None]:
    whole = {bytes, Media}

    def check_outcomes(batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        odd: set[type] = set()
        for entry, outcome in zip(batch.entries, outcomes, strict=True):
            kind = type(cast("object", outcome))
            if kind is Failure or (outcome is None and contract.streams):
                continue
            if entry.params.get("in") == TENSORS:
                check_outcome(outcome)
            elif not contract.batchable and ROWS not in entry.params:
                odd |= {kind} - whole
            elif kind is not list:
                odd.add(kind)
            else:
                rows = cast("list[Any]", outcome)
                odd |= set(map(type, rows)) - {bytes}
                if len(rows) != entry.size:
                    raise InvalidRequest("it answered another number of samples than it was asked")
        if odd:
            msg = f"it answered {', '.join(sorted(kind.__name__ for kind in odd))} where encoded results belong"
            raise InvalidRequest(msg)

    return check_outcomes
