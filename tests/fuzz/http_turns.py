# SPDX-License-Identifier: Apache-2.0
"""Several clients of the HTTP door in the same turns of the loop: some send more, leave, do not read, or are refused.

Their requests have heads that are remembered, so that they are queued and answered together. Every body is another
one: whoever got the answer of somebody else would be seen. What each client gets, one byte after the other and alone,
is what it must get here too; but for a queue that said that it is full, and for a deadline that has passed.
"""

import collections
import logging
from typing import Any

from tests.fuzz.http_side import KEYS, answers_of, are_same
from tests.unit.transports.http.driven import Transport

from forebay.errors import DeadlineExceeded
from forebay.transports.http.connection import HttpConnection
from forebay.types.call import Failure

LATE = Failure(DeadlineExceeded("too late"))
EXTRA = ["", "", "", "X-Request-Timeout-Ms: 5000\r\n", "X-Request-Id: one\r\n", "Connection: close\r\n"]


class _Clogging(Transport):
    """Now and then has no more room, which it says within a write."""

    def __init__(self, chance):
        super().__init__()
        self._chance = chance
        self.connection: Any = None
        self.is_stuck = False

    def write(self, data):
        super().write(data)
        if self._chance.random() < 0.1:
            self.clog()

    def writelines(self, list_of_data):
        self.write(b"".join(list_of_data))

    def clog(self):
        if not self.is_stuck:
            self.is_stuck = True
            self.connection.pause_writing()

    def clear(self):
        if self.is_stuck:
            self.is_stuck = False
            self.connection.resume_writing()


class _Refusals(collections.deque):
    """Tells those who are refused at once, after answers, or later; some of them together."""

    def __init__(self, chance, side):
        super().__init__()
        self._chance = chance
        self._side = side
        self._tell_all = side.door.lane.same_turn.tell_refused

    def refuse(self, who):
        self.append(who)
        if self._chance.random() < 0.4:
            self.stop()

    def refuse_all(self, clients):
        assert all(each.active.route.endpoint.spare <= 0 for each in clients), "refused where there is room"
        self._side.refused += len(clients)
        self.extend(clients)
        if self._chance.random() < 0.4:
            self.stop()

    def answered(self):
        if self._chance.random() < 0.4:
            self.stop()

    def stop(self):
        while self:
            self._tell_all([self.popleft() for _ in range(self._chance.randint(1, len(self)))])


