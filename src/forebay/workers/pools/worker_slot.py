# SPDX-License-Identifier: Apache-2.0
"""The server's end of one connection of a worker, on a loop: what drives a `Conversation` (conversation.py).

Every state ends when the connection closes, which the kernel tells at once however the process died. A worker that
violates the protocol is hung up on, and what it was running is handed on like the batch of one that died.
"""

from __future__ import annotations

import asyncio
import functools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forebay.errors import ForebayError, InvalidRequest
from forebay.observe.logs.model_log import Voice
from forebay.types.call import Failure
from forebay.types.failures import without_frames
from forebay.workers.pools.slot_pool import DialledSlot, SlotPool, running
from forebay.workers.wire import frames
from forebay.workers.wire.conversation import Conversation
from forebay.workers.wire.worker_events import (
    Counted,
    Event,
    Failed,
    Heard,
    Hello,
    Kept,
    Leaving,
    Logged,
    Ready,
    Result,
    Violation,
)

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch
    from forebay.workers.pools.seating import Seating

MAX_UNREAD = 3
"""Workers that may die before they have read a batch; from then on the batch itself is likely what ends them."""


class WorkerSlot(DialledSlot):
    """The server's end of one connection of a worker."""

    def __init__(
        self,
        pool: SlotPool[Any],
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        check: Callable[[EntryBatch, Sequence[Any]], None] | None = None,
        max_elements: int | None = None,
    ) -> None:
        """Make a slot.

        Args:
            check: Given a batch and its outcomes, or the parts of one step, raises `InvalidRequest` if they are not of
                the types the endpoint answers with; None where the worker is forebay's own.
            max_elements: The most values in a frame; None where the worker is forebay's own.
        """
        super().__init__()
        self._pool = pool
        self._conversation = Conversation(
            max_frame_bytes, check, pool.seats, self._speak, pool.ahead, max_elements, time.monotonic
        )
        self.seating.accounts = pool.accounts
        self._speaks = False
        self.worker: Any = None
        self._kept: list[Any] = []
        """Bodies that the worker's model still refers to; given back when the worker is gone."""
        self._voice: Voice | None = None
        self._counts_as: tuple[str, int, int] | None = None

    @property
    def seating(self) -> Seating:
        """The batches that run there."""
        return self._conversation.seating

    def is_running(self, batch_id: int) -> bool:
        """Tell whether it has not answered this batch."""
        return batch_id in self.seating.open

    @property
    def owes_since(self) -> float | None:
        """Since when the worker owes the next sign of life; None while it is idle or waits for slow clients."""
        return self._conversation.owes_since

    def data_received(self, data: bytes) -> None:
        """Act on what the worker says."""
        for event in self._conversation.feed(data, time.monotonic()):
            self._act(event)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the pool, which hands the batch on."""
        if isinstance(exc, ConnectionError):
            self._count_as_unread()
        self._conversation.close()
        self._kept.clear()  # its worker is gone: nothing refers to these bodies any more
        if self._counts_as is not None:
            self._pool.metrics.gone(self._counts_as)
        self._pool.gone(self)

    def _count_as_unread(self) -> None:
        """Do not count the batch as tried where the kernel says that the worker died before it had read all of it.

        It says so by an error of the connection, or has not even taken all that was to be written. It says only that
        something was not read, but that is the batch or what came after it, for all is read in order; and what may come
        after it while it runs (`go`, `stop`) goes with batches that are not handed on.
        """
        if self._conversation.state != "busy" or not self._is_local():
            return
        for sitting in self.seating.open.values():
            batch = sitting.batch
            if not batch.cancelled and batch.unread < MAX_UNREAD:
                batch.attempts -= 1
                batch.unread += 1

    def _is_local(self) -> bool:
        """Tell whether the worker is on this machine, so that nobody between us ends the connection."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return sock is not None and sock.family == socket.AF_UNIX  # of TLS there is none once it is closed

    def fileno(self) -> int:
        """Return the descriptor of the connection, for `select`; -1 if there is none."""
        sock = None if self._transport is None else self._transport.get_extra_info("socket")
        return -1 if sock is None else sock.fileno()

    def open(self, options: Mapping[str, Any]) -> None:
        """Answer a hello."""
        if self._pool.log_level is not None:
            options = {**options, "log": self._pool.log_level}
        if self.seating.is_billed:
            options = {**options, "costs": True}
        self._write(self._conversation.open(options, self._pool.shared()))

    def run(self, batch: EntryBatch, done: Done) -> None:
        """Give the worker a batch; one that cannot be sent fails at once and leaves the slot idle."""
        if self._transport is not None and self._transport.is_closing():
            self._conversation.close()  # it has ended, and nothing is written to it any more
        if self._conversation.state == "gone":
            self.seating.join(batch, done)
            batch.attempts -= 1
            return  # `connection_lost` is on its way and hands the batch on; it was not tried here
        entries = batch.entries
        params: Any = entries[0].params
        for entry in entries:
            if entry.params is not params:
                params = [entry.params for entry in entries]
                break
        sizes = None if batch.rows == len(entries) else [entry.size for entry in entries]
        bodies = [entry.body for entry in entries]
        if self.seating.seats:
            self._seat(batch, done, bodies, params, sizes)
            return
        try:
            frame = self._conversation.begin(batch, done, bodies, params, sizes, time.monotonic())
        except ForebayError as error:
            failure = Failure(without_frames(error))  # its frames would hold it, and the batch
            self._pool.ready(self, before=lambda: done(batch, [failure] * len(entries)))
            return
        if self._transport is not None:
            self._transport.write(frame)

    def _seat(self, batch: EntryBatch, done: Done, bodies: list[Any], params: Any, sizes: list[int] | None) -> None:
        try:
            self._conversation.seat(batch, done, bodies, params, sizes)
        except ForebayError as error:
            failure = Failure(without_frames(error))  # its frames would hold it, and the batch
            self._pool.freed(self, batch.rows)
            done(batch, [failure] * len(batch.entries))
            return
        if batch.noted is not None:
            noted = batch.noted
            noted.worker, noted.pid = self._conversation.worker, self._conversation.pid
            noted.started = time.monotonic()

    def _speak(self, left: int | None) -> None:
        """Tell the worker what is new, at the end of this turn: all that comes in it is one frame."""
        if left is not None:
            self._pool.called_off(self, left)
        if not self._speaks:
            self._speaks = True
            asyncio.get_running_loop().call_soon(self._say)

    def _say(self) -> None:
        if self._speaks:
            self._go()

    def _go(self) -> None:
        self._speaks = False
        frame = self._conversation.go(time.monotonic())
        if frame is not None:
            self._write(frame)

    def stop(self) -> None:
        """Tell the worker to end once it has answered."""
        self._say()
        self._write(self._conversation.stop())

    def hear_out(self) -> None:
        """Read what a worker said before it ended, then close the connection."""
        transport, descriptor = self._transport, self.fileno()
        if transport is not None and transport.is_closing():
            return  # `connection_lost` is on its way, and knows why
        is_unread = False
        try:
            while descriptor >= 0 and transport is not None and not transport.is_closing():
                data = os.read(descriptor, 1 << 18)
                if not data:
                    break
                self.data_received(data)
        except OSError as error:  # there is no more
            is_unread = isinstance(error, ConnectionError)
        if is_unread or (transport is not None and transport.get_write_buffer_size()):
            self._count_as_unread()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connection; `connection_lost` follows."""
        self._conversation.close()
        if self._transport is not None:
            self._transport.abort()

    def drop(self, reason: str) -> None:
        """Close the connection, with the reason in the log."""
        self._pool.told("hung up on", self.peer, reason)
        self.hang_up()

    def _act(self, event: Event) -> None:
        match event:
            case Result():
                self._finish(event)
            case Heard(parts, ended):
                self._speaks = True  # what is new goes along with the answer
                self.seating.hear(parts, ended, functools.partial(self._pool.freed, self), self._go)
            case Ready():
                if self._conversation.is_leaving:
                    self.stop()
                else:
                    self._pool.ready(self)
            case Hello(about):
                try:
                    self._pool.greeted(self, about)
                except (InvalidRequest, LookupError, TypeError, ValueError) as error:
                    self.drop(f"it does not speak the protocol: {error}")
            case Logged(batch_id, line):
                self._voice = self._voice or Voice(self._pool.model, self._conversation.worker)
                self._voice.say(line, self._entries_of(batch_id))
            case Counted(data):
                self._counts_as = self._conversation.worker, self._conversation.pid, id(self._pool)
                labels = {**self._pool.labels, "worker": self._conversation.worker}
                self._pool.metrics.told(self._counts_as, labels, data)
            case Kept():
                self._kept = [entry.body for batch in running(self) for entry in batch.entries]
            case Leaving():
                if self.seating.seats or not self.seating.open:  # what has seats goes on to its end
                    self._pool.retire(self)
                    self.stop()
            case Failed(kind, message, detail, trace):
                self._pool.failed(self, kind, message, detail, trace)
                self.hang_up()
            case Violation(reason):
                self.drop(reason)

    def _finish(self, result: Result) -> None:
        batch, done = result.sitting.batch, result.sitting.done
        if result.ran is not None and batch.noted is not None:
            noted = batch.noted
            noted.worker, noted.pid = self._conversation.worker, self._conversation.pid
            noted.started, noted.phases = result.ran
        outcomes = result.outcomes
        if result.is_ready and not self._conversation.is_leaving:
            # The slot counts as idle by the time of the answers: what comes back at once finds room.
            self._pool.ready(self, before=lambda: done(batch, outcomes))
            return
        done(batch, outcomes)
        self._write(self._conversation.stop() if result.is_ready else self._conversation.written())

    def _entries_of(self, batch_id: int) -> list[Any] | None:
        sitting = self.seating.open.get(batch_id)
        return None if sitting is None else sitting.batch.entries

    def _write(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)
