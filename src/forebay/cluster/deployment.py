# SPDX-License-Identifier: Apache-2.0
"""What is deployed on a cluster, and what of it runs where: plain data that the controller decides and nodes keep.

A *unit* is what has one owner: a model of the project, or a file with several that cannot be separated. A unit *runs*
under a key of its own for each version of it, so that two versions of a project can run beside each other during an
upgrade. An *owning* is one owner process of a run; while a run moves to another node it has two.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from forebay.errors import ConfigError, InvalidRequest
from forebay.types.first_use import known
from forebay.types.ray_needs import RayNeeds
from forebay.types.worker_range import WorkerRange

PROJECT: Final = "project:"
"""How texts begin that name a path in the project; a node puts its copy of the project there."""
MAX_STATE_BYTES: Final = 4 * 1024 * 1024
MAX_UNITS: Final = 1024
MAX_DOORS: Final = 1024
TLS_FILES: Final = ("cafile", "certfile", "keyfile")
"""The settings of `attach` that name TLS files; each node has its own files at these paths."""
_NAME: Final = r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$"

DeploymentName = Annotated[str, Meta(pattern=_NAME)]
Key = Annotated[str, Meta(min_length=1, max_length=128)]


class Unit(msgspec.Struct, frozen=True, kw_only=True):
    """What has one owner.

    Attributes:
        name: What it is called in the cluster.
        target: What its processes serve.
        models: The names that clients ask for; none where only its owner knows them.
        workers: Worker processes that dial in; 0 where its owner runs it by itself. With `bounds` so many at first.
        bounds: Within which their number follows what the owner says; None where it is fixed.
        needs: What each of them reserves.
        settings: What holds for it, as `forebay.yaml` says it beside a target.
        worker_flags: What its workers are told beside that.
        env: Variables of the environment of its workers.
        python: The interpreter of its workers; None takes the node's.
    """

    name: Key
    target: str
    models: Annotated[tuple[str, ...], Meta(max_length=MAX_UNITS)]
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    bounds: WorkerRange | None = None
    needs: RayNeeds = RayNeeds()
    settings: dict[str, Any] = {}
    worker_flags: tuple[str, ...] = ()
    env: dict[str, str] = {}
    python: str | None = None

    @property
    def most(self) -> int:
        """The most workers that there may be."""
        return self.workers if self.bounds is None else self.bounds.max


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """What is deployed.

    Attributes:
        name: What the deployment is called.
        code: The digest of the project's files.
        front: The settings of fronts, as `forebay.yaml` has them.
        owner: The settings of owners.
        units: What is served.
        load_timeout_s: How long a new version may take to get ready.
        orphan_grace_s: How long workers without an owner keep their model loaded.
    """

    name: DeploymentName
    code: str
    front: dict[str, Any]
    owner: dict[str, Any]
    units: Annotated[tuple[Unit, ...], Meta(min_length=1, max_length=MAX_UNITS)]
    load_timeout_s: float = 300.0
    orphan_grace_s: float = 900.0

    @property
    def tls(self) -> dict[str, str]:
        """The TLS files of a node, by their settings; none if nodes do not speak TLS with each other."""
        attach = self.owner.get("attach", {})
        return {name: attach[name] for name in TLS_FILES if attach.get(name)}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a unit.

    Attributes:
        key: What no other run of the deployment was ever called.
        unit: What runs.
        code: The digest of the files that it runs.
    """

    key: Key
    unit: Unit
    code: str


class Owning(msgspec.Struct, frozen=True, kw_only=True):
    """An owner process of a run.

    Attributes:
        key: What no other owning of the deployment was ever called.
        run: The run.
        node: Where it is.
        host: Where that node is reached.
        port: Where workers and fronts dial.
        http_port: Where its node asks whether it is ready.
        left_at: The version of the state since which fronts do not ask it any more; None while they do, or will.
    """

    key: Key
    run: Key
    node: str
    host: str
    port: int
    http_port: int
    left_at: int | None = None

    @property
    def address(self) -> str:
        """Where it is dialled."""
        return address_of(self.host, self.port)


