# SPDX-License-Identifier: Apache-2.0
"""The files that say which servers run; whatever ended without removing its own is forgotten by the next server."""

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.surfaces.pipeline import running_servers


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
