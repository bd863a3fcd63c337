# SPDX-License-Identifier: Apache-2.0
"""A stream of a model that has `start`, `step` and `finish`, and how the streams that are open make a step together.

`finish` is called exactly once for each state that `start` returned, however its stream ends.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Protocol, cast, final

from forebay.errors import BadOutcome
from forebay.types.call import Failure, Last
from forebay.types.failures import failure_in, failure_of
from forebay.workers.user_calls.cancel import probe
from forebay.workers.user_calls.joint_streams import Even, Stepped

log = logging.getLogger("forebay.workers")

MAX_SILENT: Final = 500
"""How many steps in a row may bring a stream nothing without a look at how long they took."""
IDLE_STEP_S: Final = 0.001
"""A model whose steps take less on average, so many times in a row, computes nothing in them."""

_warned: set[str] = set()
_NOTHING: Final = Stepped()
_ENDED: Final = Stepped(None, [None])


class Stepping(Protocol):
    """The runner of such a model; what its coroutine functions return is waited for."""

    @property
    def silent(self) -> dict[Stream, tuple[int, float]]:
        """Streams that got nothing in the last steps: in how many, and since when."""
        ...

    @property
    def awaits(self) -> bool:
        """Whether any of these may return something to wait for."""
        ...

    def step(self, states: list[Any]) -> Any:
        """Call the model's `step`."""
        ...

    def finish(self, state: Any) -> Any:
        """Call its `finish`, if there is one."""
        ...

    def postprocess(self, part: Any, stream: Stream) -> Any:
        """Call its `postprocess`, if there is one; what it raises is returned as a `Failure`."""
        ...

    def write(self, part: Any, params: Mapping[str, Any]) -> Any:
        """Return a part as it is sent to who asked with these params, or a `Failure`."""
        ...

    def writer(self, asked: Sequence[Mapping[str, Any]]) -> Callable[[Sequence[Any]], Sequence[Any] | None] | None:
        """Return what does that with a part for each of these, or gives None where any is not certainly right.

        None where there is no such thing, as where each part is to go through `postprocess`.
        """
        ...

    @property
    def model_name(self) -> str:
        """How errors call the model."""
        ...


@final
class Stream:
    """One stream, of one request."""

    def __init__(
        self,
        runner: Stepping,
        state: Any,
        params: Mapping[str, Any],
        told: Any,
        wait: Callable[[Awaitable[Any]], Any] | None = None,
    ) -> None:
        """Begin.

        Args:
            state: What `start` returned.
            told: The context of the request, if the model asks for it.
            wait: Waits for coroutines; None where whoever drives the streams does that himself.
        """
        self.mates = runner
        self.state = state
        self.params = params
        self.told = told
        self._wait = wait
        self._is_finished = False

    def together(self, streams: Sequence[Stream]) -> Callable[[], Any]:
        """Return what steps several streams; see `JointStreams`."""
        return _SharedStep(self.mates, streams, self._wait)

    def close(self) -> Any:
        """Let go of the state, once; what is returned has to be waited for if it can be."""
        if self._is_finished:
            return None
        self._is_finished = True
        self.mates.silent.pop(self, None)
        state, self.state = self.state, None
        finished = self.mates.finish(state)
        if self._wait is None or not inspect.isawaitable(finished):
            return finished
        probe.set(None)  # that nobody waits is no reason not to finish
        return self._wait(finished)


