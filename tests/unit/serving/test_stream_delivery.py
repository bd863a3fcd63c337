# SPDX-License-Identifier: Apache-2.0
"""Parts on their way to clients, where what one part leads to ends requests whose parts are still to be handed over."""

import asyncio

import pytest

from forebay.serving.stream_delivery import Windows
from forebay.types.batch import EntryBatch
from forebay.types.call import Request


@pytest.fixture
def windows():
    loop = asyncio.new_event_loop()
    yield Windows(loop, bool, lambda request, error: None)
    loop.close()


def request(taken, ends, windows, name):
    """A request whose part ends some; whoever answers several as one then lets go of them."""
    made = Request(b"", lambda *_: None)

    def on_part(part, release):
        taken.append((name, part))
        for one in ends:
            one.done, one.on_part = True, None
            windows.forget(one)
        release()

    made.on_part = on_part
    return made


def test_a_part_that_ends_other_requests_has_none_of_theirs_handed_over(windows, caplog):
    taken, ends, released = [], [], []
    one, two = (request(taken, ends, windows, name) for name in ("one", "two"))
    ends += [one, two]
    windows.hand_out(EntryBatch([one, two], None, 2), [(one, ["a"]), (two, ["b"])], lambda: released.append(1))
    assert (taken, released) == ([("one", "a")], [1])
    assert not windows._windows  # who is gone is not remembered
    assert not caplog.records


def test_a_part_that_is_the_last_one_wanted_has_no_further_ones_handed_over(windows, caplog):
    taken, ends, released = [], [], []
    one = request(taken, ends, windows, "one")
    ends.append(one)
    windows.hand_out(EntryBatch([one], None, 1), [(one, ["a", "b" * 10**6, "c"])], lambda: released.append(1))
    assert (taken, released) == ([("one", "a")], [1])
    assert not windows._windows
    assert not caplog.records


def test_a_part_that_cannot_be_handed_over_ends_its_answer():
    loop = asyncio.new_event_loop()
    given_up, taken, released = [], [], []

    def give_up(request, error):
        given_up.append((request, error))
        request.done = True
        windows.forget(request)

    windows = Windows(loop, bool, give_up)
    fault = TypeError("it has no bytes")

    def on_part(part, release):
        if part == "bad":
            raise fault
        taken.append(part)
        release()

    one, two = Request(b"", lambda *_: None, on_part=on_part), request(taken, [], windows, "two")
    parts = [(one, ["a", "bad", "c"]), (two, ["b"])]
    windows.hand_out(EntryBatch([one, two], None, 2), parts, lambda: released.append(1))
    loop.close()
    assert given_up == [(one, fault)]
    assert (taken, released) == (["a", ("two", "b")], [1])
