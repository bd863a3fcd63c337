# SPDX-License-Identifier: Apache-2.0
"""Fuzz of WebSockets: messages in any frames and pieces, wrong frames, and bytes that are none.

The oracle is the reader of the library `websockets`, which gets each stream at once, and what RFC 6455 says of texts. A
connection gets it in pieces, is answered at once or late, and has a full buffer now and then. It asks the model for the
same messages, sends the answers in order, and closes with the same code. In the end it holds nothing.

    .venv/bin/python -m tests.fuzz.door_websocket SECONDS SEED
"""

from __future__ import annotations

import logging
import random
import sys
import time

from tests.fuzz.serving import ENOUGH
from tests.unit.transports.http.driven import Door, request
from websockets.frames import Close, Frame, Opcode
from websockets.protocol import Protocol, Side

HANDSHAKE = request(
    "alpha",
    b"",
    *("connection: upgrade", "upgrade: websocket", "sec-websocket-version: 13"),
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==",
    method="GET",
    length=False,
)
log = logging.getLogger("forebay.refusals")
LIMIT = 1000
BODIES = (b"", b"1", b"[1, 2]", "é€😀".encode(), b"x" * 125, b"x" * 126, b"y" * LIMIT, b"\x00" * 300)
WRONG = (b"\xff\xfe", "€".encode()[:2], b"\xed\xa0\x80", b"x" * (LIMIT + 1), b"z" * 70_000)


def frame(dice: random.Random, opcode: int, body: bytes, *, fin: bool = True) -> bytes:
    """A frame of a client, now and then of a wrong form."""
    size = len(body)
    form = dice.random()
    first = (0x80 if fin else 0) | opcode | (0x40 if form < 0.003 else 0)
    masked = 0 if 0.003 <= form < 0.006 else 0x80
    if size < 126 and form < 0.97:
        head = bytes([first, masked | size])
    elif size < 1 << 16 and form < 0.98:
        head = bytes([first, masked | 126]) + size.to_bytes(2, "big")
    else:
        head = bytes([first, masked | 127]) + size.to_bytes(8, "big")
    mask = dice.randbytes(4) if masked else b""
    return head + mask + (bytes(byte ^ mask[at % 4] for at, byte in enumerate(body)) if masked else body)


def message(dice: random.Random) -> bytes:
    """A message in one frame or in several, with others between."""
    body = dice.choice(WRONG) if dice.random() < 0.03 else dice.choice(BODIES)
    opcode = dice.choice((1, 1, 2))
    cuts = sorted(dice.choices(range(len(body) + 1), k=dice.choice((0, 0, 0, 1, 2, 5))))
    pieces = [body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    found = b""
    for at, piece in enumerate(pieces):
        found += frame(dice, opcode if at == 0 else 0, piece, fin=at == len(pieces) - 1)
        while dice.random() < 0.1:
            found += frame(dice, dice.choice((9, 9, 10)), dice.randbytes(dice.choice((0, 3, 125))))
    return found


def stream(dice: random.Random) -> bytes:
    """What one client sends after its handshake."""
    found = b"".join(message(dice) for _ in range(dice.choice((1, 5, 40))))
    end = dice.random()
    if end < 0.1:
        found += dice.randbytes(dice.choice((1, 10, 5000)))
    elif end < 0.3:
        found += frame(dice, 8, dice.choice((b"", b"\x03\xe8", b"\x03\xe8bye", b"\x00", b"\x03\xec", b"\x03\xe8\xff")))
    elif end < 0.4:
        found += frame(dice, dice.choice((0, 3, 8, 11)), b"x")
    elif end < 0.5:
        spot = dice.randrange(len(found))
        found = found[:spot] + dice.randbytes(1) + found[spot + 1 :]
    return found


def expected(data: bytes) -> tuple[list[bytes], set[int | None]]:
    """The messages before the first fault, and the codes of a close; a fault that came along may be seen before it."""
    reader = Protocol(Side.SERVER, max_size=LIMIT)
    reader.receive_data(data)
    messages: list[bytes] = []
    last = None if reader.close_sent is None else int(reader.close_sent.code)
    body, is_text = b"", False
    for each in reader.events_received():
        assert isinstance(each, Frame)
        if each.opcode in {Opcode.TEXT, Opcode.BINARY}:
            is_text, body = each.opcode is Opcode.TEXT, b""
        elif each.opcode is not Opcode.CONT:
            continue
        body += each.data
        if each.fin:
            if is_text and body.decode(errors="replace").encode() != body:
                return messages, {1007, last} - {None}
            messages.append(body)
    return messages, {last}


def found_by(dice: random.Random, data: bytes) -> tuple[list[bytes], list[bytes], int | None, int]:
    """What the model is asked, what the client is sent, with which code it is closed; and what is held in the end."""
    door = Door(waits=dice.random() < 0.5, max_body_bytes=LIMIT, max_head_bytes=1 << 20)
    try:
        client = door.connect()
        whole = HANDSHAKE + data
        cuts = sorted(dice.choices(range(len(whole)), k=dice.choice((0, 1, 5, 50))))
        for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            pending = whole[a:b]
            while client.transport.is_paused and not client.transport.is_closed:
                _go_on(door)
            if client.transport.is_closed:
                break
            client.send(pending)
            if dice.random() < 0.1 and client.state.reads:
                client.leave_unread(70_000)
                client.leave_unread(0)
        for _ in range(3):
            _go_on(door)
        while client.state.owes or client.connection.talk.waiting:
            _go_on(door)
        asked = [bytes(each.body) for each in door.alpha.asked if each not in door.alpha.gone]
        reader = Protocol(Side.CLIENT, max_size=None)
        reader.receive_data(client.transport.written.partition(b"\r\n\r\n")[2])
        frames = [each for each in reader.events_received() if isinstance(each, Frame)]
        sent = [bytes(each.data) for each in frames if each.opcode in {Opcode.TEXT, Opcode.BINARY}]
        closes = [Close.parse(each.data).code for each in frames if each.opcode is Opcode.CLOSE]
        client.connection.connection_lost(None)
        door.clients.clear()
        return asked, sent, int(closes[0]) if closes else None, door.lane.byte_budget.held_bytes
    finally:
        door.close()


def _go_on(door: Door) -> None:
    """Answer what waits, and let the loop turn."""
    if door.alpha.waits and door.alpha.asked:
        door.alpha.answer()
    door.turn()


def fuzz(seed: int) -> str:
    """Try one stream; returns what differs."""
    dice = random.Random(seed)
    data = stream(dice)
    messages, codes = expected(data)
    asked, sent, closed, held = found_by(dice, data)
    if closed not in codes:
        return f"seed {seed}: closed with {closed}, expected {codes}"
    # One that is closed calls off what it has not answered.
    if sent != [b"alpha " + each for each in messages][: len(sent)] or (closed is None and len(sent) < len(messages)):
        return f"seed {seed}: sent {sent!r} for {messages!r}"
    if asked[: len(sent)] != messages[: len(sent)]:
        return f"seed {seed}: asked {asked!r} for {messages!r}"
    return f"seed {seed}: holds {held} bytes" if held else ""


def main(seconds: float, seed: int) -> int:
    """Try streams for so long; returns the number of differences."""
    end, count, differences = time.monotonic() + seconds, 0, 0
    was, log.disabled = log.disabled, True
    while time.monotonic() < end and differences < ENOUGH:
        count += 1
        if told := fuzz(seed * 1_000_000 + count):
            differences += 1
            print(told[:500], flush=True)
    log.disabled = was
    print(f"websocket: {count} streams, {differences} differences", flush=True)
    return differences


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2])) > 0)
