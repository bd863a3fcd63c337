# SPDX-License-Identifier: Apache-2.0
"""One side of the fuzz of the HTTP door: a door, what reaches its models and its application, and what it answers."""

import asyncio
import collections
import json

from tests.unit.transports.http.driven import Door

from forebay.errors import Unavailable, UserCodeError
from forebay.transports.http.same_turn import SEPARATE_BYTES
from forebay.types.call import Failure, ReplyToAll
from forebay.workers.memory import landing

KEYS = ("k1", "k2")
LIMITS = {"api_keys": KEYS, "max_body_bytes": 3000, "max_head_bytes": 2000}
CLOSED = Failure(Unavailable("the server stops"))
BROKEN = {400, 408, 413, 431, 501}


class App:
    """Tells what it was asked; without a key it tells so, without reading the body."""

    def __init__(self, seen):
        self.seen = seen

    async def __call__(self, scope, receive, send):
        path, keys = scope["path"], [value for name, value in scope["headers"] if name == b"x-api-key"]
        body = b""
        is_known = any(key.decode("latin-1").strip() in KEYS for key in keys)
        if is_known and path != "/early":
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return
                body += message["body"]
                if not message["more_body"]:
                    break
            self.seen.append((scope["raw_path"], body))
        text = b"%b %b %b" % (scope["method"].encode(), path.encode(), body) if is_known else b"no key"
        await asyncio.sleep(0)
        length = (b"content-length", b"%d" % len(text))
        await send({"type": "http.response.start", "status": 200 if is_known else 401, "headers": [length]})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else text})


class Side:
    """A door, and what reached its models and its application.

    Attributes:
        pending: Endpoints and requests that were not answered.
        came: Connections and bodies of what reached the models.
        together: How often several requests were submitted at once.
        shared: How often several were answered at once.
        refused: How often a queue said that it is full.
        is_closed: Whether the models take nothing more, and say so at once.
        turned_away: How often they did.
    """

    def __init__(self, *, lands=False):
        self.pending = []
        self.seen = []
        self.came = []
        self.together = self.shared = self.refused = self.turned_away = 0
        self.is_closed = False
        self.door = Door(app=App(self.seen), waits=True, **LIMITS)
        for endpoint in (self.door.alpha, self.door.beta):
            endpoint.submit = self._submit(endpoint)
            endpoint.submit_all = self._submit_all(endpoint)
            endpoint.is_full = self._is_full(endpoint)
            for route in self.door.routes.values():
                if route.endpoint is endpoint:
                    endpoint.cancel = self.cancel
                    if lands:
                        route.places = landing.HERE
        self.door.lane.forget()

    def _submit(self, endpoint):
        def submit(request):
            self.seen.append((b"/models/" + endpoint.name.encode(), bytes(request.body)))
            self.came.append((request.origin, self.seen[-1]))
            if self.is_closed:
                self.turned_away += 1
                request.reply(request, CLOSED)
                return
            self.pending.append((endpoint, request))
            endpoint.asked.append(request)  # it waits in the queue
            assert endpoint.spare >= 0, "a full queue was given more"

        return submit

    def _submit_all(self, endpoint):
        def submit_all(requests, now):
            self.together += len(requests) > 1
            for request in requests:
                endpoint.submit(request)

        return submit_all

    def _is_full(self, endpoint):
        def is_full():
            self.refused += endpoint.spare <= 0
            return endpoint.spare <= 0

        return is_full

    def cancel(self, request):
        self.pending = [pair for pair in self.pending if pair[1] is not request]
        for endpoint in (self.door.alpha, self.door.beta):
            endpoint.asked = [each for each in endpoint.asked if each is not request]

    def start(self, endpoint, count):
        """Takes so many requests out of the queue, as a batch that runs."""
        batch, endpoint.asked = endpoint.asked[:count], endpoint.asked[count:]
        return batch

    def end(self, endpoint, batch):
        """Answers a batch as an endpoint does: those whose client left while it ran get nothing."""
        left = [request for request in batch if any(request is each for _, each in self.pending)]
        outcomes = [outcome_of(endpoint, request) for request in left]
        for request in left:
            self.cancel(request)
        replies = {id(request.reply) for request in left}
        pairs = list(zip(left, outcomes, strict=True))
        is_plain = len(left) == len(batch) and Failure not in set(map(type, outcomes))
        if is_plain and len(replies) == 1 and isinstance(left[0].reply, ReplyToAll):
            self.shared += len(left) > 1
            pairs = left[0].reply.to_all(left, outcomes)
        for request, outcome in pairs:
            request.reply(request, outcome)

    def answer(self, index=0, outcome=None):
        endpoint, request = self.pending[index]
        self.cancel(request)
        request.reply(request, outcome or outcome_of(endpoint, request))

    def answer_together(self):
        """Answers those at once that share a reply, as an endpoint does with a batch."""
        together = [pair for pair in self.pending if isinstance(pair[1].reply, ReplyToAll)]
        if together:
            requests = [request for _, request in together]
            for request in requests:
                self.cancel(request)
            for request, outcome in requests[0].reply.to_all(requests, [outcome_of(*pair) for pair in together]):
                request.reply(request, outcome)

    def settle(self):
        """Lets everything that is due be answered."""
        tasks = self.door.lane.server_state.tasks
        self.door.bring()
        while self.pending or tasks:
            before = set(tasks)
            self.answer_together()
            while self.pending:
                self.answer()
            self.door.turn()
            if not self.pending and before == tasks:
                return  # they wait for more of their bodies

    def run(self, segments, chance=None):
        """Sends segments over a new connection as a transport would; returns what came of it."""
        self.seen.clear()
        self.came.clear()
        client = self.door.connect()
        connection, transport = client.connection, client.transport
        is_stuck = False
        left = collections.deque(segments)
        while left:
            while transport.is_paused and not transport.is_closed:
                if is_stuck:
                    connection.resume_writing()
                    is_stuck = False
                self.settle()
            if transport.is_closed:
                break
            data = left.popleft()
            if transport.protocol is None:
                connection.data_received(data)
            elif data := transport.receive(data):
                left.appendleft(data)
            if chance is None:
                self.settle()
            else:
                if chance.random() < 0.5:
                    self.door.bring()
                while self.pending and chance.random() < 0.3:
                    self.answer()
                if chance.random() < 0.3:
                    self.answer_together()
                if chance.random() < 0.3:
                    self.door.turn()
                if is_stuck != (chance.random() < 0.1):
                    is_stuck = not is_stuck
                    (connection.pause_writing if is_stuck else connection.resume_writing)()
        if is_stuck:
            connection.resume_writing()
        self.settle()
        ended = transport.is_closed or transport.has_ended
        found = answers_of(transport.written), ended, list(self.seen)
        if not connection._lane.connections:
            raise AssertionError("the lane has lost a connection")
        connection.connection_lost(None)
        self.door.clients.remove(client)
        self.settle()
        assert connection._lane.byte_budget.held_bytes == 0, "bodies that are gone are counted"
        return found

    def close(self):
        self.door.close()


