# SPDX-License-Identifier: Apache-2.0
"""Programs of another version of forebay: `python -m tests.mixed.versions COMMIT` serves with that one and this one.

It makes a wheel of the commit and has both versions serve the same models together: a server of one and a worker of the
other, a server of one and a front of the other, both ways round. Each answer must be what one version alone answers.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.buckets import running_buckets
from tests.cluster.conftest import Program
from tests.conftest import MODELS, Server
from tests.ports import free_port
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
FILE = MODELS / "doubled.py"
CALLS = [("doubler", 21), ("doubler", "x"), ("doubler", -1), ("counter", 3)]
LONG = [("twice", "a" * 100_000), ("counter", 300)]
"""Calls that are made by hand only: their recordings would be long."""
SECRET = "the secret of these tests, of 32 bytes"
ASK = """
import sys
import numpy as np
import forebay
with forebay.cluster.join(sys.argv[1]):
    for name in ("double", "doubled", "crash"):
        rows = forebay.Batch.concatenate([np.arange(5)])
        try:
            told = forebay.batched_run(name, rows)
            print(name, told.tolist() if hasattr(told, "tolist") else list(told))
        except forebay.ForebayError as error:
            print(name, type(error).__name__, error.message)
"""
"""A program that asks servings of another one."""
RUN = [sys.executable, "-c", "import sys; from forebay.cli.main import main; sys.exit(main())"]


def unpacked(commit, folder):
    """Makes a wheel of a commit; returns the folder from which Python imports what is in it."""
    tree = folder / "tree"
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(tree, filter="data")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=tree, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    return folder / "wheel"


class Version:
    """Starts programs of a version, which end with the stack."""

    def __init__(self, folder, stack):
        self._env = {**os.environ, "PYTHONPATH": str(folder), "FOREBAY_SECRET": SECRET}
        self._stack = stack

    def serve(self, target, *options, env=None):
        server = Server(target, *options, command=[*RUN, "serve"], env={**self._env, **(env or {})})
        self._stack.callback(server.stop)
        return server.wait_ready()

    def work(self, model, address):
        worker = subprocess.Popen([*RUN, "worker", f"{FILE}:{model}", "--connect", address], env=self._env)
        self._stack.callback(worker.wait)
        self._stack.callback(worker.terminate)

    def join(self, address):
        self._stack.enter_context(Program(address, "double", "doubled", "crash", env=self._env)).wait_ready()

    def ask(self, address):
        command = [sys.executable, "-c", ASK, address]
        return subprocess.run(command, env=self._env, check=True, capture_output=True, text=True).stdout


def workers_come(server, models):
    """Waits until models that dial in are there."""
    for model in models:
        eventually(lambda model=model: server.client.get(f"/models/{model}").status_code == 200, f"a worker of {model}")


def answers(server, calls):
    """What a client is answered; ids differ each time."""
    told = [server.call(*call) for call in calls]
    return [[one.status_code, one.text.replace(one.headers.get("x-request-id", "-"), "ID")] for one in told]


def with_worker(server_of, worker_of, door, calls, address=None):
    """Calls a server whose models have workers of another version, which may dial another address."""
    server = server_of.serve(None, "--attach", door, *secret_for(door))
    models = {model for model, _ in calls}
    for model in models:
        worker_of.work(model.title(), address or door)
    workers_come(server, models)
    return answers(server, calls)


def with_front(owner_of, front_of, door, calls, address=None):
    """Calls a front whose owner is of another version."""
    owner_of.serve(FILE, "--attach", door, *secret_for(door), "--worker-kind", "thread")
    front = front_of.serve(None, "--owner", address or door, *secret_for(door))
    return answers(front, calls)


def with_member(server_of, member_of, door, _calls):
    """Asks servings of a member of another version than the server and the member that asks."""
    server_of.serve(None, "--attach", door, *secret_for(door))
    member_of.join(door)
    return server_of.ask(door), member_of.ask(door)


def secret_for(door):
    """What a server is told for a network: over a Unix socket the worker of the same user needs none."""
    return ("--attach-secret", SECRET) if door.startswith("tcp:") else ()


@contextmanager
def with_bucket(version, folder, cache):
    """A server of a model that lies in a bucket, which always has the same files."""
    with running_buckets(folder) as buckets:
        buckets.make("greetings")
        buckets.put("greetings/formal/7/text.txt", b"Dear")
        os.utime(buckets.folder / "greetings/formal/7/text.txt", (1.7e9, 1.7e9))  # by which this store knows it again
        env = {**buckets.environment(), "FOREBAY_TEST_BUCKET": "s3://greetings"}
        options = ["--repository-folder", str(cache), "--worker-kind", "thread"]
        server = version.serve(MODELS / "stocked.py", *options, env=env)
        yield server
        server.stop()


def used_cache(version, folder, cache):
    """What a server answers by the copies that it finds, and whether it copied any."""
    with with_bucket(version, folder, cache) as server:
        answer = server.call("formal", "Ada").json()
        return answer, server.metric("forebay_repository_copied_bytes_total") == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit")
    commit = parser.parse_args().commit
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        here, there = ROOT / "src", unpacked(commit, Path(made))
        calls = [*CALLS, *LONG]
        alone = answers(Version(here, stack).serve(FILE, "--worker-kind", "thread"), calls)
        with ExitStack() as inner:
            members = with_member(Version(here, inner), Version(here, inner), f"unix:{made}/members", calls)
        print(members[0])
        for one, other, words in [(here, there, "this server, that"), (there, here, "that server, this")]:
            for kind, together in [("worker", with_worker), ("front", with_front), ("member", with_member)]:
                for door in (f"unix:{made}/{words[:4]}{kind}", f"tcp:127.0.0.1:{free_port()}"):
                    with ExitStack() as inner:
                        told = together(Version(one, inner), Version(other, inner), door, calls)
                    is_same = "the same answers" if told == (members if kind == "member" else alone) else f"{told}"
                    print(f"{words} {kind}, {door.partition(':')[0]}: {is_same}"[:2000])
            with ExitStack() as inner, tempfile.TemporaryDirectory() as folder:
                first, second = Path(folder, "first"), Path(folder, "second")
                first.mkdir()
                second.mkdir()
                used_cache(Version(other, inner), first, Path(folder, "cache"))
                told = used_cache(Version(one, inner), second, Path(folder, "cache"))
                print(f"{words} cache: {told[0]!r}, {'nothing was' if told[1] else 'models were'} copied again")


if __name__ == "__main__":
    main()
