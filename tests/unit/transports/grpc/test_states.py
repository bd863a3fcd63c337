# SPDX-License-Identifier: Apache-2.0
"""The tables of connections and calls: what they promise, and that the drivers go nowhere else."""

import inspect
import re
from pathlib import Path

import pytest

from forebay.transports.grpc import calls, connection, receiving, states
from forebay.transports.grpc.states import (
    CALLS,
    CONNECTIONS,
    DECIDE,
    END_STREAM,
    GONE,
    HALF_CLOSED,
    LOSE,
    OPEN,
    RECEIVING,
)
from forebay.transports.state_table import Event, State

ASSIGNED = re.compile(r"\bstate = (.+)")


@pytest.mark.parametrize("table, first", [(CONNECTIONS, OPEN), (CALLS, RECEIVING)])
def test_every_state_of_a_table_can_be_reached(table, first):
    reached, new = set(), {first}
    while new:
        reached |= new
        new = {to for state in new for to in table[state].values()} - reached
    assert reached == set(table)


def test_every_state_and_every_event_is_in_a_table():
    rows = [*CONNECTIONS.items(), *CALLS.items()]
    told = [each for each in vars(states).values() if isinstance(each, (State, Event))]
    assert {state for state, _ in rows} == {each for each in told if isinstance(each, State)}
    assert {event for _, row in rows for event in row} == {each for each in told if isinstance(each, Event)}


def test_what_is_over_never_begins_again():
    for state, row in CONNECTIONS.items():
        assert row[LOSE] is GONE
        assert state.reads or not state.begins, "nobody begins what nobody reads"
        for to in row.values():
            assert (state.reads, state.begins) >= (to.reads, to.begins)
    for state, row in CALLS.items():
        assert (END_STREAM in row, DECIDE in row) == (not state.is_half_closed, not state.is_done)
        for event, to in row.items():
            assert to.is_half_closed == (state.is_half_closed or event is END_STREAM)
            assert to.is_done == (state.is_done or event is DECIDE)


def test_the_drivers_go_where_the_tables_say():
    source = "".join(Path(inspect.getfile(module)).read_text() for module in (calls, connection, receiving))
    usual = {f"{CALLS[RECEIVING][END_STREAM]}  # END_STREAM", f"{CALLS[HALF_CLOSED][DECIDE]}  # DECIDE"}
    others = {f"CALLS[self.state][{event}]" for event in ("END_STREAM", "DECIDE")}
    others |= {f"CONNECTIONS[self.state][states.{event}]" for event in ("WARN", "LEAVE", "HANG_UP", "LOSE")}
    assert set(ASSIGNED.findall(source)) == usual | others
