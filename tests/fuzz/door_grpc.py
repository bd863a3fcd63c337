# SPDX-License-Identifier: Apache-2.0
"""Differential fuzz of the gRPC door: valid and nearly valid frames of several clients, in random segments.

The oracle of a connection is `h2`, which gets the same bytes a frame at a time: what it takes for a complete request
must be answered as the same request alone on a connection of its own, and what it takes for an error must be one here
(of the connection or of the call), and the other way round. The oracle of header blocks is `hpack`.

    .venv/bin/python -m tests.fuzz.door_grpc SECONDS SEED
"""

import contextlib
import itertools
import random
import select
import sys
import time
from collections import Counter
from unittest import mock

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
import hpack
import msgspec
from h2.settings import SettingCodes
from tests.fuzz.patience import HANG_S, NEVER_S, Watch, awake
from tests.integration.grpc.served import Port
from tests.integration.grpc.wire import (
    ACK,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Wire,
    data,
    frame,
    header_list,
    number,
    packed,
    prefixed,
    settings,
)

from forebay.transports.grpc.hpack import BadBlock, Decoder, HeaderBlockTooLarge

KEYS = ("alpha", "beta")
METHODS = ("Echo", "Echo", "Look", "Look", "Look", "TaskEcho", "Twice", "Join", "Count", "Fail", "Nothing")
MESSAGES = (b"", b"x", b"NOT_FOUND text", b"defect", bytes(300), b"0123456789" * 2000)
OPENING = PREFACE + settings() + frame(SETTINGS, flags=ACK) + frame(WINDOW_UPDATE, number(1 << 24))
LAST = b"finished"
SHOWN = 400
"""How much of a frame a difference shows: a block whole."""
LIMITS = {
    SettingCodes.INITIAL_WINDOW_SIZE: 4 << 20,
    SettingCodes.MAX_CONCURRENT_STREAMS: 1024,
    SettingCodes.MAX_HEADER_LIST_SIZE: 16 * 1024,
    SettingCodes.MAX_FRAME_SIZE: 1 << 14,
}


# ---------------------------------------------------------------------------------------------------------------------
# what clients send


