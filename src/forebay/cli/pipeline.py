# SPDX-License-Identifier: Apache-2.0
"""`forebay pipeline`: stop the pipeline servers of this user."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from forebay.cli.numbers import between, seconds

if TYPE_CHECKING:
    import argparse

KILLED_S = 5.0


def add_parser(commands: Any) -> None:
    """Add the command and those below it."""
    parser = commands.add_parser(
        "pipeline",
        help="stop pipeline servers",
        description="Stop pipeline servers of this user. To run one: forebay serve SCRIPT.py",
    )
    below = parser.add_subparsers(dest="pipeline_command", metavar="COMMAND", required=True)
    for name, number, what in (
        ("stop", signal.SIGTERM, "stop servers once they have answered their requests"),
        ("kill", signal.SIGKILL, "stop servers at once"),
    ):
        command = below.add_parser(name, help=what)
        command.add_argument(
            "--port", type=between(int, 1, 65_535), metavar="PORT", help="only the server with this port (all)"
        )
        if number is signal.SIGTERM:
            command.add_argument(
                "--wait-s", type=seconds(0, 86_400), default=60.0, metavar="S", help="time to wait for their end (60)"
            )
        else:
            command.set_defaults(wait_s=KILLED_S)
        command.set_defaults(run=_stop, signal=number, parser=command)


def _stop(parsed: argparse.Namespace) -> int:
    from forebay.surfaces.pipeline.running_servers import servers, stop

    running = [one for one in servers() if parsed.port is None or parsed.port in one.ports]
    if not running:
        which = "" if parsed.port is None else f" with port {parsed.port}"
        sys.stderr.write(f"forebay: no pipeline server of this user runs{which}\n")
        return 1
    status = 0
    for server in running:
        ports = " and ".join(map(str, server.ports))
        ended = stop(server, parsed.signal, parsed.wait_s)
        told = "stopped" if ended else f"still running after {parsed.wait_s:g} s"
        sys.stdout.write(f"{server.script} (pid {server.pid}, port {ports}): {told}\n")
        status = status or int(not ended)
    return status
