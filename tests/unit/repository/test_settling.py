# SPDX-License-Identifier: Apache-2.0
"""A change counts once two looks in a row have found the same."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.repository.settling import Settling
from forebay.repository.version_policy import VersionPolicy


def test_what_goes_on_changing_does_not_count():
    looks: Settling[str, int] = Settling({"a": 1})
    for size in (2, 3, 4):
        assert looks.look({"a": size}) == {}
        assert looks.is_moving
    assert looks.look({"a": 4}) == {"a": 4}
    assert not looks.is_moving
    assert looks.look({"a": 4}) == {}


def test_what_is_missing_once_is_not_gone():
    looks: Settling[str, int] = Settling({"a": 1})
    assert looks.look({}) == {}
    assert looks.look({"a": 1}) == {}
    assert looks.look({}) == {}
    assert looks.look({}) == {"a": None}


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), max_size=20))
def test_what_counts_is_what_two_looks_agreed_on_last(looks):
    settling: Settling[str, int] = Settling()
    history = [{}, *looks]
    for at, found in enumerate(looks, 1):
        before = dict(settling.settled)
        changed = settling.look(found)
        for key in "abc":
            agreed = [
                now.get(key) for was, now in itertools.pairwise(history[: at + 1]) if was.get(key) == now.get(key)
            ]
            assert settling.settled.get(key) == (agreed[-1] if agreed else None)
        told = {key: settling.settled.get(key) for key in "abc" if settling.settled.get(key) != before.get(key)}
        assert changed == told
        assert settling.is_moving == (settling.settled != found)


@pytest.mark.parametrize(
    "text, chosen",
    [("latest", [10]), ("latest:2", [10, 9]), ("all", [10, 9, 2, 1]), ("1, 9", [9, 1]), ("latest 9", [10, 9, 2, 1])],
)
def test_policies(text, chosen):
    assert VersionPolicy.of(text).chosen([1, 2, 10, 9]) == chosen


@pytest.mark.parametrize("text", ["", "newest", "latest:0", "1;2", "-1", "latest:x", "all,1"])
def test_what_is_no_policy(text):
    with pytest.raises(ValueError, match=r"expected latest, latest:N, all, or versions such as 1,3"):
        VersionPolicy.of(text)
