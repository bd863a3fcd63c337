# SPDX-License-Identifier: Apache-2.0
"""`forebay batching`: the batching service in the place of the original, for the workers and clients it has."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from forebay.types.settings import Setting

_OWN: Final = ("max_body_bytes", "max_frame_bytes", "metrics_port")

DESCRIPTION = """\
Collect HTTP requests in batches for workers that join over a socket. This replaces the original batching service, with
its options, its HTTP behaviour and its socket protocol. Every path and method is the same: a body is a job, a request
without one is answered 200. Options have one dash or two.

To serve such workers beside forebay's own models and paths: forebay serve --attach ADDRESS
"""

EPILOG = """\
examples:
  forebay batching                                             workers join at ./batch.socket
  forebay batching -host 0.0.0.0 -port 9000 -batch 16 -latency 5
  forebay batching -protocol tcp -address 127.0.0.1:8989       workers join over TCP
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    from forebay.cli.flags import add_flag
    from forebay.server.config import ProcessConfig
    from forebay.surfaces.batching_service.service_settings import BatchingSettings
    from forebay.types.settings import declared

    parser = commands.add_parser(
        "batching", help="run the batching service in place of the original", description=DESCRIPTION, epilog=EPILOG
    )

    group = parser.add_argument_group("options that the original does not have")
    for setting in declared(BatchingSettings).values():
        one = group if setting.name in _OWN else parser
        add_flag(one, setting, _one_dash(setting), dest=setting.name, default=setting.default)
    parser.add_argument(
        "-name", "--name", dest="address", metavar="NAME", type=_name, help="same as -address NAME.socket"
    )
    for name, default in (("log_format", None), ("log_level", "info")):
        setting = declared(ProcessConfig)[name]
        add_flag(group, setting, _one_dash(setting), default=default)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until stopped."""
    from forebay.observe.logs.log import configure, tell
    from forebay.surfaces.batching_service.app import BatchingApp
    from forebay.surfaces.batching_service.service_settings import BatchingSettings
    from forebay.transports.server import Server

    configure(parsed.log_level, parsed.log_format or ("text" if sys.stderr.isatty() else "json"))
    settings = BatchingSettings(**{name: getattr(parsed, name) for name in BatchingSettings.__struct_fields__})
    app = BatchingApp(settings)

    def ready(host: str, port: int) -> None:
        shown = f"[{host}]" if ":" in host else host
        tell(f"ready at http://{shown}:{port}", *(f"  {line}" for line in app.summary))

    return Server(app, app.listener, drain_s=settings.timeout_ms / 1000, ready=ready).run()


def _one_dash(setting: Setting) -> str:
    """Return its flag as the original writes it."""
    return str(setting.written.flag)[1:]


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a name, got ''")
    return f"{text}.socket"
