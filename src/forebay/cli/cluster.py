# SPDX-License-Identifier: Apache-2.0
"""`forebay serve --cluster`, and `forebay cluster status|drain|resume|down`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from forebay.cluster.ray_program import Job, RayEvent
    from forebay.surfaces.contract import Options

DESCRIPTION = """\
Show, drain and stop a deployment of `forebay serve --cluster`. `status` and `down` work without Ray: they find the
processes of this machine by the state folder of each node.
"""

EPILOG = """\
examples:
  forebay serve forebay.yaml --cluster auto    deploy on the Ray cluster that this machine is a node of
  forebay cluster status                       show which node runs which models
  forebay cluster drain 10.0.0.7               move everything on a node to other nodes, to take it out of service
  forebay cluster resume 10.0.0.7              use the node again
  forebay cluster down                         stop the deployment
"""

_VERBS: Final = {
    "status": "show which node runs which models",
    "drain": "move everything on a node to other nodes",
    "resume": "use a node again",
    "down": "stop the deployment",
}


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "cluster", help="show, drain and stop a deployment on a Ray cluster", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument(
        "verb", choices=list(_VERBS), help="; ".join(f"{verb}: {does}" for verb, does in _VERBS.items())
    )
    parser.add_argument("node", metavar="NODE", nargs="?", help="the node, for drain and resume, as status calls it")
    parser.add_argument("--deployment", metavar="NAME", default="default", help="name of the deployment (default)")
    parser.set_defaults(run=run, parser=parser)


def run(parsed: argparse.Namespace) -> int:
    """Do what the verb says; returns the exit status."""
    from forebay.errors import ConfigError

    if (parsed.node is None) == (parsed.verb in {"drain", "resume"}):
        needed = "needs the name of a node" if parsed.node is None else "has no node as argument"
        raise ConfigError(f"forebay cluster {parsed.verb} {needed}; see: forebay cluster status")
    match parsed.verb:
        case "status":
            return _status(parsed.deployment)
        case "down":
            return _down(parsed.deployment)
        case verb:
            return _drain(verb, parsed.node, parsed.deployment)


def deploy(options: Options) -> int:
    """Deploy on a cluster and follow what happens there; returns the exit status."""
    import msgspec

    from forebay.cluster.ray_program import Job
    from forebay.observe.logs.log import tell
    from forebay.surfaces.lookup import deployment

    assert options.cluster.address is not None
    wanted, packed = deployment(options.target, options)
    tell(*(f"warning: {warning}" for warning in options.warnings))
    job = Job(
        verb="deploy",
        address=options.cluster.address,
        name=wanted.name,
        deployment=msgspec.msgpack.encode(wanted),
        packed=packed,
    )
    signal.signal(signal.SIGTERM, _interrupt)
    return _followed(job)


def _followed(job: Job) -> int:
    from forebay.cluster.deployer import Deployer
    from forebay.observe.logs.log import tell

    was_ready = False
    try:
        with Deployer(job) as events:
            for event in events:
                if event.kind == "error":
                    tell(event.text)
                    return event.code
                was_ready |= event.kind == "ready"
                if event.kind == "done":
                    tell(event.text)
                    return 0
                _show(event)
    except KeyboardInterrupt:
        tell(f"detached; the deployment '{job.name}' keeps running. Stop it with:  {_command('down', job.name)}")
        return 0
    if was_ready:
        tell("Ray has stopped. The deployment keeps running without it; deploy again to have Ray supervise it")
        return 1
    tell("Ray stopped before the deployment was ready")
    return 1


def _show(event: RayEvent) -> None:
    from forebay.observe.logs.log import tell

    if event.kind == "log":
        for line in event.text.splitlines():
            sys.stderr.write(f"[{event.node}] {line}\n")
        sys.stderr.flush()
    elif event.kind == "ready":
        tell(f"ready at {event.text}")
    elif event.kind == "say":
        tell(event.text)


def _status(name: str) -> int:
    """Show what runs where, by what the nodes on this machine have been told."""
    from forebay.cluster.local_view import describe

    lines = describe(name)
    if not lines:
        from forebay.observe.logs.log import tell

        tell(f"nothing of a deployment '{name}' runs on this machine")
        return 1
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _drain(verb: Any, node: str, name: str) -> int:
    from forebay.cluster.local_view import ray_of
    from forebay.cluster.ray_program import Job

    address, mode = ray_of(name) or ("auto", "")
    events = _answers(Job(verb=verb, address=address, auth_mode=mode, name=name, node=node))
    return _last_status(events, {"drain": f"nothing runs on {node} any more", "resume": f"{node} is used again"}[verb])


def _down(name: str) -> int:
    """End a deployment: by its controller, if there is one, and then what is left on this machine."""
    from forebay.cluster.deployer import RayEnded
    from forebay.cluster.local_view import end_all, ray_of
    from forebay.cluster.ray_program import Job
    from forebay.observe.logs.log import tell

    head = ray_of(name)
    if head is not None:
        try:
            for event in _answers(Job(verb="down", address=head[0], auth_mode=head[1], name=name)):
                if event.kind in {"say", "error"}:
                    tell(event.text)
        except RayEnded as error:
            tell(f"{error.message}; stopping the processes of this machine without it")
    left, elsewhere, count = end_all(name)
    for one in left:
        tell(f"the processes of {one} could not be stopped")
    for one in elsewhere:
        tell(f"{one} cannot be reached and may still run the deployment; run this command there as well")
    if not left:
        tell(f"stopped the deployment '{name}'" if count or head else f"no deployment '{name}' on this machine")
    return 1 if left or elsewhere else 0


def _answers(job: Job) -> Sequence[RayEvent]:
    from forebay.cluster.deployer import Deployer

    with Deployer(job) as events:
        return [*events]


def _last_status(events: Sequence[RayEvent], done: str) -> int:
    from forebay.observe.logs.log import tell

    for event in events:
        if event.kind == "error":
            tell(event.text)
            return event.code
    tell(done)
    return 0


def _command(verb: str, name: str) -> str:
    return f"forebay cluster {verb}" + ("" if name == "default" else f" --deployment {name}")


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt
