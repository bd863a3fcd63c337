# SPDX-License-Identifier: Apache-2.0
"""`forebay serve` with limits of two seconds, which pass when it is told so: each SIGUSR1 is a second.

Only what a handshake may take goes by the clock.
"""

import argparse
import signal
import sys

import msgspec

from forebay.cli.serve import add_options, options_of
from forebay.observe.logs.log import configure
from forebay.surfaces.lookup import build
from forebay.transports.http.listener import HttpListener
from forebay.transports.http.port import HttpPort
from forebay.transports.server import Server


def ready(host, port):
    sys.stderr.write(f"ready at {'https' if http.certfile else 'http'}://{host}:{port}\n")
    sys.stderr.flush()


def start(lane, loop, begin=HttpPort.start):
    def sweep():
        lane._sweep()
        lane._timer.cancel()
        sys.stderr.write("a second has passed\n")
        sys.stderr.flush()

    begin(lane, loop)
    lane._timer.cancel()
    loop.add_signal_handler(signal.SIGUSR1, sweep)


HttpPort.start = start  # pyright: ignore[reportAttributeAccessIssue]
parser = argparse.ArgumentParser()
add_options(parser)
parsed = parser.parse_args()
configure("info", "json")
options = options_of(parsed)
http = msgspec.structs.replace(options.http, read_timeout_s=2.0, keep_alive_s=2.0, write_timeout_s=2.0)
project = build(parsed.target, msgspec.structs.replace(options, http=http))
listener = HttpListener(project.http, project.routes, project.asgi)
sys.exit(Server(project.app, listener, drain_s=parsed.drain_s, ready=ready).run())
