# SPDX-License-Identifier: Apache-2.0
"""Differential fuzz of the HTTP door: what a client is answered depends on its own bytes, and on nothing else.

It sends streams of requests (valid ones, nearly valid ones, beginnings of some) over connections whose lane has
seen other streams before: pipelined, in random segments, from clients with different keys, while answers come late, in
bursts, and to clients that do not read for a while. Oracles know what must come of it:

* the same bytes, one by one, on a fresh connection of a fresh lane, which remembers nothing: the answers are the same;
* the same requests, each alone on a fresh connection, where each is whole: the answers are the same as well;
* both join bodies that come in pieces; here they land in files in memory that are used again;
* h11: what reached a model or the application is what h11 finds in the same bytes, in order, and with a good key.

A difference is printed with the number of its lane, which alone makes it happen again: `--lane N`.
"""

import argparse
import collections
import itertools
import logging
import math
import random
import re
import sys
import traceback
from unittest import mock

import h11
from tests.fuzz.http_side import KEYS, Side, are_same
from tests.fuzz.http_turns import crowd
from tests.fuzz.patience import awake

from forebay.workers.memory import landing

STREAMS_A_LANE = 40
"""Streams that meet the same lane, and so what it remembers."""
CROWDS = 0.1
"""The part of them that are several clients in the same turns."""
LANES_A_SEED = 1_000_000
TYPES = ["application/json", "application/msgpack", "text/csv"]


# ---------------------------------------------------------------------------------------------------------------------
# What is sent


class Maker:
    """Makes requests; remembers heads and lengths of earlier ones, to send them again in other places."""

    def __init__(self):
        self.heads = [b""]
        self.whole = [b""]
        self.lengths = [0]
        self.next = None

    def stream(self, chance):
        """The messages of one stream, whether each is whole, and how they may be cut."""
        if self.next is not None:
            message, self.next = self.next, None
            return [message], [False], [message]
        if chance.random() < 0.1:
            message = self._straddle(chance)
            return [message], [False], [message]
        messages, wholes, data = [], [], b""
        for _ in range(chance.randint(1, 5)):
            message, is_whole = self.message(chance, data)
            messages.append(message)
            wholes.append(is_whole)
            data += message
        return messages, wholes, _segments(chance, data, messages)

    def _straddle(self, chance):
        """Two requests, of which the second one's length is that of all that follows the first one's head.

        The next stream is that head once more, with a body of this length.
        """
        first, body = self._request(chance, b"")[:2]
        second, _ = self._request(chance, b"")[:2]
        lines = [line for line in second.split(b"\r\n") if not line.lower().startswith((b"content-l", b"transfer"))][
            :-2
        ]
        missing = first.count(b"\r\n") - len(lines) - chance.choices([2, 1, 3], [4, 1, 1])[0]
        lines += [b"X-Filler: 7"] * missing
        rest = body + b"\r\n".join([*lines, b"Content-Length: "])
        size = len(rest) + len(b"%d" % len(rest)) + 4 + 2
        self.next = first + b"7" * size
        return first + rest + b"%d\r\n\r\n[1" % size

    def message(self, chance, before):
        """The bytes of one message, and whether it is whole. `before` is what this stream has so far."""
        roll = chance.random()
        if roll < 0.12 and len(self.heads) > 1:
            return self._again(chance)
        if roll < 0.3 and self.whole[-1]:
            return chance.choice(self.whole[1:]), True
        head, body, is_whole = self._request(chance, before)
        if roll < 0.45:
            return _broken(chance, head + body), False
        self.heads = [*self.heads[-7:], head]
        if is_whole:
            self.whole = [b"", *self.whole[1:][-3:], head + body]
        return head + body, is_whole

    def _again(self, chance):
        """A head from before, with as much of a body as another one had."""
        head = chance.choice(self.heads[-4:])
        return head + b"7" * chance.choice(self.lengths[-4:]), False

    def _request(self, chance, before):
        method = chance.choices(["POST", "GET", "HEAD", "PUT"], [12, 2, 0, 1])[0]
        target = chance.choice(
            ["/models/alpha", "/models/alpha", "/models/beta", "/models/%61lpha", "/other", "/early"]
        )
        lines = [f"{method} {target} HTTP/1.1", "Host: localhost"]
        if chance.random() < 0.7:
            lines.append(f"X-API-Key: {chance.choice([*KEYS, 'k3'])}")
        if chance.random() < 0.5:
            lines.append(f"Content-Type: {chance.choices(TYPES, [6, 2, 1])[0]}")
        if chance.random() < 0.06:
            lines.append(chance.choice(["Connection: close", "Connection: keep-alive", "Expect: 100-continue"]))
        if chance.random() < 0.06:
            lines += ["Connection: upgrade", "Upgrade: h2c"]
        while len(lines) < 5 and chance.random() < 0.7:
            lines.append(f"X-Filler: {chance.randrange(3)}")
        body = b'"' + b"b" * chance.choice([0, 1, 2, 30, 500]) + b'"'
        how = chance.choices(["length", "chunks", "none", "ahead"], [10, 4, 1, 2])[0]
        if how == "chunks":
            lines.append("Transfer-Encoding: chunked")
            head = "\r\n".join([*lines, "", ""]).encode()
            return head, _in_chunks(chance, body), True
        if how == "none":
            return "\r\n".join([*lines, "", ""]).encode(), b"", True
        size = len(body)
        is_ahead = how == "ahead" and bool(before)
        if is_ahead:
            # A length that would fit what came before as well, had it been one message.
            earlier = before.find(b"\r\n\r\n") + 4
            head = "\r\n".join([*lines, "Content-Length: %d", "", ""])
            size = len(before) - earlier + len(head) + size + chance.randrange(2)
        self.lengths = [*self.lengths[-7:], size]
        return "\r\n".join([*lines, f"Content-Length: {size}", "", ""]).encode(), body, not is_ahead


