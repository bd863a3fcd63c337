# SPDX-License-Identifier: Apache-2.0
"""Run batches in worker processes that may die at any time.

Theory of operation. The pool listens on a unix socket that is in no folder (`private_socket.py`); its workers are
started and replaced by a supervisor each (`supervisor.py`), and dial in and speak first (`frames.py`, `worker_slot.py`,
`child.py`). `slot_pool.py` says what happens to the batch of a worker that dies. When no worker is left and none can be
had, the pool refuses with the reason until one is back.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import select
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ForebayError, InvalidRequest, ModelError, Unavailable, revive
from forebay.observe.logs import model_log
from forebay.observe.logs.model_log import Voice
from forebay.observe.metrics import author_metrics
from forebay.observe.metrics.author_metrics import MetricStore
from forebay.types.server_state import here
from forebay.workers.memory import shm
from forebay.workers.memory.landing import Places
from forebay.workers.pool import STUCK_S, PoolStatistics, StartUp, not_opened, require_slots
from forebay.workers.pools.slot_pool import Rebuke, SlotPool, running
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.processes.device_binding import environment_on
from forebay.workers.processes.private_socket import PrivateSocket
from forebay.workers.processes.supervisor import END_S, LAST_S, LIVED_S, End, Supervisor, start_worker
from forebay.workers.user_calls.os_threads import require_os_waits

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch
    from forebay.types.devices import Device
    from forebay.types.worker_range import WorkerRange
    from forebay.workers.runner import RunnerSpec

log = logging.getLogger("forebay.workers")

AHEAD: Final = 2
"""Streams that may wait in a worker with many seats, so that they take one without the way to the server."""
MANY_SEATS: Final = 8


class Worker:
    """One worker process and its successors.

    Attributes:
        slots: Its connections, with the number of the process that opened each.
        ended: The last of its processes that has ended.
        dying: Slots that lost their connection before it was known how their process ends, which is told.
        ready_life: The number of the process that is ready; 0 if none is.
        has_left: Whether the last process has ended and none will follow.
        is_leaving: Whether it stops because fewer workers are wanted.
        begun_at: When its process was started, in the loop's clock.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.slots: dict[WorkerSlot, int] = {}
        self.ended: End | None = None
        self.dying: list[WorkerSlot] = []
        self.ready_life = 0
        self.has_left = True
        self.is_leaving = False
        self.begun_at = 0.0
        self.supervisor: Supervisor | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its runner is open."""
        return self.ready_life != 0

    @property
    def problem(self) -> ForebayError | None:
        """Why it is not ready, after attempts that failed."""
        return None if self.supervisor is None else self.supervisor.problem

    @property
    def has_given_up(self) -> bool:
        """Whether so many attempts have failed that those who wait are to be told."""
        return self.supervisor is not None and self.supervisor.has_given_up

    def is_awaited(self) -> bool:
        """Return whether it still has work that matters: a batch that is waited for, or work that follows an answer."""
        batches = [batch for slot in self.slots for batch in running(slot)]
        return self.is_ready and (not batches or not all(batch.cancelled for batch in batches))

    def kill(self, life: int | None = None) -> None:
        """End this process, or the one that runs now."""
        if self.supervisor is not None:
            self.supervisor.kill(self.supervisor.lives if life is None else life)


class ProcessPool(SlotPool[WorkerSlot]):
    """`workers` processes with `threads` slots each; with `bounds`, as many as `resize` says.

    Attributes:
        wanted: Workers that there should be.
    """

    can_rest = True

    def __init__(  # noqa: PLR0913 - each is one plain fact about the workers
        self,
        spec: RunnerSpec,
        *,
        workers: int = 1,
        threads: int = 1,
        python: str | None = None,
        env: Mapping[str, str] | None = None,
        path: Sequence[str] = (),
        cwd: str | None = None,
        stagger: bool = False,
        stuck_s: float | None = STUCK_S,
        isolates: bool = False,
        handover_s: float | None = None,
        hands_on: bool = True,
        on_death: Callable[[int], None] | None = None,
        captures: bool = True,
        devices: Sequence[Device] = (),
        seats: int = 0,
        called: str = "worker",
        bounds: WorkerRange | None = None,
    ) -> None:
        """Describe the workers; `start` brings them up.

        Args:
            workers: Processes.
            threads: Slots in each.
            python: Their interpreter, which must have forebay; None takes this process's own.
            env: Environment of the workers, all of it; None hands on this process's own.
            path: Folders appended to the workers' `sys.path`.
            stagger: At the start, open one runner after the other instead of all at once.
            stuck_s: A worker that goes on with a batch nobody waits for is replaced after this time; None lets it.
            isolates: Hand on the entries of a batch that lost its worker each alone.
            handover_s: How long what lost its worker waits for another; None lets its own deadline decide.
            hands_on: Whether what lost its worker may be run a second time; else it fails at once.
            on_death: Called with the exit status when a worker dies; None replaces it.
            captures: Whether what the workers log and print becomes lines of the log; else they write it themselves.
            devices: What they run on, one after the other and again from the first; none says nothing of it.
            seats: Rows of streams that may be open in each slot; 0 gives a slot one batch at a time.
            called: What messages call a worker, before its number.
            bounds: Within which the number of workers follows the load; `workers` is then the most. Even if there may
                be none, one is usually started at first: whether and how quickly the model loads is then known.

        Raises:
            ConfigError: If the spec cannot travel, the environment hides a device, or there are too many slots.
        """
        require_slots(workers, threads)
        ahead = AHEAD if seats >= MANY_SEATS and workers * threads == 1 else 0
        super().__init__(isolates=isolates, handover_s=handover_s, hands_on=hands_on, seats=seats, ahead=ahead)
        spec.require_portable()
        self.restarts = 0
        self._spec = spec
        self._shared_places = self.places = Places()
        self.shared = functools.partial(shm.make_arenas, self._shared_places)
        self._threads = threads
        self._devices = [devices[index % len(devices)] for index in range(workers)] if devices else []
        base = os.environ if env is None else env
        environments = [environment_on(device, base) for device in self._devices] or [env] * workers
        cores = [device.cores for device in self._devices] or [()] * workers
        self._starts = [
            functools.partial(start_worker, index=index, python=python, env=environment, cwd=cwd, cores=cores[index])
            for index, environment in enumerate(environments)
        ]
        self._path = list(path)
        self._stuck_s = stuck_s
        self._on_death = on_death
        self._captures = captures
        self._called = called
        self._workers = [Worker(index) for index in range(workers)]
        self.bounds = bounds
        self.wanted = workers if bounds is None else bounds.at_first
        self._start_s = 0.0
        self._stagger = stagger
        self._is_starting = False
        self._entrance: PrivateSocket | None = None
        self._server: asyncio.Server | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Start the workers and wait until every one is ready.

        Raises:
            ModelError: If a runner could not be opened, or a process not be started.
            ConfigError: If the program has replaced what starts and watches them.
        """
        require_os_waits("a model in worker processes", ["subprocess"])
        self._loop = asyncio.get_running_loop()
        self.model = model_log.model.get()
        self.labels = author_metrics.whose.get()
        self.metrics = here(MetricStore)
        self.log_level = model_log.level if self._captures else None
        self._is_starting = True
        try:
            self._entrance = PrivateSocket()
            self._server = await self._loop.create_unix_server(
                lambda: WorkerSlot(self), sock=self._entrance.take_listener()
            )
            workers = self._workers[: self.wanted]
            for worker in workers:
                self._begin(worker)
                if self._stagger:
                    await self._up([worker])
            await self._up(workers)
        except (OSError, RuntimeError) as error:
            await self.stop(0.0)
            raise ModelError(f"the workers cannot be started: {getattr(error, 'strerror', None) or error}") from error
        except ForebayError:
            await self.stop(0.0)
            raise
        finally:
            self._is_starting = False

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give the batch to the worker with the most idle slots, of several to the one that has been idle longest."""
        if self._threads == 1 or self.seats or self._refusal is not None:
            super().submit(batch, done)
            return
        self.idle -= 1
        idle = Counter(slot.worker for slot in self._idle_slots)
        slot = max(self._idle_slots, key=lambda slot: idle[slot.worker])
        self._idle_slots.remove(slot)
        slot.run(batch, done)

    def rest(self, seconds: float) -> None:
        """Block until a worker has something to say, but no longer than this."""
        sockets = select.poll()
        for worker in self._workers:
            for slot in worker.slots:
                if running(slot) and (descriptor := slot.fileno()) >= 0:
                    sockets.register(descriptor, select.POLLIN)
        sockets.poll(seconds * 1000)

    async def stop(self, grace_s: float) -> None:
        """Stop idle workers now, busy ones when their batch has ended or `grace_s` is over.

        Workers that are still starting, or that run a batch nobody waits for, are not waited for.
        """
        self._stop_slots()
        until = time.monotonic() + grace_s
        for worker in self._workers:
            if worker.supervisor is not None:
                worker.supervisor.stop()  # before anything is killed, which would be replaced
            for slot in worker.slots:
                slot.stop()
            if not worker.is_ready:
                worker.kill()
        await self._kill_late([worker for worker in self._workers if not worker.is_awaited()], END_S)
        await self._kill_late(self._workers, max(until - time.monotonic(), 0.0) + END_S)
        if not await self._all_left(self._workers, LAST_S):
            log.error("a killed worker does not exit; abandoning it")
        if self._server is not None:
            self._server.close()
        self._fail_orphans()
        if self._entrance is not None:
            self._entrance.close()
        self._shared_places.close()

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        alive = sum(worker.is_ready and not worker.is_leaving for worker in self._workers)
        slots = self.wanted * self.slots_each
        idle = 0 if self._refusal is not None else max(self.idle - self.ahead, 0)
        problem = next((worker.problem.message for worker in self._kept() if worker.problem is not None), "")
        devices = tuple(map(str, self._devices))
        told = PoolStatistics(
            slots=slots,
            idle=idle,
            restarts=self.restarts,
            alive=alive,
            problem=problem,
            devices=devices,
            wanted=self.wanted,
            may_sleep=self.bounds is not None and self.bounds.min == 0,
        )
        up = {worker.index for worker in self._workers if worker.is_ready and not worker.is_leaving}
        return self._with_health(told, up)

    def checked(self) -> Sequence[int]:
        """Return the numbers of the workers that there should be."""
        return [worker.index for worker in self._kept()]

    def check(self, worker: int, batch: EntryBatch, done: Done) -> bool:
        """Give a check to a slot of a worker that has nothing to do."""
        slots = [slot for slot in (*self._idle_slots, *self._seated) if slot.worker.index == worker]
        slot = next((one for one in slots if not running(one)), None)
        if slot is None:
            return False
        if slot not in self._seated:
            self._idle_slots.remove(slot)
        self.idle -= 1
        slot.run(batch, done)
        return True

    def replace(self, worker: int) -> bool:
        """End the process of a worker; another one takes its place."""
        found = self._workers[worker]
        found.kill(found.ready_life)  # of one that is about to come back there is none
        return True

    @property
    def slots_each(self) -> int:
        """Batches, or rows of streams, that one worker runs at a time."""
        return self._threads * (self.seats or 1)

    def resize(self, workers: int) -> None:
        """Have so many workers: start further ones, or stop some once they have answered."""
        self.wanted = workers
        if self._stopping:
            return
        kept = self._kept()
        kept.sort(key=lambda worker: (worker.is_ready, any(map(running, worker.slots)), -worker.index))
        for worker in kept[: max(len(kept) - workers, 0)]:
            self._dismiss(worker)
        free = [worker for worker in self._workers if worker.supervisor is None]
        for worker in free[: max(workers - len(kept), 0)]:
            try:
                self._begin(worker)
            except RuntimeError as error:
                worker.supervisor = None
                log.warning("cannot start a further worker: %s; retrying", error)
                return
        if workers == 0:
            self._admit_again()

    def start_up(self, now: float) -> StartUp:
        """Return how far the starts of workers are."""
        kept = self._kept()
        begun = [worker.begun_at for worker in kept if not worker.is_ready]
        return StartUp(len(kept) - len(begun), len(begun), now - min(begun, default=now), self._start_s)

    def awaited(self, now: float) -> tuple[float, int] | None:
        """Return in how many seconds a worker is up, by how long a start took so far; see `Pool`."""
        start = None if self.idle else self.start_up(now)
        if start is None or start.up or not start.start_s:
            return None
        return max(start.start_s - start.since_s, 0.0), max(start.starting, 1) * self.slots_each

    def _kept(self) -> list[Worker]:
        """Return the workers that run, or are to, and are not about to leave."""
        return [worker for worker in self._workers if worker.supervisor is not None and not worker.is_leaving]

    def _dismiss(self, worker: Worker) -> None:
        """Give a worker no more work, and end it once it has answered; one that is still starting at once."""
        assert worker.supervisor is not None
        worker.is_leaving = True
        worker.supervisor.stop()
        if not worker.is_ready:
            worker.kill()
            return
        for slot in worker.slots:
            self.retire(slot)
            if not running(slot):
                slot.stop()
        asyncio.get_running_loop().call_later(STUCK_S, self._see_it_leave, worker)

    def _see_it_leave(self, worker: Worker) -> None:
        """End a worker that was told to leave and neither does nor has work."""
        if worker.has_left or self._stopping:
            return
        if any(map(running, worker.slots)):
            asyncio.get_running_loop().call_later(STUCK_S, self._see_it_leave, worker)
        else:
            worker.kill()

    def pids(self) -> list[int]:
        """Return the process ids of the workers that are up."""
        supervisors = [worker.supervisor for worker in self._workers if worker.is_ready]
        return [one.pid for one in supervisors if one is not None and one.pid is not None]

    def greeted(self, slot: WorkerSlot, about: Mapping[str, Any]) -> None:
        """A worker said hello on a new connection: tell it what to run."""
        index: int | None = about["worker"]
        if index is None or not 0 <= index < len(self._workers):
            raise InvalidRequest(f"worker {index} was not started by this pool")
        worker = slot.worker = self._workers[index]
        worker.slots[slot] = about["life"]  # the process may be gone by now, and its successor there
        options: dict[str, Any] = {}
        if about["first"]:
            options = {
                "factory": self._spec.factory,
                "kwargs": dict(self._spec.kwargs),
                "index": index,
                "threads": self._threads,
                "path": self._path,
            }
        slot.open(options)

    def ready(self, slot: WorkerSlot, before: Callable[[], None] | None = None) -> None:
        """A slot asks for work; its worker is up."""
        worker: Worker = slot.worker
        if worker.is_leaving and not self._stopping:
            if before is not None:
                before()
            slot.stop()
            return
        if not worker.is_ready and not self._stopping:
            took_s = time.monotonic() - worker.begun_at
            self._start_s = max(took_s, (self._start_s + took_s) / 2)
            worker.ready_life = worker.slots[slot]
            assert worker.supervisor is not None
            worker.supervisor.ready(worker.ready_life)
            if self.health is not None:
                self.health.replaced(worker.index)
            self._admit_again()  # before `super().ready`: it sets `idle` to 0, and this slot counts from here on
            self._changed.set()
        super().ready(slot, before)

    def freed(self, slot: WorkerSlot, rows: int) -> None:
        """Seats of a slot became free; one that is to leave does so with its last stream."""
        super().freed(slot, rows)
        if slot.worker is not None and slot.worker.is_leaving and not running(slot):
            slot.stop()

    def failed(self, slot: WorkerSlot, kind: str, message: str, detail: Any, trace: str) -> None:
        """A worker could not open its runner."""
        worker: Worker = slot.worker
        assert worker.supervisor is not None
        life = worker.slots[slot]
        worker.supervisor.refused(life, not_opened(revive(kind, message, detail, trace)))
        asyncio.get_running_loop().call_later(END_S, worker.kill, life)  # threads of the model may keep it from ending

    def called_off(self, slot: WorkerSlot, batch_id: int) -> None:
        """Give a batch that no client waits for some time to come back; else its worker hangs in user code."""
        if self._stuck_s is not None and slot.worker is not None:
            asyncio.get_running_loop().call_later(self._stuck_s, self._end_stuck, slot, batch_id)

    def told(self, what: Rebuke, peer: tuple[str, int] | None, reason: str) -> None:
        """Say what was done to a worker, and why."""
        log.warning("a worker was %s: %s", what, reason)

    def gone(self, slot: WorkerSlot) -> None:
        """A connection closed, and its worker with it."""
        worker: Worker | None = slot.worker
        if worker is None:
            super().gone(slot)
            return
        life = worker.slots.pop(slot, 0)
        if worker.ready_life == life:  # else its successor is ready, and stays so
            worker.ready_life = 0
        # A worker that dies takes its connections along; one that only lost them is of no use either.
        asyncio.get_running_loop().call_later(LIVED_S, worker.kill, life)
        end = worker.ended if worker.ended is not None and worker.ended.life >= life else None
        if not running(slot) or self._hands_on or end is not None or self._stopping:
            self._drop(slot, self._how_it_ended(worker, end))
        else:
            # A batch that is not handed on fails with how its process ended, which `_ended` learns.
            # Until then, no worker is there to be told that a client has left.
            for batch in running(slot):
                batch.on_cancel = None
            self.retire(slot)
            worker.dying.append(slot)

    def _how_it_ended(self, worker: Worker, end: End | None) -> str:
        return f"{self._called} {worker.index} {'died' if end is None else end.words}"

    def _end_stuck(self, slot: WorkerSlot, batch_id: int) -> None:
        if slot.is_running(batch_id):
            log.warning("a worker did not stop %g s after its batch was cancelled; replacing it", self._stuck_s)
            slot.worker.kill(slot.worker.slots.get(slot))

    def _begin(self, worker: Worker) -> None:
        """Start a worker; what becomes of it is told on the loop."""

        def told(act: Callable[..., None], *what: Any) -> None:
            assert self._loop is not None
            with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped meanwhile
                self._loop.call_soon_threadsafe(act, worker, *what)

        assert self._entrance is not None
        address = f"unix:{self._entrance.path}"
        voice = None if self.log_level is None else Voice(self.model, str(worker.index))
        supervisor = worker.supervisor = Supervisor(
            f"{self._called} {worker.index}",
            lambda: self._starts[worker.index](address, voice=voice, life=supervisor.lives),
            on_end=functools.partial(told, self._ended),
            on_left=functools.partial(told, self._left),
        )
        supervisor.begin()
        worker.begun_at = time.monotonic()
        worker.has_left = False  # only if it has begun: `stop` waits for each that has not left

    async def _up(self, workers: Sequence[Worker]) -> None:
        """Wait until workers are ready; raises why one of them cannot be."""
        while not all(worker.is_ready for worker in workers):
            for worker in workers:
                if worker.has_given_up and worker.problem is not None:
                    raise worker.problem
            self._changed.clear()
            await self._changed.wait()

    def _ended(self, worker: Worker, end: End) -> None:
        """A process has ended, whatever became of its connections; or it could not be started."""
        for slot, life in list(worker.slots.items()):
            if life <= end.life:
                slot.hear_out()  # its last answers may be unread; `gone` follows in a later turn and finds `ended`
        if worker.ready_life <= end.life:
            worker.ready_life = 0
        worker.ended, worker.begun_at = end, time.monotonic()  # the next one begins
        dying, worker.dying = worker.dying, []
        for slot in dying:
            self._drop(slot, self._how_it_ended(worker, end))
        self._changed.set()
        if worker.is_leaving:
            return
        if self._stopping or (self._is_starting and worker.has_given_up):  # then `start` raises why, which says it all
            return
        why = "" if worker.problem is None else f": {worker.problem.message}"
        if end.status is None:
            log.warning("worker %d failed to start%s", worker.index, why)
        else:
            self.restarts += 1
            log.warning("worker %d (pid %s) exited with status %d%s", worker.index, end.pid, end.status, why)
            if self._on_death is not None:
                self._on_death(end.status)
        if all(one.has_given_up for one in self._kept()):
            self._refuse(Unavailable(f"no worker is running{why}; retrying"))

    def _left(self, worker: Worker) -> None:
        worker.has_left = True
        self._changed.set()
        if worker.is_leaving and not self._stopping:
            self._workers[worker.index] = Worker(worker.index)
            self.resize(self.wanted)  # it may be in demand again

    async def _kill_late(self, workers: Sequence[Worker], within_s: float) -> None:
        if not await self._all_left(workers, within_s):
            for worker in workers:
                worker.kill()

    async def _all_left(self, workers: Sequence[Worker], within_s: float) -> bool:
        """Wait until these have ended; returns whether they have."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not all(worker.has_left for worker in workers):
                    self._changed.clear()  # no turn of the loop lies between the look and the wait: nothing is missed
                    await self._changed.wait()
        return all(worker.has_left for worker in workers)
