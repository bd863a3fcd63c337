# SPDX-License-Identifier: Apache-2.0
"""`forebay serve TARGET`: answer for a model or a project until a signal says stop."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

from forebay.cli.flags import add_flags, shown_by_flags, told_in

if TYPE_CHECKING:
    from forebay.machine.node_part import Part
    from forebay.surfaces.contract import Options

log = logging.getLogger("forebay")

TELL_S: Final = 1.0
"""How long executors may take to tell their threads and processes to end."""

USAGE = "%(prog)s [OPTIONS] [TARGET]"
DESCRIPTION = """\
Serve a model or a project. TARGET is one of

  model.py           a Python file; every forebay.Model class in it is served at /models/NAME
  model.py:Name      one class of it, one forebay.Serving, or one function with @forebay.compose
  model.onnx         a model file; also model.skops of scikit-learn, model.ubj or model.json of XGBoost, model.txt of
                     LightGBM, model.pt2 of PyTorch, OpenVINO's model.xml, model.tflite, or the folder of a SavedModel
                     or of a Hugging Face encoder (tokenizer.json and model.onnx)
  forebay.yaml       several targets with settings of their own; also the folder of this file. Use --config FILE for a
                     file of another name
  FOLDER             model files in folders MODEL/VERSION; also in a bucket: s3://BUCKET/PATH, gs:// or az://
  FOLDER or FILE     a project of another server: a nucleus.yaml or its folder; a graph.pbtxt or a config.json of
                     OpenVINO Model Server; a file with a Ventu; a script that runs a PipelineServer or a WebService
                     (words after -- are its arguments)

Options of OpenVINO Model Server (--config_path, --model_path, --port, --rest_port and others) work as well.

Each setting below can also be in the file (http: {port: 9000}) or in the environment (FOREBAY_HTTP_PORT=9000). The
command line wins over the environment, the environment over the file, and the file over the model's class.