def _in_chunks(chance, body):
    data = b""
    while body:
        size = chance.randint(1, len(body))
        note = chance.choice([b"", b"", b";a=b"])
        data += b"%x%b\r\n%b\r\n" % (size, note, body[:size])
        body = body[size:]
    return data + b"0\r\n" + chance.choice([b"", b"", b"X-API-Key: k1\r\n"]) + b"\r\n"


def _broken(chance, data):
    """Nearly what it was."""
    if not data:
        return data
    at = chance.randrange(len(data))
    kind = chance.randrange(6)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
    if kind == 2:
        return data[:at] + chance.choice([b"\r\n", b"\n", b"\r", b" ", b"\0", b":", b"0"]) + data[at:]
    if kind == 3:
        return data.replace(b"Host: localhost\r\n", chance.choice([b"", b"Host: a\r\nHost: b\r\n", b"Host:\r\n"]), 1)
    extra = [
        b"Content-Length: 3",
        b"Transfer-Encoding: gzip, chunked",
        b"Transfer-Encoding: chunked",
        b"Content-Encoding: gzip",
    ]
    if kind == 4:
        return data.replace(b"\r\n", b"\r\n" + chance.choice(extra) + b"\r\n", 1)
    return data.replace(b"HTTP/1.1", chance.choice([b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"http/1.1"]), 1)


def _segments(chance, data, messages):
    """The same bytes, cut somewhere: nowhere, between messages, or anywhere."""
    kind = chance.randrange(4)
    if kind == 0:
        return [data] if data else []
    if kind == 1:
        return [each for each in messages if each]
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randint(1, 6)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True) if end > start]


# ---------------------------------------------------------------------------------------------------------------------
# What must come of it


