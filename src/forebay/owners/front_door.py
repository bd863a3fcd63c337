# SPDX-License-Identifier: Apache-2.0
"""The private door of an owner: the fronts of the same node process dial in at a Unix socket, and nobody else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forebay.errors import InvalidRequest
from forebay.owners.callers import Callers
from forebay.server.links import Links
from forebay.workers.wire import frames
from forebay.workers.wire.address import UnixAddress
from forebay.workers.wire.worker_listener import DoorWords, VisitorLimits, WorkerListener

if TYPE_CHECKING:
    from forebay.owners.caller_link import CallerLink
    from forebay.server.app import App


_PRIVATE = DoorWords("fronts", is_private=True)


class FrontDoor(Links):
    """Lets fronts in once the models of an app are up; opened and closed with it."""

    def __init__(self, app: App, path: str, max_frame_bytes: int, max_elements: int) -> None:
        """Describe the door."""
        self._callers = Callers(app, max_frame_bytes, max_elements, is_private=True)
        limits = VisitorLimits(frame_bytes=max_frame_bytes)
        self._listener = WorkerListener(UnixAddress(path), native=self._receive, limits=limits, words=_PRIVATE)

    async def start(self) -> None:
        """Open the door; raises a `ConfigError` if the socket cannot be made."""
        await self._callers.start()
        await self._listener.start()

    def leave(self) -> None:
        """Take no further requests."""
        self._listener.close()
        self._callers.leave()

    def stop(self) -> None:
        """Hang up."""
        self._callers.stop()
        self._listener.stop()

    def _receive(self, about: Mapping[str, Any]) -> CallerLink:
        if about.get("role") != frames.CALLER:
            raise InvalidRequest("only fronts of this server are let in here; workers attach at --attach")
        return self._callers.receive(about)
