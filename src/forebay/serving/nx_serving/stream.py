# SPDX-License-Identifier: Apache-2.0
"""The answers of a started serving one by one, for threads and for tasks.

Theory of operation. A stream hands in its rows a few batches ahead of what its consumer has taken, so a slow consumer
holds back nothing but its own rows. Values of hooks are different: they come while a batch runs, which its callers
share. A consumer that has not taken `MAX_EVENTS` of them makes that batch wait, for up to `PATIENCE_S`, or up to
`HURRY_S` in total if that holds up anybody; then its stream ends with an error and the batch goes on.

A stream may be consumed from any thread or task; it is not tied to the one that made it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import DeadlineExceeded
from forebay.serving.nx_serving.dispatch import NEVER, Submission

if TYPE_CHECKING:
    from forebay.arrays.array_batch import Batch
    from forebay.serving.nx_serving.partitions import Partitions

    Event = tuple[Any, ...]

MAX_EVENTS: Final = 16
"""Events a stream holds that its consumer has not taken."""

AHEAD: Final = MAX_EVENTS // 2
"""Batches a stream hands in before its consumer asks for them; the rows of one may be spread over two."""

PATIENCE_S: Final = 30.0
"""How long a running batch waits for a consumer that does not take the values of its hooks."""

HURRY_S: Final = 2.0
"""How long it does in sum where others wait for that batch, or for its partition."""


class Inbox:
    """Where a stream learns that something came: the waiter of all of its calls."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._has_changed = False
        self._events: deque[Event] = deque()
        self._spent_s = 0.0
        self.is_closed = False
        self.is_late = False

    def put(self, event: Event, others_wait: Callable[[], bool]) -> None:
        """Add the value of a hook; waits while there is no room, but not as long if that holds up others."""
        with self._changed:
            if not self._has_room():
                self._wait_for_room(others_wait)
            if not self.is_closed:
                self._events.append(event)
        self.release()

    def _has_room(self) -> bool:
        return self.is_closed or len(self._events) < MAX_EVENTS

    def _wait_for_room(self, others_wait: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not self._changed.wait_for(self._has_room, min(HURRY_S - self._spent_s, PATIENCE_S)):
            if others_wait() or time.monotonic() - began >= PATIENCE_S:
                self.is_closed = self.is_late = True
                return
            self._spent_s = 0.0  # nobody was held up
        if others_wait():
            self._spent_s = min(self._spent_s + time.monotonic() - began, HURRY_S)

    def release(self) -> None:
        """Tell the consumer to look again."""
        with self._changed:
            self._has_changed = True
            self._changed.notify_all()

    def pop(self) -> Event | None:
        """Return the next value of a hook."""
        with self._changed:
            if not self._events:
                return None
            self._changed.notify_all()
            return self._events.popleft()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until something came; returns False if nothing did."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._has_changed, timeout_s)
            self._has_changed = False
            return came

    def close(self) -> None:
        """Take nothing any more: the consumer is gone."""
        with self._changed:
            self.is_closed = True
            self._events.clear()
            self._changed.notify_all()


class AsyncInbox(Inbox):
    """An inbox whose consumer is a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._came = asyncio.Event()

    def release(self) -> None:
        """Tell the consumer to look again."""
        try:
            self._loop.call_soon_threadsafe(self._came.set)
        except RuntimeError:  # the loop is closed: its tasks are gone
            pass

    async def wait_async(self, timeout_s: float | None) -> bool:
        """Wait until something came; returns False if nothing did."""
        try:
            await asyncio.wait_for(self._came.wait(), timeout_s)
        except TimeoutError:
            return False
        self._came.clear()
        return True


class _Feed:
    """The calls of one stream, in the order of its rows."""

    def __init__(
        self,
        partitions: Partitions,
        inbox: Inbox,
        call: Callable[[Batch, Any, float], Submission],
        ahead: int,
        deadline: float,
    ) -> None:
        self._partitions = partitions
        self._inbox = inbox
        self._call = call
        self._ahead = ahead
        self._deadline = deadline
        self._calls: deque[Submission] = deque()
        self._has_begun = False
        self._has_more = True
        self._taken = 0

    @property
    def wants(self) -> bool:
        """Whether a further batch is to be handed in now."""
        return self._has_more and len(self._calls) < self._ahead

    @property
    def is_over(self) -> bool:
        return not self._calls and not self._has_more

    def take(self, batch: Batch | None) -> None:
        """Hand in a batch, None if there is none left; if the queue has no room, only the first one is refused."""
        if batch is None:
            self._has_more = False
            return
        call = self._call(batch, self._inbox, self._deadline)
        self._partitions.submit(call, patient=self._has_begun)
        self._has_begun = True
        self._calls.append(call)

    def poll(self) -> Event | None:
        """Return the next event, or None if there is none now; raises what the stream ends with."""
        while self._calls:
            call = self._calls[0]
            # In this order: what is seen of the call later is at least as new, and the values of its hooks were all in
            # the inbox before any of its rows were answered.
            is_over = call.done
            piece = call.slices[self._taken] if self._taken < len(call.slices) else None
            event = self._inbox.pop()
            if event is not None:
                return event
            if piece is not None:
                self._taken += 1
                return "batch", piece.output(), piece.executed.metadata
            if self._inbox.is_late:
                msg = "the values of hooks were taken so slowly that the batch went on without this stream"
                raise DeadlineExceeded(msg)
            if not is_over:
                return None
            if call.error is not None:
                raise call.own_error() from call.error.__cause__
            self._calls.popleft()
            self._taken = 0
        return None

    def left_s(self) -> float | None:
        """Return how long to wait for the next event; raises a `DeadlineExceeded` if the stream's time is over."""
        if self._deadline == NEVER:
            return None
        left_s = self._deadline - time.monotonic()
        if left_s <= 0.0:
            raise DeadlineExceeded("the stream's time was over before all of its rows were executed")
        return min(left_s, threading.TIMEOUT_MAX)

    def close(self) -> None:
        """Let go of everything."""
        self._inbox.close()
        for call in self._calls:
            self._partitions.cancel(call)
            call.error = None  # it refers to the frame that was given the sink of the hooks, and that to the call
        self._calls.clear()


def stream(
    partitions: Partitions,
    batches: Iterator[Batch],
    call: Callable[[Batch, Any, float], Submission],
    ahead: int,
    deadline: float,
) -> Iterator[Event]:
    """Yield the events of some batches, in the order of their rows.

    Args:
        batches: Rows, each batch at most as large as the serving's.
        call: Makes a call of a batch, a waiter and a deadline.
        ahead: How many of the batches may be under way.
    """
    inbox = Inbox()
    feed = _Feed(partitions, inbox, call, ahead, deadline)
    try:
        while True:
            while feed.wants:
                feed.take(next(batches, None))
            event = feed.poll()
            if event is not None:
                yield event
            elif feed.is_over:
                return
            elif not feed.wants:
                inbox.wait(feed.left_s())
    finally:
        feed.close()


async def stream_async(
    partitions: Partitions,
    batches: AsyncIterator[Batch],
    call: Callable[[Batch, Any, float], Submission],
    ahead: int,
    deadline: float,
) -> AsyncIterator[Event]:
    """Yield the events of some batches, in the order of their rows; see `stream`."""
    inbox = AsyncInbox(asyncio.get_running_loop())
    feed = _Feed(partitions, inbox, call, ahead, deadline)
    try:
        while True:
            while feed.wants:
                feed.take(await anext(batches, None))
            event = feed.poll()
            if event is not None:
                yield event
            elif feed.is_over:
                return
            elif not feed.wants:
                await inbox.wait_async(feed.left_s())
    finally:
        feed.close()
