# SPDX-License-Identifier: Apache-2.0
"""The heartbeat of a worker that joins over a network.

Theory of operation. A model may hold the interpreter's lock for as long as it likes, and then no thread of its process
answers anything. So a process of its own beats for the worker: it is forked off before there is any code of the
user's, has a connection of its own on the same way to the same server, and ends with the worker. Whether the model
goes on for too long is another question, and has a limit of its own on the server. When the server is silent, the
process tells the worker, which dials again; and so does the process.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from forebay.errors import InvalidRequest
from forebay.workers.processes.parent_death import end_with
from forebay.workers.wire.heartbeat import BEAT, BEAT_S, Heartbeat
from forebay.workers.wire.redialling import MAX_PAUSE_S, Pauses
from forebay.workers.wire.worker_connection import WorkerConnection, WorkerRefused

ROLE: Final = "pulse"
"""What the hello says that such a connection is."""
_SIGNAL: Final = b"!"
_LOST: Final = (EOFError, OSError, InvalidRequest)


class WorkerPulse:
    """The process that beats, as its worker sees it.

    Attributes:
        worker: The name of the worker, in all of its connections.
    """

    def __init__(self, dial: Callable[[dict[str, Any]], WorkerConnection]) -> None:
        """Fork the process off; it waits for `begin`. `dial` connects, saying this in the hello."""
        self.worker = secrets.token_hex(16)
        self._line, its_end = socket.socketpair()
        worker = os.getpid()
        self._process = os.fork()
        if self._process == 0:
            try:
                self._line.close()
                _beat_for(worker, its_end, lambda: dial({"role": ROLE, "worker": self.worker}))
            finally:
                os._exit(0)
        its_end.close()

    def begin(self, on_silence: Callable[[], object]) -> None:
        """Beat from now on; `on_silence` is called, in a thread, whenever the server is not heard any more."""

        def listen() -> None:
            while self._line.recv(len(_SIGNAL)):
                on_silence()
            os.waitpid(self._process, 0)

        self._line.sendall(_SIGNAL)
        threading.Thread(target=listen, name="forebay-pulse", daemon=True).start()


def _beat_for(worker: int, line: socket.socket, dial: Callable[[], WorkerConnection]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they may reach the whole group
        signal.signal(number, signal.SIG_IGN)
    if not end_with(worker) or not line.recv(len(_SIGNAL)):
        return
    pauses = Pauses()
    while True:
        try:
            connection = dial()
        except WorkerRefused:
            time.sleep(MAX_PAUSE_S)
        except _LOST:
            time.sleep(pauses.next_s())
        else:
            pauses.begin_again()
            try:
                _keep_beating(connection)
                line.sendall(_SIGNAL)
            except _LOST:
                pass  # what has ended, the worker's own connections have seen as well
            connection.close()


def _keep_beating(connection: WorkerConnection) -> None:
    """Beat until the server is silent; raises if the connection has ended."""
    heartbeat = Heartbeat()
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    while True:
        connection.send([BEAT])
        due = time.monotonic() + BEAT_S
        while (left_s := due - time.monotonic()) > 0:
            if poll.poll(left_s * 1000) and connection.receive_all(wait=False):
                heartbeat.heard()
        if not heartbeat.tick():
            return
