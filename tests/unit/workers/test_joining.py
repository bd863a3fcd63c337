# SPDX-License-Identifier: Apache-2.0
"""A worker with several slots, some of which are refused."""

from __future__ import annotations

from unittest.mock import Mock

from forebay.workers.address import UnixAddress
from forebay.workers.joining import JoiningWorker
from forebay.workers.worker_connection import WorkerConnection, WorkerRefused


def test_a_worker_that_is_refused_several_slots_says_once_that_it_leaves():
    worker = JoiningWorker(UnixAddress("socket"), {}, threads=3)
    connection = Mock(spec=WorkerConnection)
    worker._connections.add(connection)
    for _ in range(2):
        worker._give_up(WorkerRefused("all connections for workers are taken"))
    connection.leave.assert_called_once()