def outcome_of(endpoint, request):
    """What a model makes of a request: one that begins with F fails, the answer to one with L is large."""
    shown = json.dumps(dict(request.params), sort_keys=True).encode()
    mark = bytes(request.body)[1:2]
    if mark == b"F":
        return Failure(UserCodeError(f"no {bytes(request.body)!r}"))
    return b"%b %b %b%b" % (endpoint.name.encode(), shown, request.body, b"L" * (mark == b"L") * SEPARATE_BYTES)


def answers_of(written):
    """The answers, without what differs from one to the next by design: ids, dates, and whether to go on."""
    found = []
    while written:
        head, _, written = written.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        status = int(first.split()[1])
        if status == 100:
            continue
        headers = dict(line.split(": ", 1) for line in lines)
        length = int(headers.get("content-length", 0))
        body, written = written[:length], written[length:]
        if headers.get("content-type") == "application/json" and status >= 400:
            error = json.loads(body)["error"]
            body = json.dumps([error["code"], error["message"]]).encode()
        found.append((status, headers.get("content-type"), body))
    return found


def are_same(got, expected):
    """Whether the same came of it; a body that breaks off may be told of, or what was answered without reading it."""
    (one, *rest), (other, *others) = got, expected
    if one != other and rest == others and one and other and one[:-1] == other[:-1]:
        return any(
            a[1] is not None and a[0] in BROKEN and _is_early(b)
            for a, b in [(one[-1], other[-1]), (other[-1], one[-1])]
        )
    return got == expected


def _is_early(answer):
    return answer[1] is None and (answer[0] == 401 or answer[2].endswith(b" /early "))
