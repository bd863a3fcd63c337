# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportArgumentType=false, reportOptionalOperand=false
"""Which queued requests travel together: every rule of the batching policy, stepped by hand."""

from __future__ import annotations

import pytest
from tests.checked_queue import CheckedQueue

from forebay.batching.queue import BatchConfig, BatchQueue
from forebay.errors import QueueFull, TooLarge
from forebay.testing import MemoryOrigin
from forebay.types.call import ALONE, Request

NEVER = float("inf")


def entry(name="x", size=1, key=None, deadline=NEVER, origin=None):
    return Request(body=name, reply=lambda *_: None, size=size, key=key, deadline=deadline, origin=origin)


def queue(**settings):
    return CheckedQueue(BatchConfig(**{"idle": "go", "max_size": 4, **settings}))


def offered(queue, *entries, now=0.5):
    for one in entries:
        queue.offer(one, now)
    return queue


def names(batch):
    return None if batch is None else "".join(one.body for one in batch.entries)


def all_of(queue, now=0.5):
    found = []
    while (batch := queue.take(now)) is not None:
        found.append(names(batch))
    return found


def test_a_queue_has_few_attributes():
    """CPython keeps 29 of an object in place; with one more each takes longer to find, an offer a seventh longer."""
    queue = BatchQueue(BatchConfig())
    queue.keep_deadlines()
    queue.keep_tickets()
    assert len(vars(queue)) <= 29


def test_an_empty_queue_has_nothing():
    assert queue().take(0.5) is None
    assert queue().next_due() is None
    assert not queue().is_full()


def test_what_arrived_together_leaves_together():
    batch = offered(queue(), entry("a"), entry("b"), entry("c")).take(5.0)
    assert names(batch) == "abc"
    assert (batch.rows, batch.key) == (3, None)
    assert {one.taken for one in batch.entries} == {5.0}


def test_4_holds_2_plus_2():
    assert all_of(offered(queue(), entry("a", 2), entry("b", 2), entry("c", 2))) == ["ab", "c"]


def test_4_holds_3_and_seals_before_2():
    """Rule 1: what does not fit seals the batch; order is never changed to fill it."""
    assert all_of(offered(queue(), entry("a", 3), entry("b", 2), entry("c", 1))) == ["a", "bc"]


def test_rows_are_counted_not_requests():
    """Elsewhere: `max_batch_size` counts requests, not rows (BentoML)."""
    one = offered(queue(max_size=4, capacity=100), *[entry(size=3) for _ in range(5)])
    while (batch := one.take(0.5)) is not None:
        assert batch.rows == sum(item.size for item in batch.entries) <= 4


def test_a_batch_grows_while_every_slot_is_busy():
    """Rule 3: nothing is bound to a batch before a slot asks."""
    one = offered(queue(idle="wait", max_wait_s=1.0), entry("a"), now=0.5)
    offered(one, entry("b"), now=5.0)
    offered(one, entry("c"), now=9.0)
    assert names(one.take(9.0)) == "abc"


@pytest.mark.parametrize("max_size", [1, 2, 3])
def test_max_batch_size_1_works(max_size):
    """Elsewhere: odd settings break with an assertion (BentoML); any size goes."""
    one = offered(queue(max_size=max_size), *[entry(name) for name in "abcdef"])
    assert all_of(one) == ["abcdef"[i : i + max_size] for i in range(0, 6, max_size)]
    assert one.waiting == 0


# Capacity


def test_the_queue_refuses_at_once_when_it_is_full():
    """G7: every queue is bounded and says so at once; rule 7: capacity counts samples, not batches."""
    one = offered(queue(capacity=5), entry(size=3), entry(size=2))
    late = entry()
    with pytest.raises(QueueFull, match="5 samples wait already"):
        one.offer(late, 0.5)
    assert one.waiting == 5
    assert sum(one.take(0.5).rows for _ in range(2)) == 5


def test_capacity_is_free_again_after_take_and_cancel():
    first = entry(size=2)
    one = offered(queue(capacity=4), first, entry(size=2))
    one.cancel(first)
    offered(one, entry(size=2))
    assert one.waiting == 4
    one.take(0.5)
    assert one.waiting == 0
    offered(one, entry(size=4))


def test_5_do_not_fit_into_4():
    one = queue()
    with pytest.raises(TooLarge, match="5 samples, a batch takes 4"):
        one.offer(entry(size=5), 0.5)
    assert (one.waiting, one.take(0.5)) == (0, None)


# Keys


def test_only_equal_keys_travel_together():
    one = offered(queue(), entry("a", key=1), entry("b", key=2), entry("c", key=1), entry("d", key=2))
    assert all_of(one) == ["ac", "bd"]


