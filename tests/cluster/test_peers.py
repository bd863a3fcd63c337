# SPDX-License-Identifier: Apache-2.0
"""Servers that are peers: programs that joined different ones call each other, also when one of the servers is gone."""

import signal

import pytest
from tests.cluster.conftest import cat, knows
from tests.cluster.test_members import Peer
from tests.waiting import PATIENCE_S, eventually

import forebay
from forebay import ConfigError


def pids_of(name):
    return {int(forebay.batched_run(name, cat(1), where="distributed")[0]) for _ in range(20)}


@pytest.fixture
def start_peer(serve, tmp_path):
    """Starts one of three servers that are peers."""
    addresses = [f"unix:{tmp_path}/door-{number}" for number in range(3)]
    return lambda number: (
        serve(None, "--attach", addresses[number], *(f"--attach-peer={one}" for one in addresses)),
        addresses[number],
    )


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_members_of_a_server_that_is_gone_join_another_one(start_peer, start_member, ending):
    # S65, S68: one member is left, one dies with the server
    (_, first), (second, address) = start_peer(0), start_peer(1)
    left, dead = start_member(address, "who"), start_member(address, "who")
    with forebay.cluster.join(first) as membership:
        knows(membership, who=2)
        assert set(membership.directory.nodes) >= {first, address}
        dead.process.kill()
        second.process.send_signal(ending)
        second.process.wait(PATIENCE_S)
        for _ in range(20):
            assert forebay.batched_run("who", cat(1))[0] == left.pid
        assert left.say("start double 1") == "done"
        knows(membership, double=1)
        assert forebay.batched_run("double", cat(2)).tolist() == [4]
        start_member(start_peer(2)[1], "plus")
        knows(membership, double=1, plus=1)


def test_a_program_whose_own_server_is_gone_joins_another_one(start_peer, start_member):
    # S65
    (first, address), (_, other) = start_peer(0), start_peer(1)
    member = start_member(other, "who")
    with forebay.cluster.join(address) as membership:
        knows(membership, who=1)
        first.process.kill()
        first.process.wait()
        late = start_member(other, "who")
        assert forebay.batched_run("who", cat(1))[0] in {member.pid, late.pid}
        knows(membership, who=2)
        assert pids_of("who") == {member.pid, late.pid}


def test_a_server_follows_a_change_of_its_peers(start_peer, start_member, serve, tmp_path):
    # and nothing that was heard from one peer is told to another one
    _, other = start_peer(1)
    start_member(other, "who")
    address, config = f"unix:{tmp_path}/door", tmp_path / "forebay.yaml"
    config.write_text(f"attach: {{address: {address}}}\n")
    server = serve(None, "--config", config)
    with forebay.cluster.join(address) as membership:
        config.write_text(f"attach: {{address: {address}, peers: ['{other}']}}\n")
        server.process.send_signal(signal.SIGHUP)
        knows(membership, who=1)
        assert [*membership.directory.nodes.values()] == [other]
        peer = Peer(address, "peer")
        with peer.socket:
            assert b"who" not in peer.hear("directory")[1]
            peer.send(["servings", "unix:/x", 1, [["who", 1]]])
            assert peer.is_hung_up_on()
        assert "who" in membership.directory.members
        config.write_text(f"attach: {{address: {address}}}\n")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: not membership.directory.nodes)


def test_the_dashboard_shows_peers_and_programs(start_peer, start_member, serve, tmp_path):
    (server, _), (_, other) = start_peer(0), start_peer(1)
    member = start_member(other, "who")
    page, stranger = {"x-forebay-page": "ui"}, {"x-forebay-page": "ui", "x-forwarded-for": "192.0.2.1"}

    def told(headers=page):
        return server.client.get("/ui/nodes", headers=headers).json()

    eventually(lambda: told()["program_count"])
    assert told()["programs"] == [{"address": member.address, "servings": ["who"]}]
    nodes = {one["name"]: one["away"] for one in told()["nodes"]}
    assert nodes.pop(other) == ""
    assert "cannot be reached" in nodes.pop(f"unix:{tmp_path}/door-2")
    assert nodes == {}
    assert told(stranger)["programs"] == [{"address": "", "servings": ["who"]}]
    assert told(stranger)["nodes"] == [
        {"name": "peer 1", "away": "", "door": ""},
        {"name": "peer 2", "away": "away", "door": ""},
    ]
    assert server.client.get("/ui/nodes", headers={"sec-fetch-site": "cross-site"}).status_code == 403
    alone = serve(None, "--attach", f"unix:{tmp_path}/alone")
    assert alone.client.get("/ui/nodes", headers=page).status_code == 404


def test_peers_that_cannot_be(serve, cli, tmp_path):
    door = f"unix:{tmp_path}/door"
    for flags, words in [
        (
            ["--attach", door, "--attach-peer", "nowhere"],
            "--attach-peer: expected unix:PATH or tcp:HOST:PORT, got 'nowhere'",
        ),
        (
            ["--attach", door, "--attach-peer", f"tcp:{'x' * 200}:1"],
            "expected an address of at most 128 characters, got 206",
        ),
        (
            ["--owner", door, "--attach-peer", door],
            "--attach-peer names servers whose programs know of those that join",
        ),
    ]:
        done = cli("serve", *flags)
        assert done.returncode == 2
        assert words in done.stderr
    serve(None, "--attach", door, "--no-attach-members")
    with pytest.raises(ConfigError, match=r"cannot join .*: it refuses this program: programs join elsewhere"):
        forebay.cluster.join(door)
