# SPDX-License-Identifier: Apache-2.0
"""The server's end of one connection of a worker that speaks the worker protocol (docs/worker-protocol.md).

A slot's state is one of

    greeting --hello--> opening --ready--> idle --batch--> busy --result--> idle
                                            (busy --result with work--> finishing --ready--> idle)

and every state ends in *gone* when the connection closes, which the kernel tells at once however the process died.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from forebay.errors import InternalError, InvalidRequest, revive
from forebay.types.call import Failure
from forebay.workers import frames, shm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.types.batch import Batch, Done

log = logging.getLogger("forebay.workers")

CREDIT_STEP = 8
"""Steps of a streamed answer after which the worker is told to go on."""

_batch_ids = itertools.count(1)


class Dialled(Protocol):
    """The pool a slot belongs to."""

    def greeted(self, slot: Slot, about: Mapping[str, Any]) -> None:
        """A worker said hello: answer with `slot.open`, or raise `InvalidRequest` to refuse it."""
        ...

    def ready(self, slot: Slot, before: Callable[[], None] | None = None) -> None:
        """The slot asks for work; `before` hands over its last answers."""
        ...

    def failed(self, slot: Slot, kind: str, message: str, detail: Any, trace: str) -> None:
        """The worker could not open its runner."""
        ...

    def called_off(self, slot: Slot, batch_id: int) -> None:
        """Nobody waits any more for what the slot is running."""
        ...

    def gone(self, slot: Slot) -> None:
        """The connection closed."""
        ...

    def arena_path(self) -> str | None:
        """Return a new name for the slot's two arenas, or None where memory cannot be shared."""
        ...


class Slot(asyncio.Protocol):
    """The server's end of one connection of a worker."""

    def __init__(self, pool: Dialled) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._reader = frames.FrameReader(self._view)
        self._outgoing: shm.ArenaWriter | None = None
        self._incoming: shm.ArenaReader | None = None
        self._arena: str | None = None
        self._credit = 0
        self.streamed = False
        self.worker: Any = None
        self.batch: Batch | None = None
        self.batch_id = 0
        self.done: Done | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the worker to speak."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Act on each message; a worker that does not keep to the protocol is hung up on."""
        try:
            for message in self._reader.feed(data):
                self._act(message)
        except (InvalidRequest, LookupError, TypeError, ValueError, OSError) as error:
            log.warning("a worker does not speak the protocol and is hung up on: %s", error)
            self.hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the pool, which hands the batch on."""
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        self._pool.gone(self)

    def open(self, options: Mapping[str, Any]) -> None:
        """Answer a hello."""
        self._arena = self._pool.arena_path()
        if self._arena is not None:
            self._outgoing = shm.ArenaWriter(Path(self._arena + ".in"))
        self.send(["open", {**options, "arena": self._arena}])

    def run(self, batch: Batch, done: Done) -> None:
        """Give the worker a batch; one that cannot be sent fails at once and leaves the slot idle."""
        entries = batch.entries
        bodies = [entry.body for entry in entries]
        params: Any = entries[0].params
        for entry in entries:
            if entry.params is not params:
                params = [entry.params for entry in entries]
                break
        sizes = None if batch.rows == len(entries) else [entry.size for entry in entries]
        batch_id = next(_batch_ids)
        try:
            if self._outgoing is not None:
                bodies = self._outgoing.place(bodies)
            frame = frames.encode(["batch", batch_id, bodies, params, sizes])
        except Exception as error:  # noqa: BLE001 - a body that is not plain data
            failure = Failure(InternalError(f"the batch cannot be sent to a worker: {error}"))
            self._pool.ready(self, before=lambda: done(batch, [failure] * len(entries)))
            return
        self.batch, self.done, self.batch_id = batch, done, batch_id
        self.streamed = False
        self._credit = 0
        batch.attempts += 1
        batch.on_cancel = self._cancel
        if self._transport is not None:
            self._transport.write(frame)

    def send(self, message: Sequence[Any]) -> None:
        """Write one frame."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frames.encode(message))

    def stop(self) -> None:
        """Tell the worker to end once it has answered."""
        self.send(["stop"])

    def hang_up(self) -> None:
        """Close the connection; `connection_lost` follows."""
        if self._transport is not None:
            self._transport.abort()

    def _act(self, message: list[Any]) -> None:
        kind = message[0]
        if kind == "result":
            _, batch_id, outcomes, failures, seconds, ready = message
            if batch_id == self.batch_id and self.batch is not None:
                self._finish(outcomes, failures, seconds, ready=ready)
        elif kind == "part":
            _, batch_id, parts, failures = message
            if batch_id == self.batch_id and self.batch is not None and self.batch.on_parts is not None:
                self.streamed = True
                self.batch.on_parts(_with_failures(parts, failures), functools.partial(self._grant, batch_id))
        elif kind == "ready":
            if self._incoming is None and self._arena is not None:
                self._incoming = shm.ArenaReader(self._arena + ".out")
                for suffix in (".in", ".out"):  # both sides have it open: nothing is left behind whatever happens now
                    Path(self._arena + suffix).unlink(missing_ok=True)
            self._pool.ready(self)
        elif kind == "hello":
            _, version, about = message
            if version != frames.VERSION:
                msg = f"it speaks version {version} of the protocol, this server version {frames.VERSION}"
                raise InvalidRequest(msg)
            self._pool.greeted(self, about)
        elif kind == "failed":
            self._pool.failed(self, *message[1:])
        else:
            msg = f"{kind!r} is not a message of the protocol"
            raise InvalidRequest(msg)

    def _finish(self, outcomes: list[Any], failures: dict[int, Any] | None, seconds: float, *, ready: bool) -> None:
        batch, done = self.batch, self.done
        assert batch is not None
        assert done is not None
        if len(outcomes) != len(batch.entries):
            msg = f"it answered {len(outcomes)} of {len(batch.entries)} items"
            raise InvalidRequest(msg)
        # What lies in the arena is copied out before the worker may write the next answers over it.
        found = outcomes
        if memoryview in set(map(type, outcomes)):
            found = [bytes(outcome) if type(outcome) is memoryview else outcome for outcome in outcomes]
        self.batch = self.done = None
        batch.on_cancel = None
        batch.model_s = seconds
        if ready:
            self._pool.ready(self, before=lambda: done(batch, _with_failures(found, failures)))
        else:
            done(batch, _with_failures(found, failures))
            self.send(["written", self.batch_id])

    def _grant(self, batch_id: int) -> None:
        if batch_id != self.batch_id:
            return  # a client of an earlier batch has taken its part only now
        self._credit += 1
        if self._credit == CREDIT_STEP:
            self.send(["credit", CREDIT_STEP])
            self._credit = 0

    def _cancel(self) -> None:
        self.send(["cancel", self.batch_id])
        self._pool.called_off(self, self.batch_id)

    def _view(self, offset: int, length: int) -> memoryview:
        if self._incoming is None:
            msg = "it placed bytes in shared memory that was never agreed on"
            raise InvalidRequest(msg)
        return self._incoming.view(offset, length)


def _with_failures(found: list[Any], failures: dict[int, Any] | None) -> list[Any]:
    if failures:
        for index, (kind, message, detail, trace) in failures.items():
            found[index] = Failure(revive(kind, message, detail, trace))
    return found
