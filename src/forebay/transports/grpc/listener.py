# SPDX-License-Identifier: Apache-2.0
"""Owns a gRPC port: binds it, hands each connection to its protocol, and closes without losing a call."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from forebay.errors import ConfigError
from forebay.transports.binding import OWN, ListeningPlace
from forebay.transports.grpc.connection import GrpcConnection
from forebay.transports.grpc.heads import HeadReader
from forebay.transports.grpc.methods import by_path
from forebay.transports.grpc.port import GrpcPort
from forebay.transports.tls_door import TlsDoor, open_door, wait_closed
from forebay.workers.wire.tls_files import server_tls

if TYPE_CHECKING:
    from forebay.server.byte_budget import ByteBudget
    from forebay.server.config import GrpcConfig
    from forebay.transports.acceptor import Acceptor
    from forebay.transports.grpc.forwarding import GrpcForwarding
from forebay.transports.grpc.service import GrpcService

CLOSING_S: Final = 1.0
"""How long the last answers, and methods that were called off, may take to leave."""
WARNING_S: Final = 1.0
"""While draining, how long clients have to learn that the server is leaving: calls they send meanwhile are answered."""
_PACKAGES: Final = {"google": "protobuf", "grpc": "grpcio"}
"""What packages are called that are imported by another name."""


class GrpcListener:
    """A gRPC server on one port, with the standard health and reflection services beside those it is given.

    Attributes:
        address: Host and port, once it is started.
        port: The port that was asked for; 0 for any.
    """

    def __init__(  # noqa: PLR0913 - each is one plain fact about the port
        self,
        config: GrpcConfig,
        services: Sequence[GrpcService],
        is_ready: Callable[[], bool],
        source: str = "",
        is_model_ready: Callable[[str], bool | None] = lambda _: None,
        byte_budget: ByteBudget | None = None,
        *,
        place: ListeningPlace = OWN,
        forwarding: GrpcForwarding | None = None,
    ) -> None:
        """Describe the listener; `start` binds it.

        Args:
            is_ready: What the health service tells: whether calls can be answered now.
            source: What has set the port, for messages; see `why_not`.
            is_model_ready: What it tells of a model; None if there is none of that name.
            byte_budget: What all ports of the server hold together; None if this is the only one.
            place: Where it listens, if not just at the address of `config`; a Unix socket speaks no TLS.
            forwarding: Has another server answer what this one does not; None if there is no such server.
        """
        self.address: tuple[str, int] | None = None
        self.port = config.port
        self._config = config
        self._services = services
        self._is_ready = is_ready
        self._is_model_ready = is_model_ready
        self._source = source
        self._byte_budget = byte_budget
        self._place = place
        self._forwarding = forwarding
        self._health: Any = None
        self._port: GrpcPort | None = None
        self._door: TlsDoor | Acceptor | None = None

    async def start(self) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            ConfigError: If the address cannot be bound, the TLS files cannot be used, or a package is not installed.
        """
        try:
            from forebay.transports.grpc.health import Health
            from forebay.transports.grpc.reflection import Reflection
        except ImportError as error:
            raise not_installed(error) from error
        config = self._config
        self._health = Health([service.full_name for service in self._services], self._is_ready, self._is_model_ready)
        services = [*self._services, self._health.service()]
        if self._forwarding is not None:
            services = [self._forwarding.service(one) for one in services]
        services += Reflection(services).services()
        methods = by_path(services, config.elements)
        heads = HeadReader(methods, config.api_keys, config.max_metadata_bytes, config.max_metadata_fields)
        loop = asyncio.get_running_loop()
        port = GrpcPort(config, heads, loop, self._byte_budget)
        tls = None if self._place.path else server_tls(config.certfile, config.keyfile, protocols=("h2",))
        connect = partial(GrpcConnection, port)
        self._door, self.address = await open_door(port, tls, connect, self._place, self._source)
        self._port = port
        port.sweep()
        return self.address

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more, answer what was sent, end every call within `grace_s` seconds."""
        port, door = self._port, self._door
        if port is None or door is None:
            return
        self._health.stop()
        port.refusals.stop()
        door.close()
        started = time.monotonic()
        try:
            for connection in list(port.connections):
                connection.warn()
            await wait_closed(port, min(WARNING_S, grace_s))
            if isinstance(door, TlsDoor):
                door.abandon()
            for connection in list(port.connections):
                connection.leave()
            await wait_closed(port, max(grace_s - (time.monotonic() - started), 0.0))
        finally:
            for connection in list(port.connections):
                connection.give_up()
            await wait_closed(port, CLOSING_S)
            for connection in list(port.connections):
                connection.abort()
            port.stop()
            if self._forwarding is not None:
                await self._forwarding.close()
        if port.tasks:
            await asyncio.wait(list(port.tasks), timeout=CLOSING_S)


def not_installed(error: ImportError, what: str = "the gRPC port", extra: str = "grpc") -> ConfigError:
    """Return what is said if a package is not there, by the name that pip knows."""
    package = _PACKAGES.get((error.name or "").partition(".")[0], error.name)
    return ConfigError(f"{what} needs {package}, which is not installed: pip install 'forebay[{extra}]'")
