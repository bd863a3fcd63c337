# SPDX-License-Identifier: Apache-2.0
"""Runs a target the way a person would mount it elsewhere: forebay's ASGI application in a plain uvicorn.

Takes the same arguments as `forebay serve`; only the HTTP protocol class differs, which here is uvicorn's own.
"""

import argparse
import asyncio
import socket
import sys

import uvicorn

from forebay.cli.serve import add_options, options_of
from forebay.observe.logs.log import configure
from forebay.surfaces.lookup import build


async def serve(parsed):
    project = build(parsed.target, options_of(parsed))
    listening = socket.create_server(("127.0.0.1", 0))
    await project.app.start()
    sys.stderr.write(f"ready at http://127.0.0.1:{listening.getsockname()[1]}\n")
    sys.stderr.flush()
    config = uvicorn.Config(
        project.asgi,
        http="httptools",
        loop="uvloop",
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=75,  # as ours: tests tell what is closed from what is idle
    )
    await uvicorn.Server(config).serve(sockets=[listening])
    await project.app.drain(1.0)


parser = argparse.ArgumentParser()
add_options(parser)
configure("info", "json")
asyncio.run(serve(parser.parse_args()))
