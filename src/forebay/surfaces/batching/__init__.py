# SPDX-License-Identifier: Apache-2.0
"""The original batching service: jobs come over HTTP, workers join over a socket and ask for them in batches."""

from __future__ import annotations

from typing import Literal

import msgspec

from forebay.server.config import HttpConfig
from forebay.workers.job_frames import MAX_FRAME_BYTES


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

    address: str = "batch.socket"
    batch: int = 32
    capacity: int = 1024
    host: str = "127.0.0.1"
    latency_ms: int = 10
    port: int = 8080
    protocol: Literal["unix", "tcp"] = "unix"
    timeout_ms: int = 5000
    max_body_bytes: int = HttpConfig().max_body_bytes
    max_frame_bytes: int = MAX_FRAME_BYTES
    metrics_port: int | None = None
