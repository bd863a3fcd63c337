# SPDX-License-Identifier: Apache-2.0
"""A worker with several slots, some of which are refused."""

from __future__ import annotations

import socket
from unittest.mock import Mock

import pytest
from tests.waiting import PATIENCE_S

from forebay.workers.processes.joining import JoiningWorker
from forebay.workers.wire import address
from forebay.workers.wire.address import TcpAddress, UnixAddress
from forebay.workers.wire.worker_connection import DialledServer, WorkerConnection, WorkerRefused


def test_a_worker_that_is_refused_several_slots_says_once_that_it_leaves():
    worker = JoiningWorker(DialledServer(UnixAddress("socket")), {}, threads=3)
    connection = Mock(spec=WorkerConnection)
    worker._connections.add(connection)
    for _ in range(2):
        worker._give_up(WorkerRefused("all connections for workers are taken"))
    connection.leave.assert_called_once()


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_worker_without_a_secret_sends_a_stranger_nothing(tmp_path, monkeypatch, kind):  # F134
    if kind == "unix":
        monkeypatch.setattr(address, "user_of", lambda _connection: 65_534)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / "s"))
        server.listen()
        there, owner = UnixAddress(str(tmp_path / "s")), "the user 65534"
    else:
        monkeypatch.setattr(address.ipaddress.IPv4Address, "is_loopback", False)
        server = socket.create_server(("127.0.0.1", 0))
        there, owner = TcpAddress(*server.getsockname()), "another machine"
    with server, pytest.raises(WorkerRefused) as refused:
        JoiningWorker(DialledServer(there), {}, once=True)._dial()
    assert refused.value.message.startswith(f"{there} belongs to {owner}, and a worker without a secret")
    assert "--secret @FILE" in refused.value.message


@pytest.mark.parametrize("kernel_tells", [True, False])
def test_the_owner_of_a_socket_is_who_listens(tmp_path, monkeypatch, kernel_tells):  # F134
    if not kernel_tells:
        monkeypatch.delattr(socket, "SO_PEERCRED", raising=False)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with address.dial(UnixAddress(str(tmp_path / "s")), PATIENCE_S) as connection:
            assert address.user_of(connection) == address.os.geteuid()
            assert address.stranger_at(connection) == ""
            assert kernel_tells or address.process_of(connection) == 0
