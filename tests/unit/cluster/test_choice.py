# SPDX-License-Identifier: Apache-2.0
"""Which members a call is sent to."""

import random
from collections import Counter

from forebay.cluster.choice import MAX_TRIES, Tries
from forebay.cluster.directory import PROTOCOL, Directory, Member

CHI_SQUARE_3 = 16.27
"""What chi-square exceeds once in a thousand times, with 3 degrees of freedom."""


def member(letter, weight=1, protocol=PROTOCOL):
    return Member(id=letter * 16, address=f"tcp:{letter}:1", weight=weight, protocol=protocol)


def listed(*members):
    return Directory().changed(members={"clip": members})


def test_a_member_is_chosen_as_often_as_its_weight_says():
    # S66
    chance = random.Random(66).random
    weights = {"a": 1, "b": 2, "c": 3, "d": 6}
    directory = listed(*[member(letter, weight) for letter, weight in weights.items()])
    chosen = Counter(one.address[4] for _ in range(10_000) if (one := Tries("clip", directory, chance).next()))
    total = sum(weights.values())
    expected = {letter: 10_000 * weight / total for letter, weight in weights.items()}
    assert sum((chosen[letter] - count) ** 2 / count for letter, count in expected.items()) < CHI_SQUARE_3


def test_three_members_are_tried_each_another_one():
    # S68
    for seed in range(50):
        tries = Tries("clip", listed(*map(member, "abcde")), random.Random(seed).random)
        found = []
        while (one := tries.next()) is not None:
            found.append(one.address)
            tries.failed(f"{one.address} was lost")
        assert len(found) == len(set(found)) == MAX_TRIES == 3
        message = str(tries.error())
        assert "no member took the call of 'clip'; tried 3 members" in message
        assert all(address in message for address in found)


def test_with_fewer_members_there_are_fewer_tries():
    tries = Tries("clip", listed(member("a")), random.random)
    assert tries.next() is not None
    tries.failed("it was lost")
    assert tries.next() is None
    assert "tried 1 member: it was lost" in str(tries.error())


def test_members_that_could_not_be_reached_come_last():
    members = [member("a", weight=1000), member("b"), member("c")]
    for seed in range(50):
        tries = Tries("clip", listed(*members), random.Random(seed).random, {"a" * 16})
        order = [tries.next(), tries.next(), tries.next()]
        assert order[2] == members[0]
        assert {one.address for one in order[:2] if one} == {"tcp:b:1", "tcp:c:1"}


def test_members_of_another_version_are_not_called():
    # S70
    tries = Tries("clip", listed(member("a", protocol=PROTOCOL + 1), member("b")), random.random)
    assert tries.next() == member("b")
    tries.failed("it was lost")
    assert tries.next() is None
    tries = Tries("clip", listed(member("a", protocol=PROTOCOL + 1)), random.random)
    assert tries.next() is None
    assert f"version {PROTOCOL + 1} of the protocol of members, and this program speaks version {PROTOCOL}" in str(
        tries.error()
    )


def test_a_serving_that_nobody_runs_is_not_found():
    tries = Tries("clap", listed(member("a")), random.random)
    assert tries.next() is None
    assert "could not find a serving named 'clap' in the cluster" in str(tries.error())
