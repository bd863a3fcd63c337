# SPDX-License-Identifier: Apache-2.0
"""The folder of a node of a deployment: what its node process needs, and how others find that process.

    /tmp/forebay-cluster-UID/DEPLOYMENT/NODE/
        node.json    who runs: pid, its start time, the boot of the machine
        secret       what processes of the deployment prove to each other
        control      the socket of the node process
        state        the newest state of the deployment that the node was told
        ray          where the head of Ray is that had the last host
        code/        copies of the project, by digest
        log          what the node process and its children print

Only this user can enter it. The machine's boot and the start time of the process tell a node process from another one
that has its pid by now. Nothing here needs Ray.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from forebay.cluster.deployment import ClusterState, read_state
from forebay.errors import ConfigError, ForebayError
from forebay.repository import own_folder
from forebay.types.first_use import known
from forebay.workers.processes.process_life import birth_of

SECRET: Final = "secret"  # noqa: S105 - the name of a file
STATE: Final = "state"
CONTROL: Final = "control"
LOG: Final = "log"
RAY: Final = "ray"
CODE: Final = "code"
_IDENTITY: Final = "node.json"
_HOST: Final = "host.lock"
_MAX_NAME: Final = 30
"""Longest name of a node, so that the path of its socket stays shorter than the kernel's limit."""
_POLL_S: Final = 0.05


class Identity(msgspec.Struct, frozen=True):
    """A node process.

    Attributes:
        pid: Its process.
        started: When that began, as `birth_of` tells.
        boot: The boot of the machine.
    """

    pid: int
    started: int
    boot: str

    @classmethod
    def own(cls) -> Identity:
        """Return that of this process."""
        return cls(os.getpid(), birth_of(os.getpid()) or 0, _boot())

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs."""
        return self.boot == _boot() and birth_of(self.pid) == self.started


class NodeFolder:
    """The folder of a node.

    Attributes:
        path: The folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._host_lock: int | None = None

    @property
    def name(self) -> str:
        """What the node is called."""
        return self.path.name

    @property
    def deployment(self) -> str:
        """What the deployment is called."""
        return self.path.parent.name

    @property
    def control(self) -> Path:
        """The socket of the node process."""
        return self.path / CONTROL

    @property
    def identity(self) -> Identity | None:
        """The node process, if it runs."""
        try:
            found = msgspec.json.decode((self.path / _IDENTITY).read_bytes(), type=known(Identity))
        except (OSError, msgspec.DecodeError):
            return None
        return found if found.is_alive else None

    @property
    def secret(self) -> bytes:
        """The secret of the deployment; raises a `ConfigError` if the folder has none that can be read."""
        try:
            return (self.path / SECRET).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{self.path / SECRET} cannot be read: {error.strerror}") from error

    @property
    def state(self) -> ClusterState | None:
        """The state of the deployment that the node was told last."""
        with contextlib.suppress(OSError, ForebayError):
            return read_state((self.path / STATE).read_bytes())
        return None

    def prepare(self, secret: bytes) -> None:
        """Make the folder, and write down the secret.

        Raises:
            OSError: That cannot be done, or the folder belongs to another user.
        """
        for folder in (self.path.parent.parent, self.path.parent, self.path, self.path / CODE):
            own_folder.make(folder)
            own_folder.close_to_others(folder)
            folder.chmod(0o700)
        self.write(SECRET, secret)

    def write(self, name: str, data: bytes) -> None:
        """Put a file into the folder, at once and for this user only; raises an `OSError` if that cannot be done."""
        before = self.path / f".{name}-{secrets.token_hex(4)}"
        descriptor = os.open(before, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            before.replace(self.path / name)
        except BaseException:
            before.unlink(missing_ok=True)
            raise

    def enlist(self) -> None:
        """Write down that this process is the node process; raises an `OSError` if that cannot be done."""
        self.write(_IDENTITY, msgspec.json.encode(Identity.own()))

    def take_host(self) -> bool:
        """Become the only host of this node, as long as this process lives; False if another one is.

        Raises:
            OSError: The folder cannot be used.
        """
        descriptor = os.open(self.path / _HOST, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self._host_lock = descriptor
        return True

    @property
    def has_host(self) -> bool:
        """Whether a host that is alive has the node."""
        try:
            descriptor = os.open(self.path / _HOST, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
        return False

    def end(self, wait_s: float) -> bool:
        """Tell the node process to end, kill it once the time is over; returns whether it has ended."""
        until = time.monotonic() + wait_s
        for number in (signal.SIGTERM, signal.SIGKILL):
            identity = self.identity
            if identity is None:
                return True
            with contextlib.suppress(ProcessLookupError):
                os.kill(identity.pid, number)
            while identity.is_alive and time.monotonic() < until:
                time.sleep(_POLL_S)
            until += 2.0
        return self.identity is None

    def remove(self) -> None:
        """Remove the folder, and that of the deployment if this was its last node."""
        shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def root() -> Path:
    """Return the folder that has the deployments of this user."""
    return Path(f"/tmp/forebay-cluster-{os.geteuid()}")  # noqa: S108 - own_folder refuses what another user has made


def folder_with(path: Path) -> NodeFolder | None:
    """Return the folder of a node that has a file."""
    folder = path.absolute().parent
    return NodeFolder(folder) if folder.parent.parent == root() else None


def folder_of(deployment: str, node: str) -> NodeFolder:
    """Return the folder of a node."""
    return NodeFolder(root() / deployment / re.sub(r"[^A-Za-z0-9.-]", "-", node)[:_MAX_NAME].strip(".-"))


def folders(deployment: str | None = None) -> Iterator[NodeFolder]:
    """Yield the folders on this machine, of one deployment or of all."""
    place = root()
    with contextlib.suppress(FileNotFoundError):
        if place.lstat().st_uid != os.geteuid():
            raise ConfigError(f"{place} belongs to another user; move it away")
        for path in sorted(place.glob(f"{deployment or '*'}/*")):
            if (path / _HOST).exists() or (path / _IDENTITY).exists():
                yield NodeFolder(path)


def claim(deployment: str, node: str, secret: bytes) -> NodeFolder:
    """Return the folder of a node that no other host has; several nodes on one machine get names with numbers.

    Raises:
        OSError: No folder can be made.
    """
    number = 1
    while True:
        suffix = "" if number == 1 else f"-{number}"
        folder = folder_of(deployment, node[: _MAX_NAME - len(suffix)] + suffix)
        folder.prepare(secret)
        if folder.take_host():
            return folder
        number += 1


def _boot() -> str:
    """Return which boot this is; empty where there is no /proc, and processes are told apart by the date."""
    with contextlib.suppress(FileNotFoundError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""
