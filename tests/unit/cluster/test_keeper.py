# SPDX-License-Identifier: Apache-2.0
"""What a server that keeps a directory makes of what its members and its peers say."""

import asyncio

import pytest
from tests.waiting import reached

from forebay.cluster import keeper as keeping
from forebay.cluster.directory import Member, read_directory
from forebay.cluster.keeper import DirectoryKeeper
from forebay.errors import InvalidRequest
from forebay.owners.wire import MemberServings
from forebay.workers.wire import frames


def member(number, port=1):
    return Member(f"{number:032}", f"tcp:10.0.0.{number}:{port}")


class Link:
    """Takes what is told."""

    def __init__(self, keeper, number, role="member"):
        self.heard = []
        self.entry = keeper.receive({"worker": f"{number:032}", "role": role})
        self.entry.begin(self)

    def write(self, frame):
        (message,) = frames.FrameReader().feed(frame)
        self.heard.append(read_directory(message[1]))

    def says(self, *names, port=1):
        number = int(self.entry.id)
        self.entry.heard(MemberServings(f"tcp:10.0.0.{number}:{port}", 1, [(name, 1) for name in names]))


def with_keeper(test):
    async def run():
        await test(DirectoryKeeper())

    asyncio.run(run())


def test_a_peer_is_told_of_own_members_only():
    async def test(keeper):
        one, peer = Link(keeper, 1), Link(keeper, 9, "peer")
        one.says("here")
        keeper.hear("tcp:other:1", {"there": (member(2),)})
        keeper.name_peers(["tcp:other:1"])
        await reached(lambda: set(one.heard[-1].members) == {"here", "there"} and one.heard[-1].nodes)
        one.says("here", "more")
        await reached(lambda: set(one.heard[-1].members) == {"here", "more", "there"})
        assert [set(said.members) for said in peer.heard] == [set(), {"here"}, {"here", "more"}]
        late = Link(keeper, 8, "peer")
        assert [set(said.members) for said in late.heard] == [{"here", "more"}]
        assert peer.heard[-1].nodes == late.heard[-1].nodes == {}

    with_keeper(test)


def test_a_member_is_listed_as_the_nearest_source_says():
    async def test(keeper):
        keeper.hear("tcp:a:1", {"x": (member(1, 7), member(2, 7)), "y": (member(1, 7),)})
        keeper.hear("tcp:b:1", {"x": (member(2, 8), member(3, 8))})
        own = Link(keeper, 1)
        own.says("x", port=9)
        await reached(lambda: len(own.heard[-1].members.get("x", ())) == 3)
        assert own.heard[-1].members == {"x": (member(1, 9), member(2, 7), member(3, 8))}

    with_keeper(test)


def test_members_of_a_peer_that_is_gone_stay_for_a_while(monkeypatch):
    async def test(keeper):
        one = Link(keeper, 1)
        keeper.hear("tcp:a:1", {"x": (member(2), member(3))})
        monkeypatch.setattr(keeping, "LINGER_S", 0.5)
        keeper.lose("tcp:a:1")
        keeper.hear("tcp:b:1", {"x": (member(2, 8),)})
        await reached(lambda: {"x": (member(2, 8), member(3))} in [said.members for said in one.heard])
        keeper.hear("tcp:a:1", {})
        await reached(lambda: one.heard[-1].members == {"x": (member(2, 8),)})

    with_keeper(test)


def test_what_peers_say_is_bounded(monkeypatch):
    monkeypatch.setattr(keeping, "MAX_ENTRIES", 6)
    monkeypatch.setattr(keeping, "MAX_PLACES", 3)

    async def test(keeper):
        one = Link(keeper, 1)
        one.says("x", "own")
        keeper.hear("tcp:a:1", {"x": tuple(member(number) for number in range(2, 7)), "y": (member(2),)})
        keeper.hear("tcp:b:1", {"z": tuple(member(number) for number in range(10, 13))})
        await reached(lambda: "y" in one.heard[-1].members)
        found = one.heard[-1].members
        assert {name: len(its) for name, its in found.items()} == {"x": 3, "own": 1, "y": 1, "z": 1}
        for number in range(20, 23):  # members of its own come first
            Link(keeper, number).says("w")
        await reached(lambda: len(one.heard[-1].members.get("w", ())) == 3)
        assert sum(map(len, one.heard[-1].members.values())) == 6

    with_keeper(test)


def test_a_peer_runs_nothing():
    async def test(keeper):
        with pytest.raises(InvalidRequest, match="and is a server"):
            Link(keeper, 9, "peer").says("x")

    with_keeper(test)
