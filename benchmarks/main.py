# SPDX-License-Identifier: Apache-2.0
"""Run the comparison and write `RESULTS.md`; `README.md` says what is measured and how."""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec

from benchmarks import proc, report
from benchmarks.criteria import CROWDS, OPEN_RATES, criteria
from benchmarks.launch import Cores, Running, ServerFailed, python_helper, start
from benchmarks.load import Load, run_wrk
from benchmarks.records import CLOSED, FOREIGN_LIMIT, OPEN, Record, Records
from benchmarks.servers import SERVERS, Server
from benchmarks.work import JOBS

T = TypeVar("T")

WARM_UP_S = 1
ATTEMPTS = 3
OPEN_LOOP_JOB = "batchmodel"
# The loads the criteria speak of.
CONNECTIONS = {"echo": (1, 64, *CROWDS), "batchmodel": (1, 16, 64, 256), "iris": (64,)}


class Bench:
    """One run of the benchmarks."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pinned = not options.both_cores
        every_core = frozenset(range(os.cpu_count() or 1))
        self.server_cores: Cores = frozenset({0}) if self.pinned else every_core
        self.load_cores: Cores = frozenset({1}) if self.pinned else every_core
        self.records = Records()

    def run(self) -> None:
        os.sched_setaffinity(0, self.load_cores)
        began, stolen = time.time(), proc.machine_times_s()[1]

        def write() -> None:  # after each job, so that an interrupted run leaves its results
            self.write(began, (proc.machine_times_s()[1] - stolen) / (time.time() - began))

        self.records.curves.append(python_helper("calibrate", cores=self.server_cores))
        for job in self.options.jobs:
            closed = [server for server in self.options.servers if server.closed_loop]
            with ExitStack() as stack:
                compared = self.started([server for server in closed if job in server.every_round], job, stack)
                self.closed_loop(compared, job, self.options.rounds)
            for server in closed:  # once and alone: some of them poll, which would slow the others down
                if job not in server.every_round:
                    with ExitStack() as stack:
                        self.closed_loop(self.started([server], job, stack), job, 1)
            self.records.curves.append(python_helper("calibrate", cores=self.server_cores))
            write()
        if self.options.open and OPEN_LOOP_JOB in self.options.jobs:
            with ExitStack() as stack:
                self.open_loop(self.started([s for s in self.options.servers if s.open_loop], OPEN_LOOP_JOB, stack))
            write()

    def started(self, servers: Sequence[Server], job: str, stack: ExitStack) -> list[Running]:
        """Start servers that stay up together: the machine's speed drifts, so they take turns of a few seconds."""
        up: list[Running] = []
        for server in servers:
            self.attempt(partial(self.bring_up, server, job, stack, up))
        return up

    def bring_up(self, server: Server, job: str, stack: ExitStack, up: list[Running]) -> None:
        up.append(stack.enter_context(start(server, job, self.server_cores)))

    def attempt(self, measure: Callable[[], object]) -> None:
        try:
            measure()
        except (ServerFailed, OSError, subprocess.CalledProcessError) as error:
            say(f"FAILED {error}")
            self.records.failures.append(str(error))

    def closed_loop(self, up: Sequence[Running], job: str, rounds: int) -> None:
        for connections in self.options.connections or CONNECTIONS[job]:
            loads = [(running, partial(run_wrk, running, connections, cores=self.load_cores)) for running in up]
            for _, load in loads:
                self.attempt(partial(load, seconds=WARM_UP_S))
            for round_ in range(rounds):
                for running, load in rotated(loads, round_):
                    timed = partial(load, seconds=self.options.seconds)
                    self.attempt(partial(self.measure, running, CLOSED, connections, timed))

    def open_loop(self, up: Sequence[Running]) -> None:
        for rate in self.options.open:
            for round_ in range(self.options.rounds):
                for running in rotated(up, round_):
                    load = partial(self.arrivals, running, rate, seed=round_)
                    self.attempt(partial(self.measure, running, OPEN, rate, load))

    def arrivals(self, running: Running, rate: int, seed: int) -> Load:
        options = {"port": running.port, "path": running.server.path, "rate": rate, "seed": seed}
        flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        flags += ["--job", OPEN_LOOP_JOB, "--seconds", str(self.options.seconds)]
        return msgspec.convert(python_helper("openloop", *flags, cores=self.load_cores), Load)

    def measure(self, running: Running, loop: str, load_size: int, load: Callable[[], Load]) -> None:
        """Record what a server does under a load; again if other processes disturbed it, keeping the calmest run."""
        attempts: list[Record] = []
        while len(attempts) < ATTEMPTS and all(record.is_disturbed for record in attempts):
            attempts.append(self.observe(running, loop, load_size, load))
        self.records.all.append(min(attempts, key=lambda record: (record.is_disturbed, record.foreign)))

    def observe(self, running: Running, loop: str, load_size: int, load: Callable[[], Load]) -> Record:
        """Put one load on a running server and see what it does meanwhile."""
        running.check_answer()
        pids, front = running.pids(), running.front()
        batches, rows = running.batches()
        cpu_s, others_s, began = proc.cpu_s(pids), others_cpu_s(pids), time.perf_counter()
        seen = load()
        wall_s = time.perf_counter() - began
        cpu_s, others_s = proc.cpu_s(pids) - cpu_s, others_cpu_s(pids) - others_s
        batches, rows = (after - before for after, before in zip(running.batches(), (batches, rows), strict=True))
        memory = {pid: proc.pss_mib(pid) for pid in pids}
        running.check_answer()
        record = Record(
            server=running.server.name,
            job=running.job,
            loop=loop,
            load=load_size,
            rate=seen.requests / seen.duration_s,
            p50_ms=seen.p50_ms,
            p99_ms=seen.p99_ms,
            mean_ms=seen.mean_ms,
            errors=seen.errors,
            cpu_us=1e6 * cpu_s / max(rows, 1),
            batch=rows / max(batches, 1),
            pss_mib=sum(memory.values()),
            front_pss_mib=memory[front],
            start_s=running.start_s,
            stall_ms=seen.stall_ms,
            foreign=max(0.0, others_s) / wall_s,
        )
        say(
            f"{record.job:10} {loop:6} {load_size:5} {record.server:18} {record.rate:9,.0f}/s  "
            f"mean {record.mean_ms:7.2f}  p99 {record.p99_ms:7.2f} ms  {record.cpu_us:7.1f} us  "
            f"batch {record.batch:4.1f}  foreign {record.foreign:.2f}"
        )
        return record

    def write(self, began: float, steal: float) -> None:
        cores = "server on core 0, load on core 1" if self.pinned else "both cores for server and load"
        foreign = max((record.foreign for record in self.records.all), default=0.0)
        facts = {
            "date": time.strftime("%d %b %Y %H:%M", time.localtime(began)),
            **report.machine(),
            "rounds": f"{self.options.rounds}, {self.options.seconds} s a run after {WARM_UP_S} s of warm-up, {cores}; "
            "all servers of a job are up together and take turns",
            "disturbance": f"steal {steal:.1%}; other processes took at most {foreign:.2f} of a core in a run "
            f"(~ marks figures with a run above {FOREIGN_LIMIT})",
        }
        report.write(self.options.output, self.records, facts)


