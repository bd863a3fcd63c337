# SPDX-License-Identifier: Apache-2.0
"""The tutorial as a reader follows it: a fresh environment, every command, every output as it stands there. F59"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.conftest import Server
from tests.waiting import PATIENCE_S, eventually

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/tutorial.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
UV = Path(sys.executable).with_name("uv")
INSTALL = f"{shlex.quote(str(UV))} pip install -q --system-certs -c {shlex.quote(str(ROOT / 'constraints.txt'))}"
# What takes the place of a command: uv is quicker, and the versions are those of all tests.
INSTEAD = {
    "python3 -m venv venv": f"{shlex.quote(str(UV))} venv -q venv",
    ". venv/bin/activate": ":",
    "pip install .": f"{INSTALL} {shlex.quote(str(ROOT))}",
    "pip install pytest": f"{INSTALL} pytest",
}


def steps(text):
    """The page in order: ("file", name, text) and ("command", command, output)."""
    for kind, block in FENCE.findall(text):
        if kind == "python":
            name = re.match(r"# (\w+\.py)\n", block)
            assert name, block
            yield "file", str(name[1]), block
        else:
            assert kind == "console", kind
            for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE):
                yield "command", command, output


def is_as_shown(shown, got):
    def plain(text):
        return re.sub(r"\b\d+(\.\d+)?(?= ms\b|s$)", "N", text, flags=re.MULTILINE).rstrip()

    return re.fullmatch(re.escape(plain(shown)).replace(r"\.\.\.", ".*?"), plain(got), re.DOTALL) is not None


class Reader:
    """Does what the page says, below a folder, with one server at a time at a port of its own."""

    def __init__(self, folder):
        self.folder, self.server = folder, None
        path = f"{folder / 'venv/bin'}:{os.environ['PATH']}"
        self.env = {**os.environ, "PATH": path, "VIRTUAL_ENV": str(folder / "venv")}
        self.env.pop("PYTHONPATH", None)
        if not os.access(Path("~").expanduser(), os.W_OK):  # the Makefile has installers do the same
            self.env["XDG_CACHE_HOME"] = str(Path(sys.prefix, "cache"))
        self.stopped: list[int] = []

    def run(self, command):
        if command.startswith("forebay serve "):
            self.stop()
            target, *options = command.split()[2:]
            program = str(self.folder / "venv/bin/forebay")
            started = Server(self.folder / target, *options, command=[program, "serve"], env=self.env)
            self.server = started.wait_ready()
            eventually(lambda: "curl" in started.log)  # the last line that it says
            return self.server.log.replace(str(self.server.port), "8080")
        if self.server is not None:
            command = command.replace("8080", str(self.server.port))
        command = INSTEAD.get(command, command)
        return subprocess.run(
            ["sh", "-c", str(command)],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        ).stdout

    def stop(self):
        if self.server is not None:
            self.server.signal(signal.SIGINT)
            self.stopped.append(self.server.wait())
            self.server.stop()
            self.server = None


def test_who_follows_the_tutorial_sees_what_it_says(tmp_path):
    if not UV.exists():
        pytest.skip("no uv here, and pip takes a minute")
    reader, begun, wrong, first = Reader(tmp_path), time.monotonic(), [], None
    try:
        for kind, command, text in steps(PAGE.read_text()):
            if kind == "file":
                (tmp_path / command).write_text(text)
                continue
            got = reader.run(command)
            if not is_as_shown(text, got):
                wrong.append(f"$ {command}\n{got}--- instead of\n{text}")
            if command.startswith("forebay call") and first is None:
                first = time.monotonic() - begun
    finally:
        reader.stop()
    assert not wrong, "\n".join(wrong)
    assert first is not None
    assert first < 60  # seconds from an empty folder to the first answer
    assert reader.stopped == [0] * 4


@pytest.mark.parametrize(
    "shown,got", [("200 3 bytes 7.4 ms\n7.0\n", "200 3 bytes 3 ms\n7\n"), ("a\n...\nd", "a\nb\n"), ("", "an error")]
)
def test_an_output_that_is_not_as_shown_is_noticed(shown, got):
    assert not is_as_shown(shown, got)
