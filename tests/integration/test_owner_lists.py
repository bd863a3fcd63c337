# SPDX-License-Identifier: Apache-2.0
"""Fronts whose owners change while they run: what `forebay.yaml` names anew on SIGHUP comes, and the rest leaves."""

import contextlib
import json
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.waiting import PATIENCE_S, eventually

CLIP = """
import os
import forebay

class Clip(forebay.Model):
    \"\"\"Says what came, and in which process.\"\"\"

    timeout_ms = 30_000

    def load(self):
        {load}

    def predict(self, batch: list[float]) -> list[tuple[float, int]]:
        return [(sample, os.getpid()) for sample in batch]
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A folder with a model of the project's own, a copy of it that cannot be loaded, and the sockets of owners."""
    folder = tmp_path_factory.mktemp("owners")
    (folder / "clip.py").write_text(CLIP.format(load="pass"))
    (folder / "broken.py").write_text(CLIP.format(load="raise RuntimeError('there is no such device here')"))
    return folder


@pytest.fixture(scope="module")
def owner(launch, here):
    """An owner of `clip` and others."""
    return launch("owned.py", "--attach", f"unix:{here}/owned")


@pytest.fixture(scope="module")
def clip_owner(launch, here):
    """An owner of `clip` alone."""
    return launch(here / "clip.py", "--attach", f"unix:{here}/clip")


class Config:
    """The `forebay.yaml` of a front."""

    def __init__(self, folder, *models, **more):
        self.path, self.more = folder / "forebay.yaml", more
        self.say(*models)

    def say(self, *models):
        listed = [one if isinstance(one, dict) else {"target": str(one)} for one in models]
        self.path.write_text(json.dumps({"models": listed, "attach": {"owner_grace_s": 60, **self.more}}))

    def change(self, front, *models):
        self.say(*models)
        front.signal(signal.SIGHUP)


def owned(folder, socket, name=None):
    return {"owner": f"unix:{folder}/{socket}", **({} if name is None else {"name": name})}


def names(server):
    return {one["name"] for one in server.client.get("/models").json()["models"] if one.get("ready")}


def links(folder, socket):
    """How many fronts an owner has."""
    path = f"{folder}/{socket}"
    return sum(line.endswith(path) for line in Path("/proc/net/unix").read_text().splitlines()) - 1


def pid_of(server):
    answer = server.call("clip", 1.5)
    return answer.json()[1] if answer.status_code == 200 else None


@contextlib.contextmanager
def load_on(server):
    """Asks `clip` from four clients all the while, and checks that each got its own answer."""
    answers, stop = [], threading.Event()

    def more():
        before = len(answers)
        eventually(lambda: len(answers) > before + 50)

    def ask(number):
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
            for count in range(number * 1_000_000, (number + 1) * 1_000_000):
                if stop.is_set():
                    return
                answer = client.post("/models/clip", json=float(count))
                answers.append((answer.status_code, answer.text, float(count)))

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask, number) for number in range(4)]
        try:
            more()
            yield more
        finally:
            stop.set()
        for one in asking:
            one.result()
    assert [one for one in answers if one[0] != 200 or json.loads(one[1])[0] != one[2]] == []


