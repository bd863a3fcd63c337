# SPDX-License-Identifier: Apache-2.0
"""A worker of a batching service: dials it, asks for jobs, answers them, until it is told to stop.

Theory of operation. `process` is a function from one payload to one frame; everything else here is one loop around a
socket. A service that is not there yet, or goes away, is dialled again. SIGTERM and `stop` write a byte into a socket
of our own that every wait looks at as well, so a batch that runs is answered first and an idle worker ends at once.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import threading
from collections.abc import Generator
from typing import Final

from forebay.errors import InvalidRequest
from forebay.surfaces.ventu.inference import Answered, BodyRefused, Garbled, HookFailed, Inference, UnfitResult
from forebay.surfaces.ventu.self_serving_files import hand_over
from forebay.types.failures import without_frames
from forebay.workers.wire.job_frames import READY, JobFrameReader, decode_jobs, encode_answer

log = logging.getLogger("ventu.protocol")

FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 1.0
"""Longest pause before the service is dialled again."""
DIAL_S: Final = 5.0
_RECEIVE_BYTES: Final = 1 << 18


class BatchProtocol:
    """The worker."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._stopping = False
        self._wake: socket.socket | None = None

    def process(self, payload: bytes) -> bytes:
        """Answer one batch.

        Args:
            payload: A map of job ids to bodies.

        Returns:
            The frame with the results. Jobs on which the user's code failed are left out of it: the protocol has no
            word for them.

        Raises:
            InvalidRequest: If the payload is something else.
        """
        jobs = decode_jobs(payload)
        log.debug("Received job ids: %s", list(jobs))
        results: dict[str, bytes | str] = {}
        errors: list[str] = []
        for job, outcome in zip(jobs, self._inference.many(list(jobs.values())), strict=True):
            if isinstance(outcome, Answered):
                results[job] = outcome.body
            elif isinstance(outcome, Garbled | BodyRefused):
                log.info("Job %s rejected: %s", job, outcome.reason)
                is_read = isinstance(outcome, BodyRefused)
                results[job] = outcome.body if is_read else self._inference.media.dumps(outcome.reason)
                errors.append(job)
            else:
                _log_failure(job, outcome)
        return encode_answer(results, errors)

    def run(self, addr: str | tuple[str, int], protocol: str = "unix") -> None:
        """Work until SIGTERM or `stop`.

        Args:
            addr: Path of a unix socket, or host and port.
        """
        hand_over(None, "sock.run")
        ours, self._wake = socket.socketpair()
        pause_s = FIRST_PAUSE_S
        try:
            with ours, self._wake, self._sigterm():
                while not self._stopping:
                    try:
                        with _dial(addr, protocol) as connection:
                            log.info("Connected to %s", addr)
                            if self._serve(connection, ours):
                                pause_s = FIRST_PAUSE_S
                    except (OSError, InvalidRequest) as error:
                        log.warning("Batching service at %s: %s; reconnecting", addr, error)
                    if not self._stopping:
                        _readable(ours, timeout_s=pause_s)
                        pause_s = min(pause_s * 2, MAX_PAUSE_S)
        finally:
            self._wake = None
            self._stopping = False

    def stop(self) -> None:
        """End `run` once the batch in hand is answered; safe in other threads and in signal handlers."""
        self._stopping = True
        wake = self._wake
        if wake is not None:
            with contextlib.suppress(OSError):
                wake.send(b"\0")

    def _serve(self, connection: socket.socket, ours: socket.socket) -> bool:
        """Answer batches until the service closes or we stop; returns whether there were any."""
        reader = JobFrameReader()
        has_worked = False
        connection.sendall(READY)
        while True:
            if ours.fileno() in _readable(ours, connection):
                log.info("Close socket")
                return has_worked
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                log.info("The batching service closed the connection")
                return has_worked
            for payload in reader.feed(data):
                connection.sendall(self.process(payload))
                has_worked = True

    @contextlib.contextmanager
    def _sigterm(self) -> Generator[None]:
        """Let SIGTERM stop the worker, unless the program handles it itself."""
        is_ours = threading.current_thread() is threading.main_thread()
        if not is_ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            yield
            return
        signal.signal(signal.SIGTERM, lambda _number, _frame: self.stop())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _readable(*sockets: socket.socket, timeout_s: float | None = None) -> set[int]:
    """Wait until there is something to read; returns from which descriptors."""
    poll = select.poll()  # unlike select, it takes descriptors of any number
    for one in sockets:
        poll.register(one, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}


def _dial(addr: str | tuple[str, int], protocol: str) -> socket.socket:
    if protocol == "unix":
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(addr)
        except BaseException:
            connection.close()
            raise
        return connection
    host, port = addr
    connection = socket.create_connection((host, int(port)), timeout=DIAL_S)
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _log_failure(job: str, outcome: HookFailed | UnfitResult) -> None:
    if isinstance(outcome, HookFailed):
        log.error("Job %s failed", job, exc_info=outcome.error)
        without_frames(outcome.error)
    else:
        log.error("Job %s: the result does not fit the response schema: %s", job, outcome.reason)
