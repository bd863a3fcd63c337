# SPDX-License-Identifier: Apache-2.0
"""Which processes a node runs, by the state of the deployment: a function of the state and of the node's name.

    front                a server on the port of the deployment; it hands requests on to the owners of all models, and
                         has a door where programs join and the other fronts are its peers
    owner of a run       a server with the queue of a model, where workers and fronts dial in
    worker of a run      runs the model, and finds its owner in a file that is written anew when the owner moves

Files are JSON, which is YAML. An owner that moves changes the file of the front, which is then told to reload it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import msgspec

from forebay.cluster.deployment import PROJECT, ClusterState, Owning, PlacedWorker, Run
from forebay.cluster.node_folder import CODE, SECRET
from forebay.machine.children import Child
from forebay.server.config import ProcessConfig

if TYPE_CHECKING:
    from forebay.types.worker_range import WorkerRange

FRONT: Final = "front"
_OWNER: Final = "owner "
_WORKER: Final = "worker "
_WORKERS_WAVE, _OWNERS_WAVE, _FRONT_WAVE = range(3)
_DRAIN_S: Final = 30.0
_AFTER_DRAIN_S: Final = 10.0
_MAX_JOINED: Final = 4096
"""Programs and other fronts that a front lets in."""
LOOPBACK: Final = "127.0.0.1"


class NodePlan(NamedTuple):
    """What a node runs.

    Attributes:
        children: The processes.
        files: What they read in the folder of the node, by name.
    """

    children: list[Child]
    files: dict[str, bytes]


def plan_of(state: ClusterState, node: str, folder: Path, python: str, http_port: int) -> NodePlan:
    """Return what a node runs.

    Args:
        python: The interpreter of its processes.
        http_port: Where its front listens.
    """
    owners = [one for one in state.owners if one.node == node]
    workers = [one for one in state.workers if one.node == node]
    runs = {run.key: run for run in state.runs}
    files: dict[str, bytes] = {}
    children: list[Child] = []
    if node not in state.draining or owners or workers:
        found = _front(state, node, http_port)
        if found is not None:
            file = "front.yaml"
            files[file] = msgspec.json.format(msgspec.json.encode(_placed(found, folder, state.deployment.code)))
            argv = (python, "-m", "forebay", "serve", "--config", str(folder / file))
            children.append(_server(FRONT, argv, folder, _FRONT_WAVE, state.deployment.front))
    for one in owners:
        run = runs[one.run]
        file = f"{one.key}.yaml"
        files[file] = msgspec.json.format(msgspec.json.encode(_placed(_owner(state, one, run), folder, run.code)))
        argv = (python, "-m", "forebay", "serve", "--config", str(folder / file))
        settings = state.deployment.owner
        children.append(_server(_OWNER + one.key, argv, code_folder(folder, run.code), _OWNERS_WAVE, settings))
    for one in workers:
        run = runs[one.run]
        address = f"{run.key}.address"
        route = state.route(run.key)
        if route is not None:
            files[address] = route.address.encode() + b"\n"
        children.append(_worker(state, one, run, folder, run.unit.python or python))
    return NodePlan(children, files)


def worker_child(run: str, index: int) -> str:
    """Return the name of the child that is a worker."""
    return f"{_WORKER}{run}.{index}"


def owner_in(child: str) -> str | None:
    """Return the key of the owner that a child of this name is, if it is one."""
    return child.removeprefix(_OWNER) if child.startswith(_OWNER) else None


def code_folder(folder: Path, digest: str) -> Path:
    """Return where a node has its copy of the project."""
    return folder / CODE / digest


def tls_files(state: ClusterState, folder: Path, code: str) -> dict[str, str]:
    """Return where a node, whose project has the digest `code`, has its TLS files, by their settings."""
    return {name: _text(path, folder, code) for name, path in state.deployment.tls.items()}


def _front(state: ClusterState, node: str, http_port: int) -> dict[str, Any] | None:
    """Return the configuration of a front; None while there is no owner that it could ask."""
    models: list[dict[str, Any]] = []
    for key in state.live:
        run, route = state.run(key), state.route(key)
        if run is not None and route is not None:
            names = [{"name": name} for name in run.unit.models] or [{}]
            models += [{"owner": route.address, **name} for name in names]
    if not models:
        return None
    front: dict[str, Any] = {**state.deployment.front, "models": models}
    tls = state.deployment.tls
    attach = {
        **front.get("attach", {}),
        **{f"owner_{name}": path for name, path in tls.items()},
        "secret": f"@{SECRET}",
    }
    if node in state.doors:
        doors = {"address": state.doors[node], "peers": [*state.doors.values()]}
        attach = {"max_connections": _MAX_JOINED, **attach, **doors, **tls}
    front["attach"] = attach
    front["http"] = {**front.get("http", {}), "port": http_port}
    return front


def _owner(state: ClusterState, owning: Owning, run: Run) -> dict[str, Any]:
    settings = {**run.unit.settings, "target": run.unit.target}
    if run.unit.workers:
        settings["workers"] = 0 if run.unit.bounds is None else _range(run.unit.bounds, state.size(run))
    attach = {**state.deployment.owner.get("attach", {}), "address": owning.address, "secret": f"@{SECRET}"}
    attach["members"] = False  # the directory is kept by fronts
    return {
        **state.deployment.owner,
        "models": [settings],
        "http": {"host": LOOPBACK, "port": owning.http_port},
        "attach": attach,
    }


def _range(bounds: WorkerRange, size: int) -> dict[str, Any]:
    """Return what an owner is told that says how many workers it wants; one that is started anew begins with these."""
    told = msgspec.structs.replace(bounds, initial=size, dial_in=True)
    return {name: value for name, value in msgspec.structs.asdict(told).items() if value is not None}


def _worker(state: ClusterState, placed: PlacedWorker, run: Run, folder: Path, python: str) -> Child:
    argv = (
        python,
        *("-m", "forebay", "worker", _text(run.unit.target, folder, run.code)),
        *("--connect", f"@{folder / run.key}.address"),
        *("--secret", f"@{folder / SECRET}"),
        *("--orphan-grace-s", f"{state.deployment.orphan_grace_s:g}"),
        *(word for name, path in tls_files(state, folder, run.code).items() for word in (f"--{name}", path)),
        *run.unit.worker_flags,
    )
    env = dict(run.unit.env)
    if placed.gpus is not None:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(placed.gpus)
    return Child(
        name=worker_child(placed.run, placed.index),
        argv=argv,
        env=env,
        cwd=str(code_folder(folder, run.code)),
        wave=_WORKERS_WAVE,
        end_s=_end_s(state.deployment.owner),
    )


def _server(name: str, argv: tuple[str, ...], cwd: Path, wave: int, settings: Mapping[str, Any]) -> Child:
    hang_s = float(settings.get("process_hang_s", ProcessConfig().process_hang_s))
    return Child(name=name, argv=argv, cwd=str(cwd), wave=wave, end_s=_end_s(settings), hang_s=hang_s)


def _end_s(settings: Mapping[str, Any]) -> float:
    return float(settings.get("drain", _DRAIN_S)) + _AFTER_DRAIN_S


def _placed(value: Any, folder: Path, code: str) -> Any:
    """Return a value of a configuration in which paths in the project are those of the node's copy."""
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _placed(one, folder, code) for key, one in fields.items()}
    if isinstance(value, list | tuple):
        return [_placed(one, folder, code) for one in cast("list[Any]", value)]
    return _text(value, folder, code) if isinstance(value, str) else value


def _text(value: str, folder: Path, code: str) -> str:
    if not value.startswith(PROJECT):
        return value
    return str(code_folder(folder, code) / value.removeprefix(PROJECT))
