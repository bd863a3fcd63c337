# SPDX-License-Identifier: Apache-2.0
"""The tables of links between fronts and owners, and that the code goes nowhere else."""

from __future__ import annotations

import inspect
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.errors import InvalidRequest
from forebay.owners import caller_conversation, caller_link, owner_conversation, states
from forebay.owners.caller_conversation import CallerConversation
from forebay.owners.detached_bodies import MAX_FRAME_ELEMENTS, follow
from forebay.owners.owner_conversation import MAX_ELEMENTS, OwnerConversation
from forebay.owners.owner_pool import OwnerSlot
from forebay.owners.request_form import require_form
from forebay.owners.states import (
    ASKING,
    CALLERS,
    DRAIN,
    GONE,
    GREETING,
    HANG_UP,
    LEAVING,
    LOSE,
    LOST,
    OWNERS,
    RUNNING,
    SEATS,
    SERVING,
    TRUSTING,
)
from forebay.owners.wire import HandedRequests, OwnerAnswers
from forebay.transports.state_table import Event, State
from forebay.types.batch import EntryBatch
from forebay.types.call import Request
from forebay.workers.wire import frames, shared_secret

SECRET = b"a secret of the tests of links"
HELLO = ["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16}]
SEAT = [1, frames.encode_part({"in": "json", "out": "json"}), 1, 2.5, "id"]
REQUESTS = ["requests", [[1, [SEAT], [], []]], 0, [b"1"]]
FROM_OWNER = {
    "challenge": ["challenge", b"n" * 32],
    "welcome": ["welcome", b"?"],
    "open": ["open", {"max_body": 4096}],
    "models": ["models", []],
    "answers": ["answers", [], []],
    "leaving": ["leaving"],
    "refused": ["refused", "no"],
    "beat": ["beat"],
}
EVENTS = {
    "challenge": states.CHALLENGE,
    "welcome": states.WELCOME,
    "open": states.OPENING,
    "models": states.MODELS,
    "answers": states.ANSWERS,
    "leaving": states.LEAVE,
    "refused": states.REFUSAL,
    "beat": states.BEAT,
}
ODD = [None, True, -1, 0, 2**63, 1.5, float("nan"), "", "x", b"", [], [[]], {}, {0: 1}, [1], [[1, [], [], []]]]


@pytest.mark.parametrize("table, firsts", [(CALLERS, {GREETING}), (OWNERS, {ASKING, TRUSTING}), (SEATS, {RUNNING})])
def test_every_state_of_a_table_can_be_reached(table, firsts):
    reached, new = set(), set(firsts)
    while new:
        reached |= new
        new = {to for state in new for to in table[state].values()} - reached
    assert reached == set(table)


def test_every_state_and_every_event_is_in_a_table():
    rows = [*CALLERS.items(), *OWNERS.items(), *SEATS.items()]
    told = [each for each in vars(states).values() if isinstance(each, (State, Event))]
    assert {state for state, _ in rows} == {each for each in told if isinstance(each, State)}
    assert {event for _, row in rows for event in row} == {each for each in told if isinstance(each, Event)}


def test_the_code_goes_where_the_tables_say():
    source = "".join(
        Path(inspect.getfile(module)).read_text() for module in (caller_conversation, caller_link, owner_conversation)
    )
    assigned = set(re.findall(r"\.state = (.+)", source))
    assert assigned
    assert [one for one in assigned if not re.fullmatch(r"(CALLERS|OWNERS|SEATS)\[\w+(\.\w+)?\]\[\w+\]", one)] == []


def fed(conversation, *messages):
    return list(conversation.feed(b"".join(map(frames.encode, messages))))


@pytest.mark.parametrize("state", CALLERS)
@pytest.mark.parametrize(
    "message, event",
    [(HELLO, states.HELLO), (["sees"], states.SEES), (REQUESTS, states.REQUESTS), (["beat"], states.BEAT)],
)
def test_a_caller_says_what_its_table_has_and_nothing_else(state, message, event):
    conversation = CallerConversation(1 << 20, 10_000)
    if state is not GREETING:
        fed(conversation, HELLO)
    if state is LEAVING:
        conversation.drain()
    if state is GONE:
        conversation.close()
    assert conversation.state is state
    heard = fed(conversation, message)
    if event in CALLERS[state]:
        assert (conversation.state, conversation.problem) == (CALLERS[state][event], "")
        assert len(heard) == (event in {states.REQUESTS, states.SEES})
    else:
        assert (heard, conversation.state) == ([], GONE)


@pytest.mark.parametrize("state", OWNERS)
@pytest.mark.parametrize("kind", FROM_OWNER)
def test_an_owner_says_what_its_table_has_and_nothing_else(state, kind):
    sent = []
    conversation = OwnerConversation("x" * 16, None if state is TRUSTING else SECRET, sent.append)
    conversation.state = state
    conversation.greet()
    fed(conversation, FROM_OWNER[kind])
    if EVENTS[kind] not in OWNERS[state]:
        assert (conversation.state, bool(conversation.problem)) == (LOST, True) or state is LOST
    elif kind == "welcome":  # it is no proof
        assert (conversation.state, "secret" in conversation.problem) == (LOST, True)
    else:
        assert conversation.state is OWNERS[state][EVENTS[kind]]
        assert bool(conversation.problem) == (kind == "refused")


def test_an_owner_that_proves_the_secret_is_let_in():
    sent = []
    conversation = OwnerConversation("x" * 16, SECRET, sent.append)
    conversation.greet()
    (hello,) = frames.FrameReader().feed(sent[-1])
    theirs, ours = b"n" * 32, hello[2]["nonce"]
    fed(conversation, ["challenge", theirs])
    (proof,) = frames.FrameReader().feed(sent[-1])
    assert shared_secret.is_proof(proof[1], SECRET, "worker", theirs, ours)
    fed(conversation, ["welcome", shared_secret.proof(SECRET, "server", theirs, ours)], ["open", {"max_body": 7}])
    assert (conversation.problem, conversation.max_body_bytes) == ("", 7)


@pytest.mark.parametrize("seed", range(200))
def test_whatever_a_caller_sends_nothing_is_raised(seed):
    chance = random.Random(seed)
    conversation = CallerConversation(1 << 16, 500)
    fed(conversation, HELLO)
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(REQUESTS))
    place, holder, at = message, None, 0
    while isinstance(place, list) and place and chance.random() < 0.8:
        holder, at = place, chance.randrange(len(place))
        place = holder[at]
    if holder is not None:
        holder[at] = chance.choice(ODD)
    data = frames.encode(message)
    if chance.random() < 0.3:
        data = bytes(chance.choice([byte, byte, byte, chance.randrange(256)]) for byte in data)
    heard = list(conversation.feed(data))
    assert conversation.state is (GONE if conversation.problem else SERVING)
    for one in heard:
        if isinstance(one, HandedRequests):
            assert sum(len(bundle.seats) for bundle in one.bundles) == len(one.bodies)


