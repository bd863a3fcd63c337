# SPDX-License-Identifier: Apache-2.0
"""Options of the batching service, by the names of the original."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from forebay.server.config import HttpConfig, Port
from forebay.types.settings import Checked, Count, Written
from forebay.workers.wire.job_frames import MAX_FRAME_BYTES


def _place(address: Any) -> Any:
    kind, colon, rest = address.partition(":")
    if not address or (colon and kind in {"unix", "tcp"}):
        hint = f"; did you mean -protocol {kind} -address {rest}?" if rest else ""
        raise ValueError(f"expected a path, or HOST:PORT with -protocol tcp{hint}")
    return address


class BatchingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the service, by the original's names.

    Attributes:
        address: Where workers join: a path, or HOST:PORT where `protocol` is tcp.
        batch: Jobs in a batch.
        capacity: Jobs that may wait; those a worker has do not count.
        host: HTTP address.
        latency_ms: Longest wait for a batch to fill, from its first job on.
        port: HTTP port; 0 takes a free one.
        protocol: Kind of socket that workers join at.
        timeout_ms: Time a job has.
        max_body_bytes: Longest job.
        max_frame_bytes: Longest answer of a worker.
        metrics_port: Port for forebay's own paths, such as /metrics; None leaves them out.
    """

    address: Annotated[str, Written("--address", "PATH|HOST:PORT"), Checked(_place)] = "batch.socket"
    batch: Annotated[Count, Written("--batch", "N")] = 32
    capacity: Annotated[Count, Written("--capacity", "N")] = 1024
    host: Annotated[str, Written("--host", "ADDRESS")] = "127.0.0.1"
    latency_ms: Annotated[int, Meta(ge=0), Written("--latency", "MS")] = 10
    port: Annotated[Port, Written("--port", "PORT")] = 8080
    protocol: Annotated[Literal["unix", "tcp"], Written("--protocol")] = "unix"
    timeout_ms: Annotated[Count, Written("--timeout", "MS")] = 5000
    max_body_bytes: Annotated[Count, Written("--max-body-bytes", "N")] = HttpConfig().max_body_bytes
    max_frame_bytes: Annotated[int, Meta(ge=1, le=(1 << 31) - 1), Written("--max-frame-bytes", "N")] = MAX_FRAME_BYTES
    metrics_port: Annotated[Port | None, Written("--metrics-port", "PORT")] = None
