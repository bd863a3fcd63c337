# SPDX-License-Identifier: Apache-2.0
"""Private folders end with their server, whenever that ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from tests.waiting import PATIENCE_S

from forebay.workers.processes import private_folder
from forebay.workers.processes.private_folder import PrivateFolder

DIES = """
import os, signal, sys
from pathlib import Path
from forebay.workers.processes import private_folder

def die(*_arguments):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[2] == "before":
    private_folder._lock = die
made = private_folder.PrivateFolder(Path(sys.argv[1]))
(made.path / "kept").touch()
if sys.argv[2] == "guarded":
    made.guard()
die()
"""


def killed(folder, when):
    """The end of a process that is killed at some time of the life of its folder."""
    process = subprocess.Popen([sys.executable, "-c", DIES, folder, when])
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    return process.pid


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_next_server_removes_the_folder_of_one_that_was_killed(tmp_path, when):
    # also of one that was killed before it had its lock
    pid = killed(tmp_path, when)
    assert [path.name.startswith(f"forebay-{pid}-") for path in tmp_path.iterdir()] == [True]
    made = PrivateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [made.path]
    made.remove()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_guarded_folder_is_gone_without_a_next_server(tmp_path, eventually):
    killed(tmp_path, "guarded")
    eventually(lambda: not list(tmp_path.iterdir()))


def test_a_guard_ends_with_its_folder(tmp_path):
    made = PrivateFolder(tmp_path)
    made.guard()
    guard: Any = made._guard
    made.remove()
    assert guard.returncode == 0


def test_a_folder_is_made_where_no_guard_can_be_started(tmp_path, monkeypatch):
    def refuse(*_arguments, **_more):
        raise OSError("no shell")

    monkeypatch.setattr(private_folder.subprocess, "Popen", refuse)
    made = PrivateFolder(tmp_path)
    made.guard()
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_not_a_dead_servers_stay(tmp_path):
    mine = tmp_path / "forebay-models"
    mine.mkdir()
    (mine / "lock").touch()
    full = tmp_path / "forebay-12-abcdefgh"
    full.mkdir()
    (full / "data").touch()
    first, second = PrivateFolder(tmp_path), PrivateFolder(tmp_path)
    assert set(tmp_path.iterdir()) == {mine, full, first.path, second.path}
    assert list(mine.iterdir()) == [mine / "lock"]
    first.remove()
    second.remove()


def test_what_another_user_left_stays(tmp_path, monkeypatch):
    killed(tmp_path, "after")
    left = set(tmp_path.iterdir())
    monkeypatch.setattr(private_folder.os, "geteuid", lambda: os.getuid() + 1)
    PrivateFolder(tmp_path).remove()
    assert set(tmp_path.iterdir()) == left


def test_who_gets_the_lock_of_a_folder_that_was_removed_meanwhile_makes_another(tmp_path, monkeypatch):
    flock, removed = private_folder.fcntl.flock, []

    def late(descriptor, how):
        if not removed:
            (folder,) = tmp_path.iterdir()
            (folder / "lock").unlink()
            folder.rmdir()
            removed.append(folder)
        flock(descriptor, how)

    monkeypatch.setattr(private_folder.fcntl, "flock", late)
    made = PrivateFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [made.path] != removed
    made.remove()
    assert list(tmp_path.iterdir()) == []
