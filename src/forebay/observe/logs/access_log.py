# SPDX-License-Identifier: Apache-2.0
"""Calls that have ended: a line of the access log each, and a call of each listener.

A port that neither writes an access log nor has a listener never makes an `EndedCall`. A port looks for listeners once,
when it is made, so whoever listens begins before that.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from forebay.observe.listeners import Listeners
from forebay.types.call import Request

if TYPE_CHECKING:
    from forebay.types.batch import EntryBatch

log = logging.getLogger("forebay.access")

HANDED_ON: Final = "handed on"
"""The method of a call that another server has handed on, which has its line in the log there."""
CALLED_OFF: Final = 499
"""Stands for the status of a call whose client has left before it had one, as other servers log it."""


class Answering(Protocol):
    """The endpoint that answers a call, while it does."""

    @property
    def name(self) -> str:
        """What the log calls it."""
        ...

    @property
    def answering(self) -> EntryBatch | None:
        """The batch whose requests are being replied to right now."""
        ...


class EndedCall(msgspec.Struct):
    """A call that has ended.

    Attributes:
        method: Of HTTP; `gRPC` for a call of that, `HANDED_ON` for one of neither.
        path: As it was asked for, without a query, which may hold secrets; of gRPC service and method.
        started: When it began, in seconds of `time.monotonic`; 0 if it never did.
        ended: When it ended.
        client: Who called.
        status: Of HTTP or, under its number, of gRPC.
        code: `ok`, or the code of the error.
        body_bytes: Of the answer's body, or of its messages.
        request_id: What the client and the log call it.
        run_id: What its batches call it; empty if it came into none.
        model: The endpoint.
        batch_size: Samples in the batch that answered it; 0 if none did.
        queue_s: From submission to leaving the queue; -1 if it never left it.
        parent: The caller's `traceparent`.
        cost_s: Seconds that workers were busy for it; 0 if that is not counted, or nothing of it ran.
        cost_rows: Samples that ran in this time.
        tokens: Of its prompt and of its answer, where the model counts them.
        says_cost: Whether its answer says what it has cost.
    """

    method: str
    path: str
    started: float = 0.0
    ended: float = 0.0
    client: str = ""
    status: int = 0
    code: str = ""
    body_bytes: int = 0
    request_id: str = ""
    run_id: str = ""
    model: str = ""
    batch_size: int = 0
    queue_s: float = -1.0
    parent: str = ""
    cost_s: float = 0.0
    cost_rows: int = 0
    tokens: tuple[int, int] = (0, 0)
    says_cost: bool = False

    @property
    def cost(self) -> bytes:
        """What the header `COST` says; empty if it does not, or nothing has run."""
        return cost_text(self.cost_s, self.cost_rows, self.tokens) if self.says_cost else b""

    def answered_by(self, endpoint: Answering, request: Request) -> None:
        """Note who answered, while the endpoint replies; a request that became another one has that as its body.

        What several requests of one call cost is added up.
        """
        self.model = endpoint.name
        self.request_id = self.request_id or request.id
        request = request.body if isinstance(request.body, Request) else request
        self.run_id = request.run_id
        self.cost_s += request.cost_s
        self.cost_rows += request.size if request.cost_s else 0
        self.tokens = self.tokens[0] + request.tokens[0], self.tokens[1] + request.tokens[1]
        self.started = self.started or request.arrived
        if request.taken and request.taken != NEVER:
            self.queue_s = request.taken - request.arrived
        if endpoint.answering is not None:
            self.batch_size = endpoint.answering.rows


NEVER: Final = float("inf")

COST: Final = b"forebay-cost"
"""The header that says what an answer has cost."""


def cost_of(request: Request) -> bytes:
    """Return what that header says of a request, or of the one that it became; empty if nothing of it ran."""
    request = request.body if isinstance(request.body, Request) else request
    return cost_text(request.cost_s, request.size, request.tokens)


def cost_text(seconds: float, rows: int, tokens: tuple[int, int]) -> bytes:
    """Write what something has cost; empty if nothing has run."""
    if not seconds:
        return b""
    cost = b"worker_ms=%.3f;rows=%d" % (seconds * 1000, rows)
    return cost + b";prompt_tokens=%d;completion_tokens=%d" % tokens if any(tokens) else cost


class CallListeners(Listeners[EndedCall]):
    """The listeners that are told of each call that has ended, on the loop; a server has one of these."""

    subject = "calls"

    def ended(self, call: EndedCall, *, writes: bool) -> None:
        """Tell of a call that ends now, and write its line of the access log if there is one."""
        _end(call, writes=writes)
        self.tell(call)


def _end(call: EndedCall, *, writes: bool) -> None:
    call.ended = time.monotonic()
    if not call.code:
        call.code = "ok" if call.status < 400 else "error"
    if writes and log.isEnabledFor(logging.INFO):
        extra = {
            "request_id": call.request_id or None,
            "client": call.client or None,
            "method": call.method,
            "path": call.path,
            "status": call.status,
            "code": call.code,
            "bytes": call.body_bytes,
            "model": call.model or None,
            "batch_size": call.batch_size or None,
            "queue_ms": None if call.queue_s < 0 else round(call.queue_s * 1000, 3),
            "cost_ms": round(call.cost_s * 1000, 3) if call.cost_s else None,
            "prompt_tokens": call.tokens[0] or None,
            "completion_tokens": call.tokens[1] or None,
            "ms": round((call.ended - call.started) * 1000, 3) if call.started else None,
        }
        log.info("%s %s %d", call.method, call.path, call.status, extra=extra)
