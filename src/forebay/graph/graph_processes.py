# SPDX-License-Identifier: Apache-2.0
"""A whole graph in each of several worker processes, behind one queue.

    server: Endpoint -> GraphProcesses            process: GraphRunner, one thread a request -> HostedGraph, on a loop

A process takes the next request when it has room for it, so that the load is spread by request and not by connection.
Anything else it has to report travels with its answers. A request whose client went away is called off inside of it;
the process is not ended, for others are inside as well.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from forebay.errors import Cancelled
from forebay.types.call import Failure
from forebay.workers.pools.process_pool import ProcessPool
from forebay.workers.runner import Runner, RunnerSpec
from forebay.workers.user_calls.cancel import is_cancelled
from forebay.workers.user_calls.user_code import attempt_async

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from forebay.types.batch import Done, EntryBatch
    from forebay.types.call import Item, Outcome
    from forebay.workers.pools.worker_slot import WorkerSlot
    from forebay.workers.runner import WorkerContext

log = logging.getLogger("forebay.graph")

LOOK_S: Final = 0.1
"""So often a request inside of a graph is asked whether anybody still waits for it."""
RUNS: Final = 2
"""Processes a request is given to at most: the second one if the first dies."""


class HostedGraph(Protocol):
    """A graph as its process drives it, on a loop."""

    async def start(self) -> None:
        """Bring up its nodes."""
        ...

    async def answer(self, item: Item) -> Outcome:
        """Answer a request, with bytes or with a list of them and a report: what the process has to say besides.

        It is cancelled once nobody waits for the answer.
        """
        ...

    async def stop(self) -> None:
        """Stop its nodes."""
        ...


class GraphRunner(Runner):
    """A whole graph on a loop of its own, in a thread beside those that bring the requests."""

    def __init__(self, make: Callable[[WorkerContext], HostedGraph]) -> None:
        """Say how the graph is made, in the loop's thread."""
        self._make = make
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="forebay-graph", daemon=True)
        self._graph: HostedGraph | None = None

    def open(self, ctx: WorkerContext) -> None:
        """Bring up the nodes."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(ctx), self._loop).result()

    def run(self, items: Sequence[Item]) -> Sequence[Outcome]:
        """Answer requests."""
        answers = [asyncio.run_coroutine_threadsafe(self._answer(item), self._loop) for item in items]
        return [_outcome(answer) for answer in answers]

    def close(self) -> None:
        """Stop the nodes."""
        if self._graph is not None:
            asyncio.run_coroutine_threadsafe(self._graph.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, ctx: WorkerContext) -> None:
        self._graph = self._make(ctx)
        await self._graph.start()

    async def _answer(self, item: Item) -> Outcome:
        assert self._graph is not None
        return await attempt_async(self._graph.answer, item)


def _outcome(answer: Future[Outcome]) -> Outcome:
    """Wait for an answer; once nobody else does, the request is called off and leaves the graph."""
    while True:
        try:
            return answer.result(LOOK_S)
        except TimeoutError:
            if is_cancelled():
                answer.cancel()
        except CancelledError:
            return Failure(Cancelled("nobody waits for the request any more"))


class GraphProcesses(ProcessPool):
    """Processes that host a graph each, and report beside their answers.

    Reports are taken here and not where requests are answered, so that a report also counts if nobody waits any more
    for the answer it came with.
    """

    def __init__(
        self,
        factory: str,
        arguments: Mapping[str, Any],
        reported: Callable[[Any], object],
        *,
        workers: int,
        threads: int,
        handover_s: float,
    ) -> None:
        """Describe the processes.

        Args:
            factory: Makes a `GraphRunner` in each, see `RunnerSpec`.
            arguments: Those of the factory. `given` is added: how many requests the processes before a new one were
                given at most, so that it numbers its own from there on.
            reported: Takes the report that came beside an answer.
            workers: How many there are.
            threads: Requests that each has room for.
            handover_s: How long what lost its process waits for another.
        """
        self._arguments = {**arguments, "given": 0}  # read by the pool whenever a process says hello
        spec = RunnerSpec(factory=factory, kwargs=self._arguments)
        super().__init__(spec, workers=workers, threads=threads, stuck_s=None, handover_s=handover_s, captures=False)
        self._reported = reported
        self._submitted = 0

    def greeted(self, slot: WorkerSlot, about: Mapping[str, Any]) -> None:
        """Tell a new process the first number that no process before it can have given out."""
        self._arguments["given"] = RUNS * self._submitted
        super().greeted(slot, about)

    def submit(self, batch: EntryBatch, done: Done) -> None:
        """Give a request to a process, and take the report from its answer."""
        self._submitted += 1
        super().submit(batch, functools.partial(self._answered, done))

    def _answered(self, done: Done, batch: EntryBatch, outcomes: Sequence[Any]) -> None:
        done(batch, [self._without_report(outcome) for outcome in outcomes])

    def _without_report(self, outcome: Any) -> Any:
        if not isinstance(outcome, list):
            return outcome
        answer, report = cast("list[Any]", outcome)
        try:
            self._reported(report)
        except Exception:  # it comes from a process with user code in it, and the answer beside it is good
            log.exception("what a process reported could not be written")
        return answer
