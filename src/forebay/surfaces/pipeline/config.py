# SPDX-License-Identifier: Apache-2.0
"""The configuration of a pipeline server: a YAML file or a dict, checked, with the settings of each op.

What is wrong stops the start with the place, the key, what was found and what is allowed. A key that nothing reads is a
warning: files written for other versions of the original load unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any, Final, Literal, NoReturn, cast

import msgspec

from forebay.errors import ConfigError
from forebay.server.walker import Check, Walker, boolean, dotted, number, one_of, positive, text, whole, words
from forebay.server.yaml import Document, Path, load
from forebay.surfaces.pipeline.predictors.settings import CLIENT_TYPES
from forebay.surfaces.pipeline.store.store import STORE_KEYS
from forebay.types.did_you_mean import meant
from forebay.types.settings import MAX_WORKERS
from forebay.workers.pool import MAX_SLOTS

FIRST_PORT: Final = 1024
LAST_PORT: Final = 65_535

RequestParse = Literal["auto", "raw", "ndarray", "literal"]
ErrorCodes = Literal["v0.7", "v0.4"]


class DagConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the graph as a whole.

    Attributes:
        is_thread_op: Ops run in threads; otherwise each in processes of its own.
        retry: Times the whole graph is tried in all; again only after a time-out.
        timeout_ms: Time a request has for everything, if it names none itself; None sets no time of its own.
        use_profile: Write a profile line for each request.
        tracer_interval_s: Seconds between two blocks of the tracer; below 1 it is off.
        channel_size: Requests that may wait before an op; 0 leaves the bound to `worker_num`.
        client_type: Client of ops that name none.
        first_arrival: Ops with several predecessors run on whichever result comes first.
        enable_prometheus: Serve the original's metrics on `prometheus_port`.
        prometheus_port: Their port.
        request_parse: How texts of a request become values.
        external_store: Settings of the store for large values; None leaves it to shared memory.
    """

    is_thread_op: bool = True
    retry: int = 1
    timeout_ms: float | None = None
    use_profile: bool = False
    tracer_interval_s: float = -1
    channel_size: int = 0
    client_type: str = "brpc"
    first_arrival: bool = False
    enable_prometheus: bool = False
    prometheus_port: int = 19_393
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

    rpc_port: int | None = None
    http_port: int | None = None
    host: str = "127.0.0.1"
    worker_num: int = 1
    build_dag_each_worker: bool = False
    max_queue: int = 1024
    max_message_bytes: int = 256 * 1024 * 1024
    proto: str | None = None
    methods: Sequence[str] | None = None
    error_codes: ErrorCodes = "v0.7"
    debug_errors: bool = False
    log_path: str | None = None
    log_level: str | None = None
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


OP_DEFAULTS: Final[Mapping[str, Any]] = {
    "concurrency": 1,
    "timeout": -1,
    "retry": 1,
    "batch_size": 1,
    "auto_batching_timeout": None,
    "client_type": None,
    "server_endpoints": None,
    "client_config": None,
    "fetch_list": None,
    "local_service_conf": None,
    "endpoint_protocol": None,
    "use_encryption_model": None,
    "encryption_key": None,
    "run_process": False,
    "batch_style": "merged",
    "share_instance": False,
    "isolate_failures": False,
}
"""What an op has where neither its constructor nor the file says anything; None is decided by whoever uses it."""


def read(source: str | FilePath | Mapping[str, Any]) -> tuple[PipelineConfig, list[str]]:
    """Read a configuration.

    Args:
        source: A YAML file, or its content as a dict.

    Returns:
        The configuration, and warnings about keys that nothing reads.

    Raises:
        ConfigError: In one line: where, which key, what was found and what is allowed.
    """
    if isinstance(source, Mapping):
        document = Document("yml_dict", dict(source), {}, {})
        reader = _Reader(document, "yml_dict")
        folder = "."
    else:
        path = FilePath(source)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
        document = load(content, str(path))
        reader = _Reader(document)
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
        name: The op, for messages.
        given: What its constructor was given; None counts as not given.
        section: What the configuration says of it.

    Raises:
        ConfigError: If the constructor was given what is not allowed.
    """
    reader = _Reader(Document("", None, {}, {}), f"op '{name}'")
    settled = {**OP_DEFAULTS, **section}
    for key, value in given.items():
        if value is None or (key not in _OP_KEYS and key not in OP_DEFAULTS):
            continue
        settled[key] = _OP_KEYS[key](reader, (key,), value)
    return settled


def masked(config: PipelineConfig, ops: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the configuration that holds, as lines of YAML without its secrets.

    Args:
        config: What was read.
        ops: The settings that hold for each op of the graph.
    """
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