class Client:
    """One connection's frames, made one after the other with one table of compression."""

    def __init__(self, dice):
        self.dice = dice
        self.key = dice.choice((*KEYS, *KEYS, "wrong", None))
        self.encoder = hpack.Encoder()
        self.stream = 1
        self.known = [self.fields() for _ in range(2)]
        self.frames = []
        self.is_shifting = dice.random() < 0.3
        for _ in range(dice.randint(1, 16 if self.is_shifting else 6)):
            self.add_call()
        self.is_valid = dice.random() < 0.5
        if not self.is_valid:
            for _ in range(dice.randint(1, 2)):
                self.spoil()

    def fields(self):
        """The headers of a call."""
        dice = self.dice
        more = [("x-api-key", self.key)] if self.key is not None else []
        names, values = ("a", "b", "long-name-of-a-field"), ("1", "2", "x" * 900, "", "a b")
        more += [(dice.choice(names), dice.choice(values)) for _ in range(dice.randint(0, 3))]
        if dice.random() < 0.1:
            more.append(("content-length", str(dice.randint(0, 20))))
        found = header_list(dice.choice(METHODS)) + more
        if dice.random() < 0.05:
            odd = [("Upper", "x"), (":path", "/x"), ("connection", "close"), ("a", " b"), ("te", "gzip"), ("a", "b\n")]
            found.insert(dice.randint(0, len(found)), dice.choice(odd))
        return found

    def block(self, fields):
        dice = self.dice
        if dice.random() < 0.1:
            self.encoder.header_table_size = dice.choice((0, 100, 1000, 4096))
        secret = dice.random() < 0.2
        return self.encoder.encode([(*pair, secret) for pair in fields], huffman=dice.random() < 0.5)

    def add_call(self):
        """Frames of one call, those of its message behind others' perhaps."""
        dice, stream = self.dice, self.stream
        self.stream += 2 * dice.choice((1, 1, 1, 1, 2))
        if (
            self.is_shifting and dice.random() < 0.9
        ):  # blocks that are the same, and mean something else when the table has changed
            more = [("x-api-key", self.key)] if self.key is not None else []
            block = packed(header_list("Look") + more) + self.encoder.encode([("v", dice.choice("12"))], huffman=False)
        else:
            block = self.block(dice.choice(self.known) if dice.random() < 0.7 else self.fields())
        flags = 0
        if dice.random() < 0.1:
            block, flags = number(dice.choice((0, 99))) + b"\x10" + block, WITH_PRIORITY
        cut = dice.randint(0, len(block)) if dice.random() < 0.2 else len(block)
        if flags and cut < 5:
            cut = len(block)
        self.frames.append(
            frame(HEADERS, block[:cut], flags=flags | (END_HEADERS if cut == len(block) else 0), stream=stream)
        )
        if cut < len(block):
            self.frames.append(frame(CONTINUATION, block[cut:], flags=END_HEADERS, stream=stream))
        payload = prefixed(dice.choice(MESSAGES))
        while payload is not None:
            size = dice.randint(0, len(payload)) if dice.random() < 0.3 else len(payload)
            part, payload = payload[: min(size, 16_000)], payload[min(size, 16_000) :]
            flags = 0 if payload else END_STREAM
            if dice.random() < 0.1 and len(part) < 15_000:
                pad = dice.randint(0, 30)
                part, flags = bytes([pad]) + part + bytes(pad), flags | PADDED
            self.frames.append(data(part, stream=stream, flags=flags))
            payload = payload or None
            if dice.random() < 0.3:
                self.frames.append(self.aside())

    def aside(self):
        """A frame that moves no call forward."""
        dice = self.dice
        return dice.choice(
            (
                frame(PING, bytes(8)),
                frame(WINDOW_UPDATE, number(dice.randint(1, 1000))),
                frame(WINDOW_UPDATE, number(9), stream=1),
                frame(0xFA, b"?", stream=dice.choice((0, 1))),
                frame(PRIORITY, number(0) + b"\x01", stream=dice.choice((1, 9))),
                settings((dice.choice((3, 4, 0x99)), 1 << 16)),
            )
        )

    def spoil(self):
        """Make something wrong, or nearly."""
        dice, frames = self.dice, self.frames
        at = dice.randrange(len(frames))
        found = frames[at]
        kind = dice.randrange(10)
        if kind == 0:
            del frames[at]
        elif kind == 1:
            frames.insert(at, found)
        elif kind == 2:
            other = dice.randrange(len(frames))
            frames[at], frames[other] = frames[other], frames[at]
        elif kind == 3:  # another stream
            frames[at] = found[:5] + number(dice.choice((0, 1, 2, 3, 5, 99))) + found[9:]
        elif kind == 4:  # other flags
            frames[at] = found[:4] + bytes([found[4] ^ (1 << dice.randrange(6))]) + found[5:]
        elif kind == 5 and len(found) > 9:  # another byte
            index = dice.randrange(9, len(found))
            frames[at] = found[:index] + bytes([found[index] ^ (1 << dice.randrange(8))]) + found[index + 1 :]
        elif kind == 6:  # cut short, with a length that says so
            payload = found[9 : 9 + dice.randint(0, len(found) - 9)]
            frames[at] = len(payload).to_bytes(3) + found[3:9] + payload
        elif kind == 7:
            frames.insert(at, frame(RST_STREAM, number(8), stream=dice.choice((1, 3, 5, 2, 99))))
        elif kind == 8:
            frames.insert(
                at,
                dice.choice(
                    (
                        frame(WINDOW_UPDATE, number(0), stream=dice.choice((0, 1, 3))),
                        frame(WINDOW_UPDATE, number((1 << 31) - 1), stream=dice.choice((0, 1, 3))),
                        frame(PRIORITY, bytes(4), stream=1),
                        settings((2, 2)),
                        settings((4, 1 << 31)),
                        frame(SETTINGS, bytes(5)),
                        frame(PING, bytes(7)),
                        frame(GOAWAY, bytes(8)),
                    )
                ),
            )
        else:
            payload = dice.randbytes(dice.randint(0, 12))
            frames.insert(
                at, frame(dice.randrange(10), payload, flags=dice.randrange(64), stream=dice.choice((0, 1, 3, 7)))
            )


# ---------------------------------------------------------------------------------------------------------------------
# what others think of it


