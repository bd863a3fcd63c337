# SPDX-License-Identifier: Apache-2.0
"""`forebay worker TARGET --connect ADDRESS`: run a model here for a server that runs elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

DESCRIPTION = """\
Run a model in this environment for a server that was started with --attach. The server needs neither the file nor its
imports. Workers of one model may come and go; if one dies, another one takes over its requests.

SIGTERM and Ctrl+C drain: running requests are answered, and the exit status is 0. A second signal stops at once.
"""

EPILOG = """\
examples:
  forebay serve --attach unix:workers.socket                  the server, in one environment
  forebay worker model.py --connect unix:workers.socket       a worker, in another one
  forebay serve model.py --workers 0 --attach unix:workers.socket      the same, with the queue as model.py says
  forebay worker model.py:Iris --connect tcp:10.0.0.5:9100 --secret @secret.txt
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    from forebay.cli.flags import add_flag
    from forebay.server.config import WorkerConfig
    from forebay.types.settings import declared

    parser = commands.add_parser(
        "worker", help="run a model for a server in another environment", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("target", metavar="TARGET", help="a Python file with one forebay.Model, or file.py:Name")
    for setting in declared(WorkerConfig).values():
        own = {"required": True} if setting.name == "connect" else {"default": setting.default}
        add_flag(parser, setting, **own)
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Serve until told to leave."""
    import msgspec

    from forebay.errors import ConfigError
    from forebay.machine.lifeline import take_lifeline
    from forebay.serving.models.model import models_in
    from forebay.serving.models.model_runner import runner_for
    from forebay.surfaces.native.describe import describe
    from forebay.surfaces.native.target_file import import_file, split_target
    from forebay.workers.processes.device_binding import move_to
    from forebay.workers.processes.health_file import HealthFile
    from forebay.workers.processes.joining import JoiningWorker
    from forebay.workers.runner import RunnerSpec
    from forebay.workers.wire.address import AddressFile, UnixAddress, parse_address
    from forebay.workers.wire.shared_secret import read_secret
    from forebay.workers.wire.tls_files import client_tls
    from forebay.workers.wire.worker_connection import DialledServer
    from forebay.workers.wire.worker_pulse import WorkerPulse

    lifeline = take_lifeline()
    named = parsed.connect
    address = AddressFile(named[1:]) if named.startswith("@") else parse_address(named)
    secret = read_secret(parsed.secret, "--secret")
    tls = client_tls(parsed.cafile, parsed.certfile, parsed.keyfile)
    if tls is not None and isinstance(address, UnixAddress):
        raise ConfigError(f"{address} stays on this machine and is not encrypted; leave out --cafile")
    server = DialledServer(address, secret, tls)
    health = None if parsed.health_file is None else HealthFile(parsed.health_file)
    # It is forked off before there is any code of the user's.
    pulse = None if isinstance(address, UnixAddress) else WorkerPulse(server.dial)
    if parsed.device is not None:
        move_to(parsed.device)
    path, class_name = split_target(parsed.target)
    models = models_in(import_file(path), class_name)
    if len(models) > 1:
        names = ", ".join(model.__name__ for model in models)
        msg = f"{path} has {len(models)} models ({names}) and a worker runs one: {path}:{models[0].__name__}"
        raise ConfigError(msg)
    (model,) = models
    told = describe(model)
    name, version = parsed.name or told.name, parsed.model_version or told.version
    told = msgspec.structs.replace(told, name=name, version=version)

    def spec_of(options: Mapping[str, Any]) -> RunnerSpec:
        isolates = options.get("isolate_errors", told.isolate_errors)
        return RunnerSpec("", local=lambda: runner_for(model, isolate_errors=isolates))

    def tell(line: str) -> None:
        sys.stderr.write(f"forebay: worker of '{told.name}': {line}\n")
        sys.stderr.flush()

    if parsed.secret is not None and not parsed.secret.startswith("@"):
        tell("warning: --secret shows its value in the process list; give @FILE or FOREBAY_SECRET")
    worker = JoiningWorker(
        server,
        told,
        pulse=pulse,
        health=health,
        threads=parsed.threads,
        once=parsed.once,
        orphan_grace_s=parsed.orphan_grace_s,
        ready=(lambda: None) if lifeline is None else lifeline.ready,
        tell=tell,
    )
    return worker.run(spec_of)
