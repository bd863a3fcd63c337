# SPDX-License-Identifier: Apache-2.0
"""What is counted of one endpoint: its requests, its batches, and why requests failed."""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import TYPE_CHECKING

import msgspec

from forebay.errors import ForebayError, UserCodeError
from forebay.observe.metrics.gen_ai_families import Kind, histogram_of
from forebay.observe.metrics.histograms import ROWS, SECONDS, Histogram

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import TenantAccount


class FailureReason(msgspec.Struct, frozen=True, gc=False):
    """Why a request failed; texts only, for an error holds all that was alive where it was raised.

    Attributes:
        at: When, in seconds since 1970.
        kind: The class of the error.
        message: What happened.
        trace: Where in the user's code, if it was there.
        is_users: Whether the user's code raised it, so that clients are not told.
        request_id: Of the request, if it had one.
    """

    at: float
    kind: str
    message: str
    trace: str
    is_users: bool
    request_id: str


class EndpointMetrics:
    """Everything counted for one endpoint.

    Attributes:
        codes: Requests by outcome: `ok` or the code of their error.
        reasons: The last error of each code.
        request_s: From submission to outcome.
        queue_s: From submission to leaving the queue.
        model_s: Time of each batch in the worker.
        sizes: For each number of samples in a batch how many batches there were, how long they ran together, and the
            same once for each of their requests; no more than the largest batch has samples.
        failed_s: The part of `request_s` that ended in an error.
        failed_rows: The part of the samples of all batches whose outcome was an error.
        parts: Parts of streamed answers that were handed to clients.
        shared: Requests that were answered by the run of an equal one; None where none are.
        last: When the last batch was answered, in the loop's clock; 0 if none was.
        own: `codes`, `reasons`, `request_s` and `failed_s` without the requests that a front has handed on and counts
            itself; None where there are none of those.
        tenants: What each tenant has had, by its name, as far as that is told apart.
        gen_ai: The times of OpenTelemetry's metrics, of the requests that clients of OpenAI's protocol have sent here.
    """

    __slots__ = (
        *("codes", "failed_rows", "failed_s", "gen_ai", "last", "model_s", "own", "parts", "queue_s", "reasons"),
        *("request_s", "shared", "sizes", "tenants"),
    )

    def __init__(self) -> None:
        self.codes: dict[str, int] = {"ok": 0}
        self.reasons: dict[str, FailureReason] = {}
        self.request_s = Histogram(SECONDS)
        self.queue_s = Histogram(SECONDS)
        self.model_s = Histogram(SECONDS)
        self.sizes: dict[int, list[float]] = {}
        self.failed_s = 0.0
        self.failed_rows = 0
        self.parts = 0
        self.shared: int | None = None
        self.last = 0.0
        self.own: EndpointMetrics | None = None
        self.tenants: dict[str, TenantAccount] = {}
        self.gen_ai: dict[Kind, Histogram] = {}

    def count_own(self) -> None:
        """Begin to count apart what no front counts; what was counted so far is that."""
        if self.own is None:
            self.own = self.with_clients(self)

    def with_clients(self, clients: EndpointMetrics) -> EndpointMetrics:
        """Return the same batches, with copies of what these count of the requests of clients."""
        found = EndpointMetrics()
        for name in ("failed_rows", "last", "model_s", "parts", "queue_s", "shared", "sizes", "tenants"):
            setattr(found, name, getattr(self, name))
        found.codes, found.reasons, found.failed_s = clients.codes.copy(), clients.reasons.copy(), clients.failed_s
        found.request_s.add(clients.request_s.counts, clients.request_s.total)
        for kind, times in self.gen_ai.items():  # no server counts them for another one
            histogram_of(found.gen_ai, kind).add(times.counts, times.total)
        return found

    @property
    def batch_size(self) -> Histogram:
        """Samples of each batch, made of `sizes` on request."""
        found = Histogram(ROWS)
        for rows, (batches, _, _) in self.sizes.items():
            found.observe(rows, int(batches))
        return found

    def ran(self, rows: int, requests: int, seconds: float, times: int = 1) -> None:
        """Count a batch, or several that were alike."""
        size = self.sizes.get(rows)
        if size is None:
            size = self.sizes[rows] = [0, 0.0, 0.0]
        took = seconds * times
        size[0] += times
        size[1] += took
        size[2] += took * requests
        told = self.model_s
        told.counts[bisect_left(SECONDS, seconds)] += times
        told.total += took

    def failed(self, error: ForebayError, request_id: str = "", times: int = 1) -> None:
        """Count requests that got an error."""
        code = error.code
        self.codes[code] = self.codes.get(code, 0) + times
        is_users = isinstance(error, UserCodeError)
        trace = error.trace if isinstance(error, UserCodeError) else ""
        self.reasons[code] = FailureReason(
            time.time(), type(error).__name__, error.message, trace, is_users, request_id
        )
