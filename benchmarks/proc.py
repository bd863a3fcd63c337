# SPDX-License-Identifier: Apache-2.0
"""What the kernel says about a process and its children; Linux only."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def stat_fields(path: Path) -> list[str]:
    """Split a `stat` file after the process name, which may itself hold spaces; field 0 is the state."""
    return path.read_text().rpartition(")")[2].split()


def tree(root: int) -> list[int]:
    """List a process and all its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                children[int(stat_fields(folder / "stat")[1])].append(int(folder.name))
            except (FileNotFoundError, ProcessLookupError):
                pass  # it ended meanwhile
    found = [root]
    for pid in found:
        found.extend(children[pid])
    return found


def cpu_s(pids: Iterable[int]) -> float:
    return sum(sum(map(int, stat_fields(Path(f"/proc/{pid}/stat"))[11:13])) for pid in pids) * TICK_S


def pss_mib(pid: int) -> float:
    """Memory of a process, pages it shares counted in parts."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def front(pids: Iterable[int], port: int) -> int:
    """Find the process that serves a port: of those that hold its socket the one that worked most."""
    wanted = f"socket:[{listening_inode(port)}]"
    holders = [pid for pid in pids if wanted in links(Path(f"/proc/{pid}/fd"))]
    return max(holders, key=lambda pid: cpu_s([pid]))


def listening_inode(port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
            return fields[9]
    raise LookupError(f"nobody listens on port {port}")


def links(folder: Path) -> set[str]:
    found = set()
    for link in folder.iterdir():
        try:
            found.add(str(link.readlink()))
        except FileNotFoundError:
            pass  # closed meanwhile
    return found


def machine_times_s() -> tuple[float, float]:
    """Busy and stolen seconds of all cores since boot."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq) * TICK_S, steal * TICK_S
