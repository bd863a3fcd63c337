# SPDX-License-Identifier: Apache-2.0
"""The server's end of one connection of a worker that speaks the original batching protocol (`job_frames.py`).

Such a worker asks for jobs, gets them as opaque bytes, and asks for the next ones by answering. It says neither who it
is nor that it leaves, and nothing can be called off. Ids on this wire are made here, a new one each time a job is sent,
and no other connection knows them. So whatever a worker says about a job that it does not hold has no effect.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from forebay.errors import BadOutcome, DeadlineExceeded, InvalidRequest, TooLarge, ValidationError
from forebay.types.call import Failure
from forebay.types.element_limits import MAX_ELEMENTS
from forebay.types.failures import without_frames
from forebay.workers.pools.seating import Seating
from forebay.workers.pools.slot_pool import DialledSlot, SlotPool
from forebay.workers.wire.job_frames import MAX_FRAME_BYTES, JobFrameReader, cut_jobs, decode_answer, encode_jobs

if TYPE_CHECKING:
    from forebay.types.batch import Done, EntryBatch

log = logging.getLogger("forebay.workers")

_SHOWN_CHARACTERS = 1000


class JobRefused(ValidationError):
    """The worker says that a job is not valid.

    Attributes:
        body: What it says, for the client, byte for byte.
    """

    def __init__(self, body: bytes) -> None:
        super().__init__("the worker refused the job", detail=body[:_SHOWN_CHARACTERS].decode("utf-8", "replace"))
        self.body = body


class JobSlot(DialledSlot):
    """The server's end of one connection of a worker.

    Args:
        max_bytes: Longest answer that is read from it.
        max_elements: The most values in an answer.
    """

    def __init__(self, pool: SlotPool[Any], max_bytes: int = MAX_FRAME_BYTES, max_elements: int = MAX_ELEMENTS) -> None:
        super().__init__()
        self._pool = pool
        self._reader = JobFrameReader(max_bytes, max_elements)
        self._asked = False
        self._ids: list[str | None] = []
        """The id of each entry of the batch; None for one that was not sent."""
        self._unsent: deque[bytes] = deque()
        """Frames with the other jobs of a batch that is too long for one."""
        self._heard: list[tuple[dict[str, bytes], list[str]]] = []
        """What was answered to those before."""
        self._sent = self._began = 0.0
        self.seating = Seating(0, _cannot_be_told, _cannot_be_told, time.monotonic, pool.accounts)
        self.worker: object = object()

    @property
    def owes_since(self) -> float | None:
        """Since when the worker owes an answer; None if it owes none."""
        return self._sent if self.seating.open else None

    def data_received(self, data: bytes) -> None:
        """Act on each frame; a worker that does not keep to the protocol is hung up on."""
        try:
            for payload in self._reader.feed(data):
                self._act(payload)
            if self._reader.is_inside:  # over a slow line an answer is on its way for long
                self._sent = time.monotonic()
        except InvalidRequest as error:
            self.drop(error.message)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the pool, which hands the batch on."""
        self._pool.gone(self)

    def run(self, batch: EntryBatch, done: Done) -> None:
        """Send the jobs of a batch that clients still wait for; if there are none, the slot is idle again at once."""
        now = time.monotonic()
        self._ids = [None if entry.done or entry.deadline <= now else str(uuid.uuid4()) for entry in batch.entries]
        jobs: dict[str, bytes] = {
            job: entry.body for job, entry in zip(self._ids, batch.entries, strict=True) if job is not None
        }
        try:
            frame, *others = map(encode_jobs, cut_jobs(jobs))
        except TooLarge as error:
            failure = Failure(without_frames(error))  # its frames would hold it, and the batch
            self._pool.ready(self, before=lambda: done(batch, [failure] * len(batch.entries)))
            return
        if not jobs:
            self._pool.ready(self, before=lambda: done(batch, [_late] * len(batch.entries)))
            return
        self.seating.join(batch, done)
        self._sent = self._began = now
        self._unsent.extend(others)
        assert self._transport is not None
        if self._transport.is_closing():
            batch.attempts -= 1
            return  # `connection_lost` is on its way and hands the batch on; it was not tried here
        self._transport.write(frame)
        log.debug("sent a batch", extra={"jobs": len(jobs), "bytes": len(frame)})

    def stop(self) -> None:
        """Close the connection, which is all the protocol has for a goodbye, once the worker has answered."""
        if not self.seating.open and self._transport is not None:
            self._transport.close()

    def drop(self, reason: str) -> None:
        """Close the connection now; `connection_lost` follows."""
        self._pool.told("hung up on", self.peer, reason)
        if self._transport is not None:
            self._transport.abort()

    def _act(self, payload: bytes) -> None:
        results, refused = decode_answer(payload)
        sitting = next(iter(self.seating.open.values()), None)
        if sitting is None:
            self._note_strays(results)
            if not self._asked:
                self._asked = True
                self._pool.ready(self)
            return
        if self._unsent:
            self._heard.append((results, refused))
            self._sent = time.monotonic()
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write(self._unsent.popleft())
            return
        for earlier, refused_earlier in self._heard:
            results |= earlier
            refused += refused_earlier
        self._heard.clear()
        outcomes = self._outcomes(results, frozenset(refused))
        self._note_strays(results)
        self.seating.end(sitting.name, time.monotonic() - self._began)
        self._pool.ready(self, before=lambda: sitting.done(sitting.batch, outcomes))

    def _outcomes(self, results: dict[str, bytes], refused: frozenset[str]) -> Sequence[Any]:
        """Take the outcome of each job out of what the worker answered."""
        missing: Failure | None = None
        outcomes: list[Any] = []
        for job in self._ids:
            if job is None:
                outcomes.append(_late)
                continue
            body = results.pop(job, None)
            if job in refused:
                outcomes.append(Failure(JobRefused(body or b"")))
            elif body is not None:
                outcomes.append(body)
            else:
                missing = missing or Failure(BadOutcome("the worker gave no answer to this job"))
                outcomes.append(missing)
        return outcomes

    def _note_strays(self, results: dict[str, bytes]) -> None:
        if results:
            self._pool.told("ignored", self.peer, f"it answered {len(results)} jobs that it does not hold")


def _cannot_be_told(*_what: object) -> None:
    """The protocol has no words for it."""


_late = Failure(DeadlineExceeded("timed out before a worker was free"))
