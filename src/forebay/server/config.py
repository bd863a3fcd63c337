# SPDX-License-Identifier: Apache-2.0
"""Settings of a running server, each declared once; `docs/reference/settings.md` and the flags are made of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError
from forebay.repository.version_policy import VersionPolicy
from forebay.serving.models.model import Model
from forebay.types.element_limits import MAX_ELEMENTS, MAX_TENSOR_ELEMENTS, ElementLimits
from forebay.types.names import endpoint_name, version_name
from forebay.types.ray_needs import RayNeeds
from forebay.types.settings import (
    Checked,
    Count,
    DeadlineMilliseconds,
    Milliseconds,
    Seconds,
    Sharing,
    SomeMilliseconds,
    SomeSeconds,
    Workers,
    Written,
)
from forebay.types.tenant import TenantConfig, name_of_tenant
from forebay.types.worker_range import SCALE_DOWN_S, TARGET_QUEUE_MS, WORKERS_NEEDED, WorkerRange, read_workers
from forebay.workers.pool import STUCK_S
from forebay.workers.processes.device_binding import existing, existing_one

MAX_FRONTS: Final = 64
"""Most fronts of an owner, which carries about four; a number beyond that is a slip."""

WorkerKind = Literal["inline", "thread", "process"]

_HOST: Final = r"(?:[\w-]+(?:\.[\w-]+)*|\[[0-9a-f:.]+\])"
_ORIGIN: Final = rf"\*|null|(?!http:.*:80$|https:.*:443$)[a-z][a-z0-9+.-]*://{_HOST}(?::[0-9]+)?"


def _hosts(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return names that requests may have as their host, in lower case.

    Raises:
        ValueError: If none can have one of them.
    """
    found = tuple(name.lower() for name in names)
    for name in found:
        if re.fullmatch(rf"\*|{_HOST}", name, re.ASCII) is None:
            raise ValueError(f"expected a host name such as models.example, without a port, or *, got {name!r}")
    return found


def _named_files(given: tuple[str, ...]) -> tuple[str, ...]:
    """Return names of tenants with the files of their keys; raises a `ValueError` if one is neither."""
    for one in given:
        name, equals, file = one.partition("=")
        if not equals or not file:
            raise ValueError(f"expected NAME=FILE, a tenant and the file with its keys, got {one[:80]!r}")
        name_of_tenant(name)
    return given


def _tenant_header(name: str) -> str:
    """Return the name of a header that may name children of tenants, in lower case.

    Raises:
        ValueError: If it is none, or one that means something else.
    """
    found = name.lower()
    if re.fullmatch(r"[a-z0-9-]{1,64}", found, re.ASCII) is None or found in _MEANT or found.endswith("-bin"):
        raise ValueError(_TENANT_HEADER)
    return found


_TENANT_HEADER: Final = "expected a header without another meaning, such as x-gateway-inference-fairness-id"
_MEANT: Final = frozenset(
    {
        *("accept", "authorization", "connection", "content-encoding", "content-length", "content-type", "expect"),
        *("grpc-timeout", "host", "origin", "request-timeout", "te", "traceparent", "transfer-encoding", "upgrade"),
        *("x-api-key", "x-request-id", "x-request-timeout-ms"),
    }
)
"""Headers that have a meaning of their own."""


