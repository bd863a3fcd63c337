# SPDX-License-Identifier: Apache-2.0
"""An endpoint: the front waist. Requests are submitted here and answered from here, exactly once each.

Theory of operation. `submit` registers the request in `_open` before it can complete (G1), queues it, and returns;
`reply` is called on the loop once its outcome is known. Whatever comes first decides the outcome: the batch, the
deadline, or the client going away; what comes later is dropped (G3). One timer serves all deadlines: it is armed for
the earliest and looks at everything open when it fires, at most every five milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import operator
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.batching.batcher import Batcher
from forebay.batching.bill import divide
from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import (
    Cancelled,
    CapacityError,
    DeadlineExceeded,
    ForebayError,
    InternalError,
    LimitReached,
    QueueFull,
    ShareUsed,
    TooLate,
    Unavailable,
    UserCodeError,
)
from forebay.observe.logs import model_log
from forebay.observe.logs.request_ids import id_of
from forebay.observe.metrics import author_metrics
from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.tenant_accounts import MAX_TOKENS, Accounts
from forebay.observe.traces.timeline import Timeline
from forebay.serving.single_flight import Flights
from forebay.serving.slices import Slices
from forebay.serving.stream_delivery import Windows
from forebay.serving.worker_scaling import WorkerScaling
from forebay.types.author_view import own_frames
from forebay.types.call import ALONE, EMPTY, Failure, Outcome, ReplyToAll, Request, Slice
from forebay.types.failures import without_frames
from forebay.types.server_state import here
from forebay.types.settings import Sharing
from forebay.types.tenant import Tenant, Tenants
from forebay.workers.processes.cores import allowed_cores

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from forebay.batching.auto import AutoState
    from forebay.batching.deadlines import Deadlines
    from forebay.types.batch import EntryBatch
    from forebay.workers.memory.landing import Places
    from forebay.workers.pool import Pool

log = logging.getLogger("forebay.requests")

_NEVER = float("inf")

SWEEP_S = 0.005
"""Shortest time between two looks at the deadlines."""

EARLY_S = 0.001
"""A deadline that is as near as this is over: a timer may be early."""

LAST_WORK_S = 60.0
"""What follows the last answer has so long, where nobody names a time."""


class EndpointConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to an endpoint beside its batching.

    Attributes:
        name: What it is reachable under.
        version: Version of what it serves, for metrics and answers.
        timeout_s: Time a request has if it names none itself.
        max_timeout_s: Longest time a request may ask for, and that a streamed answer takes.
        deadline_ms: Deadline of a request that names no time itself, in milliseconds; None if it has none.
        split: Whether a request with more samples than a batch takes is cut in slices; otherwise it is refused.
        streams: Whether answers come in parts.
        is_mixed: Whether others come whole all the same.
        stream_idle_s: Longest pause between two parts of an answer, 0 if there is no limit; a request that states no
            time then has `timeout_s` until the first part. None: `timeout_s` is the time of a whole streamed answer.
        single_flight: Which equal requests run once, if they are open at the same time: none, those of one tenant, all.
    """

    name: str
    version: str = "1"
    timeout_s: float = 30.0
    max_timeout_s: float = 3600.0
    deadline_ms: float | None = None
    split: bool = True
    streams: bool = False
    is_mixed: bool = False
    stream_idle_s: float | None = None
    single_flight: Sharing = "off"

    def usual_s(self, *, streams: bool) -> float:
        """Return the time of a request that states none, until its whole answer is there."""
        return self.max_timeout_s if streams and self.stream_idle_s is not None else self.timeout_s


