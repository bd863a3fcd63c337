# SPDX-License-Identifier: Apache-2.0
"""Servers that hand requests on to the server that owns a model: what clients of the front see, whatever ends."""

import json
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from tests.forked import COMMAND, Forked
from tests.waiting import PATIENCE_S, eventually

from forebay.workers.wire import frames

SECRET = "the secret of these tests, of 32 bytes"


@pytest.fixture(scope="module")
def socket_path(tmp_path_factory):
    """Where an owner lets fronts in that several tests share."""
    return f"unix:{tmp_path_factory.mktemp('owner')}/owner.socket"


@pytest.fixture(scope="module")
def owner(launch, socket_path):
    """A server with models of its own."""
    return launch("owned.py", "--attach", socket_path)


@pytest.fixture(scope="module")
def front(launch, owner, socket_path):
    """A server that has the models of the other one, and none of its own."""
    return launch(None, "--owner", socket_path)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def state_of(server, model):
    return server.client.get(f"/models/{model}").json()


# ---------------------------------------------------------------------------------------------------------------------
# What clients see


def test_a_request_is_answered_by_the_owner(front, owner):
    answer = front.call("clip", 1.5)
    assert answer.status_code == 200
    sample, pid, size = answer.json()
    assert (sample, size) == (1.5, 1)
    assert pid != front.process.pid
    assert owner.call("clip", 1.5).json()[1] == pid


def test_requests_of_front_and_owner_share_a_queue(front, owner, tmp_path):
    """While one request of the front holds the worker, others of both wait behind it, in one queue."""
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(front.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        others = [pool.submit(server.call, "gate", str(gate)) for server in (front, owner)]
        eventually(lambda: state_of(owner, "gate")["waiting"] == 2)
        gate.touch()
        assert [one.result().status_code for one in (first, *others)] == [200, 200, 200]


def test_over_tcp_with_a_secret(serve):
    port = free_port()
    owner = serve("owned.py", "--attach", f"tcp:127.0.0.1:{port}", "--attach-secret", SECRET)
    front = serve(None, "--owner", f"tcp:127.0.0.1:{port}", "--attach-secret", SECRET)
    assert front.call("clip", 2.0).json()[0] == 2.0
    assert owner.call("clip", 2.0).json()[0] == 2.0


@pytest.mark.parametrize("length", [10, 70_000, 3_000_000])
def test_bodies_and_answers_of_any_length_arrive_whole(front, length):
    sample = "ab" * length
    assert front.call("fails", sample).json() == sample


@pytest.mark.parametrize("path", ["/openapi.json", "/v2/models/clip", "/v2/models/clip/config", "/v2/models/gate"])
def test_a_model_is_described_as_its_owner_does(front, owner, path):
    assert front.client.get(path).content == owner.client.get(path).content


@pytest.mark.parametrize("sample", ["refuse", "break"])
def test_an_error_is_that_of_the_owner(front, owner, sample):
    ours, theirs = (server.call("fails", sample, x_request_id="of-the-test", via="a") for server in (front, owner))
    assert ours.status_code == theirs.status_code != 200
    assert ours.content == theirs.content


def test_the_logs_of_both_call_a_request_alike(front, owner):
    assert front.call("fails", "break", x_request_id="called-alike").status_code == 500
    eventually(lambda: "called-alike" in owner.log)


def test_the_logs_call_a_request_as_its_client_is_told(front, owner):
    answer = front.call("fails", "break")
    assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]
    eventually(lambda: answer.headers["x-request-id"] in owner.log)


def test_the_logs_call_a_stream_as_its_client_is_told(front, owner, tmp_path):
    for number in range(2):
        gate = tmp_path / f"gate{number}"
        with front.client.stream("POST", "/models/slow", json=[str(gate), 2]) as answer:
            lines = answer.iter_lines()
            assert next(lines) == 'data: "part 0"'
            gate.mkdir()
            assert answer.headers["x-request-id"] in [line for line in lines if line][-1]
        said = [answer.headers["x-request-id"]]
        broken = eventually(lambda n=number: [one for one in owner.records if one.get("endpoint") == "slow"][n:])
        assert broken[0]["request_ids"] == said
        # Servers that tests fork may count alike: one of them has a number more now.
        assert owner.call("fails", "break").status_code == 500


# ---------------------------------------------------------------------------------------------------------------------
# Clients that go away, and queues that are full


