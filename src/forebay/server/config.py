# SPDX-License-Identifier: Apache-2.0
"""Options of a running server, each with its unit and default; the command line's `--help` is their reference."""

from __future__ import annotations

from typing import Literal

import msgspec

WorkerKind = Literal["inline", "thread", "process"]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front.

    Attributes:
        host: Address to bind; other machines reach the server only if this says so.
        port: TCP port; 0 takes a free one.
        max_body_bytes: Longest request body; longer ones get 413.
        max_head_bytes: Longest request line and headers together; longer ones get 431.
        max_connections: Connections at a time; more are answered 503 and closed.
        keep_alive_s: An idle connection is closed after this time.
        read_timeout_s: A client that is in the middle of a request and sends nothing for this time gets 408.
        write_timeout_s: A client that takes nothing of its answer for this time is cut off.
        certfile: TLS certificate chain in PEM; with it the port speaks HTTPS.
        keyfile: Its private key; None if `certfile` holds both.
        api_keys: If any, a request needs one of them, as `X-API-Key` or `Authorization: Bearer`.
        cors_origins: Origins whose pages may call; empty turns CORS off, `*` allows all.
        access_log: Log a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_body_bytes: int = 64 * 1024 * 1024
    max_head_bytes: int = 64 * 1024
    max_connections: int = 16_384
    keep_alive_s: float = 75.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    certfile: str | None = None
    keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about every model of the target; None leaves the model's own setting.

    Attributes:
        worker_kind: Where models run.
        workers: Workers of each model.
        max_batch_size: Samples in a batch.
        max_wait_ms: Wait for a batch to fill.
        idle: What a free worker does with a batch that is not full.
        timeout_ms: Time a request has.
        max_queue: Samples that may wait.
    """

    worker_kind: WorkerKind = "process"
    workers: int = 1
    max_batch_size: int | None = None
    max_wait_ms: float | None = None
    idle: Literal["gather", "go", "wait"] | None = None
    timeout_ms: int | None = None
    max_queue: int | None = None
