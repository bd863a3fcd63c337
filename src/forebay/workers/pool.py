# SPDX-License-Identifier: Apache-2.0
"""What all pools have in common: the contract, and the flow of streamed parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from forebay.errors import ConfigError, ForebayError, ModelError

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import Accounts
    from forebay.types.batch import Done, Entry, EntryBatch, Inside
    from forebay.types.tenant import Tenant
    from forebay.types.worker_range import WorkerRange
    from forebay.workers.memory.landing import Places
    from forebay.workers.pools.health_checks import HealthChecks


CREDIT = 16
"""Steps of a streamed answer that may be on their way to the clients before the generator has to wait."""
STUCK_S: Final = 30.0
"""How long a worker may go on with a batch that nobody waits for, before another one takes its place."""
MAX_LEFT: Final = 16
"""Threads of one pool, or beside a loop, that may be left behind in calls that do not end: they keep what they hold."""


MAX_SLOTS: Final = 65_536
"""Batches that one pool may run at a time: memory is taken for each before there is any."""


def require_slots(workers: int, threads: int) -> None:
    """Refuse a pool that would take the memory before anything is served.

    Raises:
        ConfigError: It would have more than `MAX_SLOTS` slots.
    """
    if workers * threads > MAX_SLOTS:
        found = f"{workers} workers with {threads} threads each"
        raise ConfigError(f"expected at most {MAX_SLOTS} slots for a model or op, got {found} ({workers * threads})")


class PoolStatistics(msgspec.Struct, frozen=True):
    """What a pool tells about itself; also the source of its metrics.

    Attributes:
        slots: Batches it could run at a time if every worker were up; of workers that seat streams, their seats.
        idle: Slots that could take a batch now.
        restarts: Workers replaced since the start.
        alive: Workers that are up.
        joined: Workers that ever came, where they come by themselves.
        left: Those of them that are gone.
        problem: Why a worker cannot be replaced, or is not healthy; empty if nothing is wrong.
        devices: What each worker runs on, as a person wrote it; none if nobody did.
        wanted: Workers that there should be now; None where nobody decides that.
        may_sleep: Whether it may have no worker and start one when a request comes.
        unhealthy: Of the workers that are up, those whose model says that it cannot answer; None if it is never asked.
    """

    slots: int
    idle: int
    restarts: int = 0
    alive: int = 0
    joined: int = 0
    left: int = 0
    problem: str = ""
    devices: tuple[str, ...] = ()
    wanted: int | None = None
    may_sleep: bool = False
    unhealthy: int | None = None

    @property
    def can_answer(self) -> bool:
        """Whether a request would be answered: by a worker that is up and healthy, or by one that starts for it."""
        return self.alive > (self.unhealthy or 0) or (self.may_sleep and not self.problem)


class StartUp(msgspec.Struct, frozen=True):
    """How far workers are that start.

    Attributes:
        up: Workers that are up.
        starting: Workers that start.
        since_s: How long ago the first of these was started.
        start_s: How long a start takes, as far as was seen.
    """

    up: int
    starting: int
    since_s: float
    start_s: float


class Pool:
    """Workers of one kind that run the batches of one endpoint. Lives on one event loop.

    Attributes:
        idle: Slots that could take a batch now.
        places: Where bodies land that all its workers can read there; None where they cannot.
        is_elsewhere: Whether another server batches what it is given, and counts batches, queue and workers.
        can_rest: Whether its workers use the cores of this process, and `rest` hears them.
        answers_apart: Whether entries of a batch are answered as they end: `done` gets batches made of some of them.
        accounts: Those of its server; None until an endpoint of one that keeps them starts it.
        bounds: Within which the number of its workers follows the load; None where it is fixed.
        health: Asks its workers how they are; None where their model does not say.
        row_s: Seconds in which a row is answered, as another server says that has the workers; 0 if none does.
    """

    accounts: Accounts | None = None
    health: HealthChecks | None = None
    row_s: float = 0.0
    bounds: WorkerRange | None = None
    places: Places | None = None
    is_elsewhere: ClassVar[bool] = False
    can_rest: ClassVar[bool] = False
    answers_apart: ClassVar[bool] = False

    def __init__(self) -> None:
        """Begin without a slot."""
        self.idle: int = 0
        self._on_idle: Callable[[], None] = lambda: None

    @property
    def room(self) -> int | None:
        """Rows that a batch may have to join streams that run; None if the next one begins where nothing runs."""
        return None

    @property
    def is_full(self) -> bool:
        """Whether it would refuse what it is given now, because a queue behind it is full."""
        return False

    @property
    def standing(self) -> int:
        """Rows that wait in workers for a seat."""
        return 0

    def watch(self, on_idle: Callable[[], None]) -> None:
        """Call this on the loop whenever a slot became idle by itself (a worker came back)."""
        self._on_idle = on_idle

    def checked(self) -> Sequence[int]:
        """Return the numbers of the workers that are to be asked how they are; see `health`."""
        return (0,)

    def check(self, worker: int, batch: EntryBatch, done: Done) -> bool:
        """Give a check to an idle slot of a worker; False if it has none."""
        raise NotImplementedError

    def replace(self, worker: int) -> bool:
        """Replace an unhealthy worker as one that died; False where only processes could be."""
        return False

    def _with_health(self, told: PoolStatistics, up: Collection[int], threads: int = 1) -> PoolStatistics:
        """Add which of the workers that are up, of so many threads each, are not healthy."""
        if self.health is None:
            return told
        found = self.health.unhealthy(up)
        return msgspec.structs.replace(told, unhealthy=len(found) * threads, problem=told.problem or "".join(found[:1]))

    def wake(self) -> None:
        """Note that a slot became idle without an answer: a check of its worker is over."""
        self._on_idle()

    async def start(self) -> None:
        """Bring up all workers.

        Raises:
            ModelError: If a runner could not be opened.
            ConfigError: If its own opening says that something is written wrong.
        """
        raise NotImplementedError

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give a batch to an idle slot. `done` is called on the loop, exactly once for each entry, whatever happens."""
        raise NotImplementedError

    def abandon(self, entry: Entry) -> None:
        """Note that nobody waits for an entry that is answered apart; `done` is called all the same."""

    @property
    def slots_each(self) -> int:
        """Batches, or rows of streams, that one worker runs at a time."""
        return 1

    def resize(self, workers: int) -> None:
        """Have so many workers: start further ones, or stop some once they have answered; see `bounds`."""
        raise NotImplementedError

    def start_up(self, now: float) -> StartUp:
        """Return how far the starts of workers are; see `bounds`."""
        raise NotImplementedError

    def awaited(self, now: float) -> tuple[float, int] | None:
        """Return in how many seconds a worker is up, and the slots that come then; None if one is, or nobody knows."""
        return None

    def rest(self, seconds: float) -> None:
        """Block until a worker has something to say, but no longer than this; see `can_rest`."""
        raise NotImplementedError

    def hand_on_tokens(self, tenant: Tenant | None, prompt: int, completion: int) -> None:
        """Have the server that has the workers charge tokens to a tenant; for pools that are elsewhere."""

    def inside(self) -> Inside | None:
        """Return what predicts how long entries take once they were submitted; None if batches simply run."""
        return None

    def whereabouts(self, entry: Entry) -> str:
        """Tell where an entry is, as an end of the sentence that its time was over; empty if it just runs."""
        return ""

    async def stop(self, grace_s: float) -> None:
        """Let running batches end within `grace_s` seconds, then end the workers."""
        raise NotImplementedError

    def statistics(self) -> PoolStatistics:
        """Return a snapshot."""
        raise NotImplementedError


def not_opened(error: ForebayError) -> ForebayError:
    """Return what a pool raises when a runner could not be opened: what a person wrote wrong stays that."""
    if isinstance(error, ConfigError):
        return ConfigError(error.message, detail=error.detail)
    return ModelError(error.message, detail=error.detail, trace=error.trace)