class _Reader(Walker):
    """Walks a configuration and notes where its keys stand."""

    def __init__(self, document: Document, place: str | None = None) -> None:
        super().__init__(document)
        self.places: dict[str, str] = {}
        self._place = place

    def where(self, path: Path) -> str:
        return super().where(path) if self._place is None else self._place

    def config(self) -> PipelineConfig:
        data = self.mapping((), self.document.data)
        if data.get("wire") is not None:
            self.wrong(
                ("wire",),
                data["wire"],
                "the wire format of v0.3 is not served; clients of v0.4 and later and REST are, without this key",
            )
        dag = self.section(("dag",), data.pop("dag", None), _DAG_KEYS)
        tracer = self.section(("dag", "tracer"), dag.pop("tracer", None), {"interval_s": number})
        ops = {
            str(name): self.section(("op", name), settings, _OP_KEYS)
            for name, settings in self.mapping(("op",), data.pop("op", None)).items()
        }
        top = self.section((), data, _TOP_KEYS)
        top["rpc_port"] = top.get("rpc_port", top.pop("port", None))
        http_port = top.pop("http_port", None)
        if http_port is not None and http_port > 0:
            top["http_port"] = port(self, ("http_port",), http_port)
        for name, renamed in _DAG_NAMES.items():
            if name in dag:
                dag[renamed] = dag.pop(name)
        if "interval_s" in tracer:
            dag["tracer_interval_s"] = tracer["interval_s"]
        return PipelineConfig(**top, dag=DagConfig(**dag), op=ops)

    def section(self, path: Path, value: Any, keys: Mapping[str, Check]) -> dict[str, Any]:
        """Check the keys of a mapping and their values, and note their places."""
        for inner in (path, *((*path, key) for key in self.mapping(path, value))):
            self.places[dotted(inner)] = self.where(inner)
        return super().section(path, value, keys)

    def unknown(self, path: Path, known: Iterable[str]) -> None:
        """Warn of a key: files written for other versions of the original load unchanged."""
        self.warn(path, f"nothing reads the key '{dotted(path)}'{meant(path[-1], known)}")

    def wrong(self, path: Path, value: Any, needed: str) -> NoReturn:
        """Refuse a value, shown as in Python, because some come from constructors and not from YAML."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        self.fail(path, f"{dotted(path) or 'the configuration'} is {shown}; {needed}")

    def fail(self, path: Path, message: str) -> NoReturn:
        raise ConfigError(f"{self.where(path)}: {message}")


port = whole(FIRST_PORT, LAST_PORT)


def _plain(reader: Walker, path: Path, value: Any) -> dict[Any, Any]:
    return reader.mapping(path, value)


def _store(reader: Walker, path: Path, value: Any) -> dict[str, Any]:
    return reader.section(path, value, STORE_KEYS)


_PRECISIONS: Final = ("fp32", "fp16", "bf16", "int8")


def _local_service(reader: Walker, path: Path, value: Any) -> dict[str, Any]:
    return reader.section(path, value, _LOCAL_KEYS)


def _precision(reader: Walker, path: Path, value: Any) -> str:
    return one_of(*_PRECISIONS)(reader, path, value.lower() if isinstance(value, str) else value)


def _devices(reader: Walker, path: Path, value: Any) -> str:
    return str(value) if type(value) is int else text(reader, path, value)


_TOP_KEYS: Final[Mapping[str, Check]] = {
    "rpc_port": port,
    "port": port,
    "http_port": whole(),
    "host": text,
    "worker_num": whole(1, MAX_SLOTS),
    "build_dag_each_worker": boolean,
    "max_queue": whole(1),
    "max_message_bytes": whole(1),
    "proto": text,
    "methods": words,
    "error_codes": one_of("v0.7", "v0.4"),
    "debug_errors": boolean,
    "log_path": text,
    "log_level": one_of("debug", "info", "warning", "error"),
}

_DAG_KEYS: Final[Mapping[str, Check]] = {
    "is_thread_op": boolean,
    "retry": whole(1),
    "timeout": positive,
    "use_profile": boolean,
    "tracer": _plain,
    "channel_size": whole(0),
    "client_type": one_of(*CLIENT_TYPES),
    "channel_recv_frist_arrive": boolean,
    "channel_recv_first_arrive": boolean,
    "enable_prometheus": boolean,
    "prometheus_port": port,
    "request_parse": one_of("auto", "raw", "ndarray", "literal"),
    "external_store": _store,
}

_DAG_NAMES: Final[Mapping[str, str]] = {
    "timeout": "timeout_ms",
    "channel_recv_frist_arrive": "first_arrival",
    "channel_recv_first_arrive": "first_arrival",
}

_LOCAL_KEYS: Final[Mapping[str, Check]] = {
    "model_config": text,
    "client_type": text,
    "fetch_list": words,
    "workdir": text,
    "model_poll_s": number,
    "thread_num": whole(1, MAX_WORKERS),
    "device_type": whole(-1),
    "devices": _devices,
    "mem_optim": boolean,
    "ir_optim": boolean,
    "precision": _precision,
    "use_calib": boolean,
    "use_mkldnn": boolean,
    "mkldnn_cache_capacity": whole(0),
    "mkldnn_op_list": words,
    "mkldnn_bf16_op_list": words,
    "min_subgraph_size": whole(1),
    "use_encryption_model": boolean,
    "encryption_key": text,
    "port": port,
}

_OP_KEYS: Final[Mapping[str, Check]] = {
    "concurrency": whole(1, MAX_WORKERS),
    "timeout": number,
    "retry": whole(1),
    "batch_size": whole(1),
    "auto_batching_timeout": number,
    "client_type": text,
    "server_endpoints": words,
    "client_config": text,
    "fetch_list": words,
    "local_service_conf": _local_service,
    "endpoint_protocol": one_of("kserve_v2", "paddle"),
    "use_encryption_model": boolean,
    "encryption_key": text,
    "run_process": boolean,
    "batch_style": one_of("merged", "list"),
    "share_instance": boolean,
    "isolate_failures": boolean,
}
