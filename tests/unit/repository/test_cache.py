# SPDX-License-Identifier: Apache-2.0
"""Things that are loaded when they are asked for, by threads."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
from tests.circles import left_in_circles
from tests.waiting import PATIENCE_S

from forebay.errors import Unavailable
from forebay.repository.cache import Cache


class Thing:
    def __init__(self, name):
        self.name = name


def test_one_load_however_many_ask(at_once):  # N106
    cache: Cache[Thing] = Cache("things")
    loads, may_go = [], threading.Event()

    def load():
        loads.append(1)
        may_go.wait(PATIENCE_S)
        return Thing("a")

    def other():
        with cache.take("b", 1, lambda: Thing("b")) as found:  # is not held up by it
            may_go.set()
            return found

    leases = at_once(*[lambda: cache.take("a", 1, load) for _ in range(8)], other)
    assert len({id(lease.value) for lease in leases[:8]}) == 1
    assert len(loads) == 1


def test_a_failure_is_shared_and_the_next_one_tries_again(at_once):  # N107
    cache: Cache[str] = Cache("things")
    may_go, loads = threading.Event(), []

    def load():
        loads.append(1)
        may_go.wait(PATIENCE_S)
        raise ValueError("no such thing")

    def ask():
        return cache.take("a", 1, load)

    def let_go():
        while len(loads) < 1:
            time.sleep(0.001)
        may_go.set()

    errors = at_once(ask, ask, ask, let_go)[:3]
    assert all(isinstance(error, ValueError) for error in errors)
    with cache.take("a", 1, lambda: "loaded") as value:
        assert value == "loaded"


def test_what_has_left_is_held_by_nobody():  # N120
    cache: Cache[Thing] = Cache("things", max_count=1)
    with cache.take("a", 1, lambda: Thing("a")) as found:
        gone = weakref.ref(found)
    del found
    with cache.take("b", 1, lambda: Thing("b")):
        pass
    gc.collect()
    assert gone() is None
    assert cache.statistics().count == 1


def test_nothing_leaves_that_is_in_use():  # N121
    unloaded = []
    cache: Cache[str] = Cache("the memory", unloaded.append, max_count=1)
    lease = cache.take("a", 1, lambda: "a")
    with pytest.raises(Unavailable, match="the memory: there is no room, all 1 that are kept are in use"):
        cache.take("b", 1, lambda: "b")
    lease.release()
    lease.release()
    with cache.take("b", 1, lambda: "b"):
        assert unloaded == ["a"]


def test_what_may_exceed_leaves_as_soon_as_it_can():  # N121
    unloaded = []
    cache: Cache[str] = Cache("things", unloaded.append, max_count=1, may_exceed=True)
    with cache.take("a", 1, lambda: "a"), cache.take("b", 1, lambda: "b"):
        assert unloaded == []
    assert cache.statistics().count == 1


def test_what_is_gone_is_used_to_the_end_and_may_come_back():
    unloaded = []
    cache: Cache[str] = Cache("things", unloaded.append)
    first = cache.take("a", 1, lambda: "a")
    cache.keep_only([])
    with cache.take("a", 1, lambda: "another a") as value:
        assert value == "a"
    first.release()
    assert unloaded == []
    cache.keep_only([])
    assert unloaded == ["a"]


def test_what_is_gone_by_the_time_it_is_loaded_leaves_with_who_loaded_it():  # N113
    unloaded = []
    cache: Cache[str] = Cache("things", unloaded.append)

    def load():
        cache.keep_only([])
        return "a"

    with cache.take("a", 1, load) as value:
        assert value == "a"
        assert unloaded == []
    assert unloaded == ["a"]


def test_a_hit_is_quick():  # N123
    cache: Cache[int] = Cache("things")
    for number in range(50):
        cache.take(str(number), 1, lambda number=number: number).release()
    started = time.thread_time()
    for number in range(10_000):
        cache.take(str(number % 50), 1, int).release()
    assert time.thread_time() - started < 1.0


def test_what_asks_for_itself_is_told():
    cache: Cache[str] = Cache("things")

    def load():
        return cache.take("a", 1, load).value

    with pytest.raises(Unavailable, match="asks for itself"):
        cache.take("a", 1, load)


def test_what_has_left_is_out_of_memory_before_its_successor_is_loaded():  # N121
    cache: Cache[Thing] = Cache("things", max_count=1)
    lease = cache.take("a", 1, lambda: Thing("a"))
    left = weakref.ref(lease.value)
    lease.release()
    del lease
    still_there = []

    def load():
        still_there.append(left())
        return Thing("b")

    cache.take("b", 1, load).release()
    assert still_there == [None]


def test_a_load_that_failed_leaves_nothing_in_a_circle():
    cache: Cache[Thing] = Cache("things")

    def ask():
        with contextlib.suppress(ZeroDivisionError):
            cache.take("a", 1, lambda: Thing(1 / 0))

    with left_in_circles() as left:
        for _ in range(20):
            ask()
    assert len(left) < 20, sorted(set(left))