SIGTERM and Ctrl+C drain: the port closes, accepted requests are answered, and the exit status is 0. A second signal
stops at once. SIGHUP reloads configuration, code and models without downtime. With --reload, a change of a Python file
of the project does the same.
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("serve", help="serve a model or a project", description=DESCRIPTION, usage=USAGE)
    add_options(parser)
    parser.set_defaults(run=run, parser=parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `serve` and `check` share."""
    parser.add_argument("target", metavar="TARGET", nargs="?", help="what to serve, see above; optional with --attach")
    parser.set_defaults(arguments=())
    add_flags(parser)


def options_of(parsed: argparse.Namespace, variables: Mapping[str, str] = os.environ) -> Options:
    """Put together what flags, environment and file tell; raises a `ConfigError` if something of it is not possible."""
    from forebay.server.setting_sources import told_by
    from forebay.surfaces import options

    environment, warnings = told_by(variables)
    flags = told_in(parsed)
    return options.options_of(
        parsed.target,
        options.Side(flags, attrgetter("written.flag")),
        options.Side(environment, attrgetter("variable")),
        warnings=[*warnings, *shown_by_flags(flags)],
        arguments=tuple(parsed.arguments),
    )


def run(parsed: argparse.Namespace) -> int:
    """Serve until stopped."""
    from forebay.transports.signals import early_hangup

    with early_hangup():
        status = _served(parsed)
    return _ended(status)


def _served(parsed: argparse.Namespace) -> int:
    from contextlib import nullcontext

    from forebay.machine.lifeline import BETWEEN_LINES, take_lifeline
    from forebay.machine.node_part import take_part
    from forebay.observe.logs.log import configure, tell
    from forebay.observe.traces.otel import tracing
    from forebay.surfaces.lookup import build, surface_of
    from forebay.surfaces.project_server import server_of
    from forebay.transports.binding import require_free
    from forebay.types.loopback import is_loopback

    lifeline, part = take_lifeline(), take_part()
    options = options_of(parsed)
    if part is not None:
        from forebay.surfaces.server_parts import options_of_part

        options = options_of_part(options, part)
    log_format = options.log_format or ("text" if sys.stderr.isatty() else "json")
    configure(options.log_level or "info", log_format)
    if part is None and options.fronts is not None:
        return _serve_divided(parsed, options, options.fronts)
    if part is None and options.cluster.address is not None:
        from forebay.cli.cluster import deploy

        return deploy(options)
    surface = surface_of(options.target)
    if part is None and surface is not None and surface.name == "native":  # others may have ports of their own
        require_free(options.http.host, options.http.port)
    project = build(options.target, options)
    configure(options.log_level or project.log_level or "info", log_format)
    if part is not None and not part.is_owner:
        from forebay.surfaces.server_parts import quieten_front

        quieten_front()
    doubts = [*options.warnings, *project.warnings, *project.problems]
    is_first = part is None or part.is_owner
    http = project.http
    if is_first and project.asgi is not None and not is_loopback(http.host) and not http.api_keys:
        doubts.append(f"all clients that reach {http.host} can call the models; require a key with --api-key @FILE")
    tell(*(f"warning: {warning}" for warning in doubts))

    def ready(address: str) -> None:
        door = [] if project.app.door is None else [f"workers attach at {project.app.door.shown}"]
        told = [*project.summary, *door, *project.first_steps()]
        if lifeline is not None:
            lifeline.ready(BETWEEN_LINES.join(told))
            lifeline.beat()
        if part is None:
            _tell_ready(address, told)

    if options.cost_log is not None and is_first:
        from forebay.observe.metrics.tenant_accounts import Accounts
        from forebay.server.cost_log import CostLog

        project.app.cost_log = CostLog(project.app.state.of(Accounts), options.cost_log)
        project.app.links.append(project.app.cost_log)
    with project.app.state.entered(), tracing() if options.otel else nullcontext():
        return server_of(project, drain_s=options.drain_s, ready=ready, is_part=part is not None).run()


def _serve_divided(parsed: argparse.Namespace, options: Options, fronts: int) -> int:
    """Serve as one owner and several fronts."""
    from forebay.machine.fronts import DividedServer
    from forebay.surfaces.lookup import require_divisible
    from forebay.surfaces.server_parts import lends

    require_divisible(options)
    http = options.http
    host = f"[{http.host}]" if ":" in http.host else http.host
    scheme = "https" if http.certfile else "http"

    def ready(part: Part, lines: Sequence[str]) -> None:
        if part.grpc_port is not None:
            log.info("gRPC at %s:%d", host, part.grpc_port)
        _tell_ready(f"{scheme}://{host}:{part.http_port}", lines)

    divided = DividedServer(
        arguments=parsed.given,
        fronts=fronts,
        host=http.host,
        http_port=http.port,
        grpc_port=options.grpc.port,
        drain_s=options.drain_s,
        hang_s=options.process_hang_s,
        lends=lends(options),
    )
    return divided.serve(ready)


def _tell_ready(address: str, lines: Sequence[str]) -> None:
    from urllib.parse import urlsplit

    from forebay.observe.logs.log import tell
    from forebay.types.loopback import is_loopback

    lines = [line.replace("{address}", address) for line in lines]
    is_local = is_loopback(urlsplit(address).hostname or "")
    open_to = " (this machine only; --host 0.0.0.0 opens it to others)" if is_local else ""
    tell(f"ready at {address}{open_to}", *(f"  {line}" for line in lines))


def _ended(status: int) -> int:
    """Return the status, or end with it right here where threads are left behind in calls that load or hang.

    They are in foreign code, as a rule, and the interpreter would abort the process when it ends them there.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    if others and all(thread.daemon for thread in others):  # for others the interpreter waits
        # What the interpreter does first as well, in this order: the first has executors (of joblib, for one) tell
        # their processes to end, and the second waits for these. Executors also wait for their threads, which may hang.
        telling = threading.Thread(target=_tell_executors, daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread can be had
            telling.start()
            telling.join(TELL_S)
        atexit._run_exitfuncs()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # it is closed
                stream.flush()
        os._exit(status)
    return status


def _tell_executors() -> None:
    """Call what is registered for the end of threads; the interpreter's own way then waits for the main one as well."""
    for tell in reversed(threading._threading_atexits):  # noqa: SLF001  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType, reportUnknownVariableType]
        tell()
