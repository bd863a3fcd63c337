# SPDX-License-Identifier: Apache-2.0
"""Which pipeline servers of this user run: one small file each in the user's state folder, so that they can be stopped.

A server is identified by its process id and the moment that process began, so that a process which was given the same
id later is never signalled. Linux holds the process by a descriptor from the check to the signal; it cannot change in
between.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
from pathlib import Path

import msgspec

from forebay.types.first_use import known
from forebay.workers.processes.process_life import birth_of, open_end, send_signal


class Running(msgspec.Struct, frozen=True):
    """A server.

    Attributes:
        born: When that began, as `birth_of` tells.
    """

    pid: int
    born: int
    ports: tuple[int, ...]
    script: str


def state_folder() -> Path:
    """Return the folder of the files; it may not exist yet.

    Raises:
        RuntimeError: If this user has no home.
    """
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "forebay" / "pipeline"


def announce(ports: tuple[int, ...], script: str) -> Path:
    """Note in a file that this process serves; returns the file, which is to be removed when the process ends.

    Files of others that were killed are removed.

    Raises:
        OSError: If that is not possible.
        RuntimeError: If this user has no home.
    """
    folder = state_folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    servers()
    pid = os.getpid()
    path = folder / f"{pid}.json"
    try:
        path.write_bytes(msgspec.json.encode(Running(pid, birth_of(pid) or 0, ports, script)))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path


def servers() -> list[Running]:
    """Return the servers that run; files of others that ended without removing theirs are removed."""
    found: list[Running] = []
    for path in sorted(state_folder().glob("*.json")):
        try:
            server = msgspec.json.decode(path.read_bytes(), type=known(Running))
        except OSError:
            continue
        except msgspec.MsgspecError:
            if path.stem.isdecimal() and birth_of(int(path.stem)) is None:
                path.unlink(missing_ok=True)  # it was killed while it wrote this
            continue
        if birth_of(server.pid) == server.born:
            found.append(server)
        else:
            path.unlink(missing_ok=True)
    return found


def stop(server: Running, number: signal.Signals, wait_s: float) -> bool:
    """Signal a server and wait for its end; returns whether it has ended."""
    try:
        end = open_end(server.pid)
    except ProcessLookupError:
        return True
    try:
        if birth_of(server.pid) != server.born:
            return True
        with contextlib.suppress(ProcessLookupError):
            send_signal(end, server.pid, number)
        ended, _, _ = select.select([end], [], [], wait_s)
        return bool(ended)
    finally:
        os.close(end)
