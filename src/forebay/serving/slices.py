# SPDX-License-Identifier: Apache-2.0
"""Requests that are cut: those with more samples than a batch takes, or with samples of several keys.

A request is answered once: the first failure of a slice is its answer, else the results of all are joined in order. One
that has more samples than may wait is fed to the queue as there is room, and so is one that may wait for it.

Theory of operation. A request may have millions of samples, and the loop serves others as well: it does no more in one
go than room in the queue asks for. What has to be read before a request can be cut is read in steps, one in each turn
of the loop; a slice is cut when the queue has room for it, and its results are taken when they come.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.errors import QueueFull, TooLarge
from forebay.types.call import Failure, Joint, Origin, Outcome, Request, Slice
from forebay.workers.user_calls.user_code import attempt

if TYPE_CHECKING:
    from forebay.batching.batcher import Batcher
    from forebay.batching.queue import BatchConfig, BatchQueue
    from forebay.serving.single_flight import Flights


_NEVER: Final = float("inf")

OPENING_S: Final = 0.001
"""How long requests are read on in a turn of the loop before they are cut."""


class _Cut(msgspec.Struct, eq=False):
    """How far a request is.

    Attributes:
        to_come: Keys and places of the samples of slices that are not in the queue yet.
        joint: Puts together what came.
        missing: Samples of which nothing came.
        under_way: Slices that are in the queue or run, with the places of their samples.
        following: What comes first of `to_come`; None at its end.
    """

    to_come: Iterator[tuple[Hashable, Sequence[int]]]
    joint: Joint
    missing: int
    under_way: dict[Slice, Sequence[int]]
    following: tuple[Hashable, Sequence[int]] | None = None


class Slices:
    """The slices of an endpoint's requests.

    Attributes:
        batcher: Where they go; set when the endpoint starts.
        fed: Requests of which slices are still to come into the queue.
        flights: Requests of which one slice stands for several, if equal ones run once.
    """

    def __init__(
        self,
        name: str,
        batching: BatchConfig,
        queue: BatchQueue,
        settle: Callable[[Request, Outcome], None],
        *,
        may_exceed: bool,
    ) -> None:
        """Begin without any; a request may have more samples than a batch takes if it `may_exceed` that."""
        self.batcher: Batcher | None = None
        self.fed: dict[Request, None] = {}
        self.flights: Flights | None = None
        self._name = name
        self._may_exceed = may_exceed
        self._limit = batching.max_rows
        self._capacity = batching.capacity
        self._queue = queue
        self._settle = settle
        self._of: dict[Request, _Cut] = {}
        self._opening: deque[tuple[Request, Iterator[None], int]] = deque()
        """Requests that are read before they are cut, with the samples that will want room at once."""
        self._opening_rows = 0
        """Those samples of all of them."""
        self._reads = False

    def __len__(self) -> int:
        return len(self._of)

    def cut(self, request: Request, rows_of: Mapping[Hashable, Sequence[int]], now: float) -> None:
        """Queue a request in slices, given the places of its samples by their keys.

        A slice has one key, and a batch full of samples at most.

        Raises:
            TooLarge: If it may not be cut.
            QueueFull: If there is no room for it.
            TooLate: If it would be answered after the deadline that it states.
            InvalidRequest: If it cannot be read; one that is long is told later.
        """
        limit = self._limit
        if max(map(len, rows_of.values())) > limit and not self._may_exceed:
            raise TooLarge(f"the request has {request.size} samples, endpoint '{self._name}' takes {limit} at a time")
        places = _places(rows_of, limit)
        first = next(places)
        self._queue.admit(request, now)
        rows = request.size if request.size <= self._capacity else len(first[1])
        self._require_room(request, rows, self._opening_rows)
        request.arrived = now
        steps = request.opening()
        is_open = attempt(_is_at_end, steps)
        if type(is_open) is Failure:
            raise is_open.error
        cut = self._of[request] = _Cut(places, request.joint(), request.size, {}, first)
        if not is_open:
            self._opening.append((request, steps, rows))
            self._opening_rows += rows
            if not self._reads:
                self._reads = True
                asyncio.get_running_loop().call_soon(self._open)
            return
        failure = attempt(self._begin, request, cut, now)
        if type(failure) is Failure:
            self._of.pop(request, None)
            self.fed.pop(request, None)
            raise failure.error

    def feed(self) -> None:
        """Queue slices of requests that have more samples than may wait: each in turn, and half of the queue at most.

        A request with no slice under way may take whatever room there is.
        """
        now = time.monotonic()
        failed: list[tuple[Request, Failure]] = []
        for request in self.fed:
            failure = attempt(self._fill, request, self._of[request], now)
            if type(failure) is Failure:
                failed.append((request, failure))
        for request in [one for one in self.fed if self._of[one].following is None]:
            del self.fed[request]
        for request, failure in failed:
            self._settle(request, failure)

    def _fill(self, request: Request, cut: _Cut, now: float) -> None:
        while cut.following is not None:
            waiting = self._queue.waiting + len(cut.following[1])
            if waiting > self._capacity or (cut.under_way and 2 * waiting > self._capacity):
                break
            self._submit(request, cut, now)

    def of(self, request: Request) -> Sequence[Request | Slice]:
        """Return what of a request is in the queue or runs: slices, or itself if it was not cut."""
        cut = self._of.get(request)
        if cut is None:
            return [request] if self.flights is None else self.flights.of(request)
        return [*cut.under_way]

    def is_whole(self, request: Request) -> bool:
        """Tell whether nothing of a request has left the queue."""
        cut = self._of.get(request)
        if cut is None:
            entry = self.of(request)[0]
            return not entry.taken or (entry is not request and entry.taken == _NEVER)
        return cut.missing == request.size and not any(piece.taken for piece in cut.under_way)

    def leave(self, request: Request) -> Sequence[Request | Slice]:
        """Forget a request; returns the same as `of`, without what others still wait for."""
        if self.flights is not None and request in self.flights:
            return self.flights.leave(request)
        found = self.of(request)
        self._of.pop(request, None)
        self.fed.pop(request, None)
        return found

    def cut_into(self, piece: Slice) -> list[Request]:
        """Return the request that a slice is of; none if it is answered."""
        is_open = piece.whole in self._of or (self.flights is not None and piece.whole in self.flights)
        return [piece.whole] if is_open else []

    def _require_room(self, request: Request, rows: int, others: int = 0) -> None:
        """Refuse a request if so many samples of it cannot wait beside those that do, unless it waits for room.

        Raises:
            QueueFull: If there is no room for these and so many samples of others.
        """
        if self._queue.waiting + others + rows > self._capacity and not request.may_wait():
            if (fair := self._queue.fair) is not None and others + rows <= self._capacity:
                fair.eviction.make_room(fair.flow_of(request.tenant), others + rows)
                return
            them = "them" if rows == request.size else f"the first {rows} of them"
            msg = f"the request has {request.size} samples and the queue of '{self._name}' has no room for {them}"
            raise QueueFull(msg)

    def _open(self) -> None:
        """Read on for a moment, a step of each request at a time."""
        until = time.monotonic() + OPENING_S
        is_over = False
        while self._opening and not is_over:
            request, steps, rows = self._opening.popleft()
            self._opening_rows -= rows
            cut = self._of.get(request)
            if cut is not None:  # else nobody waits for it any more
                failure = attempt(self._read_on, request, steps, rows, cut)
                if type(failure) is Failure:
                    self._settle(request, failure)
            is_over = time.monotonic() >= until
        self._reads = bool(self._opening)
        if self._reads:
            asyncio.get_running_loop().call_soon(self._open)

    def _read_on(self, request: Request, steps: Iterator[None], rows: int, cut: _Cut) -> None:
        """Take a step, and queue the request after the last one.

        Raises:
            QueueFull: If there is no room for it.
            InvalidRequest: If it cannot be read.
        """
        if _is_at_end(steps):
            self._require_room(request, rows)
            self._begin(request, cut, time.monotonic())
        else:
            self._opening.append((request, steps, rows))
            self._opening_rows += rows

    def _begin(self, request: Request, cut: _Cut, now: float) -> None:
        """Queue what there is room for of a request that can be cut.

        Raises:
            QueueFull: If there is room for nothing of it.
        """
        if self._queue.waiting + request.size <= self._capacity:
            has_more = self._submit(request, cut, now, request.origin)
            while has_more:
                has_more = self._submit(request, cut, now)
            return
        if not request.may_wait():
            self._submit(request, cut, now, request.origin)
        self.fed[request] = None
        self.feed()

    def _submit(self, request: Request, cut: _Cut, now: float, origin: Origin | None = None) -> bool:
        """Queue the next slice of a request; tells whether there are more."""
        assert self.batcher is not None
        assert cut.following is not None
        key, rows = cut.following
        piece = Slice(
            whole=request,
            body=request.cut(rows),
            reply=self._replied,
            deadline=request.deadline,
            params=request.params,
            size=len(rows),
            key=key,
            origin=origin,
            rank=request.rank,
            tenant=request.tenant,
        )
        self.batcher.submit(piece, now)
        cut.under_way[piece] = rows
        cut.following = next(cut.to_come, None)
        return cut.following is not None

    def _replied(self, piece: Slice, outcome: Outcome) -> None:
        """Take the outcome of a slice."""
        request = piece.whole
        cut = self._of.get(request)
        if cut is None:
            return
        rows = cut.under_way.pop(piece)
        if type(outcome) is not Failure:
            cut.missing -= len(rows)
            outcome = attempt(cut.joint.add, rows, outcome)
        if type(outcome) is Failure:
            self._settle(request, outcome)
        elif not cut.missing:
            self._settle(request, attempt(cut.joint.whole))


def _places(rows_of: Mapping[Hashable, Sequence[int]], limit: int) -> Iterator[tuple[Hashable, Sequence[int]]]:
    for key, rows in rows_of.items():
        for start in range(0, len(rows), limit):
            yield key, rows[start : start + limit]


def _is_at_end(steps: Iterator[None]) -> bool:
    """Take a step; tells whether there was none left."""
    for _ in steps:
        return False
    return True
