# SPDX-License-Identifier: Apache-2.0
"""Fronts of a model that several owners have: the addresses of one name, which the tests say."""

import json
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.integration.test_attached import door_of
from tests.integration.test_owner_lists import CLIP, load_on
from tests.waiting import eventually

from forebay.owners.owner import LOOK_UP_S

NAME = "shards.example"
THREADS = ("--worker-kind", "thread")


class Hosts:
    """What the resolver of a front finds."""

    def __init__(self, folder):
        self.path = folder / "hosts.json"

    def say(self, *hosts):
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps({NAME: hosts}))
        new.rename(self.path)


@pytest.fixture
def hosts(tmp_path):
    return Hosts(tmp_path)


@pytest.fixture
def shards(serve, hosts):
    """Starts owners of a target at these addresses, with one port for all, and a front that dials them by one name."""

    def start(target, *addresses, front=("--owner-grace-s", "60")):
        targets = target if isinstance(target, list) else [target] * len(addresses)
        owners = [door_of(serve(targets[0], *THREADS, "--attach", f"tcp:{addresses[0]}:0"))]
        port = owners[0].door.rpartition(":")[2]
        for other, one in zip(targets[1:], addresses[1:], strict=True):
            owners.append(serve(other, *THREADS, "--attach", f"tcp:{one}:{port}", ready=False))
        hosts.say(*addresses)
        env = {"HOSTS_OF_TEST": str(hosts.path)}
        server = serve("resolving.py", *THREADS, "--owner", f"tcp:{NAME}:{port}", *front, env=env)
        for one in addresses:
            eventually(lambda one=one: f"connected to the owner tcp:{NAME}:{port} at {one}" in server.log)
        for one in owners:
            one.wait_ready()
        return server, owners, port

    return start


def hold(pool, front, folder):
    """Has each of two shards hold a request; returns these, by the file that lets it go on."""
    held = {}
    for name in ("first", "second"):
        held[folder / name] = pool.submit(front.call, "gate", str(folder / name))
        eventually((folder / f"{name}.begun").exists)
    return held


def test_shards_run_requests_side_by_side_and_the_rest_takes_over_from_one_that_dies(shards, tmp_path, eventually):
    front, owners, _ = shards("owned.py", "127.0.0.2", "127.0.0.3")
    with ThreadPoolExecutor(2) as pool:
        held = hold(pool, front, tmp_path)  # a gate takes one request at a time
        for path in held:
            (tmp_path / f"{path.name}.begun").unlink()
        owners[0].signal(signal.SIGKILL)
        (tmp_path / "second").touch()
        (tmp_path / "first").touch()
        assert [one.result().status_code for one in held.values()] == [200, 200]
    eventually(lambda: "at 127.0.0.2 is unreachable" in front.log)
    assert front.client.get("/readyz").status_code == 200
    assert front.call("clip", 2.0).json()[1] == owners[1].call("clip", 2.0).json()[1]


def test_a_request_of_a_shard_that_dies_goes_to_another_only_once(shards, tmp_path):
    front, owners, _ = shards("owned.py", "127.0.0.2", "127.0.0.3")
    begun = tmp_path / "gate.begun"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.call, "gate", str(tmp_path / "gate"))
        for owner in owners:
            eventually(begun.exists)
            begun.unlink()
            owner.signal(signal.SIGKILL)
        answer = asked.result()
    assert answer.status_code == 503
    assert "that held the request died (twice)" in answer.text


def test_a_stream_that_a_dead_shard_had_begun_ends_with_an_error(shards, tmp_path):
    front, owners, _ = shards("owned.py", "127.0.0.2", "127.0.0.3")
    with front.client.stream("POST", "/models/slow", json=[str(tmp_path / "gate"), 5]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: "part 0"'
        for owner in owners:
            owner.signal(signal.SIGKILL)
        assert "event: error" in list(lines)


def test_the_name_is_looked_up_again_when_a_link_ends(shards, serve, hosts, tmp_path):
    front, owners, port = shards("owned.py", "127.0.0.2", "127.0.0.3")
    hosts.say("127.0.0.3", "127.0.0.4")
    serve("owned.py", *THREADS, "--attach", f"tcp:127.0.0.4:{port}")
    owners[0].signal(signal.SIGTERM)
    eventually(lambda: f"connected to the owner tcp:{NAME}:{port} at 127.0.0.4" in front.log, within_s=LOOK_UP_S - 5)
    with ThreadPoolExecutor(2) as pool:
        held = hold(pool, front, tmp_path)
        for path, one in held.items():
            path.touch()
            assert one.result().status_code == 200


def test_an_address_that_the_name_has_no_more_gets_no_requests(shards, hosts, tmp_path):
    front, owners, _ = shards("owned.py", "127.0.0.2", "127.0.0.3", "127.0.0.4")
    hosts.say("127.0.0.3")
    with ThreadPoolExecutor(2) as pool:
        held = hold(pool, front, tmp_path)
        owners[2].signal(signal.SIGKILL)  # a request that it had goes to another one
        remaining = owners[1].call("clip", 1.0).json()[1]
        eventually(lambda: "at 127.0.0.4 is unreachable" in front.log)
        # Its answers do not tell: of shards with as much room, calls one by one all go to the same.
        eventually(lambda: front.client.get("/models/clip").json()["workers"]["alive"] == 1)
        with ThreadPoolExecutor(4) as many:  # more than its worker takes at once
            found = many.map(lambda sample: front.call("clip", sample).json()[1], [1.0, 2.0, 3.0, 4.0] * 10)
            assert set(found) == {remaining}
        for path, one in held.items():
            path.touch()
            assert one.result().status_code == 200
    hosts.say()  # the name is not known any more: what is served goes on
    assert front.call("clip", 1.0).status_code == 200


def described(folder, text, kind="float"):
    """A file with a `clip` that is described so."""
    folder.mkdir(exist_ok=True)
    (folder / "clip.py").write_text(
        CLIP.format(load="pass").replace("Says what came", text).replace("batch: list[float]", f"batch: list[{kind}]")
    )
    return folder / "clip.py"


def test_a_shard_that_describes_a_model_otherwise_gets_no_requests_until_it_does_not(shards, tmp_path):
    files = [described(tmp_path / name, name) for name in ("one", "two")]
    front, owners, port = shards(files, "127.0.0.2", "127.0.0.3")
    (line,) = [line for line in front.log.splitlines() if "otherwise than its other shards" in line]
    assert f"the owner tcp:{NAME}:{port} at 127.0.0." in line
    left_out = owners[0] if "at 127.0.0.2" in line else owners[1]
    asked = owners[1] if left_out is owners[0] else owners[0]
    pids = {front.call("clip", 1.0).json()[1] for _ in range(20)}
    assert pids == {asked.call("clip", 1.0).json()[1]}
    with load_on(front) as more:  # each in its turn, as in a rolling update: the last one has both serve the new one
        for folder, owner in zip(("one", "two"), owners, strict=True):
            described(tmp_path / folder, "three")
            owner.signal(signal.SIGHUP)
            eventually(lambda owner=owner: "three" in owner.client.get("/openapi.json").text)
            more()
        eventually(lambda: "three" in front.client.get("/openapi.json").text)
        more()
    asked.signal(signal.SIGKILL)
    assert front.call("clip", 1.0).json()[1] == left_out.call("clip", 1.0).json()[1]
