# SPDX-License-Identifier: Apache-2.0
"""Processes that tests end by their ids, which they were told and which may be somebody else's by then.

A test run starts enough processes and threads for all ids to come again within minutes, and the id of a thread will do
to kill its whole process: that of another test, or the one that runs tests.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

from tests.waiting import eventually

from forebay.workers.processes.process_life import birth_of

_TICKS = os.sysconf("SC_CLK_TCK")
_SLACK_S = 1.0
_HAS_PROC = Path("/proc/self").exists()


def kill_if_noted(pid, noted_at):
    """Kills a process that was there at a time of `time.time`, and nobody who has its id by now."""
    if not _HAS_PROC:
        born = birth_of(pid)
        if born is not None and born < noted_at + _SLACK_S:
            os.kill(pid, signal.SIGKILL)
        return
    with contextlib.suppress(OSError):  # it has ended; of a thread that is no process there is no such descriptor
        process = os.pidfd_open(pid)
        try:
            ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            began_at = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / _TICKS
            if began_at < noted_at + _SLACK_S:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def freeze(pid):
    """Stops a process, and waits until no thread of it takes anything more: the signal alone only asks for that."""
    os.kill(pid, signal.SIGSTOP)
    if not _HAS_PROC:
        state = ["/bin/ps", "-o", "stat=", "-p", str(pid)]
        eventually(lambda: subprocess.run(state, capture_output=True, check=True).stdout.startswith(b"T"))
        return
    states = Path(f"/proc/{pid}/task").glob
    eventually(lambda: {one.read_text().rpartition(")")[2].split()[0] for one in states("*/stat")} == {"T"})


def start_peak(pid):
    """Forget the most memory that a process has had; returns how much it has now."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return peak_bytes(pid)


def peak_bytes(pid):
    """The most memory that a process has had since then."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
