# SPDX-License-Identifier: Apache-2.0
"""Options of OpenVINO Model Server, said to `forebay serve` as they are: each becomes the one of ours that means it.

They are known by their underscores, so a command line is somebody else's as a whole or not at all: `--port` beside one
of them is that server's, which is gRPC's, and without any of them a mistake.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from forebay.errors import ConfigError
from forebay.server.config import HttpConfig
from forebay.types.did_you_mean import either, nearest
from forebay.types.settings import declared, with_value

_LEVELS: Final = {"TRACE": "debug", "DEBUG": "debug", "INFO": "info", "WARNING": "warning", "ERROR": "error"}
_NUMBERS: Final = ("port", "rest_port", "file_system_poll_wait_seconds")
_TEXTS: Final = (
    *("config_path", "model_path", "model_name", "grpc_bind_address", "rest_bind_address", "log_level"),
    *("model_version_policy", "target_device", "api_key_file", "allowed_origins"),
)
_NOT_NEEDED: Final = {
    "log_path": "the log goes to standard error; send that to a file",
    "grpc_workers": "one loop takes all requests; --threads says how many handlers run at a time",
    "rest_workers": "one loop takes all requests; --threads says how many handlers run at a time",
    "grpc_max_threads": "one loop takes all requests; --threads says how many handlers run at a time",
    "grpc_memory_quota": "--max-buffered-bytes says how much may be buffered",
    "grpc_channel_arguments": "--keep-alive-s and its neighbours say how connections are kept",
    "metrics_list": "/metrics has them all",
    "cache_dir": "compiled models are not cached",
    "cpu_extension": "OpenVINO runs as it is installed",
    "custom_node_resources_cleaner_interval_seconds": "there are no custom nodes",
    "sequence_cleaner_poll_wait_minutes": "there are no sequences",
    "allowed_headers": "all headers are allowed",
    "allowed_methods": "GET and POST are allowed",
    "allow_credentials": "keys are sent as headers, and no cookies are read",
    **dict.fromkeys(
        ("nireq", "batch_size", "shape", "layout", "plugin_config"),
        "say it in config.json, where forebay has a use for it",
    ),
}
_FLAGS: Final = {"metrics_enable": "/metrics is always there"}
_OF_MODELS: Final = ("nireq", "batch_size", "shape", "layout", "plugin_config", "model_version_policy", "target_device")
_KNOWN: Final = (*_NUMBERS, *_TEXTS, *_NOT_NEEDED, *_FLAGS)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def translated(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a command line as forebay has it, and warnings of what is not used; ours stays as it is.

    Raises:
        ConfigError: If an option, or a value of one, is not possible.
    """
    theirs = [found[1] for one in arguments if (found := re.match(r"--(\w*_\w*)(?:=|$)", one))]
    if arguments[:1] not in (["serve"], ["check"]) or not any(name in _KNOWN for name in theirs):
        return [*arguments], []
    for name in theirs:
        if name not in _KNOWN:
            hint = nearest(name, _KNOWN)
            msg = f"--{name} of OpenVINO Model Server is not supported"
            raise ConfigError(msg + (f"; did you mean --{hint}?" if hint else ""))
    parser = _Parser(prog="forebay", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=_number(name))
    for name in (*_TEXTS, *_NOT_NEEDED):
        parser.add_argument(f"--{name}")
    for name in _FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    known, rest = parser.parse_known_args(list(arguments[1:]))
    told: dict[str, Any] = vars(known)
    warnings = [f"--{name} is not used: {why}" for name, why in _NOT_NEEDED.items() if name in told]
    return [arguments[0], *_target(told), *_ports(told), *_others(told), *rest], warnings


