# SPDX-License-Identifier: Apache-2.0
"""What a server tells of its cluster on the dashboard: nodes, what they own and run, and the programs that have joined.

A front of a deployment tells what its node was told last, and how the processes of its node are. Any other server tells
of its peers. Strangers are told no addresses, and nothing of what went wrong.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forebay.cluster.local_view import status_of
from forebay.cluster.node_folder import NodeFolder, folder_with
from forebay.errors import ForebayError

if TYPE_CHECKING:
    from forebay.cluster.deployment import ClusterState
    from forebay.cluster.keeper import DirectoryKeeper
    from forebay.cluster.node_life import NodeStatus
    from forebay.cluster.peer_servers import PeerServers

FRESH_S: Final = 2.0
"""How long what the node process has said holds: hosts ask it as well."""
MAX_PROGRAMS: Final = 100
"""Programs that are listed; the others are counted."""


class ClusterReport:
    """What one server tells."""

    def __init__(self, keeper: DirectoryKeeper, peers: PeerServers, source: Path | None) -> None:
        """Describe it by the configuration of this server, `source`; a front's lies in the folder of its node."""
        self._keeper = keeper
        self._peers = peers
        self._folder = None if source is None else folder_with(source)
        self._asking = asyncio.Lock()
        self._told: tuple[ClusterState | None, NodeStatus | None, str] = (None, None, "")
        self._told_s = float("-inf")

    async def describe(self, is_trusted: bool) -> dict[str, Any]:  # noqa: FBT001 - the dashboard passes it on
        """Return it as plain data."""
        state, status, problem = await self._asked()
        away = self._peers.problems_of
        told: dict[str, Any] = {"deployment": None, "nodes": [{"name": one, "away": why} for one, why in away.items()]}
        if state is not None and self._folder is not None:
            told = _of_deployment(state, self._folder.name, away)
            children = () if status is None else status.children
            told["processes"] = [
                {"name": one.name, "starts": one.starts, "is_ready": one.is_ready, "problem": one.problem}
                for one in children
            ]
            told["problems"] = [one for one in (state.problem, problem) if one]
        told |= self._programs()
        return told if is_trusted else _for_strangers(told)

    async def _asked(self) -> tuple[ClusterState | None, NodeStatus | None, str]:
        """Return the state, what the node process says, and why it does not."""
        async with self._asking:
            if self._folder is not None and time.monotonic() - self._told_s > FRESH_S:
                self._told = await asyncio.to_thread(_read, self._folder)
                self._told_s = time.monotonic()
        return self._told

    def _programs(self) -> dict[str, Any]:
        programs: dict[str, dict[str, Any]] = {}
        for name, members in self._keeper.directory.members.items():
            for one in members:
                program = programs.setdefault(one.id, {"address": one.address, "servings": []})
                program["servings"].append(name)
        return {"programs": [*programs.values()][:MAX_PROGRAMS], "program_count": len(programs)}


def _read(folder: NodeFolder) -> tuple[ClusterState | None, NodeStatus | None, str]:
    try:
        return folder.state, status_of(folder), ""
    except ForebayError as error:
        return folder.state, None, error.message


def _of_deployment(state: ClusterState, here: str, away: dict[str, str]) -> dict[str, Any]:
    models = {run.key: ", ".join(run.unit.models) or run.unit.name for run in state.runs}
    workers = Counter(one.node for one in state.workers)
    names = {*state.doors, *(one.node for one in state.owners), *workers, here}
    return {
        "deployment": state.deployment.name,
        "version": state.version,
        "nodes": [
            {
                "name": name,
                "is_here": name == here,
                "is_draining": name in state.draining,
                "owns": [models[one.run] for one in state.owners if one.node == name],
                "workers": workers[name],
                "door": state.doors.get(name, ""),
                "away": away.get(state.doors.get(name, ""), ""),
            }
            for name in sorted(names)
        ],
    }


def _for_strangers(told: dict[str, Any]) -> dict[str, Any]:
    """Return the same without addresses and without reasons."""
    nodes = [{**node, "door": "", "away": "away" if node["away"] else ""} for node in told["nodes"]]
    if told["deployment"] is None:  # these are called by their addresses
        nodes = [{**node, "name": f"peer {number}"} for number, node in enumerate(nodes, 1)]
    programs = [{**one, "address": ""} for one in told["programs"]]
    processes = [{**one, "problem": ""} for one in told.get("processes", ())]
    return {**told, "nodes": nodes, "programs": programs, "processes": processes, "problems": []}