class Judgement:
    """What `h2` makes of a connection's frames.

    Attributes:
        requests: Headers and body of each request that came whole, by stream, and was not called off.
        begun: Headers of each request that has begun.
        is_wrong: Whether something was an error, of a stream or of the connection.
        why: What it said.
        is_shut: Whether the client takes no answers: it has set a window that holds none, and would open it no more.
    """

    def __init__(self, frames):
        self.requests, self.begun = {}, {}
        self.is_wrong = self.is_shut = False
        self.why = ""
        # As it comes: h2 else puts a cookie behind the others first, and then finds nothing before a pseudo-header.
        config = h2.config.H2Configuration(client_side=False, header_encoding=None, normalize_inbound_headers=False)
        other = h2.connection.H2Connection(config)
        other.local_settings = h2.settings.Settings(
            client=False,
            initial_values=LIMITS,
        )
        other.max_inbound_frame_size = 1 << 14
        other.decoder.max_header_list_size = 16 * 1024
        other.initiate_connection()
        other.receive_data(OPENING)
        other.increment_flow_control_window(1 << 24)
        other.data_to_send()
        bodies = {}
        for index, one in enumerate([*frames, frame(PING, LAST)]):
            try:
                events = other.receive_data(_without_reserved(one))
            except h2.exceptions.ProtocolError as error:
                self._blame(error)
                events = []
            for event in events:
                stream = getattr(event, "stream_id", None)
                if isinstance(event, h2.events.RequestReceived):
                    bodies[stream] = bytearray()
                    self.begun[stream] = [tuple(map(bytes, pair)) for pair in event.headers]
                elif isinstance(event, h2.events.DataReceived):
                    bodies[stream] += event.data
                elif isinstance(event, h2.events.StreamEnded):
                    self.requests[stream] = self.begun[stream], bytes(bodies[stream])
                elif isinstance(event, h2.events.StreamReset):
                    self.requests.pop(stream, None)
            self.is_shut = self.is_shut or other.remote_settings.initial_window_size < 1 << 14
            out = other.data_to_send()
            while out:
                size = int.from_bytes(out[:3])
                if out[3] == RST_STREAM:
                    self._blame(f"stream {int.from_bytes(out[5:9])} is reset with {int.from_bytes(out[9:13])}")
                out = out[9 + size :]
            if self.is_wrong:  # what comes after it is not judged, nor what it is about
                for late in frames[index:]:
                    self.requests.pop(int.from_bytes(late[5:9]) & 0x7FFFFFFF, None)
                return

    def _blame(self, what):
        self.is_wrong = True
        self.why = self.why or f"{type(what).__name__}: {what}"


def _without_reserved(one):
    """A frame without the highest bit of a window, which RFC 9113 has ignored (6.9); hyperframe counts it."""
    if one[3] == WINDOW_UPDATE and len(one) == 13:
        return one[:9] + bytes([one[9] & 0x7F]) + one[10:]
    return one


def shown(answer):
    """An answer without what differs each time; None if it did not come whole."""
    if answer is None or not answer.is_over:
        return None
    body = bytes(answer.body)
    if body[5:6] == b"{":
        body = msgspec.json.encode(msgspec.json.decode(body[5:])["metadata"])
    elif len(body) >= 5:
        body = body[5:]
    code = answer.reset if not answer.trailers else None
    return (
        answer.headers.get(":status"),
        answer.trailers.get("grpc-status"),
        answer.trailers.get("grpc-message"),
        body,
        code,
    )


class Patient(Wire):
    """A connection that gives up once nothing came while this process was awake."""

    def __init__(self, port, *, opening):
        super().__init__(port, opening=opening)
        self.socket.settimeout(None)

    def read_bytes(self):
        until = awake() + HANG_S / 2
        while not select.select([self.socket], [], [], 1.0)[0]:
            if awake() > until:
                raise TimeoutError
        return super().read_bytes()