class Endpoint:
    """Answers requests with one pool behind one queue.

    Attributes:
        answering: The batch whose requests are being replied to right now, if it was made here.
    """

    def __init__(
        self,
        config: EndpointConfig,
        batching: BatchConfig,
        pool: Pool,
        keys_of: Callable[[Request], Sequence[Hashable]] | None = None,
    ) -> None:
        """Put a pool behind a queue.

        Args:
            keys_of: Gives the batch key of each sample of a request before it is queued, on the loop; raises a
                `ForebayError` to refuse the request. None where requests come with their keys.
        """
        self.config = config
        self.batching = batching
        self.pool = pool
        self.places: Places | None = pool.places
        """Where bodies land that all its workers can read there; None where they cannot."""
        self.metrics = EndpointMetrics()
        self.accepting = False
        self.answering: EntryBatch | None = None
        self._open: dict[Request, None] = {}
        self._queue = BatchQueue(batching)
        self._why_closed = "is still being loaded; try again later"
        self._timeout_s = config.timeout_s
        self._max_timeout_s = config.max_timeout_s
        self._deadline_s = _NEVER if config.deadline_ms is None else config.deadline_ms / 1000
        self._max_size = batching.max_rows
        self._capacity = batching.capacity
        self._lasts_longer = config.streams and config.stream_idle_s is not None
        """Whether a streamed answer has more time once it has begun."""
        self._runs_one_by_one = batching.bundle_s > 0
        self._is_in_order = not batching.ranked
        """Whether the requests of a batch are in the order of their arrival."""
        self._offer = self._queue.offer
        self._keys_of = keys_of
        self._loop: asyncio.AbstractEventLoop | None = None
        self._batcher: Batcher | None = None
        self._scaling: WorkerScaling | None = None
        self._sleeper: WorkerScaling | None = None
        """The same, where all workers may be gone."""
        self._timeline = here(Timeline)
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_due = float("inf")
        may_exceed = config.split and (config.is_mixed or not config.streams)
        self._slices = Slices(config.name, batching, self._queue, self._settle, may_exceed=may_exceed)
        self._fed = self._slices.fed
        self._flights: Flights | None = None
        if config.single_flight != "off" and not pool.is_elsewhere:  # its owner has the requests of all fronts
            self._flights = self._slices.flights = Flights(
                config.single_flight, self._queue, self._capacity, self._settle, self.metrics
            )
            self._offer = self._flights.offer
        self._windows: Windows | None = None
        self._accounts: Accounts | None = None
        self._tenants: Tenants | None = None
        """Those of the server, where they are told apart."""
        self._called = config.name, config.version
        self._drained: asyncio.Event | None = None

    @property
    def name(self) -> str:
        """What it is reachable under."""
        return self.config.name

    @property
    def in_flight(self) -> int:
        """Requests without an outcome yet."""
        return len(self._open)

    @property
    def waiting(self) -> int:
        """Samples in the queue, or beside a worker that has no seat for them yet."""
        return self._queue.waiting + self.pool.standing

    @property
    def waiting_requests(self) -> int:
        """Requests that no worker has begun: all of it is in the queue, or beside a worker without a seat for it."""
        is_whole = self._slices.is_whole
        queued = sum(not one.taken and is_whole(one) for one in self._open) if self._queue.waiting else 0
        return min(queued + self.pool.standing, len(self._open))

    @property
    def tenants_waiting(self) -> Mapping[str, int]:
        """Samples of each tenant in the queue, by its name; none where nobody tells them apart."""
        fair = self._queue.fair
        return {} if fair is None or self._accounts is None else fair.waiting()

    @property
    def slots(self) -> int:
        """Batches it can run at a time."""
        return self.pool.statistics().slots

    @property
    def auto(self) -> AutoState | None:
        """What was learned and chosen for the latency objective; None without one."""
        auto = self._queue.auto
        return None if auto is None else auto.state()

    async def start(self) -> None:
        """Bring up the workers and begin to accept; raises a `ModelError` if the model could not be loaded."""
        self._loop = asyncio.get_running_loop()
        steps = None
        if self.config.streams:
            steps = self._steps
            idle_s = 0.0 if self.pool.is_elsewhere else self.config.stream_idle_s or 0.0
            self._windows = Windows(self._loop, self._others_wait, self._cut_off, idle_s or _NEVER)
        self._timeline = here(Timeline)
        tenants = here(Tenants)
        accounts = here(Accounts)
        if tenants.are_told_apart:
            self._tenants = tenants
            self._share(tenants)
        if tenants.are_told_apart or accounts.is_asked or accounts.due is not None:
            self._accounts = self.pool.accounts = accounts
            accounts.are_kept = True
        self._batcher = Batcher(
            self._queue, self.pool, self._answer, self._loop, steps, self.config.name, len(allowed_cores())
        )
        self._slices.batcher = self._batcher
        if self._flights is not None:
            self._flights.batcher, self._flights.later = self._batcher, self._loop.call_later
        name, version = self.config.name, self.config.version
        with model_log.named(name), author_metrics.workers_of(model=name, version=version):
            await self.pool.start()
        if self.pool.health is not None:
            self.pool.health.ask_all(self.pool.checked)
        if self.pool.bounds is not None:
            queue, size, streams = self._queue, self.batching.max_size, steps is not None
            self._scaling = WorkerScaling(name, self.pool, queue, self.metrics, max_rows=size, streams=streams)
            self._sleeper = self._scaling if self.pool.bounds.min == 0 else None
        self.accepting = True

    def _share(self, tenants: Tenants) -> None:
        """Share the queue between tenants."""
        fair = self._queue.share()
        fair.eviction.together, fair.eviction.evict = self._together, self._evict
        self._is_in_order = False
        tenants.watch(fair)

    def _set_usual_due(self, request: Request, now: float) -> float:
        """Give a request the deadline that its model or its tenant has, the shorter one; return when it ends."""
        tenant = request.tenant
        lives_s = self._deadline_s if tenant is None else min(tenant.deadline_s, self._deadline_s)
        if lives_s != _NEVER:
            request.deadline = request.due = min(request.deadline, now + lives_s)
        return request.deadline

    def _keep_deadline(self, request: Request) -> None:
        """Have the queue keep the deadline that a request states."""
        request.due = min(request.due, request.deadline)
        if self._queue.deadlines is None:
            self.keep_deadlines()

    def keep_deadlines(self) -> Deadlines | None:
        """Have the queue keep deadlines from now on, where it knows what is ahead and what that takes."""
        if self._queue.deadlines is None and not self.pool.answers_apart and not self.pool.is_elsewhere:
            if self._queue.fair is None:
                self._share(here(Tenants))
            deadlines = self._queue.keep_deadlines()
            deadlines.inside, deadlines.awaited = self.pool.inside(), self.pool.awaited
        return self._queue.deadlines

    def _together(self, entry: Any) -> Sequence[Any]:
        """Return what ends with an entry if it has to leave the queue; none if it runs in part, or inside a graph."""
        request: Request = entry.whole if type(entry) is Slice else entry
        if request.root() is not request or not self._slices.is_whole(request):
            return ()
        return self._slices.of(request)

    def _evict(self, entry: Any, why: str) -> None:
        """End a request that has to leave the queue."""
        request: Request = entry.whole if type(entry) is Slice else entry
        failure = Failure(ShareUsed(f"the request {why}"))
        if self._flights is not None and type(entry) is Slice and self._flights.evict(entry, failure):
            return
        if not request.done:
            self._settle(request, failure)

    def hasten(self) -> None:
        """Let no batch wait to be filled any longer: the last requests are on their way."""
        self._queue.hasten()
        if self._batcher is not None:
            self._batcher.wake()

    async def drain(self, grace_s: float | None) -> None:
        """Refuse new requests, wait up to `grace_s` for the open ones, then stop the workers and fail what is left.

        None waits until they have ended, as each does at its deadline.
        """
        if self._batcher is not None:
            self._batcher.admit()
        self.accepting = False
        self._why_closed = "accepts no more requests: it is being stopped or replaced"
        self.hasten()
        started = time.monotonic()
        if self._open:
            self._drained = asyncio.Event()
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s)
            except TimeoutError:
                log.warning("the drain time is over; requests without an answer: %d", len(self._open))
        if self._scaling is not None:
            self._scaling.close()
        left_s = LAST_WORK_S if grace_s is None else max(grace_s - (time.monotonic() - started), 0.0)
        if self.pool.health is not None:
            self.pool.health.stop()
        await self.pool.stop(left_s)
        for request in list(self._open):
            if not request.done:  # the answer to one before it may have called it off
                self._settle(request, Failure(Unavailable("the server stopped")))
        if self._batcher is not None:
            self._batcher.close()
        if self._sweep is not None:
            self._sweep.cancel()
        if self._windows is not None:
            self._windows.close()

    def is_full(self) -> bool:
        """Tell whether the queue is so full that anything submitted now is refused."""
        return self._queue.waiting >= self._capacity or self.pool.is_full

    def is_full_for(self, tenant: Tenant | None) -> bool:
        """Tell the same of what is submitted for a tenant, for which others may have to leave the queue."""
        fair = self._queue.fair
        if fair is None:
            return self.is_full()
        return fair.eviction.refuses(fair.flow_of(tenant)) or self.pool.is_full

    @property
    def spare(self) -> int:
        """Samples for which the queue has room."""
        return self._capacity - self._queue.waiting

    def submit(self, request: Request) -> None:
        """Queue a request; `request.reply` is called on the loop once its outcome is known, even if it is refused."""
        now = time.monotonic()
        batcher = self._batcher
        if not self.accepting or batcher is None:
            request.arrived = now
            self._refuse(request, Unavailable(f"'{self.config.name}' {self._why_closed}"))
            return
        deadline = request.deadline
        if deadline == _NEVER:
            deadline = request.deadline = now + self._timeout_s
            if request.tenant is not None or self._deadline_s != _NEVER:
                deadline = self._set_usual_due(request, now)
            if self._lasts_longer and request.due == _NEVER:
                request.until = now + self._max_timeout_s
        elif deadline > now + self._max_timeout_s:
            deadline = request.deadline = now + self._max_timeout_s
        if request.due != _NEVER:
            self._keep_deadline(request)
        self._open[request] = None
        if deadline < self._sweep_due:
            self._arm(deadline, now)
        try:
            if self._tenants is not None and self._tenants.are_limited:
                self._limit(request, now)
            try:
                if self._sleeper is not None and not self.pool.idle:
                    self._sleeper.admit(deadline, now)
                if self._keys_of is not None and request.key is not ALONE:
                    self._submit_by_key(request, self._keys_of(request), batcher, now)
                elif request.size > self._max_size:
                    self._slices.cut(request, {request.key: range(request.size)}, now)
                else:
                    offer = self._offer
                    offer(request, now)
                    if not batcher.is_awake and self.pool.idle:
                        batcher.wake()
            except QueueFull:
                if not request.may_wait():
                    raise
                self._slices.cut(request, {request.key: range(request.size)}, now)
        except ForebayError as error:
            del self._open[request]
            request.arrived = now
            if isinstance(error, UserCodeError):
                self._log_failure(error, [request])
            self._refuse(request, error)

    def _limit(self, request: Request, now: float) -> None:
        """Use up what a request needs of the limits of its tenant; inside a graph it has done so already.

        Raises:
            LimitReached: There is not enough left.
            TooLarge: There never is enough for so many samples.
        """
        tenant, tenants, fair, size = request.tenant, self._tenants, self._queue.fair, request.limited_size()
        if tenant is None or (allowance := tenant.allowance) is None or request.root() is not request or not size:
            return
        if not self.pool.is_elsewhere:
            waiting = 0
            if allowance.config.waiting_rows is not None and fair is not None and tenants is not None:
                waiting = fair.waiting_of(tenants.classes_of(tenant.name))
            allowance.require_workers(size, waiting, now)
        if not request.is_counted_elsewhere():
            is_stream = self._windows is not None and request.on_part is not None
            allowance.admit(request, now, is_stream=is_stream)

    def expect(self, bring: Callable[[float], None]) -> None:
        """Have what arrives in this turn of the loop submitted at its end; see `Batcher.expect`."""
        assert self._batcher is not None
        self._batcher.expect(bring)

    def submit_bundle(self, requests: Sequence[Request], now: float) -> None:
        """Queue requests that a front hands on, and that arrived now, as `submit` would."""
        if self._lasts_longer:  # what is left of a usual time is that until the first part
            for request in requests:
                request.deadline = request.due
        if len(requests) == 1:
            self.submit(requests[0])
            return
        deadlines = [request.deadline for request in requests]
        are_alike = {(request.size, request.due) for request in requests} == {(1, _NEVER)}
        is_limited = self._tenants is not None and self._tenants.are_limited
        if are_alike and not is_limited and max(deadlines) <= now + self._max_timeout_s:
            self.submit_all(requests, now, min(deadlines))
        else:
            for request in requests:
                self.submit(request)

    def submit_all(self, requests: Sequence[Request], now: float, first_deadline: float = _NEVER) -> None:
        """Queue requests as `submit` would, one after the other.

        Args:
            requests: At least one; of one sample each, without a key, that arrived now.
            first_deadline: The earliest of their deadlines; infinity if all have the usual time.
        """
        batcher = self._batcher
        if (
            not self.accepting
            or batcher is None
            or self._keys_of is not None
            or self._deadline_s != _NEVER
            or self._flights is not None
            or (self._sleeper is not None and not self.pool.idle)
            or self._queue.waiting + len(requests) > self._capacity
        ):
            for request in requests:
                self.submit(request)
            return
        self._open.update(dict.fromkeys(requests))
        deadline = min(first_deadline, now + self._timeout_s)
        if deadline < self._sweep_due:
            self._arm(deadline, now)
        self._queue.offer_all(requests, now)
        if not batcher.is_awake and self.pool.idle:
            batcher.wake()

    async def call(  # noqa: PLR0913 - what a request is made of
        self,
        body: Any,
        *,
        params: Mapping[str, Any] = EMPTY,
        size: int = 1,
        key: Hashable = None,
        timeout_s: float | None = None,
        request_id: str = "",
        answered: Callable[[Endpoint, Request], object] | None = None,
        tenant: Tenant | None = None,
    ) -> Any:
        """Submit a request and wait for its outcome, off the hot path; `answered` is called on the reply.

        Raises:
            ForebayError: What the request failed with.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        parts: list[Any] = []

        def reply(request: Request, outcome: Outcome) -> None:
            if answered is not None:
                answered(self, request)
            if not future.done():
                future.set_result(outcome)

        deadline = _NEVER if timeout_s is None else time.monotonic() + min(timeout_s, self.config.max_timeout_s)

        def on_part(part: Any, release: Callable[[], object]) -> None:
            parts.append(part)
            release()

        request = Request(
            body=body,
            reply=reply,
            params=params,
            size=size,
            key=key,
            deadline=deadline,
            id=request_id,
            tenant=tenant,
            on_part=on_part,
        )
        self.submit(request)
        try:
            outcome = await future
        except asyncio.CancelledError:
            self.cancel(request)
            raise
        if type(outcome) is Failure:
            # The error's traceback holds this frame: without the request, which the garbage collector does not look
            # at, in it, no circle is closed.
            del request, future, reply, on_part
            try:
                raise outcome.error
            finally:
                del outcome
        return parts or outcome

    def cancel(self, request: Request) -> None:
        """Forget a request whose client went away: if it waits, it never runs; if it runs, its outcome is dropped.

        Who goes because its time is over was late: a transport that keeps deadlines, too, may be the first to see it.
        """
        if not request.done:
            is_late = request.deadline <= time.monotonic() + EARLY_S
            self._settle(request, Failure(self._late(request) if is_late else Cancelled("the client went away")))

    def end(self, request: Request) -> None:
        """Take what came of a streamed answer for the whole: what may still come is not wanted."""
        if not request.done:
            self._settle(request, None)

    def whereabouts(self, request: Request) -> str:
        """Tell where an open request is and at what, as an end of the sentence that its time was over."""
        entries = self._slices.of(request)
        running = [entry for entry in entries if 0 < entry.taken < _NEVER and not entry.done]
        if not running:
            waits_for_batch = self.pool.idle and not all(entry.taken for entry in entries)
            return request.place() + (
                "while it waited for its batch" if waits_for_batch else "before a worker was free"
            )
        return request.place() + (self.pool.whereabouts(running[0]) or "while it ran")

    def reject(self, error: ForebayError, times: int = 1, tenant: Tenant | None = None) -> None:
        """Count requests that a protocol refused before they could be submitted; a full queue says until when."""
        if isinstance(error, QueueFull) and not isinstance(error, LimitReached):
            error.retry_at = self.next_ticket(tenant)
        self._count_refused(tenant, error, times)
        self.metrics.failed(error, times=times)
        if self.metrics.own is not None:
            self.metrics.own.failed(error, times=times)

    def next_ticket(self, tenant: Tenant | None = None, size: int = 1, after_s: float = 0.0) -> float:
        """Return the moment at which a client that is refused now should try again; see `Tickets.next`."""
        self._queue.keep_tickets().told_row_s = self.pool.row_s
        return self._queue.next_ticket(tenant, size, time.monotonic(), after_s)

    @property
    def full_row_s(self) -> float:
        """Seconds in which the workers answer a row; 0 while half of the queue is empty, and no caller needs it."""
        return 0.0 if 2 * self._queue.waiting < self._capacity else self._queue.keep_tickets().row_s

    def _say_when(self, request: Request, error: ForebayError) -> None:
        """Have an error say when its client should try again, where this queue refused it."""
        if isinstance(error, QueueFull | TooLate) and not error.retry_at:
            after_s = error.after_s if isinstance(error, TooLate) else 0.0
            error.retry_at = self.next_ticket(request.tenant, request.size, after_s)

    def _submit_by_key(self, request: Request, keys: Sequence[Hashable], batcher: Batcher, now: float) -> None:
        """Queue a request under the keys of its samples, in slices if they differ or are too many."""
        key = keys[0]
        if keys.count(key) == len(keys):
            if request.size <= self._max_size:
                request.key = key
                self._offer(request, now)
                if not batcher.is_awake:
                    batcher.wake()
            else:
                self._slices.cut(request, {key: range(request.size)}, now)
            return
        rows: dict[Hashable, list[int]] = {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        self._slices.cut(request, rows, now)

    def _answer(self, batch: EntryBatch, outcomes: Sequence[Outcome], now: float) -> None:
        self.answering = None if self.pool.is_elsewhere else batch
        if self._accounts is not None and batch.worker_s:  # the nodes of a graph say what that has cost
            self._bill(batch, self._accounts)
        opened = self._open
        if shared := _shared_replies(batch.entries, outcomes):
            answered: list[Any] = batch.entries
            for entry in answered:
                del opened[entry]
                entry.done = True
            for reply, entries, its in shared:
                for entry, outcome in reply.to_all(entries, its):
                    self._hand_over(entry, outcome)
        else:
            answered = self._answer_each(batch, outcomes)
        self.answering = None
        if self._fed:
            self._slices.feed()
        self._count(batch, answered, now)
        if self._windows is not None:
            for request in answered:
                self._windows.forget(request)
        if self._drained is not None and not opened:
            self._drained.set()

    def _bill(self, batch: EntryBatch, accounts: Accounts) -> None:
        """Charge what a batch has cost to the requests in it, and to their tenants."""
        for entry, part in zip(batch.entries, divide(batch, self._queue.fair), strict=True):
            if self._flights is None:
                self._charge(entry, entry, part, batch, accounts)
                continue
            payers = self._flights.payers(entry)
            for payer in payers:
                self._charge(payer, entry, part / len(payers), batch, accounts)

    def _charge(self, payer: Any, entry: Any, seconds: float, batch: EntryBatch, accounts: Accounts) -> None:
        """Charge worker seconds to a request, for which an entry has run that may be for others as well."""
        payer.root().cost_s += seconds
        account = accounts.of(self.metrics.tenants, self._called, payer.tenant)
        account.worker_s += seconds
        tenants, tenant = self._tenants, payer.tenant
        is_limited = tenants is not None and tenants.are_limited and not self.pool.is_elsewhere
        if is_limited and tenant is not None and tenant.allowance is not None:
            tenant.allowance.worked(seconds, time.monotonic())
        if not batch.billed_s:
            account.rows += payer.size
            account.queue_s.observe(max(entry.taken - payer.arrived, 0.0))
        if accounts.due is not None:
            accounts.due[account] = None
        if tenant is not entry.tenant and self._queue.fair is not None:
            self._queue.fair.move(entry.tenant, tenant, seconds)

    def charge_tokens(self, tenant: Tenant | None, prompt: int, completion: int) -> None:
        """Charge tokens that a model has counted to a tenant, where its workers are."""
        prompt, completion = (min(max(tokens, 0), MAX_TOKENS) for tokens in (prompt, completion))
        if self.pool.is_elsewhere:
            self.pool.hand_on_tokens(tenant, prompt, completion)
        elif self._accounts is not None:
            account = self._accounts.of(self.metrics.tenants, self._called, tenant)
            account.prompt_tokens += prompt
            account.completion_tokens += completion
            if self._accounts.due is not None:
                self._accounts.due[account] = None

    def _bill_round(self, batch: EntryBatch, accounts: Accounts) -> None:
        """Charge what a round has cost to the streams that it stepped, so that shares hold while they run."""
        self._bill(batch, accounts)
        if self._queue.fair is not None:
            self._queue.fair.stepped(batch)
        batch.billed_s = batch.worker_s

    def _count_refused(self, tenant: Tenant | None, error: ForebayError, times: int = 1, due_s: float = _NEVER) -> None:
        """Count requests that were refused for want of room or time to their tenant, and hang on the error why."""
        if not isinstance(error, CapacityError):
            return
        reason = f"limit:{error.limit}" if isinstance(error, LimitReached) else _REASONS.get(type(error), error.code)
        if tenant is not None and reason == "full":
            reason = "share"  # another tenant would have found room
        if self._accounts is not None:
            refused = self._accounts.of(self.metrics.tenants, self._called, tenant).refused
            refused[reason] = refused.get(reason, 0) + times
        name, tier, own = ("", None, None) if tenant is None else (tenant.name, tenant.tier, None)
        if tenant is not None and (fair := self._queue.fair) is not None:
            own = fair.flow_of(tenant).rows
        late_s = error.after_s if isinstance(error, TooLate) else 0.0
        name_version, waiting = self._called, self._queue.waiting
        error.decision = time.time(), name_version, name, tier, reason, waiting, self._capacity, own, due_s, late_s

    def _answer_each(self, batch: EntryBatch, outcomes: Sequence[Outcome]) -> list[Any]:
        """Reply to one after the other; returns the requests that got an answer, and no error."""
        opened = self._open
        special: list[Any] = []
        logged = False
        for entry, outcome in zip(batch.entries, outcomes, strict=True):
            if type(outcome) is Failure:
                special.append(entry)
                self.metrics.failed_rows += entry.size
                error = outcome.error
                if not logged and isinstance(error, UserCodeError):
                    logged = True
                    self._log_failures(batch, outcomes)
                if not entry.done:
                    self._settle_entry(entry, outcome)
                continue
            try:
                del opened[entry]
            except KeyError:  # a slice, or a request that nobody waits for any more
                special.append(entry)
                if not entry.done:
                    self._settle_entry(entry, outcome)
                continue
            entry.done = True
            reply = entry.reply
            try:
                reply(entry, outcome)
            except Exception as error:  # noqa: BLE001 - see `_tell_instead`
                self._tell_instead(entry, error)
        if not special:
            return batch.entries
        others = set(special)
        return [entry for entry in batch.entries if entry not in others]

    def _settle_entry(self, entry: Request | Slice, outcome: Outcome) -> None:
        if type(entry) is Slice:
            entry.done = True
            entry.reply(entry, outcome)
        elif isinstance(entry, Request):
            self._settle(entry, outcome)

    def _count(self, batch: EntryBatch, answered: list[Request], now: float) -> None:
        """Count a batch and those of its requests that got an answer."""
        metrics = self.metrics
        metrics.last = now
        if self._runs_one_by_one:
            metrics.ran(1, 1, batch.model_s / batch.rows, batch.rows)
        else:
            metrics.ran(batch.rows, len(batch.entries), batch.model_s)
        if batch.noted is not None:
            self._timeline.end(self, batch, batch.noted, now)
        if metrics.own is not None:
            _count_own(metrics.own, answered, now)
        if len(answered) == 1:
            (request,) = answered
            metrics.codes["ok"] += 1
            metrics.request_s.observe(now - request.arrived)
            metrics.queue_s.observe(request.taken - request.arrived)
        elif answered:
            metrics.codes["ok"] += len(answered)
            first, arrived = answered[0], answered[0].arrived
            if arrived == answered[-1].arrived and self._is_in_order:  # all came in one turn of the loop
                metrics.request_s.observe(now - arrived, len(answered))
                metrics.queue_s.observe(first.taken - arrived, len(answered))
                return
            arrivals = [request.arrived for request in answered]
            if not self._is_in_order:
                arrivals.sort()
            metrics.request_s.observe_since(now, arrivals)
            metrics.queue_s.observe_since(first.taken, arrivals)

    def _steps(self, batch: EntryBatch, steps: Sequence[Sequence[Any]], release: Callable[[], object]) -> None:
        """Hand steps of a streamed answer to its clients; `release` is called once all of them have room again."""
        assert self._windows is not None
        if self._accounts is not None and batch.worker_s > batch.billed_s:
            self._bill_round(batch, self._accounts)
        handed: list[tuple[Request, Sequence[Any]]] = []
        for place, entry in enumerate(batch.entries):
            if entry.done:
                continue
            parts = [step[place] for step in steps if step[place] is not None]
            failed = next((part for part in parts if type(part) is Failure), None)
            if failed is not None:
                parts = parts[: parts.index(failed)]
            if parts and entry.on_part is not None:
                self.metrics.parts += len(parts)
                if entry.until != _NEVER:
                    entry.deadline = entry.until
                if failed is None:
                    handed.append((entry, parts))
                else:
                    self._windows.hand_out(batch, [(entry, parts)], lambda: None)
            if failed is not None:
                self._end_stream(entry, failed.error)
        self._windows.hand_out(batch, handed, release)

    def _others_wait(self) -> bool:
        return self.pool.standing > 0 or (self._queue.waiting > 0 and self.pool.idle == 0)

    def _cut_off(self, request: Request, error: Exception) -> None:
        """End a streamed answer that cannot go on."""
        self._end_stream(request, _told(error))

    def _end_stream(self, request: Request, error: ForebayError) -> None:
        """End a streamed answer with an error; clients are sent to the log for what the user's code did."""
        if request.done:
            return
        if isinstance(error, UserCodeError) and not error.is_logged:
            self._log_failure(error, [request])
        self._settle(request, Failure(error))

    def _settle(self, request: Request, outcome: Outcome) -> None:
        """Decide the outcome of a request away from the hot path."""
        now = time.monotonic()
        request.done = True
        del self._open[request]
        has_waited = type(outcome) is Failure and (request.taken == _NEVER or self._slices.is_whole(request))
        for entry in self._slices.leave(request):
            if not entry.done or entry is request:
                entry.done = True
                assert self._batcher is not None
                self._batcher.abandon(entry)
        if self._fed:
            self._slices.feed()
        if type(outcome) is Failure:
            self._say_when(request, outcome.error)
            if has_waited:
                self._count_refused(request.tenant, outcome.error, due_s=request.due - now)
        for metrics in self._counting(request):
            if type(outcome) is Failure:
                metrics.failed(outcome.error, request.root().id)
                metrics.failed_s += now - request.arrived
            else:
                metrics.codes["ok"] += 1
            metrics.request_s.observe(now - request.arrived)
        if self._windows is not None:
            self._windows.forget(request)
        self._hand_over(request, outcome)
        if self._drained is not None and not self._open:
            self._drained.set()

    def _late(self, request: Request) -> DeadlineExceeded:
        timeout_ms = round((request.deadline - request.arrived) * 1000)
        setting = " (max_timeout_ms)" if request.deadline == request.until else ""
        return DeadlineExceeded(f"timed out after {timeout_ms} ms{setting} {self.whereabouts(request)}")

    def _refuse(self, request: Request, error: ForebayError) -> None:
        request.done = True
        self._say_when(request, error)
        self._count_refused(request.tenant, error, due_s=request.due - request.arrived)
        for metrics in self._counting(request):
            metrics.failed(error, request.root().id)
        self._hand_over(request, Failure(error))

    def _counting(self, request: Request) -> tuple[EndpointMetrics, ...]:
        """Return where a request is counted."""
        metrics = self.metrics
        return (metrics,) if metrics.own is None or request.is_counted_elsewhere() else (metrics, metrics.own)

    def _hand_over(self, request: Request, outcome: Outcome) -> None:
        """Reply. If the transport raises, that is the transport's defect and must not keep others waiting."""
        try:
            request.reply(request, outcome)
        except Exception as error:  # noqa: BLE001 - see `_tell_instead`
            self._tell_instead(request, error)

    @staticmethod
    def _tell_instead(request: Request, error: Exception) -> None:
        """Give the answer of last resort in place of one that could not be handed over."""
        try:
            request.reply(request, Failure(_told(error)))
        except Exception:
            log.exception("failed to deliver the error in its place")

    def _log_failures(self, batch: EntryBatch, outcomes: Sequence[Outcome]) -> None:
        """Log what the user's code raised, each failure once with the requests that it concerns."""
        concerned: dict[tuple[str, str], tuple[UserCodeError, list[Request]]] = {}
        for entry, outcome in zip(batch.entries, outcomes, strict=True):
            if type(outcome) is Failure and isinstance(outcome.error, UserCodeError):
                error = outcome.error
                if error.is_logged and (error.message, error.trace) not in concerned:
                    continue
                error.is_logged = True
                _, requests = concerned.setdefault((error.message, error.trace), (error, []))
                if not entry.done:
                    requests += self._slices.cut_into(entry) if type(entry) is Slice else [entry]
        for error, requests in concerned.values():
            self._log_failure(error, requests)

    def _log_failure(self, error: UserCodeError, requests: Sequence[Request]) -> None:
        error.is_logged = True
        ids = [id_of(request) for request in requests]
        extra = {"endpoint": self.config.name, "request_ids": ids, "trace": error.trace}
        place = next(reversed(own_frames(error.trace)), "")
        log.error("%s: %s%s", error.kind, error.message, f", at {place}" if place else "", extra=extra)

    def _arm(self, due: float, now: float) -> None:
        assert self._loop is not None
        due = max(due, now + SWEEP_S)
        if due >= self._sweep_due:
            return
        if self._sweep is not None:
            self._sweep.cancel()
        self._sweep_due = due
        self._sweep = self._loop.call_later(due - now, self._expire)

    def _expire(self) -> None:
        self._sweep = None
        self._sweep_due = _NEVER
        now = time.monotonic()
        try:
            for request in [request for request in self._open if request.deadline <= now + EARLY_S]:
                if not request.done:
                    if self._queue.deadlines is not None and self._slices.is_whole(request):
                        self._queue.deadlines.missed(request, now)
                    self._settle(request, Failure(self._late(request)))
        finally:  # a defect in one of them must not leave the others without a deadline
            earliest = min((request.deadline for request in self._open), default=_NEVER)
            if earliest != _NEVER:
                self._arm(earliest, now)


