# SPDX-License-Identifier: Apache-2.0
"""Links between a front and its owner that do not end and carry nothing, and links that are merely slow."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.test_attached import door_of
from tests.relay import Relay

from forebay.workers.wire.loop_heartbeat import SILENCE

NOTICED_S = 5.0
"""Within what time a link that carries nothing is to be noticed, on a machine that does nothing else."""
SLACK_S = 5.0
"""What a machine that does much else may take beside that."""


@pytest.fixture
def owner(serve):
    """A server that lets fronts in over TCP."""
    return door_of(serve("owned.py", "--attach", "tcp:127.0.0.1:0"))


@pytest.fixture
def relay(owner):
    relay = Relay(owner.door)
    yield relay
    relay.stop()


@pytest.fixture
def front(serve, relay):
    """A front behind the relay."""
    return serve(None, "--owner", relay.address, "--owner-grace-s", "60")


def test_requests_behind_a_half_open_link_are_sent_once_more_when_it_carries_again(
    owner, relay, front, tmp_path, eventually
):
    begun = tmp_path / "gate.begun"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.call, "gate", str(tmp_path / "gate"))
        eventually(begun.exists)
        relay.say("freeze")
        since = time.monotonic()
        eventually(lambda: f"is unreachable: {SILENCE}" in front.log)
        assert time.monotonic() - since < NOTICED_S + SLACK_S
        eventually(lambda: f"was hung up on: {SILENCE}" in owner.log)
        (tmp_path / "gate").touch()
        assert not asked.done()
        relay.say("thaw")
        assert asked.result().status_code == 200


def test_an_idle_front_notices_as_well_and_comes_back(relay, front, eventually):
    relay.say("freeze")
    eventually(lambda: front.client.get("/readyz").status_code == 503)
    assert SILENCE in front.log
    relay.say("thaw")
    eventually(lambda: front.client.get("/readyz").status_code == 200)
    assert front.call("clip", 1.0).json()[0] == 1.0


@pytest.mark.parametrize("how", ["delay 0.4", "rate 150000"])
def test_a_slow_link_is_left_alone(owner, relay, front, how):
    """At 150 kB/s a body takes longer on its way than silence may last, and so does its answer."""
    relay.say(how)
    sample = "a" * (900_000 if how.startswith("rate") else 100_000)
    assert front.call("fails", sample).json() == sample
    assert SILENCE not in front.log + owner.log
