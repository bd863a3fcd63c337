# SPDX-License-Identifier: Apache-2.0
"""The servings of this program, as other members call them.

Theory of operation. An ordinary call is a task on the loop: it waits for its batch without a thread, and what is the
user's (client pre- and postprocessing, distributed postprocessing) runs in a few threads beside the loop. A call that
streams has a thread of its own, see `threaded_call.py`. What one caller may have under way at a time is bounded, so
that none takes the threads and the memory of the others; its further streams wait.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from forebay.cluster.call_params import NOT_TAKEN, CallParams, read_params, require_call
from forebay.cluster.packed_values import pack_value, unpack_value
from forebay.cluster.threaded_call import ANSWER_CURE, InputFeed, ThreadedCall, has_coroutines
from forebay.errors import Cancelled, DeadlineExceeded, InvalidRequest, QueueFull, ServingNotFound
from forebay.owners.caller_link import Callee, CalleeHost
from forebay.server.byte_budget import ByteBudget
from forebay.serving.nx_serving import registry
from forebay.types.call import Failure, Request
from forebay.workers.user_calls.hanging_calls import Late, LoopThreads
from forebay.workers.user_calls.user_code import attempt_async, user_code
from forebay.workers.wire import frames

if TYPE_CHECKING:
    from forebay.serving.nx_serving.started_serving import ServingProcess

HOOK_THREADS: Final = 32
"""Threads in which pre- and postprocessing run."""
MAX_CALLS: Final = 4096
"""Calls of one serving that one program may have under way."""
MAX_STREAMS: Final = 64
"""Those of them that may have a thread of their own; further ones wait."""
MAX_HOOK_S: Final = 86_400.0
"""Time after which pre- or postprocessing is left behind where the call has no deadline."""


class _Caller:
    """What one program has under way of one serving."""

    def __init__(self) -> None:
        self.streams = asyncio.Semaphore(MAX_STREAMS)
        self.threads = 0
        self.calls: dict[Request, _Call] = {}
        self.fed: dict[int, _Call] = {}


class _Call:
    """One call."""

    def __init__(self, params: CallParams, feed: InputFeed | None) -> None:
        self.params = params
        self.feed = feed
        self.task: asyncio.Task[None] | None = None


class ServingHost(CalleeHost):
    """Takes the calls of other members, which are programs of their own; is always up."""

    callers_count = False

    def __init__(self, max_frame_bytes: int, max_elements: int) -> None:
        """Begin without servings."""
        super().__init__("member", ByteBudget(), max_frame_bytes, max_elements)
        self.is_up = True
        self.budget.call_soon = asyncio.get_running_loop().call_soon
        self._described: Sequence[tuple[int, Any]] = []
        self._numbers: dict[str, int] = {}
        self._callers: dict[Any, _Caller] = {}
        self._threads = LoopThreads(HOOK_THREADS)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def described_on_wire(self) -> list[Any]:
        """What callers are told of all servings, as a frame."""
        return [frames.encode(["models", self._described])]

    def offer(self, names: Sequence[str]) -> None:
        """Take calls of these servings from now on. A name keeps its number: a caller may not know yet that it left."""
        for name in names:
            if name not in self._numbers:
                self._highest += 1
                self._numbers[name] = self._highest
                submit = functools.partial(self._submit_all, name)
                self._callees[self._highest] = Callee(1, True, lambda: None, submit, self._cancel, require_call)
        described = [(self._numbers[name], {"serving": name}) for name in names]
        if described != self._described:
            self._described = described
            for link in self.links:
                link.describe()

    async def close(self, grace_s: float) -> None:
        """Take no further calls, and give those under way time to end."""
        for link in self.links:
            link.drain()
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            pass  # their callers are told that the link was lost
        self.hang_up()
        self._threads.close()

    def require_params(self, params: Mapping[str, Any]) -> None:
        """Check what a caller says of a call; raises an `InvalidRequest` if it cannot be used."""
        read_params(params)

    def room(self, number: int) -> int:
        """Return for how many calls there is room; a serving that has none says so to each."""
        return MAX_CALLS

    def _submit_all(self, name: str, requests: Sequence[Request], _now: float) -> None:
        for request in requests:
            try:
                self._submit(name, request)
            except InvalidRequest as error:
                request.reply(request, Failure(error))

    def _submit(self, name: str, request: Request) -> None:
        params = read_params(request.params)
        caller = self._callers.get(request.reply)
        if params.feeds:
            call = None if caller is None else caller.fed.get(params.feeds)
            if call is None or call.feed is None:  # it is over
                request.reply(request, None)
            else:
                call.feed.put(request, is_last=params.is_last)
            return
        if caller is None:
            caller = self._callers[request.reply] = _Caller()
        if params.opens in caller.fed:
            raise InvalidRequest(f"it opens two calls as {params.opens}")
        if len(caller.calls) >= MAX_CALLS:
            text = f"{len(caller.calls)} calls of this program are under way at the member; try again later"
            request.reply(request, Failure(QueueFull(text)))
            return
        feed = InputFeed(request.deadline, lambda item: item.reply(item, None)) if params.opens else None
        call = caller.calls[request] = _Call(params, feed)
        if params.opens:
            caller.fed[params.opens] = call
        self._idle.clear()
        call.task = asyncio.get_running_loop().create_task(self._answer(name, request, caller, call))

    def _cancel(self, request: Request) -> None:
        caller = self._callers.get(request.reply)
        call = None if caller is None else caller.calls.get(request)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def _answer(self, name: str, request: Request, caller: _Caller, call: _Call) -> None:
        outcome: Any = Failure(Cancelled("the caller went away"))
        try:
            outcome = await attempt_async(self._executed, name, request, caller, call)
        except asyncio.CancelledError:
            pass  # nobody waits for it
        finally:
            if call.feed is not None:
                call.feed.end()
                caller.fed.pop(call.params.opens, None)
            del caller.calls[request]
            self._forget(request.reply, caller)
            request.reply(request, outcome)

    def _forget(self, desk: Any, caller: _Caller) -> None:
        """Keep nothing of a caller that has nothing under way."""
        if not caller.calls and not caller.threads:
            self._callers.pop(desk, None)
        if not self._callers:
            self._idle.set()

    async def _executed(self, name: str, request: Request, caller: _Caller, call: _Call) -> Any:
        process = registry.find(name)
        if process is None or process.is_forked:
            raise ServingNotFound(f"does not run {name!r} any more", detail=NOT_TAKEN)
        settings = process.settings
        if settings.streaming is not None or call.feed is not None or has_coroutines(settings):
            return await self._in_thread(process, request, caller, call)
        return await self._on_loop(process, request)

    async def _on_loop(self, process: ServingProcess[Any, Any], request: Request) -> list[Any]:
        beside = functools.partial(self._beside, request.deadline)
        body: list[Any] = request.body
        given = await beside(unpack_value, body) if len(body[0]) > frames.LONG_BYTES else unpack_value(body)
        moved = process.with_hooks_elsewhere(lambda hook: functools.wraps(hook)(functools.partial(beside, hook)))
        left_s = None if request.deadline == float("inf") else max(request.deadline - time.monotonic(), 0.0)
        result = await moved.batched_run_async(given, timeout_s=left_s)
        after = process.settings.distributed_postprocessing
        if after is not None:
            return await beside(lambda: _packed(after(result)))
        return _packed(result) if process.settings.client_postprocessing is None else await beside(_packed, result)

    async def _in_thread(
        self, process: ServingProcess[Any, Any], request: Request, caller: _Caller, call: _Call
    ) -> list[Any] | None:
        await caller.streams.acquire()
        caller.threads += 1
        ended: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def done(result: Any, error: BaseException | None) -> None:
            caller.streams.release()
            caller.threads -= 1
            self._forget(request.reply, caller)
            if not ended.done():
                ended.set_result((result, error))

        threaded = ThreadedCall(process, request, call.feed, done)
        threaded.start()
        try:
            result, error = await ended
        except BaseException:
            threaded.cancel()
            raise
        if error is not None:
            raise error
        return result

    async def _beside(self, deadline: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that may be the user's in a thread beside the loop.

        Raises:
            DeadlineExceeded: The time of the call was over.
            ForebayError: What it raised.
        """
        ended: asyncio.Future[tuple[Any, BaseException | None]] = asyncio.get_running_loop().create_future()

        def run() -> Any:
            with user_code():
                return function(*arguments)

        def done(result: Any, error: BaseException | None) -> None:
            if not ended.done():
                ended.set_result((result, error))

        calling = self._threads.call(run, min(deadline, time.monotonic() + MAX_HOOK_S), done)
        try:
            result, error = await ended
        except BaseException:
            calling.drop()
            raise
        if isinstance(error, Late):
            raise DeadlineExceeded("the time of the call was over in its pre- or postprocessing")
        if error is not None:
            raise error
        return result


def _packed(result: Any) -> list[Any]:
    return pack_value(result, "the answer", ANSWER_CURE)
