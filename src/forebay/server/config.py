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
        max_buffered_bytes: Bytes of bodies that are still arriving, of all connections together; the connection that
            holds most of them is then answered 503 and closed.
        max_head_bytes: Longest request line and headers together; longer ones get 431.
        max_connections: Connections at a time; more are answered 503 and closed.
        keep_alive_s: An idle connection is closed after this time.
        read_timeout_s: A client that is in the middle of a request and sends nothing, or less than 240 bytes a second,
            for this time gets 408.
        write_timeout_s: A client that takes nothing of its answer for this time is cut off.
        certfile: TLS certificate chain in PEM; with it the port speaks HTTPS.
        keyfile: Its private key; None if `certfile` holds both.
        api_keys: If any, a request needs one of them, as `X-API-Key` or `Authorization: Bearer`.
        allowed_hosts: Names that the server may be called by beside `localhost` and addresses, `*` for any. If there is
            none, a server that asks for no key and is bound to this machine only takes no others, and any other
            server takes all.
        cors_origins: Origins whose pages may call; empty turns CORS off, `*` allows all.
        access_log: Log a line for each request.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_body_bytes: int = 64 * 1024 * 1024
    max_buffered_bytes: int = 1024 * 1024 * 1024
    max_head_bytes: int = 64 * 1024
    max_connections: int = 16_384
    keep_alive_s: float = 75.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    certfile: str | None = None
    keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    access_log: bool = False


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says about every model of the target; None leaves the model's own setting.

    Attributes:
        worker_kind: Where models run.
        workers: Workers of each model.
        threads: Threads of each worker that call its model.
        python: Interpreter of the worker processes; None takes the server's own.
        max_batch_size: Samples in a batch.
        max_wait_ms: Wait for a batch to fill.
        idle: What a free worker does with a batch that is not full.
        timeout_ms: Time a request has.
        max_queue: Samples that may wait.
        policy: "auto" learns sizes and waits of batches that hold the objective.
        latency_objective_ms: The time that 95 of 100 requests are to be answered in.
        isolate_errors: Halve batches that fail as a whole until the sample at fault stands alone.
    """

    worker_kind: WorkerKind = "process"
    workers: int = 1
    threads: int = 1
    python: str | None = None
    max_batch_size: int | None = None
    max_wait_ms: float | None = None
    idle: Literal["gather", "go", "wait"] | None = None
    timeout_ms: int | None = None
    max_queue: int | None = None
    policy: Literal["auto"] | None = None
    latency_objective_ms: float | None = None
    isolate_errors: bool = False


class AttachConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Workers that somebody else starts and that attach to this server.

    Attributes:
        address: Where they dial in, `unix:PATH` or `tcp:HOST:PORT`; None lets nobody attach.
        secret: What they must know; needed where other machines can connect.
        hello_s: Time in which a connection must have said what it is.
        grace_s: How long requests wait for a worker when the last one has left, before they get 503.
        hang_s: A worker that owes an answer for this time is dropped and its batch handed on; None takes half of the
            endpoint's timeout.
        max_connections: Connections at a time; each thread of a worker has one.
        max_frame_bytes: Longest frame that is read from a worker.
    """

    address: str | None = None
    secret: bytes | None = None
    hello_s: float = 5.0
    grace_s: float = 5.0
    hang_s: float | None = None
    max_connections: int = 256
    max_frame_bytes: int = 256 * 1024 * 1024
