# SPDX-License-Identifier: Apache-2.0
"""Makes two environments with different versions of numpy, attaches a worker from each to one server, and kills one.

Needs nothing but the standard library and a network or a folder of wheels to install from; with uv it takes seconds,
with pip half a minute the first time. The exit status is 0 only if no request was lost.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
ENVIRONMENTS = HERE / "out"
# Python 3.13 has no wheel of numpy 1, and 3.14 none of 2.2.
VERSIONS = ("1.26.4", "2.2.6")
if sys.version_info >= (3, 13):
    VERSIONS = ("2.1.0", "2.2.6") if sys.version_info < (3, 14) else ("2.3.2", "2.3.5")
FOREBAY = ["-e", str(REPOSITORY)] if (REPOSITORY / "pyproject.toml").exists() else ["forebay"]
CLIENTS = 8
PATIENCE_S = 30.0


def make_environment(version: str) -> Path:
    """Returns the folder of an environment with that numpy and forebay; its own packages only, none of the server's."""
    folder = ENVIRONMENTS / f"numpy-{version}"
    done = folder / "done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    packages = [f"numpy=={version}", "msgspec", *FOREBAY]  # a worker needs no more of forebay's requirements
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    env = {**os.environ, "UV_FIND_LINKS": os.environ.get("UV_FIND_LINKS", os.environ.get("PIP_FIND_LINKS", ""))}
    if not env["UV_FIND_LINKS"]:
        del env["UV_FIND_LINKS"]
    commands = [
        [uv, "venv", "--quiet", "--python", sys.executable, str(folder)],
        [uv, "pip", "install", "--quiet", "--system-certs", "--no-deps", "--python", python, *packages],
    ]
    if uv is None or any(subprocess.run(command, env=env, check=False).returncode for command in commands):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *packages], check=True)
    done.touch()
    return folder


class Program:
    """A process with the lines it writes."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self.log = ""
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.log += line
                self._news.notify_all()

    def find(self, pattern: str) -> str:
        """Waits until it says so and returns what is in the parentheses."""
        with self._news:
            if not self._news.wait_for(lambda: re.search(pattern, self.log), PATIENCE_S):
                raise SystemExit(f"it did not say {pattern!r} but:\n{self.log}")
            found = re.search(pattern, self.log)
            assert found is not None
            return found[1]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal, if it still runs, and returns the exit status."""
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


class Load:
    """Clients that ask, one request after the other, and count who answered."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.answers: Counter[str] = Counter()
        self.lost: list[str] = []
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(CLIENTS)
        self._clients = [self._threads.submit(self._ask) for _ in range(CLIENTS)]

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=PATIENCE_S)
        body = json.dumps([3.0, 1.0, 4.0, 1.0, 5.0])
        while not self._stop.is_set():
            connection.request("POST", "/models/summary", body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status == 200 and json.loads(text)["median"] == 3.0:
                self.answers[json.loads(text)["numpy"]] += 1
            else:
                self.lost.append(f"{answer.status} {text.decode()}")
        connection.close()

    def until(self, *versions: str) -> dict[str, int]:
        """Waits until each of these versions has answered another hundred requests, and returns all since now."""
        before = self.answers.copy()
        deadline = time.monotonic() + PATIENCE_S
        while any(self.answers[version] < before[version] + 100 for version in versions):
            if time.monotonic() > deadline:
                raise SystemExit(f"not all of {versions} answered: {self.answers - before}")
            time.sleep(0.02)
        return dict(self.answers - before)

    def stop(self) -> None:
        """Lets every client finish its request."""
        self._stop.set()
        for client in self._clients:
            client.result()
        self._threads.shutdown()


def show(what: str, found: dict[str, int]) -> None:
    answered = ", ".join(f"numpy {version}: {count}" for version, count in sorted(found.items()))
    print(f"{what:48} {answered}")


def run(folder: Path) -> int:
    with ThreadPoolExecutor() as executor:
        old, new = executor.map(make_environment, VERSIONS)
    address = f"unix:{folder / 'socket'}"
    programs: list[Program] = []

    def start(*command: str) -> Program:
        programs.append(Program(*command))
        return programs[-1]

    def attach(environment: Path) -> Program:
        worker = start(str(environment / "bin" / "forebay"), "worker", str(HERE / "model.py"), "--connect", address)
        worker.find(r"(ready); attached")
        return worker

    try:
        server = start(sys.executable, "-m", "forebay", "serve", "--attach", address, "--http-port", "0")
        url = server.find(r"ready at http://(\S+)")
        doomed = attach(old)
        server.find(r"(serving model 'summary')")
        load = Load(url)
        show("one worker", load.until(VERSIONS[0]))
        attach(new)
        show("two workers of two environments, one endpoint", load.until(*VERSIONS))
        doomed.end(signal.SIGKILL)
        show("the first one killed while it worked", load.until(VERSIONS[1]))
        attach(old)
        show("started again", load.until(*VERSIONS))
        load.stop()
        print(f"{load.answers.total()} requests answered, {len(load.lost)} lost")
        for text in load.lost[:3]:
            print(text)
    finally:
        status = [program.end() for program in reversed(programs) if program.process.poll() is None]
    return 1 if load.lost or any(status) else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder))


if __name__ == "__main__":
    sys.exit(main())
