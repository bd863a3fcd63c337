# SPDX-License-Identifier: Apache-2.0
"""The budget of bytes adds up whatever connections do, and makes room at the expense of those that do not read."""

import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import Unavailable
from forebay.server.byte_budget import GRACE_S, PATIENCE_S, ByteBudget


class Connection:
    """Holds what it is told to, and gives it up when it is asked to."""

    def __init__(self, budget, max_bytes=1 << 40):
        self.account = budget.open(self, max_bytes)
        self.refused = []
        self.dropped = []
        self.untold: int | None = None

    def refuse_arriving(self, error):
        self.refused.append(error)
        self.account.forget_arriving(self.account.arriving)

    def drop_unread(self, error):
        self.dropped.append(error)
        size = self.account.unread
        self.account.set_unread(0, dropped=size)

    def count_unread(self):
        if self.untold is not None:
            self.account.set_unread(self.untold)


@pytest.fixture
def budget():
    made: Any = ByteBudget(1000)
    made.now = 0.0
    made.clock = lambda: made.now
    made.call_soon = lambda function: function()
    return made


STEPS = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["arrive", "complete", "answer", "unread", "close", "wait"]),
        st.integers(0, 700),
    ),
    max_size=60,
)


@given(STEPS)
def test_what_is_held_is_the_sum_of_all_accounts(steps):  # F78
    budget = ByteBudget(1000)
    now = [0.0]
    budget.clock = lambda: now[0]
    budget.call_soon = lambda function: function()
    connections = [Connection(budget, 900) for _ in range(4)]
    for index, step, size in steps:
        account = connections[index].account
        if step == "arrive":
            account.arrive(size)
        elif step == "complete":
            arrived = account.arriving
            account.forget_arriving(arrived)
            account.work(arrived)
        elif step == "answer":
            account.release(account.working)
        elif step == "unread":
            account.set_unread(size)
        elif step == "close":
            account.close()
            connections[index] = Connection(budget, 900)
        else:
            now[0] += size / 100
        accounts = [one.account for one in connections]
        assert budget.held_bytes == sum(one.size for one in accounts)
        assert budget.unread_bytes == sum(one.unread for one in accounts) <= budget.max_bytes
        assert {*budget.arriving} == {one for one in accounts if one.arriving}
        assert {*budget.unread} == {one for one in accounts if one.unread}
        assert all(one.arriving + one.unread <= 2 * budget.max_bytes for one in accounts)
    for one in connections:
        one.account.close()
    assert (budget.held_bytes, budget.unread_bytes, budget.arriving, budget.unread) == (0, 0, {}, {})


def test_a_client_that_reads_is_kept_however_much_and_however_long(budget):  # F78
    reader, lazy, sender = Connection(budget), Connection(budget), Connection(budget)
    reader.account.set_unread(800)
    lazy.account.set_unread(100)
    budget.now = 20.0
    reader.account.set_unread(500)  # it needs half a minute for the rest at this pace
    sender.account.arrive(450)
    assert (reader.dropped, sender.refused) == ([], [])
    assert [error.kind for error in lazy.dropped] == ["Unavailable"]
    assert "does not read 100 bytes" in lazy.dropped[0].message


def test_what_was_taken_since_it_was_last_told_counts(budget):  # F78
    reader, sender = Connection(budget), Connection(budget)
    reader.account.set_unread(900)
    budget.now = 2 * GRACE_S
    reader.untold = 200
    sender.account.arrive(150)
    assert (reader.dropped, sender.refused, budget.held_bytes) == ([], [], 350)


def test_who_is_cut_off_may_be_the_only_one_that_sends(budget):  # F78
    working, lazy = Connection(budget), Connection(budget)
    working.account.work(1100)
    lazy.account.set_unread(900)
    lazy.drop_unread = lambda error: lazy.account.close()
    budget.now = 10.0
    lazy.account.arrive(50)
    assert budget.held_bytes == 1100


def test_a_pace_that_is_too_slow_is_none(budget):
    slow, sender = Connection(budget), Connection(budget)
    slow.account.set_unread(900)
    budget.now = PATIENCE_S
    slow.account.set_unread(600)
    sender.account.arrive(500)
    assert slow.dropped
    assert not sender.refused


def test_the_largest_request_that_arrives_is_refused_if_nobody_fails_to_read(budget):
    reader, large, small = (Connection(budget) for _ in range(3))
    reader.account.set_unread(300)
    budget.now = GRACE_S / 2  # nothing is known of its pace
    large.account.arrive(500)
    small.account.arrive(201)
    assert (len(large.refused), small.refused, reader.dropped) == (1, [], [])
    assert "--max-buffered-bytes" in large.refused[0].message


def test_requests_that_are_worked_on_are_never_given_up(budget):
    working, sender = Connection(budget), Connection(budget)
    working.account.work(990)
    sender.account.arrive(11)
    assert sender.refused
    assert budget.held_bytes == 990
    budget.make_room()
    sender.account.set_unread(400)  # an answer that was computed is delivered
    assert not sender.dropped


def test_a_connection_has_a_limit_of_its_own(budget):
    small = Connection(budget, 100)
    small.account.set_unread(100)
    assert not small.account.is_full()
    small.account.arrive(1)
    assert "--max-connection-bytes" in small.refused[0].message
    small.account.set_unread(101)
    assert small.account.is_full()
    assert not small.dropped


def test_what_threads_unpack_counts_as_well(budget):
    Connection(budget).account.work(400)
    threads = [threading.Thread(target=lambda: [budget.take(1) for _ in range(100)]) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(Unavailable, match="--max-buffered-bytes"):
        budget.take(1)
    sender = Connection(budget)
    sender.account.arrive(1)
    assert sender.refused
    budget.give(600)
    sender.account.arrive(600)
    assert len(sender.refused) == 1


def test_a_connection_that_gives_nothing_up_does_not_hold_the_server_up(budget):
    broken = Connection(budget)
    broken.drop_unread = broken.refuse_arriving = lambda error: None
    broken.account.set_unread(2000)
    broken.account.arrive(2000)
    budget.now = 1.0
    budget.make_room(for_arriving=True)
