# SPDX-License-Identifier: Apache-2.0
"""A token bucket: how much a client may use at once, and how fast that comes back.

Theory of operation. The bucket keeps one number, the moment at which it will be full again. Taking tokens moves that
moment by the time in which they come back; asking changes nothing. So no rounding adds up over refills, and a clock
that goes back gives nothing twice: the bucket then looks emptier until the clock has caught up.

Clients that find too little are told when to come back, in turn (`retry_tickets.py`): the first when there is enough,
the next when there is enough for it as well.

Between two moments that lie `t` seconds apart, `take` after `wait_s` has returned 0 gives at most `burst + rate * t`.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

from typing import Final

from forebay.types.retry_tickets import MOST_S, RetryTickets

EARLY: Final = 0.1
"""A client that lacks no more than this part of what it takes keeps its turn: the one before it came a little late."""

ROUNDING_S: Final = 1e-6
"""A token that comes this soon is there: a client that waited for exactly as long as it was told gets it."""


class TokenBucket:
    """Tokens for one limit.

    Attributes:
        rate: Tokens that come back in a second.
        burst: The most that it holds; it begins full.
    """

    __slots__ = ("_full_at", "_ticket", "_tickets", "burst", "rate")

    def __init__(self, rate: float, burst: float) -> None:
        self.rate: float = rate
        self.burst: float = burst
        self._full_at = self._ticket = float("-inf")
        self._tickets = RetryTickets(MOST_S * rate)  # its rate is known: tickets may be as far ahead as any

    def left(self, now: float) -> float:
        """Return the tokens that are there; less than none if more were taken than there were."""
        return self.burst - self.rate * self.full_s(now)

    def full_s(self, now: float) -> float:
        """Return the seconds until it is full."""
        return max(self._full_at - now, 0.0)

    def wait_s(self, tokens: float, now: float) -> float:
        """Return the seconds until so many tokens are there, 0 if they are; no more than `burst` ever are."""
        wait_s = self.full_s(now) - (self.burst - tokens) / self.rate
        return wait_s if wait_s > ROUNDING_S else 0.0

    def retry_at(self, tokens: float, size: float, now: float) -> float:
        """Return when a client that is refused now should try again, which needs so many tokens and takes `size`."""
        wait_s = self.wait_s(tokens, now)
        ready = now + wait_s
        if self._ticket < ready or wait_s * self.rate <= EARLY * size:
            self._ticket = max(self._ticket, ready)
            return ready
        self._ticket, told = self._tickets.next(self._ticket, size, 1 / self.rate, ready)
        return told

    def take(self, tokens: float, now: float) -> None:
        """Take tokens, also if they are not there."""
        self._full_at = max(self._full_at, now) + tokens / self.rate
