# SPDX-License-Identifier: Apache-2.0
"""The server's end of one connection of a worker that speaks the worker protocol (docs/worker-protocol.md).

A slot's state is one of

    greeting --hello--> opening --ready--> idle --batch--> busy --result--> idle
                                            (busy --result with work--> finishing --ready--> idle)

and every state ends in *gone* when the connection closes, which the kernel tells at once however the process died.
A worker is only half trusted, for somebody else may have started it: what does not fit the state or the types of the
protocol ends the connection before anything of it is acted on, and the batch is handed on like that of a dead worker.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from forebay.errors import InternalError, InvalidRequest, revive
from forebay.types.call import Failure
from forebay.workers import frames, shm
from forebay.workers.pool import CREDIT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from forebay.types.batch import Batch, Done, Noted

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

    def retire(self, slot: Slot) -> None:
        """The slot takes no more work."""
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

    def __init__(
        self,
        pool: Dialled,
        max_frame_bytes: int = frames.MAX_FRAME_BYTES,
        check: Callable[[Batch, Sequence[Any]], None] | None = None,
    ) -> None:
        """Make a slot.

        Args:
            pool: What it belongs to.
            max_frame_bytes: Longest frame that is read.
            check: Given a batch and its outcomes, or the parts of one step, raises `InvalidRequest` if they are not of
                the types the endpoint answers with; None where the worker is forebay's own.
        """
        self._pool = pool
        self._check = check
        self._transport: asyncio.Transport | None = None
        self._reader = frames.FrameReader(self._view, max_frame_bytes)
        self._outgoing: shm.ArenaWriter | None = None
        self._incoming: shm.ArenaReader | None = None
        self._arena: str | None = None
        self._credit = 0
        self._room = 0
        self._heard = 0.0
        self._told = _Told()
        self._has_greeted = False
        self._may_ask = False
        self._is_leaving = False
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
        except (InvalidRequest, LookupError, TypeError, ValueError, OSError, MemoryError) as error:
            self.drop(f"it does not speak the protocol: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the pool, which hands the batch on."""
        if self._outgoing is not None:
            self._outgoing.close()
        if self._incoming is not None:
            self._incoming.close()
        if self._arena is not None:
            Path(self._arena + ".out").unlink(missing_ok=True)
        self._pool.gone(self)

    @property
    def owes_since(self) -> float | None:
        """Since when the worker owes the next sign of life; None while it is idle or waits for slow clients."""
        return None if self.batch is None or self._room <= 0 else self._heard

    def open(self, options: Mapping[str, Any]) -> None:
        """Answer a hello."""
        self._may_ask = True
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
        asks = [True] if batch.noted is not None and self._told.is_possible else []
        try:
            if self._outgoing is not None:
                bodies = self._outgoing.place(bodies)
            frame = frames.encode(["batch", batch_id, bodies, params, sizes, *asks])
        except Exception as error:  # noqa: BLE001 - a body that is not plain data
            failure = Failure(InternalError(f"the batch cannot be sent to a worker: {error}"))
            self._pool.ready(self, before=lambda: done(batch, [failure] * len(entries)))
            return
        self.batch, self.done, self.batch_id = batch, done, batch_id
        self.streamed = False
        self._credit = 0
        self._room = int(CREDIT)
        self._heard = self._told.sent = time.monotonic()
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

    def drop(self, reason: str) -> None:
        """Close the connection, with the reason in the log."""
        log.warning("a worker is hung up on: %s", reason)
        self.hang_up()

    def _act(self, message: Any) -> None:
        kind = message[0]
        if kind == "result":
            _, batch_id, outcomes, failures, seconds, ready, *told = message
            self._require_running(batch_id)
            self._finish(outcomes, failures, seconds, told, ready=ready)
        elif kind == "part":
            _, batch_id, parts, failures = message
            self._require_running(batch_id)
            self._hand_part(parts, failures)
        elif kind == "ready":
            if not self._may_ask:
                msg = "it asks for work out of turn"
                raise InvalidRequest(msg)
            self._may_ask = False
            if self._incoming is None and self._arena is not None:
                self._share(is_possible=len(message) == 1)
            if self._is_leaving:
                self.stop()
            else:
                self._pool.ready(self)
        elif kind == "hello":
            _, version, about = message
            if version != frames.VERSION:
                msg = f"it speaks version {version} of the protocol, this server version {frames.VERSION}"
                raise InvalidRequest(msg)
            if self._has_greeted:
                msg = "it says hello twice"
                raise InvalidRequest(msg)
            self._has_greeted = True
            self._told.read_hello(about)
            self._pool.greeted(self, about)
        elif kind == "leaving" and not self._is_leaving:
            self._is_leaving = True
            if self.batch is None:
                self._pool.retire(self)
                self.stop()
        elif kind == "failed" and self._may_ask:
            _, name, text, detail, trace = message
            self._pool.failed(self, str(name), str(text), detail, str(trace))
        else:
            msg = f"{str(kind)[:40]!r} is not a message of the protocol here"
            raise InvalidRequest(msg)

    def _require_running(self, batch_id: Any) -> None:
        if self.batch is None or batch_id != self.batch_id:
            msg = f"it answers batch {str(batch_id)[:40]}, which it was not given"
            raise InvalidRequest(msg)

    def _share(self, *, is_possible: bool) -> None:
        """Open what the worker writes; both sides then have both files open, so that nothing is left behind."""
        assert self._arena is not None
        try:
            if is_possible:
                self._incoming = shm.ArenaReader(self._arena + ".out")
            elif self._outgoing is not None:
                self._outgoing.close()
                self._outgoing = None
        finally:
            for suffix in (".in", ".out"):
                Path(self._arena + suffix).unlink(missing_ok=True)
            self._arena = None

    def _hand_part(self, parts: Any, failures: Any) -> None:
        batch = self.batch
        if batch is None or batch.on_parts is None:
            msg = "it sends parts of an answer that is not streamed"
            raise InvalidRequest(msg)
        found = self._checked(batch, parts, failures)
        self.streamed = True
        self._room -= 1
        self._heard = time.monotonic()
        batch.on_parts(found, functools.partial(self._grant, self.batch_id))

    def _finish(self, outcomes: Any, failures: Any, seconds: Any, told: list[Any], *, ready: Any) -> None:
        batch, done = self.batch, self.done
        assert batch is not None
        assert done is not None
        if type(seconds) not in {int, float} or not 0.0 <= seconds < math.inf:
            msg = f"it says that a batch took {str(seconds)[:40]} seconds"
            raise InvalidRequest(msg)
        found = self._checked(batch, outcomes, failures)
        if told and batch.noted is not None:
            self._told.note(batch.noted, told[0], seconds)
        self.batch = self.done = None
        batch.on_cancel = None
        batch.model_s = seconds
        if ready and not self._is_leaving:
            self._pool.ready(self, before=lambda: done(batch, found))
            return
        done(batch, found)
        if ready:
            self.stop()
        else:
            self._may_ask = True
            self.send(["written", self.batch_id])

    def _checked(self, batch: Batch, outcomes: Any, failures: Any) -> list[Any]:
        """Return the outcomes as the pool hands them on, or raise before anything has changed."""
        if type(outcomes) is not list or len(cast("list[Any]", outcomes)) != len(batch.entries):
            found = len(cast("list[Any]", outcomes)) if isinstance(outcomes, list) else type(outcomes).__name__
            msg = f"it answered {found} of {len(batch.entries)} items"
            raise InvalidRequest(msg)
        # What lies in the arena is copied out before the worker may write the next answers over it.
        found = cast("list[Any]", shm.copied_out(outcomes))
        for index, failure in cast("dict[int, Sequence[Any]]", failures or {}).items():
            found[index] = _failure(*failure)
        if self._check is not None:
            self._check(batch, found)
        return found

    def _grant(self, batch_id: int) -> None:
        if batch_id != self.batch_id:
            return  # a client of an earlier batch has taken its part only now
        self._credit += 1
        if self._credit == CREDIT_STEP:
            self.send(["credit", CREDIT_STEP])
            self._credit = 0
            self._room += CREDIT_STEP
            self._heard = time.monotonic()

    def _cancel(self) -> None:
        self.send(["cancel", self.batch_id])
        self._pool.called_off(self, self.batch_id)

    def _view(self, offset: int, length: int) -> memoryview:
        if self._incoming is None:
            msg = "it placed bytes in shared memory that was never agreed on"
            raise InvalidRequest(msg)
        return self._incoming.view(offset, length)