def test_frames_and_params_are_bounded():
    conversation = CallerConversation(1000, 500)
    fed(conversation, HELLO, ["requests", [], 0, [b"x" * 1001]])
    assert "1000" in conversation.problem
    conversation = CallerConversation(1 << 20, 500)
    fed(conversation, HELLO, ["requests", [], 0, [0] * 501])
    assert "500" in conversation.problem
    conversation = CallerConversation(1 << 20, 500)
    for params in ({str(at): at for at in range(6000)}, [1], {1: 2}, {"a": b"x"}):
        with pytest.raises(InvalidRequest):
            conversation.params_of(frames.encode_part(params))
    assert conversation.params_of(SEAT[1]) is conversation.params_of(bytes(SEAT[1]))


@pytest.mark.parametrize(
    "body, size, params",
    [
        (b"1", 2, {}),
        ([b"1"], 2, {"call": "many"}),
        (b"12", 2, {"call": "many"}),
        ({}, 1, {"call": "many"}),
        (b"1", 1, {"rows": True}),
        (b"1", 1, {"in": "tensors", "given": [["a", "FP32", [1], False]]}),
        ([b"1", b"2"], 1, {"in": "tensors", "given": [["a", "FP32", [1], False]]}),
        (b"1", 1, {"call": "none"}),
    ],
)
def test_a_body_has_the_form_that_is_said(body, size, params):
    with pytest.raises(InvalidRequest):
        require_form(body, size, params, {"": False, "many": True})


