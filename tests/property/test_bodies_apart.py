# SPDX-License-Identifier: Apache-2.0
"""Bodies that are not in their frame: what is read is what was written, and nobody has more kept than is allowed."""

from __future__ import annotations

import random
from io import BytesIO
from typing import Any

import pytest

from forebay.errors import InvalidRequest, Unavailable
from forebay.owners.answer_frames import Answers
from forebay.owners.caller_conversation import CallerConversation
from forebay.owners.detached_bodies import (
    FOLLOWING_BYTES,
    FRAME_BYTES,
    LYING_BYTES,
    MAX_FRAME_BYTES,
    MAX_SEATS,
    LinkReader,
    refused,
    set_apart,
)
from forebay.owners.owner_conversation import OwnerConversation
from forebay.owners.parts_ahead import FEW_PARTS, MAX_BYTES, MAX_PARTS, PartsAhead
from forebay.owners.wire import EndedSeat, FromCaller, FromOwner, HandedRequests, bodies_of
from forebay.types.call import Failure
from forebay.workers.wire import frames

HELLO = ["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16}]
LONG = frames.LONG_BYTES


class Everything:
    """Wants all bodies, or all but some, and counts what has come."""

    def __init__(self, unwanted=()):
        self.unwanted = unwanted
        self.most = self.held = 0

    def expect(self, message, apart):
        self.held = 0
        for one in apart:
            if one.top in self.unwanted:
                refused(one, message.bodies, Unavailable("no room"))
            else:
                one.sink = BytesIO()

    def arrived(self, body, size):
        if body.sink is not None:
            self.held += size
            self.most = max(self.most, self.held)


def written(bodies):
    """Return what a front sends for requests with these bodies."""
    told, pieces = [], []
    for body in bodies:
        one, its = set_apart(body)
        told.append(one)
        pieces += its
    seats = [[at + 1, frames.encode_part({}), 1, 2.5, "id"] for at in range(len(bodies))]
    return b"".join([frames.encode(["requests", [[1, seats, [], []]], 0, told]), *pieces])


def cut(data, chance):
    """Return the same bytes in pieces of any length."""
    at = 0
    while at < len(data):
        size = chance.choice([1, 3, 17, 1000, 70_000, len(data)])
        yield data[at : at + size]
        at += size


def some_body(chance):
    kind = chance.randrange(6)
    if kind < 3:
        return chance.randbytes(chance.choice([0, 1, 100, LONG - 1, LONG, LONG + 1, 200_000]))
    if kind == 3:
        return [chance.randbytes(chance.choice([0, 5, 2000, LONG, 150_000])) for _ in range(chance.randrange(5))]
    if kind == 4:
        return [chance.randbytes(50) for _ in range(chance.choice([256, 257, 2000]))]
    return [[chance.randbytes(chance.choice([3, LONG])) for _ in range(2)], b"x", [b"y" * 70_000]]


@pytest.mark.parametrize("seed", range(60))
def test_bodies_are_read_as_they_were_written(seed):
    chance = random.Random(seed)
    bodies = [some_body(chance) for _ in range(chance.randrange(1, 6))]
    unwanted = {at for at in range(len(bodies)) if chance.random() < 0.2}
    reader = LinkReader(FromCaller, bodies_of)
    reader.listener = Everything(unwanted)
    data = written(bodies) + frames.encode(["beat"]) + written([b"last"])
    heard = [message for piece in cut(data, chance) for message in reader.feed(piece)]
    assert len(heard) == 3
    first, _, last = heard
    assert isinstance(first, HandedRequests)
    assert isinstance(last, HandedRequests)
    assert last.bodies == [b"last"]
    for at, (body, read) in enumerate(zip(bodies, first.bodies, strict=True)):
        assert read == body or (at in unwanted and type(read) is Failure)


@pytest.mark.parametrize("seed", range(30))
def test_a_frame_that_comes_whole_is_read_as_one_cut_anywhere(seed):
    chance = random.Random(seed)
    bodies = [chance.choice([some_body(chance), b"short"]) for _ in range(chance.randrange(1, 4))]
    data = written(bodies)
    end = frames.HEADER + int.from_bytes(data[: frames.HEADER], "big")
    heard = []
    for pieces in ([data[:end], data[end:]], [*cut(data, chance)]):
        reader = LinkReader(FromCaller, bodies_of)
        heard.append([message for piece in pieces * 2 for message in reader.feed(piece)])
        assert len(heard[-1]) == 2, "and after it one that is like it"
    assert heard[0] == heard[1]
    assert [*heard[0][0].bodies] == bodies


def test_long_bytes_are_not_copied():
    whole, part = bytes(LONG), memoryview(bytearray(LONG))
    assert set_apart(whole)[1][0] is whole
    assert set_apart([b"x", part])[1][0].obj is part.obj
    assert set_apart([whole, [b"x" * 50] * 2000])[1][1] is whole


ANNOUNCED: list[Any] = [
    frames.encode_part({}),
    *(set_apart(bytes(LONG))[0], set_apart([b"x"] * 1000)[0]),
    frames.landed("/proc/1/fd/1", 1, 0, 9),
]


@pytest.mark.parametrize("seed", range(300))
def test_whatever_is_said_of_bodies_nothing_is_raised_and_no_more_is_kept(seed):
    """What an attacker sends is read as somebody's bodies, or ends the link; more than was allowed is never kept."""
    chance = random.Random(seed)
    listener = Everything()
    conversation: Any
    if is_caller := bool(seed % 2):
        conversation = CallerConversation(1 << 20, 10_000, listener=listener)
        said = [HELLO]
    else:
        conversation = OwnerConversation("x" * 16, None, len, listener)
        said = [["open", {"max_body": 1 << 20}]]
    for _ in range(chance.randrange(1, 5)):
        bodies = [chance.choice(ANNOUNCED) for _ in range(chance.randrange(4))]
        if chance.random() < 0.3:
            bodies.append([chance.choice(ANNOUNCED), [[chance.choice(ANNOUNCED)]]])
        count = chance.choice([len(bodies), len(bodies), 0, MAX_SEATS + 1])
        if is_caller:
            seats = [[at + 1, b"\x80", 1, 2.5, "id"] for at in range(count)]
            said.append(["requests", [[1, seats, [], []]], 0, bodies])
        else:
            ended = [[at + 1, None, None] for at in range(count)]
            said.append(["answers", [[1, 0, 9, [], ended, []]], bodies])
    data = b"".join(
        frames.encode(one) + chance.randbytes(chance.choice([0, 10, LONG, 300_000])) * (at > 0)
        for at, one in enumerate(said)
    )
    if chance.random() < 0.3:
        data = bytes(chance.choice([byte, byte, byte, chance.randrange(256)]) for byte in data[:2000]) + data[2000:]
    for piece in cut(data, chance):
        for message in conversation.feed(piece):
            if bodies_of(message) is not None and hasattr(message, "bundles"):
                assert sum(len(bundle.seats) for bundle in message.bundles) == len(message.bodies)
    assert listener.most <= (1 << 20) + LYING_BYTES
    if not is_caller:
        assert conversation.state is not None


@pytest.mark.parametrize(
    "told, problem",
    [
        ([frames.landed("/proc/1/fd/1", 1, 0, 2**63)], "together"),
        ([frames.landed("/proc/1/fd/1", 1, 0, 0)], "without a byte"),
        ([[[[set_apart(bytes(LONG))[0]]]]], "bytes outside of all bodies"),
    ],
)
def test_what_is_announced_is_checked_before_anything_is_kept(told, problem):
    conversation = CallerConversation(1 << 20, 10_000)
    seats = [[1, b"\x80", 1, 2.5, "id"]]
    data = frames.encode(HELLO) + frames.encode(["requests", [[1, seats, [], []]], 0, told])
    assert list(conversation.feed(data)) == []
    assert problem in conversation.problem


def test_a_frame_has_no_more_seats_than_are_read_in_one_turn():
    conversation = CallerConversation(1 << 28, 1_000_000)
    seats = [[at + 1, b"\x80", 1, 2.5, ""] for at in range(MAX_SEATS + 1)]
    data = frames.encode(HELLO) + frames.encode(["requests", [[1, seats, [], []]], 0, [b""] * len(seats)])
    assert list(conversation.feed(data)) == []
    assert str(MAX_SEATS) in conversation.problem


class Noted:
    """What an owner has noted of a model."""

    def __init__(self, parts, results):
        self.heard = 7
        self.parts = parts
        self.ended: list[int | EndedSeat] = [EndedSeat(at) for at in range(len(results))]
        self.results = results
        self.returned: list[int] = []


def test_the_answers_of_a_turn_go_into_as_many_frames_as_keep_them_short():
    """They went into one, and a front gave a link up over which more than 1 GiB came at once."""
    sent: list[bytes] = []
    follow: list[int] = []

    def write(frame, *following):
        sent.append(frame)
        follow.append(sum(map(len, following)))
        wire.extend([frame, *following])

    wire: list[bytes] = []
    answers = Answers(write, lambda _data: None)
    parts = [(900, [b"p" * 40_000] * 50), (901, [b"q"])]
    results = [b"r" * 30_000] * 100 + [b"s" * 600_000] * 9 + [b""] * 5000 + [[b"t" * 90] * 3000]
    answers.add(3, Noted(parts, results), 5, 0.5)
    answers.add(4, Noted([], [b"u"]), 6, 0.0)
    answers.send()
    assert max(map(len, sent)) <= FRAME_BYTES + 64 * 1024 < MAX_FRAME_BYTES
    assert max(follow) <= FOLLOWING_BYTES + 600_000
    reader = LinkReader(FromOwner, bodies_of)
    reader.listener = Everything()
    made, ended, others = {}, [], []
    for message in reader.feed(b"".join(wire)):
        assert len(message.results) <= MAX_SEATS  # pyright: ignore[reportAttributeAccessIssue]
        left = iter(message.results)
        for model in message.models:
            for seat, count in model.parts:
                made.setdefault(seat, []).extend(next(left) for _ in range(count))
            (ended if model.model == 3 else others).extend((one.seat, next(left)) for one in model.ended)
            assert (model.heard, model.room, model.row_s) == (7, *((5, 0.5) if model.model == 3 else (6, 0.0)))
    assert made == dict(parts)
    assert ended == list(enumerate(results))
    assert others == [(0, b"u")]


def test_a_body_that_is_too_long_is_refused_by_its_announcement():
    with pytest.raises(InvalidRequest, match="at most 4096 are read"):
        list(LinkReader(FromCaller, bodies_of, 4096).feed(written([bytes(4096 + LYING_BYTES + 1)])[:400]))


def test_parts_are_counted_until_there_is_room_for_them():
    ahead = PartsAhead()
    for _ in range(100):
        ahead.come(1, [b"x"] * MAX_PARTS)
        ahead.allow(1, MAX_PARTS)
    ahead.come(1, [b"x"] * MAX_PARTS)
    with pytest.raises(InvalidRequest):
        ahead.come(1, [b"x"])
    ahead.end(1)
    part = b"x" * (MAX_BYTES // FEW_PARTS)
    ahead.come(1, [part] * FEW_PARTS)
    ahead.come(2, [part])
    with pytest.raises(InvalidRequest):
        ahead.come(1, [b"x"])
    ahead.allow(3, 1)
