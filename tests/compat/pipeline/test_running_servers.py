# SPDX-License-Identifier: Apache-2.0
"""The files that say which servers run; whatever ended without removing its own is forgotten by the next server."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.waiting import PATIENCE_S

from forebay.surfaces.pipeline import running_servers
from forebay.workers.processes.process_life import birth_of


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return running_servers.state_folder()


@pytest.fixture
def gone():
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


@pytest.mark.parametrize("content", ["", '{"pid": 1', '{"pid":%d,"born":1,"ports":[9998],"script":"server.py"}'])
def test_the_next_server_removes_the_file_of_one_that_was_killed(folder, gone, content):
    # also of one that was killed while it wrote its file
    folder.mkdir(parents=True)
    (folder / f"{gone}.json").write_text(content % gone if "%" in content else content)
    (folder / "notes.json").write_text("not a server's")
    mine = running_servers.announce((9999,), "server.py")
    assert set(folder.iterdir()) == {mine, folder / "notes.json"}
    assert [server.ports for server in running_servers.servers()] == [(9999,)]


def test_a_disk_without_room_for_the_file_is_told_and_keeps_no_piece_of_it(folder, monkeypatch):
    def write(self, data):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    with pytest.raises(OSError, match="No space left"):
        running_servers.announce((9999,), "server.py")
    assert list(folder.iterdir()) == []


def test_a_server_is_stopped_where_the_system_has_no_descriptors_of_processes(monkeypatch, gone):
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        threading.Thread(target=process.wait).start()  # its id is free once somebody knows
        server = running_servers.Running(process.pid, birth_of(process.pid) or 0, (), "server.py")
        other = running_servers.Running(process.pid, 1, (), "server.py")
        assert running_servers.stop(other, signal.SIGKILL, PATIENCE_S)  # has ended: another one has its id
        assert process.returncode is None
        assert running_servers.stop(server, signal.SIGTERM, PATIENCE_S)
    assert process.returncode == -signal.SIGTERM
    assert running_servers.stop(running_servers.Running(gone, 1, (), "server.py"), signal.SIGTERM, PATIENCE_S)
