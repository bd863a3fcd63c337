# SPDX-License-Identifier: Apache-2.0
"""The server's end of one connection of a worker, in a thread: what drives a `Conversation` with blocking calls."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from typing import TYPE_CHECKING, Any

from forebay.errors import ConfigError, ModelError, revive
from forebay.observe import model_log
from forebay.observe.author_metrics import MetricStore
from forebay.types.batch import EntryBatch
from forebay.types.call import Failure
from forebay.types.server_state import here
from forebay.workers import shm
from forebay.workers.conversation import Conversation
from forebay.workers.worker_events import Counted, Failed, Heard, Hello, Logged, Ready, Result, Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from forebay.observe.model_log import Voice
    from forebay.workers.worker_events import Event

log = logging.getLogger("forebay.workers")

_RECEIVE_BYTES = 1 << 18


class BlockingSlot:
    """One worker and the one thread that gives it batches of one entry; only `stop` and `hang_up` are for others.

    A worker that violates the protocol is treated as gone.

    Args:
        accepted: The connection; belongs to the slot from then on.
        voice: Writes what the worker logs and prints; None leaves that to the worker.
        labels: What its gauges are labelled with, beside the worker.
    """

    def __init__(self, accepted: socket.socket, voice: Voice | None, labels: Mapping[str, str]) -> None:
        self._socket = accepted
        self._voice = voice
        self._labels = labels
        self._metrics = here(MetricStore)
        self._conversation = Conversation()
        self._buffer = memoryview(bytearray(_RECEIVE_BYTES))
        self._events: Iterator[Event] = iter(())

    def open(self, options: Mapping[str, Any]) -> None:
        """Tell the worker what to run and wait until it is ready.

        Raises:
            ConfigError, ModelError: It could not open that.
            EOFError, OSError: It is gone.
        """
        if self._voice is not None:
            options = {**options, "log": model_log.level}
        while True:
            match self._next():
                case Hello():
                    self._socket.sendall(self._conversation.open(options, shm.make_arenas()))
                case Ready():
                    return
                case Failed(kind, message, detail, trace):
                    error = revive(kind, message, detail, trace)
                    raise error if isinstance(error, ConfigError) else ModelError(message, detail=detail, trace=trace)
                case _:
                    pass

    def is_open(self) -> bool:
        """Look, without waiting, whether the worker is still there."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
        except BlockingIOError:
            return True
        except OSError:
            return False

    def run(self, body: Any, on_part: Callable[[Any], object] | None = None) -> Any:
        """Have the worker run a batch of one entry and return its outcome.

        Args:
            body: The entry's.
            on_part: Called with each part of a streamed answer; None where none may come.

        Raises:
            ForebayError: What it failed with; the worker is ready for the next one.
            EOFError, OSError: The worker is gone.
        """
        conversation = self._conversation
        problem: Exception | None = None

        def on_steps(steps: Sequence[Sequence[Any]], release: Callable[[], object]) -> None:
            nonlocal problem
            for (part,) in steps:
                if part is not None and problem is None and on_part is not None:
                    try:
                        on_part(part)
                    except Exception as error:  # noqa: BLE001 - raised when the worker is done
                        problem = error
            release()

        batch = EntryBatch([body], None, 1, on_steps=None if on_part is None else on_steps)
        self._socket.sendall(conversation.begin(batch, _nothing, [body], {}, None, time.monotonic()))
        while True:  # to the end, whatever happens: the next batch begins with the next event
            event = self._next()
            if isinstance(event, Heard):
                conversation.seating.hear(event.parts, event.ended, _nothing, self._go)
            elif isinstance(event, Result):
                (outcome,) = event.outcomes
                if not event.is_ready:
                    self._socket.sendall(conversation.written())
                    while not isinstance(self._next(), Ready):
                        pass
                if type(outcome) is Failure:
                    raise outcome.error
                if problem is not None:
                    raise problem
                return outcome

    def _go(self) -> None:
        frame = self._conversation.go(time.monotonic())
        if frame is not None:
            self._socket.sendall(frame)

    def stop(self) -> None:
        """Tell the worker to end once it has answered."""
        with contextlib.suppress(OSError):
            self._socket.sendall(self._conversation.stop())

    def hang_up(self) -> None:
        """End any wait for the worker; may be called from any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket and the memory back."""
        self._socket.close()
        self._metrics.gone(self)
        self._conversation.close()

    def _next(self) -> Event:
        """Wait for the next event, and write lines of the log that come before it.

        Raises:
            EOFError: The worker is gone.
        """
        while True:
            while (event := next(self._events, None)) is None:
                size = self._socket.recv_into(self._buffer)
                if not size:
                    raise EOFError
                self._events = self._conversation.feed(self._buffer[:size], time.monotonic())
            if isinstance(event, Counted):
                self._metrics.told(self, {**self._labels, "worker": self._conversation.worker}, event.data)
            elif not isinstance(event, Logged):
                break
            elif self._voice is not None:
                self._voice.say(event.line)
        if isinstance(event, Violation):
            log.warning("a worker is hung up on: %s", event.reason)
            raise EOFError(event.reason)  # noqa: TRY004 - it is as good as gone
        return event


def _nothing(*_what: object) -> None:
    """Nobody waits for this."""