class _SharedStep:
    """The step that streams make together; what does not change from one to the next is found out once."""

    def __init__(
        self, runner: Stepping, streams: Sequence[Stream], wait: Callable[[Awaitable[Any]], Any] | None
    ) -> None:
        self._runner = runner
        self._streams = streams
        self._wait = wait
        self._states = [stream.state for stream in streams]
        self._write = None if runner.awaits else runner.writer([stream.params for stream in streams])

    def __call__(self) -> Any:
        """Make one step."""
        runner = self._runner
        if runner.awaits:
            steps = self._step_async()
            return steps if self._wait is None else self._wait(steps)
        parts = self._checked(runner.step(self._states.copy()))  # the list is the model's to change
        if self._write is not None:
            over, given = _last_of(parts)
            written = self._write(given)
            if written is not None:  # as nearly always
                if runner.silent:
                    runner.silent.clear()
                return Even(written, over)
        return [_step_of(runner, stream, part) for stream, part in zip(self._streams, parts, strict=True)]

    async def _step_async(self) -> list[Stepped]:
        runner = self._runner
        made = runner.step(self._states.copy())
        parts = self._checked(await made if inspect.isawaitable(made) else made)
        steps: list[Stepped] = []
        for stream, part in zip(self._streams, parts, strict=True):
            step = _step_of(runner, stream, part)
            steps.append(await step if inspect.isawaitable(step) else step)
        return steps

    def _checked(self, parts: Any) -> Sequence[Any]:
        """Return what `step` returned if that is one part for each stream.

        Raises:
            BadOutcome: Naming both numbers.
        """
        count = len(self._streams)
        is_list = type(parts) in {list, tuple}
        if is_list and len(parts) == count:
            return parts
        found = f"{len(parts)} parts" if is_list else f"a {type(parts).__name__}"
        raise BadOutcome(
            f"{self._runner.model_name}.step returned {found} for {count} states; return a list with one part for "
            "each, None where there is none"
        )


def _last_of(parts: Sequence[Any]) -> tuple[Sequence[int], Sequence[Any]]:
    """Return the places of parts that are the last of their streams, and all of them without that mark."""
    if Last not in map(type, parts):
        return (), parts
    over = [place for place, part in enumerate(parts) if type(part) is Last]
    return over, [cast("Any", part).part if type(part) is Last else part for part in parts]


def _step_of(runner: Stepping, stream: Stream, part: Any) -> Any:
    """Return what a part means for its stream; something to wait for if `postprocess` is a coroutine function."""
    is_last = type(part) is Last
    if is_last:
        part = cast("Any", part).part
    if part is None:
        return _ENDED if is_last else _nothing(runner, stream)
    runner.silent.pop(stream, None)
    if type(part) is Failure:
        return Stepped(None, [failure_in(part)])
    if isinstance(part, BaseException):
        return Stepped(None, [failure_of(part)])
    made = runner.postprocess(part, stream)
    if runner.awaits and made is not part and inspect.isawaitable(made):  # else it is no more than a part that is none
        return _written_async(runner, made, stream, is_last=is_last)
    return _written(runner, made, stream, is_last=is_last)


def _nothing(runner: Stepping, stream: Stream) -> Stepped:
    """Return what None means; where it comes again and again, an end was meant, and there would be none."""
    count, since = runner.silent.get(stream) or (0, time.monotonic())
    runner.silent[stream] = (count + 1, since)
    if count + 1 == MAX_SILENT:
        # What computes nothing is quick, but not always, where others have the processor.
        del runner.silent[stream]
        told = f"{runner.model_name}.step returned None {MAX_SILENT} times in a row for a stream"
        msg = f"{told}, which says that there is nothing this time; return Last(part), or Last(), where a stream ends"
        if time.monotonic() - since < MAX_SILENT * IDLE_STEP_S:
            return Stepped(None, [failure_of(BadOutcome(msg))])
        if runner.model_name not in _warned:
            _warned.add(runner.model_name)
            log.warning(msg)
    return _NOTHING


async def _written_async(runner: Stepping, made: Awaitable[Any], stream: Stream, *, is_last: bool) -> Stepped:
    return _written(runner, await made, stream, is_last=is_last)


def _written(runner: Stepping, part: Any, stream: Stream, *, is_last: bool) -> Stepped:
    if part is None:  # `postprocess` leaves it out
        return _ENDED if is_last else _NOTHING
    written = part if type(part) is Failure else runner.write(part, stream.params)
    if type(written) is Failure:
        return Stepped(None, [written])
    return Stepped([written], [None] if is_last else None)
