# SPDX-License-Identifier: Apache-2.0
"""`forebay serve TARGET`: answer for a model or a project until a signal says stop."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.server.config import AttachConfig, HttpConfig, Overrides

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.surfaces.contract import Options

DESCRIPTION = """\
Serve a model or a project. TARGET is one of

  model.py           a Python file: every forebay.Model class in it is served at /models/NAME
  model.py:Name      one class of it, one forebay.Serving, or one function with @forebay.compose
  forebay.yaml       several of these with settings of their own, or the folder of this file
  FOLDER or FILE     a project of another server: a folder with a nucleus.yaml, or that file; a file with a Ventu,
                       a script that runs a PipelineServer or a WebService (what follows -- are its arguments)

SIGTERM, SIGHUP and Ctrl+C drain: the port closes, what was accepted is answered, then the exit status is 0. A second
signal ends the drain.
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="serve a model or a project",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `serve` and `check` share."""
    http, worker = HttpConfig(), Overrides()
    parser.add_argument("target", metavar="TARGET", nargs="?", help="what to serve; may be left out with --attach")
    parser.set_defaults(arguments=())
    group = parser.add_argument_group("HTTP")
    group.add_argument("--host", metavar="ADDRESS", help=f"address to bind ({http.host}); 0.0.0.0 lets others in")
    group.add_argument("--http-port", type=int, metavar="PORT", help=f"port ({http.port}); 0 takes a free one")
    group.add_argument("--max-body-bytes", type=at_least(1), metavar="N", help=f"longest body ({http.max_body_bytes})")
    group.add_argument(
        "--max-buffered-bytes",
        type=at_least(1),
        metavar="N",
        help=f"bytes of bodies that are arriving, all together ({http.max_buffered_bytes})",
    )
    group.add_argument(
        "--max-connections", type=at_least(1), metavar="N", help=f"connections at a time ({http.max_connections})"
    )
    group.add_argument("--certfile", metavar="PEM", help="TLS certificate chain; the port then speaks HTTPS")
    group.add_argument("--keyfile", metavar="PEM", help="its private key, if it is not in the same file")
    group.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        help="ask for this key, or for one in a file: @FILE; may be repeated",
    )
    group.add_argument(
        "--allowed-host",
        action="append",
        metavar="NAME",
        help="a name the server may be called by, * for any (on this machine only and without a key: localhost)",
    )
    group.add_argument("--cors-origin", action="append", metavar="ORIGIN", help="let pages of this origin call (none)")
    group.add_argument("--access-log", action="store_true", default=None, help="log a line for each request")
    group.add_argument("--no-extra-routes", action="store_true", help="a project's own paths only, none of forebay's")
    group = parser.add_argument_group("workers and batching, for every model of the target")
    group.add_argument(
        "--worker-kind", choices=["inline", "thread", "process"], help=f"where models run ({worker.worker_kind})"
    )
    group.add_argument("--workers", type=at_least(1), metavar="N", help=f"workers of each model ({worker.workers})")
    group.add_argument(
        "--threads", type=at_least(1), metavar="N", help=f"threads of a worker that call its model ({worker.threads})"
    )
    group.add_argument(
        "--python", metavar="PATH", help="interpreter of the worker processes, which must have forebay (this one)"
    )
    group.add_argument(
        "--max-batch-size", type=at_least(1), metavar="N", help="samples in a batch (the model's own, 64)"
    )
    group.add_argument(
        "--max-wait-ms", type=_milliseconds, metavar="MS", help="wait for a batch to fill (only for returning clients)"
    )
    group.add_argument(
        "--idle",
        choices=["gather", "go", "wait"],
        help="what a free worker does with a batch that is not full (gather)",
    )
    group.add_argument(
        "--policy", choices=["auto"], help="auto: learn the sizes of batches and the waits that hold the objective"
    )
    group.add_argument(
        "--latency-objective-ms", type=_objective, metavar="MS", help="time to answer 95 of 100 requests in"
    )
    group.add_argument(
        "--isolate-errors",
        action="store_true",
        default=None,
        help="halve a batch that fails as a whole until the sample at fault stands alone",
    )
    group.add_argument("--timeout-ms", type=at_least(1), metavar="MS", help="time a request has (30000)")
    group.add_argument("--max-queue", type=at_least(1), metavar="N", help="samples that may wait (4096)")
    _add_attach_options(parser)
    group = parser.add_argument_group("process")
    group.add_argument("--drain-s", type=_seconds, default=30.0, metavar="S", help="time to finish after SIGTERM (30)")
    group.add_argument("--log-format", choices=["json", "text"], help="json, or text (text at a terminal, else json)")
    group.add_argument("--log-level", choices=["debug", "info", "warning", "error"], help="(info)")
    group.add_argument(
        "--state-dir", type=Path, metavar="FOLDER", help="where a project's readiness files go (its original's places)"
    )


def _add_attach_options(parser: argparse.ArgumentParser) -> None:
    usual = AttachConfig()
    group = parser.add_argument_group("workers that attach: forebay worker FILE --connect ADDRESS")
    group.add_argument(
        "--attach", metavar="ADDRESS", help="let workers attach at unix:PATH or tcp:HOST:PORT, beside TARGET or without"
    )
    group.add_argument(
        "--attach-secret",
        metavar="SECRET",
        help="what they must know, or @FILE, or in FOREBAY_SECRET; needed where other machines can connect",
    )
    group.add_argument(
        "--worker-grace-s",
        type=_seconds,
        metavar="S",
        help=f"requests wait so long for a worker when all have left ({usual.grace_s:g})",
    )
    group.add_argument(
        "--worker-hang-s",
        type=_seconds,
        metavar="S",
        help="a worker that owes an answer so long is dropped (half of the timeout)",
    )
    group.add_argument(
        "--worker-hello-s",
        type=_seconds,
        metavar="S",
        help=f"time in which a connection must have said what it is ({usual.hello_s:g})",
    )
    group.add_argument(
        "--max-worker-connections",
        type=at_least(1),
        metavar="N",
        help=f"connections of workers at a time ({usual.max_connections})",
    )
    group.add_argument(
        "--max-worker-frame-bytes",
        type=at_least(1024),
        metavar="N",
        help=f"longest frame that is read from a worker ({usual.max_frame_bytes})",
    )


def _attach_of(parsed: argparse.Namespace) -> AttachConfig:
    from forebay.workers.proof import read_secret

    given: dict[str, Any] = {
        "address": parsed.attach,
        "secret": read_secret(parsed.attach_secret, "--attach-secret"),
        "grace_s": parsed.worker_grace_s,
        "hang_s": parsed.worker_hang_s,
        "hello_s": parsed.worker_hello_s,
        "max_connections": parsed.max_worker_connections,
        "max_frame_bytes": parsed.max_worker_frame_bytes,
    }
    return AttachConfig(**{name: value for name, value in given.items() if value is not None})


def options_of(parsed: argparse.Namespace) -> Options:
    """Make the surfaces' options of the parsed ones."""
    from forebay.surfaces.contract import Options

    http = {
        "host": parsed.host,
        "port": parsed.http_port,
        "max_body_bytes": parsed.max_body_bytes,
        "max_buffered_bytes": parsed.max_buffered_bytes,
        "max_connections": parsed.max_connections,
        "certfile": parsed.certfile,
        "keyfile": parsed.keyfile,
        "api_keys": _keys(parsed.api_key) if parsed.api_key else None,
        "allowed_hosts": tuple(parsed.allowed_host) if parsed.allowed_host else None,
        "cors_origins": tuple(parsed.cors_origin) if parsed.cors_origin else None,
        "access_log": parsed.access_log,
    }
    worker = {name: getattr(parsed, name) for name in Overrides.__struct_fields__}
    given = {name: value for name, value in {**http, **worker}.items() if value is not None}
    return Options(
        http=msgspec.structs.replace(HttpConfig(), **{name: given[name] for name in http if name in given}),
        given=frozenset(given),
        overrides=msgspec.structs.replace(Overrides(), **{name: given[name] for name in worker if name in given}),
        log_level=parsed.log_level,
        attach=_attach_of(parsed),
        extra_routes=not parsed.no_extra_routes,
        state_dir=parsed.state_dir,
        arguments=tuple(parsed.arguments),
        drain_s=parsed.drain_s,
    )