def _target(told: dict[str, Any]) -> list[str]:
    config, model, name = (told.get(key) for key in ("config_path", "model_path", "model_name"))
    if config is not None and (model or name):
        raise ConfigError("expected --config_path or --model_path, got both; a configuration names its models itself")
    if model is None:
        if name is not None:
            raise ConfigError("--model_name has no --model_path; add the folder of the model")
        return [] if config is None else [config]
    if name is None:
        raise ConfigError("--model_path has no --model_name; add the name of the model")
    from pathlib import Path

    from forebay.surfaces.ovms.config import GRAPH_FILE

    graph = Path(model) / GRAPH_FILE
    if not graph.is_file():
        return [model, "--name", name]
    only_models = [key for key in _OF_MODELS if key in told]
    if only_models:
        raise ConfigError(f"--{only_models[0]} is for models, and {model} has a {GRAPH_FILE}")
    return [str(graph), "--name", name]


def _ports(told: dict[str, Any]) -> list[str]:
    grpc, http = (told.get(key) for key in ("port", "rest_port"))
    if grpc is None and http is None:
        return _hosts(told)
    if not grpc and not http:
        raise ConfigError("--port and --rest_port are both 0; set one of them")
    if grpc == http:
        raise ConfigError(f"--port and --rest_port are both {grpc}; gRPC and HTTP have a port each")
    # There is always a port for HTTP, which has health and metrics: a free one if nobody names one.
    return [*(["--grpc-port", str(grpc)] if grpc else []), "--http-port", str(http or 0), *_hosts(told)]


def _hosts(told: dict[str, Any]) -> list[str]:
    hosts = {told[key] for key in ("grpc_bind_address", "rest_bind_address") if key in told}
    if len(hosts) > 1:
        msg = f"--grpc_bind_address and --rest_bind_address are {' and '.join(sorted(hosts))}; both ports have one"
        raise ConfigError(msg)
    return [f"--host={host}" for host in hosts]


def _others(told: dict[str, Any]) -> list[str]:
    found: list[str] = []
    if "log_level" in told:
        level = _LEVELS.get(told["log_level"].upper())
        if level is None:
            raise ConfigError(f"--log_level: expected {either(_LEVELS)}, got {told['log_level']!r}")
        found += ["--log-level", level]
    if "file_system_poll_wait_seconds" in told:
        found += ["--repository-poll-s", str(told["file_system_poll_wait_seconds"])]
    if "model_version_policy" in told:
        found += ["--versions", _policy(told["model_version_policy"])]
    device = told.get("target_device", "CPU")
    if ":" in device:
        raise ConfigError(f"--target_device is {device!r}; say several devices as target_device in config.json")
    if device.upper() not in {"CPU", "AUTO"}:
        if "config_path" in told:
            raise ConfigError(
                "expected --config_path or --target_device, got both; a configuration sets target_device itself"
            )
        found += ["--devices", device.lower().replace(".", ":")]
    if "api_key_file" in told:
        found += ["--api-key", f"@{told['api_key_file']}"]
    if "allowed_origins" in told:
        found += [part for origin in _origins(told["allowed_origins"]) for part in ("--cors-origin", origin)]
    return found


def _origins(text: str) -> tuple[str, ...]:
    try:
        return declared(HttpConfig)["cors_origins"].read(text)
    except ValueError as error:
        raise ConfigError(f"--allowed_origins: {with_value(error, repr(text[:80]))}") from error


def _policy(text: str) -> str:
    """Write `model_version_policy` as `--versions` has it."""
    try:
        ((kind, more),) = json.loads(text).items()
        if kind == "latest":
            return f"latest:{int(more.get('num_versions', 1))}"
        if kind == "specific":
            return ",".join(str(int(one)) for one in more["versions"])
    except (ValueError, AttributeError, KeyError, TypeError):
        kind = ""
    if kind != "all":
        expected = 'a policy such as {"latest": {"num_versions": 2}}'
        raise ConfigError(f"--model_version_policy: expected {expected}, got {text[:80]!r}")
    return "all"


def _number(name: str) -> Any:
    def read(text: str) -> int:
        if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
            raise ConfigError(f"--{name}: expected a whole number >= 0, got {text[:80]!r}")
        return int(text)

    return read
