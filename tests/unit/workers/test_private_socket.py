# SPDX-License-Identifier: Apache-2.0
"""The socket at which processes arrive that were started here."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from forebay.workers.processes import private_folder, private_socket
from forebay.workers.processes.private_socket import PrivateSocket


@pytest.fixture
def prefix(monkeypatch, tmp_path):
    found = f"forebay-test-{os.getpid()}-{tmp_path.name}-"
    monkeypatch.setattr(private_folder, "PREFIX", found)
    return found


def folders_of(prefix):
    return list(Path("/dev/shm").glob(prefix + "*"))


def arrives(path, listener):
    with socket.socket(socket.AF_UNIX) as guest:
        guest.connect(path)
        accepted, _ = listener.accept()
        accepted.close()


@pytest.mark.linux
def test_it_is_reached_and_is_in_no_folder(prefix):
    """F26."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    made = PrivateSocket()
    assert folders_of(prefix) == []
    with made.take_listener() as listener:
        arrives(made.path, listener)
        arrives(made.path, listener)
    made.close()
    made.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.mark.linux
def test_after_a_change_of_the_user_the_folder_stays_until_it_closes(prefix, monkeypatch):
    monkeypatch.setattr(private_socket, "_is_open_to_its_user", lambda: False)
    made = PrivateSocket()
    assert [str(folder / "socket") for folder in folders_of(prefix)] == [made.path]
    with made.take_listener() as listener:
        arrives(made.path, listener)
    made.close()
    assert folders_of(prefix) == []


def test_a_folder_that_another_server_took_for_a_dead_ones_is_made_again(prefix, monkeypatch):
    lock, troubles = private_folder._lock, [BlockingIOError(), FileNotFoundError()]

    def disturbed(folder, flags):
        if flags and troubles:
            folder.rmdir()
            raise troubles.pop()
        return lock(folder, flags)

    monkeypatch.setattr(private_folder, "_lock", disturbed)
    PrivateSocket().close()
    assert troubles == []
    assert folders_of(prefix) == []