class PlacedWorker(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process of a run, and where it is.

    Attributes:
        run: The run.
        index: Its number in the run.
        node: Where it runs.
        gpus: The GPUs that are reserved for it there; None where none are.
    """

    run: Key
    index: int
    node: str
    gpus: tuple[str, ...] | None = None


class ClusterState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a deployment is at this moment; every node keeps the newest one that it was told.

    Attributes:
        version: Grows with each change.
        deployment: What is wanted.
        previous: What was wanted before, until the new one has taken its place.
        runs: What runs: the live ones, those that are to take their place, those that are leaving.
        live: The runs that clients are served by.
        routes: The owning that fronts ask, by run.
        owners: All owner processes.
        workers: All worker processes.
        draining: Nodes that are to be left.
        doors: Where programs join at the front of each node, and the other fronts dial it as their peer.
        since_s: When the last deployment began, in seconds since the epoch.
        problem: Why the last deployment was rolled back; empty if it was not.
        sizes: How many workers runs have whose number follows the load, where it is not that of the beginning.
        made: How many runs and owners there have been, which numbers them.
    """

    version: int
    deployment: Deployment
    previous: Deployment | None = None
    runs: Annotated[tuple[Run, ...], Meta(max_length=2 * MAX_UNITS)] = ()
    live: tuple[Key, ...] = ()
    routes: dict[Key, Key] = {}
    owners: Annotated[tuple[Owning, ...], Meta(max_length=4 * MAX_UNITS)] = ()
    workers: Annotated[tuple[PlacedWorker, ...], Meta(max_length=64 * MAX_UNITS)] = ()
    draining: tuple[str, ...] = ()
    doors: Annotated[dict[Key, str], Meta(max_length=MAX_DOORS)] = {}
    since_s: float = 0.0
    problem: str = ""
    sizes: dict[Key, int] = {}
    made: int = 0

    @property
    def wanted(self) -> tuple[str, ...]:
        """The runs that the deployment asks for, as far as they have begun."""
        code = self.deployment.code
        alike: dict[str, list[Run]] = {}
        for run in self.runs:
            if run.code == code:
                alike.setdefault(run.unit.name, []).insert(0, run)
        found = (
            next((run for run in alike.get(one.name, ()) if run.unit == one), None) for one in self.deployment.units
        )
        return tuple(run.key for run in found if run is not None)

    @property
    def nodes(self) -> set[str]:
        """The nodes that something runs on."""
        return {one.node for one in (*self.owners, *self.workers)}

    def size(self, run: Run) -> int:
        """Return how many workers a run has."""
        return self.sizes.get(run.key, run.unit.workers)

    def run(self, key: str) -> Run | None:
        """Return the run of this key."""
        return next((one for one in self.runs if one.key == key), None)

    def route(self, run: str) -> Owning | None:
        """Return the owner that fronts ask for a run."""
        key = self.routes.get(run)
        return next((one for one in self.owners if one.key == key), None)


def address_of(host: str, port: int) -> str:
    """Return how a place is written where processes dial."""
    return f"tcp:{f'[{host}]' if ':' in host else host}:{port}"


def encode_state(state: ClusterState) -> bytes:
    """Return a state as bytes; raises a `ConfigError` if it is larger than nodes take."""
    data = msgspec.msgpack.encode(state)
    if len(data) > MAX_STATE_BYTES:
        raise ConfigError(f"the deployment is described by {len(data)} bytes, and nodes take at most {MAX_STATE_BYTES}")
    return data


def read_state(data: bytes) -> ClusterState:
    """Read a state; raises an `InvalidRequest` if it is none."""
    if len(data) > MAX_STATE_BYTES:
        raise InvalidRequest(f"a state of {len(data)} bytes came, and at most {MAX_STATE_BYTES} are read")
    try:
        return msgspec.msgpack.decode(data, type=known(ClusterState))
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the state of a deployment cannot be read: {error}") from error


def newest(states: list[ClusterState]) -> ClusterState | None:
    """Return the newest of the states that nodes have kept."""
    return max(states, key=lambda one: one.version, default=None)
