# SPDX-License-Identifier: Apache-2.0
"""Requests with the same remembered head that come in one turn of the loop: submitted together, answered together.

Between two system calls Python runs at half of the speed that it has in a loop of its own: the core's caches hold the
kernel by then. So a connection that reads such a request only says that it has come. All of them are made requests of,
and queued, in one go before the next batch is formed; and their answers are all written down before the first is sent.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, cast, runtime_checkable

from forebay.errors import milliseconds_until
from forebay.server.byte_budget import SMALL_BYTES
from forebay.transports.http.connection_state import DUE, IDLE
from forebay.transports.refusal_pacing import tell_each
from forebay.types.call import Outcome, ReplyToAll, Request

if TYPE_CHECKING:
    from forebay.serving.endpoint import EndpointConfig
    from forebay.transports.http.answering import AnsweringConnection
    from forebay.transports.http.head import Head
    from forebay.transports.http.port import HttpPort
    from forebay.transports.http.route import Route

SEPARATE_BYTES: Final = 32 * 1024
"""Answers of this size and more are written after their head instead of being joined with it."""

log = logging.getLogger("forebay")

answers: Final = itertools.count(1)
"""Numbers of answers, for the ids of their requests."""


_call: Final = cast("Callable[[Callable[[bytes], None], bytes], None]", operator.call)


@runtime_checkable
class TakesMany(Protocol):
    """An endpoint that takes many requests at once."""

    @property
    def config(self) -> EndpointConfig:
        """Its times."""
        ...

    @property
    def spare(self) -> int:
        """Samples for which the queue has room."""
        ...

    def expect(self, bring: Callable[[float], None]) -> None:
        """Call this at the end of this turn of the loop at the latest, with the time at which it was expected."""
        ...

    def submit_all(self, requests: Sequence[Request], now: float) -> None:
        """Queue requests of one sample each and without a key, that arrived now and have the usual time."""
        ...

    def next_ticket(self) -> float:
        """Return when a client that is refused now should try again."""
        ...


class Mailbox(list["AnsweringConnection"]):
    """Connections whose requests, all with one remembered head, have arrived in this turn of the loop.

    It does not refer to the head, which refers to it.

    Attributes:
        expect: Has `submit` called soon; to be called before the first of them is added.
    """

    __slots__ = ("_body", "_endpoint", "_length", "_params", "_reply", "_route", "expect")

    def __init__(self, head: Head, route: Route, endpoint: TakesMany, body: slice, reply: SameTurn) -> None:
        """Take requests with a head, of whose bytes `body` is the body."""
        super().__init__()
        self.expect = endpoint.expect
        self._endpoint, self._route, self._reply = endpoint, route, reply
        self._params, self._length, self._body = head.params, head.length, body

    def submit(self, now: float) -> None:
        """Submit all of them, as far as the queue has room, and refuse the others."""
        while self:  # none if who stands alone was in a hurry
            spare = self._endpoint.spare
            if spare <= 0:
                self._refuse()
                return
            arrived = self[:spare]
            del self[:spare]
            self._submit(arrived, now)

    def _refuse(self) -> None:
        lane, arrived, error = self._reply.lane, self[:], self._route.is_full_error
        self.clear()
        self._route.endpoint.reject(error, len(arrived))
        retry_at = error.retry_at
        for connection in arrived:
            connection.arrived = b""
            connection.seen = lane.epoch
            connection.retry_at = retry_at or self._endpoint.next_ticket()
            retry_at = 0.0
        lane.refusals.refuse_all(arrived)

    def _submit(self, arrived: Sequence[AnsweringConnection], now: float) -> None:
        body, params, reply, epoch = self._body, self._params, self._reply, self._reply.lane.epoch
        deadline = now + self._endpoint.config.timeout_s
        requests: list[Request] = []
        for connection in arrived:
            request = connection.request = Request(
                connection.arrived[body], reply, params, connection, deadline, arrived=now
            )
            connection.arrived = b""
            connection.seen = epoch
            requests.append(request)
        if self._length > SMALL_BYTES:
            for connection in arrived:
                connection.work(self._length)
        self._endpoint.submit_all(requests, now)


class SameTurn(ReplyToAll):
    """What the connections of a port answer together.

    A request that has it as its reply is the only one of its connection: as soon as more comes there, it is answered
    by itself.
    """

    __slots__ = ("lane",)

    def __init__(self, lane: HttpPort) -> None:
        self.lane = lane

    def __call__(self, request: Request, outcome: Outcome) -> None:
        """Answer one of them."""
        connection: Any = request.origin
        connection.reply(request, outcome)

    def to_all(self, requests: Sequence[Request], outcomes: Sequence[Outcome]) -> Sequence[tuple[Request, Outcome]]:
        """Answer several of them, all but those whose answer is not the common one."""
        lane = self.lane
        if not lane.is_plain or {*map(type, outcomes)} != {bytes}:
            return list(zip(requests, outcomes, strict=True))
        head, prefix, is_counted = None, b"", False
        sends: list[Callable[[bytes], None]] = []
        texts: list[bytes] = []
        others: list[tuple[Request, Outcome]] = []
        for request, outcome in zip(requests, outcomes, strict=True):
            size = len(outcome)
            if request.id or size >= SEPARATE_BYTES:
                others.append((request, outcome))
                continue
            connection: Any = request.origin
            if connection.active is not head:
                head = connection.active
                prefix = head.prefix if head.stamp == lane.epoch else lane.write_prefix(head)
                is_counted = head.length > SMALL_BYTES
            if is_counted:
                connection.worked()
            connection.active = connection.request = None
            connection.talk.state = IDLE  # SETTLED
            sends.append(connection.send)
            texts.append(b"%b%x\r\ncontent-length: %d\r\n\r\n%b" % (prefix, next(answers), size, outcome))
        _write(sends, texts)
        lane.refusals.answered()
        return others

    def tell_refused(self, clients: Sequence[AnsweringConnection]) -> None:
        """Tell clients that they came to a full queue; it is logged once for all that get the common answer."""
        lane = self.lane
        alike: dict[Head, list[AnsweringConnection]] = {}
        others: list[AnsweringConnection] = []
        for client in clients:
            head, talk = client.active, client.talk
            if head is None or talk.state is not DUE or talk.waiting or client.refusal is not None:
                others.append(client)
            elif head in alike:
                alike[head].append(client)
            else:
                alike[head] = [client]
        for head, together in alike.items():
            if not lane.is_plain or head.id or not head.keep_alive:
                others += together
                continue
            assert head.route is not None
            lane.tell(head.route.is_full_error, together[0].client, len(together))
            refusal = head.refusal if head.refusal_stamp == lane.epoch else lane.write_refusal(head)
            now = time.monotonic()
            for client in together:
                client.worked()  # its body may have been counted meanwhile
                client.active = None
                client.talk.state = IDLE  # SETTLED
            lane.note_refusals(head.route.is_full_error, next(answers) + 1, len(together))
            texts = [_refused(refusal, client.retry_at, now) for client in together]
            _write([client.send for client in together], texts)
        tell_each(others)


def _refused(refusal: bytes, retry_at: float, now: float) -> bytes:
    milliseconds = milliseconds_until(retry_at, now)
    return refusal % {b"s": -(-milliseconds // 1000), b"ms": milliseconds, b"number": next(answers)}


def _write(sends: Iterable[Callable[[bytes], None]], texts: Iterable[bytes]) -> None:
    writing = map(_call, sends, texts)
    while True:
        try:
            deque(writing, maxlen=0)
        except Exception:  # of one of them: the others are written all the same
            log.exception("failed to deliver an answer")
        else:
            return
