# SPDX-License-Identifier: Apache-2.0
"""Run batches in threads of this process: one slot a thread, two switches a batch."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import threading
import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, Unavailable
from forebay.observe import model_log
from forebay.observe.model_log import LocalOrigin, Voice, origin
from forebay.types.call import Failure
from forebay.types.devices import Device
from forebay.types.failures import text_of
from forebay.workers.cancel import probe
from forebay.workers.devices import run_on
from forebay.workers.landing import HERE
from forebay.workers.memory import keep_freed_memory
from forebay.workers.phases import Laps, lap, note
from forebay.workers.pool import MAX_LEFT, STUCK_S, Pool, PoolStatistics, not_opened, require_slots
from forebay.workers.runner import WorkerContext
from forebay.workers.thread_slot import ThreadSlot
from forebay.workers.user_code import answered, caught, close_runner, do_after, user_code

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.runner import Runner, RunnerSpec
    from forebay.workers.seating import Sitting

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
            close_runner(self.runner)


class _Hand:
    """One thread and the batch it has in hand.

    Attributes:
        is_left_behind: Whether another thread has taken its place.
    """

    __slots__ = ("is_left_behind", "thread", "work", "worker")

    def __init__(self, worker: _Worker) -> None:
        self.worker = worker
        self.thread = threading.current_thread()
        self.work: tuple[EntryBatch, Done] | None = None
        self.is_left_behind = False


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
            spec: What each worker runs.
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
        self._watched: dict[ThreadSlot, asyncio.TimerHandle] = {}
        self._devices = [devices[index % len(devices)] for index in range(workers)] if devices else []
        on = self._devices or [Device("cpu")] * workers
        self._workers = [
            _Worker(spec, WorkerContext(index, threads, one.name), one.cores) for index, one in enumerate(on)
        ]
        self._threads_per_worker = threads
        self._stuck_s = stuck_s
        self._inbox: SimpleQueue[tuple[EntryBatch, Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._running: dict[EntryBatch, Done] = {}
        # Who runs what. Whoever pops a batch decides, a thread that comes back or the loop that leaves it behind.
        self._held: dict[EntryBatch, _Hand] = {}
        self._called_off: dict[EntryBatch, asyncio.TimerHandle] = {}
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
            self._threads += [self._begin(worker, number) for number in range(self._threads_per_worker)]
            await (
                worker.has_opened.wait()
            )  # not in an executor: a load that hangs must not keep the server from stopping
            if worker.error is not None:
                raise not_opened(worker.error) from worker.error
        self.idle = sum(slot.seating.free for slot in self._slots) if self._seats else len(self._threads)

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join the streams that run; None where none do."""
        free = max((slot.seating.free for slot in self._slots), default=self._seats)
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
            self._running[batch] = done
            max(self._slots, key=lambda slot: slot.seating.free).submit(batch, self._end_stream)
            return
        self.idle -= 1
        self._running[batch] = done
        if self._stuck_s is not None:
            batch.on_cancel = lambda: self._call_off(batch)
        self._inbox.put((batch, done))

    def rest(self, seconds: float) -> None:
        """Block until a thread has something for the loop, but no longer than this."""
        self._has_said.wait(seconds)
        self._has_said.clear()  # after this turn the loop looks at what was said without standing still

    async def stop(self, grace_s: float) -> None:
        """Wait for running batches up to `grace_s`, answer what is late as unavailable, end the idle threads."""
        self._is_stopping = True
        self._refuses = False
        self.idle = 0
        for _ in range(len(self._threads) + len(self._replacing)):
            self._inbox.put(None)
        for timer in self._watched.values():
            timer.cancel()
        for slot in self._slots:
            slot.stop()
        for task in self._replacing:
            task.cancel()
        if self._running:
            self._drained = asyncio.Event()
            is_awaited = any(not batch.cancelled for batch in self._running)
            try:
                await asyncio.wait_for(self._drained.wait(), grace_s if is_awaited else 0.0)
            except TimeoutError:
                late = Failure(Unavailable("the server stopped before the model answered"))
                for slot in self._slots:
                    slot.give_up()
                for batch, done in list(self._running.items()):
                    self._finish(batch, done, [late] * len(batch.entries))
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
        return PoolStatistics(
            slots=slots, idle=idle, restarts=self._restarts, alive=alive, problem=problem, devices=devices
        )

    def _begin(self, worker: _Worker, number: int) -> threading.Thread:
        slot = ThreadSlot(self._seats, self._say, self._seats_freed, self._watch_for_stuck) if self._seats else None
        thread = threading.Thread(
            target=self._serve,
            args=(worker, slot),
            kwargs={"first": number == 0},
            name=f"forebay-worker-{worker.ctx.index}-{number}",
            daemon=True,
        )
        if slot is not None:
            self._slots[slot] = worker, thread
        thread.start()
        return thread

    def _end_stream(self, batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        done = self._running.pop(batch, None)
        if done is not None:
            done(batch, outcomes)
        if self._drained is not None and not self._running:
            self._drained.set()

    def _watch_for_stuck(self, slot: ThreadSlot, sitting: Sitting) -> None:
        """Nobody waits for a stream: if its thread does not end it, it hangs in user code."""
        if self._stuck_s is not None and slot not in self._watched:
            assert self._loop is not None
            self._watched[slot] = self._loop.call_later(self._stuck_s, self._look_at, slot, sitting)

    def _look_at(self, slot: ThreadSlot, sitting: Sitting) -> None:
        """See whether a stream that was called off has ended meanwhile; then there may be a later one."""
        del self._watched[slot]
        leaving = [one for one in slot.seating.open.values() if one.is_leaving]
        if sitting not in leaving:
            if leaving:
                self._watch_for_stuck(slot, leaving[0])
        elif not self._is_stopping:
            worker, thread = self._slots.pop(slot)
            self.idle -= slot.seating.free
            lost = slot.give_up()
            self._replace_thread(worker, thread)
            for one in lost:
                why = "the request was called off" if one.is_leaving else "the worker that held the request hangs"
                self._end_stream(one.batch, [Failure(Unavailable(why))] * len(one.batch.entries))

    def _seats_freed(self, rows: int) -> None:
        if not self._is_stopping:
            self.idle += rows

    def _call_off(self, batch: EntryBatch) -> None:
        """Nobody waits for a batch: if its thread does not come back, it hangs in user code."""
        assert self._loop is not None
        assert self._stuck_s is not None
        self._called_off[batch] = self._loop.call_later(self._stuck_s, self._leave_behind, batch)

    def _leave_behind(self, batch: EntryBatch) -> None:
        self._called_off.pop(batch, None)
        held = None if self._is_stopping else self._held.pop(batch, None)
        if held is None:
            return
        held.is_left_behind = True
        self._replace_thread(held.worker, held.thread)
        done = self._running.pop(batch)
        batch.on_cancel = None
        done(batch, [Failure(Unavailable("the request was called off"))] * len(batch.entries))

    def _interrupted(self, work: tuple[EntryBatch, Done], why: str) -> None:
        """A thread was interrupted outside of user code: what it had in hand goes round again, once."""
        log.warning("a thread was interrupted between two batches, by an exception that was set in it: %s", why)
        batch, done = work
        self._held.pop(batch, None)
        if batch not in self._running:
            return
        batch.attempts += 1
        if batch.attempts > 1 or batch.on_steps is not None or batch.cancelled or self._is_stopping:
            failure = Failure(Unavailable("the thread that held the request was interrupted; try again"))
            self._finish(batch, done, [failure] * len(batch.entries))
        else:
            self._inbox.put(work)

    def _replace_thread(self, worker: _Worker, thread: threading.Thread) -> None:
        assert self._loop is not None
        log.warning("a thread did not stop %g s after its batch was called off; it is left behind", self._stuck_s)
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
                self._freed()
        thread: threading.Thread | None = None
        try:
            await self._left.acquire()
            thread = await self._successor(stuck)
            self._threads.append(thread)
        finally:
            if thread is None and stuck.is_shared:
                stuck.leave(closes=False)
        self._restarts += 1
        if len(self._replacing) == 1:
            self._problem = None
        if self._refuses:
            self._refuses = False
            self.idle = 0
        self._freed()

    async def _successor(self, stuck: _Worker) -> threading.Thread:
        """Start a thread in place of one of a worker's, trying as often as it takes."""
        pause_s = 0.1
        while True:
            worker = stuck if stuck.is_shared else _Worker(stuck.spec, stuck.ctx, stuck.cores, stuck.voice)
            try:
                thread = self._begin(worker, self._restarts + 1 if stuck.is_shared else 0)
            except RuntimeError as error:  # there can be no further thread
                self._problem = Unavailable(str(error))
            else:
                await worker.has_opened.wait()
                if worker.error is None:
                    return thread
                self._problem = worker.error
            log.error("no thread can take the place of a stuck one: %s", self._problem.message)
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    def _finish(
        self, batch: EntryBatch, done: Done, outcomes: Sequence[Any], written: threading.Event | None = None
    ) -> None:
        if self._running.pop(batch, None) is None:
            if written is not None:
                written.set()
            return
        batch.on_cancel = None
        if self._called_off and (timer := self._called_off.pop(batch, None)) is not None:
            timer.cancel()
        if written is None:
            self.idle += not self._is_stopping
        done(batch, outcomes)
        if written is not None:
            written.set()
        if self._drained is not None and not self._running:
            self._drained.set()

    def _freed(self) -> None:
        self.idle += (self._seats or 1) * (not self._is_stopping)
        self._on_idle()

    def _serve(self, worker: _Worker, slot: ThreadSlot | None, *, first: bool) -> None:
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
        if slot is not None:
            slot.serve(runner, speaker)
            if slot.is_given_up and not self._is_stopping:
                with contextlib.suppress(RuntimeError):  # as above
                    self._loop.call_soon_threadsafe(self._left.release)
            worker.leave()
            return
        hand = _Hand(worker)
        with contextlib.suppress(RuntimeError):  # as above
            # Code of the user's may set an exception in this thread that comes only when its call is over.
            _, stray = caught(self._answer_all, hand, runner, speaker)
            while stray is not None and not hand.is_left_behind:
                why, stray = text_of(stray), None  # its traceback would keep the batch
                _, stray = caught(self._answer_all, hand, runner, speaker, why)
            if hand.is_left_behind:
                self._loop.call_soon_threadsafe(self._left.release)
        worker.leave()

    def _answer_all(self, hand: _Hand, runner: Runner, speaker: LocalOrigin | None, why: str = "") -> None:
        """Run what comes, until the pool stops or this thread was left behind; again, with `why`, if interrupted."""
        if hand.work is not None:
            work, hand.work = hand.work, None
            self._say(self._interrupted, work, why)
            del work
        # Python looks for such an exception when a call has returned, and the loop over an iterator is none: between
        # the inbox and this hand nothing is lost.
        for work in iter(self._inbox.get, None):
            hand.work = work
            batch, done = work
            self._held[batch] = hand
            if speaker is not None:
                speaker.batch = batch
            outcomes, after = self._run(runner, batch, hand.worker.ctx.index)
            if speaker is not None:
                speaker.batch = None
            if self._held.pop(batch, None) is None:
                return
            try:
                if after:
                    written = threading.Event()
                    self._say(self._finish, batch, done, outcomes, written)
                    try:
                        written.wait()
                        do_after(after)
                    finally:
                        self._say(self._freed)
                else:
                    self._say(self._finish, batch, done, outcomes)
            except RuntimeError:  # the loop is closed: nobody is left to answer
                return
            probe.set(None)
            hand.work = None
            del work, batch, done, outcomes  # a thread that waits keeps nothing of what it has run

    def _run(self, runner: Runner, batch: EntryBatch, worker: int) -> tuple[Sequence[Any], list[Callable[[], object]]]:
        probe.set(lambda: batch.cancelled)
        started = time.monotonic()
        laps = None if batch.noted is None else Laps(started)
        lap.set(laps)
        found = answered(runner.run, batch.entries)
        batch.model_s = time.monotonic() - started
        if batch.noted is not None and laps is not None:
            note(batch.noted, runner, laps, started, str(worker))
        return found

    def _say(self, act: Callable[..., object], *what: object) -> None:
        """Have the loop do something, from a thread."""
        assert self._loop is not None
        # In the context of the loop: what the server does then is not said, nor timed, by this thread.
        self._loop.call_soon_threadsafe(act, *what, context=self._context)
        self._has_said.set()