def test_what_drains_stays_so():
    conversation = CallerConversation(1 << 20, 500)
    fed(conversation, HELLO)
    assert conversation.is_taking
    conversation.drain()
    conversation.drain()
    assert (conversation.is_taking, conversation.is_open) == (False, True)
    assert CALLERS[LEAVING][DRAIN] is LEAVING
    assert all(row.get(HANG_UP) is GONE for row in CALLERS.values())
    assert all(row.get(LOSE) is LOST for row in OWNERS.values())


@pytest.mark.parametrize(
    "answers, problem",
    [
        ([[1, 0, 9, [], [], [5]]], "returns requests"),  # it would be sent the same ones without an end
        ([[1, 0, 9, [], [[5]], []]], "announces 1 results and gives 0"),
        ([[1, 0, 9, [[5, 1 << 63]], [], []]], "and gives 0"),
        ([[1, 0, 9, [], [[5, None, ["Unavailable", "no", None], "a\r\nb: c"]], []]], "Expected `str` matching"),
    ],
)
def test_an_owner_answers_what_it_says(answers, problem):
    conversation = OwnerConversation("x" * 16, None, lambda _: None)
    assert fed(conversation, FROM_OWNER["open"], ["answers", answers, []])[1:] == []
    assert problem in conversation.problem


def test_an_owner_that_leaves_returns_requests():
    conversation = OwnerConversation("x" * 16, None, lambda _: None)
    returned = ["answers", [[1, 0, 9, [], [], [5]]], []]
    assert len(fed(conversation, FROM_OWNER["open"], FROM_OWNER["leaving"], returned)) == 3
    assert conversation.problem == ""


@pytest.mark.parametrize("ended, returned", [([[5], [5]], []), ([[5]], [5]), ([], [5, 5])])
def test_an_owner_ends_a_request_once(ended, returned):
    """Nothing of the answer is acted on: who waits is handed on, and answered, when the link is given up."""
    nobody: Any = None
    slot = OwnerSlot(nobody, 1, nobody, 9)
    sitting = slot.seating.join(EntryBatch([Request(b"", print)], None, 1), print, name=5)
    conversation = OwnerConversation("x" * 16, None, lambda _: None)
    answers = ["answers", [[1, 0, 9, [], ended, returned]], [b"1"] * len(ended)]
    *_, message = fed(conversation, FROM_OWNER["open"], FROM_OWNER["leaving"], answers)
    assert isinstance(message, OwnerAnswers)
    with pytest.raises(InvalidRequest, match="ends a request twice"):
        slot.hear(message.models[0], [], message.results)
    assert slot.seating.open == {5: sitting}


def test_what_an_owner_says_has_no_more_values_than_are_read():
    conversation = OwnerConversation("front", None, len)
    most = MAX_FRAME_ELEMENTS
    payload = b"\xdd" + (most + 1).to_bytes(4, "big") + b"\xc0" * (most + 1)
    assert list(conversation.feed(len(payload).to_bytes(frames.HEADER, "big") + payload)) == []
    assert str(most) in conversation.problem.replace(",", "")


def test_what_follows_a_frame_has_no_more_values_than_are_read():
    conversation = OwnerConversation("front", None, len)
    many = b"\xdd" + (MAX_ELEMENTS + 1).to_bytes(4, "big") + b"\xc0" * (MAX_ELEMENTS + 1)
    told, pieces = follow(many)
    answer = frames.encode(["answers", [[1, 0, 9, [], [[5]], []]], [told]])
    assert len(list(conversation.feed(b"".join([frames.encode(FROM_OWNER["open"]), answer, *pieces])))) == 1
    assert str(MAX_ELEMENTS) in conversation.problem.replace(",", "")
