# SPDX-License-Identifier: Apache-2.0
"""A gRPC port for an app, beside its HTTP one; gRPC itself is imported when it is opened."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from forebay.server.config import grpc_like
from forebay.transports.grpc.listener import GrpcListener, not_installed

if TYPE_CHECKING:
    from forebay.server.app import App
    from forebay.server.config import GrpcConfig, HttpConfig

log = logging.getLogger("forebay")


class KServePort:
    """Answers the KServe v2 protocol, and TensorFlow Serving's."""

    def __init__(self, app: App, http: HttpConfig, grpc: GrpcConfig) -> None:
        """Describe the port; `start` binds it.

        Args:
            app: What is served.
            http: The HTTP port, which says all that is not said of this one.
            grpc: What is said.
        """
        self._app = app
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
        )
        host, port = await self._listener.start()
        log.info("gRPC at %s:%d", f"[{host}]" if ":" in host else host, port)
        return host, port

    async def stop(self, grace_s: float) -> None:
        """Accept nothing more and answer what was sent."""
        if self._listener is not None:
            await self._listener.stop(grace_s)