class _Faults(logging.Handler):
    """What is logged as a defect."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if record.exc_info:
            self.found.append(self.format(record))


class _Client:
    """One connection, and what it has to send."""

    def __init__(self, door, data, segments, chance):
        self.data = data
        self.segments = collections.deque(segments)
        self.is_gone = self.has_left = False
        self.transport = _Clogging(chance)
        self.connection = self.transport.connection = HttpConnection(door.lane)
        self.connection.connection_made(self.transport)

    @property
    def can_send(self):
        return bool(self.segments) and not self.transport.is_closed and not self.transport.is_paused

    def send(self):
        data = self.segments.popleft()
        if self.transport.protocol is None:
            self.connection.data_received(data)
        elif data := self.transport.receive(data):
            self.segments.appendleft(data)

    def leave(self, *, aborts=False):
        """Goes away; what is aborted is told so later."""
        self.has_left = True
        if aborts and not self.is_gone:
            self.connection.abort()
        else:
            self.lose()

    def lose(self):
        if not self.is_gone:
            self.is_gone = True
            self.transport.is_closed = True
            self.connection.connection_lost(None)


def crowd(warm, cold, chance, number):
    """Have several clients send in the same turns; returns the number of requests, and what differed."""
    heads = [_head(chance) for _ in range(chance.choice([1, 1, 2, 3]))]
    streams = [_stream(chance, heads, f"{number}.{index}.") for index in range(chance.randint(2, 9))]
    for head in heads:
        warm.run([_message(head, "b", "learned.")])
    warm.came.clear()
    warm.refused = warm.turned_away = 0
    door, faults = warm.door, _Faults()
    line, door.lane.refusals = door.lane.refusals, _Refusals(chance, warm)
    rooms = [chance.choice([1, 2, 4]) if chance.random() < 0.3 else 1_000_000 for _ in range(2)]
    door.alpha.room, door.beta.room = rooms
    logging.getLogger("forebay").addHandler(faults)
    clients = [_Client(door, b"".join(messages), _cut(chance, messages), chance) for messages in streams]
    crowded = _Crowd(warm, clients, chance)
    try:
        while any(client.segments and not client.transport.is_closed for client in clients):
            crowded.turn()
        crowded.end()
        found = [_found(warm, client) for client in clients]
        ended = [client.transport.is_closed or client.transport.has_ended for client in clients]
        for client in clients:
            client.lose()
        assert not warm.pending, "a request of a client that is gone was not called off"
        assert not any(memory.mailbox for memory in door.lane.heads.values()), "a request was never submitted"
        assert not door.lane.connections, "a connection is kept"
        looked_at = door.lane.awake.union(*door.lane._asleep.values())
        assert not looked_at, "a connection that is gone is looked at"
        assert door.lane.byte_budget.held_bytes == 0, "bodies that are gone are counted"
    finally:
        logging.getLogger("forebay").removeHandler(faults)
        for client in clients:
            client.lose()
        warm.is_closed = False
        door.alpha.room = door.beta.room = 1_000_000
        door.lane.refusals = line
    requests = sum(map(len, streams))
    if faults.found:
        return requests, faults.found[0]
    spared = collections.Counter({429: warm.refused, 504: crowded.late, 503: warm.turned_away})
    for client, got, has_ended in zip(clients, found, ended, strict=True):
        expected = cold.run([bytes([byte]) for byte in client.data])
        cold.door.lane.forget()
        used = _used(client, (got[0], has_ended, got[1]), expected)
        if used is None:
            shown = f"a client of {len(clients)} in the same turns sent: {client.data}\ngot: {got}, {has_ended}"
            return requests, f"{shown}\nalone: {expected}\nit has left: {client.has_left}, rooms: {rooms}"
        spared.subtract(used)
    if min(spared.values()) < 0:
        return requests, f"more were refused than there was need for: {spared}, {found}"
    if spared[429] and not any(client.has_left for client in clients):
        return requests, f"the queue has turned away more than were told: {spared}, {found}"
    return requests, None


class _Crowd:
    """Drives the clients, turn by turn."""

    def __init__(self, side, clients, chance):
        self.side = side
        self.clients = clients
        self.chance = chance
        self.late = 0
        self._running = []

    def turn(self):
        """One turn of the loop: some send, some go, and some things are answered in between."""
        chance, door = self.chance, self.side.door
        for client in chance.sample(self.clients, len(self.clients)):
            roll = chance.random()
            if roll < 0.02:
                client.leave(aborts=chance.random() < 0.5)
            while client.can_send and chance.random() < (0.1 if client.connection.talk.state.owes else 0.9):
                client.send()
            if 0.02 < roll < 0.04:
                client.leave(aborts=chance.random() < 0.5)
            elif roll > 0.95 and not client.transport.is_closed:
                client.transport.clog()
            if chance.random() < 0.05:
                self._work()
        if chance.random() < 0.1:
            chance.choice(self.clients).leave(aborts=chance.random() < 0.5)  # others have arrived before and after it
        if chance.random() < 0.01:
            self.side.is_closed = True
        if chance.random() < 0.01:
            door.lane.forget()
        if chance.random() < 0.03:
            door.pass_seconds(chance.choice([1, 1, 3]))  # in three of them who says nothing falls asleep
        door.bring()
        self._work()
        for client in self.clients:
            if client.transport.is_closed and client.has_left:
                client.lose()
            elif chance.random() < 0.4 and not client.transport.is_closed:
                client.transport.clear()
        if chance.random() < 0.3:
            door.turn()

    def _work(self):
        """Batches begin, and end; a deadline passes."""
        chance, side = self.chance, self.side
        for endpoint in (side.door.alpha, side.door.beta):
            if endpoint.asked and chance.random() < 0.7:
                self._running.append((endpoint, side.start(endpoint, chance.choice([1, 3, 100, 100]))))
        chance.shuffle(self._running)
        while self._running and chance.random() < 0.5:
            side.end(*self._running.pop())
        if side.pending and chance.random() < 0.03:
            self.late += 1
            side.answer(chance.randrange(len(side.pending)), LATE)
        if chance.random() < 0.2:
            side.door.lane.refusals.stop()

    def end(self):
        """Everything that is due is answered."""
        side = self.side
        is_over = False
        while not is_over:
            side.door.bring()
            for client in self.clients:
                if not client.transport.is_closed:
                    client.transport.clear()
            side.door.lane.refusals.stop()
            while self._running:
                side.end(*self._running.pop())
            side.settle()
            is_over = not (
                side.pending
                or side.door.lane.refusals
                or any(client.transport.is_stuck and not client.transport.is_closed for client in self.clients)
            )


def _head(chance):
    name = chance.choice(["alpha", "alpha", "beta"])
    key = chance.choice([*KEYS, *KEYS, *KEYS, "k3"])
    extra = chance.choice(EXTRA) if chance.random() < 0.3 else ""
    size = chance.choice([16, 30, 60])
    return (
        f"POST /models/{name} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n{extra}Content-Length: {size}\r\n\r\n"
    )


def _message(head, mark, name):
    size = int(head.split()[-1])
    return head.encode() + b'"%b"' % f"{mark}{name}".encode().ljust(size - 2, b"b")


def _stream(chance, heads, name):
    """The messages of a client; the last one may be cut short, or spoiled."""
    found = [
        _message(chance.choice(heads), chance.choices("bFL", [20, 1, 1])[0], f"{name}{index}.")
        for index in range(chance.choice([1, 2, 4, 6]))
    ]
    if chance.random() < 0.15:
        last = found[-1]
        at = chance.randrange(1, len(last))
        found[-1] = chance.choice([last[:at], last[:at] + b"\0" + last[at:], b"\xff" * at])
    return found


def _cut(chance, messages):
    """One after the other, several at once, or one and the half of the next."""
    if chance.random() < 0.8:
        return list(messages)
    data = b"".join(messages)
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(4)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


def _found(side, client):
    return answers_of(client.transport.written), [seen for origin, seen in side.came if origin is client.connection]


def _used(client, got, expected):
    """How many answers had to be others, by status; None if one was another without need."""
    answers, has_ended, came = got
    others, other_ended, others_came = expected
    used = collections.Counter()
    for index, (one, other) in enumerate(zip(answers, others, strict=False)):
        if one != other and one[0] in (429, 503, 504):
            answers[index] = other
            used[one[0]] += 1
    reached = [each for each in others_came if each[0].startswith(b"/models/")]
    in_order = iter(reached)
    if not all(each in in_order for each in came):
        return None
    if client.has_left:
        return used if answers == others[: len(answers)] else None
    if len(came) + used[429] != len(reached):
        return None
    return used if are_same((answers, has_ended, came), (others, other_ended, came)) else None