class _Told:
    """What a worker tells of when and where it runs batches, for the timeline.

    Attributes:
        is_possible: Whether it can tell; workers of older versions cannot.
        sent: When the running batch was sent to it.
    """

    def __init__(self) -> None:
        self.is_possible = False
        self.sent = 0.0
        self._worker = ""
        self._pid = 0

    def read_hello(self, about: Mapping[str, Any]) -> None:
        self.is_possible = about.get("phases") is True
        self._worker = str(about.get("worker"))[:8]
        self._pid = msgspec.convert(about.get("pid", 0), int)

    def note(self, noted: Noted, told: Any, seconds: float) -> None:
        """Read the optional end of a result.

        Raises:
            ValueError: If it is not of the types of the protocol.
        """
        started, phases = msgspec.convert(told, tuple[float, list[tuple[str, str, float, float, int]]])
        now = time.monotonic()
        late = 0.0
        if not self.sent <= started <= now - seconds:
            # Its clock is another machine's: assume that both ways took equally long.
            late = (self.sent + now - seconds) / 2 - started
        if not all(map(math.isfinite, [late, *(moment for phase in phases for moment in phase[2:4])])):
            msg = "it says that a phase had no beginning or no end"
            raise ValueError(msg)
        noted.worker = self._worker
        noted.pid = self._pid
        noted.started = started + late
        noted.phases = [(name, kind, since + late, until + late, row) for name, kind, since, until, row in phases]


def _failure(kind: Any, message: Any, detail: Any, trace: Any) -> Failure:
    if not isinstance(kind, str) or not isinstance(message, str) or not isinstance(trace, str):
        msg = "a failure is not described in words"
        raise InvalidRequest(msg)
    if detail is not None:
        msgspec.json.encode(detail, enc_hook=str)  # it will stand in an answer: raises now if it cannot
    return Failure(revive(kind, message, detail, trace))