def others_cpu_s(pids: list[int]) -> float:
    """CPU time of everything but a server's processes and our own children that have ended, the load generators."""
    ours = resource.getrusage(resource.RUSAGE_CHILDREN)
    return proc.machine_times_s()[0] - proc.cpu_s(pids) - ours.ru_utime - ours.ru_stime


def rotated(up: Sequence[T], by: int) -> list[T]:
    by %= max(len(up), 1)
    return [*up[by:], *up[:by]]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parse_options() -> argparse.Namespace:
    names = {server.name: server for server in SERVERS}
    parser = argparse.ArgumentParser(prog="benchmarks/run.sh", description=__doc__)
    parser.add_argument("--jobs", type=chosen(dict.fromkeys(JOBS)), default=list(JOBS), help=f"of {','.join(JOBS)}")
    parser.add_argument("--servers", type=chosen(names), default=list(names), help=f"of {','.join(names)}")
    parser.add_argument(
        "--connections", type=integers, help="closed loop, for every job; default: those of the criteria"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2, help="a run")
    parser.add_argument("--open", type=integers, help="open loop, requests a second; empty for none")
    parser.add_argument("--quick", action="store_true", help="1 round, 1 s, 64 connections, no open loop")
    parser.add_argument("--both-cores", action="store_true", help="pin nothing")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    options = parser.parse_args()
    options.servers = [names[name] for name in options.servers]
    if options.quick:
        options.rounds, options.seconds = 1, 1
        options.connections = options.connections or [64]
    if options.open is None:
        options.open = [] if options.quick else list(OPEN_RATES)
    return options


def chosen(names: dict) -> Callable[[str], list[str]]:
    """Parse a comma-separated choice of names."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in names]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(names)}")
        return text.split(",")

    return parse


def integers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def main() -> None:
    options = parse_options()
    bench = Bench(options)
    bench.run()
    print(f"written: {options.output}")
    for criterion in criteria(bench.records):
        if criterion.measured is not None:
            print(f"{criterion.verdict:8} {criterion.measured:8.2f} ({criterion.bar:g})  {criterion.text}")


if __name__ == "__main__":
    main()
