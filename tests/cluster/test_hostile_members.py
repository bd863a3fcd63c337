# SPDX-License-Identifier: Apache-2.0
"""What members and callers may not say to a server and to a program that has joined it: it hangs up, and goes on."""

import contextlib

import pytest
from tests.cluster.conftest import Peer, cat, knows
from tests.waiting import eventually

import forebay
from forebay import Serving
from forebay.workers.wire import frames

VALUE = [b"\x92\xc0\x90"]
"""None, as a value."""


@pytest.fixture(scope="module")
def address_of_all(launch, tmp_path_factory):
    """A server and this program, which has joined it with one serving."""
    address = f"unix:{tmp_path_factory.mktemp('all')}/door"
    launch(None, "--attach", address)
    with forebay.cluster.join(address) as membership:
        serving = Serving.new(lambda _options: lambda batch: batch.realize() * 2)
        with serving.start(name="double", batch_timeout_ms=1):
            knows(membership, double=1)
            yield address, membership


@pytest.mark.parametrize(
    "said",
    [
        ["servings", "http://nowhere", 1, [["who", 1]]],
        ["servings", "unix:/x", 1, [["who", 0]]],
        ["servings", "unix:/x", 1, [["who", 1 << 40]]],
        ["servings", "unix:/x", 1, [["", 1]]],
        ["servings", "unix:/x", -1, [["who", 1]]],
        ["servings", "unix:/x", 1, [["who", 1], ["who", 2]]],
        ["servings", "unix:/x", 1, [[str(number), 1] for number in range(300)]],
        ["servings", 5],
        ["directory", b""],
    ],
    ids=str,
)
def test_a_member_that_says_what_cannot_be_is_hung_up_on(address_of_all, said):
    address, membership = address_of_all
    peer = Peer(address, "member")
    with peer.socket:
        peer.hear("directory")
        peer.send(said)
        assert peer.is_hung_up_on()
    assert forebay.batched_run("double", cat(1), where="distributed").tolist() == [2]
    assert set(membership.directory.members) == {"double"}


def test_a_front_is_told_no_directory_and_says_no_servings(address_of_all):
    address, membership = address_of_all
    peer = Peer(address, "caller")
    with peer.socket:
        peer.hear("models")
        peer.send(["servings", "unix:/x", 1, [["who", 1]]])
        assert peer.is_hung_up_on()
    assert set(membership.directory.members) == {"double"}


def test_two_links_of_one_name_are_one_member(address_of_all):
    address, membership = address_of_all
    first, second = Peer(address, "member"), None
    with first.socket:
        first.hear("directory")
        first.send(["servings", "unix:/x", 1, [["twice", 1]]])
        knows(membership, twice=1)
        second = Peer(address, "member")
        with second.socket:
            second.hear("directory")
            assert first.is_hung_up_on()
            second.send(["servings", "unix:/y", 1, [["twice", 1]]])
            eventually(lambda: [one.address for one in membership.directory.members.get("twice", ())] == ["unix:/y"])
    knows(membership, double=1, twice=0)


def ask(peer, number, params, body, seat=1):
    peer.send(["requests", [[number, [[seat, frames.encode_part(params), 1, 5.0, "x"]], [], []]], 0, [body]])


@pytest.mark.parametrize(
    "params, body, size",
    [
        ({"surprise": 1}, VALUE, 1),
        ({"opens": -1}, VALUE, 1),
        ({"opens": 1}, VALUE, 1),
        ({"is_last": True}, VALUE, 1),
        ({}, VALUE, 2),
        ({}, [], 1),
        ({}, b"", 1),
        ({}, ["text"], 1),
    ],
    ids=str,
)
def test_a_caller_that_breaks_the_protocol_is_hung_up_on(address_of_all, params, body, size):
    _, membership = address_of_all
    peer = Peer(membership.address, "caller")
    with peer.socket:
        ((number, told),) = peer.hear("models")[1]
        assert told == {"serving": "double"}
        peer.send(["requests", [[number, [[1, frames.encode_part(params), size, 5.0, "x"]], [], []]], 0, [body]])
        with contextlib.suppress(EOFError):  # a size that no queue takes is answered
            assert peer.hear("answers")[1][0][4][0][2][0] == "TooLarge"
    assert forebay.batched_run("double", cat(1), where="distributed").tolist() == [2]


@pytest.mark.parametrize("body", [[b"\xc1"], [b"\x80\x04K\x01."], [b"\x92\xc7\x00\x12\x90"]], ids=str)
def test_a_value_that_is_none_fails_its_call_only(address_of_all, body):
    # S70
    _, membership = address_of_all
    peer = Peer(membership.address, "caller")
    with peer.socket:
        ((number, _),) = peer.hear("models")[1]
        ask(peer, number, {}, body)
        ended = peer.hear("answers")[1][0][4][0]
        assert ended[2][0] == "InvalidRequest"
        ask(peer, number, {}, VALUE, seat=2)
        assert "batch" in peer.hear("answers")[1][0][4][0][2][1].lower()


def test_items_without_room_end_their_call(address_of_all):
    _, membership = address_of_all
    peer = Peer(membership.address, "caller")
    with peer.socket:
        ((number, _),) = peer.hear("models")[1]
        ask(peer, number, {"opens": 7}, [])
        for seat in range(2, 40):
            ask(peer, number, {"feeds": 7}, VALUE, seat)
        ask(peer, number, {"feeds": 8}, VALUE, 99)
        seen = set()
        while 99 not in seen:
            seen |= {one if type(one) is int else one[0] for one in peer.hear("answers")[1][0][4]}
    assert forebay.batched_run("double", cat(1), where="distributed").tolist() == [2]


def test_a_worker_is_not_let_in_by_a_member(address_of_all):
    _, membership = address_of_all
    for role in ("worker", "member"):
        peer = Peer(membership.address, role)
        with peer.socket:
            assert "this is the door of a member" in peer.hear("refused")[1]
