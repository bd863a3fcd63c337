# SPDX-License-Identifier: Apache-2.0
"""How many processors this process can use at once: those it may run on, and no more than its container is granted.

A container with a limit of two processors on a machine of 64 sees 64 of them. Threads for all of these use up its time
at once, and then all of them stand until the kernel grants more (`cpu.max` in Linux's control groups of version 2,
`cpu.cfs_quota_us` in those of version 1).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path("/")


def allowed_cores() -> set[int]:
    """Return the processors that this process may run on; all of the machine's where the system ties none to any."""
    ask: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return ask(0) if ask is not None else set(range(os.cpu_count() or 1))


def usable_cores(root: Path = ROOT) -> int:
    """Return how many processors can be used at once, at least one; `proc` and `sys` are in `root`."""
    allowed = len(allowed_cores())
    granted = min((share for group in _groups(root) if (share := _granted(group)) is not None), default=allowed)
    return max(min(allowed, math.ceil(granted)), 1)


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of all control groups that bound this process: a group's bounds hold for those in it."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        for mount in (mounts / controllers, mounts / "cpu") if controllers else (mounts, mounts / "unified"):
            group = mount / path.strip("/")
            yield from (group, *(outer for outer in group.parents if outer.is_relative_to(mount)))


def _granted(group: Path) -> float | None:
    """Return how many processors' time a group is granted; None if it is not bounded, or not there."""
    try:
        if (both := group / "cpu.max").exists():
            quota, period = both.read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        granted = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None  # "max" is not a number
    return granted if granted > 0 else None
