# SPDX-License-Identifier: Apache-2.0
"""One call of a serving of another program, on its caller's side.

Theory of operation. A call lives on two threads. On the loop of the cluster it is sent to one member after the other
until one takes it, and what comes back is put down. Its caller, a thread or a task, waits at `inbox`, takes what is
there, and hands over the items of an input that is streamed. Nothing is sent a second time once a part of the answer,
or an item of the input, has gone over.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from forebay.cluster.call_params import NOT_TAKEN, CallParams
from forebay.cluster.choice import Tries
from forebay.errors import Cancelled, DeadlineExceeded, ForebayError, ServingStopped, Unavailable
from forebay.types.batch import EntryBatch
from forebay.types.call import EMPTY, Failure, Request
from forebay.types.failures import without_frames

if TYPE_CHECKING:
    from forebay.cluster.directory import Directory
    from forebay.cluster.member_links import MemberLinks
    from forebay.owners.owner_pool import OwnerSlot
    from forebay.serving.nx_serving.stream import Inbox

NEVER: Final = float("inf")
_numbers: Final = itertools.count(1)


class RemoteCall:
    """One call.

    Attributes:
        parts: Parts of the answer that its caller has not taken, each with what is called once it has.
        is_streamed: Whether the answer is streamed.
        outcome: What came of it, once `is_over`: buffers, None at the end of a stream, or a `Failure`.
        is_over: Whether nothing more comes.
        wants_item: Whether the next item of the input can be sent.
    """

    def __init__(
        self, name: str, body: list[Any] | None, deadline: float, inbox: Inbox, on_end: Callable[[RemoteCall], object]
    ) -> None:
        """Describe it.

        Args:
            body: Its input; None if that is streamed.
            deadline: When the answer is of no use any more, in seconds of `time.monotonic`.
            on_end: Called once nothing more comes.
        """
        self.parts: deque[tuple[Any, Callable[[], object]]] = deque()
        self.is_streamed = False
        self.outcome: Any = None
        self.is_over = False
        self.wants_item = False
        self._name = name
        self._number = 0 if body is not None else next(_numbers)
        self._body = body or []
        self._deadline = deadline
        self._inbox = inbox
        self._on_end = on_end
        self._has_fed = False
        self._slot: OwnerSlot | None = None
        self._taken: asyncio.Future[Any] | None = None
        self._task: asyncio.Task[None] | None = None

    def begin(self, links: MemberLinks, directory: Directory, chance: Callable[[], float]) -> None:
        """Send it; on the loop, as all that follows."""
        if not self.is_over:
            tries = Tries(self._name, directory, chance, links.avoided)
            self._task = asyncio.get_running_loop().create_task(self._run(links, tries))

    def cancel(self) -> None:
        """End the call: its caller no longer waits."""
        self.abort(Cancelled("the call was cancelled"))

    def abort(self, error: ForebayError) -> None:
        """End it now, wherever it is."""
        if self._task is not None:
            self._task.cancel()
        self.end(Failure(error))

    def feed(self, item: list[Any] | None) -> None:
        """Send an item of the input, or None at its end."""
        slot = self._slot
        if slot is None or self.is_over:
            return
        params = CallParams(feeds=self._number, is_last=item is None)
        self._has_fed = True
        batch = EntryBatch([self._request(item or [], params)], None, 1)
        slot.run(batch, lambda _batch, _outcomes: self._ask_for_item(is_more=item is not None))

    def end(self, outcome: Any) -> None:
        """Nothing more comes."""
        if not self.is_over:
            self.outcome = outcome
            self.is_over = True
            self._slot = None
            self._on_end(self)
            self._inbox.release()

    async def _run(self, links: MemberLinks, tries: Tries) -> None:
        left_s = None if self._deadline == NEVER else max(self._deadline - time.monotonic(), 0.0)
        try:
            async with asyncio.timeout(left_s):
                outcome = await self._tried(links, tries)
        except TimeoutError:
            outcome = Failure(DeadlineExceeded("the time of the call was over before its answer came"))
        self.end(outcome)

    async def _tried(self, links: MemberLinks, tries: Tries) -> Any:
        while (member := tries.next()) is not None:
            slot = await links.reach(member, self._name)
            if isinstance(slot, str):
                tries.failed(slot)
                continue
            outcome = await self._asked(slot)
            error = outcome.error if type(outcome) is Failure else None
            if error is None or not (error.detail == NOT_TAKEN or isinstance(error, ServingStopped)):
                return outcome
            why = f"{member.address} {error.message}"
            if self.is_streamed or self._has_fed:
                return Failure(Unavailable(f"the call was not over, and is not sent to another member: {why}"))
            tries.failed(why)
        return Failure(without_frames(tries.error()))

    async def _asked(self, slot: OwnerSlot) -> Any:
        """Send it to a member, and return what came of it there."""
        taken = self._taken = asyncio.get_running_loop().create_future()
        request = self._request(self._body, CallParams(opens=self._number))
        batch = EntryBatch([request], None, 1, on_steps=self._hear)
        slot.run(batch, lambda _batch, outcomes: _settle(taken, outcomes[0]))
        if self._number:
            self._slot = slot
            self._ask_for_item(is_more=True)
        try:
            return await taken
        except BaseException:
            batch.cancelled = True
            slot.seating.abandon(request)
            raise

    def _request(self, body: list[Any], params: CallParams) -> Request:
        return Request(body, _nobody, msgspec.to_builtins(params) or EMPTY, deadline=self._deadline)

    def _hear(self, steps: Sequence[Sequence[Any]], release: Callable[[], object]) -> None:
        """Put parts of the answer down."""
        if not self.is_streamed:
            self.is_streamed = True
            steps = steps[1:]
            if not steps:
                release()
        for place, (part,) in enumerate(steps):
            self.parts.append((part, release if place == len(steps) - 1 else _nothing))
        self._inbox.release()

    def _ask_for_item(self, *, is_more: bool) -> None:
        self.wants_item = is_more
        self._inbox.release()


def _settle(taken: asyncio.Future[Any], outcome: Any) -> None:
    if not taken.done():
        taken.set_result(outcome)


def _nobody(_request: Request, _outcome: Any) -> None:
    """Do nothing: the front learns what becomes of the request."""


def _nothing() -> None:
    """Do nothing: no producer waits until this part was taken."""
