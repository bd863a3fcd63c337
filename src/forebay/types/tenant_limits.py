# SPDX-License-Identifier: Apache-2.0
"""The limits of a tenant, and what is left of them: requests, samples and worker time in a period, and two levels.

Requests, samples and streams are limited where the key is checked; worker time and waiting samples where the workers
are. All classes and children of a tenant share its limits. A request is asked about everything before it uses up
anything.

Sans-I/O: no clock, no loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Final, Protocol

import msgspec
from msgspec import Meta

from forebay.errors import LimitReached, TooLarge
from forebay.types.token_bucket import ROUNDING_S, TokenBucket

MAX_RATE: Final = 1e9
MINUTE_S: Final = 60.0


class RateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How much of something a tenant may use in a second.

    Attributes:
        rate: In each second, on average.
        burst: At once, after a quiet time; without it as much as in one second, and at least 1.
    """

    rate: Annotated[float, Meta(gt=0.0, le=MAX_RATE)]
    burst: Annotated[float, Meta(ge=1.0, le=MAX_RATE)] | None = None

    def bucket(self, parts: int) -> TokenBucket:
        """Return a full bucket for one of so many equal parts of this."""
        burst = max(self.rate, 1.0) if self.burst is None else self.burst
        return TokenBucket(self.rate / parts, max(burst / parts, 1.0))


class WorkerTimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long workers may be busy for a tenant.

    Attributes:
        rate: Seconds in each minute, on average.
        burst: Seconds at once, after a quiet time; without it as many as in one minute.
    """

    rate: Annotated[float, Meta(gt=0.0, le=MAX_RATE)]
    burst: Annotated[float, Meta(gt=0.0, le=MAX_RATE)] | None = None

    def bucket(self) -> TokenBucket:
        """Return a full bucket of seconds."""
        return TokenBucket(self.rate / MINUTE_S, self.rate if self.burst is None else self.burst)


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may use.

    Attributes:
        requests_per_s: Requests; one that is cut into several batches counts once.
        rows_per_s: Samples of requests.
        worker_seconds_per_min: Time that workers are busy for it. It is known afterwards: a request is refused while
            more was used than there was.
        waiting_rows: Samples in the queue of a model.
        open_streams: Answers that are being streamed.
    """

    requests_per_s: RateConfig | None = None
    rows_per_s: RateConfig | None = None
    worker_seconds_per_min: WorkerTimeConfig | None = None
    waiting_rows: Annotated[int, Meta(ge=1)] | None = None
    open_streams: Annotated[int, Meta(ge=1)] | None = None


class Limited(Protocol):
    """A request, as far as limits look at it."""

    reply: Any

    def limited_size(self) -> int:
        """Return how many samples it counts for."""
        ...