def test_keys_are_served_in_the_order_they_became_eligible():
    """Rule 5."""
    one = queue()
    for now, (name, key) in enumerate([("a", 2), ("b", 1), ("c", 3), ("d", 1)]):
        offered(one, entry(name, key=key), now=now)
    assert all_of(one, 19.0) == ["a", "bd", "c"]


def test_full_key_does_not_delay_other_key():
    one = offered(queue(max_size=2), *[entry("a", key=1) for _ in range(6)], now=0.5)
    offered(one, entry("b", key=2), now=1.0)
    assert all_of(one, 2.0) == ["aa", "aa", "aa", "b"]
    one = offered(queue(max_size=2), *[entry("a", key=1) for _ in range(2)], now=0.5)
    offered(one, entry("b", key=2), now=1.0)
    offered(one, *[entry("c", key=1) for _ in range(2)], now=2.0)
    assert all_of(one, 3.0) == ["aa", "b", "cc"]


def test_a_full_batch_overtakes_one_that_waits():
    """With `wait`, a line that is full is eligible now, one that is not is eligible when due."""
    one = offered(queue(idle="wait", max_wait_s=10.0, max_size=2), entry("a", key=1), now=0.5)
    offered(one, entry("b", key=2), entry("c", key=2), now=1.0)
    assert names(one.take(1.0)) == "bc"
    assert one.take(1.0) is None
    assert names(one.take(10.5)) == "a"


def test_a_line_is_full_since_the_moment_it_became_so():
    """The order of two full lines is the order in which they became full, whatever came afterwards."""
    one = queue(idle="wait", max_wait_s=100.0, max_size=2)
    for now, (name, key) in enumerate([("a", 1), ("b", 2), ("c", 2), ("d", 1), ("e", 1), ("f", 2)]):
        offered(one, entry(name, key=key), now=now)
    assert [names(one.take(9.0)) for _ in range(3)] == ["bc", "ad", None]


def test_a_line_that_stays_full_is_full_since_the_last_take():
    one = queue(idle="wait", max_wait_s=100.0, max_size=2)
    offered(one, *[entry("a", key=1) for _ in range(4)], now=0.5)
    assert names(one.take(5.0)) == "aa"
    offered(one, entry("b", key=2), entry("b", key=2), now=5.5)
    assert [names(one.take(6.0)) for _ in range(2)] == ["aa", "bb"]


def test_a_line_that_is_no_longer_full_waits_again():
    one = queue(idle="wait", max_wait_s=10.0, max_size=2)
    first, second = entry("a"), entry("b")
    offered(one, first, second, now=0.5)
    assert one.is_full()
    one.cancel(second)
    assert not one.is_full()
    assert one.take(1.0) is None
    offered(one, entry("c"), now=2.0)
    assert names(one.take(2.0)) == "ac"


def test_max_running_holds_one_key_back_and_not_the_others():
    one = offered(queue(max_running=1), entry("a", 4, key=1), entry("b", 1, key=1), entry("c", key=2))
    first = one.take(0.5)
    assert names(first) == "a"
    assert names(one.take(0.5)) == "c"
    assert one.take(0.5) is None
    one.answered(first, 1.0)
    assert names(one.take(1.0)) == "b"


def test_max_running_2_runs_2():
    one = offered(queue(max_running=2, max_size=1), *[entry(name) for name in "abcd"])
    running = [one.take(0.5), one.take(0.5)]
    assert one.take(0.5) is None
    for batch in running:
        one.answered(batch, 0.5)
    assert all_of(one) == ["c", "d"]


def test_nothing_leaves_while_no_key_may_run():
    one = offered(queue(max_running=1), *(entry(name, key=name) for name in "abab"))
    assert [names(one.take(0.5)), names(one.take(0.5))] == ["aa", "bb"]
    offered(one, *(entry(name, key=name) for name in "ab"))
    assert one.take(0.5) is None
    assert one.next_due() is None


def test_a_key_that_may_not_run_sets_no_timer():
    one = offered(queue(idle="wait", max_wait_s=1.0, max_running=1, max_size=1), entry("a"), entry("b"), now=0.5)
    one.take(0.5)
    assert one.take(5.0) is None
    assert one.next_due() is None or one.next_due() > 5.0  # only the answer of the first can help


# ALONE


def test_alone_shares_its_batch_with_nobody():
    one = offered(queue(), entry("a"), entry("b", key=ALONE), entry("c"), entry("d", key=ALONE))
    assert sorted(all_of(one)) == ["ac", "b", "d"]


