# SPDX-License-Identifier: Apache-2.0
"""What stays and what leaves, held to a model of a few lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.repository.shelf import Full, Shelf


def test_what_was_used_last_stays():  # N120
    shelf: Shelf[str] = Shelf(2)
    for name in ("a", "b"):
        assert shelf.admit(name, 1) == []
        assert not shelf.give_back(name)
    assert shelf.take("a")
    shelf.give_back("a")
    assert shelf.admit("c", 1) == ["b"]


def test_what_is_in_use_stays_and_the_next_one_is_refused():  # N121
    shelf: Shelf[str] = Shelf(1)
    shelf.admit("a", 1)
    with pytest.raises(Full):
        shelf.admit("b", 1)
    assert shelf.admit("b", 1, may_exceed=True) == []
    shelf.give_back("a")
    assert shelf.trim() == ["a"]


def test_what_is_too_large_for_all_makes_nothing_leave():
    shelf: Shelf[str] = Shelf(max_bytes=10)
    shelf.admit("a", 9)
    shelf.give_back("a")
    with pytest.raises(Full):
        shelf.admit("b", 11)
    assert shelf.keys == ["a"]


def test_who_shall_leave_is_used_to_the_end():
    shelf: Shelf[str] = Shelf()
    shelf.admit("a", 1)
    assert not shelf.retire("a")
    assert not shelf.take("a")
    assert shelf.give_back("a")
    assert shelf.keys == []


class Naive:
    """A list of [key, size, leases, retired], the least recently used first."""

    def __init__(self, count, size):
        self.kept, self.count, self.size = [], count, size

    def find(self, key):
        return next((one for one in self.kept if one[0] == key), None)

    def over(self, kept):
        return len(kept) > self.count or sum(one[1] for one in kept) > self.size

    def admit(self, key, size, busy):
        kept, left = [*self.kept, [key, size, 1, False]], []
        while self.over(kept):
            victim = next((one for one in kept if not one[2] and one[0] not in busy), None)
            if victim is None:
                return None
            kept.remove(victim)
            left.append(victim[0])
        self.kept = kept
        return left


steps = st.lists(
    st.tuples(
        st.sampled_from(["use", "use", "use", "back", "retire", "touch", "trim"]),
        st.integers(0, 6),
        st.integers(0, 4),
        st.sets(st.integers(0, 6), max_size=2),
    ),
    max_size=60,
)


@given(steps, st.integers(1, 4), st.integers(1, 9))
def test_a_shelf_does_as_a_list_does(steps, count, size):
    shelf: Shelf[int] = Shelf(count, size)
    naive = Naive(count, size)
    for what, key, weight, busy in steps:
        found = naive.find(key)
        if what == "use":
            usable = found is not None and not found[3]
            assert shelf.take(key) == usable
            if found is not None and not found[3]:
                found[2] += 1
                naive.kept.remove(found)
                naive.kept.append(found)
            elif found is None:
                expected = naive.admit(key, weight, busy)
                if expected is None:
                    with pytest.raises(Full):
                        shelf.admit(key, weight, busy=busy)
                else:
                    assert shelf.admit(key, weight, busy=busy) == expected
        elif what == "back" and found is not None and found[2]:
            found[2] -= 1
            is_gone = found[3] and not found[2]
            assert shelf.give_back(key) == is_gone
            if is_gone:
                naive.kept.remove(found)
        elif what == "retire":
            is_gone = found is not None and not found[2]
            assert shelf.retire(key) == is_gone
            if found is not None:
                found[3] = True
            if is_gone:
                naive.kept.remove(found)
        elif what == "touch":
            shelf.touch(key)
            if found is not None:
                naive.kept.remove(found)
                naive.kept.append(found)
        elif what == "trim":
            assert shelf.trim() == []
        assert shelf.keys == [one[0] for one in naive.kept]
        told = shelf.statistics()
        assert (told.count, told.bytes) == (len(naive.kept), sum(one[1] for one in naive.kept))
        assert told.count <= count
        assert told.bytes <= size
