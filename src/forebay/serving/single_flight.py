# SPDX-License-Identifier: Apache-2.0
"""Equal requests that are open at the same time run once: a flight, whose members all get the answer.

Theory of operation. The first request of its content is queued as a slice that is all of it. Requests that come with
equal content until the answer is there become members: they wait in no queue. The slice stays in its place whoever of
them leaves, and is abandoned with the last one. It is queued anew for a member that would leave the queue earlier by
itself: one that is due earlier, or whose tenant has less waiting. If the run fails, its first member gets the error;
the others are queued each by itself. Each member pays an equal part of what the run has cost.

Whoever is not first gets a copy of the outcome. Copies that take long, or call code of the user's, are made in a
thread, and nobody is answered before they are there: the first one may change what it gets.

The queue drops what cannot be in time any more. A flight that is dropped so is queued anew for the members that have
more time; while a member that has left may be the cause, a timer sees to that.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from forebay.errors import ForebayError, TooLate
from forebay.types.call import ALONE, Failure, Media, Outcome, Request, Slice
from forebay.types.context import PARAM
from forebay.types.fingerprint import Content, content_of, digest_of
from forebay.workers.user_calls.user_code import attempt
from forebay.workers.wire.objects import Packed

if TYPE_CHECKING:
    from forebay.batching.batcher import Batcher
    from forebay.batching.queue import BatchQueue
    from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
    from forebay.types.settings import Sharing
    from forebay.types.tenant import Tenant

_NEVER: Final = float("inf")
_EARLY_S: Final = 0.001
_QUICK_VALUES: Final = 1024
"""Values in copies that are made on the loop; more of them take longer than a millisecond."""
_UNCHANGING: Final[frozenset[type[Any]]] = frozenset({bytes, str, int, float, bool, type(None), memoryview, Media})
"""Types of outcomes that nobody changes; memory that outcomes refer to is read-only."""


class _Flight:
    """Requests with equal content.

    Attributes:
        members: In the order in which they came.
        piece: What stands for them in the queue, or runs.
        timer: Looks whether the queue has dropped that.
    """

    __slots__ = ("content", "digest", "members", "piece", "timer")

    piece: Slice

    def __init__(self, content: Content, digest: bytes, first: Request) -> None:
        self.content = content
        self.digest = digest
        self.members: dict[Request, None] = {first: None}
        self.timer: asyncio.TimerHandle | None = None


class Flights:
    """The flights of an endpoint.

    Attributes:
        batcher: Drives the queue; set when the endpoint starts, as is the next.
        later: Calls a function with an argument in so many seconds.
    """

    batcher: Batcher
    later: Callable[..., asyncio.TimerHandle]

    def __init__(
        self,
        sharing: Sharing,
        queue: BatchQueue,
        most: int,
        settle: Callable[[Request, Outcome], None],
        metrics: EndpointMetrics,
    ) -> None:
        """Begin without any; at most so many requests are members at a time, and others are queued by themselves."""
        self._is_for_all = sharing == "all"
        self._queue = queue
        self._most = most
        self._settle = settle
        self._metrics = metrics
        self._flights: dict[bytes, _Flight] = {}
        self._of: dict[Request, _Flight] = {}
        metrics.shared = 0

    def __contains__(self, request: Request) -> bool:
        return request in self._of

    def offer(self, request: Request, now: float) -> None:
        """Have a request share the run of an equal one, or queue it.

        Raises:
            ForebayError: From the queue; nothing became of the request.
        """
        content = self._content(request)
        if content is None:
            self._queue.offer(request, now)
            return
        digest = digest_of(content)
        flight = self._flights.get(digest)
        if flight is None:
            flight = _Flight(content, digest, request)
            self._launch(flight, request.tenant, request.due, request.deadline, now)
            self._flights[digest] = flight
            self._of[request] = flight
            request.arrived = now
        elif flight.content == content:
            self._join(flight, request, now)
        else:
            self._queue.offer(request, now)

    def of(self, request: Request) -> Sequence[Request | Slice]:
        """Return what stands for a request in the queue or runs: the slice of its flight, or itself if it has none."""
        flight = self._of.get(request)
        return [request] if flight is None else [flight.piece]

    def leave(self, request: Request) -> Sequence[Slice]:
        """Let a member go; returns what nobody waits for any more."""
        flight = self._of.pop(request)
        members, piece = flight.members, flight.piece
        del members[request]
        if piece.done:
            return []
        if not members:
            self._forget(flight)
            return [piece]
        piece.whole = next(iter(members))
        if flight.timer is None and piece.taken in {0.0, _NEVER}:
            self._watch(flight)
        return []

    def payers(self, piece: Any) -> Sequence[Any]:
        """Return the requests that share the cost of what has run; itself if it is not a flight."""
        if type(piece) is not Slice:
            return (piece,)
        flight = self._of.get(piece.whole)
        return (piece,) if flight is None else [*flight.members]

    def evict(self, piece: Slice, failure: Failure) -> bool:
        """End the members of the tenant whose slice has to leave the queue; others are queued anew, as theirs.

        Returns:
            False if it is not a flight.
        """
        flight = self._of.get(piece.whole)
        if flight is None:
            return False
        for member in list(flight.members):
            is_mine = (_name(member.tenant), _child(member.tenant)) == (_name(piece.tenant), _child(piece.tenant))
            if is_mine and not member.done:
                self._settle(member, failure)
        if flight.members:
            self._queue.cancel(piece)
            self._watch(flight)
        return True

    def _content(self, request: Request) -> Content | None:
        """Return what has to be equal; None if the request is not shared."""
        if request.key is ALONE or PARAM in request.params or len(self._of) >= self._most:
            return None
        tenant = None if self._is_for_all else _name(request.tenant)
        body = request.body
        if type(body) is dict:  # the inputs of a node of a graph
            inputs = cast("dict[str, Any]", body)
            body = {name: value.parts if type(value) is Packed else value for name, value in inputs.items()}
        return content_of(tenant, request.size, request.params, body)

    def _join(self, flight: _Flight, request: Request, now: float) -> None:
        """Make a request a member; the slice moves if the request would leave the queue earlier by itself.

        Raises:
            TooLate: The request states a deadline that it cannot meet.
        """
        piece = flight.piece
        if not piece.taken and request.due < piece.due:
            self._queue.admit(request, now)
        flight.members[request] = None
        self._of[request] = flight
        request.arrived = now
        if not piece.taken and (request.due < piece.due or self._is_lighter(request.tenant, piece.tenant)):
            self._queue.cancel(piece)
            piece.done = True
            due, latest = min(request.due, piece.due), max(request.deadline, piece.deadline)
            self._renew(flight, request.tenant, due, latest, now)

    def _is_lighter(self, tenant: Tenant | None, other: Tenant | None) -> bool:
        """Tell whether what a tenant queues now is expected to leave before what waits of another."""
        fair = self._queue.fair
        return tenant is not other and fair is not None and fair.is_lighter(tenant, other)

    def _launch(self, flight: _Flight, tenant: Tenant | None, due: float, latest: float, now: float) -> None:
        """Queue a flight.

        Args:
            tenant: Whose turn it takes.
            due: The earliest deadline that a member states.
            latest: The latest deadline of a member.

        Raises:
            ForebayError: From the queue.
        """
        first = next(iter(flight.members))
        piece = Slice(
            whole=first,
            body=first.body,
            reply=self._landed,
            deadline=latest if due == _NEVER else due,
            params=first.params,
            size=first.size,
            key=first.key,
            origin=first.origin,
            rank=first.rank,
            tenant=tenant,
            due=due,
        )
        self._queue.offer(piece, now)
        flight.piece = piece
        if flight.timer is not None:
            self._watch(flight)

    def _renew(self, flight: _Flight, tenant: Tenant | None, due: float, latest: float, now: float) -> None:
        """Queue a flight that is not in the queue any more; without room its members end."""
        try:
            try:
                self._launch(flight, tenant, due, latest, now)
            except TooLate:  # its members end at their deadlines, each by itself
                self._launch(flight, tenant, _NEVER, latest, now)
        except ForebayError as error:
            flight.piece.done = True
            self._forget(flight)
            for member in list(flight.members):
                if not member.done:
                    self._settle(member, Failure(error))
        self.batcher.wake()

    def _watch(self, flight: _Flight) -> None:
        """Look at a flight when the queue may have dropped it."""
        if flight.timer is not None:
            flight.timer.cancel()
        piece = flight.piece
        delay_s = 0.0 if piece.taken == _NEVER else max(piece.deadline - time.monotonic(), 0.0)
        flight.timer = self.later(delay_s, self._look, flight)

    def _look(self, flight: _Flight) -> None:
        """Queue a flight anew if the queue has dropped it, or is about to."""
        flight.timer = None
        piece, now = flight.piece, time.monotonic()
        if piece.done or not flight.members or 0.0 < piece.taken < _NEVER:
            return
        if not piece.taken:
            if piece.deadline > now + _EARLY_S:
                self._watch(flight)
                return
            self._queue.cancel(piece)
        members = [member for member in flight.members if member.deadline > now + _EARLY_S]
        if members:  # others end in this moment
            piece.done = True
            due = min(member.due for member in members)
            self._renew(flight, members[0].tenant, due, max(member.deadline for member in members), now)

    def _landed(self, piece: Slice, outcome: Outcome) -> None:
        """Answer the members of a flight that has run."""
        flight = self._of.get(piece.whole)
        if flight is None or flight.piece is not piece:
            return
        self._forget(flight)
        members = list(flight.members)
        for member in members:
            member.taken = max(piece.taken, member.arrived)
        if type(outcome) is Failure:
            first, *others = members
            self._settle(first, outcome)
            self._run_again(others)
            return
        count = len(members) - 1
        if _is_quick(outcome, count):
            self._share(members, outcome, _copies(outcome, count))
            return
        copying = asyncio.get_running_loop().run_in_executor(None, _copies, outcome, count)
        copying.add_done_callback(lambda done: self._share(members, outcome, done.result()))

    def _share(self, members: Sequence[Request], outcome: Outcome, copies: Sequence[Outcome]) -> None:
        """Answer members with an outcome, the first one, and its copies; without a copy they run again."""
        first, *others = members
        again: list[Request] = []
        for member, its in zip(others, copies, strict=True):
            if type(its) is Failure:
                again.append(member)
            elif not member.done:
                self._answer(member, its)
                self._metrics.shared = (self._metrics.shared or 0) + 1
        if not first.done:
            self._answer(first, outcome)
        self._run_again(again)

    def _answer(self, member: Request, outcome: Outcome) -> None:
        self._metrics.queue_s.observe(member.taken - member.arrived)
        self._settle(member, outcome)

    def _run_again(self, members: Sequence[Request]) -> None:
        """Queue members of a flight each by itself."""
        now = time.monotonic()
        for member in members:
            if member.done:
                continue
            del self._of[member]
            member.taken = 0.0
            try:
                self._queue.offer(member, now)
            except ForebayError as error:
                member.taken = _NEVER  # it is in no queue
                self._settle(member, Failure(error))
        if members:
            self.batcher.wake()

    def _forget(self, flight: _Flight) -> None:
        """Let nobody join any more."""
        if self._flights.get(flight.digest) is flight:
            del self._flights[flight.digest]
        if flight.timer is not None:
            flight.timer.cancel()
            flight.timer = None


def _name(tenant: Tenant | None) -> str:
    return "" if tenant is None else tenant.name


def _child(tenant: Tenant | None) -> str:
    return "" if tenant is None else tenant.child


def _is_quick(outcome: Outcome, count: int) -> bool:
    """Tell whether so many copies of an outcome are made at once."""
    if not count or type(outcome) in _UNCHANGING:
        return True
    left = _QUICK_VALUES // count
    values: list[Any] = [*outcome[: left + 1]] if isinstance(outcome, list) else [outcome]
    while values and left:
        one = values.pop()
        left -= 1
        if type(one) is list or type(one) is tuple:
            values += one[: left + 1]
        elif type(one) not in _UNCHANGING:
            return False
    return not values


def _copies(outcome: Outcome, count: int) -> list[Outcome]:
    return [_own(outcome) for _ in range(count)]


def _own(outcome: Outcome) -> Outcome:
    """Return a copy of an outcome whose changes nobody else sees; a `Failure` if it cannot be copied."""
    if type(outcome) in _UNCHANGING:
        return outcome
    if not isinstance(outcome, list):
        return attempt(copy.deepcopy, outcome)
    own: list[Any] = copy.copy(cast("list[Any]", outcome))  # of its type, with what it says beside its elements
    for place, one in enumerate(own):
        if type(one) not in _UNCHANGING:
            own[place] = attempt(copy.deepcopy, one)
            if type(own[place]) is Failure:
                return own[place]
    return own
