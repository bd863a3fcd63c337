# SPDX-License-Identifier: Apache-2.0
"""A deployment as this machine knows it, without Ray: by the folders of its nodes, and what they were told last."""

from __future__ import annotations

import contextlib
import socket
from typing import Final

import msgspec

from forebay.cluster import control
from forebay.cluster.deployment import ClusterState, newest
from forebay.cluster.node_folder import RAY, SECRET, NodeFolder, folders
from forebay.cluster.node_life import NodeStatus
from forebay.errors import ForebayError
from forebay.types.first_use import known

END_S: Final = 60.0
"""How long the processes of a node may take to end."""
DIAL_S: Final = 1.0


def describe(name: str) -> list[str]:
    """Return lines that say what runs where; none if nothing of the deployment is known here."""
    found = list(folders(name))
    state = newest([one for one in (folder.state for folder in found) if one is not None])
    if state is None:
        return []
    lines = [f"deployment {name}, version {state.version}"]
    lines += [f"  {state.problem}"] if state.problem else []
    for run in state.runs:
        route = state.route(run.key)
        where = "nowhere" if route is None else f"{route.node} at {route.address}"
        phase = "" if run.key in state.live else " (leaving, or not ready yet)"
        names = ", ".join(run.unit.models) or run.unit.name
        workers = [one.node for one in state.workers if one.run == run.key]
        run_by = f"; workers on {', '.join(sorted(workers))}" if workers else ""
        lines.append(f"model {names}{phase}: owner on {where}{run_by}")
    for folder in found:
        lines += [f"node {folder.name}{' (draining)' if folder.name in state.draining else ''}, on this machine:"]
        try:
            status = status_of(folder)
        except ForebayError as error:
            lines.append(f"  {error.message}")
            continue
        lines.append(f"  front at {status.front}; node process {status.pid}, version {status.version}")
        if folder.name in state.doors and folder.name not in state.draining:
            lines.append(f"  programs join at {state.doors[folder.name]}, with the secret @{folder.path / SECRET}")
        for child in status.children:
            how = "ready" if child.is_ready else child.problem or "starting"
            lines.append(f"  {child.name}: process {child.pid}, started {child.starts} times, {how}")
    here = {folder.name for folder in found}
    lines += [f"node {one}: {_reached(state, one)}" for one in sorted(state.nodes - here)]
    return lines


def status_of(folder: NodeFolder) -> NodeStatus:
    """Return what a node process says of itself; raises a `ForebayError` if it does not answer."""
    return msgspec.convert(control.ask(folder.control, folder.secret, "status"), known(NodeStatus))


def ray_of(name: str) -> tuple[str, str] | None:
    """Return where the head of Ray is that a deployment runs on, and how it is spoken to; None if it is not there."""
    for folder in folders(name):
        with contextlib.suppress(OSError, ValueError):
            address, _, mode = (folder.path / RAY).read_text().partition(" ")
            host, _, port = address.rpartition(":")
            with socket.create_connection((host.strip("[]"), int(port)), DIAL_S):
                return address, mode
    return None


def _reached(state: ClusterState, node: str) -> str:
    for one in state.owners:
        if one.node == node:
            with contextlib.suppress(OSError), socket.create_connection((one.host, one.port), DIAL_S):
                return f"an owner answers at {one.address}"
            return f"no owner answers at {one.address}"
    return "it has no owner that could be asked"


def end_all(name: str) -> tuple[list[str], list[str], int]:
    """End the node processes of a deployment on this machine.

    Returns:
        The folders of those that have not ended, other nodes that may run something, and how many there were here.
    """
    found = list(folders(name))
    state = newest([one for one in (folder.state for folder in found) if one is not None])
    left: list[str] = []
    for folder in found:
        if folder.end(END_S):
            folder.remove()
        else:
            left.append(str(folder.path))
    others = set[str]() if state is None else state.nodes - {folder.name for folder in found}
    return left, sorted(others), len(found)