def run(parsed: argparse.Namespace) -> int:
    """Serve until stopped."""
    from forebay.observe.log import configure, tell
    from forebay.surfaces import build
    from forebay.surfaces.serving import server_of

    options = options_of(parsed)
    log_format = parsed.log_format or ("text" if sys.stderr.isatty() else "json")
    configure(options.log_level or "info", log_format)
    project = build(parsed.target, options)
    configure(options.log_level or project.log_level or "info", log_format)
    tell(*(f"warning: {warning}" for warning in project.warnings))

    def ready(address: str) -> None:
        is_local = any(f"//{local}:" in address for local in ("127.0.0.1", "[::1]"))
        open_to = " (this machine only; --host 0.0.0.0 opens it to others)" if is_local else ""
        door = [] if project.app.door is None else [f"workers attach at {project.app.door.shown}"]
        tell(f"ready at {address}{open_to}", *(f"  {line}" for line in [*project.summary, *door]))

    return server_of(project, drain_s=options.drain_s, ready=ready).run()


def _keys(given: list[str]) -> tuple[str, ...]:
    from forebay.errors import ConfigError

    keys: list[str] = []
    for key in given:
        if not key.strip():
            msg = "an --api-key is empty, and would let everybody in; is the variable set that it comes from?"
            raise ConfigError(msg)
        if not key.startswith("@"):
            keys.append(key.strip())
            continue
        try:
            keys += [line.strip() for line in Path(key[1:]).read_text().splitlines() if line.strip()]
        except OSError as error:
            msg = f"the API keys in {key[1:]} cannot be read: {error.strerror}"
            raise ConfigError(msg) from error
    if not keys:
        msg = "--api-key names no key: the file is empty"
        raise ConfigError(msg)
    return tuple(keys)


def at_least(lowest: int) -> Callable[[str], int]:
    """Return a type of arguments: whole numbers from `lowest` on."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest:
            msg = f"{text!r} is not possible, a whole number of at least {lowest} is needed"
            raise argparse.ArgumentTypeError(msg)
        return value

    return parse


def _milliseconds(text: str) -> float:
    return _number(text, "milliseconds")


def _objective(text: str) -> float:
    value = _number(text, "milliseconds")
    if value == 0.0:
        msg = f"{text!r} is not possible, milliseconds above 0 are needed"
        raise argparse.ArgumentTypeError(msg)
    return value


def _seconds(text: str) -> float:
    return _number(text, "seconds")


def _number(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        msg = f"{text!r} is not possible, {unit} of at least 0 are needed"
        raise argparse.ArgumentTypeError(msg)
    return value
