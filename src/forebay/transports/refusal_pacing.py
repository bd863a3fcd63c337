# SPDX-License-Identifier: Apache-2.0
"""Says "later" to clients at a rate that leaves the core to the work.

Theory of operation. A queue is full when the core is scarce, and then most answers are refusals: a server that writes
them as they are due spends its core on saying no. So refusals have a budget, a share of the loop's time. While it lasts
they are written at once. Beyond it they wait in line, and a timer writes as many as the budget pays for. A client in
line takes up its place and nothing else, and sends nothing meanwhile: that is what slows the senders down.

How long they wait and how often they come back are one thing: of 400 clients, 320 of whom a server has taken, 80 are
in line, and where each waits for 80 ms and asks again, that makes 1,000 refusals a second. Who waits for less costs
more; so those in line wait for as long as is bearable: a line that is short enough is told soon, any other in time, up
to a limit. The line needs no deadlines: it holds one place for each client, and moves by at least one every
`MAX_DEBT_S / LEAST_SHARE`.

They are told in groups, for the first of a group is the dearest: the model has pushed the code out of the core's
caches. It is back there once the answers of a batch were written, so that is when a group is told, if it is due by
then; a timer follows for a server that answers nobody.

What one costs is averaged twice: over the last few, which says how fast the line may move, and over some thousands,
which says what line is short: a machine that is slow for a second must not make a long line of a short one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    import asyncio

log = logging.getLogger("forebay")

LEAST_SHARE: Final = 0.01
"""How much of the loop's time refusals may take in any case."""
MOST_SHARE: Final = 0.05
"""And at most, at what they usually cost."""
MOST_OF_USUAL: Final = 2.0
"""They may take so many times as much while they cost more."""
SHORT_S: Final = 0.1
"""A line is short if `MOST_SHARE` is usually enough to tell it within this time."""
SOON_S: Final = 0.082
"""How long the last one of a short line waits, if its share allows it."""
LATE_S: Final = 0.94
"""The same for any other line."""
PATIENCE: Final = 1.05
"""Who has waited for so many times as long is due: a line that fewer join than were told would move too slowly."""
KERNEL_S: Final = 5e-6
"""What a refusal costs beside the time it is seen to take: reading, and the loop's own work. A server that only refuses
takes 13 to 16 us of CPU time for each, and sees the rest of them."""
GROUP_S: Final = 0.001
"""How long a group may take to tell."""
BURST_S: Final = 2 * GROUP_S
"""Budget that can be saved up: the first refusals after a while need not wait."""
MAX_DEBT_S: Final = 0.01
"""What one refusal may cost those after it: more than this is a pause of the whole interpreter."""
GROUPS: Final = 5
"""How many groups a line is told in, or more."""
LOOKS_S: Final = (0.005, 0.02)
"""How long the line waits at least, and at most, before it is looked at again: those who join it change its rate."""
HOLD_S: Final = 0.006
"""How much longer it waits for answers to be written, if some were: a group costs least after them."""
RECENT: Final = 64
"""Refusals over which their cost is averaged for the rate of the line."""
USUAL: Final = 4096
"""And for what they usually cost."""


class RefusedClient(Protocol):
    """A client that is refused, and may have to wait before it is told."""

    def tell_refused(self) -> None:
        """Write the refusal if the client still waits for it."""
        ...


def tell_each(group: Iterable[RefusedClient]) -> None:
    """Tell one after the other."""
    for who in group:
        try:
            who.tell_refused()
        except Exception:  # of one of them: the others are told all the same
            log.exception("failed to write a rejection")


class RefusalLine:
    """The refusals of one listener. Lives on one event loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, tell_all: Callable[[Sequence[Any]], object] = tell_each
    ) -> None:
        self._loop = loop
        self._tell_all = tell_all
        self._waiting: deque[tuple[RefusedClient, float]] = deque()
        self._budget_s = self._cost_s = self._usual_cost_s = BURST_S
        self._measured = 0
        self._is_telling = False  # a client that is told may send another request, which is refused as well
        self._looked_at = self._due = time.monotonic()
        self._hold_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse(self, who: RefusedClient) -> None:
        """Refuse a client: now if the budget allows it and the line is empty, else in turn."""
        self.refuse_all((who,))

    def refuse_all(self, clients: Iterable[RefusedClient]) -> None:
        """Refuse several clients that came together."""
        now = time.monotonic()
        self._waiting.extend([(who, now) for who in clients])
        if self._timer is None and not self._is_telling:
            self._tell()

    def answered(self) -> None:
        """Tell a group if it is due, as answers were just written."""
        self._hold_s = HOLD_S
        if self._timer is not None and time.monotonic() >= self._due:
            self._timer.cancel()
            self._tell()

    def _on_timer(self) -> None:
        self._hold_s = 0.0  # nobody is answered at the moment
        self._tell()

    def stop(self) -> None:
        """Tell everybody who waits; the listener closes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._tell_all(self._next(len(self._waiting)))

    def _tell(self) -> None:
        self._timer = None
        waiting = self._waiting
        now = time.monotonic()
        share = self._share(now)
        self._budget_s = min(self._budget_s + (now - self._looked_at) * share, BURST_S)
        self._looked_at = now
        self._is_telling = True
        try:
            while waiting and self._budget_s >= self._price():
                self._tell_group()
        finally:
            self._is_telling = False
        if waiting:
            least_s, most_s = LOOKS_S
            due_s = (self._price() - self._budget_s) / share
            wait_s = max(min(due_s, most_s), least_s)
            self._due = now + wait_s
            self._timer = self._loop.call_later(wait_s + self._hold_s, self._on_timer)

    def _share(self, now: float) -> float:
        """Tell how much of the time those who wait may take."""
        waiting, usual_s = self._waiting, self._usual_cost_s
        wait_s = SOON_S if len(waiting) * usual_s <= SHORT_S * MOST_SHARE else LATE_S
        most = MOST_SHARE * min(max(self._cost_s / usual_s, 1.0), MOST_OF_USUAL)
        left_s = wait_s - (now - waiting[-1][1])  # for the last one; with the whole a line would move ever more slowly
        if now - waiting[0][1] > wait_s * PATIENCE or left_s <= 0.0:
            return most
        return max(min(len(waiting) * self._cost_s / left_s, most), LEAST_SHARE)

    @property
    def _group(self) -> int:
        """How many are told together."""
        return max(min(len(self._waiting) // GROUPS, int(GROUP_S / self._cost_s)), 1)

    def _price(self) -> float:
        """Tell what the next group is thought to cost, as far as it can be saved up for."""
        return min(self._group * self._cost_s, GROUP_S)

    def _tell_group(self) -> None:
        count = self._group
        began = time.thread_time()  # time in which workers have the core, or the interpreter, costs nothing
        self._tell_all(self._next(count))
        used_s = time.thread_time() - began + count * KERNEL_S
        self._budget_s = max(self._budget_s - used_s, -MAX_DEBT_S)
        measured = self._measured = min(self._measured + count, USUAL)
        self._cost_s += (used_s / count - self._cost_s) * min(count / min(measured, RECENT), 1.0)
        self._usual_cost_s += (used_s / count - self._usual_cost_s) * count / measured

    def _next(self, count: int) -> list[RefusedClient]:
        """Take so many out of the line."""
        waiting = self._waiting
        return [waiting.popleft()[0] for _ in range(count)]