def _origins(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return origins that pages may have, as browsers write them: in lower case.

    Raises:
        ValueError: If none can have one of them.
    """
    found = tuple(name.lower() for name in names)
    for name in found:
        if re.fullmatch(_ORIGIN, name, re.ASCII) is None:
            raise ValueError(
                f"expected an origin as browsers send it, or *, got {name!r}; write https://pages.example or "
                "http://localhost:3000, without a path and without the usual port"
            )
    return found


def _policy(text: str) -> str:
    """Return a text that says which versions are served; raises a `ValueError` if it does not."""
    VersionPolicy.of(text)
    return text


def _cluster(text: str) -> str:
    """Return the address of a Ray cluster; raises a `ValueError` if it is none."""
    if text not in {"auto", "local"} and re.fullmatch(rf"{_HOST}:[0-9]{{1,5}}", text, re.ASCII) is None:
        raise ValueError(_CLUSTER)
    return text


_CLUSTER: Final = "expected auto, local or HOST:PORT"


def _deployment(text: str) -> str:
    """Return the name of a deployment; raises a `ValueError` if it is none."""
    if re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", text, re.ASCII) is None:
        raise ValueError(_DEPLOYMENT)
    return text


_DEPLOYMENT: Final = "expected at most 40 lower-case letters, digits and hyphens"

Port = Annotated[int, Meta(ge=0, le=65_535)]


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP front.

    Attributes:
        host: Address to bind; 0.0.0.0 lets other machines connect, :: also over IPv6.
        port: TCP port; 0 chooses a free one.
        max_body_bytes: Longest request body; a longer one gets 413.
        max_buffered_bytes: Memory for requests and unread answers of all connections and ports together. Beyond it,
            connections whose clients do not read are closed, and the largest arriving request gets 503.
        max_connection_bytes: The same for one connection: while it holds more, its next request gets 503. One body of
            `max_body_bytes` is always allowed.
        max_form_bytes: Longest form (multipart/form-data); its files may be kept on disk.
        max_form_parts: Most fields and files of a form.
        max_form_disk_bytes: Disk space for files of all forms together; beyond it forms get 503.
        form_memory_bytes: Memory for the files of one form. Further files are written to the folder for temporary
            files (TMPDIR) until the request is answered. Fields that are longer than this together get 413.
        max_tensor_elements: Most elements of a request's tensors and arrays of samples; more get 413.
        max_elements: Most other elements of a request: objects, their members, arrays that are not tensors; more get
            413.
        max_head_bytes: Longest request line and headers together; longer ones get 431.
        max_head_lines: Most headers of a request; more get 431.
        max_connections: Most open connections; further ones get 503 and are closed.
        backlog: Connections that the kernel queues until the server accepts them.
        keep_alive_s: Time after which an idle connection is closed.
        read_timeout_s: Time without data in the middle of a request after which its client gets 408.
        min_bytes_per_s: Least mean rate of a request over `read_timeout_s`; a slower client gets 408 as well.
        write_timeout_s: Time without progress after which a client that stops reading is disconnected.
        certfile: TLS certificate chain in PEM; turns on HTTPS.
        keyfile: Its private key, if it is not in the same file.
        api_keys: API key that requests must carry, as `X-API-Key` or `Authorization: Bearer`. @FILE names a file with
            one key in each line; lines that begin with # are comments. Without keys, any client may call. In a
            configuration file it may be a mapping of names to keys, which makes each name a tenant.
        api_key_files: File with the API keys of this tenant; see `tenants`.
        tenant_header: Header that names a child of the tenant whose key a request shows, also over gRPC; the children
            share the tenant's part and limits. Gateways send `x-gateway-inference-fairness-id` or
            `x-llm-d-inference-fairness-id`. Needs API keys with names.
        public_metrics: Answer `/metrics` without an API key: inference gateways have none when they read it.
        allowed_hosts: Host names that requests may use beside `localhost` and addresses, `*` for any. Default: no other
            names when bound to loopback without keys, otherwise any.
        cors_origins: Origins whose pages may call, `*` allows all.
        access_log: Log a line for each request.
        answer_cost: Report the cost of each answer, in the header `Forebay-Cost` or in trailers of gRPC.
        worker_second_price: Price of a worker second, in any currency; the dashboard shows what each tenant costs.
        manage: Allow clients to load, swap, weight and unload versions that the project names.
        dashboard: Serve the dashboard at `/ui`.
        show_failures: Show the exception of the model, and its place in your files, in a 500; otherwise only in the
            log. Default: to all clients with `reload`, else to clients on this machine without API keys and without
            proxies.
        shared_memory: Let clients name POSIX shared memory for tensors (KServe v2). They can then read and write all
            shared memory that this server can, including that of other programs on this machine.
    """

    host: Annotated[str, Written("--host", "ADDRESS")] = "127.0.0.1"
    port: Annotated[Port, Written("--http-port", "PORT", other_flags=("--port",))] = 8080
    max_body_bytes: Annotated[Count, Written("--max-body-bytes", "N")] = 64 * 1024 * 1024
    max_buffered_bytes: Annotated[Count, Written("--max-buffered-bytes", "N")] = 1024 * 1024 * 1024
    max_connection_bytes: Annotated[Count, Written("--max-connection-bytes", "N")] = 512 * 1024 * 1024
    max_form_bytes: Annotated[Count, Written("--max-form-bytes", "N")] = 1024 * 1024 * 1024
    max_form_parts: Annotated[Count, Written("--max-form-parts", "N")] = 256
    max_form_disk_bytes: Annotated[Count, Written("--max-form-disk-bytes", "N")] = 8 * 1024 * 1024 * 1024
    form_memory_bytes: Annotated[Count, Written("--form-memory-bytes", "N")] = 1024 * 1024
    max_tensor_elements: Annotated[Count, Written("--max-tensor-elements", "N")] = MAX_TENSOR_ELEMENTS
    max_elements: Annotated[Count, Written("--max-elements", "N")] = MAX_ELEMENTS
    max_head_bytes: Annotated[int, Meta(ge=256), Written("--max-head-bytes", "N")] = 64 * 1024
    max_head_lines: Annotated[Count, Written("--max-head-lines", "N")] = 128
    max_connections: Annotated[Count, Written("--max-connections", "N")] = 16_384
    backlog: Annotated[Count, Written("--backlog", "N")] = 2048
    keep_alive_s: Annotated[SomeSeconds, Written("--keep-alive-s", "S")] = 75.0
    read_timeout_s: Annotated[SomeSeconds, Written("--read-timeout-s", "S")] = 30.0
    min_bytes_per_s: Annotated[int, Meta(ge=0), Written("--min-bytes-per-s", "N")] = 240
    write_timeout_s: Annotated[SomeSeconds, Written("--write-timeout-s", "S")] = 30.0
    certfile: Annotated[str | None, Written("--certfile", "PEM", is_path=True)] = None
    keyfile: Annotated[str | None, Written("--keyfile", "PEM", is_path=True)] = None
    api_keys: Annotated[tuple[str, ...], Written("--api-key", "KEY", is_secret=True)] = ()
    api_key_files: Annotated[tuple[str, ...], Written("--api-key-file", "NAME=FILE"), Checked(_named_files)] = ()
    tenant_header: Annotated[
        str | None, Written("--tenant-header", "NAME"), Checked(_tenant_header, _TENANT_HEADER)
    ] = None
    public_metrics: Annotated[bool, Written("--public-metrics")] = False
    allowed_hosts: Annotated[tuple[str, ...], Written("--allowed-host", "NAME"), Checked(_hosts)] = ()
    cors_origins: Annotated[tuple[str, ...], Written("--cors-origin", "ORIGIN"), Checked(_origins)] = ()
    access_log: Annotated[bool, Written("--access-log")] = False
    answer_cost: Annotated[bool, Written("--answer-cost")] = False
    worker_second_price: Annotated[Annotated[float, Meta(gt=0.0)] | None, Written("--worker-second-price", "P")] = None
    manage: Annotated[bool | None, Written("--manage", usual="on where requests need a key")] = None
    dashboard: Annotated[bool, Written("--dashboard")] = True
    show_failures: Annotated[bool | None, Written("--show-failures", usual="for this machine")] = None
    shared_memory: Annotated[bool, Written("--shared-memory")] = False

    @property
    def elements(self) -> ElementLimits:
        """How many elements a request may have."""
        return ElementLimits(self.max_tensor_elements, self.max_elements)


class GrpcConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The gRPC port; other limits are those of HTTP, or come from the configuration of a pipeline.

    Attributes:
        host: Address to bind.
        port: TCP port of KServe v2 and TensorFlow Serving over gRPC; 0 chooses a free one. Without it there is no gRPC
            port, except for a pipeline's own.
        max_message_bytes: Longest message, in and out, also once unpacked; longer ones get RESOURCE_EXHAUSTED.
        max_buffered_bytes: Bytes of messages and of answers that clients have not taken yet, of all connections and
            ports together. Beyond it, calls whose clients do not read are reset, and the largest message that is
            arriving gets RESOURCE_EXHAUSTED.
        max_connection_bytes: The same for one connection: while it holds more, its next calls get RESOURCE_EXHAUSTED;
            one message may always have `max_message_bytes`.
        max_tensor_elements: Elements of the tensors of a message; more get RESOURCE_EXHAUSTED.
        max_elements: All other elements of a message: map entries, repeated fields; more get RESOURCE_EXHAUSTED.
        max_metadata_bytes: Longest metadata of a call as HTTP/2 counts it: names, values and 32 bytes for each field.
        max_metadata_fields: Fields of a call's metadata; more get RESOURCE_EXHAUSTED.
        max_calls: Calls at a time, without health checks; more get RESOURCE_EXHAUSTED.
        max_watches: Clients that watch the health at a time; more get RESOURCE_EXHAUSTED.
        max_streams: Calls at a time on one connection; clients wait with more.
        max_connections: Connections at a time; more are closed.
        backlog: Connections that the kernel keeps until the server takes them.
        read_timeout_s: A client that is in the middle of a frame or of a message and sends nothing for this time is cut
            off.
        write_timeout_s: A client that takes nothing of its answers for this time is cut off.
        certfile: TLS certificate chain in PEM; with it the port speaks TLS.
        keyfile: Its private key; None if `certfile` holds both.
        api_keys: If any, a call needs one of them in its metadata, as `x-api-key` or `authorization: Bearer`.
        access_log: Log a line for each call.
        answer_cost: Whether the trailers of each answer say what it has cost.
    """

    host: str = "127.0.0.1"
    port: Annotated[Port | None, Written("--grpc-port", "PORT")] = None
    max_message_bytes: Count = 256 * 1024 * 1024
    max_buffered_bytes: Count = 1024 * 1024 * 1024
    max_connection_bytes: Count = 512 * 1024 * 1024
    max_tensor_elements: Count = MAX_TENSOR_ELEMENTS
    max_elements: Count = MAX_ELEMENTS
    max_metadata_bytes: Count = 16 * 1024
    max_metadata_fields: Count = 128
    max_calls: Annotated[Count, Written("--grpc-max-calls", "N")] = 4096
    max_watches: Annotated[Count, Written("--grpc-max-watches", "N")] = 1024
    max_streams: Annotated[Count, Written("--grpc-max-streams", "N")] = 1024
    max_connections: Count = 4096
    backlog: Count = 2048
    read_timeout_s: SomeSeconds = 30.0
    write_timeout_s: SomeSeconds = 30.0
    certfile: str | None = None
    keyfile: str | None = None
    api_keys: tuple[str, ...] = ()
    access_log: bool = False
    answer_cost: bool = False

    @property
    def elements(self) -> ElementLimits:
        """How many elements a message may have."""
        return ElementLimits(self.max_tensor_elements, self.max_elements)


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that override those of models; None leaves the model's own.

    Attributes:
        name: Name of the endpoint, for a target that is one model.
        version: Version reported in answers and metrics; several under one name are served side by side.
        weight: Share of the requests that name no version; without any weights the first version gets all.
        env: Variables of the environment of its worker processes, beside those of the server.
        worker_kind: Where models run: in worker processes, in threads of the server, or on its event loop (inline).
        workers: Workers of each model, at most 1024. A range such as 1:8, or {min: 1, max: 8} in a file, follows the
            load. With 0 the server starts none, and workers dial in (`--attach`).
        target_queue_ms: With a range of workers: mean time in the queue above which workers are added.
        scale_down_s: With a range of workers: time after which one unneeded worker stops.
        devices: Devices of the workers, assigned in turn: `cuda:0,cuda:1`, or sets of processors, `cpu:0-3,cpu:4-7`.
        threads: Threads of each worker that call its model; of an `async def predict` in a process, calls on one loop.
        python: Interpreter of the worker processes; forebay must be installed there.
        max_batch_size: Most samples in a batch.
        max_wait_ms: Time a free worker waits for a batch to fill.
        idle: What a free worker does with a batch that is not full: gather (wait for clients that are about to
            return), go, or wait.
        timeout_ms: Time limit of a request that states none; of a streamed answer, until its first part.
        deadline_ms: Deadline of a request that states none; a shorter `deadline_ms` of its tenant wins. A request that
            cannot meet its deadline is rejected at once.
        max_timeout_ms: Longest time limit that a request may state; a longer one is cut to this. `timeout_ms` may not
            be longer. A streamed answer that has begun may take this long if its request states no limit.
        stream_idle_ms: Longest pause between two parts of a streamed answer; a longer one ends it. 0 sets no limit.
        max_queue: Most samples that wait; further requests get 429.
        stuck_s: Time after which a worker is replaced that still runs a batch without waiting clients. A stuck thread
            cannot be stopped and is abandoned.
        health_s: Time between two calls of a model's `healthy`; a call that takes longer counts as failed.
        max_health_failures: Failed calls of `healthy` in a row after which a worker process is replaced.
        policy: With auto, forebay learns batch sizes and waits that meet the latency objective.
        latency_objective_ms: Latency that 95 of 100 requests must meet.
        isolate_errors: Split a failed batch in halves until the failing sample is alone.
        single_flight: Which equal concurrent requests run only once: none, those of one tenant, or all.
        trial_s: Time limit for the trial run of a model file on generated values; a file that exceeds it serves one
            request at a time.
        trust_types: Types that a `.skops` file may hold beside those that skops trusts, by their full names. Loading
            them can run code.
        trust_pickle: Load pickles (`.joblib`, `.pkl`, `.pickle`) and files of PyTorch (`.pt2`, `.pt`, `.ts`), which can
            run any code.
        max_trial_bytes: Memory of the process that first loads a model file; a file that needs more is rejected.
        ray: What each worker reserves in a Ray cluster (`--cluster`); elsewhere it has no meaning.
    """

    name: Annotated[str | None, Written("--name", "NAME", "its own"), Checked(endpoint_name)] = None
    version: Annotated[str | None, Checked(version_name), Written(is_verbatim=True)] = None
    weight: Annotated[int, Meta(ge=0)] | None = None
    env: dict[str, str] = {}
    worker_kind: Annotated[WorkerKind, Written("--worker-kind")] = "process"
    workers: Annotated[
        int | WorkerRange | None,
        Written("--workers", "N", "1, or one for each device", is_verbatim=True),
        Checked(read_workers, WORKERS_NEEDED),
    ] = None
    target_queue_ms: Annotated[SomeMilliseconds, Written("--target-queue-ms", "MS")] = TARGET_QUEUE_MS
    scale_down_s: Annotated[SomeSeconds, Written("--scale-down-s", "S")] = SCALE_DOWN_S
    devices: Annotated[tuple[str, ...], Written("--devices", "DEVICE,..."), Checked(existing)] = ()
    threads: Annotated[Workers, Written("--threads", "N")] = 1
    python: Annotated[str | None, Written("--python", "PATH", "this one", is_path=True)] = None
    max_batch_size: Annotated[
        Count | None, Written("--max-batch-size", "N", f"the model's own, {Model.max_batch_size}")
    ] = None
    max_wait_ms: Annotated[Milliseconds | None, Written("--max-wait-ms", "MS", "only for returning clients")] = None
    idle: Annotated[Literal["gather", "go", "wait"] | None, Written("--idle", usual="gather")] = None
    timeout_ms: Annotated[Count | None, Written("--timeout-ms", "MS", str(Model.timeout_ms))] = None
    deadline_ms: Annotated[DeadlineMilliseconds | None, Written("--deadline-ms", "MS")] = None
    max_timeout_ms: Annotated[Count, Written("--max-timeout-ms", "MS")] = 3_600_000
    stream_idle_ms: Annotated[Milliseconds | None, Written("--stream-idle-ms", "MS", str(Model.stream_idle_ms))] = None
    max_queue: Annotated[Count | None, Written("--max-queue", "N", str(Model.max_queue))] = None
    stuck_s: Annotated[SomeSeconds, Written("--stuck-s", "S")] = STUCK_S
    health_s: Annotated[SomeSeconds, Written("--health-s", "S")] = 5.0
    max_health_failures: Annotated[Count, Written("--max-health-failures", "N")] = 3
    policy: Annotated[Literal["auto"] | None, Written("--policy")] = None
    latency_objective_ms: Annotated[SomeMilliseconds | None, Written("--latency-objective-ms", "MS")] = None
    isolate_errors: Annotated[bool | None, Written("--isolate-errors")] = None
    single_flight: Annotated[Sharing | None, Written("--single-flight", usual="off")] = None
    trial_s: Annotated[SomeSeconds, Written("--trial-s", "S")] = 60.0
    trust_types: Annotated[tuple[str, ...], Written("--trust-types", "TYPE,...")] = ()
    trust_pickle: Annotated[bool, Written("--trust-pickle")] = False
    max_trial_bytes: Annotated[
        Annotated[int, Meta(ge=1 << 26)] | None,
        Written("--max-trial-bytes", "N", "2 GiB, and five for each byte of its files"),
    ] = None
    ray: RayNeeds = RayNeeds()

    @property
    def bounds(self) -> WorkerRange | None:
        """Within which the number of workers follows the load; None if it is fixed."""
        if not isinstance(self.workers, WorkerRange):
            return None
        return msgspec.structs.replace(
            self.workers, target_queue_ms=self.target_queue_ms, scale_down_s=self.scale_down_s
        )

    @property
    def dials_in(self) -> bool:
        """Whether the workers are started elsewhere."""
        return self.workers.dial_in if isinstance(self.workers, WorkerRange) else self.workers == 0

    @property
    def fixed_workers(self) -> int | None:
        """The number of workers, where it cannot follow the load.

        Raises:
            ConfigError: It is to follow the load.
        """
        if isinstance(self.workers, WorkerRange):
            raise ConfigError(
                f"workers is a range, {self.workers}: only models have workers whose number follows the load, and not "
                "graphs, servings and projects of other servers; give a number"
            )
        return self.workers


class AttachConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Workers started elsewhere that attach to this server, and other servers that have models for it.

    Attributes:
        address: Address at which they connect, `unix:PATH` or `tcp:HOST:PORT`.
        secret: Shared secret of server and workers, or @FILE; required if other machines can connect without `cafile`.
        certfile: TLS certificate chain in PEM; with it workers must speak TLS.
        keyfile: Its private key, if it is not in the same file.
        cafile: Authorities in PEM; workers must then show a certificate of one of them.
        hello_s: Time limit for the first message of a connection.
        grace_s: Time that requests wait for a worker after the last one has left, before they get 503.
        hang_s: Time without an answer after which a worker is dropped; another worker gets its batch.
        max_connections: Connections at a time; each thread of a worker has one, and over TCP the worker one more.
        max_frame_bytes: Longest frame that is read from a worker.
        max_elements: Most values in such a frame.
        members: Let programs join here (`forebay.cluster.join`).
        peers: Servers that share their members with this one, by the address of their --attach; they are dialled like
            owners.
        owners: Servers whose models this server offers as well, by the address of their --attach; it forwards requests
            to them.
        owner_cafile: Authorities in PEM; owners must then speak TLS and show a certificate of one of them.
        owner_certfile: TLS certificate chain in PEM that owners are shown.
        owner_keyfile: Its private key, if it is not in the same file.
        owner_grace_s: Time that requests wait for an unreachable owner before they get 503.
    """

    address: Annotated[str | None, Written("--attach", "ADDRESS")] = None
    secret: Annotated[bytes | None, Written("--attach-secret", "SECRET", variable="FOREBAY_SECRET", is_secret=True)] = (
        None
    )
    certfile: Annotated[str | None, Written("--attach-certfile", "PEM", is_path=True)] = None
    keyfile: Annotated[str | None, Written("--attach-keyfile", "PEM", is_path=True)] = None
    cafile: Annotated[str | None, Written("--attach-cafile", "PEM", is_path=True)] = None
    hello_s: Annotated[Seconds, Written("--worker-hello-s", "S")] = 5.0
    grace_s: Annotated[Seconds, Written("--worker-grace-s", "S")] = 5.0
    hang_s: Annotated[Seconds | None, Written("--worker-hang-s", "S", "half of the timeout")] = None
    max_connections: Annotated[Count, Written("--max-worker-connections", "N")] = 256
    max_frame_bytes: Annotated[int, Meta(ge=1024), Written("--max-worker-frame-bytes", "N")] = 256 * 1024 * 1024
    max_elements: Annotated[Count, Written("--max-worker-elements", "N")] = MAX_ELEMENTS
    members: Annotated[bool, Written("--attach-members")] = True
    peers: Annotated[tuple[str, ...], Written("--attach-peer", "ADDRESS")] = ()
    owners: Annotated[tuple[str, ...], Written("--owner", "ADDRESS")] = ()
    owner_cafile: Annotated[str | None, Written("--owner-cafile", "PEM", is_path=True)] = None
    owner_certfile: Annotated[str | None, Written("--owner-certfile", "PEM", is_path=True)] = None
    owner_keyfile: Annotated[str | None, Written("--owner-keyfile", "PEM", is_path=True)] = None
    owner_grace_s: Annotated[Seconds, Written("--owner-grace-s", "S")] = 15.0


class ClusterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster that serves the models, instead of this process.

    Attributes:
        address: The cluster: auto finds the one that this machine is a node of, HOST:PORT is that of its head, and
            local starts Ray here.
        deployment: Name of the deployment; the same name again makes a new version of it.
        orphan_grace_s: Time that workers without a server keep their model loaded.
    """

    address: Annotated[str | None, Written("--cluster", "ADDRESS"), Checked(_cluster, _CLUSTER)] = None
    deployment: Annotated[str, Written("--deployment", "NAME"), Checked(_deployment, _DEPLOYMENT)] = "default"
    orphan_grace_s: Annotated[SomeSeconds, Written("--cluster-orphan-grace-s", "S")] = 900.0


class RepositoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Models in a folder or a bucket.

    Attributes:
        poll_s: Time between two listings of the repository; 0 lists it at the start and on SIGHUP only.
        timeout_s: Time limit of a listing; one that takes longer is discarded and repeated.
        max_pause_s: Longest pause between two listings when a listing is slow.
        max_files: Most files in the repository; a listing with more changes nothing.
        versions: Served versions of a model: latest, latest:N, all, or some, such as 1,3.
        lazy: Load a model with its first request, not at the start.
        max_models: Most versions in memory; the least recently used one is evicted.
        max_model_bytes: Most bytes of files of the versions in memory.
        folder: Cache folder of this machine for models of buckets.
        max_disk_models: Most versions in that folder.
        max_disk_bytes: Most bytes in that folder.
    """

    poll_s: Annotated[Seconds, Written("--repository-poll-s", "S")] = 10.0
    timeout_s: Annotated[SomeSeconds, Written("--repository-timeout-s", "S")] = 120.0
    max_pause_s: Annotated[SomeSeconds, Written("--repository-max-pause-s", "S")] = 60.0
    max_files: Annotated[Count, Written("--repository-max-files", "N")] = 1_000_000
    versions: Annotated[str, Written("--versions", "VERSIONS"), Checked(_policy)] = "latest"
    lazy: Annotated[bool | None, Written("--lazy", usual="on with --max-models or --max-model-bytes")] = None
    max_models: Annotated[Count | None, Written("--max-models", "N")] = None
    max_model_bytes: Annotated[Count | None, Written("--max-model-bytes", "N")] = None
    folder: Annotated[
        Path | None, Written("--repository-folder", "FOLDER", "~/.cache/forebay/models", is_path=True)
    ] = None
    max_disk_models: Annotated[Count | None, Written("--max-disk-models", "N")] = None
    max_disk_bytes: Annotated[Count | None, Written("--max-disk-bytes", "N")] = None


class ProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The process as a whole.

    Attributes:
        config: YAML file with settings; without it, the forebay.yaml that TARGET names.
        drain_s: Time limit for open requests after SIGTERM.
        reload: Reload models when a Python file of the project changes, as SIGHUP does; for development.
        load_timeout_s: Time limit for a reloaded model to become ready; until then, and if it fails, the old one stays.
        log_format: One JSON object a line, or text.
        log_level: Least severe level that is logged.
        otel: Send traces to an OpenTelemetry collector, which the OTEL_* variables name. Needs the extra `otel`.
        fronts: Processes that share the ports and accept requests for one more process with the queues and workers.
            Without it one process does both. Useful with three cores or more.
        process_hang_s: Time without an answer after which a server process of `fronts` or of a cluster is replaced; 0
            waits for ever.
        tenants: Share and limits of each tenant, by the name of its API keys. `weight` (0.001 to 1000) is its share of
            the workers of a model among tenants of its `class` (0 to 3, 0 is the most urgent). Default: weight 1, class
            1. Requests that would exceed its `deadline_ms` or `limits` are rejected at once. The name * stands for all
            tenants without an entry of their own.
        cost_log: Folder for the costs of each tenant, one file of JSON lines a day; `forebay costs` sums them.
        extra_routes: Serve forebay's own paths beside those of a project of another server.
        state_dir: Folder for the readiness files of a project.
    """

    config: Annotated[Path | None, Written("--config", "FILE")] = None
    drain_s: Annotated[Seconds, Written("--drain-s", "S", key="drain")] = 30.0
    reload: Annotated[bool, Written("--reload")] = False
    load_timeout_s: Annotated[SomeSeconds, Written("--load-timeout-s", "S")] = 300.0
    log_format: Annotated[
        Literal["json", "text"] | None, Written("--log-format", usual="text at a terminal, else json", key="format")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"] | None, Written("--log-level", usual="info", key="level")
    ] = None
    otel: Annotated[bool, Written("--otel")] = False
    fronts: Annotated[Annotated[int, Meta(ge=1, le=MAX_FRONTS)] | None, Written("--fronts", "N")] = None
    process_hang_s: Annotated[Seconds, Written("--process-hang-s", "S")] = 30.0
    tenants: dict[str, TenantConfig] = {}
    cost_log: Annotated[Path | None, Written("--cost-log", "FOLDER", is_path=True)] = None
    extra_routes: Annotated[bool, Written("--extra-routes")] = True
    state_dir: Annotated[Path | None, Written("--state-dir", "FOLDER", "its original's places", is_path=True)] = None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that joins a server: `forebay worker`.

    Attributes:
        connect: Address at which the server lets workers attach, unix:PATH or tcp:HOST:PORT; or @FILE with the address,
            which the worker reads each time it connects.
        secret: Shared secret of server and workers, or @FILE, or in FOREBAY_SECRET.
        cafile: Authorities in PEM, one of which must have signed the certificate of the server; with it the worker
            speaks TLS.
        certfile: TLS certificate chain in PEM, for a server that asks for one.
        keyfile: Its private key, if it is not in the same file.
        threads: Batches to run at a time, in as many threads.
        name: Name of the endpoint that it serves.
        version: Its version.
        device: Device to run on, such as cuda:1 or the CPUs cpu:0-3; set before the model is imported.
        once: Exit when the server is unreachable, instead of waiting for it.
        health_file: File that exists while the worker is ready and is touched every second while it is healthy; for
            probes of Kubernetes.
        orphan_grace_s: Time without a server after which the worker exits; None waits for ever.
    """

    connect: Annotated[str, Written("--connect", "ADDRESS")] = ""
    secret: Annotated[str | None, Written("--secret", "SECRET", is_secret=True)] = None
    cafile: Annotated[str | None, Written("--cafile", "PEM")] = None
    certfile: Annotated[str | None, Written("--certfile", "PEM")] = None
    keyfile: Annotated[str | None, Written("--keyfile", "PEM")] = None
    threads: Annotated[Workers, Written("--threads", "N")] = 1
    name: Annotated[str | None, Written("--name", "NAME", "its own"), Checked(endpoint_name)] = None
    version: Annotated[str | None, Written("--model-version", "VERSION", "its own"), Checked(version_name)] = None
    device: Annotated[str | None, Written("--device", "DEVICE"), Checked(existing_one)] = None
    once: Annotated[bool, Written("--once")] = False
    health_file: Annotated[str | None, Written("--health-file", "PATH")] = None
    orphan_grace_s: Annotated[SomeSeconds | None, Written("--orphan-grace-s", "S", "waits for ever")] = None


def grpc_like(http: HttpConfig, grpc: GrpcConfig) -> GrpcConfig:
    """Return the gRPC port beside one of HTTP, which fills in whatever was not said."""
    alike = (set(GrpcConfig.__struct_fields__) & set(HttpConfig.__struct_fields__)) - {"port"}
    return msgspec.structs.replace(
        grpc,
        max_message_bytes=http.max_body_bytes,
        max_metadata_bytes=http.max_head_bytes,
        max_metadata_fields=http.max_head_lines,
        **{name: getattr(http, name) for name in alike},
    )


SECTIONS: Final = (HttpConfig, Overrides, RepositoryConfig, AttachConfig, GrpcConfig, ClusterConfig, ProcessConfig)
"""All that a server can be told, in the order of the help and of the reference."""
