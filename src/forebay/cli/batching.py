# SPDX-License-Identifier: Apache-2.0
"""`forebay batching`: the batching service in the place of the original, for the workers and clients it has."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

DESCRIPTION = """\
Collect HTTP requests in batches for workers that join over a socket, in the place of the original batching service:
its options, its HTTP behaviour and its socket protocol. Every path and method is the same; a body is a job, a request
without one is answered 200. Options may be written with one dash or two.

To serve such workers beside models of forebay's own, with forebay's paths: forebay serve --attach ADDRESS
"""

EPILOG = """\
examples:
  forebay batching                                             workers join at ./batch.socket
  forebay batching -host 0.0.0.0 -port 9000 -batch 16 -latency 5
  forebay batching -protocol tcp -address 127.0.0.1:8989       workers join over TCP
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    from forebay.surfaces.batching import BatchingSettings

    usual = BatchingSettings()
    parser = commands.add_parser(
        "batching",
        help="the batching service, in the place of the original one",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def option(name: str, **more: Any) -> None:
        parser.add_argument(f"-{name}", f"--{name}", **more)

    option(
        "address",
        type=_place,
        metavar="PATH|HOST:PORT",
        default=usual.address,
        help=f"where workers join ({usual.address})",
    )
    option("name", dest="address", metavar="NAME", type=_name, help="same as -address NAME.socket")
    option("batch", type=_whole(1), metavar="N", default=usual.batch, help=f"jobs in a batch ({usual.batch})")
    option(
        "capacity", type=_whole(1), metavar="N", default=usual.capacity, help=f"jobs that may wait ({usual.capacity})"
    )
    option("host", metavar="ADDRESS", default=usual.host, help=f"HTTP address ({usual.host}); 0.0.0.0 lets others in")
    option(
        "latency",
        type=_whole(0),
        metavar="MS",
        default=usual.latency_ms,
        help=f"wait for a batch to fill, from its first job on ({usual.latency_ms})",
    )
    option("port", type=_whole(0, 65535), metavar="PORT", default=usual.port, help=f"HTTP port ({usual.port})")
    option(
        "protocol",
        choices=["unix", "tcp"],
        default=usual.protocol,
        help=f"kind of socket that workers join at ({usual.protocol})",
    )
    option(
        "timeout", type=_whole(1), metavar="MS", default=usual.timeout_ms, help=f"time a job has ({usual.timeout_ms})"
    )
    group = parser.add_argument_group("what the original does not have")

    def own(name: str, **more: Any) -> None:
        group.add_argument(f"-{name}", f"--{name}", **more)

    own(
        "max-body-bytes",
        type=_whole(1),
        metavar="N",
        default=usual.max_body_bytes,
        help=f"longest job ({usual.max_body_bytes})",
    )
    own(
        "max-frame-bytes",
        type=_whole(1, (1 << 31) - 1),
        metavar="N",
        default=usual.max_frame_bytes,
        help=f"longest answer of a worker ({usual.max_frame_bytes})",
    )
    own(
        "metrics-port", type=_whole(0, 65535), metavar="PORT", help="answer /metrics and /readyz on a port of their own"
    )
    own("log-format", choices=["json", "text"], help="json, or text (text at a terminal, else json)")
    own("log-level", choices=["debug", "info", "warning", "error"], default="info", help="(info); debug has every job")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until stopped."""
    from forebay.observe.log import configure, tell
    from forebay.surfaces.batching import BatchingSettings
    from forebay.surfaces.batching.app import BatchingApp
    from forebay.transports.server import Server

    configure(parsed.log_level, parsed.log_format or ("text" if sys.stderr.isatty() else "json"))
    settings = BatchingSettings(
        address=parsed.address,
        batch=parsed.batch,
        capacity=parsed.capacity,
        host=parsed.host,
        latency_ms=parsed.latency,
        port=parsed.port,
        protocol=parsed.protocol,
        timeout_ms=parsed.timeout,
        max_body_bytes=parsed.max_body_bytes,
        max_frame_bytes=parsed.max_frame_bytes,
        metrics_port=parsed.metrics_port,
    )
    app = BatchingApp(settings)

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        tell(f"ready at http://{shown}:{port}", *(f"  {line}" for line in app.summary))

    return Server(app, app.listener, drain_s=settings.timeout_ms / 1000, ready=ready).run()


def _place(text: str) -> str:
    kind, colon, rest = text.partition(":")
    if not text or (colon and kind in {"unix", "tcp"}):
        hint = f"; did you mean -protocol {kind} -address {rest}?" if rest else ""
        msg = f"{text!r} is not possible, a path is needed, or HOST:PORT with -protocol tcp{hint}"
        raise argparse.ArgumentTypeError(msg)
    return text


def _name(text: str) -> str:
    if not text:
        msg = "'' is not possible, a name is needed"
        raise argparse.ArgumentTypeError(msg)
    return f"{text}.socket"


def _whole(lowest: int, highest: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = lowest - 1
        if value < lowest or (highest is not None and value > highest):
            allowed = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest}"
            msg = f"{text!r} is not possible, a whole number {allowed} is needed"
            raise argparse.ArgumentTypeError(msg)
        return value

    return parse
