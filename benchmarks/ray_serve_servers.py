# SPDX-License-Identifier: Apache-2.0
"""The servers of `benchmarks.ray_serve`: Ray Serve and forebay on the same nodes, and fronts with owners beside them.

They run where no other process has a number, so what belongs to a server can be found by its name.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks import proc
from benchmarks.front_servers import TCP, Bare, Kind, Ours, cpu_s, up
from benchmarks.launch import ROOT, Running, ServerFailed, environment, wait_answering
from benchmarks.ray_serve_rows import ADVISED, BARE, BATCHES, CLUSTER, ECHO, FRONT, SERVE
from benchmarks.servers import Server
from forebay.cluster import local_view
from forebay.cluster.node_folder import folders, root
from forebay.errors import ForebayError

JOBS = (ECHO, BATCHES)
CORES = frozenset(os.sched_getaffinity(0))
START_LIMIT_S = 150.0
STOP_LIMIT_S = 15.0
SERVE_PORT = 8000
DEPLOYMENT = "benchmark"
ADVICE = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
FOLDERS = "/tmp"
"""HAProxy takes no socket with a path of more than 97 characters, of which Ray Serve needs 70."""
HAPROXY_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "h/haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "h/admin.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "h",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "h/server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "h/metrics.sock",
}
RAY = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",  # 15 by default, also for what forebay runs there: wrk would come first
}
ACTORS = {
    SERVE: ("ray::Serve", "ray::SERVE", "ray::Proxy", "ray::HAProxy"),
    CLUSTER: ("ray::Host", "ray::Controller", "ray::Reservation"),
}
BATCH = ("--max-batch-size", "64")
WITHOUT_RAY: dict[str, dict[str, Kind]] = {
    FRONT: {
        ECHO: Ours("benchmarks/jobs/echo.py", "inline", flags=BATCH),
        BATCHES: Ours("benchmarks/jobs/batchmodel.py", "process", "batch-model", BATCH),
    },
    BARE: {ECHO: Bare("inline"), BATCHES: Bare("process")},
}


@dataclass
class Way:
    """What is asked for a job.

    Attributes:
        asked: What clients ask.
        pids: All processes of the server.
        where: The nodes that run it.
    """

    asked: Running
    pids: list[int]
    where: str = ""


Ways = dict[str, Way]
"""By job."""


class Everything:
    """All processes of this program, for `Foreign`: there are no others in its list of processes."""

    def cpu_s(self) -> tuple[float, float]:
        total = sum(times_s(others()).values())
        return total, total


@contextmanager
def life(settings: str, folder: Path) -> Iterator[dict[str, Ways]]:
    """Have a cluster and all servers while the block runs; each has answered by then."""
    try:
        with ExitStack() as stack:
            variables = ray_environment(settings, folder)
            process, address = stack.enter_context(cluster(variables, folder / "ray.log"))
            asked = {job: answering(SERVE, f"/{job}", job, SERVE_PORT, process) for job in JOBS}
            ways: dict[str, Ways] = {}
            ways[CLUSTER] = stack.enter_context(deployed(address, variables, folder / "forebay.log"))
            for name, kinds in WITHOUT_RAY.items():
                ways[name] = {job: without_ray(kind, job, folder, stack) for job, kind in kinds.items()}
            pids = titled(*ACTORS[SERVE])  # late: HAProxy starts again when its routes change
            ways[SERVE] = {job: Way(each, pids) for job, each in asked.items()}
            yield ways
    finally:
        end_others()
        for path in root().glob(f"{DEPLOYMENT}-*"):  # a host makes it again as long as Ray is there
            shutil.rmtree(path, ignore_errors=True)


def ray_environment(settings: str, folder: Path) -> dict[str, str]:
    """Return the environment of all processes on the nodes; what they write is kept in a folder."""
    files = {name: str(folder / file) for name, file in HAPROXY_FILES.items()}
    return {**environment(), **files, **RAY, **(ADVICE if settings == ADVISED else {}), "TMPDIR": str(folder)}


@contextmanager
def cluster(variables: dict[str, str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Have two nodes with Ray Serve while the block runs: the program that has started them, and their address."""
    command = [sys.executable, "-m", "benchmarks.servers.ray_nodes", str(SERVE_PORT)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=output, **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        is_told = select.select([process.stdout], [], [], START_LIMIT_S)[0]
        address = process.stdout.readline().decode().strip() if is_told else ""
        if not address:
            raise ServerFailed(f"Ray Serve did not start; it had {START_LIMIT_S:.0f} s\n{tail(log)}")
        yield process, address
    finally:
        process.stdin.close()
        end(process)
        process.stdout.close()


@contextmanager
def deployed(address: str, variables: dict[str, str], log: Path) -> Iterator[Ways]:
    """Have forebay deployed on a cluster while the block runs."""
    name = f"{DEPLOYMENT}-{secrets.token_hex(4)}"
    program = str(Path(sys.executable).with_name("forebay"))
    command = [program, "serve", "--config", "benchmarks/jobs/cluster.yaml", "--cluster", address, "--deployment", name]
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=output, stderr=output)
    try:
        yield wait_deployed(name, process, log)
    finally:
        process.send_signal(signal.SIGINT)
        end(process)
        local_view.end_all(name)


