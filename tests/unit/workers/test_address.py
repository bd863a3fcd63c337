# SPDX-License-Identifier: Apache-2.0
"""Connections to other machines, which may be cut off without a word."""

from __future__ import annotations

import contextlib
import itertools
import socket

import pytest
from tests.waiting import PATIENCE_S

from forebay.workers.wire import address
from forebay.workers.wire.address import TcpAddress, dial


@contextlib.contextmanager
def listening():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        yield TcpAddress("127.0.0.1", server.getsockname()[1])


@pytest.mark.linux
def test_a_server_that_does_not_receive_what_is_sent_counts_as_gone_after_half_a_minute():
    with listening() as there, dial(there, PATIENCE_S) as connection:
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


def fill(there, waiting):
    """Dials until nobody more may wait to be let in: the kernel then drops what comes."""
    for _ in itertools.count():
        waiting.enter_context(dial(there, PATIENCE_S))


def test_a_machine_that_does_not_answer_is_called_again_soon(monkeypatch):
    monkeypatch.setattr(address, "CONNECT_S", 0.1, raising=False)
    with listening() as there, contextlib.ExitStack() as waiting, pytest.raises(TimeoutError):
        fill(there, waiting)