def test_a_client_that_goes_away_frees_its_place_at_the_owner(front, owner, tmp_path):
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(1) as pool, front.connect() as client:
        first = pool.submit(owner.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        client.send(client.request("POST", "/models/gate", f'"{gate}"'.encode()))
        eventually(lambda: state_of(owner, "gate")["waiting"] == 1)
        client.socket.close()
        eventually(lambda: state_of(owner, "gate")["waiting"] == 0)
        gate.touch()
        assert first.result().status_code == 200


def test_a_full_queue_is_that_of_the_owner(front, owner, tmp_path):
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(5) as pool:
        first = pool.submit(owner.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        waiting = [pool.submit(front.call, "gate", str(gate)) for _ in range(4)]
        eventually(lambda: state_of(owner, "gate")["waiting"] == 4)
        ours, theirs = (server.call("gate", str(gate), x_request_id="one-too-many") for server in (front, owner))
        gate.touch()
        assert {one.result().status_code for one in (first, *waiting)} == {200}
    assert (ours.status_code, ours.headers["retry-after"]) == (429, "1")
    assert ours.content == theirs.content


def test_a_front_that_dies_has_its_requests_cancelled(serve, owner, socket_path, tmp_path):
    gate = tmp_path / "gate"
    front = serve(None, "--owner", socket_path)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(owner.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        second = pool.submit(front.call, "gate", str(gate))
        eventually(lambda: state_of(owner, "gate")["waiting"] == 1)
        front.signal(signal.SIGKILL)
        eventually(lambda: state_of(owner, "gate")["waiting"] == 0)
        gate.touch()
        assert first.result().status_code == 200
        with pytest.raises(httpx.TransportError):
            second.result()


# ---------------------------------------------------------------------------------------------------------------------
# Owners that go away, and come back


def test_kill_9_of_an_owner_under_load_fails_nothing(serve, tmp_path):
    path = f"unix:{tmp_path}/owner.socket"
    owner = serve("owned.py", "--attach", path)
    front = serve(None, "--owner", path)
    answers, stop = [], threading.Event()

    def ask(number):
        with httpx.Client(base_url=front.url, timeout=PATIENCE_S) as client:
            count = 0
            while not stop.is_set():
                sample = number * 1_000_000.0 + count
                answer = client.post("/models/clip", json=sample)
                answers.append(
                    (answer.status_code, answer.json()[0] if answer.status_code == 200 else answer.text, sample)
                )
                count += 1

    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, number) for number in range(8)]
        eventually(lambda: len(answers) > 200)
        owner.signal(signal.SIGKILL)
        owner.wait()
        serve("owned.py", "--attach", path)
        before = len(answers)
        eventually(lambda: len(answers) > before + 200)
        stop.set()
        for one in asking:
            one.result()
    assert [one for one in answers if one[0] != 200 or one[1] != one[2]] == []


def test_a_stream_that_has_begun_ends_with_an_error_that_names_its_owner(serve, tmp_path):
    path = f"unix:{tmp_path}/owner.socket"
    owner = serve("owned.py", "--attach", path)
    front = serve(None, "--owner", path)
    with front.client.stream("POST", "/models/slow", json=[str(tmp_path / "gate"), 5]) as answer:
        lines = answer.iter_lines()
        assert next(lines) == 'data: "part 0"'
        owner.signal(signal.SIGKILL)
        rest = [line for line in lines if line]
    assert rest[0] == "event: error"
    assert f"the owner {path} that held the request died" in rest[1]


def test_a_request_is_sent_no_more_than_twice(serve, tmp_path):
    path = f"unix:{tmp_path}/owner.socket"
    owner = serve("owned.py", "--attach", path)
    front = serve(None, "--owner", path)
    begun = tmp_path / "gate.begun"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.call, "gate", str(tmp_path / "gate"))
        for _ in range(2):
            eventually(begun.exists)
            owner.signal(signal.SIGKILL)
            owner.wait()
            begun.unlink()
            owner = serve("owned.py", "--attach", path)
        answer = asked.result()
    assert answer.status_code == 503
    assert f"the owner {path} that held the request died (twice)" in answer.text


