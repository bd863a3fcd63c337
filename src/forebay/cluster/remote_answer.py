# SPDX-License-Identifier: Apache-2.0
"""What a caller gets of a call to another program: its result, or its parts one by one. For threads and for tasks.

Items of an input that is streamed are taken from the caller's iterator in the caller's own thread or task, one whenever
the member that executes has room for it, and only while the caller waits for something.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.arrays.array_batch import Batch
from forebay.arrays.libraries import find_kind
from forebay.cluster.packed_values import pack_value, unpack_value
from forebay.errors import InvalidRequest
from forebay.types.call import Failure

if TYPE_CHECKING:
    from forebay.cluster.remote_call import RemoteCall
    from forebay.serving.nx_serving.stream import AsyncInbox, Inbox

_CURE: Final = "bring it into that form with distributed_preprocessing, for example forebay.to_host"
_END: Final = object()


def input_of(given: Any) -> tuple[list[Any] | None, Any]:
    """Return the buffers of an input; or None, and the iterator whose items are to be sent one by one.

    Raises:
        InvalidRequest: It cannot be sent.
    """
    if isinstance(given, AsyncIterable):
        return None, aiter(cast("AsyncIterable[Any]", given))
    is_whole = isinstance(given, Batch | dict | list | tuple | str | bytes) or find_kind(given) is not None
    if not is_whole and isinstance(given, Iterable):
        return None, iter(cast("Iterable[Any]", given))
    return pack_value(given, "the input", _CURE), None


class _Answer:
    """What both kinds have in common."""

    def __init__(self, call: RemoteCall, items: Any, call_on_loop: Callable[..., object]) -> None:
        self._call = call
        self._items = items
        self._on_loop = call_on_loop

    def _is_begun(self) -> bool:
        return self._call.is_over or self._call.is_streamed

    def _has_more(self) -> bool:
        return bool(self._call.parts) or self._call.is_over

    def _wants_item(self) -> bool:
        return self._items is not None and self._call.wants_item

    def _feed(self, item: Any) -> None:
        """Send an item, or the end of the input."""
        self._call.wants_item = False
        packed = None if item is _END else pack_value(item, "an item of the input", _CURE)
        self._on_loop(self._call.feed, packed)

    def _result(self) -> Any:
        outcome = self._call.outcome
        if type(outcome) is Failure:
            raise outcome.error
        return unpack_value(outcome)

    def _taken(self) -> Any:
        """Return the next part, or `_END`; raises what the stream ends with."""
        if self._call.parts:
            part, release = self._call.parts.popleft()
            self._on_loop(release)
            return unpack_value(part)
        outcome = self._call.outcome
        if type(outcome) is Failure:
            raise outcome.error
        return _END

    def _drop(self) -> None:
        if not self._call.is_over:
            self._on_loop(self._call.cancel)

    def __del__(self) -> None:
        self._drop()  # a stream that was never begun, or not to its end


class BlockingAnswer(_Answer):
    """The answer to a thread. As an iterator it is the parts of one that is streamed."""

    def __init__(self, call: RemoteCall, items: Any, inbox: Inbox, call_on_loop: Callable[..., object]) -> None:
        """Take charge of a call that was begun.

        Args:
            items: An iterator of items of its input; None if that was sent.

        Raises:
            InvalidRequest: The items come from an asynchronous iterator.
        """
        super().__init__(call, items, call_on_loop)
        self._inbox = inbox
        if isinstance(items, AsyncIterable):
            self._drop()
            raise InvalidRequest("an async iterator can be given to batched_run_async only")

    def whole(self) -> Any:
        """Wait for the result; of an answer that is streamed, for its beginning, and return the stream.

        Raises:
            ForebayError: What came of the call.
        """
        try:
            self._wait_until(self._is_begun)
            return self if self._call.is_streamed else self._result()
        except BaseException:
            self._drop()
            raise

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            self._wait_until(self._has_more)
            part = self._taken()
        except BaseException:
            self._drop()
            raise
        if part is _END:
            raise StopIteration
        return part

    def close(self) -> None:
        """Take back what has not run."""
        self._drop()

    def _wait_until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            if self._wants_item():
                self._feed(next(self._items, _END))
            else:
                self._inbox.wait(None)


class AsyncAnswer(_Answer):
    """The answer to a task. As an async iterator it is the parts of one that is streamed."""

    def __init__(self, call: RemoteCall, items: Any, inbox: AsyncInbox, call_on_loop: Callable[..., object]) -> None:
        """Take charge of a call that was begun; see `BlockingAnswer`."""
        super().__init__(call, items, call_on_loop)
        self._inbox = inbox

    async def whole(self) -> Any:
        """Wait for the result, or for the beginning of the stream; see `BlockingAnswer.whole`."""
        try:
            await self._wait_until(self._is_begun)
            return self if self._call.is_streamed else self._result()
        except BaseException:
            self._drop()
            raise

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            await self._wait_until(self._has_more)
            part = self._taken()
        except BaseException:
            self._drop()
            raise
        if part is _END:
            raise StopAsyncIteration
        return part

    async def aclose(self) -> None:
        """Take back what has not run."""
        self._drop()

    async def _wait_until(self, is_there: Callable[[], bool]) -> None:
        while not is_there():
            if not self._wants_item():
                await self._inbox.wait_async(None)
            elif hasattr(self._items, "__anext__"):
                self._feed(await anext(self._items, _END))
            else:
                self._feed(next(self._items, _END))
