# SPDX-License-Identifier: Apache-2.0
"""`forebay serve` with limits of a second, which the command line leaves at half a minute."""

import argparse
import sys

import msgspec

from forebay.cli.serve import add_options, options_of
from forebay.observe.log import configure
from forebay.surfaces import build
from forebay.transports.http.listener import HttpListener
from forebay.transports.server import Server


def ready(host, port):
    sys.stderr.write(f"ready at {'https' if http.certfile else 'http'}://{host}:{port}\n")
    sys.stderr.flush()


parser = argparse.ArgumentParser()
add_options(parser)
parsed = parser.parse_args()
configure("info", "json")
options = options_of(parsed)
http = msgspec.structs.replace(options.http, read_timeout_s=1.0, keep_alive_s=1.0, write_timeout_s=1.0)
project = build(parsed.target, msgspec.structs.replace(options, http=http))
listener = HttpListener(project.http, project.routes, project.asgi)
sys.exit(Server(project.app, listener, drain_s=parsed.drain_s, ready=ready).run())
