# SPDX-License-Identifier: Apache-2.0
"""The file by which a supervisor sees how a worker is."""

import os
import socket

import pytest

from forebay.errors import ConfigError
from forebay.workers.processes.health_file import STUCK_S, HealthFile


@pytest.fixture
def link():
    here, there = socket.socketpair()
    with here, there:
        yield here, there


@pytest.fixture
def path(tmp_path):
    return tmp_path / "health"


def is_touched(path, tell):
    """Tells whether this touches the file."""
    os.utime(path, (0, 0))
    tell()
    return path.stat().st_mtime > 0


def test_the_file_is_there_while_a_connection_is(path, link):
    path.write_text("of one that was killed")
    health = HealthFile(str(path))
    assert not path.exists()
    health.tell([])
    assert not path.exists()
    health.tell([link[0].fileno()])
    assert path.exists()
    health.tell([])
    assert not path.exists()


def test_a_slot_that_goes_on_after_the_server_has_hung_up_is_stuck_after_a_while(path, link):
    health, connection = HealthFile(str(path)), link[0].fileno()
    health.tell([connection], 0.0)
    assert is_touched(path, lambda: health.tell([connection], 1.0))
    link[1].close()
    one, two = socket.socketpair()  # another slot, which is well
    with one, two:
        both = [connection, one.fileno()]
        assert is_touched(path, lambda: health.tell(both, 10.0))
        assert is_touched(path, lambda: health.tell(both, 10.0 + STUCK_S))
        assert not is_touched(path, lambda: health.tell(both, 11.0 + STUCK_S))
        assert path.exists()
        assert is_touched(path, lambda: health.tell([one.fileno()], 12.0 + STUCK_S))  # it has ended its batch


def test_a_path_where_no_file_can_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--health-file: .* cannot be made: No such file or directory"):
        HealthFile(str(tmp_path / "none/health"))