def framed(data):
    """What h11 finds: path, body, and keys of each request, until an error or the end."""
    connection = _reader(data)
    found, request, body = [], None, b""
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return found
            if isinstance(event, h11.Request):
                request, body = event, b""
            elif isinstance(event, h11.Data):
                body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                keys = [
                    bytes(value).decode("latin-1").strip() for name, value in request.headers if name == b"x-api-key"
                ]
                path = bytes(request.target).partition(b"?")[0]  # whoever is reached is told apart by it
                found.append((path, body, any(key in KEYS for key in keys)))
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                stays_open = request.http_version == b"1.0" and (b"connection", b"keep-alive") in request.headers
                if connection.our_state is h11.MUST_CLOSE and not stays_open:  # h11 keeps none of 1.0 open
                    return found
                connection = _reader(connection.trailing_data[0])
            else:
                return found
    except h11.ProtocolError:
        return found


def _reader(data):
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=10_000)
    # Our parser takes several spaces in a request's line for one, and passes over any number of empty lines before it.
    line, end, rest = data.lstrip(b"\r\n").partition(b"\n")
    connection.receive_data(re.sub(rb" +(?=/|HTTP/1)", b" ", line) + end + rest)
    return connection


def unaccounted(seen, data):
    """The first thing that reached somebody and that h11 does not find in the bytes, at its place, with a key."""
    found = iter(framed(data))
    for each in seen:
        if not any((path, body) == each and has_key for path, body, has_key in found):
            return each
    return None


def compare(warm, maker, chance):
    """Send one stream; returns the number of messages, and what differed."""
    messages, wholes, segments = maker.stream(chance)
    data = b"".join(messages)
    given = f"segments: {segments}"
    got = warm.run(segments, chance)
    cold = Side()
    try:
        expected = cold.run([bytes([byte]) for byte in data])
        if not are_same(got, expected):
            return len(messages), f"{given}\nanswered on a warm lane: {got}\nbyte by byte, alone:     {expected}"
        odd = unaccounted(got[2], data)
        if odd is not None:
            return len(messages), f"{given}\nreached somebody: {odd}\nh11 finds: {framed(data)}"
        if all(wholes):
            alone = []
            for message in messages:
                answers, is_closed, _ = cold.run([message])
                alone += answers
                if is_closed or not answers:
                    break
            if got[0][: len(alone)] != alone:
                return len(messages), f"{given}\nanswered together: {got[0]}\none by one: {alone}"
    finally:
        cold.close()
    return len(messages), None


@mock.patch.object(landing, "LANDING_BYTES", 40)
def fuzz(lanes, end):
    """Compare until that time; returns the number of requests and of differences, and how much came in one turn."""
    requests = differences = 0
    turns = collections.Counter()
    for number in lanes:
        if awake() > end:
            break
        chance = random.Random(number)
        warm, cold, maker = Side(lands=True), Side(), Maker()
        try:
            for turn in range(STREAMS_A_LANE):
                try:
                    if maker.next is None and chance.random() < CROWDS:
                        count, difference = crowd(warm, cold, chance, turn)
                    else:
                        count, difference = compare(warm, maker, chance)
                except Exception:
                    count, difference = 0, traceback.format_exc()
                requests += count
                if difference is not None:
                    differences += 1
                    print(f"lane {number}, stream {turn} (again with --lane {number}):\n{difference}\n", flush=True)
                    break
        finally:
            warm.close()
            cold.close()
        turns.update({"lanes": 1, "of these with requests submitted together": warm.together > 0})
        turns.update({"submitted together": warm.together, "answered together": warm.shared})
    return requests, differences, turns


def main(seconds: float, seed: int) -> int:
    """Fuzz for so long; prints the count of requests and returns the number of differences."""
    log = logging.getLogger("forebay.refusals")
    was, log.disabled = log.disabled, True
    try:
        requests, differences, turns = fuzz(itertools.count(seed * LANES_A_SEED), awake() + seconds)
    finally:
        log.disabled = was
    print(f"door_http: {requests} requests, seed {seed}, {differences} differences, {dict(turns)}", flush=True)
    return differences


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lane", type=int, help="only this lane, once more")
    given = parser.parse_args()
    if given.lane is not None:
        sys.exit(fuzz([given.lane], math.inf)[1] > 0)
    sys.exit(main(given.minutes * 60, given.seed) > 0)