class Fuzz:
    """A port, and everything that has been asked of it."""

    def __init__(self, port, dice):
        self.port = port
        self.dice = dice
        self.alone = {}
        self.counts = Counter()
        self.differences = []

    def differ(self, what, *details):
        self.differences.append(what)
        print(f"DIFFERENCE: {what}", *details, sep="\n  ", flush=True)

    def one_by_one(self, fields, body):
        """What the same request gets on a connection of its own."""
        asked = tuple(fields), body
        if asked not in self.alone:
            if len(self.alone) > 5000:
                self.alone.clear()
            block = packed(fields)
            parts = [body[at : at + 16_000] for at in range(0, len(body), 16_000)] or [b""]
            with Patient(self.port, opening=OPENING) as wire:
                wire.send(frame(HEADERS, block, flags=END_HEADERS, stream=1))
                for index, part in enumerate(parts):
                    wire.send(data(part, stream=1, flags=END_STREAM if index == len(parts) - 1 else 0))
                self.alone[asked] = shown(wire.answer(1))
            self.counts["requests alone"] += 1
        return self.alone[asked]

    def round(self):
        """Several clients at once."""
        dice = self.dice
        clients = [Client(dice) for _ in range(dice.randint(1, 3))]
        wires = [Patient(self.port, opening=OPENING) for _ in clients]
        segments = [self.cut(b"".join(client.frames)) for client in clients]
        while any(segments):
            index = dice.choice([index for index, left in enumerate(segments) if left])
            wires[index].flood(segments[index].pop(0))
        for client, wire in zip(clients, wires, strict=True):
            with wire:
                self.judge(client, wire)

    def cut(self, whole):
        """Pieces of any size, mostly few."""
        dice = self.dice
        count = dice.choice((0, 0, 1, 3, 12))
        cuts = sorted({0, len(whole), *(dice.randint(0, len(whole)) for _ in range(count))})
        return [whole[begin:end] for begin, end in itertools.pairwise(cuts)]

    def judge(self, client, wire):
        other = Judgement(client.frames)
        self.counts["connections"] += 1
        self.counts["requests"] += len(other.requests)
        self.counts["wrong connections"] += other.is_wrong
        if other.is_shut:
            self.counts["shut connections"] += 1
            return
        expected = {stream: self.one_by_one(*request) for stream, request in other.requests.items()}
        wire.flood(frame(PING, LAST))
        is_open = False
        try:
            while (found := wire.read()) is not None:
                is_open = is_open or (found.kind == PING and found.payload == LAST)
                if is_open and all(shown(wire.answers.get(stream)) for stream in expected):
                    break
        except TimeoutError:
            self.differ("no answer", self.story(client, other, wire))
            return
        if client.is_valid:
            self.counts["right connections"] += not other.is_wrong
        ended = wire.goaway not in {None, 0}
        faults = {stream: one.reset for stream, one in wire.answers.items() if one.reset not in {None, 0}}
        told = {stream: shown(answer) for stream, answer in wire.answers.items()}
        if other.is_wrong and not (ended or faults) and not self.is_tolerated(client, other, wire):
            self.differ("taken, though it is wrong", self.story(client, other, wire))
        if not other.is_wrong and (ended or faults) and not self.is_malformed(other) and not self.is_strict(client):
            self.differ("refused, though it is right", self.story(client, other, wire), f"{ended=} {faults=}")
        for stream, answer in expected.items():
            if told.get(stream) != answer and not (told.get(stream) is None and ended):
                self.differ(
                    f"another answer on stream {stream}",
                    f"{str(answer)[:2000]} alone",
                    f"{str(told.get(stream))[:2000]} here",
                    self.story(client, other, wire),
                )

    def is_malformed(self, other):
        """Whether a request is no request here though it is one for h2; one that did not come whole, too."""
        alone = [self.one_by_one(*other.requests.get(stream, (head, b""))) for stream, head in other.begun.items()]
        return any(answer is not None and answer[4] for answer in alone)

    def is_tolerated(self, client, other, wire):
        """What h2 does not take, and RFC 9113 or gRPC lets pass."""
        if any(part in other.why for part in TOLERATED):
            return True
        # Whatever comes of a call that has been answered is ignored; h2 answers none.
        early = {stream for stream, answer in wire.answers.items() if answer.is_over}
        if not early:
            return False
        heads = [int.from_bytes(one[5:9]) & 0x7FFFFFFF for one in client.frames if one[3] == HEADERS]
        has_second = any(heads.count(stream) > 1 for stream in early)
        return any(part in other.why for part in (*OF_ENDED, *(OF_SECOND if has_second else ())))

    def is_strict(self, client):
        """What h2 lets pass and RFC 9113 does not (5.1): a reset of a stream that nobody has opened."""
        opened = set()
        for one in client.frames:
            stream = int.from_bytes(one[5:9]) & 0x7FFFFFFF
            if one[3] == HEADERS:
                opened.add(stream)
            elif one[3] == RST_STREAM and (stream > max(opened, default=0) or not stream % 2):
                return True
        return False

    def story(self, client, other, wire):
        sent = " ".join(
            f"{one[3]}/{one[4]:x}/{int.from_bytes(one[5:9])}/{one[9:SHOWN].hex()}{'...' if len(one) > SHOWN else ''}"
            for one in client.frames
        )
        got = {stream: (str(shown(answer))[:150], answer.reset) for stream, answer in wire.answers.items() if stream}
        there = f"{other.why or 'fine'}, requests {sorted(other.requests)}"
        return f"sent {sent}\n  h2: {there}\n  here: goaway {wire.goaway}, {got}"

    def blocks(self):
        """Header blocks, random and nearly right, for both readers."""
        dice = self.dice
        ours, theirs, encoder = Decoder(1 << 20), hpack.Decoder(1 << 21), hpack.Encoder()
        for _ in range(dice.randint(1, 6)):
            fields = [
                (dice.choice((b"a", b":path", b"te", b"", b"long-name")), dice.randbytes(dice.choice((0, 1, 8, 200))))
                for _ in range(dice.randint(0, 4))
            ]
            if dice.random() < 0.2:
                encoder.header_table_size = dice.choice((0, 60, 4096))
            block = bytearray(encoder.encode(fields, huffman=dice.random() < 0.5))
            if dice.random() < 0.4:
                for _ in range(dice.randint(1, 3)):
                    block.insert(
                        dice.randint(0, len(block)),
                        dice.choice((0, 0x20, 0x3F, 0x40, 0x7F, 0x80, 0xBE, 0xFF, dice.randrange(256))),
                    )
            if dice.random() < 0.2:
                del block[dice.randint(0, len(block)) :]
            if dice.random() < 0.1:
                block = bytearray(dice.randbytes(dice.randint(0, 30)))
            self.counts["blocks"] += 1
            try:
                one = ours.decode(bytes(block))[0]
            except (BadBlock, HeaderBlockTooLarge) as error:
                one = error
            try:
                two = [tuple(map(bytes, pair)) for pair in theirs.decode(bytes(block), raw=True)]
            except (hpack.HPACKError, IndexError) as error:
                two = error
            if isinstance(one, Exception) and isinstance(two, Exception):
                return
            if one != two:
                self.differ("a header block", bytes(block).hex(), f"hpack: {two!r}", f"here: {one!r}")
                return


