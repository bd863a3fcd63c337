# SPDX-License-Identifier: Apache-2.0
"""Requests that are cut: those with more samples than a batch takes, or with samples of several keys.

A request is answered once: the first failure of a slice is its answer, else the results of all are joined in order. One
that has more samples than may wait is fed to the queue as there is room, and so is one that may wait for it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from forebay.errors import QueueFull, TooLarge
from forebay.types.call import Failure, Slice
from forebay.workers.user_code import attempt

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from forebay.batching.batcher import Batcher
    from forebay.batching.queue import BatchConfig, BatchQueue
    from forebay.types.call import Outcome, Request


class Slices:
    """The slices of an endpoint's requests.

    Attributes:
        batcher: Where they go; set when the endpoint starts.
        fed: Requests of which slices are still to come into the queue.
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
        self.fed: dict[Request, deque[Slice]] = {}
        self._name = name
        self._may_exceed = may_exceed
        self._limit = batching.max_rows
        self._capacity = batching.capacity
        self._queue = queue
        self._settle = settle
        self._of: dict[Request, dict[Slice, None]] = {}
        """What of each request is in the queue or runs."""

    def __len__(self) -> int:
        return len(self._of)

    def cut(self, request: Request, rows_of: Mapping[Hashable, Sequence[int]], now: float) -> None:
        """Queue a request in slices, given the places of its samples by their keys.

        A slice has one key, and a batch full of samples at most.

        Raises:
            TooLarge: If it may not be cut.
            QueueFull: If there is no room for it.
        """
        limit = self._limit
        if max(map(len, rows_of.values())) > limit and not self._may_exceed:
            raise TooLarge(f"the request has {request.size} samples, endpoint '{self._name}' takes {limit} at a time")
        has_room = self._queue.waiting + request.size <= self._capacity
        may_wait = not has_room and request.may_wait()
        if request.size <= self._capacity and not has_room and not may_wait:
            msg = f"the request has {request.size} samples and the queue of '{self._name}' has no room for them"
            raise QueueFull(msg)
        answered: list[tuple[Sequence[int], Outcome]] = []
        places: dict[Slice, Sequence[int]] = {}

        def reply(piece: Slice, outcome: Outcome) -> None:
            rows = places.pop(piece)
            if request.done:
                return
            del self._of[request][piece]
            if type(outcome) is Failure:
                self._settle(request, outcome)
                return
            answered.append((rows, outcome))
            if not places:
                self._settle(request, attempt(request.join, answered))

        for key, rows in rows_of.items():
            for start in range(0, len(rows), limit):
                cut = rows[start : start + limit]
                piece = Slice(
                    whole=request,
                    body=request.cut(cut),
                    reply=reply,
                    deadline=request.deadline,
                    params=request.params,
                    size=len(cut),
                    key=key,
                    origin=None if places else request.origin,
                    rank=request.rank,
                )
                places[piece] = cut
        request.arrived = now
        assert self.batcher is not None
        if has_room:
            self._of[request] = dict.fromkeys(places)
            for piece in places:
                self.batcher.submit(piece, now)
            return
        first = [] if may_wait else [next(iter(places))]
        for piece in first:
            self.batcher.submit(piece, now)
        self._of[request] = dict.fromkeys(first)
        self.fed[request] = deque(piece for piece in places if piece not in first)
        self.feed()

    def feed(self) -> None:
        """Queue slices of requests that have more samples than may wait: each in turn, and half of the queue at most.

        A request with no slice under way may take whatever room there is.
        """
        now = time.monotonic()
        assert self.batcher is not None
        for request, slices in list(self.fed.items()):
            under_way = self._of[request]
            while slices:
                waiting = self._queue.waiting + slices[0].size
                if waiting > self._capacity or (under_way and 2 * waiting > self._capacity):
                    break
                piece = slices.popleft()
                under_way[piece] = None
                self.batcher.submit(piece, now)
            if not slices:
                del self.fed[request]

    def of(self, request: Request) -> Sequence[Request | Slice]:
        """Return what of a request is in the queue or runs: slices, or itself if it was not cut."""
        pieces = self._of.get(request)
        return [request] if pieces is None else [*pieces]

    def leave(self, request: Request) -> Sequence[Request | Slice]:
        """Forget a request; returns the same as `of`."""
        pieces = self._of.pop(request, None)
        if pieces is None:
            return [request]
        for piece in (*pieces, *self.fed.pop(request, ())):
            piece.reply = _forgotten  # the other one refers to all of them
        return [*pieces]

    def cut_into(self, piece: Slice) -> list[Request]:
        """Return the request that a slice is of; none if it is answered."""
        return [piece.whole] if piece.whole in self._of else []


def _forgotten(_piece: Slice, _outcome: Outcome) -> None:
    """Stand where nobody waits any more."""
