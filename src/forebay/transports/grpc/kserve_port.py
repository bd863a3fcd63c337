# SPDX-License-Identifier: Apache-2.0
"""A gRPC port for an app, beside its HTTP one; gRPC itself is imported when it is opened."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from forebay.server.config import GrpcConfig, HttpConfig, grpc_like
from forebay.transports.binding import OWN, ListeningPlace
from forebay.transports.grpc.listener import GrpcListener, not_installed

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.transports.grpc.forwarding import GrpcForwarding

log = logging.getLogger("forebay")


class OwnerAt(msgspec.Struct, frozen=True):
    """The server that has what a front has not.

    Attributes:
        path: Its socket.
        grace_s: How long calls wait for it while it is away.
        lends: Whether it loads models when they are asked for, so that it is to be asked always.
    """

    path: str
    grace_s: float
    lends: bool


class KServePort:
    """Answers the KServe v2 protocol, and TensorFlow Serving's."""

    def __init__(
        self, app: App, http: HttpConfig, grpc: GrpcConfig, place: ListeningPlace = OWN, owner: OwnerAt | None = None
    ) -> None:
        """Describe the port; `start` binds it.

        Args:
            http: The HTTP port, which says all that is not said of this one.
            place: Where it listens, if not just at its address.
            owner: The server that answers what this one does not; None if this one has all.
        """
        self._app = app
        self._place = place
        self._owner = owner
        self._config = grpc_like(http, grpc)
        self._is_managed = bool(http.api_keys) if http.manage is None else http.manage
        self._listener: GrpcListener | None = None

    async def start(self) -> tuple[str, int]:
        """Bind and accept; returns the address.

        Raises:
            ConfigError: If the address cannot be bound, the TLS files cannot be used, or a package is not installed.
        """
        try:
            from forebay.transports.grpc.kserve import KServe
            from forebay.transports.grpc.tfserving import TfServing
        except ImportError as error:
            raise not_installed(error) from error
        kserve = KServe(self._app, is_managed=self._is_managed)
        services = [kserve.service(), *TfServing(self._app, is_managed=self._is_managed).services()]
        is_ready = lambda: not self._app.problems()  # noqa: E731
        self._listener = GrpcListener(
            self._config,
            services,
            is_ready,
            is_model_ready=kserve.is_model_ready,
            byte_budget=self._app.byte_budget,
            place=self._place,
            forwarding=self._forwarding(),
        )
        host, port = await self._listener.start()
        if self._place == OWN:
            log.info("gRPC at %s:%d", f"[{host}]" if ":" in host else host, port)
        return host, port

    def _forwarding(self) -> GrpcForwarding | None:
        if self._owner is None:
            return None
        from forebay.transports.grpc.forwarding import HANDED_ON, LIVE, GrpcForwarding

        owner = self._owner
        return GrpcForwarding(owner.path, owner.grace_s, LIVE if owner.lends else HANDED_ON)

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more and answer what was sent."""
        if self._listener is not None:
            await self._listener.stop(grace_s)