TOLERATED = (
    "may not depend on itself",  # priorities are ignored, as 5.3.2 asks for
    "does not have an :authority",  # 8.3.1 lets it be absent
    "ConnectionState.CLOSED",  # calls of a client after its GOAWAY
    "surrounded by whitespace",  # gRPC has it stripped from metadata
)
OF_ENDED = (
    "InvalidBodyLength",
    "is reset with",
    "Trailers must have END_STREAM",
    "non-compliant data",
    "invalid trailers",
)
OF_SECOND = ("Conflicting content-length headers", "Invalid content-length header", "Received pseudo-header in trailer")
"""What h2 says of a second block of headers, with or without an end."""


def main(seconds: float, seed: int, enough: int = 20) -> int:
    """Fuzz for a time, or until there are enough differences; returns how many there were."""
    dice = random.Random(seed)
    with contextlib.ExitStack() as stack:
        for place in ("heads", "port"):  # no answer may depend on how many wrong paths came before it
            stack.enter_context(mock.patch(f"forebay.transports.grpc.{place}.MAX_GUESSES", sys.maxsize))
        port = stack.enter_context(Port(api_keys=KEYS, read_timeout_s=NEVER_S, write_timeout_s=NEVER_S))
        watch = stack.enter_context(Watch("door_grpc"))
        fuzz = Fuzz(port, dice)
        end = awake() + seconds
        while awake() < end and len(fuzz.differences) < enough:
            watch.note()
            for _ in range(20):
                fuzz.blocks()
            fuzz.round()
        shared = port.listener._port
        assert shared is not None
        deadline = awake() + HANG_S
        while (shared.calls or shared.byte_budget.held_bytes or shared.connections) and awake() < deadline:
            time.sleep(0.01)
        if shared.calls or shared.byte_budget.held_bytes:
            fuzz.differ(f"left behind: {shared.calls} calls, {shared.byte_budget.held_bytes} bytes")
        if port.surprises:
            fuzz.differ("the server was surprised", *map(str, port.surprises[:3]))
    counts = ", ".join(f"{count} {name}" for name, count in fuzz.counts.items())
    print(f"door_grpc: seed {seed}: {counts}; {len(fuzz.differences)} differences", flush=True)
    return len(fuzz.differences)


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]), int(sys.argv[2]))))
