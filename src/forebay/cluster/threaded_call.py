# SPDX-License-Identifier: Apache-2.0
"""A call of another program that has a thread of its own here, since it reads its input or makes its answer bit by bit.

So has a call whose client pre- or postprocessing is a coroutine function: it runs on a loop of that thread.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from forebay.cluster.call_params import ITEMS_AHEAD, OPENING
from forebay.cluster.packed_values import pack_value, unpack_value
from forebay.errors import Cancelled, DeadlineExceeded, InvalidRequest
from forebay.workers.user_calls.user_code import caught, close, user_code

if TYPE_CHECKING:
    from forebay.serving.nx_serving.serving_options import ServingSettings
    from forebay.serving.nx_serving.started_serving import ServingProcess
    from forebay.types.call import Request

PARTS_AHEAD: Final = 4
"""Parts that may be on their way to the caller before the call waits."""
MAX_WAIT_S: Final = 1e6
ANSWER_CURE: Final = "bring it into that form with distributed_postprocessing, for example forebay.to_host"


class InputFeed:
    """The items of an input, as they arrive. `put` and `end` are for the loop, iterating is for the thread."""

    def __init__(self, deadline: float, taken: Callable[[Request], object]) -> None:
        """Begin without an item; `taken` is called on the loop with an item once there is room for the next."""
        self._deadline = deadline
        self._taken = taken
        self._loop = asyncio.get_running_loop()
        self._items: SimpleQueue[tuple[Request, bool] | None] = SimpleQueue()
        self._room = ITEMS_AHEAD
        self._unanswered: dict[Request, None] = {}

    def put(self, item: Request, *, is_last: bool) -> None:
        """Take an item, or the end of the input.

        Raises:
            InvalidRequest: The caller sends items without waiting until there is room.
        """
        if self._unanswered:
            raise InvalidRequest("it sends items of an input for which there is no room")
        self._items.put((item, is_last))
        self._room -= 1
        self._unanswered[item] = None
        self._answer()

    def end(self) -> None:
        """Nothing more is read: the call is over."""
        self._room = 1 << 40
        self._answer()
        self._items.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            found = self._items.get(timeout=min(max(self._deadline - time.monotonic(), 0.0), MAX_WAIT_S))
        except Empty:
            raise DeadlineExceeded("the time of the call was over before its input was") from None
        if found is None:
            self._items.put(None)
            raise Cancelled("the caller went away before its input was over")
        item, is_last = found
        if is_last:
            self._items.put(found)
            raise StopIteration
        self._loop.call_soon_threadsafe(self._make_room)
        return unpack_value(item.body)

    async def each(self) -> AsyncIterator[Any]:
        """Yield the items on a loop that has nothing else to do."""
        for item in self:
            yield item

    def _make_room(self) -> None:
        self._room += 1
        self._answer()

    def _answer(self) -> None:
        while self._room > 0 and self._unanswered:
            item = next(iter(self._unanswered))
            del self._unanswered[item]
            self._taken(item)


class ThreadedCall:
    """One call in its thread."""

    def __init__(
        self,
        process: ServingProcess[Any, Any],
        request: Request,
        feed: InputFeed | None,
        done: Callable[[Any, BaseException | None], object],
    ) -> None:
        """Describe it; on the loop.

        Args:
            feed: Its input, if that is streamed.
            done: Called on the loop once the thread has nothing more to do, with the buffers of the answer, None after
                a stream, or with what was raised.
        """
        self._process = process
        self._request = request
        self._feed = feed
        self._done = done
        self._loop = asyncio.get_running_loop()
        self._room = threading.Semaphore(PARTS_AHEAD)
        self._is_cancelled = False

    def start(self) -> None:
        """Begin."""
        threading.Thread(target=self._live, name="forebay-member-call", daemon=True).start()

    def cancel(self) -> None:
        """Note that the caller no longer waits: the call ends at its next part, or at the next item of its input."""
        self._is_cancelled = True
        self._room.release()

    def _live(self) -> None:
        result, error = caught(self._run)
        try:
            self._loop.call_soon_threadsafe(self._done, result, error)
        except RuntimeError:  # the loop is closed: this program has left the cluster
            pass

    def _run(self) -> Any:
        if has_coroutines(self._process.settings):
            with asyncio.Runner() as runner:
                return self._answered(runner.run(self._executed_async()), runner)
        given = unpack_value(self._request.body) if self._feed is None else self._feed
        with user_code():
            result = self._process.batched_run(given, timeout_s=self._left_s())
        return self._answered(result, None)

    async def _executed_async(self) -> Any:
        given = unpack_value(self._request.body) if self._feed is None else self._feed.each()
        with user_code():
            return await self._process.batched_run_async(given, timeout_s=self._left_s())

    def _answered(self, result: Any, runner: asyncio.Runner | None) -> Any:
        after = self._process.settings.distributed_postprocessing
        if after is not None:
            with user_code():
                result = after(result)
        if runner is not None and hasattr(result, "__anext__"):
            result = _taken_by(runner, result)
        if not hasattr(result, "__next__"):
            return pack_value(result, "the answer", ANSWER_CURE)
        try:
            self._send(OPENING)
            with user_code():
                for part in result:
                    self._send(pack_value(part, "a part of the answer", ANSWER_CURE))
        finally:
            close(result)
        return None

    def _send(self, part: list[Any]) -> None:
        """Send a part once there is room for it; raises a `Cancelled` if nobody waits for it."""
        self._room.acquire()
        if self._is_cancelled:
            raise Cancelled("the caller went away")
        self._loop.call_soon_threadsafe(self._pass_on, part)

    def _pass_on(self, part: list[Any]) -> None:
        if self._request.on_part is not None and not self._is_cancelled:
            self._request.on_part(part, self._room.release)

    def _left_s(self) -> float | None:
        deadline = self._request.deadline
        return None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)


def has_coroutines(settings: ServingSettings) -> bool:
    """Tell whether the client pre- or postprocessing needs a loop."""
    hooks = (settings.client_preprocessing, settings.client_postprocessing)
    return any(inspect.iscoroutinefunction(one) or inspect.isasyncgenfunction(one) for one in hooks)


def _taken_by(runner: asyncio.Runner, parts: Any) -> Iterator[Any]:
    """Yield the parts of a stream that is asynchronous."""
    try:
        while True:
            try:
                part = runner.run(_next(parts))
            except StopAsyncIteration:
                return
            yield part
    finally:
        end = getattr(parts, "aclose", None)
        if end is not None:
            runner.run(_ended(end))


async def _next(parts: Any) -> Any:
    return await anext(parts)


async def _ended(end: Callable[[], Any]) -> None:
    await end()
