# SPDX-License-Identifier: Apache-2.0
"""Streams whose steps are made in one call, as a worker with seats sees them, and async generators side by side."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from forebay.types.call import Failure, Outcome
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.user_code import aclose, attempt, attempt_async, settled

log = logging.getLogger("forebay.workers")

END_S: Final = 0.05
"""Time an async generator has to end while the others wait; one that needs more goes on beside them."""
LATE_S: Final = 5.0
"""Time it has in all; one that has not ended by then is left behind."""

_END: Final = object()

Watch: TypeAlias = "Callable[[Callable[[], object]], Callable[[], object]]"
"""Given what to call, on the running loop, once the server has said something; returns what is to be called when that
is not of interest any more."""


@runtime_checkable
class JointStreams(Protocol):
    """Streams of one batch whose steps can be made in one call with those of others."""

    @property
    def mates(self) -> Hashable:
        """What is equal for those that can be stepped together."""
        ...

    def together(self, streams: Sequence[Any]) -> Callable[[], Any]:
        """Return what makes one step of these streams, of which this is the first, as often as it is called.

        Returns:
            A function that returns a `Stepped` for each, or an `Even`; or something to wait for that gives these.
        """
        ...


class Stepped(msgspec.Struct, gc=False):
    """What one step made of a batch.

    Attributes:
        parts: One for each item, None where there is none; None if there is none at all.
        outcomes: One for each item if all of them have ended; else None.
    """

    parts: Sequence[Any] | None = None
    outcomes: Sequence[Outcome] | None = None


class Even(msgspec.Struct, gc=False):
    """A step in which every stream, each of one request, got one part.

    Attributes:
        parts: One for each stream.
        over: The places of streams that have ended with it, in order.
    """

    parts: Sequence[Any]
    over: Sequence[int] = ()


class SideBySide:
    """An async generator: it runs beside others, and a step is what any of them have made by then.

    Attributes:
        steps: The generator.
        task: Waits for its next part.
        context: What it runs in.
        watch: Ends a wait for the next part when the server has said something; None if nobody could join.
        late: Waits for its end, where that takes long.
    """

    mates = "side by side"

    def __init__(
        self, steps: AsyncIterator[Any], count: int, *, wait: Callable[[Coroutine[Any, Any, Any]], Any] | None = None
    ) -> None:
        """Begin.

        Args:
            steps: The generator.
            count: Items in its batch.
            wait: Runs a coroutine, where whoever drives the seats cannot.
        """
        self.steps = steps
        self._count = count
        self._wait = wait
        self.watch: Watch | None = None
        self.task: asyncio.Task[Any] | None = None
        self.late: asyncio.Task[None] | None = None
        self.context = contextvars.copy_context()

    def together(self, streams: Sequence[SideBySide]) -> Callable[[], Any]:
        """Return what waits for the first of these, or until something else is to be done."""
        return functools.partial(self._step, streams)

    def _step(self, streams: Sequence[SideBySide]) -> Any:
        first = self._first(streams)
        return first if self._wait is None else self._wait(first)

    def close(self) -> Any:
        """End the generator."""
        probe.set(None)  # that nobody waits is no reason not to end it
        end = self._end()
        return end if self._wait is None else self._wait(end)

    @property
    def is_late(self) -> bool:
        """Whether it was told to end, and still does."""
        return self.late is not None and not self.late.done()

    def outlast(self, streams: Sequence[SideBySide], *, wait: bool) -> Any:
        """Have generators that are late go on: for a moment, or until one has ended or something else is to be done."""
        probe.set(None)
        rest = self._rest([one.late for one in streams if one.late is not None], wait=wait)
        return rest if self._wait is None else self._wait(rest)

    async def _rest(self, late: Sequence[asyncio.Task[None]], *, wait: bool) -> None:
        if wait:
            await self._any_of(late)
        else:
            await asyncio.wait(late, timeout=0.0)

    async def _first(self, streams: Sequence[SideBySide]) -> list[Stepped]:
        loop = asyncio.get_running_loop()
        waits: set[asyncio.Future[Any]] = set()
        for one in streams:
            if one.task is None:
                one.task = loop.create_task(_next_of(one.steps), context=one.context)
            waits.add(one.task)
        await self._any_of(waits)
        return [one.made() for one in streams]

    async def _any_of(self, tasks: Iterable[asyncio.Future[Any]]) -> None:
        """Wait for the first of these, or until something else is to be done."""
        if self.watch is None:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return
        said: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        forget = self.watch(lambda: said.done() or said.set_result(None))
        try:
            await asyncio.wait({*tasks, said}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            forget()

    def made(self) -> Stepped:
        """Return what it has made since it was asked."""
        task = self.task
        if task is None or not task.done():
            return Stepped()
        self.task = None
        made: Any = attempt(task.result)
        if made is _END:
            return Stepped(None, [None] * self._count)
        parts: Any = made if type(made) is Failure else attempt(settled, made, self._count)
        return Stepped(None, [parts] * self._count) if type(parts) is Failure else Stepped(parts[0])

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        ending = loop.create_task(self._close(), context=self.context)
        if (await asyncio.wait([ending], timeout=END_S))[1]:
            self.late = loop.create_task(_outlive(ending))
            if self.watch is None:
                await self.late

    async def _close(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.wait([self.task])
        await aclose(self.steps)


async def _outlive(ending: asyncio.Task[None]) -> None:
    if (await asyncio.wait([ending], timeout=LATE_S - END_S))[1]:
        log.warning("an async generator did not close within %g s; abandoning it", LATE_S)


async def _next_of(steps: AsyncIterator[Any]) -> Any:
    return await attempt_async(anext, steps, _END)  # a loop would end of what a task raises, if it is SystemExit
