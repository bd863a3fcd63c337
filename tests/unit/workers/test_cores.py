# SPDX-License-Identifier: Apache-2.0
"""How many processors a process can use: what its control groups grant it counts like what it is tied to."""

import os
from pathlib import Path

import pytest

from forebay.workers.processes.cores import allowed_cores, usable_cores

EIGHT = set(range(8))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of eight processors with these files."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: EIGHT, raising=False)

    def make(**files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def second(quota, path="", mount="sys/fs/cgroup"):
    return {f"{mount}/{path}cpu.max": f"{quota} 100000\n"}


def first(quota, path="", mount="sys/fs/cgroup/cpu"):
    return {f"{mount}/{path}cpu.cfs_quota_us": f"{quota}\n", f"{mount}/{path}cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    "groups, files, cores",
    [
        ("0::/\n", second("max"), 8),
        ("0::/\n", second(200000), 2),
        ("0::/\n", second(150000), 2),  # a part of one is time as well
        ("0::/\n", second(5000), 1),
        ("0::/\n", second(9900000), 8),
        ("0::/a/b\n", second("max", "a/b/") | second(300000, "a/"), 3),  # what holds for those around it, holds for it
        ("0::/a\n", second(100000, "other/"), 8),
        ("0::/a\n", second(400000, "a/", "sys/fs/cgroup/unified"), 4),
        ("2:cpu,cpuacct:/a\n0::/\n", first(200000, "a/"), 2),
        ("2:cpu,cpuacct:/a\n0::/\n", first(200000, "a/", "sys/fs/cgroup/cpu,cpuacct"), 2),
        ("2:cpu:/docker/12ab\n", first(200000), 2),  # a container that sees its own group as the root
        ("2:cpu:/\n", first(-1), 8),
        ("2:cpuset:/\n", first(200000), 8),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "what?\n"}, 8),
    ],
)
def test_no_more_are_used_than_are_granted(machine, groups, files, cores):
    assert usable_cores(machine(**{"proc/self/cgroup": groups}, **files)) == cores


def test_a_system_without_control_groups_has_those_it_may_run_on(machine):
    assert usable_cores(machine()) == 8


def test_this_machine_has_one_at_least():
    assert 1 <= usable_cores() <= len(allowed_cores())


def test_a_system_that_ties_processes_to_no_processors_has_all_of_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert allowed_cores() == EIGHT
    assert usable_cores(Path("/nowhere")) == 8
