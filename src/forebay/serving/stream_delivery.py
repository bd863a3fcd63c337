# SPDX-License-Identifier: Apache-2.0
"""Streamed answers on their way to clients, each of which takes its own at its own pace.

Theory of operation. The requests of a batch are stepped together, so what one client does not take must not keep the
others waiting. Every client has a window: parts it was handed and has not taken. While there is room in all windows, a
step is over as soon as it is handed out, and the generator goes on. A client whose window is full holds up the step,
and with it the generator, until it takes something (no part is dropped, and memory does not grow). If that holds up
others, batch-mates with room or requests that find no free worker, it may do so for `PATIENCE_S` in total; then its
answer, and nobody else's, ends with an error. A client that holds up nobody may take as long as its connection allows.

A model that makes no part for a stream within `idle_s` has that answer end with an error. The time in which a client
holds up the step does not count. A part only notes when it came: one timer looks at all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import BadOutcome, DeadlineExceeded
from forebay.types.body_pieces import BodyPieces
from forebay.types.call import Media
from forebay.workers.pool import CREDIT

if TYPE_CHECKING:
    import asyncio

    from forebay.types.batch import EntryBatch
    from forebay.types.call import Request

WINDOW_BYTES: Final = 1 << 18
"""What a client may be behind by; and always by `CREDIT` parts, however large."""

PART_BYTES: Final = 256
"""What a part counts beside its content, so that many empty ones fill a window as well."""

PATIENCE_S: Final = 2.0
"""How long a client with a full window may hold up others."""

LOOK_S: Final = 0.005
"""Shortest time between two looks for models that are silent."""

EARLY_S: Final = 0.001
"""A pause that lacks no more than this is over: a timer may be early."""

NEVER: Final = float("inf")


class _Window:
    """What one client was handed and has not taken.

    Attributes:
        size: Of the parts that are with it.
        count: How many they are.
        held: Steps that wait until there is room.
        since: Since when they do.
        spent_s: How long it had held up its batch-mates before that.
        batch: Whose step it holds.
        heard: When its model made a part, or could go on after a client had held it up.
        is_forgotten: Whether it is no matter any more what the client takes.
    """

    __slots__ = ("batch", "count", "heard", "held", "is_forgotten", "since", "size", "spent_s", "timer")

    def __init__(self, batch: EntryBatch) -> None:
        self.batch = batch
        self.size = 0
        self.count = 0
        self.held: list[Callable[[], None]] = []
        self.heard = 0.0
        self.since = 0.0
        self.spent_s = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.is_forgotten = False

    @property
    def is_full(self) -> bool:
        return self.size > WINDOW_BYTES and self.count > CREDIT


class Windows:
    """The windows of all clients of an endpoint; lives on its loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        others_wait: Callable[[], bool],
        give_up: Callable[[Request, Exception], None],
        idle_s: float = NEVER,
    ) -> None:
        """Begin without clients.

        Args:
            loop: Whose time counts.
            others_wait: Whether requests wait for a free worker.
            give_up: Ends the answer of a client: it held up others for too long, a part could not be handed over, or
                its model was silent.
            idle_s: How long a model may make no part of an answer that has begun.
        """
        self._loop = loop
        self._others_wait = others_wait
        self._give_up = give_up
        self._idle_s = idle_s
        self._silence: asyncio.TimerHandle | None = None
        self._windows: dict[Request, _Window] = {}

    def hand_out(
        self, batch: EntryBatch, handed: Iterable[tuple[Request, Sequence[Any]]], release: Callable[[], object]
    ) -> None:
        """Hand parts to their clients; `release` is called once none of them has a full window."""
        holding = 1
        is_held = False
        now = time.monotonic()

        def one_less() -> None:
            nonlocal holding
            holding -= 1
            if holding == 0:
                if is_held:
                    self._goes_on(batch)
                release()

        for request, parts in handed:
            if request.done:  # the part of another one ended this one, too: they are choices of the same answer
                continue
            window, later = self._windows.get(request), parts
            if window is None:
                window, later = self._windows.setdefault(request, _Window(batch)), parts[1:]
            window.heard = now
            if Media in map(type, later):
                self._give_up(request, BadOutcome("only the first part of a stream can be a forebay.Answer"))
                continue
            if len(parts) > 1 and later is parts and request.on_bundle is not None:
                self._hand(window, request, request.on_bundle, parts, len(parts))
            else:
                for part in parts:
                    if request.done:  # a part may be the last that its client wanted
                        break
                    assert request.on_part is not None
                    self._hand(window, request, request.on_part, part, 1)
            if window.is_full and not request.done:
                holding += 1
                is_held = True
                self._hold(window, request, one_less)
        one_less()
        if self._silence is None and self._windows and self._idle_s != NEVER:
            self._silence = self._loop.call_later(self._idle_s, self._look_for_silence)

    def close(self) -> None:
        """Look at nothing any more."""
        if self._silence is not None:
            self._silence.cancel()

    def forget(self, request: Request) -> None:
        """Let go of what a client holds: it was answered, or is gone."""
        window = self._windows.pop(request, None)
        if window is not None:
            window.is_forgotten = True
            self._let_go(window)

    def _hand(
        self,
        window: _Window,
        request: Request,
        on_part: Callable[[Any, Callable[[], object]], None],
        part: Any,
        count: int,
    ) -> None:
        size = PART_BYTES * count + _size(part)
        is_taken = False

        def taken() -> None:
            nonlocal is_taken
            if is_taken or window.is_forgotten:
                return
            is_taken = True
            window.size -= size
            window.count -= count
            if window.held and not window.is_full:
                self._let_go(window)

        window.size += size
        window.count += count
        try:
            on_part(part, taken)
        except Exception as error:  # noqa: BLE001 - an answer that lacks a part is not an answer
            taken()
            self._give_up(request, error)

    def _hold(self, window: _Window, request: Request, step: Callable[[], None]) -> None:
        window.held.append(step)
        if window.timer is None:
            window.since = time.monotonic()
            window.timer = self._loop.call_later(PATIENCE_S - window.spent_s, self._look, window, request)

    def _let_go(self, window: _Window) -> None:
        if window.timer is not None:
            window.timer.cancel()
            window.timer = None
            if self._has_quick_mates(window):
                window.spent_s = min(window.spent_s + time.monotonic() - window.since, PATIENCE_S)
        held, window.held = window.held, []
        for step in held:
            step()

    def _look(self, window: _Window, request: Request) -> None:
        """End the answer of a client that has held steps for too long, if that holds up anybody."""
        window.timer = None
        if self._has_quick_mates(window) or (self._others_wait() and time.monotonic() - window.since >= PATIENCE_S):
            msg = f"timed out: other requests waited {PATIENCE_S:g} s for the client to read this answer"
            self._give_up(request, DeadlineExceeded(msg))
        else:
            window.timer = self._loop.call_later(PATIENCE_S, self._look, window, request)

    def _goes_on(self, batch: EntryBatch) -> None:
        """Begin the pauses of a batch anew: its model may make parts again."""
        now = time.monotonic()
        for request in batch.entries:
            window = self._windows.get(request)
            if window is not None:
                window.heard = now

    def _look_for_silence(self) -> None:
        """End the answers whose models make no parts."""
        now = time.monotonic()
        late = [one for one in self._windows.items() if one[1].heard + self._idle_s <= now + EARLY_S]
        for request, window in late:
            window.heard = now
            mates = (self._windows.get(mate) for mate in window.batch.entries)
            is_fed = type(request.body) is BodyPieces and request.body.is_awaited()  # its client is the silent one
            if not request.done and not is_fed and not any(mate.held for mate in mates if mate is not None):
                text = f"{request.place()}no part for {self._idle_s * 1000:.10g} ms (stream_idle_ms)"
                self._give_up(request, DeadlineExceeded(text))
        self._silence = None
        if self._windows:
            due = min(window.heard for window in self._windows.values()) + self._idle_s
            self._silence = self._loop.call_later(max(due - now, LOOK_S), self._look_for_silence)

    def _has_quick_mates(self, window: _Window) -> bool:
        """Return whether another stream of the batch waits for its next step."""
        windows = (self._windows.get(mate) for mate in window.batch.entries if not mate.done)
        return any(mate is None or not mate.held for mate in windows if mate is not window)


def _size(part: Any) -> int:
    if isinstance(part, bytes | str):
        return len(part)
    if isinstance(part, list | tuple):
        return sum(_size(piece) for piece in cast("list[Any]", part))
    return len(part.body) if type(part) is Media else getattr(part, "nbytes", 0)