def wait_deployed(name: str, process: subprocess.Popen[bytes], log: Path) -> Ways:
    until = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(ForebayError):
            if ways := ready_ways(name, process):
                return ways
        time.sleep(0.1)
    view = "\n".join(local_view.describe(name))
    raise ServerFailed(f"the deployment of forebay is not ready\n{view}\n{tail(log)}")


def ready_ways(deployment: str, process: subprocess.Popen[bytes]) -> Ways:
    """Return the front that does not own a job's model, for each job; nothing if not all is ready."""
    nodes = {folder: local_view.status_of(folder) for folder in folders(deployment)}
    states = [state for folder in nodes if (state := folder.state) is not None]
    if len(states) < 2 or not all(child.is_ready for status in nodes.values() for child in status.children):
        return {}
    state = max(states, key=lambda each: each.version)
    pids = [pid for status in nodes.values() for pid in proc.tree(status.pid)] + titled(*ACTORS[CLUSTER])
    ways: Ways = {}
    for run in state.runs:
        route = state.route(run.key)
        if route is None:
            return {}
        (model,) = run.unit.models
        job = model.replace("-", "")
        name, front = next((one.name, status.front) for one, status in nodes.items() if one.name != route.node)
        asked = answering(f"forebay:{CLUSTER}", f"/models/{model}", job, int(front.rpartition(":")[2]), process)
        workers = ", ".join(worker.node for worker in state.workers if worker.run == run.key)
        ways[job] = Way(asked, pids, f"{job}: front on {name}, owner on {route.node}, worker on {workers}")
    return ways if len(ways) == len(JOBS) else {}


def without_ray(kind: Kind, job: str, folder: Path, stack: ExitStack) -> Way:
    """Start an owner and a front of it."""
    way = up(kind, job, TCP, folder, stack, cores=CORES)
    return Way(way.fronts[0], [pid for server in way.servers for pid in server.pids()])


def answering(name: str, path: str, job: str, port: int, process: subprocess.Popen[bytes]) -> Running:
    """Return a server that was started elsewhere, once it has answered."""
    running = Running(Server(name, lambda _job, _port: [], path=path), job, port, process, Path(os.devnull))
    wait_answering(running, time.perf_counter())
    return running


def times_s(pids: Iterable[int]) -> dict[int, float]:
    """Return the CPU time of the processes that still run."""
    found: dict[int, float] = {}
    for pid in pids:
        with suppress(OSError):
            found[pid] = cpu_s([pid])
    return found


def others() -> list[int]:
    """List all processes but this one."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]


def titled(*words: str) -> list[int]:
    """List the processes whose command line begins with one of these words, and all below them."""
    found: set[int] = set()
    for pid in others():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_text(errors="replace").startswith(words):
                found |= {*proc.tree(pid)}
    return sorted(found)


def end(process: subprocess.Popen[bytes]) -> None:
    """Wait until a process that knows it has ended, and kill it once its time is over."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_LIMIT_S)
    process.kill()
    process.wait()


def end_others() -> None:
    """Kill what Ray has left behind, where all processes are this program's: then its parent is the first of them."""
    if os.getppid() != 1:
        return
    for pid in others():
        if pid != 1:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