class Allowance:
    """What is left of the limits of one tenant.

    Attributes:
        tenant: Its name.
        config: Its limits.
        streams: How many answers are being streamed to it.
        policy: What is limited where its key is checked, as `RateLimit-Policy` says it; empty if nothing is.
    """

    def __init__(self, tenant: str, config: LimitsConfig, fronts: int = 1) -> None:
        """Begin with all of it, or with the part of one of several fronts."""
        self.tenant = tenant
        self.config = config
        self.streams: int = 0
        self._requests = config.requests_per_s and config.requests_per_s.bucket(fronts)
        self._rows = config.rows_per_s and config.rows_per_s.bucket(fronts)
        self._worker_s = config.worker_seconds_per_min and config.worker_seconds_per_min.bucket()
        self._last_s = 0.0
        """What was used of that last: the next request is taken to need as much."""
        self._max_streams = config.open_streams and max(config.open_streams // fronts, 1)

        named = {"requests": self._requests, "rows": self._rows}
        self._buckets = [(name, bucket) for name, bucket in named.items() if bucket is not None]
        items = [
            f'"{name}";q={int(bucket.burst)};w={max(math.ceil(bucket.burst / bucket.rate), 1)}{_UNITS[name]}'
            for name, bucket in self._buckets
        ]
        if self._max_streams is not None:
            items.append(f'"open_streams";q={self._max_streams};qu="concurrent-requests"')
        self.policy: str = ", ".join(items)

    def left(self, now: float) -> str:
        """Return what is left of that and, in whole seconds, when there is more, as `RateLimit` says it."""
        items: list[str] = []
        for name, bucket in self._buckets:
            left = max(int(bucket.left(now) + bucket.rate * ROUNDING_S), 0)
            more_s = f";t={math.ceil(bucket.wait_s(left + 1, now))}" if left < int(bucket.burst) else ""
            items.append(f'"{name}";r={left}{more_s}')
        if self._max_streams is not None:
            items.append(f'"open_streams";r={max(self._max_streams - self.streams, 0)}')
        return ", ".join(items)

    def admit(self, request: Limited, now: float, *, is_stream: bool) -> None:
        """Use up what a request needs where its key was checked.

        Raises:
            LimitReached: There is not enough left; nothing was used up.
            TooLarge: There never is enough for so many samples.
        """
        rows, size = self._rows, request.limited_size()
        if self._requests is not None:
            self._require(self._requests, 1, "requests", now)
        if rows is not None:
            if size > rows.burst:
                most = f"at most {rows.burst:g} of the tenant '{self.tenant}' come in at once"
                raise TooLarge(f"the request has {size} samples; {most}")
            self._require(rows, size, "rows", now)
        if is_stream and self._max_streams is not None:
            if self.streams >= self._max_streams:
                raise self._reached(
                    "open_streams", f"the tenant '{self.tenant}' has {self.streams} open streams, and may have no more"
                )
            self.streams += 1
            request.reply = _OpenStream(self, request.reply)
        if self._requests is not None:
            self._requests.take(1, now)
        if rows is not None:
            rows.take(size, now)

    def reached(self, now: float) -> LimitReached | None:
        """Return which limit refuses a request whatever it asks for; None if none does."""
        for name, bucket in self._buckets:
            if (error := self._lack(bucket, 1, name, now)) is not None:
                return error
        return None if self._worker_s is None else self._lack(self._worker_s, 0, "worker_seconds", now, self._last_s)

    def require_workers(self, size: int, waiting: int, now: float) -> None:
        """Check that a request may wait for workers.

        Args:
            size: Its samples.
            waiting: Samples of the tenant that wait.
            now: The time.

        Raises:
            LimitReached: It may not.
        """
        if self._worker_s is not None:
            self._require(self._worker_s, 0, "worker_seconds", now, self._last_s)
        most = self.config.waiting_rows
        if most is not None and waiting + size > most:
            if size > most:
                raise TooLarge(f"the request has {size} samples; at most {most} of the tenant '{self.tenant}' may wait")
            found = f"{waiting} samples of the tenant '{self.tenant}' wait, and at most {most} may"
            raise self._reached("waiting_rows", found)

    def worked(self, seconds: float, now: float) -> None:
        """Use up worker time."""
        if self._worker_s is not None:
            self._worker_s.take(seconds, now)
            self._last_s = seconds

    def _require(self, bucket: TokenBucket, tokens: float, limit: str, now: float, uses: float | None = None) -> None:
        if (error := self._lack(bucket, tokens, limit, now, uses)) is not None:
            raise error

    def _lack(
        self, bucket: TokenBucket, tokens: float, limit: str, now: float, uses: float | None = None
    ) -> LimitReached | None:
        """Return the error if so many tokens are not there, for a request that uses up as many, or `uses`."""
        if not bucket.wait_s(tokens, now):
            return None
        error = self._reached(limit, f"the tenant '{self.tenant}' has used up its {_SAID[limit]}")
        error.retry_at = bucket.retry_at(tokens, tokens if uses is None else uses, now)
        return error

    @staticmethod
    def _reached(limit: str, found: str) -> LimitReached:
        return LimitReached(f"{found}; try again later", detail={"limit": limit})


class _OpenStream:
    """Replies to a request whose answer is streamed, and counts it no longer."""

    __slots__ = ("_allowance", "_is_open", "_reply")

    def __init__(self, allowance: Allowance, reply: Callable[[Any, Any], None]) -> None:
        self._allowance = allowance
        self._reply = reply
        self._is_open = True

    def __call__(self, request: Any, outcome: Any) -> None:
        if self._is_open:
            self._is_open = False
            self._allowance.streams -= 1
        self._reply(request, outcome)


_UNITS: Final = {"requests": "", "rows": ';qu="rows"'}
_SAID: Final = {"requests": "requests", "rows": "samples", "worker_seconds": "worker seconds"}