def test_an_owner_that_stays_away_is_told_and_comes_back(serve, tmp_path):
    path = f"unix:{tmp_path}/owner.socket"
    owner = serve("owned.py", "--attach", path)
    front = serve(None, "--owner", path, "--owner-grace-s", "0.5")
    assert front.client.get("/readyz").status_code == 200
    owner.signal(signal.SIGKILL)
    owner.wait()
    eventually(lambda: front.client.get("/readyz").status_code == 503)
    assert path in front.client.get("/readyz").text
    assert not front.client.get("/v2/models/clip/ready").is_success
    answer = front.call("clip", 1.0)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert path in answer.text
    serve("owned.py", "--attach", path)
    eventually(lambda: front.client.get("/readyz").status_code == 200)
    assert front.call("clip", 1.0).status_code == 200


def test_a_front_is_ready_while_any_model_can_answer(serve, tmp_path):
    here, there = (f"unix:{tmp_path}/{name}" for name in ("here", "there"))
    stays, leaves = serve("single.py", "--attach", here), serve("owned.py", "--attach", there)
    front = serve(None, "--owner", here, "--owner", there)
    leaves.signal(signal.SIGKILL)
    leaves.wait()
    eventually(lambda: front.client.get("/v2/models/clip/ready").status_code == 503)
    assert front.client.get("/readyz").status_code == 200
    assert front.client.get("/v2/health/ready").is_success
    stays.signal(signal.SIGKILL)
    stays.wait()
    eventually(lambda: front.client.get("/readyz").status_code == 503)
    problems = front.client.get("/readyz").json()["problems"]
    assert all(any(path in problem for problem in problems) for path in (here, there))


