# SPDX-License-Identifier: Apache-2.0
"""S and C: one queue. In C the owner of the model holds it; fronts forward to it, and it sends batches to workers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.policies.placement.scenario import Scenario
from benchmarks.policies.placement.simulation import Request, Simulation, by_front


@dataclass
class Shard:
    """An owner, and what it knows of its workers.

    Attributes:
        idle: Workers without a batch.
        single: Workers with one batch, the earliest sent first.
        free_s: When its CPU has done all that has come.
    """

    number: int
    idle: deque[int]
    single: dict[int, None] = field(default_factory=dict)
    queue: deque[Request] = field(default_factory=deque)
    free_s: float = 0.0


class OneOwner(Simulation):
    """C. With several shards a front chooses the one with the shortest queue, as far as it knows."""

    name = "C"
    is_ahead = False

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        count = scenario.shards
        self.shards = [Shard(number, deque(range(number, scenario.workers, count))) for number in range(count)]
        self.cpu_s = [0.0] * count
        self.lines = [deque[list[Request]]() for _ in range(scenario.workers)]
        # What a front was told with the last answers, and what it has sent since.
        self.known = [[0] * count for _ in range(scenario.fronts)] if count > 1 else []

    def arrive(self, request: Request) -> None:
        number = self._shortest(request.front) if self.known else 0
        self.send(self._reach, self.shards[number], request)

    def _shortest(self, front: int) -> int:
        known = self.known[front]
        least = min(known)
        number = self.choice.choice([number for number, length in enumerate(known) if length == least])
        known[number] += 1
        return number

    def _spend(self, shard: Shard, frames: int, seats: int, action: Callable[..., None], *args: object) -> None:
        """Do something once the owner's CPU has come to it."""
        took_s = frames * self.scenario.frame_s + seats * self.scenario.seat_s
        self.cpu_s[shard.number] += took_s
        shard.free_s = max(shard.free_s, self.now) + took_s
        self.at(shard.free_s, action, *args)

    def _reach(self, shard: Shard, request: Request) -> None:
        self._spend(shard, 1, 1, self._enter, shard, request)

    def _enter(self, shard: Shard, request: Request) -> None:
        shard.queue.append(request)
        self._dispatch(shard)

    def _dispatch(self, shard: Shard) -> None:
        while shard.queue and (worker := self._next_worker(shard)) is not None:
            self._spend(shard, 1, 0, self._forward, shard, worker, self.take(shard.queue))

    def _next_worker(self, shard: Shard) -> int | None:
        """Return who gets the next batch; a busy worker only gets one ahead if it is full: nothing could join it."""
        if shard.idle:
            worker = shard.idle.popleft()
            shard.single[worker] = None
            return worker
        if self.is_ahead and shard.single and len(shard.queue) >= self.scenario.cost.max_size:
            worker = next(iter(shard.single))
            del shard.single[worker]
            return worker
        return None

    def _forward(self, shard: Shard, worker: int, batch: list[Request]) -> None:
        self.send(self._begin, shard, worker, batch)

    def _begin(self, shard: Shard, worker: int, batch: list[Request]) -> None:
        line = self.lines[worker]
        line.append(batch)
        if len(line) == 1:
            self.execute(batch, self._end, shard, worker)

    def _end(self, shard: Shard, worker: int) -> None:
        line = self.lines[worker]
        self.send(self._return, shard, worker, line.popleft())
        if line:
            self.execute(line[0], self._end, shard, worker)

    def _return(self, shard: Shard, worker: int, batch: list[Request]) -> None:
        groups = by_front(batch)
        self._spend(shard, 1 + len(groups), 0, self._answered, shard, worker, groups)

    def _answered(self, shard: Shard, worker: int, groups: dict[int, list[Request]]) -> None:
        if worker in shard.single:
            del shard.single[worker]
            shard.idle.append(worker)
        else:
            shard.single[worker] = None
        for front, part in groups.items():
            self.send(self._hear, shard.number, front, part, len(shard.queue))
        self._dispatch(shard)

    def _hear(self, shard: int, front: int, part: Sequence[Request], waiting: int) -> None:
        if self.known:
            self.known[front][shard] = waiting
        self.answer(part)


class OneOwnerAhead(OneOwner):
    """C, where a busy worker gets its next batch ahead as soon as a full one waits."""

    name = "C, one ahead"
    is_ahead = True


class OneQueue(OneOwner):
    """S: the same queue, no network and no CPU time; what the other designs are compared with."""

    name = "S"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(replace(scenario, way_s=0.0, frame_s=0.0, seat_s=0.0, shards=1))
