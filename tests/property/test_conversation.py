# SPDX-License-Identifier: Apache-2.0
# pyright: reportArgumentType=false, reportOptionalMemberAccess=false, reportAttributeAccessIssue=false, reportOptionalSubscript=false
"""Conversations with workers that keep to the protocol for a while and then do not, in any state and in any pieces."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import re
import zlib
from types import SimpleNamespace

import msgspec
import pytest

from forebay.errors import InternalError, InvalidRequest, TooLarge
from forebay.types.batch import EntryBatch, Noted
from forebay.types.call import Failure, Request, media_of
from forebay.workers.pool import CREDIT
from forebay.workers.pools.attached_pool import AttachedPool
from forebay.workers.pools.seating import PORTION
from forebay.workers.pools.slot_pool import running
from forebay.workers.pools.worker_slot import WorkerSlot
from forebay.workers.wire import conversation, frames
from forebay.workers.wire.conversation import Conversation
from forebay.workers.wire.conversation_state import BEGIN, CLOSE, TABLE, UNREADY
from forebay.workers.wire.worker_events import (
    Counted,
    Failed,
    Heard,
    Hello,
    Kept,
    Leaving,
    Logged,
    Ready,
    Result,
    Violation,
)

RUNS = 400
EVENTS = {Hello, Ready, Failed, Result, Heard, Kept, Leaving, Logged, Counted, Violation}
ODD = [
    None, True, -1, 0, 1, 2**63, 1.5, math.nan, math.inf, "", "x", "ready", b"", b"x" * 9, [], [[]], {},
    {0: 1}, {None: {}}, {"worker": []}, {0: ["ModelError", "m", None, ""]},
    {True: ["A", "m", None, ""]}, {-1: ["A", "m", None, ""]},
    {9: ["A", "m", None, ""]}, {0: ["A", "m", {None: 1}, ""]}, {0: ["A", 1, None, ""]}, [1.0, []], [[1, "x"]],
    frames.shared(0, 4), frames.shared(2**60, 2**60), frames.shared(0, 2**20), msgspec.msgpack.Ext(-1, bytes(4)),
    msgspec.msgpack.Ext(7, b"x"),
]  # fmt: skip
KINDS = [
    "hello",
    "ready",
    "failed",
    "result",
    "keeps",
    "leaving",
    "log",
    "metrics",
    "sit",
    "round",
    "unready result",
    "batch",
    "open",
    "",
    None,
    7,
    ["x"],
]


class Memory:
    """What a worker shares: 64 bytes."""

    def __init__(self):
        self.handle = {"bodies": ["", 0], "results": ["", 0]}
        self.closed = False

    def place(self, bodies):
        return bodies

    def view(self, offset, length):
        assert not self.closed
        if offset + length > 64:
            raise InvalidRequest("beyond the end")
        return memoryview(bytes(64))[offset : offset + length]

    def close(self):
        self.closed = True


class Worker:
    """Says what fits, or nonsense that almost does.

    It keeps count of the state by the table alone, as the other side must.
    """

    def __init__(self, dice, nonsense):
        self.dice, self.nonsense = dice, nonsense
        self.answering = None
        self.rounds = 0

    def a_round(self, talk):
        """Parts of some that sit, and the end of others; the end of one that runs alone is a result."""
        dice = self.dice
        may_end = talk.seating.seats > 0
        parts, ended = [], []
        for name, sitting in talk.seating.open.items():
            count = len(sitting.batch.entries)
            parts += [[name, *self.outcomes(count, shares=False)] for _ in range(dice.randrange(3))]
            if dice.random() < 0.2:
                mates = [one for one, sitting in talk.seating.open.items() if len(sitting.batch.entries) == 1]
                parts.append([mates, self.outcomes(len(mates), shares=False)[0], None])
            if may_end and dice.random() < 0.3:
                media = {0: "image/png"} if dice.random() < 0.2 else None
                found = [b"y"] * count if media else self.outcomes(count, shares=False)[0]
                ended.append([name, found, None, 0.1, media])
        return ["round", talk._round + 1, parts, ended]

    def outcomes(self, count, shares):
        dice = self.dice
        choices = [b"y", None, ["a", [b"z"]], *[frames.shared(8, 4), ["a", [frames.shared(0, 1)]]] * shares]
        found = [dice.choice(choices) for _ in range(count)]
        failures = {i: ["ModelError", "m", None, "t"] for i in range(count) if dice.random() < 0.2}
        return found, failures or None

    def fitting(self, state, talk):
        """A message that belongs into this state."""
        dice = self.dice
        kind = dice.choice([kind for kind in TABLE[state] if kind not in {BEGIN, CLOSE, *talk._barred}] or [None])
        name, sitting = next(iter(talk.seating.open.items()), (0, None))
        count = 0 if sitting is None else len(sitting.batch.entries)
        found, failures = self.outcomes(count, talk._shared is not None)
        if kind == "round" and state == "busy" and sitting.batch.on_steps is None:
            kind = "result"
        told = [[1.0, [["w", "p", 1.0, 2.0, -1]]]] if dice.random() < 0.3 else []
        return {
            "hello": [
                "hello",
                frames.VERSION,
                {"worker": "w" * 16, "pid": 7, "shares": dice.random() < 0.8, "phases": True, "seats": True},
            ],
            "sit": ["sit"],
            "round": self.a_round(talk) if kind == "round" else None,
            "ready": ["ready", False] if dice.random() < 0.2 else ["ready"],
            "failed": ["failed", "ModelError", "no", None, ""],
            "keeps": ["keeps"],
            "leaving": ["leaving"],
            "result": ["result", name, found, failures, 0.1, True, *told],
            UNREADY: ["result", name, found, failures, 0.1, False, *told],
            "log": [
                "log",
                dice.choice([0, name]),
                ["name", 20, 1.5, "text", "trace", {"a": 1}][: 4 + dice.randrange(3)],
            ],
            "metrics": ["metrics", b"x"],
            None: None,
        }[kind]

    def says(self, state, talk):
        """The bytes of the next message."""
        dice = self.dice
        message = self.fitting(state, talk)
        if dice.random() < self.nonsense:
            how = dice.randrange(6)
            if how == 0 or message is None:
                message = [dice.choice(KINDS), *dice.choices([*ODD, *talk.seating.open], k=dice.randrange(7))]
            elif how == 1:
                message = [one if dice.random() < 0.7 else dice.choice(ODD) for one in message]
            elif how == 2:
                message = message[: dice.randrange(len(message))]
            elif how == 3:
                message = [*message, dice.choice(ODD)]
            elif how == 4:
                message = dice.choice(ODD)
            else:
                cut = bytearray(frames.encode(message))
                cut[dice.randrange(len(cut))] ^= 1 << dice.randrange(8)
                return bytes(cut)
        return b"" if message is None else frames.encode(message)


def pieces(dice, data):
    while data:
        size = dice.choice([1, 3, 7, len(data)])
        yield data[:size]
        data = data[size:]


def talk_with(seed, nonsense):
    """Hold one conversation; returns what happened."""
    dice = random.Random(seed)
    wants = dice.random() < 0.3
    talk = Conversation(4096, (lambda batch, found: None) if wants else None, dice.choice([0, 0, 4]))
    worker, memory = Worker(dice, nonsense), Memory()
    begun, answered, seen = [], [], []
    seated = {}
    for now in range(40):
        state = talk.state
        if state == "idle" and not talk.is_leaving and dice.random() < 0.7:
            batch = a_batch(dice)
            assert talk.begin(batch, print, [b"x"] * len(batch.entries), {}, None, float(now))
            begun += talk.seating.open
        if state == "seated" and dice.random() < 0.8:
            sit_or_leave(dice, talk, seated)
            assert msgspec.msgpack.decode(talk.go(float(now))[4:])[0] == "go"
        for piece in pieces(dice, worker.says(talk.state, talk)):
            before = talk.state
            for event in talk.feed(piece, float(now)):
                seen.append(type(event))
                assert type(event) in EVENTS
                assert talk.state in TABLE
                assert before != "gone"
                if type(event) is Hello:
                    assert msgspec.msgpack.decode(talk.open({"log": 20}, memory)[4:])[0] == "open"
                elif type(event) is Result:
                    assert before == "busy"
                    assert 0.0 <= event.sitting.batch.model_s < math.inf
                    answered.append(event.sitting.name)
                    owns(event.outcomes)
                elif type(event) is Heard:
                    owns([part for _, part in event.parts])
                    talk.seating.hear(event.parts, event.ended, lambda rows: None, lambda: None)
                    talk.go(float(now))
                elif type(event) in {Violation, Failed}:
                    assert talk.state == "gone"
                before = talk.state
        if dice.random() < 0.1:
            for sitting in list(talk.seating.open.values()):
                if sitting.batch.on_cancel is not None:
                    sitting.batch.on_cancel()
            assert talk.stop()
            assert talk.owes_since is None or talk.state in {"busy", "seated", "gone"}
    for sitting in talk.seating.clear():
        sitting.done(sitting.batch, [])
    talk.close()
    assert all(len(ends) == 1 for ends in seated.values())  # G2: each is told once that it has ended
    assert memory.closed or Hello not in seen
    assert list(talk.feed(frames.encode(["ready"]), 99.0)) == []
    assert len(answered) == len(set(answered))
    assert begun[: len(answered)] == answered
    assert len(begun) - len(answered) <= 1  # what was running at the end
    return seen


def a_batch(dice):
    entries = [Request(body=b"x", reply=print) for _ in range(dice.randint(1, 3))]
    streams, notes = dice.random() < 0.5, dice.random() < 0.5
    batch = EntryBatch(entries, None, len(entries), noted=Noted(0.0) if notes else None)
    batch.on_steps = (lambda steps, release: release()) if streams else None
    return batch


def sit_or_leave(dice, talk, seated):
    """Seat a batch where there is room, and call off one."""
    if talk.seating.free > 1:
        entries = [Request(body=b"x", reply=print) for _ in range(dice.randint(1, 2))]
        batch = EntryBatch(entries, dice.choice("ab"), len(entries), on_steps=lambda steps, release: release())
        ends = seated[batch] = []
        talk.seat(batch, lambda _, outcomes: ends.append(outcomes), [b"x"] * len(entries), {}, None)
    if dice.random() < 0.2:
        for batch in seated:
            if batch.on_cancel is not None:
                batch.on_cancel()
                break


def seated_conversation(counts, check=None):
    """A conversation with batches of so many entries each, what each is told by name, and their names."""
    talk = Conversation(1 << 20, check, 8)
    for message in (["hello", frames.VERSION, {"worker": "0", "pid": 1, "seats": True}], ["sit"]):
        (event,) = talk.feed(frames.encode(message), 0.0)
        if type(event) is Hello:
            talk.open({}, None)
    told = {}
    for count in counts:
        entries = [Request(body=b"x", reply=print) for _ in range(count)]
        batch = EntryBatch(entries, "a", count)
        talk.seat(batch, lambda _, outcomes: None, [b"x"] * count, {}, None)
        name = max(talk.seating.open)
        told[name] = []
        batch.on_steps = lambda steps, release, name=name: told[name].extend(steps)
    return talk, told


@pytest.mark.parametrize("checks", [False, True])
def test_a_step_told_in_one_is_what_its_parts_are_told_one_by_one(checks):
    dice = random.Random(20261123)
    for _ in range(RUNS):
        counts = dice.choices([1, 1, 2], k=dice.randint(1, 6))
        seen = [[], []]
        ways = [
            seated_conversation(counts, (lambda _, found, way=way: way.append(found)) if checks else None)
            for way in seen
        ]
        (one, told_in_one), (apart, told_apart) = ways
        for number in range(1, 6):
            said = {False: [], True: []}
            for _ in range(dice.randrange(4)):
                places = dice.sample(range(len(counts)), dice.randint(0, len(counts)))
                singles = [place for place in places if counts[place] == 1]
                made = [b"%d" % dice.randrange(9) for _ in singles]
                said[False].append([[list(told_in_one)[place] for place in singles], made, None])
                said[True] += [
                    [list(told_apart)[place], [part], None] for place, part in zip(singles, made, strict=True)
                ]
                if len(singles) < len(places):  # and what one of several entries has made, between them
                    place = next(place for place in places if counts[place] == 2)
                    for is_apart, told in ((False, told_in_one), (True, told_apart)):
                        said[is_apart].append([list(told)[place], [b"x", None], None])
            for is_apart, talk in ((False, one), (True, apart)):
                (event,) = talk.feed(frames.encode(["round", number, said[is_apart], []]), 1.0)
                assert type(event) is Heard
                talk.seating.hear(event.parts, event.ended, lambda rows: None, lambda: None)
        assert list(told_in_one.values()) == list(told_apart.values())
        assert seen[0] == seen[1]


@pytest.mark.parametrize(
    "spoils, why",
    [
        (lambda names: [names[:2], [b"x"], None], "several streams"),
        (lambda names: [names[:2], [b"x"] * 3, None], "several streams"),
        (lambda names: [names[:2], None, None], "several streams"),
        (lambda names: [names[:1], b"x", None], "several streams"),
        (lambda names: [names[:1], [None], {0: ["ModelError", "m", None, "t"]}], "several streams"),
        (lambda names: [names, [b"x"] * 3, None], "it answered 1 of 2 items"),
        (lambda names: [[names[0], 10**9], [b"x"] * 2, None], "which it was not given"),
        (lambda names: [[names[0], [1]], [b"x"] * 2, None], "which it was not given"),
        (lambda names: [[names[0], True], [b"x"] * 2, None], "which it was not given"),
        (lambda names: [[names[0], {}], [b"x"] * 2, None], "which it was not given"),
    ],
)
def test_a_step_told_in_one_that_is_wrong_is_a_violation(spoils, why):
    for check in (None, lambda _, found: None):
        talk, told = seated_conversation([1, 1, 2], check)
        (event,) = talk.feed(frames.encode(["round", 1, [spoils(list(told))], []]), 1.0)
        assert type(event) is Violation
        assert why in event.reason
        assert not any(told.values())


@pytest.mark.parametrize(
    "ends",
    [
        lambda name: [[name, [b"r"], None, 0.1, None]] * 2,
        lambda name: [[name, [b"r"], None, "0.1", None]],
        lambda name: [[name, [b"r"], None, True, None]],
        lambda name: [[name, [b"r"], None, -0.1, None]],
        lambda name: [[name, [b"r"], None, float("nan"), None]],
        lambda name: [[name, [b"r"], None, float("inf"), None]],
    ],
)
def test_an_end_that_is_told_twice_or_took_no_time_that_there_is_is_a_violation(ends):
    talk, told = seated_conversation([1])
    (event,) = talk.feed(frames.encode(["round", 1, [], ends(next(iter(told)))]), 1.0)
    assert type(event) is Violation
    assert "does not say right" in event.reason


def test_a_part_of_one_batch_that_failed_is_a_failure():
    talk, told = seated_conversation([1, 2])
    name = list(told)[1]
    failures = {1: ["ModelError", "no", None, "t"]}
    (event,) = talk.feed(frames.encode(["round", 1, [[name, [b"x", None], failures]], []]), 1.0)
    assert type(event) is Heard
    ((_, (part, failure)),) = event.parts
    assert (part, type(failure), failure.error.message) == (b"x", Failure, "no")


def owns(value):
    """Nothing that is handed on refers to shared memory."""
    assert type(value) is not memoryview
    if type(value) is list:
        for inner in value:
            owns(inner)


def test_who_keeps_to_the_protocol_is_never_hung_up_on():
    happened = set()
    for seed in range(RUNS):
        seen = talk_with(seed, 0.0)
        assert Violation not in seen, seed
        happened |= set(seen)
    assert happened == EVENTS - {Violation}


def test_nonsense_in_any_state_raises_nothing_and_ends_the_conversation_once():
    """G2, G8, G9; F14."""
    ended = set()
    for seed in range(RUNS):
        seen = talk_with(seed, 0.3)
        assert seen.count(Violation) <= 1, seed
        assert Violation not in seen[:-1], seed
        ended.add(seen[-1] if seen else None)
    assert Violation in ended


@pytest.mark.parametrize("state", sorted(TABLE))
def test_what_the_table_does_not_allow_is_a_violation(state):
    kinds = (
        "hello",
        "ready",
        "failed",
        "result",
        UNREADY,
        "keeps",
        "sit",
        "round",
        "leaving",
        "log",
        "metrics",
        "what",
    )
    assert {kind for row in TABLE.values() for kind in row} == {*kinds, BEGIN, CLOSE} - {"what"}
    for kind in kinds:
        talk = in_state(state)
        allowed = kind in TABLE[state] and kind not in talk._barred
        (event,) = talk.feed(frames.encode(message_of(kind, talk)), 3.0) if state != "gone" else (Violation(""),)
        assert (type(event) is not Violation) == allowed, (state, kind)
        if state != "gone":
            assert talk.state == (TABLE[state][kind] if allowed else "gone")


@pytest.mark.parametrize("state", sorted(TABLE))
def test_what_the_server_does_goes_by_the_table_too(state):
    batch = a_batch(random.Random(1))
    talk = in_state(state)
    if BEGIN in TABLE[state]:
        talk.begin(batch, print, [b"x"], {}, None, 0.0)
        assert talk.state == TABLE[state][BEGIN]
    else:
        with pytest.raises(KeyError):
            talk.begin(batch, print, [b"x"], {}, None, 0.0)
        assert talk.state == state
    talk.close()
    assert talk.state == TABLE[state][CLOSE] == "gone"


def test_a_state_changes_by_the_table_and_nowhere_else():
    source = inspect.getsource(Conversation)
    assert re.findall(r"self\.state(?:: State)? = (.*)", source) == ['"greeting"', "TABLE[self.state][what]"]
    reached, new = set(), {"greeting"}
    while new:
        reached |= new
        new = {to for state in new for to in TABLE[state].values()} - reached
    assert reached == set(TABLE)


@pytest.mark.parametrize("kind", ["leaving", "keeps"])
def test_what_may_be_said_once_is_a_violation_the_second_time(kind):
    talk = in_state("busy")
    (first, second) = talk.feed(frames.encode([kind]) * 2, 3.0)
    assert type(first) in {Leaving, Kept}
    assert type(second) is Violation


def test_what_comes_when_it_is_over_is_not_heard():
    talk = in_state("gone")
    assert list(talk.feed(frames.encode(["ready"]), 3.0)) == []


@pytest.mark.parametrize(
    "line", [None, [], [1, 20, 1.5, "text"], ["name", "x", 1.5, "text"], ["name", 20, 1.5, b"text"]]
)
def test_a_line_of_the_log_that_is_none_is_a_violation(line):
    talk = in_state("busy")
    (event,) = talk.feed(frames.encode(["log", running_in(talk), line]), 3.0)
    assert type(event) is Violation


@pytest.mark.parametrize("data", [None, "text", [], b"x" * ((1 << 20) + 1)])
def test_metrics_that_are_none_are_a_violation(data):
    talk = in_state("busy")
    (event,) = talk.feed(frames.encode(["metrics", data]), 3.0)
    assert type(event) is Violation


def test_lines_that_were_not_asked_for_are_a_violation():
    talk = Conversation()
    list(talk.feed(frames.encode(["hello", frames.VERSION, {"worker": "w" * 16}]), 0.0))
    talk.open({}, None)
    (event,) = talk.feed(frames.encode(["log", 0, ["name", 20, 1.5, "text"]]), 3.0)
    assert type(event) is Violation


@pytest.mark.parametrize("failure", [[1, "m", None, ""], ["A", 1, None, ""], ["A", "m", None, 1]])
def test_a_failure_that_is_not_told_in_words_is_a_violation(failure):
    talk = in_state("busy")
    (event,) = talk.feed(frames.encode(["result", running_in(talk), [None], {0: failure}, 0.1, True]), 3.0)
    assert event.reason == "it does not speak the protocol: a failure is not described in words"


def test_what_a_client_takes_when_all_is_said_is_not_told_the_worker():
    talk = in_state("busy")
    (name,) = talk.seating.open
    held = []
    talk.seating.open[name].batch.on_steps = lambda steps, release: held.append(release)
    for number in range(1, PORTION + 1):
        (event,) = talk.feed(frames.encode(["round", number, [[name, [b"p"], None]], []]), 2.0)
        talk.seating.hear(event.parts, event.ended, lambda rows: None, lambda: None)
    list(talk.feed(frames.encode(["result", name, [b"r"], None, 0.1, True]), 3.0))
    for release in held:
        release()
    assert talk.go(4.0) is None


@pytest.mark.parametrize("types, is_right", [
    (None, True), ({}, True), ({0: "image/png"}, True), ({1: "image/png"}, False), ({-1: "image/png"}, False),
    ({"0": "image/png"}, False), ({0: "a\r\nb: c"}, False), ({0: 1}, False),
    (["image/png"], False), ({True: "a/b"}, False),
    ({0: ["", 404, [["x-a", "b"]]]}, True), ({0: ["image/png", 200, []]}, True),
    ({0: ["", 99, []]}, False), ({0: ["", True, []]}, False), ({0: ["", "404", []]}, False),
    ({0: ["a\r\nb", 404, []]}, False), ({0: []}, False),
    ({0: ["", 404, [["x", "a\r\nb: c"]]]}, False), ({0: ["", 404, [["content-length", "1"]]]}, False),
    ({0: ["", 404, [["x", "y"]] * 33]}, False), ({0: ["", 404, [["x"]]]}, False), ({0: ["", 404]}, False),
])  # fmt: skip
def test_an_outcome_may_have_a_media_type(types, is_right):  # F29
    talk = in_state("busy")
    (event,) = talk.feed(frames.encode(["result", running_in(talk), [b"r"], None, 0.1, True, None, types]), 3.0)
    assert (type(event) is Result) == is_right
    if is_right:
        assert event.outcomes == [media_of(b"r", types[0]) if types else b"r"]


def test_the_first_part_of_a_stream_may_bring_the_head_of_its_answer():
    for media, is_right in (
        ({0: ["", 404, [["x-a", "b"]]]}, True),
        ({0: ["", 204, []]}, False),
        ({1: ["", 404, []]}, False),
    ):
        talk = in_state("busy")
        (event,) = talk.feed(frames.encode(["round", 1, [[running_in(talk), [b"p"], None, media]], []]), 3.0)
        assert (type(event) is Heard) == is_right


@pytest.mark.parametrize("outcome", [["r"], "r", None, 1])
def test_what_has_a_media_type_is_bytes(outcome):  # F29
    talk = in_state("busy")
    result = ["result", running_in(talk), [outcome], None, 0.1, True, None, {0: "image/png"}]
    (event,) = talk.feed(frames.encode(result), 3.0)
    assert type(event) is Violation


def running_in(talk):
    """The name of the batch that runs there."""
    return next(iter(talk.seating.open), 0)


def message_of(kind, talk):
    name = running_in(talk)
    return {
        "hello": ["hello", frames.VERSION, {"worker": "w" * 16}],
        "failed": ["failed", "ModelError", "no", None, ""],
        "result": ["result", name, [b"r"], None, 0.1, True],
        UNREADY: ["result", name, [b"r"], None, 0.1, False],
        "log": ["log", 0, ["name", 20, 1.5, "text"]],
        "metrics": ["metrics", b"x"],
        "round": ["round", 1, [], []],
    }.get(kind, [kind])


def streamed():
    return EntryBatch([Request(body=b"x", reply=print)], None, 1, on_steps=lambda steps, release: release())


def in_state(state):
    talk = Conversation(seats=4 if state == "seated" else 0)
    if state == "greeting":
        return talk
    list(talk.feed(frames.encode(["hello", frames.VERSION, {"worker": "w" * 16, "seats": True}]), 0.0))
    talk.open({"log": 20}, None)
    if state != "opening":
        list(talk.feed(frames.encode(["sit" if state == "seated" else "ready"]), 0.0))
    if state in {"busy", "finishing"}:
        talk.begin(streamed(), print, [b"x"], {}, None, 1.0)
    if state == "finishing":
        list(talk.feed(frames.encode(message_of(UNREADY, talk)), 2.0))
    if state == "gone":
        talk.close()
    assert talk.state == state
    return talk


def test_what_cannot_be_sent_is_told_and_leaves_the_worker_idle(monkeypatch):
    """F26."""
    talk = in_state("idle")
    with pytest.raises(InternalError, match="the batch cannot be sent to a worker"):
        talk.begin(streamed(), print, [object()], {}, None, 0.0)
    monkeypatch.setattr(conversation.frames, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(TooLarge, match="at most 1000 are allowed"):
        talk.begin(streamed(), print, [b"x" * 600, b"x" * 600], {}, None, 0.0)
    assert talk.state == "idle"
    assert not talk.seating.open
    assert talk.begin(streamed(), print, [b"x" * 600], {}, None, 0.0)


def test_memory_that_a_message_refers_to_counts_like_its_bytes():
    talk = Conversation(100)
    list(talk.feed(frames.encode(["hello", frames.VERSION, {"worker": "w" * 16, "shares": True}]), 0.0))
    talk.open({}, Memory())
    list(talk.feed(frames.encode(["ready"]), 0.0))
    talk.begin(streamed(), print, [b"x"], {}, None, 0.0)
    many = ["result", running_in(talk), [[frames.shared(0, 60)] * 2], None, 0.1, True]
    (event,) = talk.feed(frames.encode(many), 1.0)
    assert "refers to 120 shared bytes" in event.reason


# Beside others, in a pool


class Line:
    """A transport that remembers."""

    def __init__(self):
        self.written, self.closed = bytearray(), False

    def write(self, data):
        self.written += data

    def abort(self):
        self.closed = True

    def is_closing(self):
        return self.closed

    def get_extra_info(self, name):
        return None


def honest_answer(line, answered):
    """What an honest worker says to a batch that it has been given since the last call."""
    said = b""
    for message in list(frames.FrameReader().feed(bytes(line.written))):
        if message[0] == "batch" and message[1] not in answered:
            answered.add(message[1])
            outcomes = [zlib.crc32(body) for body in message[2]]
            said += frames.encode(["result", message[1], outcomes, None, 0.0, True])
    line.written.clear()
    return said


def test_neighbours_of_a_worker_that_speaks_nonsense_notice_nothing():
    """G2, G3."""

    async def main(seed):
        dice = random.Random(seed)
        pool = AttachedPool("told", grace_s=None)
        pool.greeted = lambda slot, about: (setattr(slot, "worker", id(slot)), slot.open({"log": 20}))
        slots, lines = [WorkerSlot(pool, 4096), WorkerSlot(pool, 4096)], [Line(), Line()]
        for slot, line in zip(slots, lines, strict=True):
            slot.connection_made(line)
        honest, rogue = slots
        worker, answered, found = Worker(dice, 0.25), set(), {}
        honest.data_received(frames.encode(["hello", frames.VERSION, {"worker": "w" * 16}]) + frames.encode(["ready"]))
        for number in range(20):
            if pool.idle:
                entries = [Request(body=b"%d" % number, reply=print) for _ in range(dice.randint(1, 3))]
                parts = (lambda _parts, let_go: let_go()) if dice.random() < 0.5 else None
                batch = EntryBatch(entries=entries, key=None, rows=len(entries), on_steps=parts)
                found[batch] = []
                pool.submit(batch, lambda batch, outcomes: found[batch].append(outcomes))
            if not lines[1].closed:
                data = worker.says(rogue._conversation.state, rogue._conversation)
                for piece in pieces(dice, data):
                    if not lines[1].closed:
                        rogue.data_received(piece)
                if lines[1].closed:
                    rogue.connection_lost(None)
            while said := honest_answer(lines[0], answered):
                honest.data_received(said)
        assert not lines[0].closed
        if not lines[1].closed:
            rogue.connection_lost(None)
        while said := honest_answer(lines[0], answered):
            honest.data_received(said)
        await pool.stop(0.0)
        for batch, outcomes in found.items():
            assert len(outcomes) == 1
            assert len(outcomes[0]) == len(batch.entries)
            # What the rogue answers is no number, or a small one: a bit of its nil was turned over.
            if batch.attempts == 1 and type(outcomes[0][0]) is int and outcomes[0][0] > 127:
                assert outcomes[0] == [zlib.crc32(entry.body) for entry in batch.entries]
        return any(type(one) is Failure for outcomes in found.values() for one in outcomes[0])

    for seed in range(RUNS // 2):
        try:
            asyncio.run(main(seed))
        except BaseException as error:
            raise AssertionError(f"seed {seed}") from error


def test_what_a_slot_runs_are_the_batches_that_sit_there():
    talk, _ = seated_conversation([1, 2])
    batches = [sitting.batch for sitting in talk.seating.open.values()]
    assert len(batches) == 2
    assert running(SimpleNamespace(seating=talk.seating)) == batches
    assert [batch.rows for batch in running(SimpleNamespace(seating=in_state("busy").seating))] == [1]
    assert running(SimpleNamespace(seating=in_state("idle").seating)) == []


def test_an_answer_that_is_not_streamed_comes_in_no_rounds():
    talk = in_state("idle")
    batch = streamed()
    batch.on_steps = None
    talk.begin(batch, print, [b"x"], {}, None, 0.0)
    (event,) = talk.feed(frames.encode(["round", 1, [[running_in(talk), [b"p"], None]], []]), 1.0)
    assert "not streamed" in event.reason


def test_a_round_does_not_end_a_batch_that_runs_alone():
    talk = in_state("busy")
    (event,) = talk.feed(frames.encode(["round", 1, [], [[running_in(talk), [b"r"], None, 0.1, None]]]), 1.0)
    assert "ends by a result" in event.reason


def test_a_worker_owes_nothing_while_its_clients_have_no_room():
    talk = in_state("busy")
    (name,) = talk.seating.open
    held = []
    talk.seating.open[name].batch.on_steps = lambda steps, release: held.append(release)
    for number in range(1, CREDIT + 1):
        (event,) = talk.feed(frames.encode(["round", number, [[name, [b"p"], None]], []]), 1.0 + number)
        talk.seating.hear(event.parts, event.ended, lambda rows: None, lambda: None)
        assert talk.go(1.0 + number) is None
        assert talk.owes_since == (1.0 + number if number < CREDIT else None)
    for release in held[:PORTION]:
        assert talk.go(50.0) is None
        release()
    assert msgspec.msgpack.decode(talk.go(60.0)[4:]) == ["go", CREDIT, [], [], [[name, PORTION]]]
    assert talk.owes_since == 60.0