def test_an_owner_that_stops_answers_what_it_has_and_its_successor_takes_the_rest(serve, tmp_path):
    path = f"unix:{tmp_path}/owner.socket"
    owner = serve("owned.py", "--attach", path)
    front = serve(None, "--owner", path)
    gate = tmp_path / "gate"
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(front.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        owner.signal(signal.SIGTERM)
        eventually(lambda: front.client.get("/readyz").status_code == 503)
        second = pool.submit(front.call, "clip", 3.0)
        gate.touch()
        assert first.result().status_code == 200
        assert owner.wait() == 0
        serve("owned.py", "--attach", path)
        assert second.result().json()[0] == 3.0


def test_what_comes_to_an_owner_that_stops_is_handed_back(serve, tmp_path):
    """A front of the test, which sends a request after it was told that none is taken any more."""
    owner = serve("owned.py", "--attach", f"unix:{tmp_path}/s")
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(f"{tmp_path}/s")
        link.settimeout(PATIENCE_S)
        reader, heard = frames.FrameReader(), []

        def hear(kind):
            while not any(one[0] == kind for one in heard):
                heard.extend(reader.feed(link.recv(1 << 20)))
            return next(one for one in heard if one[0] == kind)

        def ask(seat, body):
            params = frames.encode_part({"in": "json", "out": "json"})
            bundle = [number, [[seat, params, 1, 60.0, "of-the-test"]], [], []]
            link.sendall(frames.encode(["requests", [bundle], 0, [body]]))

        link.sendall(frames.encode(["hello", frames.VERSION, {"role": "caller", "worker": "x" * 16}]))
        (number,) = [one[0] for one in hear("models")[1] if one[1]["model"]["config"]["name"] == "gate"]
        ask(1, json.dumps(str(tmp_path / "gate")).encode())
        eventually((tmp_path / "gate.begun").exists)
        owner.signal(signal.SIGTERM)
        hear("leaving")
        ask(2, b'"x"')
        (answers,) = hear("answers")[1]
        assert answers[:2] == [number, 2]
        assert answers[3:] == [[], [], [2], 0.0]
        heard.clear()
        (tmp_path / "gate").touch()
        assert hear("answers")[2] == [b"1"]
    assert owner.wait() == 0


# ---------------------------------------------------------------------------------------------------------------------
# Owners that change what they serve

CHANGING = """
import forebay

class Changing(forebay.Model):
    \"\"\"{text}\"\"\"

    def predict(self, batch: list[{kind}]) -> list[str]:
        return ["{text}"] * len(batch)
"""


@pytest.mark.parametrize("kind", ["float", "str"])
def test_a_reload_of_the_owner_reaches_its_fronts(serve, tmp_path, kind):
    file, path = tmp_path / "changing.py", f"unix:{tmp_path}/s"
    file.write_text(CHANGING.format(text="first edition", kind="float"))
    owner = serve(file, "--attach", path)
    front = serve(None, "--owner", path)
    answers, stop = [], threading.Event()

    def ask():
        with httpx.Client(base_url=front.url, timeout=PATIENCE_S) as client:
            while not stop.is_set():
                answers.append(client.post("/models/changing", json=1.0))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        eventually(lambda: len(answers) > 50)
        file.write_text(CHANGING.format(text="second edition", kind=kind))
        owner.signal(signal.SIGHUP)
        eventually(lambda: "second edition" in front.client.get("/openapi.json").text)
        before = len(answers)
        eventually(lambda: len(answers) > before + 50)
        stop.set()
        for one in asking:
            one.result()
    assert front.client.get("/openapi.json").content == owner.client.get("/openapi.json").content
    if kind == "float":  # what was read for the one can be answered by the other
        assert {one.status_code for one in answers} == {200}
    texts = [one.text for one in answers if one.status_code == 200]
    assert (texts[0], front.call("changing", 1.0 if kind == "float" else "x").text) == (
        '"first edition"',
        '"second edition"',
    )


def test_a_model_that_the_owner_serves_no_longer_leaves_its_fronts(serve, tmp_path, models):
    clip, fails = ({"target": str(models / f"owned.py:{name}")} for name in ("Clip", "Fails"))
    file = tmp_path / "owner.yaml"
    file.write_text(json.dumps({"models": [clip, fails], "attach": "unix:s"}))
    owner = serve(None, "--config", str(file))
    front = serve(None, "--owner", f"unix:{tmp_path}/s")
    assert front.call("fails", "a").status_code == 200
    file.write_text(json.dumps({"models": [clip], "attach": "unix:s"}))
    owner.signal(signal.SIGHUP)
    eventually(lambda: front.call("fails", "a").status_code == 404)
    file.write_text(json.dumps({"models": [clip, fails], "attach": "unix:s"}))
    owner.signal(signal.SIGHUP)
    eventually(lambda: front.call("fails", "a").status_code == 200)
    assert front.call("clip", 1.0).status_code == 200


def test_only_the_model_that_is_named_is_served(serve, owner, socket_path, tmp_path):
    (tmp_path / "forebay.yaml").write_text(json.dumps({"models": [{"owner": socket_path, "name": "clip"}]}))
    front = serve(tmp_path)
    assert [one["name"] for one in front.client.get("/models").json()["models"]] == ["clip"]
    (tmp_path / "forebay.yaml").write_text(json.dumps({"models": [{"owner": socket_path, "name": "clop"}]}))
    front = serve(tmp_path)
    (problem,) = front.client.get("/readyz").json()["problems"]
    assert problem == f"the owner {socket_path} has no model 'clop'; did you mean 'clip'?"


# ---------------------------------------------------------------------------------------------------------------------
# What does not fit together


def test_a_wrong_secret_is_said_and_what_is_served_stays_served(serve, models):
    port = free_port()
    serve("owned.py", "--attach", f"tcp:127.0.0.1:{port}", "--attach-secret", SECRET)
    front = serve("single.py", "--owner", f"tcp:127.0.0.1:{port}", "--attach-secret", SECRET[::-1])
    (line,) = [one for one in front.records if "is unreachable" in one["message"]]
    assert f"the owner tcp:127.0.0.1:{port} is unreachable" in line["message"]
    assert "secret" in line["message"]
    assert front.client.get("/models").json()["models"]
    assert front.client.get("/readyz").status_code == 200


def test_a_front_is_as_ready_as_its_owner_has_workers(serve, models, tmp_path):
    path, door = tmp_path / "owned.py", f"unix:{tmp_path}/s"
    path.write_text((models / "owned.py").read_text())
    owner = serve(f"{path}:Clip", "--workers", "0", "--attach", door)
    front = serve(None, "--owner", door)
    said = eventually(lambda: (told := front.client.get("/readyz")).status_code == 503 and told.text)
    assert f"model 'clip' has no worker: its owner {door} says: no worker is attached" in said
    assert front.client.get("/models/clip").json()["ready"] is False
    with Forked([*COMMAND, "worker", f"{path}:Clip", "--connect", door], stderr=subprocess.DEVNULL) as worker:
        try:
            for server in (owner, front):
                eventually(lambda server=server: server.client.get("/readyz").is_success)
            assert front.client.get("/v2/models/clip/ready").is_success
        finally:
            worker.kill()
    eventually(lambda: not front.client.get("/v2/models/clip/ready").is_success)


def test_another_secret_holds_after_sighup(serve, tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text(SECRET)
    theirs.write_text(SECRET[::-1])
    owner = serve("owned.py", "--attach", f"unix:{tmp_path}/s", "--attach-secret", f"@{theirs}")
    front = serve(None, "--owner", f"unix:{tmp_path}/s", "--attach-secret", f"@{ours}")
    assert front.client.get("/readyz").status_code == 503
    ours.write_text(SECRET[::-1])
    front.signal(signal.SIGHUP)
    eventually(lambda: front.client.get("/readyz").is_success)
    theirs.write_text(SECRET)
    owner.signal(signal.SIGHUP)
    eventually(lambda: "reloaded in" in owner.log)
    assert front.call("clip", 1.0).is_success  # its link stays
    other = serve(None, "--owner", f"unix:{tmp_path}/s", "--attach-secret", SECRET)
    assert other.call("clip", 1.0).is_success
    assert "settings that need a restart" not in owner.log + front.log


@pytest.mark.parametrize(
    "secret, said, logged",
    [
        ((), "give the front the same one: --attach-secret @FILE", "this server asks for a secret"),
        (("--attach-secret", SECRET[::-1]), "secret", "its secret is not this server's"),
    ],
)
def test_a_front_that_is_not_let_in_is_called_a_front(serve, tmp_path, secret, said, logged):
    owner = serve("owned.py", "--attach", f"unix:{tmp_path}/s", "--attach-secret", SECRET)
    front = serve("single.py", "--owner", f"unix:{tmp_path}/s", *secret)
    (line,) = [one for one in front.records if "is unreachable" in one["message"]]
    assert said in line["message"]
    assert f"a front was refused: {logged}" in owner.log


def test_a_name_that_is_taken_is_said_and_stays_with_whom_it_belongs(serve, owner, socket_path):
    front = serve("owned.py", "--owner", socket_path)
    assert "has a model 'clip', and so has this server, which serves it" in front.log
    assert front.call("clip", 1.0).json()[1] != owner.call("clip", 1.0).json()[1]


def test_a_name_of_two_owners_belongs_to_one(serve, owner, socket_path, tmp_path):
    other = serve("owned.py", "--attach", f"unix:{tmp_path}/s")
    front = serve(None, "--owner", socket_path, "--owner", f"unix:{tmp_path}/s")
    assert "and so has the owner" in front.log
    assert front.call("clip", 1.0).json()[1] in {server.call("clip", 1.0).json()[1] for server in (owner, other)}


def test_who_is_no_owner_is_told_what_it_is(serve, tmp_path):
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{tmp_path}/s")
        listening.listen()

        def answer():
            connection, _ = listening.accept()
            with connection:
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                connection.recv(65536)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        front = serve("single.py", "--owner", f"unix:{tmp_path}/s")
        thread.join()
        eventually(lambda: "it is not an owner" in front.log)


@pytest.mark.parametrize("name", [None, "clip"])
def test_a_front_is_told_that_its_owner_is_a_front_itself(launch, serve, owner, socket_path, tmp_path, name):
    between = f"unix:{tmp_path}/s"
    serve("single.py", "--owner", socket_path, "--attach", between)
    named = {"owner": between, **({} if name is None else {"name": name})}
    (tmp_path / "forebay.yaml").write_text(json.dumps({"models": [named]}))
    front = serve(tmp_path)
    told = f"the owner {between} forwards the model 'clip' to its owner {socket_path} and accepts no requests for it"
    eventually(lambda: told in front.log)
    assert ("sleepy" in front.client.get("/models").text) == (name is None)


def test_an_owner_that_is_named_twice_is_refused(cli):
    result = cli("check", "--owner", "tcp:127.0.0.1:9", "--owner", "tcp:127.0.0.1:9")
    assert result.returncode == 2
    assert "the owner tcp:127.0.0.1:9 is named twice" in result.stderr


def test_an_address_that_is_none_is_refused(cli):
    result = cli("check", "--owner", "clip:9100")
    assert result.returncode == 2
    assert "--owner: expected unix:PATH or tcp:HOST:PORT, got 'clip:9100'" in result.stderr
