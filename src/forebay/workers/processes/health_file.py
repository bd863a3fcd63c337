# SPDX-License-Identifier: Apache-2.0
"""The health of a worker as a file, for a supervisor that can only look: the probes of Kubernetes.

The worker is ready while the file exists: its model is loaded, and it is attached to a server. While it is well it
touches the file every second. A file that stays and is not touched any more is that of a worker that is stuck: no
thread of its process runs, or a slot goes on with a batch long after the server has hung up. Nobody but a supervisor
can help then, by a restart.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from forebay.errors import ConfigError
from forebay.workers.wire.address import HALF_CLOSED

BEAT_S: Final = 1.0
STUCK_S: Final = 30.0
"""How long a slot may go on with a batch after the server has hung up."""
_HUNG_UP: Final = HALF_CLOSED | select.POLLHUP | select.POLLERR | select.POLLNVAL


class HealthFile:
    """The file of one worker."""

    def __init__(self, path: str) -> None:
        """Remove what a predecessor has left there; raises a `ConfigError` if no file can be made there."""
        self._path = Path(path)
        self._deserted_at: dict[int, float] = {}
        try:
            self._path.touch()
            self._path.unlink()
        except OSError as error:
            raise ConfigError(f"--health-file: {path} cannot be made: {error.strerror}") from error

    def tell(self, connections: Iterable[int], now: float | None = None) -> None:
        """Say how the worker is.

        Args:
            connections: The descriptors of its connections to the server.
            now: The time, by the monotonic clock.
        """
        now = time.monotonic() if now is None else now
        found = {one: is_hung_up(one) for one in connections if one >= 0}  # else it is closed by now
        deserted = [one for one, is_over in found.items() if is_over]
        self._deserted_at = {one: self._deserted_at.get(one, now) for one in deserted}
        if any(now - since > STUCK_S for since in self._deserted_at.values()):
            return
        with contextlib.suppress(OSError):  # a full disk: the supervisor sees an old file
            if len(deserted) < len(found):
                self._path.touch()
            elif not deserted:
                self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def is_hung_up(descriptor: int) -> bool:
    """Tell whether the other side of a connection is gone, without reading from it."""
    poll = select.poll()
    poll.register(descriptor, HALF_CLOSED)
    return any(events & _HUNG_UP for _, events in poll.poll(0))
