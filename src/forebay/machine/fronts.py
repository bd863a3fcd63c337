# SPDX-License-Identifier: Apache-2.0
"""`--fronts N`: one server as an owner, which has queues and workers, and N fronts that share its ports."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from typing import Final

import msgspec

from forebay.machine.children import Child, ChildState
from forebay.machine.lifeline import BETWEEN_LINES
from forebay.machine.node_part import Part
from forebay.machine.node_process import NodeProcess
from forebay.transports.binding import reserved
from forebay.transports.signals import LAST_S
from forebay.workers.processes.private_folder import PrivateFolder

OWNER: Final = "owner"
"""What the child is called that has the queues."""


class DividedServer(msgspec.Struct, frozen=True, kw_only=True):
    """A server that is to be several processes.

    Attributes:
        arguments: Of the command that serves all of it: each child runs the same, and is told which part it is.
        fronts: How many there are.
        host: The address that they share.
        http_port: Their port; 0 takes a free one.
        grpc_port: The same for gRPC; None without one.
        drain_s: Time that open requests have to end.
        hang_s: How long a part may not answer before it is replaced; 0 for ever.
        lends: Whether models are loaded when they are asked for.
    """

    arguments: Sequence[str]
    fronts: int
    host: str
    http_port: int
    grpc_port: int | None
    drain_s: float
    hang_s: float
    lends: bool

    def serve(self, ready: Callable[[Part, Sequence[str]], None]) -> int:
        """Serve until a signal; returns the exit status.

        Args:
            ready: Called in a thread with the ports and what the owner says of its models, once all is up.

        Raises:
            ConfigError: If a port cannot be had.
            ChildFailed: If a child cannot be started, and has not said why.
        """
        folder = PrivateFolder()
        folder.guard()
        try:
            with self._reserved(str(folder.path)) as part:
                return self._run(part, ready)
        finally:
            folder.remove()

    def plan(self, part: Part) -> list[Child]:
        """Return the owner and its fronts, which begin once it is ready and end before it."""
        command = (sys.executable, *(() if "" in sys.path else ("-P",)), "-m", "forebay", *self.arguments)
        end_s = self.drain_s + 2 * LAST_S  # they keep to their own time first
        parts = [msgspec.structs.replace(part, number=number) for number in range(part.fronts + 1)]
        return [
            Child(
                name=OWNER if one.is_owner else f"front {one.number}",
                argv=command,
                env=one.told(),
                wave=0 if one.is_owner else 1,
                end_s=end_s,
                hang_s=self.hang_s,
            )
            for one in parts
        ]

    def _run(self, part: Part, ready: Callable[[Part, Sequence[str]], None]) -> int:
        node, plan = NodeProcess(), self.plan(part)

        def reload() -> None:
            for one in plan:
                node.signal(one.name, signal.SIGHUP)

        def all_ready(states: Sequence[ChildState]) -> None:
            said = next(one.said for one in states if one.name == OWNER)
            ready(part, said.split(BETWEEN_LINES) if said else [])

        return node.run(plan, ready=all_ready, reload=reload)

    @contextlib.contextmanager
    def _reserved(self, folder: str) -> Generator[Part]:
        """Keep the ports from others while fronts come and go, and say which ones they are.

        Raises:
            ConfigError: If one cannot be had.
        """
        with contextlib.ExitStack() as stack:

            def reserve(port: int) -> int:
                sockets = reserved(self.host, port)
                for one in sockets:
                    stack.enter_context(one)
                return int(sockets[0].getsockname()[1])

            http_port = reserve(self.http_port)
            grpc_port = None if self.grpc_port is None else reserve(self.grpc_port)
            yield Part(folder=folder, fronts=self.fronts, http_port=http_port, grpc_port=grpc_port, lends=self.lends)