def test_alone_never_waits():
    one = offered(queue(idle="wait", max_wait_s=9.0), entry("a"), entry("b", key=ALONE), now=0.5)
    assert names(one.take(0.5)) == "b"
    assert one.take(0.5) is None


def test_alone_is_served_in_its_turn():
    one = offered(queue(), entry("a"), now=0.5)
    offered(one, entry("b", key=ALONE), now=1.0)
    offered(one, entry("c", key=1), now=2.0)
    assert all_of(one, 3.0) == ["a", "b", "c"]


def test_alone_can_be_cancelled():
    gone = entry("a", key=ALONE)
    one = offered(queue(), gone, entry("b", key=ALONE))
    one.cancel(gone)
    assert (all_of(one), one.waiting) == (["b"], 0)


def test_alone_does_not_wait_for_the_clients_that_were_just_answered():
    one = offered(queue(idle="gather"), *[entry(origin=MemoryOrigin()) for _ in range(3)])
    batch = one.take(0.5)
    batch.model_s = 1.0
    one.answered(batch, 1.0)
    offered(one, entry("b", key=ALONE), now=1.1)
    assert names(one.take(1.1)) == "b"


def test_an_expired_request_that_runs_alone_never_runs():
    one = offered(queue(), entry("a", key=ALONE, deadline=1.0), entry("b", key=ALONE), now=0.5)
    assert names(one.take(2.0)) == "b"


# Cancelled and expired


def test_cancelled_entries_never_leave():
    """Rule 6; G3: neighbours are not touched."""
    gone = entry("b")
    one = offered(queue(), entry("a"), gone, entry("c"))
    one.cancel(gone)
    assert one.waiting == 2
    assert names(one.take(0.5)) == "ac"


def test_cancelling_twice_or_too_late_does_nothing():
    first, second = entry("a"), entry("b")
    one = offered(queue(), first, second)
    one.cancel(first)
    one.cancel(first)
    assert one.waiting == 1
    batch = one.take(0.5)
    one.cancel(second)
    assert (one.waiting, names(batch)) == (0, "b")


def test_cancelling_the_head_makes_the_next_one_the_head():
    """`wait` counts from the first entry that still waits."""
    first = entry("a")
    one = offered(queue(idle="wait", max_wait_s=10.0), first, now=0.5)
    offered(one, entry("b"), now=5.0)
    one.cancel(first)
    assert one.next_due() == 15.0
    assert one.take(10.0) is None
    assert names(one.take(15.0)) == "b"


def test_a_key_whose_entries_are_all_cancelled_leaves_nothing_behind():
    one = queue()
    for key in range(100):
        gone = entry(key=key)
        offered(one, gone)
        one.cancel(gone)
    assert (one.waiting, one.take(0.5), len(one._lines)) == (0, None, 0)


def test_a_storm_of_cancellations_is_swept_out():
    """Elsewhere: abandoned clients leave the batcher slow; the memory of cancelled entries is given back."""
    one = offered(queue(capacity=10_000), entry("first"))
    for _ in range(5_000):
        gone = entry()
        offered(one, gone)
        one.cancel(gone)
    assert one.waiting == 1
    assert len(one._lines[None].entries) < 100
    assert names(one.take(0.5)) == "first"


def test_expired_entries_never_run():
    one = offered(queue(), entry("a", deadline=5.0), entry("b"), entry("c", deadline=3.0))
    assert names(one.take(4.0)) == "ab"
    assert one.waiting == 0


def test_what_expired_does_not_count_as_rows_of_its_batch():
    batch = offered(queue(), entry("a", 2, deadline=1.0), entry("b"), entry("c")).take(2.0)
    assert (names(batch), batch.rows) == ("bc", 2)
    batch = offered(queue(), *[entry(name, deadline=1.0) for name in "abcd"], entry("e")).take(2.0)
    assert (names(batch), batch.rows) == ("e", 1)


def test_when_all_of_a_key_expired_the_next_key_is_served():
    one = offered(queue(), entry("a", key=1, deadline=1.0), now=0.5)
    offered(one, entry("b", key=2), now=0.5)
    assert names(one.take(2.0)) == "b"
    assert (one.take(2.0), one.waiting) == (None, 0)


def test_thousands_of_expired_keys_are_passed_over():
    one = offered(queue(), *[entry(key=key, deadline=1.0) for key in range(2_000)], entry("b", key="b"))
    assert names(one.take(2.0)) == "b"


# Wait


def test_wait_holds_a_batch_until_it_is_due():
    one = offered(queue(idle="wait", max_wait_s=2.0), entry("a"), now=1.0)
    assert one.take(2.9) is None
    assert one.next_due() == 3.0
    offered(one, entry("b"), now=2.9)
    assert one.next_due() == 3.0
    assert names(one.take(3.0)) == "ab"
    assert one.next_due() is None


