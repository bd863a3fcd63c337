# SPDX-License-Identifier: Apache-2.0
"""The table of states: what it promises, and that the two transitions of the hot path are those of the table."""

import inspect
import re
from pathlib import Path

import pytest

from forebay.errors import ForebayError
from forebay.protocols.native import status_of
from forebay.transports.http import connection_state
from forebay.transports.http.connection import HttpConnection
from forebay.transports.http.connection_state import (
    ASKED,
    BODY,
    DUE,
    GONE,
    HEAD,
    IDLE,
    LEAVE,
    LINGER,
    LOSE,
    READ,
    REFUSE,
    REFUSED,
    SETTLED,
    TABLE,
    WHOLE,
    ConnectionState,
    Event,
    State,
    check_framing,
)
from forebay.transports.http.same_turn import SameTurn

EVENTS = {each for each in vars(connection_state).values() if isinstance(each, Event)}
STATES = {each for each in vars(connection_state).values() if isinstance(each, State)}


def test_the_shortcut_is_one_transition_out_of_one_state():
    assert [(state, row[WHOLE]) for state, row in TABLE.items() if WHOLE in row] == [(IDLE, DUE)]


def test_the_hot_path_goes_where_the_table_says():
    def told(it):  # of a class its whole file: ast, which would find it there, fails while another thread uses it
        return Path(inspect.getfile(it)).read_text()

    source = inspect.getsource(HttpConnection.data_received)
    assert re.findall(r"talk\.state is (\w+)", source) == ["IDLE"]
    assert re.findall(r"talk\.state = (\w+)  # (\w+)", source) == [(TABLE[IDLE][WHOLE].name, "WHOLE")]
    source = told(SameTurn)
    assert re.findall(r"talk\.state = (\w+)  # (\w+)", source) == [(TABLE[DUE][SETTLED].name, "SETTLED")] * 2
    everywhere = "".join(map(told, HttpConnection.__mro__[:3])) + source
    assert len(re.findall(r"\.state = ", everywhere)) == 3


def test_every_state_can_be_reached_and_left():
    assert set(TABLE) == STATES
    reached, new = set(), {IDLE}
    while new:
        reached |= new
        new = {to for state in new for to in TABLE[state].values()} - reached
    assert reached == STATES
    assert {event for row in TABLE.values() for event in row} == EVENTS
    assert all(row[LOSE] is GONE for row in TABLE.values())


def test_what_is_not_read_is_never_read_again_and_what_is_due_ends_with_the_last_answer():
    for state, row in TABLE.items():
        for event, to in row.items():
            assert state.reads or not to.reads
            assert to.owes or event in {LOSE, LEAVE, SETTLED} or not state.owes
        if state.reads:
            assert row[REFUSE] is REFUSED
    assert TABLE[REFUSED][LEAVE] is LINGER


def read(talk, *, head=50, body=0, asks=ASKED):
    talk.begin()
    talk.head_bytes += head
    talk.on(READ)
    talk.body_bytes += body
    talk.on(asks)


def test_only_a_segment_of_one_message_from_its_beginning_on_may_be_remembered():
    talk = ConnectionState(1000, 100)
    talk.begin_segment()
    read(talk)
    assert talk.may_be_remembered
    talk.begin_segment()
    read(talk)
    assert not talk.may_be_remembered, "an answer was due"
    talk.on(SETTLED)
    talk.begin_segment()
    read(talk)
    talk.begin()  # F1
    talk.on(READ)
    assert not talk.may_be_remembered, "another message has begun"
    talk.on(ASKED)
    talk.on(SETTLED)
    talk.begin_segment()
    talk.begin()
    assert not talk.may_be_remembered, "its head has not ended"
    talk.begin_segment()
    talk.on(READ)
    assert not talk.may_be_remembered, "it began before"
    talk.begin_segment()
    talk.on(ASKED)
    assert not talk.may_be_remembered, "it began before"
    talk.on(SETTLED)
    talk.begin_segment()
    talk.begin()
    talk.on(READ)
    assert talk.may_be_remembered, "the body may come later"
    talk.begin_segment()
    assert not talk.may_be_remembered, "it began before"


def test_an_impossible_event_is_a_defect():
    talk = ConnectionState(1000, 100)
    with pytest.raises(KeyError):
        talk.on(SETTLED)


def test_a_head_counts_while_it_arrives():
    talk = ConnectionState(1000, 100)
    talk.begin_segment()
    talk.begin()
    talk.end_segment(600, 1.0)
    talk.begin_segment()
    with pytest.raises(ForebayError, match="longer than 1000"):
        talk.end_segment(600, 1.0)


def test_a_head_that_begins_late_in_a_segment_is_not_charged_for_what_was_before_it():
    talk = ConnectionState(1000, 100)
    talk.begin_segment()
    read(talk, body=5000)
    talk.begin()
    talk.end_segment(5200, 1.0)  # F66
    assert talk.state is connection_state.HEAD_DUE


def test_what_frames_a_body_may_not_be_longer_than_the_body_for_long():
    talk = ConnectionState(1000, 100)
    talk.begin_segment()
    talk.begin()
    talk.on(READ)
    talk.end_segment(100, 1.0)
    for _ in range(10):
        talk.begin_segment()
        talk.body_bytes += 500
        talk.end_segment(900, 1.0)
    for _ in range(2):
        talk.begin_segment()
        talk.end_segment(900, 1.0)
    talk.begin_segment()
    with pytest.raises(ForebayError, match="trailers"):  # F4
        talk.end_segment(900, 1.0)
    assert talk.state is BODY


def test_a_message_must_come_with_a_certain_rate_and_nothing_else_must():
    talk = ConnectionState(1000, 100)
    assert not talk.is_too_slow(1000.0, 30.0, 240)
    talk.begin_segment()
    talk.begin()
    talk.end_segment(10, 1000.0)
    assert talk.state is HEAD
    assert not talk.is_too_slow(1030.0, 30.0, 240)
    assert talk.is_too_slow(1031.0, 30.0, 240)


@pytest.mark.parametrize(
    "version, headers, status",
    [
        ("1.1", [(b"host", b"a")], None),
        ("1.0", [], None),
        ("1.1", [], 400),
        ("0.9", [(b"host", b"a")], 400),
        ("1.1", [(b"host", b"a"), (b"host", b"a")], 400),
        ("1.0", [(b"host", b"a"), (b"host", b"b")], 400),
        ("1.1", [(b"host", b"")], 400),
        ("1.0", [(b"transfer-encoding", b"chunked")], 400),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"gzip, chunked")], 501),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"gzip"), (b"transfer-encoding", b"chunked")], 501),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"chunked")], 501),
        ("1.1", [(b"host", b"a"), (b"content-length", b"5"), (b"transfer-encoding", b"chunked")], 501),
        ("1.1", [(b"host", b"a"), (b"transfer-encoding", b"Chunked")], None),
    ],
)
def test_a_head_that_could_be_read_in_two_ways_is_refused(version, headers, status):  # F7
    if status is None:
        check_framing(b"POST", version, headers, upgrades=False)
    else:
        with pytest.raises(ForebayError) as caught:
            check_framing(b"POST", version, headers, upgrades=False)
        assert status_of(caught.value) == status