_REASONS: Final[dict[type[ForebayError], str]] = {
    QueueFull: "full",
    ShareUsed: "share",
    DeadlineExceeded: "late",
    TooLate: "late",
    Unavailable: "unavailable",
}
"""What metrics call the errors of requests that were refused; others by their codes."""

_reply_of: Final = operator.attrgetter("reply")
_is_done: Final = operator.attrgetter("done")


def _count_own(own: EndpointMetrics, answered: Sequence[Request], now: float) -> None:
    """Count those of a batch that no front counts."""
    for request in answered:
        if not request.is_counted_elsewhere():
            own.codes["ok"] += 1
            own.request_s.observe(now - request.arrived)


def _told(error: Exception) -> ForebayError:
    """Return what a client is told in place of an answer that could not be handed over."""
    if isinstance(error, ForebayError):  # a protocol has no words for what the model gave, and says so
        return without_frames(error)  # its frames hold the request, which the garbage collector does not look at
    log.error("failed to deliver an answer", exc_info=error)
    return InternalError("the answer could not be written")


def _shared_replies(
    entries: Sequence[Any], outcomes: Sequence[Outcome]
) -> Sequence[tuple[ReplyToAll, Sequence[Any], Sequence[Outcome]]]:
    """Return the replies of a batch, each with its requests; none unless all take several, and no request failed."""
    replies = dict.fromkeys(map(_reply_of, entries))
    for reply in replies:
        if not isinstance(reply, ReplyToAll):
            return ()
    if Failure in {*map(type, outcomes)} or any(map(_is_done, entries)):
        return ()
    if len(replies) == 1:
        return ((entries[0].reply, entries, outcomes),)
    found: dict[ReplyToAll, tuple[list[Any], list[Outcome]]] = {reply: ([], []) for reply in replies}
    for entry, outcome in zip(entries, outcomes, strict=True):
        its, theirs = found[entry.reply]
        its.append(entry)
        theirs.append(outcome)
    return [(reply, its, theirs) for reply, (its, theirs) in found.items()]