def test_wait_lets_a_full_batch_go_at_once():
    one = offered(queue(idle="wait", max_wait_s=2.0, max_size=2), entry("a"), entry("b"), entry("c"))
    assert one.is_full()
    assert names(one.take(0.5)) == "ab"
    assert not one.is_full()
    assert one.take(0.5) is None


def test_wait_is_due_when_the_first_of_its_keys_is():
    one = offered(queue(idle="wait", max_wait_s=2.0), entry(key=1), now=1.0)
    offered(one, entry(key=2), now=0.5)
    assert one.next_due() == 2.5


def test_go_sets_no_timer():
    """G6: a timer is a due moment; where nothing becomes due there is none."""
    assert offered(queue(idle="go"), entry()).next_due() is None


def test_is_full_needs_one_full_key():
    one = offered(queue(max_size=2), entry(key=1), entry(key=2), entry(key=3))
    assert not one.is_full()
    assert offered(one, entry(key=3)).is_full()


@pytest.mark.parametrize("idle", ["go", "wait"])
def test_many_keys_are_served_in_order_without_looking_at_all_of_them_each_time(idle, monkeypatch):
    looks = 0
    since = BatchQueue._since

    def counted(self, line):
        nonlocal looks
        looks += 1
        return since(self, line)

    monkeypatch.setattr(BatchQueue, "_since", counted)
    queue = BatchQueue(BatchConfig(max_size=4, capacity=2000, idle=idle))
    for number in range(2000):
        queue.offer(Request(body=number, reply=print, key=number), now=1.0 + number)
    served = [queue.take(now=5000.0).entries[0].body for _ in range(2000)]
    assert served == list(range(2000))
    assert looks < 20 * 2000
    assert queue.take(now=5000.0) is None


# Sizes of keys


def test_a_batch_has_the_size_of_its_key():
    one = offered(queue(size_of={"a": 1, "b": 3}.get), *[entry(key, key=key) for key in "aabbbb"])
    assert all_of(one) == ["a", "a", "bbb", "b"]


def test_an_entry_with_more_rows_than_its_key_takes_leaves_alone():
    one = offered(queue(size_of=lambda _: 1), entry("a"), entry("b", 3), entry("c"))
    assert all_of(one) == ["a", "b", "c"]


# Bundles: rows that are taken one after the other anyway


def ran(queue, batch, seconds):
    batch.model_s = seconds
    queue.answered(batch, 1.0)


def test_nothing_is_bundled_before_a_time_is_known():
    bundles = offered(queue(max_size=1, bundle_s=0.001), *map(entry, "abc"))
    assert names(bundles.take(0.5)) == "a"


def test_as_many_are_bundled_as_need_so_long():
    bundles = offered(queue(max_size=1, bundle_s=0.001), *map(entry, "abcdefghij"))
    ran(bundles, bundles.take(0.5), 0.000251)
    assert names(bundles.take(0.5)) == "bcd"


def test_one_slow_row_ends_bundling_at_once_and_quick_ones_bring_it_back():
    bundles = queue(max_size=1, bundle_s=0.001)
    for seconds, expected in ((0.00001, 1), (0.05, 16), (0.00001, 1), (0.00001, 1)):
        batch = offered(bundles, *map(entry, "abcdefghijklmnop")).take(0.5)
        assert batch.rows == expected
        ran(bundles, batch, seconds * batch.rows)
        while bundles.take(0.5):
            pass
    for _ in range(40):
        ran(bundles, offered(bundles, entry()).take(0.5), 0.00001)
    assert offered(bundles, *map(entry, "abcdefghijklmnop")).take(0.5).rows == 16


# Ranks


def test_lower_ranks_leave_first_where_the_queue_is_ranked():  # P71
    ranked = queue(ranked=True, max_size=2)
    for name, rank in (("d", 4), ("b", 2), ("c", 3), ("a", 1), ("B", 2)):
        one = entry(name)
        one.rank = rank
        ranked.offer(one, 0.5)
    assert all_of(ranked) == ["ab", "Bc", "d"]


def test_a_late_low_rank_does_not_make_the_others_wait_longer():  # P78
    ranked = queue(ranked=True, idle="wait", max_wait_s=0.1)
    late, early = entry("late"), entry("early")
    early.rank, late.rank = 2, 1
    ranked.offer(early, 1.0)
    ranked.offer(late, 1.09)
    assert ranked.next_due() == pytest.approx(1.1)
    assert names(ranked.take(1.1)) == "lateearly"
