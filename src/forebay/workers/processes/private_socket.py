# SPDX-License-Identifier: Apache-2.0
"""Where the processes that this one starts dial in: a unix socket that is in no folder.

It is bound in a private folder and loses its name at once. Whoever may look into this process, that is the same user,
can still reach it as one of the process's open files. So nothing is left behind, however the process ends. Where the
kernel does not let them look, as after a change of the user, or has no such files, the folder stays until `close`, and
a shell removes it if the process is killed before.
"""

from __future__ import annotations

import os
import socket
from typing import Final

from forebay.workers.processes.private_folder import PrivateFolder

BACKLOG = 128
_PATH: Final[int] = getattr(os, "O_PATH", 0)
"""Opens a file only to name it; there wherever /proc is."""


class PrivateSocket:
    """A socket that listens.

    Attributes:
        path: Where it is reached.
    """

    def __init__(self) -> None:
        """Make it; raises an `OSError` if there are too many open files, or there is no room for a folder."""
        self._descriptor: int | None = None
        self._folder = PrivateFolder()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.path = str(self._folder.path / "socket")
        try:
            self._listener.bind(self.path)
            self._lose_name()
            self._listener.listen(BACKLOG)
        except BaseException:
            self.close()
            raise

    def take_listener(self) -> socket.socket:
        """Return the socket that listens; it belongs to the caller from then on."""
        taken = socket.socket(fileno=self._listener.detach())
        taken.set_inheritable(False)
        return taken

    def close(self) -> None:
        """Leave nothing behind; the user of the listener must have closed it first."""
        self._listener.close()
        self._folder.remove()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _lose_name(self) -> None:
        nameless = None
        if _is_open_to_its_user():
            self._descriptor = os.open(self.path, _PATH | os.O_CLOEXEC)
            nameless = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        if nameless is None or not _leads_to_a_socket(nameless):
            self._folder.guard()
            return
        self.path = nameless
        self._folder.remove()


def _is_open_to_its_user() -> bool:
    """Whether other processes of this user may look into this one; after a change of the user they may not."""
    try:
        return os.stat(f"/proc/{os.getpid()}").st_uid == os.geteuid()  # noqa: PTH116
    except OSError:
        return False


def _leads_to_a_socket(path: str) -> bool:
    """Try a path that leads to a socket which does not listen yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
