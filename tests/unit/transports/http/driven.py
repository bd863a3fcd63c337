# SPDX-License-Identifier: Apache-2.0
"""A `HttpConnection` without a socket: the test gives it segments and seconds, and reads what it wrote."""

import asyncio
import re
import warnings
from typing import Any

from forebay.batching.queue import BatchConfig
from forebay.errors import QueueFull
from forebay.protocols.native import Contract
from forebay.server.config import HttpConfig
from forebay.server.served import StandIn
from forebay.serving.endpoint import EndpointConfig
from forebay.transports.http.connection import HttpConnection
from forebay.transports.http.port import HttpPort
from forebay.transports.http.route import Route


class Endpoint:
    """Answers with its name and the body, at once or when it is told to."""

    places = None
    batching = BatchConfig(max_size=1, capacity=100)
    answering = None

    def __init__(self, name, *, waits=False):
        self.name = name
        self.config = EndpointConfig(name=name)
        self.room = 1_000_000
        self.waits = waits
        self.asked = []
        self.gone = []
        self.rejected = []
        self.bringers = []
        self.ticket = self.step_s = 0.0

    def submit(self, request):
        self.asked.append(request)
        if not self.waits:
            request.reply(request, self.name.encode() + b" " + request.body)

    @property
    def spare(self):
        return self.room - len(self.asked)

    def expect(self, bring):
        self.bringers.append(bring)

    def bring(self):
        """Ends a turn of the loop: what has arrived is submitted."""
        while self.bringers:
            self.bringers.pop(0)(0.0)

    def submit_all(self, requests, now):
        assert requests
        for request in requests:
            self.submit(request)

    def is_full(self):
        return len(self.asked) >= self.room

    def is_full_for(self, tenant):
        del tenant
        return self.is_full()

    def answer(self):
        request = self.asked[-1]
        request.reply(request, self.name.encode() + b" " + request.body)

    def cancel(self, request):
        self.gone.append(request)

    def reject(self, error, times=1, tenant=None):
        self.rejected += [error] * times
        if isinstance(error, QueueFull):
            error.retry_at = self.next_ticket()

    def next_ticket(self):
        self.ticket += self.step_s
        return self.ticket


class Transport(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self):
        super().__init__()
        self.written = b""
        self.is_closed = self.has_ended = self.is_paused = False
        self.protocol: Any = None
        self.unread = 0

    def write(self, data):
        assert not self.is_closed
        assert not self.has_ended, "a write after the end"
        self.written += data

    def get_write_buffer_size(self):
        return self.unread

    def set_write_buffer_limits(self, high=None, low=None):
        pass

    def get_extra_info(self, name, default=None):
        return {"peername": ("192.0.2.1", 7), "socket": self}.get(name, default)

    def fileno(self):
        return -1

    def getpeername(self):
        return "192.0.2.1", 7

    def getsockname(self):
        return "192.0.2.2", 80

    def is_closing(self):
        return self.is_closed

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.has_ended = True

    def close(self):
        self.is_closed = True

    def abort(self):
        self.is_closed = True

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False

    def set_protocol(self, protocol):
        self.protocol = protocol

    def receive(self, data):
        """Hands on what has come, as a transport does; returns what was not read, for it was told to pause."""
        while data and self.protocol is not None:
            room = self.protocol.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self.protocol.buffer_updated(size)
            data = data[size:]
            if self.is_paused or self.is_closed:
                return data
        return data


class Client:
    """One connection."""

    def __init__(self, door):
        self.door = door
        self.connection = HttpConnection(door.lane)
        self.transport = Transport()
        self.connection.connection_made(self.transport)

    @property
    def state(self):
        return self.connection.talk.state

    def send(self, *segments, brings=True):
        for data in segments:
            if self.transport.protocol is None:
                self.connection.data_received(data)
            else:
                assert not self.transport.receive(data)
            if brings:
                self.door.bring()
        return self

    def leave_unread(self, size):
        """Has so many bytes of its answers not taken, as the transport tells."""
        self.transport.unread = size
        if size and not self.connection.flow.write_paused:
            self.connection.pause_writing()
        elif not size:
            self.connection.resume_writing()
        return self

    @property
    def answers(self):
        """Statuses and bodies of what was written."""
        found, rest = [], self.transport.written
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            length = int(re.findall(rb"content-length: (\d+)", head)[0])
            found.append((int(head.split()[1]), rest[:length]))
            rest = rest[length:]
        return found

    @property
    def statuses(self):
        return [status for status, _ in self.answers]


async def _nothing(scope, receive, send):
    while (message := await receive())["type"] == "http.request" and message["more_body"]:
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def _turns(count):
    for _ in range(count):
        await asyncio.sleep(0)


class Door:
    """A lane with two models, `alpha` and `beta`, and clients."""

    def __init__(self, *, app=_nothing, waits=False, contract=None, **config):
        self.loop = asyncio.new_event_loop()
        http = HttpConfig(**config)
        self.alpha, self.beta = Endpoint("alpha", waits=waits), Endpoint("beta", waits=waits)
        self.routes = {
            b"/models/" + each.name.encode(): Route(
                StandIn(each, contract or Contract()), http.max_body_bytes, http.api_keys, elements=http.elements
            )
            for each in (self.alpha, self.beta)
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.lane = HttpPort(http, self.routes, app)
        self.lane.start(self.loop)
        self.clients = []

    def connect(self):
        client = Client(self)
        self.clients.append(client)
        return client

    def pass_seconds(self, count):
        for _ in range(count):
            assert self.lane._timer is not None
            self.lane._timer.cancel()
            self.lane._sweep()

    def bring(self):
        """Has what has arrived submitted, as at the end of a turn."""
        for endpoint in (self.alpha, self.beta):
            endpoint.bring()

    def turn(self):
        """Lets the loop do what it has to do now."""
        self.loop.run_until_complete(_turns(5))

    def close(self):
        self.lane.stop()
        self.turn()
        for client in self.clients:
            client.connection.connection_lost(None)
        self.turn()
        self.loop.close()


def request(model, body=b"", *headers, method="POST", target=None, length=True):
    """The bytes of a request."""
    target = target or f"/models/{model}"
    lines = [f"{method} {target} HTTP/1.1", "host: localhost", *headers]
    if length:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body
