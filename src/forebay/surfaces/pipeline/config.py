# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline server: a YAML file or a dict, checked, with the settings of each op.

What is wrong stops the start with the place, the key, what was found and what is allowed. A key that nothing reads is a
warning: files written for other versions of the original load unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Annotated, Any, Final, Literal, cast

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError
from forebay.server.config_document import Document, Path
from forebay.server.struct_reader import StructReader, dotted
from forebay.server.yaml import load
from forebay.server.yaml import read as read_file
from forebay.surfaces.pipeline.predictors.model_settings import ClientType, LocalConf, OpModel
from forebay.surfaces.pipeline.store.store import STORE_KEYS
from forebay.types.settings import Checked, Count, Setting, SomeMilliseconds, Workers, Written, declared
from forebay.workers.pool import MAX_SLOTS

FIRST_PORT: Final = 1024
LAST_PORT: Final = 65_535

RequestParse = Literal["auto", "raw", "ndarray", "literal"]
ErrorCodes = Literal["v0.7", "v0.4"]
Port = Annotated[int, Meta(ge=FIRST_PORT, le=LAST_PORT)]


def _http_port(port: int) -> int | None:
    if port > 0 and not FIRST_PORT <= port <= LAST_PORT:
        raise ValueError(f"expected a whole number from {FIRST_PORT} to {LAST_PORT}, or 0 for none")
    return port if port > 0 else None


class TracerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tracer.

    Attributes:
        interval_s: Seconds between two of its blocks; below 1 it is off.
    """

    interval_s: float = -1


class DagConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the graph as a whole.

    Attributes:
        is_thread_op: Ops run in threads; otherwise each in processes of its own.
        retry: Times the whole graph is tried in all; again only after a time-out.
        timeout_ms: Time a request has for everything, if it names none itself; None sets no time of its own.
        use_profile: Write a profile line for each request.
        tracer: What it does while it serves, in a file.
        channel_size: Requests that may wait before an op; 0 leaves the bound to `worker_num`.
        client_type: Client of ops that name none.
        first_arrival: Ops with several predecessors run on whichever result comes first.
        enable_prometheus: Serve the original's metrics on `prometheus_port`.
        prometheus_port: Their port.
        request_parse: How texts of a request become values.
        external_store: Settings of the store for large values; None leaves it to shared memory.
    """

    is_thread_op: bool = True
    retry: Count = 1
    timeout_ms: Annotated[SomeMilliseconds | None, Written(key="timeout")] = None
    use_profile: bool = False
    tracer: TracerConfig = TracerConfig()
    channel_size: Annotated[int, Meta(ge=0)] = 0
    client_type: ClientType = "brpc"
    first_arrival: Annotated[bool, Written(key="channel_recv_first_arrive", older_key="channel_recv_frist_arrive")] = (
        False
    )
    enable_prometheus: bool = False
    prometheus_port: Port = 19_393
    request_parse: RequestParse = "auto"
    external_store: Mapping[str, Any] | None = None


class PipelineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline server is told.

    Attributes:
        rpc_port: Port of gRPC; None where only HTTP was asked for.
        http_port: Port of HTTP; None opens none.
        host: Address both bind.
        worker_num: Requests inside the graph at a time; with `build_dag_each_worker` the number of processes.
        build_dag_each_worker: Run the whole graph in each of `worker_num` processes.
        max_queue: Requests that may wait outside the graph; one more is refused.
        max_message_bytes: Longest request or answer.
        proto: A .proto file, or a generated module, whose Request and Response replace the usual ones.
        methods: What requests may call; None allows anything.
        error_codes: Which generation's numbers answers carry.
        debug_errors: Errors name classes and functions.
        log_path: Folder for the log files; None writes none.
        log_level: What is logged.
        folder: What relative paths in it start from: that of the file.
        places: Where each of its keys stands, by the key with those above it; for messages.
        dag: What holds for the graph.
        op: Settings by the name of the op, as far as they are given.
    """

    rpc_port: Annotated[Port | None, Written(older_key="port")] = None
    http_port: Annotated[int | None, Checked(_http_port)] = None
    host: str = "127.0.0.1"
    worker_num: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    build_dag_each_worker: bool = False
    max_queue: Count = 1024
    max_message_bytes: Count = 256 * 1024 * 1024
    proto: str | None = None
    methods: Sequence[str] | None = None
    error_codes: ErrorCodes = "v0.7"
    debug_errors: bool = False
    log_path: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] | None = None
    folder: str = "."
    places: Mapping[str, str] = {}
    dag: DagConfig = DagConfig()
    op: Mapping[str, Mapping[str, Any]] = {}

    def at(self, key: str, message: str) -> str:
        """Return a message after the place of a key, if the file has that key."""
        return f"{self.places[key]}: {message}" if key in self.places else message

    def located(self, op: str, message: str) -> str:
        """Return a message about an op, after the place of the first key that it names, if the file has that key."""
        found: list[tuple[int, str]] = []
        for key, place in self.places.items():
            if key.startswith(f"op.{op}."):
                named = re.search(rf"(?<!\w){key.rpartition('.')[2]}(?![\w.])", message)
                if named is not None:
                    found.append((named.start(), place))
        return f"{min(found)[1]}: {message}" if found else message


class OpSettings(OpModel, frozen=True, kw_only=True):
    """The settings of an op; their users decide what None means.

    Attributes:
        concurrency: Workers.
        timeout: Milliseconds a call of `process` may take; 0 or less for any time.
        retry: Calls of `process` in all; again only after a time-out.
        batch_size: Samples that may share a call of `process`.
        auto_batching_timeout: Milliseconds a sample waits for others to share a batch with.
        local_service_conf: The model without endpoints, as far as it is described.
        run_process: Call `process` of an op that has no model, too.
        batch_style: Whether `process` is given one dict for all samples, or a list with one for each.
        share_instance: All threads call the same object.
        isolate_failures: Run a batch that fails again in parts.
    """

    concurrency: Workers = 1
    timeout: float = -1
    retry: Count = 1
    batch_size: Count = 1
    auto_batching_timeout: float | None = None
    local_service_conf: Mapping[str, Any] | None = None
    run_process: bool = False
    batch_style: Literal["merged", "list"] = "merged"
    share_instance: bool = False
    isolate_failures: bool = False


OP_DEFAULTS: Final[Mapping[str, Any]] = msgspec.structs.asdict(OpSettings())
"""What an op has where neither its constructor nor the file says anything."""


class _LocalKeys(LocalConf, frozen=True, kw_only=True):
    """The keys of `local_service_conf`.

    Attributes:
        port: Where the original starts a process for the model; not used.
    """

    port: Port | None = None


def read(source: str | FilePath | Mapping[str, Any]) -> tuple[PipelineConfig, list[str]]:
    """Read a YAML file, or its content as a dict; returns the configuration and warnings about keys that nothing reads.

    Raises:
        ConfigError: In one line: where, which key, what was found and what is allowed.
    """
    if isinstance(source, Mapping):
        reader = _Reader(Document("yml_dict", dict(source)))
        folder = "."
    else:
        path = FilePath(source)
        reader = _Reader(load(read_file(path), str(path)))
        folder = str(path.parent)
    config = reader.config()
    _check_ports(config, reader)
    return msgspec.structs.replace(config, folder=folder, places=reader.places), reader.warnings


def _check_ports(config: PipelineConfig, reader: _Reader) -> None:
    """Refuse two servers on one port."""
    rpc = "rpc_port" if "rpc_port" in reader.places else "port"
    ports = {rpc: config.rpc_port, "http_port": config.http_port}
    if config.dag.enable_prometheus:
        ports["dag.prometheus_port"] = config.dag.prometheus_port
    taken: dict[int, str] = {}
    for key, found in ports.items():
        if found is not None and taken.setdefault(found, key) != key:
            place = reader.places.get(key) or reader.places[taken[found]]
            raise ConfigError(f"{place}: {key} is {found}, and so is {taken[found]}; each needs a port of its own")


def settle(name: str, given: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of an op: the constructor's before the file's before the usual ones.

    Args:
        given: What its constructor was given; None counts as not given.

    Raises:
        ConfigError: If the constructor was given what is not allowed.
    """
    known = declared(OpSettings)
    told = {key: value for key, value in given.items() if key in known}
    return {**OP_DEFAULTS, **section, **_Reader(Document(f"op '{name}'", None)).fields((), told, known)}


def masked(config: PipelineConfig, ops: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the configuration that holds, as lines of YAML without its secrets."""
    import yaml

    plain: dict[str, Any] = msgspec.to_builtins(config)
    del plain["folder"], plain["places"]
    plain["op"] = {name: {key: value for key, value in one.items() if value is not None} for name, one in ops.items()}
    # By way of JSON, so that whatever a constructor was given stands there as text.
    text = json.dumps(_without_secrets(plain), default=lambda value: f"<{type(value).__name__}>")
    return yaml.safe_dump(json.loads(text), sort_keys=False)


_SECRET: Final = re.compile(r"key$|password|passwd|secret|token|credential", re.IGNORECASE)
_USER_INFO: Final = re.compile(r"(?<=://)[^/@\s]+@")


def _without_secrets(value: Any, key: str = "") -> Any:
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value)
        return {str(name): _without_secrets(one, str(name)) for name, one in items.items()}
    if isinstance(value, (list, tuple)):
        return [_without_secrets(one, key) for one in cast("Sequence[Any]", value)]
    if value and _SECRET.search(key):
        return "***"
    return _USER_INFO.sub("***@", value) if isinstance(value, str) else value


# ---------------------------------------------------------------------------------------------------------------------
# Checks


_PARTS: Final[Mapping[str, Mapping[str, Setting]]] = {
    "external_store": STORE_KEYS,
    "local_service_conf": declared(_LocalKeys),
}
"""Settings that are kept as far as they are given."""


class _Reader(StructReader):
    """Reads a configuration and notes where its keys stand."""

    is_lenient = True

    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self.places: dict[str, str] = {}

    def config(self) -> PipelineConfig:
        data = self.mapping((), self.document.data)
        if data.get("wire") is not None:
            self.wrong(
                ("wire",),
                data["wire"],
                "expected no such key; clients of v0.4 and later and REST are served without it, and v0.3 is not",
            )
        keys = {name: one for name, one in declared(PipelineConfig).items() if name not in {"folder", "places"}}
        return PipelineConfig(**self.fields((), data, keys))

    def fields(self, path: Path, value: Any, settings: Mapping[str, Setting]) -> dict[str, Any]:
        for inner in (path, *((*path, key) for key in self.mapping(path, value))):
            self.places[dotted(inner)] = self.document.where(inner)
        return super().fields(path, value, settings)

    def value(self, path: Path, value: Any, setting: Setting) -> Any:
        if setting.name == "op":
            ops = self.mapping(path, value).items()
            return {str(name): self.fields((*path, name), one, declared(OpSettings)) for name, one in ops}
        if setting.name in _PARTS:
            return self.fields(path, value, _PARTS[setting.name])
        if setting.is_list and isinstance(value, str):  # the original takes no single text
            self.wrong(path, value, setting.needed())
        return super().value(path, value, setting)