def test_owners_come_and_go_and_the_others_keep_their_links(serve, here, owner, clip_owner, launch, tmp_path):
    launch("single.py", "--attach", f"unix:{here}/single")
    config = Config(tmp_path, owned(here, "owned"))
    front = serve(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        gate = tmp_path / "gate"
        first = pool.submit(front.call, "gate", str(gate))
        eventually((tmp_path / "gate.begun").exists)
        config.change(front, owned(here, "owned"), owned(here, "single"))
        eventually(lambda: "sleepy" in names(front))
        second = pool.submit(front.call, "sleepy", str(gate))
        config.change(front, owned(here, "single"))
        eventually(lambda: names(front) == {"sleepy"})
        assert front.call("clip", 1.0).status_code == 404
        assert not first.done(), first.result().text
        assert links(here, "owned") == 1
        gate.touch()
        assert [first.result().status_code, second.result().status_code] == [200, 200]
    eventually(lambda: links(here, "owned") == 0)
    assert "is unreachable" not in front.log
    assert "settings that need a restart" not in front.log
    config.change(front, owned(here, "owned"))
    eventually(lambda: "clip" in names(front) and "sleepy" not in names(front))
    assert front.call("clip", 1.0).json()[1] == owner.call("clip", 1.0).json()[1]


def test_which_of_its_models_are_wanted_of_an_owner_may_change(serve, here, owner, tmp_path):
    config = Config(tmp_path, owned(here, "owned", "clip"), owned(here, "owned", "gate"))
    front = serve(tmp_path)
    assert names(front) == {"clip", "gate"}
    config.change(front, owned(here, "owned"))
    eventually(lambda: names(front) == names(owner))
    config.change(front, owned(here, "owned", "fails"))
    eventually(lambda: names(front) == {"fails"})
    assert front.call("fails", "a").json() == "a"
    config.change(front, owned(here, "owned", "clop"))
    eventually(lambda: "has no model 'clop'; did you mean 'clip'?" in front.log)
    assert "is unreachable" not in front.log


def test_a_model_of_the_project_is_given_to_an_owner_and_taken_back_with_nothing_dropped(
    serve, here, clip_owner, tmp_path
):
    config = Config(tmp_path, here / "clip.py")
    front = serve(tmp_path)
    ours, theirs = pid_of(front), pid_of(clip_owner)
    assert ours != theirs
    with load_on(front) as more:
        config.change(front, here / "clip.py", owned(here, "clip", "clip"))
        eventually(lambda: pid_of(front) == theirs)
        more()
        config.change(front, here / "clip.py", owned(here, "clip", "clip"))  # what the project has takes nothing back
        eventually(lambda: front.log.count("reloaded in") == 2)
        assert pid_of(front) == theirs
        config.change(front, here / "clip.py")
        eventually(lambda: pid_of(front) not in {theirs, None})
        more()
    assert front.client.get("/openapi.json").content == clip_owner.client.get("/openapi.json").content


def test_a_model_moves_from_one_owner_to_another_with_nothing_dropped(serve, here, owner, clip_owner, tmp_path):
    config = Config(tmp_path, owned(here, "clip", "clip"))
    front = serve(tmp_path)
    ours, theirs = pid_of(clip_owner), pid_of(owner)
    with load_on(front) as more:
        assert pid_of(front) == ours
        config.change(front, owned(here, "owned", "clip"))
        eventually(lambda: pid_of(front) == theirs)
        more()


def test_what_waits_for_an_owner_that_died_is_answered_by_the_one_that_is_wanted_next(serve, here, tmp_path):
    first = serve(here / "clip.py", "--attach", f"unix:{tmp_path}/first")
    second = serve(here / "clip.py", "--attach", f"unix:{tmp_path}/second")
    config = Config(tmp_path, owned(tmp_path, "first", "clip"))
    front = serve(tmp_path)
    first.signal(signal.SIGKILL)
    first.wait()
    eventually(lambda: front.client.get("/readyz").status_code == 503)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(front.call, "clip", 2.5)
        eventually(lambda: front.client.get("/models/clip").json()["waiting"] == 1)
        config.change(front, owned(tmp_path, "second", "clip"))
        assert waiting.result().json() == [2.5, pid_of(second)]


def test_a_model_that_is_an_owners_is_described_from_the_start_and_not_loaded_here(serve, here, tmp_path):
    config = Config(tmp_path, here / "broken.py", owned(tmp_path, "clip", "clip"), owner_grace_s=0.1)
    front = serve(tmp_path)
    assert front.client.get("/v2/models/clip").is_success
    eventually(lambda: front.call("clip", 1.0).status_code == 503)
    answer = front.call("clip", 1.0)
    assert answer.headers["retry-after"] == "1"
    assert f"the owner unix:{tmp_path}/clip of 'clip' is unreachable" in answer.text
    assert f"unix:{tmp_path}/clip is unreachable" in front.client.get("/readyz").text
    owner = serve(here / "clip.py", "--attach", f"unix:{tmp_path}/clip")
    eventually(lambda: pid_of(front) == pid_of(owner))
    assert front.client.get("/readyz").status_code == 200
    config.change(front, here / "broken.py")
    eventually(lambda: "there is no such device here" in front.log)
    eventually(lambda: "there is no such device here" in front.call("clip", 1.0).text)


def test_a_model_that_comes_later_does_not_take_the_name_of_an_owners_model(serve, here, clip_owner, tmp_path):
    config = Config(tmp_path, owned(here, "clip"))
    front = serve(tmp_path)
    config.change(front, owned(here, "clip"), here / "clip.py")
    eventually(lambda: f"the model 'clip' is served by its owner unix:{here}/clip" in front.log)
    assert pid_of(front) == pid_of(clip_owner)
    config.change(front, here / "clip.py")
    eventually(lambda: pid_of(front) not in {pid_of(clip_owner), None})


def test_an_owner_that_is_named_has_a_model_that_two_have(serve, here, owner, clip_owner, tmp_path):
    config = Config(tmp_path, owned(here, "owned"), owned(here, "clip"))
    front = serve(tmp_path)
    eventually(lambda: "has a model 'clip', and so has" in front.log)
    config.change(front, owned(here, "owned"), owned(here, "clip", "clip"))
    eventually(lambda: pid_of(front) == pid_of(clip_owner))
    assert "gate" in names(front)
    config.change(front, owned(here, "owned"))
    eventually(lambda: pid_of(front) == pid_of(owner))


def test_a_name_that_its_owner_serves_no_more_waits_for_it(serve, here, models, tmp_path):
    clip, fails = ({"target": str(models / f"owned.py:{name}")} for name in ("Clip", "Fails"))
    (tmp_path / "owner").mkdir()
    theirs = Config(tmp_path / "owner", clip, fails, address=f"unix:{tmp_path}/s")
    owner = serve(tmp_path / "owner")
    Config(tmp_path, owned(tmp_path, "s", "fails"), owner_grace_s=0.1)
    front = serve(tmp_path)
    assert front.call("fails", "a").status_code == 200
    theirs.change(owner, clip)
    eventually(lambda: front.call("fails", "a").status_code == 503)
    assert "has no such model now" in front.call("fails", "a").text
    assert "has no such model now" in front.client.get("/readyz").text
    theirs.change(owner, clip, fails)
    eventually(lambda: front.call("fails", "a").status_code == 200)


def test_what_a_file_names_wrongly_changes_nothing(serve, here, owner, tmp_path):
    config = Config(tmp_path, owned(here, "owned"))
    front = serve(tmp_path)
    config.change(front, owned(here, "owned"), owned(here, "owned"))
    eventually(lambda: "is named twice; leave one of them out" in front.log)
    config.change(front, owned(here, "owned", "clip"), owned(here, "clip", "clip"))
    line = r"forebay\.yaml:\d+: name: the owner of 'clip' is unix:\S+ \(\S+forebay\.yaml:\d+\), and cannot be unix:"
    eventually(lambda: re.search(line, front.log))
    assert names(front) == names(owner)
    assert pid_of(front) == pid_of(owner)
