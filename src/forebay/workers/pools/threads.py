# SPDX-License-Identifier: Apache-2.0
"""Run batches in threads of this process: one slot a thread, two switches a batch."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, Unavailable
from forebay.observe.logs import model_log
from forebay.observe.logs.model_log import LocalOrigin, Voice, origin
from forebay.types.call import Failure
from forebay.types.devices import Device
from forebay.types.failures import text_of
from forebay.workers.memory.freed_memory import keep_freed_memory
from forebay.workers.memory.landing import HERE
from forebay.workers.pool import MAX_LEFT, STUCK_S, Pool, PoolStatistics, not_opened, require_slots
from forebay.workers.pools.thread_slot import ThreadSlot
from forebay.workers.processes.device_binding import run_on
from forebay.workers.runner import Runner, RunnerSpec, WorkerContext
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.phases import Laps, lap, needed, note
from forebay.workers.user_calls.user_code import answered, caught, close_runner, do_after, user_code

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.pools.seating import Sitting

log = logging.getLogger("forebay.workers")

JOIN_S: Final = 0.5
"""How long the threads of a stopped pool are waited for, all together."""
JOIN_LOOK_S: Final = 0.002
"""Pause between two looks whether they have ended."""
MAX_PAUSE_S: Final = 10.0
"""Longest pause before a runner that cannot be opened in place of a stuck one is tried again."""


class _Worker:
    """One runner and the threads that call it; the first one opens it, the last one closes it."""

    def __init__(self, spec: RunnerSpec, ctx: WorkerContext, cores: Sequence[int], voice: Voice | None = None) -> None:
        self.spec = spec
        self.ctx = ctx
        self.cores = cores
        self.runner: Runner | None = None
        self.opened = threading.Event()
        self.has_opened = asyncio.Event()
        self.error: ForebayError | None = None
        self.voice = voice
        self._inside = ctx.threads
        self._lock = threading.Lock()

    @property
    def is_shared(self) -> bool:
        """Whether its runner is called by several threads at a time."""
        return self.ctx.threads > 1

    def enter(self) -> None:
        """Count one more thread, in place of one that is left behind."""
        with self._lock:
            self._inside += 1

    def leave(self, *, closes: bool = True) -> None:
        """One thread has ended, or will not be; the last one closes the runner."""
        with self._lock:
            self._inside -= 1
            is_last = self._inside == 0
        if is_last and closes and self.runner is not None:
            close_runner(self.runner.close)


class ThreadPool(Pool):
    """`workers` runners, each called by `threads` threads.

    Nothing can end a thread from outside, so one that hangs is left behind, and another takes its place: with a runner
    of its own, or with the same one if that is called by several threads anyway. At most that many threads are left
    behind. Once no other is there, the pool refuses until one comes back. Models that may crash belong in processes.
    """

    places = HERE
    can_rest = True

    def __init__(
        self,
        spec: RunnerSpec,
        *,
        workers: int = 1,
        threads: int = 1,
        stuck_s: float | None = STUCK_S,
        devices: Sequence[Device] = (),
        seats: int = 0,
    ) -> None:
        """Describe the threads; `start` brings them up.

        Args:
            workers: Runners.
            threads: Slots of each.
            stuck_s: A thread that goes on with a batch nobody waits for is left behind after this time, and another
                one takes its place; None leaves it in place.
            devices: What they run on, one after the other and again from the first; none says nothing of it.
            seats: Rows of streams that may be open in each thread; 0 runs one batch at a time, and no streams.
        """
        super().__init__()
        require_slots(workers, threads)
        self._seats = seats
        self._slots: dict[ThreadSlot, tuple[_Worker, threading.Thread]] = {}
        self._idle_slots: deque[ThreadSlot] = deque()  # where there are no seats
        self._devices = [devices[index % len(devices)] for index in range(workers)] if devices else []
        on = self._devices or [Device("cpu")] * workers
        self._workers = [
            _Worker(spec, WorkerContext(index, threads, one.name), one.cores) for index, one in enumerate(on)
        ]
        self._threads_per_worker = threads
        self._stuck_s = stuck_s
        self._threads: list[threading.Thread] = []
        self._left = asyncio.Semaphore(MAX_LEFT)
        self._replacing: set[asyncio.Task[None]] = set()
        self._restarts = 0
        self._problem: ForebayError | None = None
        self._refuses = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context = contextvars.Context()
        self._has_said = threading.Event()
        self._drained: asyncio.Event | None = None
        self._is_stopping = False

    async def start(self) -> None:
        """Start the threads and open the runners in them, one worker after the other.

        Raises:
            ModelError: If a runner could not be opened.
        """
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        keep_freed_memory()
        for worker in self._workers:
            if model_log.level is not None:
                worker.voice = Voice(model_log.model.get(), str(worker.ctx.index))
            for number in range(self._threads_per_worker):
                self._threads.append(self._slots[self._begin(worker, number)][1])
            await (
                worker.has_opened.wait()
            )  # not in an executor: a load that hangs must not keep the server from stopping
            if worker.error is not None:
                raise not_opened(worker.error) from worker.error
        for slot in self._slots:
            self._add_idle(slot)

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join the streams that run; None where none do."""
        free = max((slot.seating.free for slot in self._slots), default=self._seats) if self._seats else 0
        return None if free == self._seats else free

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Hand the batch to whichever thread is free, or answer it if none is left."""
        if self._refuses:
            assert self._loop is not None
            assert self._problem is not None
            self._loop.call_soon(done, batch, [Failure(self._problem)] * len(batch.entries))
            return
        if self._seats:
            self.idle -= batch.rows
            slot = max(self._slots, key=lambda slot: slot.seating.free)
        else:
            self.idle -= 1
            slot = self._idle_slots.popleft()
        slot.submit(batch, functools.partial(self._end, done))

    def rest(self, seconds: float) -> None:
        """Block until a thread has something for the loop, but no longer than this."""
        self._has_said.wait(seconds)
        self._has_said.clear()  # after this turn the loop looks at what was said without standing still

    async def stop(self, grace_s: float) -> None:
        """Wait for running batches up to `grace_s`, answer what is late as unavailable, end the idle threads."""
        self._is_stopping = True
        self._refuses = False
        self.idle = 0
        for slot in self._slots:
            slot.stop()
        for task in self._replacing:
            task.cancel()
        running = [one.batch for slot in self._slots for one in slot.seating.open.values()]
        if running:
            self._drained = asyncio.Event()
            is_awaited = any(not batch.cancelled for batch in running)
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s if is_awaited else 0.0)
            except TimeoutError:
                for slot in self._slots:
                    _answer(slot.give_up(), "the server stopped before the model answered")
        patience = time.monotonic() + JOIN_S
        # One that hangs in user code is left to end with the process. The loop may have others to answer meanwhile.
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < patience:  # noqa: ASYNC110 - at its end
            await asyncio.sleep(JOIN_LOOK_S)

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        alive = sum(thread.is_alive() for thread in self._threads)
        slots = len(self._workers) * self._threads_per_worker * (self._seats or 1)
        idle = 0 if self._refuses else self.idle
        problem = "" if self._problem is None else self._problem.message
        devices = tuple(map(str, self._devices))
        told = PoolStatistics(
            slots=slots, idle=idle, restarts=self._restarts, alive=alive, problem=problem, devices=devices
        )
        up = {worker.ctx.index for worker, thread in self._slots.values() if thread in self._threads}
        return self._with_health(told, up, self._threads_per_worker)

    def checked(self) -> Sequence[int]:
        """Return the numbers of the workers."""
        return range(len(self._workers))

    def check(self, worker: int, batch: EntryBatch, done: Done) -> bool:
        """Give a check to a thread of a worker that has nothing to do."""
        for slot, (whose, thread) in self._slots.items():
            is_up = thread in self._threads if self._seats else slot in self._idle_slots
            if whose.ctx.index == worker and is_up and not slot.seating.open:
                if not self._seats:
                    self._idle_slots.remove(slot)
                self.idle -= 1
                slot.submit(batch, functools.partial(self._end, done))
                return True
        return False

    def _begin(self, worker: _Worker, number: int) -> ThreadSlot:
        slot = ThreadSlot(self._seats, self._say, self._seats_freed, self._called_off, self.accounts)
        thread = threading.Thread(
            target=self._serve,
            args=(worker, slot),
            kwargs={"first": number == 0},
            name=f"forebay-worker-{worker.ctx.index}-{number}",
            daemon=True,
        )
        thread.start()
        self._slots[slot] = worker, thread
        return slot

    def _end(self, done: Done, batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        done(batch, outcomes)
        if self._drained is not None and not any(slot.seating.open for slot in self._slots):
            self._drained.set()

    def _called_off(self, slot: ThreadSlot, name: int) -> None:
        """Give a batch that no client waits for some time to end; else its thread hangs in user code."""
        if self._stuck_s is not None:
            assert self._loop is not None
            self._loop.call_later(self._stuck_s, self._leave_behind, slot, name)

    def _leave_behind(self, slot: ThreadSlot, name: int) -> None:
        if self._is_stopping or slot not in self._slots or name not in slot.seating.open:
            return
        worker, thread = self._slots.pop(slot)
        if self._seats:
            self.idle -= slot.seating.free
        lost = slot.give_up()
        self._replace_thread(worker, thread)
        _answer(lost, "the worker that held the request hangs")

    def _seats_freed(self, slot: ThreadSlot, rows: int) -> None:
        if not self._is_stopping:
            self.idle += rows
            self._is_free(slot)

    def _is_free(self, slot: ThreadSlot) -> None:
        if self.health is not None and slot in self._slots:
            self.health.freed(self._slots[slot][0].ctx.index)

    def _interrupted(self, slot: ThreadSlot, name: int, why: str) -> None:
        """A thread was interrupted outside of user code: what it had in hand goes round again, once."""
        log.warning("an exception set in a thread interrupted it between two batches: %s", why)
        sitting = slot.seating.open.get(name)
        if sitting is None:
            return
        batch = sitting.batch
        if batch.attempts > 1 or batch.cancelled or self._is_stopping:
            failure = Failure(Unavailable("the thread that held the request was interrupted; try again"))
            self._finish(slot, name, [failure] * len(batch.entries))
        else:
            batch.attempts += 1
            slot.put(sitting)

    def _replace_thread(self, worker: _Worker, thread: threading.Thread) -> None:
        assert self._loop is not None
        log.warning("a thread did not stop %g s after its batch was cancelled; abandoning it", self._stuck_s)
        self._threads.remove(thread)
        if worker.is_shared:
            worker.enter()
        task = self._loop.create_task(self._replace(worker))
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, stuck: _Worker) -> None:
        """Open a runner for one more thread, unless too many have been left behind: then wait until one is back."""
        if self._left.locked():
            self._problem = Unavailable(
                f"{MAX_LEFT} threads hang in calls that do not end, and no further one is replaced until one comes back"
            )
            log.error("%s", self._problem.message)
            if not self._threads:
                self._refuses = True
                self.idle = 1
                self._on_idle()
        try:
            await self._left.acquire()
            slot = await self._successor(stuck)
        except asyncio.CancelledError:
            if stuck.is_shared:
                stuck.leave(closes=False)
            raise
        self._threads.append(self._slots[slot][1])
        self._restarts += 1
        if len(self._replacing) == 1:
            self._problem = None
        if self._refuses:
            self._refuses = False
            self.idle = 0
        self._freed(slot)

    async def _successor(self, stuck: _Worker) -> ThreadSlot:
        """Start a thread in place of one of a worker's, trying as often as it takes."""
        pause_s = 0.1
        while True:
            worker = stuck if stuck.is_shared else _Worker(stuck.spec, stuck.ctx, stuck.cores, stuck.voice)
            try:
                slot = self._begin(worker, self._restarts + 1 if stuck.is_shared else 0)
            except RuntimeError as error:  # there can be no further thread
                self._problem = Unavailable(str(error))
            else:
                await worker.has_opened.wait()
                if worker.error is None:
                    return slot
                del self._slots[slot]
                self._problem = worker.error
            log.error("cannot replace a stuck thread: %s", self._problem.message)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _finish(
        self, slot: ThreadSlot, name: int, outcomes: Sequence[Any], written: threading.Event | None = None
    ) -> None:
        if not slot.is_given_up:
            sitting = slot.seating.end(name)
            if written is None:
                self._add_idle(slot)
            sitting.done(sitting.batch, outcomes)
        if written is not None:
            written.set()

    def _freed(self, slot: ThreadSlot) -> None:
        self._add_idle(slot)
        self._on_idle()

    def _add_idle(self, slot: ThreadSlot) -> None:
        if self._is_stopping or slot.is_given_up:
            return
        if not self._seats:
            self._idle_slots.append(slot)
        self.idle += self._seats or 1
        self._is_free(slot)

    def _serve(self, worker: _Worker, slot: ThreadSlot, *, first: bool) -> None:
        assert self._loop is not None
        run_on(worker.cores)
        speaker = None if worker.voice is None else LocalOrigin(worker.voice)
        origin.set(speaker)
        if first:
            try:
                with user_code():
                    worker.runner = worker.spec.build()
                    worker.runner.open(worker.ctx)
            except ForebayError as error:
                worker.error = error
            finally:
                worker.opened.set()
                with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                    self._loop.call_soon_threadsafe(worker.has_opened.set)
        else:
            worker.opened.wait()
        runner = worker.runner
        if worker.error is not None or runner is None:
            return
        if self._seats:
            slot.serve(runner, speaker)
        with contextlib.suppress(RuntimeError):  # as above
            # Code of the user's may set an exception in this thread that comes only when its call is over.
            why = None if self._seats else ""
            while why is not None and not slot.is_given_up:
                _, stray = caught(self._answer_all, slot, runner, worker.ctx.index, speaker, why)
                why, stray = None if stray is None else text_of(stray), None  # its traceback would keep the batch
            if slot.is_given_up and not self._is_stopping:
                self._loop.call_soon_threadsafe(self._left.release)
        worker.leave()

    def _answer_all(self, slot: ThreadSlot, runner: Runner, index: int, speaker: LocalOrigin | None, why: str) -> None:
        """Run what comes, until the pool stops or this thread was left behind; again, with `why`, if interrupted."""
        if slot.in_hand is not None:
            name, slot.in_hand = slot.in_hand[1], None
            self._say(self._interrupted, slot, name, why)
        # Python looks for such an exception when a call has returned, and the loop over an iterator is none: between
        # the inbox and this hand nothing is lost.
        for work in slot.batches():
            slot.in_hand = work
            _, name, batch, _ = work
            if speaker is not None:
                speaker.batch = batch
            outcomes, after = self._run(runner, batch, index)
            if speaker is not None:
                speaker.batch = None
            if slot.is_given_up:
                return
            try:
                if after:
                    written = threading.Event()
                    self._say(self._finish, slot, name, outcomes, written)
                    try:
                        written.wait()
                        do_after(after)
                    finally:
                        self._say(self._freed, slot)
                else:
                    self._say(self._finish, slot, name, outcomes)
            except RuntimeError:  # the loop is closed: nobody is left to answer
                return
            probe.set(None)
            slot.in_hand = None
            del work, batch, outcomes  # a thread that waits keeps nothing of what it has run

    def _run(self, runner: Runner, batch: EntryBatch, worker: int) -> tuple[Sequence[Any], list[Callable[[], object]]]:
        probe.set(lambda: batch.cancelled)
        started = time.monotonic()
        laps = None if batch.noted is None else Laps(started)
        lap.set(laps)
        own_s: list[float] | None = [] if self.accounts is not None and self.accounts.are_kept else None
        needed.set(own_s)
        found = answered(runner.run, batch.entries)
        batch.model_s = time.monotonic() - started
        batch.own_s = own_s or []
        if batch.noted is not None and laps is not None:
            note(batch.noted, runner, laps, started, str(worker))
        return found

    def _say(self, act: Callable[..., object], *what: object) -> None:
        """Have the loop do something, from a thread."""
        assert self._loop is not None
        # In the context of the loop: what the server does then is not said, nor timed, by this thread.
        self._loop.call_soon_threadsafe(act, *what, context=self._context)
        self._has_said.set()


def _answer(lost: Sequence[Sitting], why: str) -> None:
    """Answer what sat in a thread that was left behind."""
    for one in lost:
        told = "the request was cancelled" if one.is_leaving else why
        one.done(one.batch, [Failure(Unavailable(told))] * len(one.batch.entries))
