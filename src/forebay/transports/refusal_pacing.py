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
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    import asyncio

LEAST_SHARE: Final = 0.01
"""How much of the loop's time refusals may take in any case."""
SHORT_S: Final = 0.1
"""A line is short if `MOST_SHARE` is enough to tell it within this time, whatever a refusal costs at the moment."""
SOON_S: Final = 0.07
"""How long the last one of a short line waits, if that does not take more than `MOST_SHARE`."""
LATE_S: Final = 0.9
"""The same for any other line."""
MOST_SHARE: Final = 0.05
KERNEL_S: Final = 5e-6
"""What a refusal costs beside the time it is seen to take: reading, and the loop's own work. A server that only refuses
takes 13 to 16 us of CPU time for each, and sees the rest of them."""
BURST_S: Final = 0.001
"""Budget that can be saved up: the first refusals after a while need not wait."""
MAX_DEBT_S: Final = 0.01
"""What one refusal may cost those after it: more than this is a pause of the whole interpreter."""
MEASURED: Final = 16
"""Refusals that are measured together: to ask for the time a thread has used takes as long as half a refusal."""
TICK_S: Final = 0.01
"""How long the line waits before it is looked at again."""


class RefusedClient(Protocol):
    """Whoever is refused, and may have to wait before it is told."""

    def tell_refused(self) -> None:
        """Write the refusal if somebody still waits for it."""
        ...


class RefusalLine:
    """The refusals of one listener. Lives on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[RefusedClient, float]] = deque()
        self._budget_s = self._cost_s = BURST_S
        self._is_telling = False  # a client that is told may send another request, which is refused as well
        self._looked_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def refuse(self, who: RefusedClient) -> None:
        """Refuse somebody: now if the budget allows it and nobody waits, else in turn."""
        self._waiting.append((who, time.monotonic()))
        if self._timer is None and not self._is_telling:
            self._tell()

    def stop(self) -> None:
        """Tell everybody who waits; the listener closes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiting:
            self._waiting.popleft()[0].tell_refused()

    def _tell(self) -> None:
        self._timer = None
        waiting = self._waiting
        now = time.monotonic()
        cost_s = len(waiting) * self._cost_s
        share = cost_s / (SOON_S if cost_s <= SHORT_S * MOST_SHARE else LATE_S)
        if (
            share > MOST_SHARE or now - waiting[0][1] > LATE_S
        ):  # late: a line that nobody joins would move ever more slowly
            share = MOST_SHARE
        share = max(share, LEAST_SHARE)
        self._budget_s = min(self._budget_s + (now - self._looked_at) * share, BURST_S)
        self._looked_at = now
        self._is_telling = True
        try:
            while waiting and self._budget_s > 0:
                self._tell_some()
        finally:
            self._is_telling = False
        if waiting:
            self._timer = self._loop.call_later(TICK_S, self._tell)

    def _tell_some(self) -> None:
        """Tell as many as the budget is thought to pay for, and take from it what they cost."""
        waiting = self._waiting
        count = min(len(waiting), MEASURED, max(int(self._budget_s / self._cost_s), 1))
        began = time.thread_time()  # time in which workers have the core, or the interpreter, costs nothing
        for _ in range(count):
            waiting.popleft()[0].tell_refused()
        used_s = time.thread_time() - began + count * KERNEL_S
        self._cost_s = used_s / count
        self._budget_s = max(self._budget_s - used_s, -MAX_DEBT_S)
